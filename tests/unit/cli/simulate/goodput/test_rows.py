"""`diloco simulate goodput`: the published figures are met with one set of parameters, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from diloco.main import app
from diloco.simulate.goodput import defaults, pace, published
from diloco.simulate.goodput.fleet import Run, simulate_fleets
from diloco.simulate.goodput.rows import (
    FleetConditions,
    goodput_rows,
    mean_and_half_width,
    root_mean_square_error,
    scavenging_rows,
    uneven_rows,
)
from repository import ROOT

SHORT = ("--repetitions", "3", "--failures", "60")


def silent(share: float) -> None:
    pass


def diloco(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_the_whole_table_is_met_with_one_set_of_parameters() -> None:
    rows = goodput_rows(published.CHIPS, (2, 4, 8, 16), FleetConditions(), Run(4, 800), silent)
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
        fleets = [FleetConditions().with_faster_recovery(stop / 30).decoupled(chips, learners) for stop in (30, 10, 5)]
        found = [100 * result.goodput.mean() for result in simulate_fleets(fleets, defaults.REPAIRS, Run(4, 800))]
        assert found == pytest.approx(values, abs=1.5)


def test_learners_of_unequal_speed() -> None:
    rows = uneven_rows(Run(4, 400))
    assert [row["published"] for row in rows] == [84, 100, 100]
    for row in rows:
        assert row["value"] == pytest.approx(row["published"], abs=1.5)
    # Without variation everybody comes to the slowest's pace.
    steps, random = pace.uneven_steps(8, 2, 0.25), np.random.default_rng(0)
    share = pace.simulate_uneven(steps, 0.0, pace.Quorum(8, 0.0, 2), 500, 1, random)
    assert share == pytest.approx(steps.mean() / steps.max(), abs=0.005)
    sixth = pace.simulate_uneven(steps, 0.0, pace.Quorum(6, 0.0, 2), 500, 1, random)
    assert sixth == pytest.approx(1.0, abs=1e-3)


def test_compute_that_comes_and_goes() -> None:
    for row in scavenging_rows(FleetConditions()):
        assert row["value"] == pytest.approx(row["published"], abs=0.02)


def test_an_interval_is_students() -> None:
    values = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    mean, half = mean_and_half_width(values)
    assert mean == 4.5 and half == pytest.approx(2.3646 * values.std(ddof=1) / np.sqrt(8), rel=0.005)


# ------------------------------------------------------------------ the command


def test_the_command_prints_the_table_and_the_same_again() -> None:
    code, output = diloco("goodput", *SHORT, "--json")
    assert code == 0
    document: dict[str, Any] = json.loads(output)
    assert document["rmse"] <= 3  # so few failures
    assert {"name", "value", "unit", "baseline", "ratio"} <= set.intersection(*(set(row) for row in document["rows"]))
    assert document["parameters"]["mtbi"]["value"] == published.YEAR
    assert diloco("goodput", *SHORT, "--json")[1] == output
    code, text = diloco("goodput", *SHORT)
    assert code == 0 and "RMSE" in text and "fit: " in text and "M = 16" in text


def test_a_fleet_of_ones_own_gets_advice() -> None:
    code, output = diloco("goodput", "--chips", "5000", "--mtbi", "30d", "--recovery", "60s", *SHORT, "--json")
    assert code == 0
    document = json.loads(output)
    assert document["parameters"]["downscale"] == {"value": 30.0, "source": "given"}
    assert document["rmse"] is None and document["enough"] in (2, 4, 8, 16, 32, 64)
    tried = {row["learners"]: row["value"] for row in document["rows"] if row["method"] == "decoupled"}
    assert tried[document["enough"]] >= max(tried.values()) - 1
    spares = [row for row in document["rows"] if row["method"] == "spares"]
    assert spares[-1]["value"] > spares[0]["value"] and spares[-1]["per_bought_chip"] < spares[-1]["value"]
    lifts = [row["ratio"] for row in document["rows"] if row["method"] == "recovery"]
    assert len(lifts) == 6 and min(lifts) == 1.0 and lifts[2] > lifts[5] > 1.0  # data-parallel gains more
    code, text = diloco("goodput", "--chips", "5000", *SHORT)
    assert code == 0 and "what spares buy" in text and "what faster recovery buys" in text


@pytest.mark.parametrize(
    ("option", "wrong"),
    [
        ("--chips", "many"),
        ("--chips", "0"),
        ("--mtbi", "5q"),
        ("--mtbi", "0s"),
        ("--learners", "0"),
        ("--learners", "2,x"),
        ("--slice", "0"),
        ("--step", "0"),
        ("--repair-shape", "0"),
        ("--repetitions", "1"),
        ("--failures", "1"),
        ("--spares", "-1"),
        ("--cache", "here"),
    ],
)
def test_a_wrong_argument_is_named(option: str, wrong: str) -> None:
    code, output = diloco("goodput", option, wrong)
    assert code == 2 and option in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--chips", "100", "--learners", "64"), "64 learners need a slice of 8 chips each, 512 in all"),
        (("--chips", "3"), "2 learners need a slice of 8 chips each, 16 in all"),
        (("--mtbi", "1"), "one fails every 4.2e-07 s; write a time such as 30d or 1y"),
        (("--core", "--quick", "--cache", str(ROOT / "README.md")), "File exists; name a folder"),
        (("--repetitions", "1"), "must be a whole number of at least 3"),
        (("--repair-shape", "-1"), "must be a number of at least 0.1"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_words(arguments: tuple[str, ...], words: str) -> None:
    code, output = diloco("goodput", *arguments)
    assert code == 2 and words in " ".join(re.sub("[│╭╮╰╯─]", " ", output).split())
