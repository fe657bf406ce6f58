"""When parts of a fleet fail and how long their repair takes.

Theory of operation
-------------------
A *unit* is what fails as one: a chip, a slice of chips, a learner's process. Units fail one by one at a constant
rate, 1 / MTBI (mean time between interruptions) each, so the failures of n units are a Poisson process of rate
n / MTBI (arXiv 2604.21428). A unit that is being repaired cannot fail.

Repairs take times of an exponentiated Weibull distribution, F(t) = (1 - exp(-(t / scale)^shape))^power. Most are
over soon (a process is started again, a spare takes over) and a few take long (somebody has to go there), which
shape < 1 gives; power > 1 makes repairs of no time at all unlikely.

Everything is a function of its arguments and of a numpy Generator: the same generator gives the same failures.
Times are seconds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_GRID = 20_000  # quantiles of which a mean is made


@dataclass(frozen=True, slots=True)
class RepairTimes:
    """The exponentiated Weibull distribution of repair times; ``scale`` in seconds."""

    scale: float
    shape: float
    power: float

    def __post_init__(self) -> None:
        for name in ("scale", "shape", "power"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"repair times: {name} is {value:g}, and has to be a finite number above 0")

    @classmethod
    def with_mean(cls, seconds: float, shape: float, power: float) -> RepairTimes:
        """The distribution of this shape whose mean is ``seconds``."""
        return cls(seconds / cls(1.0, shape, power).mean, shape, power)

    def quantile(self, share: np.ndarray) -> np.ndarray:
        """Seconds after which ``share`` (0 to 1; float64, any shape) of the repairs are over."""
        # -log1p(-x) rather than log(1 - x): repairs of next to no time keep their digits.
        return self.scale * (-np.log1p(-(share ** (1 / self.power)))) ** (1 / self.shape)

    def draw(self, random: np.random.Generator, size: int | tuple[int, ...]) -> np.ndarray:
        """Repair times (seconds, float64) in the given shape."""
        return self.quantile(random.random(size))

    @property
    def mean(self) -> float:
        """Mean repair time, by quadrature over quantiles that grow dense towards the longest."""
        edges = 1 - np.logspace(0, -12, _GRID)
        middles = (edges[1:] + edges[:-1]) / 2
        return float(np.sum(self.quantile(middles) * np.diff(edges)))


@dataclass(frozen=True, slots=True)
class Failure:
    """Unit ``unit`` fails at ``at`` and is back ``repair`` later; seconds."""

    at: float
    unit: int
    repair: float


def draw_failures(
    random: np.random.Generator, units: int, mtbi: float, repairs: RepairTimes, until: float
) -> Iterator[Failure]:
    """Failures of ``units`` units before ``until``, in order of time; ``mtbi``: of one unit that is up.

    A unit that is being repaired does not fail, so between two failures of one unit there is at least its repair.
    """
    if units < 1:
        raise ValueError(f"units: {units}, and there has to be one at least")
    if not mtbi > 0:
        raise ValueError(f"mtbi: {mtbi:g}, and has to be above 0")
    up = list(range(units))
    back: list[tuple[float, int]] = []
    now = 0.0
    while now < until:
        rate = len(up) / mtbi
        after = now + random.exponential(1 / rate) if rate else math.inf
        if back and back[0][0] <= after:
            # Memoryless: with another number of units up, the wait begins anew.
            now, unit = heapq.heappop(back)
            up.append(unit)
            continue
        now = after
        if now >= until:
            return
        unit = up.pop(int(random.integers(len(up))))
        repair = float(repairs.draw(random, 1)[0])
        heapq.heappush(back, (now + repair, unit))
        yield Failure(now, unit, repair)
