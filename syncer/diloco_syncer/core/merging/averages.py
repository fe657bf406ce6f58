"""Moving averages of the grace window (paper Eq. 3): half-life in samples."""

from __future__ import annotations


class MovingAverage:
    """Exponential, ``half_life`` samples; the first sample is taken as it is."""

    def __init__(self, half_life: float = 8.0) -> None:
        self.keep = 0.5 ** (1.0 / half_life)
        self.value: float | None = None

    def add(self, sample: float) -> None:
        self.value = sample if self.value is None else self.keep * self.value + (1 - self.keep) * sample


def grace_seconds(
    factor: float, cap: float, overlap: int, step: float | None, quorum: float | None, sync: float | None
) -> float:
    """clamp(γ·(τ·ξ_step − ξ_quorum − ξ_sync), 0, cap); with an estimate missing: the cap (seconds)."""
    if step is None or quorum is None or sync is None:
        return cap
    return min(cap, max(0.0, factor * (overlap * step - quorum - sync)))
