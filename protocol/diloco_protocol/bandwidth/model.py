"""How much bandwidth a job needs: the paper's closed formula, and a queued model of the star.

Theory of operation
-------------------
An inner step takes T seconds. Every s = H/P steps one fragment's exchange begins at the
end of a step, and it is to be over τ steps later. c is the *utilisation* that is asked
for: compute over compute and waiting, of a learner that waits where an exchange is late.
(Learners of this project do not wait there: on a link too slow for c their merges become
rarer instead, in the same proportion.) Both models answer one question, how many seconds
an exchange may take; bandwidth is its bytes over that.

*Formula* (arXiv 2604.21428's figures fit it; the lineage's simulator, Streaming DiLoCo
2501.18512): a forward pass takes T/3, and gradients leave during the backward pass, so
data-parallel has (1/c - 1/3)·T for its all-reduce, a fragment (τ/c - 1/3)·T. It counts one
exchange at a time: where τ > s several are under way and share the link, and there it asks
for too little.

*Queue.* Each direction of a link is a queue, first come first served: a push goes up; then,
after round trips and the merge, the broadcast comes down. The training thread goes on until
an exchange is due. A run of whole turns is gone through, until its last exchange is over
(``utilisation``), and the greatest time per exchange that keeps c is sought. In the long run
that is ``Turn.steady``: no direction may be busy longer than the s steps in which the next
push follows, and both together no longer than the τ steps. All learners push at once, so
the hub needs the sum of its links.

In bits per second and seconds; sizes in bytes. Plain arithmetic: nothing is measured here.
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
    """When exchanges happen: P ``fragments``, each ``every`` H steps of ``step_seconds``, overlapping τ.

    ``between_seconds``: of each exchange, what passes without using the link (round trips, the merge).
    """

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
        """Seconds that an exchange may take in all, waiting included, in the long run.

        A learner may wait (1/c - 1)·s·T for each exchange, and each meets the waits for those that
        are due while it is under way, and its own.
        """
        waits = max(1, math.ceil(self.overlap / self.period))
        return self.step_seconds * (self.overlap + waits * self.period * (1 / utilisation - 1))

    def steady(self, utilisation: float) -> float:
        """Seconds that one direction of an exchange may take where both take the same time, in the long
        run; 0: no bandwidth is enough."""
        both = (self.window(utilisation) - self.between_seconds) / 2
        return max(0.0, min(both, self.period * self.step_seconds / utilisation))


def all_reduce_factor(learners: int) -> float:
    """Of a ring's all-reduce: how often each node sends (and receives) all values."""
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
    """Steps of a run to simulate: whole turns, and so many that its last exchanges, which nothing
    overlaps, weigh little against the waiting that c = ``wanted`` leaves; but no more exchanges than
    can be gone through at once."""
    steps = max(_LEAST_STEPS, 2.5 * turn.overlap / (1 - wanted))
    turns = min(math.ceil(steps / turn.every), _MOST_EXCHANGES // turn.fragments)
    return turn.every * max(2, turns)


def utilisation(turn: Turn, steps: int, up_seconds: float, down_seconds: float) -> float:
    """c of a run of so many steps in which pushes take ``up_seconds`` and broadcasts ``down_seconds``."""
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
    """The greatest x such that exchanges of x·up_share seconds up and x·down_share down keep c = ``wanted``;
    0: none does."""
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
