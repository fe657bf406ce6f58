"""``diloco simulate goodput``: the published table beside the simulator's, and tables for a fleet of one's own.

Here fleets are chosen and figures put side by side; ``fleet`` and ``pace`` simulate. Goodput and uptime are in %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from diloco.simulate.failures import RepairTimes
from diloco.simulate.goodput import defaults, pace, published
from diloco.simulate.goodput.fleet import Fleet, Result, Run, Stops, simulate_fleets

Row = dict[str, Any]
Told = Callable[[float], None]  # which share is done

RIGID, ELASTIC, DECOUPLED = "rigid data-parallel", "elastic data-parallel", "decoupled"
LEARNERS = tuple(published.DECOUPLED)
CANDIDATES = (2, 4, 8, 16, 32, 64)  # learners that are tried for a fleet of one's own
SPARES = (0, 1, 2, 4)  # slices of each learner
FASTER = (1.0, 1 / 3, 1 / 6)  # stops, as shares of what they are
NEAR_BEST = 1.0  # points: as many learners as it takes to come so near to the best
_NORMAL = 1.959964  # 97.5 % quantile


@dataclass(frozen=True, slots=True)
class FleetConditions:
    """What the fleet is like, beside its chips and learners; seconds, chips."""

    mtbi: float = published.MTBI.value
    slice_chips: float = published.SLICE.value
    stops: Stops = defaults.STOPS
    rigid: Stops = defaults.RIGID_STOPS
    repairs: RepairTimes = defaults.REPAIRS
    spares: int = 0

    def decoupled(self, chips: float, learners: int) -> Fleet:
        return Fleet(chips, learners, self.mtbi, self.stops, self.slice_chips, self.spares)

    def elastic(self, chips: float) -> Fleet:
        """One learner of all chips that goes on without what failed."""
        return self.decoupled(chips, 1)

    def rigid_parallel(self, chips: float) -> Fleet:
        """One learner of all chips that goes on when all of them are there again."""
        return Fleet(chips, 1, self.mtbi, self.rigid, self.slice_chips, math.inf)

    def with_faster_recovery(self, factor: float) -> FleetConditions:
        def faster(stops: Stops) -> Stops:
            return replace(stops, down=stops.down * factor, up=stops.up * factor)

        return replace(self, stops=faster(self.stops), rigid=faster(self.rigid))


def mean_and_half_width(values: np.ndarray) -> tuple[float, float]:
    """Mean, and half of its 95 % interval by Student's t (Cornish and Fisher's expansion; 1 % off at three values)."""
    degrees = values.size - 1
    if degrees < 1:
        return float(values.mean()), math.inf
    z = _NORMAL
    t = z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    return float(values.mean()), float(t * values.std(ddof=1) / math.sqrt(values.size))


def make_row(name: str, result: Result, **more: Any) -> Row:
    """A row of the table, as ``--json`` prints it."""
    value, half = mean_and_half_width(100 * result.goodput)
    row = {"name": name, "value": value, "unit": "%", "low": value - half, "high": value + half}
    return {**row, "uptime": 100 * float(result.uptime.mean()), "baseline": None, "ratio": None, **more}


def add_baseline(row: Row, baseline: Row) -> None:
    """Put another row's value beside this one's."""
    row.update(against=baseline["method"], baseline=baseline["value"], ratio=row["value"] / baseline["value"])


# ------------------------------------------------------------------ the table


def goodput_rows(
    chips: Sequence[int], learners: Sequence[int], conditions: FleetConditions, run: Run, on_progress: Told
) -> list[Row]:
    """Both kinds of data-parallel training and each number of learners, at each number of chips."""
    cells: list[tuple[str, int, int, Fleet]] = []
    for size in chips:
        cells.append((RIGID, 1, size, conditions.rigid_parallel(size)))
        cells.append((ELASTIC, 1, size, conditions.elastic(size)))
        cells += [(DECOUPLED, m, size, conditions.decoupled(size, m)) for m in learners]
    results = simulate_fleets([fleet for *_, fleet in cells], conditions.repairs, run, on_progress)
    rows = []
    for (method, m, size, fleet), result in zip(cells, results, strict=True):
        name = f"{label(method, m)}, {size} chips"
        rows.append(make_row(name, result, method=method, learners=m, chips=size, slices=fleet.slices))
        if (known := published_value(method, m, size, conditions)) is not None:
            rows[-1]["published"] = known
    baselines = {row["chips"]: row for row in rows if row["method"] == ELASTIC}
    for row in rows:
        if row["method"] == DECOUPLED:
            add_baseline(row, baselines[row["chips"]])
    return rows


def label(method: str, learners: int) -> str:
    return f"M = {learners}" if method == DECOUPLED else method


def published_value(method: str, learners: int, chips: int, conditions: FleetConditions) -> int | None:
    """The paper's goodput (%) of such a fleet; None: it has none."""
    if chips not in published.CHIPS or conditions.mtbi != published.MTBI.value or conditions.spares:
        return None
    rows = {RIGID: published.RIGID, ELASTIC: published.ELASTIC}
    values = rows.get(method) or published.DECOUPLED.get(learners)
    return None if values is None else values[published.CHIPS.index(chips)]


