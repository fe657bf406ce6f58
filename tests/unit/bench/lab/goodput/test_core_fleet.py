"""The real core under a fleet's failures, against the simulator that knows nothing of it."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from lab.cells import CellCache
from lab.fleet.advice import REPAIRS, STOPS
from lab.fleet.parameters import YEAR
from lab.fleet.simulator import Fleet, Run
from lab.goodput.core_fleet import CoreFleet, Sync
from lab.goodput.core_rows import CoreRun, core_rows, uneven_core_rows
from lab.goodput.rows import PAPER, goodput_rows, uneven_rows
from lab.goodput.tables import goodput_text


def silent(share: float) -> None:
    pass


def test_the_core_merges_what_a_failing_fleet_trains_and_its_ledger_is_exact(tmp_path: Path) -> None:
    world = CoreFleet(Fleet(1_200_000, 4, YEAR, STOPS), REPAIRS, Sync(), 3, clock=time.perf_counter)
    result = world.run(1000.0)
    assert world.core.ledger is not None
    assert [world.core.ledger.imbalances(slot) for slot in range(4)] == [[]] * 4
    totals = world.core.ledger.totals()
    assert totals.dropped == 0 and totals.merged > 0.98 * totals.trained  # a learner's other slices keep its work
    assert 0.6 < result.goodput < 0.95 and 0.97 < result.uptime <= 1 and 2 < result.responders <= 4


@pytest.mark.slow
def test_the_core_agrees_with_the_fast_simulator(tmp_path: Path) -> None:
    run = CoreRun(repetitions=4, failures=300, steps=2000, learner_steps=8000)
    rows = core_rows((1_200_000,), (1, 2, 4), PAPER, run, cells=CellCache(tmp_path, []), told=silent)
    assert [row["agrees"] for row in rows] == [True] * 3, rows


@pytest.mark.slow
def test_unequal_learners_do_not_wait_but_merge_more_rarely(tmp_path: Path) -> None:
    run = CoreRun(repetitions=2, steps=160)
    wide, racing, grace = uneven_core_rows(PAPER, run, CellCache(tmp_path, []), silent)
    assert wide["value"] == pytest.approx(100, abs=4) and grace["value"] == pytest.approx(100, abs=4)
    assert wide["pace"] < 0.9 * grace["pace"] and wide["responders"] == 8 and grace["responders"] > 7
    # Whoever is first is merged alone, and the others' work grows too old.
    assert racing["responders"] < 2 and racing["value"] < 90


def test_what_the_core_did_is_shown_to_people_too(tmp_path: Path) -> None:
    run, cells = CoreRun(repetitions=3, failures=10, steps=16, learner_steps=32), CellCache(tmp_path, [])
    fleet = Run(repetitions=3, failures=20, seed=0)
    rows = [
        *goodput_rows((1_200_000,), (2,), PAPER, fleet, on_progress=silent),
        *uneven_rows(fleet),
        *core_rows((1_200_000,), (2,), PAPER, run, cells=cells, told=silent),
        *uneven_core_rows(PAPER, run, cells, silent),
    ]
    document = {
        "rows": rows,
        "rmse": None,
        "repetitions": 3,
        "failures": 20,
        "parameters": {"mtbi": {"value": 1.0, "source": "given"}},
    }
    text = goodput_text(document)
    for words in (r"core, M = 2, .* (yes|NO) ", "unequal learners, core, K = 8 ", "unequal learners, K = 8 "):
        assert re.search(words, text), text


def test_what_was_simulated_is_kept_until_the_code_or_the_question_changes(tmp_path: Path) -> None:
    code = tmp_path / "rule.py"
    code.write_text("one")
    made = []

    def make() -> dict[str, Any]:
        made.append(1)
        return {"value": len(made)}

    def find(what: dict[str, Any]) -> Any:
        return CellCache(tmp_path / "cells", [code]).find_or_make(what, make)["value"]

    assert [find({"a": 1}), find({"a": 1}), find({"a": 2})] == [1, 1, 2]
    code.write_text("two")
    assert find({"a": 1}) == 3
    for path in (tmp_path / "cells").iterdir():
        path.write_text(json.dumps({"value": 9})[:-3])  # cut off
    assert find({"a": 1}) == 4
