"""Which rank of a learner the others wait for: from step to step, and when the learner hangs.

At the end of each step all ranks wait for each other in one call, and at the next end each says how long it waited.
Whoever came last waited least, so no clocks are compared. In a hang every rank has told what it does, and a sign that
stands still is of a process that is stopped, or of a host that is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

STEPS = 16  # of the mean


class RankDelays:
    """By how much each of ``size`` ranks comes after the first to the ends of steps."""

    def __init__(self, size: int) -> None:
        self._means = [0.0] * size

    def add_step(self, waits: Sequence[float]) -> None:
        """Count a step, at whose end each rank waited so many seconds."""
        longest = max(waits)
        self._means = [mean + (longest - wait - mean) / STEPS for mean, wait in zip(self._means, waits, strict=True)]

    @property
    def slowest(self) -> tuple[int, float]:
        """The rank that comes last, and how many seconds after the first, the mean of the last steps."""
        rank = max(range(len(self._means)), key=self._means.__getitem__)
        return rank, self._means[rank]


@dataclass(frozen=True, slots=True)
class RankSign:
    """What a rank does. ``command``: the number of the leader's last that it has. ``waits``: in a call of this library,
    for other ranks. ``place``: the line at which its training thread is."""

    command: int
    waits: bool
    place: str


def describe_hang(signs: Mapping[int, RankSign | None]) -> str:
    """Who is waited for, in words. ``signs``: of each rank; None: it gives none any more.

    Behind is whoever has not heard a command that others have, computes where others wait for it in this library, or
    stands elsewhere than most: they may be in a collective of the program.
    """
    known = {rank: sign for rank, sign in signs.items() if sign is not None}
    if len(known) < len(signs):
        silent = _name(rank for rank in signs if rank not in known)
        return f"{silent} of this learner gives no sign: its process is stopped, or its host does not answer"
    places = Counter(sign.place for sign in known.values()).most_common()
    listed = "; ".join(f"{_name(r for r in known if known[r].place == place)} at {place}" for place, _ in places)
    newest, (common, count) = max(sign.command for sign in known.values()), places[0]
    for behind in (
        [rank for rank, sign in known.items() if sign.command < newest],
        [rank for rank, sign in known.items() if not sign.waits],
        [rank for rank, sign in known.items() if sign.place != common and 2 * count > len(known)],
    ):
        if 0 < len(behind) < len(known):
            return f"the others wait for {_name(behind)}: {listed}"
    return f"no rank is known to be behind: {listed}"


def _name(ranks: Iterable[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
