"""A schedule of random faults from a seed, in the grammar of ``--chaos``.

Failures are Poisson: a learner that is well fails at the rate 1 / MTBF. What is broken is drawn with the shares
``SHARES``; how long it lasts (a kill: until its machine is back) is a Weibull distribution's. A learner that is
broken does not break again before that is over. The same arguments give the same schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from diloco.local.chaos.schedule import NONE, Fault, parse

SHAPE = 0.8  # of repair times: most are short, few are long
SHORTEST_SECONDS = 0.1
SLOW_SPEED = 0.25
SHARES = {"kill": 0.55, "pause": 0.15, "cut": 0.15, "slow": 0.15}
"""How often each action is drawn."""


def draw_schedule(seed: int, learners: int, mtbf: float, repair: float, seconds: float) -> tuple[Fault, ...]:
    """Faults of ``learners`` learners within ``seconds``, in order of time.

    ``mtbf``: mean seconds until a learner that is well fails; ``repair``: mean seconds that a fault lasts; both above
    0. Raises ValueError: ChaosError where there are too many, numpy's for a seed below 0.
    """
    random = np.random.default_rng(seed)
    actions, shares = list(SHARES), np.array(list(SHARES.values()))
    items = []
    for at, learner, lasting in _draw_failures(random, learners, mtbf, repair, seconds=seconds):
        action = actions[int(random.choice(len(actions), p=shares / shares.sum()))]
        word = f"slow({SLOW_SPEED:g})" if action == "slow" else action
        items.append(f"{at:.3f}s:{word}:learner-{learner}:{lasting:.3f}s")
    return parse(",".join(items))


def draw_kills(seed: int, learners: int, mtbf: float, seconds: float) -> tuple[Fault, ...]:
    """Kills alone, for processes that somebody else starts again. Raises ValueError."""
    failures = _draw_failures(np.random.default_rng(seed), learners, mtbf, SHORTEST_SECONDS, seconds=seconds)
    return parse(",".join(f"{at:.3f}s:kill:learner-{learner}" for at, learner, _ in failures))


def _draw_failures(
    random: np.random.Generator, learners: int, mtbf: float, repair: float, seconds: float
) -> list[tuple[float, int, float]]:
    """(second, learner, seconds that it lasts) of each failure, in order of time."""

    def of_learner(learner: int) -> Iterator[tuple[float, int, float]]:
        at = random.exponential(mtbf)
        while at < seconds:
            lasting = max(SHORTEST_SECONDS, repair / math.gamma(1 + 1 / SHAPE) * random.weibull(SHAPE))
            yield at, learner, lasting
            at += lasting + random.exponential(mtbf)

    return sorted(failure for learner in range(learners) for failure in of_learner(learner))


def text_of(schedule: tuple[Fault, ...]) -> str:
    """The schedule as ``diloco run --chaos`` takes it."""
    return ",".join(fault.text for fault in schedule) or NONE


def schedule_document(schedule: tuple[Fault, ...]) -> dict[str, Any]:
    """The schedule for programs: ``chaos`` as ``text_of``, and a row for each fault with its second."""
    nothing = {"against": None, "baseline": None, "ratio": None}
    rows = [{"name": fault.text, "value": fault.after_seconds, "unit": "s", **nothing} for fault in schedule]
    return {"chaos": text_of(schedule), "rows": rows}