def root_mean_square_error(rows: Sequence[Row]) -> float | None:
    """Of the rows that have a published value, in points; None: none has."""
    errors = [row["value"] - row["published"] for row in rows if "published" in row]
    return math.sqrt(sum(error**2 for error in errors) / len(errors)) if errors else None


# ------------------------------------------------------------------ unequal learners, compute that comes and goes


def uneven_rows(run: Run) -> list[Row]:
    """Eight learners of which four are slower, at three quorums; the published rows."""
    random = np.random.default_rng(run.seed)
    learners, overlap = published.UNEVEN_LEARNERS, int(published.UNEVEN_OVERLAP.value)
    steps = pace.uneven_steps(learners, int(published.UNEVEN_SLOW.value), published.UNEVEN_BEHIND.value)
    grace = published.GRACE_FACTOR.value * overlap * float(np.median(steps))
    quorums = {"K = 8": pace.Quorum(learners, 0.0, overlap), "K = 1": pace.Quorum(1, 0.0, overlap)}
    quorums["K = 1, grace"] = pace.Quorum(1, grace, overlap)
    rows = []
    for name, quorum in quorums.items():
        share = pace.simulate_uneven(
            steps, published.UNEVEN_VARIATION.value, quorum, max(100, round(run.failures)), run.repetitions, random
        )
        result = Result(share, np.ones(run.repetitions), 0)
        rows.append(make_row(f"unequal learners, {name}", result, method=DECOUPLED, published=published.UNEVEN[name]))
    for row in rows[1:]:
        row.update(against=rows[0]["name"], baseline=rows[0]["value"], ratio=row["value"] / rows[0]["value"])
    return rows


def scavenging_rows(conditions: FleetConditions) -> list[Row]:
    """Time of a run with more compute for half of its tokens, as a share of the time without; the published rows."""
    rows = []
    cases = zip(published.SCAVENGED, published.SCAVENGED_DECOUPLED, published.SCAVENGED_PARALLEL, strict=True)
    for extra, ours, parallel in cases:
        decoupled = pace.scavenging_time(extra)
        stopped = pace.scavenging_time_parallel(
            extra, 1 / published.SCAVENGED_EVERY.value, published.SCAVENGED_STEP.value, conditions.stops.up
        )
        name = f"time of a run, +{100 * extra:.0f} % compute for half of its tokens"
        base = {"name": f"{name}, {ELASTIC}", "method": ELASTIC, "published": parallel, "value": stopped, "unit": "x"}
        rows.append({**base, "baseline": None, "ratio": None})
        base = {"name": f"{name}, {DECOUPLED}", "method": DECOUPLED, "published": ours, "value": decoupled, "unit": "x"}
        rows.append({**base, "against": ELASTIC, "baseline": stopped, "ratio": decoupled / stopped})
    return rows


# ------------------------------------------------------------------ a fleet of one's own


def advise(
    chips: int, learners: Sequence[int], conditions: FleetConditions, run: Run, on_progress: Told
) -> tuple[list[Row], int]:
    """Rows for ``chips``: which M, what spares buy, what faster recovery buys. And the M that is enough: the smallest
    whose goodput is within ``NEAR_BEST`` points of the best."""
    rows = goodput_rows([chips], learners, conditions, run, lambda share: on_progress(share / 2))
    tried = [row for row in rows if row["method"] == DECOUPLED]
    best = max(row["value"] for row in tried)
    enough = min(row["learners"] for row in tried if row["value"] >= best - NEAR_BEST)
    spares = [replace(conditions, spares=count).decoupled(chips, enough) for count in SPARES]
    faster = [conditions.with_faster_recovery(factor) for factor in FASTER]
    fleets = [*spares, *(fast.elastic(chips) for fast in faster), *(fast.decoupled(chips, enough) for fast in faster)]
    results = iter(simulate_fleets(fleets, conditions.repairs, run, lambda share: on_progress((1 + share) / 2)))
    first: Row | None = None
    for count, fleet in zip(SPARES, spares, strict=True):
        row = make_row(f"M = {enough}, {count} spare slices each", next(results), method="spares", spares=count)
        row["per_bought_chip"] = row["value"] * fleet.slices / (fleet.slices + count)
        first = first or row
        rows.append(
            {**row, "against": first["name"], "baseline": first["value"], "ratio": row["value"] / first["value"]}
        )
    for method, m in ((ELASTIC, 1), (DECOUPLED, enough)):
        slowest: Row | None = None
        for fast in faster:
            stops = fast.stops.down + fast.stops.up
            row = make_row(
                f"{label(method, m)}, stops of {stops:.3g} s per failure", next(results), method="recovery", of=method
            )
            slowest = slowest or row
            lift = {"against": slowest["name"], "baseline": slowest["value"], "ratio": row["value"] / slowest["value"]}
            rows.append({**row, "stop_seconds": stops, "learners": m, **lift})
    return rows, enough
