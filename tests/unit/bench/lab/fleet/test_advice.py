"""`bench/goodput.py --chips N`: advice for a fleet of one's own, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

import goodput
from lab.fleet import advice, parameters
from lab.fleet.advice import mean_and_half_width

SHORT = ("--repetitions", "3", "--failures", "60")


def run(*arguments: str) -> int:
    try:
        return goodput.main(arguments)
    except SystemExit as error:
        assert isinstance(error.code, int)
        return error.code


def test_an_interval_is_students() -> None:
    values = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    mean, half = mean_and_half_width(values)
    assert mean == 4.5 and half == pytest.approx(2.3646 * values.std(ddof=1) / np.sqrt(8), rel=0.005)


def test_a_fleet_of_ones_own_gets_advice(capsys: pytest.CaptureFixture[str]) -> None:
    own = (*SHORT, "--chips", "5000", "--mtbi", "30d", "--recovery", "60s")
    assert run(*own, "--json") == 0
    output = capsys.readouterr().out
    document = json.loads(output)
    assert document["parameters"]["downscale"] == {"value": 30.0, "source": "given"}
    assert document["parameters"]["slice"] == {"value": 8, "source": parameters.SLICE.source}
    assert document["enough"] in (2, 4, 8, 16, 32, 64) and document["rmse"] is None
    tried = {row["learners"]: row["value"] for row in document["rows"] if row["method"] == "decoupled"}
    assert tuple(tried) == advice.CANDIDATES
    assert tried[document["enough"]] >= max(tried.values()) - 1
    spares = [row for row in document["rows"] if row["method"] == "spares"]
    assert spares[-1]["value"] > spares[0]["value"] and spares[-1]["per_bought_chip"] < spares[-1]["value"]
    lifts = [row["ratio"] for row in document["rows"] if row["method"] == "recovery"]
    assert len(lifts) == 6 and min(lifts) == 1.0 and lifts[2] > lifts[5] > 1.0  # data-parallel gains more
    assert run(*own, "--json") == 0 and capsys.readouterr().out == output
    assert run(*SHORT, "--chips", "5000") == 0
    text = capsys.readouterr().out
    assert "what spares buy" in text and "what faster recovery buys" in text and "within one stop" not in text


def test_the_papers_fleets_and_the_cores_get_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SHORT) == 0
    assert "what spares buy" not in capsys.readouterr().out


def test_failures_within_one_stop_are_told_where_they_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    large = (*SHORT, "--chips", "1.2M", "--slice", "256", "--learners", "8")
    assert run(*large) == 0
    text = capsys.readouterr().out
    assert "0.57 failures would come within one stop of elastic" in text and "58  5" in text
    assert run(*large, "--fail-in-stops") == 0
    assert "within one stop" not in capsys.readouterr().out


def test_what_is_given_replaces_the_papers_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = ("--chips", "1.2M", "--slice", "256", "--learners", "8", "--json")
    values = {}
    for change in ((), ("--spares", "4"), ("--step", "20s"), ("--recovery", "5s")):
        assert run(*SHORT, *fleet, *change) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        ours = next(row for row in rows if row["method"] == "decoupled")
        values[change[:1]] = ours["value"]
        assert ("published" in ours) is (not change)  # the paper's figure is of its own fleet
    assert values["--spares",] > values[()] > values["--step",] and values["--recovery",] > values[()]


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
        ("--recovery", "soon"),
        ("--spares", "-1"),
    ],
)
def test_a_wrong_argument_is_named(option: str, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--chips", "5000", option, wrong) == 2
    assert f"argument {option}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--chips", "100", "--learners", "64"), "64 learners need a slice of 8 chips each, 512 in all"),
        (("--chips", "3"), "2 learners need a slice of 8 chips each, 16 in all"),
        (("--chips", "2.4M", "--mtbi", "1"), "one fails every 4.2e-07 s; write a time such as 30d or 1y"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_words(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2 and words in capsys.readouterr().err
