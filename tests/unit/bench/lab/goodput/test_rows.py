"""`bench/goodput.py`: the published figures are met with one set of parameters, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import goodput
from lab.fleet import parameters
from lab.fleet.advice import REPAIRS
from lab.fleet.simulator import Run, simulate_fleets
from lab.goodput import pace, published
from lab.goodput.rows import PAPER, goodput_rows, root_mean_square_error, scavenging_rows, uneven_rows
from repository import ROOT

SHORT = ("--repetitions", "3", "--failures", "60")


def silent(share: float) -> None:
    pass


def test_the_whole_table_is_met_with_one_set_of_parameters() -> None:
    rows = goodput_rows(published.CHIPS, (2, 4, 8, 16), PAPER, Run(4, 800), on_progress=silent)
    assert sum("published" in row for row in rows) == 30
    error = root_mean_square_error(rows)
    assert error is not None and error <= 1.5
    assert max(abs(row["value"] - row["published"]) for row in rows) <= 5
    for row in rows:
        assert row["low"] <= row["value"] <= row["high"]
        if row["method"] == "decoupled":
            assert row["ratio"] == pytest.approx(row["value"] / row["baseline"]) and row["ratio"] > 1
            if row["learners"] >= published.UPTIME_FROM:
                assert row["uptime"] > 99


def test_faster_recovery_lifts_both_methods() -> None:
    """Goodput at stops of 30, 10 and 5 s per failure, as another program found it for the same rules."""
    expected = {(8, 1_200_000): (88.5, 95.5, 97.6), (8, 2_400_000): (80.5, 91.5, 95.4)}
    expected |= {(32, 2_400_000): (93.7, 97.5, 98.6), (1, 1_200_000): (55.5, 75.0, 85.0)}
    for (learners, chips), values in expected.items():
        fleets = [PAPER.with_faster_recovery(stop / 30).decoupled(chips, learners) for stop in (30, 10, 5)]
        found = [100 * result.goodput.mean() for result in simulate_fleets(fleets, REPAIRS, Run(4, 800))]
        assert found == pytest.approx(values, abs=1.5)


def test_learners_of_unequal_speed() -> None:
    rows = uneven_rows(Run(4, 400))
    assert [row["published"] for row in rows] == [84, 100, 100]
    for row in rows:
        assert row["value"] == pytest.approx(row["published"], abs=1.5)
    # Without variation everybody comes to the slowest's pace.
    steps, random = pace.uneven_steps(8, 2, 0.25), np.random.default_rng(0)
    share = pace.simulate_uneven(steps, 0.0, pace.Quorum(8, 0.0, 2), 500, repetitions=1, random=random)
    assert share == pytest.approx(steps.mean() / steps.max(), abs=0.005)
    sixth = pace.simulate_uneven(steps, 0.0, pace.Quorum(6, 0.0, 2), 500, repetitions=1, random=random)
    assert sixth == pytest.approx(1.0, abs=1e-3)


def test_compute_that_comes_and_goes() -> None:
    for row in scavenging_rows(PAPER):
        assert row["value"] == pytest.approx(row["published"], abs=0.02)


# ------------------------------------------------------------------ the script


def test_the_script_prints_the_table_and_the_same_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def said(*arguments: str) -> str:
        assert goodput.main([*SHORT, *arguments]) == 0
        return capsys.readouterr().out

    output = said("--json", "--report", str(tmp_path))
    document: dict[str, Any] = json.loads(output)
    assert document["rmse"] <= 3  # so few failures
    assert {"name", "value", "unit", "baseline", "ratio"} <= set.intersection(*(set(row) for row in document["rows"]))
    assert document["parameters"]["mtbi"]["value"] == parameters.YEAR
    assert document["parameters"]["slice"] == {"value": 256, "source": published.SLICE.source}
    assert said("--json") == output
    assert all(plot["title"] in (tmp_path / "report.md").read_text() for plot in document["plots"])
    text = said()
    assert "RMSE" in text and "fit: " in text and "M = 16" in text
    assert "M = 4" in said("--chips", "5000", "--slice", "8", "--learners", "2,4")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--chips", "many"), "argument --chips: 'many' is no number: write 5000"),
        (("--learners", "2,x"), "argument --learners: '2,x': write numbers from 1 to 4096"),
        (("--slice", "0"), "argument --slice: must be a whole number of at least 1"),
        (("--repetitions", "1"), "argument --repetitions: must be a whole number of at least 3"),
        (("--failures", "1"), "argument --failures: must be a number of at least 10"),
        (("--chips", "100", "--slice", "8", "--learners", "64"), "64 learners need a slice of 8 chips each, 512"),
        (("--core", "--quick", "--cache", str(ROOT / "README.md")), "File exists; name a folder"),
    ],
)
def test_a_wrong_argument_is_named(arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = goodput.main(arguments)
    except SystemExit as error:
        code = error.code
    assert code == 2 and words in capsys.readouterr().err
