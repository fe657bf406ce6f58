"""How long repairs take: times of an exponentiated Weibull distribution, F(t) = (1 - exp(-(t / scale)^shape))^power.

Most are over soon (a process is started again, a spare takes over) and a few take long (somebody has to go there),
which shape < 1 gives; power > 1 makes repairs of no time at all unlikely. The same generator gives the same times, in
seconds.
"""

from __future__ import annotations

import math
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
