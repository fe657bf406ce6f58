"""How much bandwidth a job needs: the paper's closed formula, and a queued model of the star.

Theory of operation. An inner step takes T seconds. Every s = H/P steps the exchange of one fragment begins at the end
of a step; it is due τ steps later. The *utilisation* c that is asked for is computing over computing plus waiting, of a
learner that waits for a late exchange. (A learner of this project does not wait: on a link too slow for c its merges
become rarer, in the same proportion.) Both models say how many seconds one exchange may take. The bandwidth is the
exchange's bytes over these seconds.

*Formula* (it fits the figures of arXiv 2604.21428; the simulator is that of Streaming DiLoCo,
2501.18512). The forward pass takes T/3, and gradients leave during the backward pass. So an
all-reduce of data-parallel training has (1/c - 1/3)·T, and one of a fragment (τ/c - 1/3)·T. The
formula counts one exchange at a time. Where τ > s several share the link, and it asks for too little.

*Queue.* Each direction of a link is a queue, first come first served. A push goes up; after the round trips and the
merge the broadcast comes down. The training goes on until an exchange is due. ``utilisation`` goes through a run of
whole turns, until its last exchange is over, and ``queued_seconds`` seeks the longest exchange that keeps c. In the
long run that is ``Turn.steady``: no direction may be busy for longer than the s steps until the next push, and both
together for no longer than the τ steps. All learners push at once, so the hub needs the sum of its links.

Rates are in bits per second, sizes in bytes. Nothing is measured here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

FORWARD = 1 / 3  # of a step; the backward pass is the rest
UTILISATION = 0.95  # that a link is sized for
_LEAST_STEPS = 100  # of a simulated run
_MOST_EXCHANGES = 4096
_HALVINGS = 50


@dataclass(frozen=True, slots=True)
class Turn:
    """When exchanges happen: each of P ``fragments`` every H steps (``every``) of ``step_seconds``, due ``overlap`` (τ)
    steps after it began. ``between_seconds`` of an exchange pass without using the link: round trips, the merge."""

    fragments: int
    every: int
    overlap: int
    step_seconds: float
    between_seconds: float = 0.0

    @property
    def period(self) -> float:
        """Steps between the beginnings of two exchanges."""
        return self.every / self.fragments

    def window(self, utilisation: float) -> float:
        """Seconds that an exchange may take in the long run, waits for it included.

        For each exchange a learner may wait (1/c - 1)·s·T. An exchange has the time of its own wait, and of
        the waits for those that are due while it is under way.
        """
        waits = max(1, math.ceil(self.overlap / self.period))
        return self.step_seconds * (self.overlap + waits * self.period * (1 / utilisation - 1))

    def steady(self, utilisation: float) -> float:
        """Seconds that each direction of an exchange may take in the long run, if both take the same time;
        0: no bandwidth is enough."""
        both = (self.window(utilisation) - self.between_seconds) / 2
        return max(0.0, min(both, self.period * self.step_seconds / utilisation))


def all_reduce_factor(learners: int) -> float:
    """How often each node of a ring sends, and receives, all values in one all-reduce."""
    return 2 * (1 - 1 / learners)


def data_parallel(parameters: float, learners: int, step_seconds: float, utilisation: float = UTILISATION) -> float:
    """Bits per second and direction that each learner needs for data-parallel training in bfloat16."""
    window = (1 / utilisation - FORWARD) * step_seconds
    return 16 * parameters * all_reduce_factor(learners) / window


def formula_seconds(turn: Turn, utilisation: float = UTILISATION) -> float:
    """Seconds that an exchange may take by the formula; 0: no bandwidth is enough."""
    return max(0.0, (turn.overlap / utilisation - FORWARD) * turn.step_seconds - turn.between_seconds)


def rate(amount: float, seconds: float) -> float:
    """amount / seconds; infinite where there is no time."""
    if amount <= 0:
        return 0.0
    return amount / seconds if seconds > 0 else math.inf


def run_steps(turn: Turn, wanted: float) -> int:
    """Steps of the run that is simulated: whole turns, so many that the last exchanges, which no step
    overlaps, weigh little against the waiting that c = ``wanted`` allows; at most ``_MOST_EXCHANGES``."""
    steps = max(_LEAST_STEPS, 2.5 * turn.overlap / (1 - wanted))
    turns = min(math.ceil(steps / turn.every), _MOST_EXCHANGES // turn.fragments)
    return turn.every * max(2, turns)


def utilisation(turn: Turn, steps: int, up_seconds: float, down_seconds: float) -> float:
    """c of a run of ``steps`` steps in which each push takes ``up_seconds`` and each broadcast ``down_seconds``."""
    period = Fraction(turn.every, turn.fragments)
    launches = [math.ceil(period * n) for n in range(1, steps * turn.fragments // turn.every + 1)]
    now, step = 0.0, 0
    up_free = down_free = 0.0
    arrivals: list[float] = []
    waited_for = 0  # exchanges whose end was waited for

    def wait(until: int) -> None:
        """Go on to the end of step ``until``, waiting for what is due on the way."""
        nonlocal now, step, waited_for
        while waited_for < len(arrivals) and launches[waited_for] + turn.overlap <= until:
            due = launches[waited_for] + turn.overlap
            now, step = now + (due - step) * turn.step_seconds, due
            now = max(now, arrivals[waited_for])
            waited_for += 1
        now, step = now + (until - step) * turn.step_seconds, until

    for launch in launches:
        wait(launch)
        up_free = max(now, up_free) + up_seconds
        down_free = max(up_free + turn.between_seconds, down_free) + down_seconds
        arrivals.append(down_free)
        wait(launch)  # for this very exchange, where nothing overlaps
    wait(steps)
    return steps * turn.step_seconds / max(now, down_free)


@lru_cache(maxsize=64)
def queued_seconds(turn: Turn, wanted: float, up_share: float, down_share: float) -> float:
    """The greatest x with which pushes of x·up_share seconds and broadcasts of x·down_share seconds keep
    c = ``wanted``; 0: there is none."""
    steps = run_steps(turn, wanted)

    def enough(seconds: float) -> bool:
        return utilisation(turn, steps, seconds * up_share, seconds * down_share) >= wanted

    if not enough(0.0):
        return 0.0
    low, high = 0.0, turn.step_seconds * turn.every / wanted
    while enough(high):
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if enough(middle):
            low = middle
        else:
            high = middle
    return low
