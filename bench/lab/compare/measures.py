"""What the figures of a comparison mean: one definition for every arm, from the same records.

A record is a line for each step that a learner made: who, and when it was done. With them come the tokens that are in
the model at the end (*kept*): of ours those that were merged, of data-parallel training those of the state that it ends
with; steps that a restart undid are in neither.

* **Goodput**: kept tokens times the seconds that a token takes at the pace, of the learners' time from the job's first
  step to its end, whether a process was there or not (docs/algorithm.md). A step's compute is its pace: that is what it
  takes by the machine's own clock.
* **Uptime**: the share of that time in which at least one learner advances, that is, in which a step ends within
  ``ADVANCES`` steps' time.
* **Stall** of a fault: how much longer than a step the longest time is in which nobody ends a step, from the last
  step before the fault until the learner that it hit is back.
* **Back** of a fault: from its end (of a kill: from the machine's return) until the learner that it hit ends a step.

All times are Unix seconds, all durations seconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

ADVANCES = 2.0
P95_NEEDS = 20  # values, for a 95th percentile to mean something


@dataclass(frozen=True, slots=True)
class StepEnd:
    """A learner ended a step."""

    learner: int
    time: float


@dataclass(frozen=True, slots=True)
class Hit:
    """A fault that was carried out: on which learner (None: on none), when, and how long it lasted."""

    action: str
    learner: int | None
    time: float
    lasted: float


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a fault cost; ``back_seconds`` None: the learner did not come back before the end."""

    action: str
    at_seconds: float
    lasted: float
    stall_seconds: float
    back_seconds: float | None


def goodput(kept_tokens: float, step_tokens: int, step_seconds: float, learners: int, wall: float) -> float:
    """0 to 1. ``step_tokens``: of one learner's step; ``wall``: from the first step to the end."""
    return kept_tokens / step_tokens * step_seconds / (learners * wall)


def uptime(steps: Iterable[StepEnd], started: float, ended: float, step_seconds: float) -> float:
    """0 to 1."""
    covered, reach = 0.0, started
    for end in sorted(step.time for step in steps):
        begin = max(reach, end - ADVANCES * step_seconds)
        covered += max(0.0, min(end, ended) - begin)
        reach = max(reach, end)
    return min(1.0, covered / (ended - started))


def recoveries(
    hits: Iterable[Hit], steps: Sequence[StepEnd], started: float, ended: float, step_seconds: float
) -> list[Recovery]:
    """What each fault on a learner cost, in order of time."""
    found = []
    ends = sorted(steps, key=lambda step: step.time)
    for hit in sorted(hits, key=lambda one: one.time):
        if hit.learner is None or hit.time >= ended:
            continue
        over = hit.time + hit.lasted
        own = next((step.time for step in ends if step.learner == hit.learner and step.time > over), None)
        back = None if own is None or own > ended else own - over
        until = ended if back is None else over + back
        before = max((step.time for step in ends if step.time <= hit.time), default=started)
        moments = [before, *(step.time for step in ends if hit.time < step.time < until), until]
        stall = max(0.0, max(b - a for a, b in pairwise(moments)) - step_seconds)
        found.append(Recovery(hit.action, hit.time - started, hit.lasted, stall, back_seconds=back))
    return found


def loss_at(curve: Sequence[tuple[float, float]], tokens: float) -> float | None:
    """The loss at that many tokens, between two scores by a straight line; None: the curve does not reach so far.
    ``curve``: pairs of tokens and loss, rising."""
    for (before, above), (after, below) in pairwise(curve):
        if before <= tokens <= after:
            share = 0.0 if after == before else (tokens - before) / (after - before)
            return above + share * (below - above)
    return None


def middle(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def worst_word(fewest: int) -> str:
    """What is shown as the worst of several arms' values, where the arm with the fewest has so many: "p95" (the 95th
    percentile) of many, "maximum" of few."""
    return "maximum" if fewest < P95_NEEDS else "p95"


def worst(values: Sequence[float], word: str) -> float | None:
    """The ``worst_word`` of them; None: there are none."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[-1] if word == "maximum" else ordered[math.ceil(0.95 * len(ordered)) - 1]
