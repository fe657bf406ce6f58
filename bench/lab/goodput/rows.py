"""The published table beside the simulator's, learners of unequal speed, compute that comes and goes.

``lab.fleet.simulator`` and ``pace`` simulate. Goodput and uptime are in %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from lab.fleet import advice, parameters
from lab.fleet.advice import DECOUPLED, ELASTIC, RIGID, FleetConditions, Row, make_row
from lab.fleet.simulator import Result, Run
from lab.goodput import pace, published

Told = Callable[[float], None]  # which share is done

PAPER = FleetConditions(slice_chips=published.SLICE.value)
LEARNERS = tuple(published.DECOUPLED)


def goodput_rows(
    chips: Sequence[int], learners: Sequence[int], conditions: FleetConditions, run: Run, on_progress: Told
) -> list[Row]:
    """Both kinds of data-parallel training and each number of learners, at each number of chips, with the paper's
    values beside ours."""
    rows = advice.goodput_rows(chips, learners, conditions, run, on_progress=on_progress)
    for row in rows:
        known = published_value(row["method"], row["learners"], row["chips"], conditions)
        if known is not None:
            row["published"] = known
    return rows


def published_value(method: str, learners: int, chips: int, conditions: FleetConditions) -> int | None:
    """The paper's goodput (%) of such a fleet; None: it has none."""
    if chips not in published.CHIPS or conditions.mtbi != parameters.MTBI.value or conditions.spares:
        return None
    if replace(conditions.stops, interrupted=False) != advice.STOPS:
        return None
    rows = {RIGID: published.RIGID, ELASTIC: published.ELASTIC}
    values = rows.get(method) or published.DECOUPLED.get(learners)
    return None if values is None else values[published.CHIPS.index(chips)]


def root_mean_square_error(rows: Sequence[Row]) -> float | None:
    """Of the rows that have a published value, in points; None: none has."""
    errors = [row["value"] - row["published"] for row in rows if "published" in row]
    return math.sqrt(sum(error**2 for error in errors) / len(errors)) if errors else None


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
            steps,
            published.UNEVEN_VARIATION.value,
            quorum,
            max(100, round(run.failures)),
            repetitions=run.repetitions,
            random=random,
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
