"""Which places were refused for good lately, and why: the status document's ``refusals``.

A learner that is refused ends, and nobody can ask it any more. Seen from the syncer, only nobody comes; so
the last refusal of each place is kept until a process of that place is admitted. It is not durable: a
refused process comes again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from diloco_protocol.documents import RefusalRow
from diloco_syncer.core import events as ev

MOST = 64
"""Places that are remembered: those heard of last."""


@dataclass(frozen=True, slots=True)
class _RefusedPlace:
    reason: str
    message: str
    fields: tuple[str, ...]
    at: float  # the core's clock


class RecentRefusals:
    """The last refusal of each place."""

    def __init__(self) -> None:
        self._by_place: OrderedDict[tuple[str, str, int], _RefusedPlace] = OrderedDict()

    def add(self, join: ev.Join, reason: str, message: str, fields: tuple[str, ...], now: float) -> None:
        """Remember that a Join was refused for good. ``fields``: in which the jobs differ, where that is why."""
        place = _place(join)
        self._by_place[place] = _RefusedPlace(reason, message, fields, now)
        self._by_place.move_to_end(place)
        if len(self._by_place) > MOST:
            self._by_place.popitem(last=False)

    def remove(self, join: ev.Join) -> None:
        """Forget the refusal of the place: a process of it was admitted."""
        self._by_place.pop(_place(join), None)

    def rows(self, now: float) -> list[RefusalRow]:
        """For the status document, the oldest first."""
        return [
            RefusalRow(
                role=role,
                region=region,
                ordinal=ordinal,
                reason=one.reason,
                message=one.message,
                fields=list(one.fields),
                seconds_ago=now - one.at,
            )
            for (role, region, ordinal), one in self._by_place.items()
        ]


def _place(join: ev.Join) -> tuple[str, str, int]:
    return ("evaluator" if join.evaluator else "learner", join.region, join.ordinal)
