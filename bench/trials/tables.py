"""Means with their intervals, and how a table of trials is printed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over seeds, and half of its 95 % interval by Student's t (NaN of one value alone)."""

    value: float
    half: float
    seeds: int

    def __str__(self) -> str:
        return f"{self.value:.4f}" if math.isnan(self.half) else f"{self.value:.4f} ± {self.half:.4f}"


def mean(values: Sequence[float]) -> Mean:
    """Of independent values, one of each seed."""
    n = len(values)
    if n < 2:
        return Mean(values[0], math.nan, n)
    from scipy.special import stdtrit  # the quantiles of Student's t

    half = float(stdtrit(n - 1, 0.975)) * statistics.stdev(values) / math.sqrt(n)
    return Mean(statistics.fmean(values), half, n)


def excess(values: Sequence[float], reference: Sequence[float]) -> Mean:
    """By how many per cent the losses lie above the reference's of the same seeds: the seeds' own differences, so what
    a seed's data and first weights do to both is not in the interval."""
    return mean([100 * (value / other - 1) for value, other in zip(values, reference, strict=True)])


@dataclass(frozen=True, slots=True)
class TrialRow:
    """One arm beside its reference. ``value``: loss in nats, ``baseline`` that of ``against``. ``ratio``: of one to
    the other, the mean over seeds. ``interval``: half of the 95 % interval of the ratio, None of one seed. ``group``:
    the rows of one plot of the report (reports.py), which has ``arm`` and ``merges`` as its places; empty: in none.
    ``own_rate`` and ``rate``: the arm's and the reference's inner rate, where they were looked for. ``default``: the
    arm that has the default in the place of what this one varies; ``default_ratio`` and ``default_interval`` are as
    those of the reference, over the seeds that both arms have. ``learners``: of a merge, the mean; None: not known."""

    name: str
    value: float
    unit: str
    against: str | None
    baseline: float | None
    ratio: float | None
    interval: float | None
    seeds: int
    group: str = ""
    merges: int | None = None
    arm: str = ""
    rate: float | None = None
    own_rate: float | None = None
    default: str = ""
    default_ratio: float | None = None
    default_interval: float | None = None
    learners: float | None = None


def make_row(
    name: str,
    values: Sequence[float],
    against: str,
    reference: Sequence[float],
    *,
    group: str = "",
    merges: int | None = None,
    arm: str = "",
    rate: float | None = None,
    own_rate: float | None = None,
    learners: float | None = None,
) -> TrialRow:
    """The arm's row: ``values`` and ``reference`` are losses of the same seeds."""
    over = excess(values, reference)
    interval = None if math.isnan(over.half) else over.half / 100
    ratio = 1 + over.value / 100
    value, other = mean(values).value, mean(reference).value
    found = TrialRow(name, value, "nats", against, baseline=other, ratio=ratio, interval=interval, seeds=over.seeds)
    return replace(found, group=group, merges=merges, arm=arm, rate=rate, own_rate=own_rate, learners=learners)


def beside_default(row: TrialRow, default: str, values: Sequence[float], others: Sequence[float]) -> TrialRow:
    """The row with what it differs from the arm ``default``: ``values`` and ``others``, the default's, are losses of
    the same seeds, at least one."""
    over = excess(values, others)
    interval = None if math.isnan(over.half) else over.half / 100
    return replace(row, default=default, default_ratio=1 + over.value / 100, default_interval=interval)


def difference(ratio: float | None, interval: float | None, digits: int) -> str:
    """By how many per cent a loss is above another, with the interval where there is one; empty without a ratio."""
    if ratio is None:
        return ""
    spread = "" if interval is None else f" ± {100 * interval:.{digits}f}"
    return f"{100 * (ratio - 1):+.{digits}f} %{spread}"


def row_lines(rows: Sequence[TrialRow]) -> Iterator[str]:
    """The rows as they are printed."""
    width = max((len(row.name) for row in rows), default=0)
    for row in rows:
        over = f"  {difference(row.ratio, row.interval, 2):>8}" if row.ratio is not None else ""
        beside = f" of {row.against}" if row.against else ""
        default = difference(row.default_ratio, row.default_interval, 2)
        default = f"  {default} of {row.default}" if default else ""
        learners = f"  {row.learners:.2f} learners in a merge" if row.learners is not None else ""
        yield f"{row.name:{width}}  {row.value:.4f} {row.unit}{over}{beside}{default}{learners}  ({row.seeds} seeds)"
