"""A schedule of random faults from a seed, in the grammar of ``--chaos``.

Failures are Poisson: a learner that is well fails at the rate 1 / MTBF. What is broken is drawn with the shares
``SHARES``; how long it lasts (a kill: until its machine is back) is exponentiated Weibull (``failures``). A
learner that is broken does not break again before that is over. The same arguments give the same schedule.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from diloco.local.chaos.failures import RepairTimes, draw_failures
from diloco.local.chaos.schedule import NONE, Fault, parse

SHAPE, POWER = 0.8, 2.0  # of repair times: most are short, few are long, none takes no time
SHORTEST_SECONDS = 0.1
SLOW_SPEED = 0.25
SHARES = {"kill": 0.55, "pause": 0.15, "cut": 0.15, "slow": 0.15}
"""How often each action is drawn."""


def draw_schedule(seed: int, learners: int, mtbf: float, repair: float, seconds: float) -> tuple[Fault, ...]:
    """Faults of ``learners`` learners within ``seconds``, in order of time.

    ``mtbf``: mean seconds until a learner that is well fails; ``repair``: mean seconds that a fault lasts. Raises
    ValueError where one of them is not above 0.
    """
    random = np.random.default_rng(seed)
    repairs = RepairTimes.with_mean(repair, SHAPE, POWER)
    actions, shares = list(SHARES), np.array(list(SHARES.values()))
    items = []
    for failure in draw_failures(random, learners, mtbf, repairs, until=seconds):
        action = actions[int(random.choice(len(actions), p=shares / shares.sum()))]
        lasting = max(SHORTEST_SECONDS, failure.repair)
        word = f"slow({SLOW_SPEED:g})" if action == "slow" else action
        items.append(f"{failure.at:.3f}s:{word}:learner-{failure.unit}:{lasting:.3f}s")
    return parse(",".join(items))


def draw_kills(seed: int, learners: int, mtbf: float, seconds: float) -> tuple[Fault, ...]:
    """Kills alone, for processes that somebody else starts again. Raises ValueError."""
    random = np.random.default_rng(seed)
    at_once = RepairTimes.with_mean(SHORTEST_SECONDS, SHAPE, POWER)
    failures = draw_failures(random, learners, mtbf, at_once, until=seconds)
    return parse(",".join(f"{failure.at:.3f}s:kill:learner-{failure.unit}" for failure in failures))


def text_of(schedule: tuple[Fault, ...]) -> str:
    """The schedule as ``diloco run --chaos`` takes it."""
    return ",".join(fault.text for fault in schedule) or NONE


def schedule_document(schedule: tuple[Fault, ...]) -> dict[str, Any]:
    """The schedule for programs: ``chaos`` as ``text_of``, and a row for each fault with its second."""
    nothing = {"against": None, "baseline": None, "ratio": None}
    rows = [{"name": fault.text, "value": fault.after_seconds, "unit": "s", **nothing} for fault in schedule]
    return {"chaos": text_of(schedule), "rows": rows}
