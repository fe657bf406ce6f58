"""What a fleet is like where nothing is said, and where each value is from.

"published" is in the paper (arXiv 2604.21428). "fit" is not published: it was chosen so that the simulator meets the
paper's table of goodput (``bench/goodput.py``), and says no more than that.
"""

from __future__ import annotations

from dataclasses import dataclass

YEAR = 365.25 * 86400.0  # seconds


@dataclass(frozen=True, slots=True)
class Parameter:
    """A value of the simulator (seconds, chips or a number), and where it is from."""

    value: float
    source: str


MTBI = Parameter(YEAR, "published: one year per chip")
SLICE = Parameter(8, "chips that go when one of them fails: those of a node")
DOWNSCALE = Parameter(15.0, "fit: only the sum with upscale, 26 to 32 s, is pinned by the table")
UPSCALE = Parameter(15.0, "fit: only the sum with downscale, 26 to 32 s, is pinned by the table")
STEP = Parameter(3.0, "fit: a failure is noticed when a step ends")
RESTART = Parameter(85.0, "fit: rigid data-parallel, from a failure to the next step")
RIGID_STEP = Parameter(8.0, "fit: rigid data-parallel, as --step")
REPAIR_MEAN = Parameter(600.0, "fit: the table allows some minutes to a quarter of an hour")
REPAIR_SHAPE = Parameter(
    0.7, "the exponentiated Weibull is published, this value is not: most repairs are short, few long"
)
REPAIR_POWER = Parameter(2.0, "not published: hardly any repair takes no time")
