"""Which sequences are held out for evaluation.

Sequence i is held out exactly if floor((i+1)·f) > floor(i·f), f being
``training.evaluation.fraction``: every 1/f-th sequence, evenly over the whole
data, so that the held-out part looks like the rest whatever order the data are
in. No list of indices is stored, both directions are closed formulas in exact
integers, and every process that knows n and f agrees on the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

MAX_DENOMINATOR = 10**9


@dataclass(frozen=True, slots=True)
class Split:
    """``total`` sequences, of which a ``fraction`` is held out (0 <= fraction < 1)."""

    total: int
    fraction: Fraction

    @classmethod
    def of(cls, total: int, fraction: float) -> Split:
        """The fraction is read as its shortest decimal: 0.01 is 1/100, not the double next to it.

        Raises ValueError outside 0 <= fraction < 1 or for a negative total.
        """
        if total < 0:
            raise ValueError(f"a data set cannot have {total} sequences")
        if not 0 <= fraction < 1:
            raise ValueError(f"the held-out fraction must be at least 0 and below 1, not {fraction}")
        return cls(total, Fraction(repr(float(fraction))).limit_denominator(MAX_DENOMINATOR))

    @property
    def held_out(self) -> int:
        """Number of held-out sequences, floor(total · f)."""
        return self.total * self.fraction.numerator // self.fraction.denominator

    @property
    def training(self) -> int:
        return self.total - self.held_out

    def held_out_index(self, k: int) -> int:
        """Index in the whole data of the k-th held-out sequence."""
        if not 0 <= k < self.held_out:
            raise IndexError(k)
        # The least i with floor((i+1)·f) = k+1.
        return -(-(k + 1) * self.fraction.denominator // self.fraction.numerator) - 1

    def training_index(self, k: int) -> int:
        """Index in the whole data of the k-th sequence that is not held out."""
        if not 0 <= k < self.training:
            raise IndexError(k)
        # The least i with (i+1) - floor((i+1)·f) = ceil((i+1)·(1-f)) > k.
        return k * self.fraction.denominator // (self.fraction.denominator - self.fraction.numerator)

    def index(self, k: int, held_out: bool) -> int:
        return self.held_out_index(k) if held_out else self.training_index(k)

    def size(self, held_out: bool) -> int:
        return self.held_out if held_out else self.training
