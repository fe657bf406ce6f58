"""The simulator of fleets against the real syncer core under the same failures, cell by cell."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from lab.cells import CellCache
from lab.fleet.advice import FleetConditions, Row, make_row, mean_and_half_width
from lab.fleet.simulator import Fleet, Result, Run, simulate_fleets
from lab.goodput import published
from lab.goodput.core_fleet import CoreFleet, CoreResult, Sync
from lab.goodput.pace import uneven_steps
from lab.goodput.rows import Told

_MOST_PENDING = 3.0  # turns of H steps: one that is being made, one that is being merged, one that came late


@dataclass(frozen=True, slots=True)
class CoreRun:
    """How much the core simulates: each fleet ``repetitions`` times, until ``failures`` of its chips fail if all train,
    but at most ``steps`` steps of each learner; ``learner_steps`` of all together."""

    repetitions: int = 8
    failures: float = 400
    steps: int = 4000
    learner_steps: int = 20_000
    seed: int = 0

    def seconds(self, fleet: Fleet) -> float:
        """Virtual time that counts."""
        most = min(self.steps, self.learner_steps / fleet.learners) * fleet.stops.step
        return min(most, self.failures * fleet.seconds_between_failures)


def core_rows(
    chips: Sequence[int],
    learners: Sequence[int],
    conditions: FleetConditions,
    run: CoreRun,
    cells: CellCache,
    told: Told,
) -> list[Row]:
    """Goodput by the core's ledger, with the fast simulator's beside it as ``baseline``. ``agrees``: they differ by no
    more than the sum of both 95 % intervals' halves, and no work has been left behind (``pending``)."""
    fleets = [conditions.decoupled(size, m) for size in chips for m in learners]
    fast = simulate_fleets(fleets, conditions.repairs, Run(seed=run.seed + 1))
    rows, whole = [], float(sum(run.repetitions * run.seconds(fleet) * fleet.learners for fleet in fleets))
    done = 0.0
    for fleet, expected in zip(fleets, fast, strict=True):
        results = []
        for repetition in range(run.repetitions):
            seed = run.seed + repetition
            share = run.seconds(fleet) * fleet.learners

            def on_progress(of_cell: float, before: float = done, share: float = share) -> None:
                told((before + of_cell * share) / whole)

            results.append(
                _simulate(fleet, conditions, Sync(), run.seconds(fleet), seed=seed, cells=cells, told=on_progress)
            )
            done += share
        rows.append(_core_row(fleet, results, expected))
    return rows


def _simulate(
    fleet: Fleet, conditions: FleetConditions, sync: Sync, seconds: float, seed: int, cells: CellCache, told: Told
) -> CoreResult:
    what: Row = {"fleet": asdict(fleet), "repairs": asdict(conditions.repairs), "sync": asdict(sync)}
    what |= {"seconds": seconds, "seed": seed}

    def make() -> Row:
        return asdict(CoreFleet(fleet, conditions.repairs, sync, seed, clock=time.process_time).run(seconds, told))

    return CoreResult(**cells.find_or_make(what, make))


def _core_row(fleet: Fleet, results: Sequence[CoreResult], fast: Result) -> Row:
    shares = Result(np.array([one.goodput for one in results]), np.array([one.uptime for one in results]), 0)
    row = make_row(f"core, M = {fleet.learners}, {fleet.chips:g} chips", shares, method="core")
    value, half = mean_and_half_width(100 * fast.goodput)
    own_half = (row["high"] - row["low"]) / 2
    events = sum(one.events for one in results)
    pending = max(one.pending for one in results)
    return {
        **row,
        "learners": fleet.learners,
        "of_chips": fleet.chips,
        "against": "the fast simulator",
        "baseline": value,
        "baseline_half": half,
        "ratio": row["value"] / value,
        "agrees": abs(row["value"] - value) <= own_half + half and pending < _MOST_PENDING,
        "pending": pending,
        "responders": float(np.mean([one.responders for one in results])),
        "pace": float(np.mean([one.pace for one in results])),
        "microseconds_per_event": 1e6 * sum(one.core_seconds for one in results) / max(1, events),
    }


def uneven_core_rows(conditions: FleetConditions, run: CoreRun, cells: CellCache, told: Told) -> list[Row]:
    """Eight learners of which four are slower, by the real core, none of them failing: the share of what they train
    that is merged (they compute all the time), the learners in a merge and the merges' pace."""
    count = published.UNEVEN_LEARNERS
    steps = uneven_steps(count, int(published.UNEVEN_SLOW.value), published.UNEVEN_BEHIND.value, conditions.stops.step)
    fleet = Fleet(1.0, count, math.inf, conditions.stops, slice_chips=1.0)
    settings = {"K = 8": Sync(quorum=8), "K = 1": Sync(grace_factor=0.0), "K = 1, grace": Sync()}
    rows = []
    for number, (name, sync) in enumerate(settings.items()):
        results = []
        for repetition in range(run.repetitions):
            seed, seconds = (
                run.seed + repetition,
                min(run.steps, run.learner_steps // count, 600) * conditions.stops.step,
            )
            what = {"uneven": steps.tolist(), "sync": asdict(sync), "seconds": seconds, "seed": seed}

            def make(sync: Sync = sync, seed: int = seed, seconds: float = seconds) -> Row:
                variation = published.UNEVEN_VARIATION.value
                world = CoreFleet(
                    fleet, conditions.repairs, sync, seed, clock=time.perf_counter, steps=steps, variation=variation
                )
                return asdict(world.run(seconds))

            results.append(CoreResult(**cells.find_or_make(what, make)))
        told((number + 1) / len(settings))
        shares = Result(np.array([one.goodput for one in results]), np.ones(run.repetitions), 0)
        row = make_row(f"unequal learners, core, {name}", shares, method="core")
        row["responders"] = float(np.mean([one.responders for one in results]))
        row["pace"] = float(np.mean([one.pace for one in results]))
        rows.append(row)
    return rows


def quick(run: CoreRun) -> CoreRun:
    """As ``run``, for seconds rather than minutes."""
    return replace(run, repetitions=3, failures=100, steps=400, learner_steps=1600)
