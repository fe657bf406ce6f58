"""What a fleet of one's own would make of its chips: figures side by side, in %. ``simulator`` simulates them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lab.fleet import parameters
from lab.fleet.repairs import RepairTimes
from lab.fleet.simulator import Fleet, Result, Run, Stops, simulate_fleets

Row = dict[str, Any]

RIGID, ELASTIC, DECOUPLED = "rigid data-parallel", "elastic data-parallel", "decoupled"
CANDIDATES = (2, 4, 8, 16, 32, 64)  # learners that are tried
SPARES = (0, 1, 2, 4)  # slices of each learner
FASTER = (1.0, 1 / 3, 1 / 6)  # stops, as shares of what they are
NEAR_BEST = 1.0  # points: as many learners as it takes to come so near to the best
FEW_IN_A_STOP = 0.3  # failures: up to so many cost a few points at most
_NORMAL = 1.959964  # 97.5 % quantile

# The parameters as the simulator takes them.
STOPS = Stops(parameters.STEP.value, parameters.DOWNSCALE.value, parameters.UPSCALE.value)
RIGID_STOPS = Stops(parameters.RIGID_STEP.value, parameters.RESTART.value, 0.0)
REPAIRS = RepairTimes.with_mean(
    parameters.REPAIR_MEAN.value, parameters.REPAIR_SHAPE.value, parameters.REPAIR_POWER.value
)


@dataclass(frozen=True, slots=True)
class FleetConditions:
    """What the fleet is like, beside its chips and learners; seconds, chips."""

    mtbi: float = parameters.MTBI.value
    slice_chips: float = parameters.SLICE.value
    stops: Stops = STOPS
    rigid: Stops = RIGID_STOPS
    repairs: RepairTimes = REPAIRS
    spares: int = 0

    def decoupled(self, chips: float, learners: int) -> Fleet:
        return Fleet(chips, learners, self.mtbi, self.stops, slice_chips=self.slice_chips, spares=self.spares)

    def elastic(self, chips: float) -> Fleet:
        """One learner of all chips that goes on without what failed."""
        return self.decoupled(chips, 1)

    def rigid_parallel(self, chips: float) -> Fleet:
        """One learner of all chips that goes on when all of them are there again."""
        return Fleet(chips, 1, self.mtbi, self.rigid, slice_chips=self.slice_chips, spares=math.inf)

    def with_faster_recovery(self, factor: float) -> FleetConditions:
        def faster(stops: Stops) -> Stops:
            return replace(stops, down=stops.down * factor, up=stops.up * factor)

        return replace(self, stops=faster(self.stops), rigid=faster(self.rigid))

    def used(self) -> dict[str, dict[str, Any]]:
        """Every parameter by its name, and where its value is from."""
        stops, rigid, repairs = self.stops, self.rigid, self.repairs
        used = {
            "mtbi": (self.mtbi, parameters.MTBI),
            "slice": (self.slice_chips, parameters.SLICE),
            "step": (stops.step, parameters.STEP),
            "downscale": (stops.down, parameters.DOWNSCALE),
            "upscale": (stops.up, parameters.UPSCALE),
            "restart": (rigid.down, parameters.RESTART),
            "rigid-step": (rigid.step, parameters.RIGID_STEP),
            "repair-mean": (repairs.mean, parameters.REPAIR_MEAN),
            "repair-shape": (repairs.shape, parameters.REPAIR_SHAPE),
            "repair-power": (repairs.power, parameters.REPAIR_POWER),
        }
        return {
            name: {
                "value": value,
                "source": known.source if math.isclose(value, known.value, rel_tol=1e-6) else "given",
            }
            for name, (value, known) in used.items()
        }


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


def compared(row: Row, other: Row, **more: Any) -> Row:
    """A row, and what it is as a share of another one."""
    return {**row, **more, "baseline": other["value"], "ratio": row["value"] / other["value"]}


def goodput_rows(
    chips: Sequence[int],
    learners: Sequence[int],
    conditions: FleetConditions,
    run: Run,
    on_progress: Callable[[float], None] = lambda share: None,
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
    baselines = {row["chips"]: row for row in rows if row["method"] == ELASTIC}
    for row in rows:
        if row["method"] == DECOUPLED:
            beside = baselines[row["chips"]]
            row.update(compared(row, beside, against=beside["method"]))
    return rows


def failures_left_out(chips: int, learners: int, conditions: FleetConditions) -> str:
    """A sentence where more than a few failures would come within one stop, which this simulation leaves out."""
    fleets = (conditions.elastic(chips), conditions.decoupled(chips, learners))
    elastic, own = (fleet.stops.down * fleet.slices * fleet.slice_rate for fleet in fleets)
    if conditions.stops.interrupted or max(elastic, own) < FEW_IN_A_STOP:
        return ""
    return (
        f"While a learner stands still nothing fails in this simulation. {elastic:.2g} failures would come within one "
        f"stop of elastic data-parallel training, and {own:.2g} within one of M = {learners}. From some "
        f"{FEW_IN_A_STOP} on the real goodput is lower than shown."
    )


def label(method: str, learners: int) -> str:
    return f"M = {learners}" if method == DECOUPLED else method


def advise(fleets: Sequence[Row], conditions: FleetConditions, run: Run) -> tuple[list[Row], int]:
    """Rows of what spares and faster recovery buy to fleets of one size (``goodput_rows``). And the M that is enough:
    the smallest whose goodput is within ``NEAR_BEST`` points of the best."""
    tried = [row for row in fleets if row["method"] == DECOUPLED]
    chips = tried[0]["chips"]
    best = max(row["value"] for row in tried)
    enough = min(row["learners"] for row in tried if row["value"] >= best - NEAR_BEST)
    spares = [replace(conditions, spares=count).decoupled(chips, enough) for count in SPARES]
    faster = [conditions.with_faster_recovery(factor) for factor in FASTER]
    asked = [*spares, *(fast.elastic(chips) for fast in faster), *(fast.decoupled(chips, enough) for fast in faster)]
    results = iter(simulate_fleets(asked, conditions.repairs, run))
    rows: list[Row] = []
    first: Row | None = None
    for count, fleet in zip(SPARES, spares, strict=True):
        row = make_row(f"M = {enough}, {count} spare slices each", next(results), method="spares", spares=count)
        row["per_bought_chip"] = row["value"] * fleet.slices / (fleet.slices + count)
        first = first or row
        rows.append(compared(row, first, against=first["name"]))
    for method, m in ((ELASTIC, 1), (DECOUPLED, enough)):
        slowest: Row | None = None
        for fast in faster:
            stops = fast.stops.down + fast.stops.up
            row = make_row(
                f"{label(method, m)}, stops of {stops:.3g} s per failure", next(results), method="recovery", of=method
            )
            slowest = slowest or row
            rows.append(compared(row, slowest, stop_seconds=stops, learners=m, against=slowest["name"]))
    return rows, enough
