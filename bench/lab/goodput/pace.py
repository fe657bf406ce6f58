"""Learners of unequal speed that wait for a quorum, and compute that comes for a part of a run.

Theory of operation
-------------------
*Unequal speed.* Every ``period`` steps each learner hands in a fragment; the merge is made when K have, or ``grace``
after that, and no later than when all have. A learner that is ``overlap`` steps past its own part waits for the merge.
With K = M everybody comes to the slowest's pace; what varies from step to step costs more on top, since each merge
waits for whoever is slowest just then. With K = 1 nobody waits. (A learner of this project never waits: with K = M
its merges become rarer instead. ``bench/goodput.py --core`` shows that.)

*Compute that comes and goes.* For half of a run's tokens there is extra compute, a share x of the base's. Learners
of their own that come and go stop nobody: the run takes 1/2 + 1/2 / (1 + x) of its time. Data-parallel training that
takes it in stops whenever some of it comes or goes, and computes for E of every E + stop seconds, where E is the time
from one stop until the end of the step in which something comes or goes again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

SCAVENGED_SHARE = 0.5  # of the tokens, while the extra compute is there; fits the four published times to 0.005
_LEAST_STEP = 0.1  # of its mean: a step that varies takes at least so long


@dataclass(frozen=True, slots=True)
class Quorum:
    """K, the seconds that a merge waits for the rest (at most), and how many steps an exchange may overlap (τ)."""

    least: int
    grace: float
    overlap: int
    period: int = 1


def simulate_uneven(
    step_seconds: np.ndarray,
    variation: float,
    quorum: Quorum,
    steps: int,
    repetitions: int,
    random: np.random.Generator,
) -> np.ndarray:
    """Share of their time that learners compute, by repetition (float64).

    ``step_seconds``: of each learner's mean step (M,); ``variation``: standard deviation of a step, as a share."""
    finished = np.zeros((repetitions, step_seconds.size))
    computed = np.zeros_like(finished)
    merged = np.zeros((steps + quorum.overlap + 2, repetitions))  # by step: when the merge is there
    for step in range(steps):
        noise = 1 + variation * random.standard_normal(finished.shape)
        seconds = step_seconds * np.maximum(noise, _LEAST_STEP)
        finished = np.maximum(finished, merged[step, :, None]) + seconds
        computed += seconds
        if (step + 1) % quorum.period == 0:
            reached = np.partition(finished, quorum.least - 1, axis=1)[:, quorum.least - 1]
            merged[step + 1 + quorum.overlap] = np.minimum(reached + quorum.grace, finished.max(axis=1))
    shares: np.ndarray = (computed / finished).mean(axis=1)
    return shares


def uneven_steps(learners: int, slow: int, behind: float, step: float = 1.0) -> np.ndarray:
    """Step times (s) of learners of which the last ``slow`` take ``behind`` (a share) longer."""
    return step * np.where(np.arange(learners) < learners - slow, 1.0, 1.0 + behind)


def scavenging_time(extra: float) -> float:
    """Time of a run with ``extra`` compute for a part of it, as a share of the time without, if nobody is stopped."""
    return 1 - SCAVENGED_SHARE + SCAVENGED_SHARE / (1 + extra)


def scavenging_time_parallel(extra: float, changes: float, step: float, stop: float) -> float:
    """The same where each coming and going stops everybody for ``stop`` seconds at the end of a step.

    ``changes``: per second, at extra compute as large as the base; in proportion to it otherwise."""
    stretch = step / -math.expm1(-changes * extra * step)
    return 1 - SCAVENGED_SHARE + SCAVENGED_SHARE / (1 + extra) * (stretch + stop) / stretch
