"""Sizes, rates and times as people read them: three digits and a unit."""

from __future__ import annotations

import math
from itertools import pairwise


def _scaled(value: float, unit: str) -> str:
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def size_text(count: float) -> str:
    return _scaled(count, "B")


def rate_text(rate: float | None) -> str:
    """Bytes per second, in bits, as links are sold."""
    return "-" if rate is None else bits_text(8 * rate)


def bits_text(rate: float) -> str:
    return _scaled(rate, "bit/s") if math.isfinite(rate) else "none is enough"


def download_text(here: int, fragments: int, rate: float | None) -> str:
    """How much of the model a newcomer has; ``rate``: bytes per second."""
    return f"{here} of {fragments} fragments" + (f", {size_text(rate)}/s" if rate else "")


def seconds_text(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def duration_text(seconds: float) -> str:
    """A length of time by its two largest units, as it is said: ``8.4 s``, ``54 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for (large, of_large), (small, of_small) in pairwise((("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))):
        if whole >= of_large:
            count, rest = divmod(whole, of_large)
            return f"{count} {large}" + (f" {rest // of_small} {small}" if rest // of_small else "")
    return f"{whole} s"
