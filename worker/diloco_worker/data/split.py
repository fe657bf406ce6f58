"""Which sequences are held out for evaluation.

Sequence i is held out exactly if floor((i+1)·f) > floor(i·f), f being ``training.evaluation.fraction``: every 1/f-th
sequence, evenly over the whole data, so that the held-out part looks like the rest whatever order the data are in.
No list of indices is stored, both directions are closed formulas in exact integers, and every process that knows n
and f agrees on the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

MAX_DENOMINATOR = 10**9


@dataclass(frozen=True, slots=True)
class Part:
    """One part of ``total`` sequences: those held out (a ``fraction``, 0 <= fraction < 1), or the others.

    ``part[k]`` is the index in the whole data of the part's k-th sequence.
    """

    total: int
    fraction: Fraction
    held_out: bool

    @classmethod
    def of(cls, total: int, fraction: float, held_out: bool) -> Part:
        """The fraction is read as its shortest decimal: 0.01 is 1/100, not the double next to it."""
        return cls(total, Fraction(repr(float(fraction))).limit_denominator(MAX_DENOMINATOR), held_out)

    def __len__(self) -> int:
        held_out = self.total * self.fraction.numerator // self.fraction.denominator
        return held_out if self.held_out else self.total - held_out

    def __getitem__(self, k: int) -> int:
        if not 0 <= k < len(self):
            raise IndexError(k)
        part, whole = self.fraction.numerator, self.fraction.denominator
        if self.held_out:
            return -(-(k + 1) * whole // part) - 1  # the least i with floor((i+1)·f) = k+1
        return k * whole // (whole - part)  # the least i with (i+1) - floor((i+1)·f) = ceil((i+1)·(1-f)) > k


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What is loaded of a job's data: what is held out, a ``fraction`` of them, or the others. Relative paths start at
    ``directory``; token files go to ``cache_directory`` (None: to a private temporary file)."""

    fraction: float
    held_out: bool
    directory: Path
    cache_directory: Path | None

    def choose_part(self, total: int) -> Part:
        """Which of so many sequences are loaded."""
        return Part.of(total, self.fraction, self.held_out)
