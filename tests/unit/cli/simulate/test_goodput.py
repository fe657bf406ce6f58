"""`diloco simulate goodput`: advice for a fleet of one's own, and what is refused."""

from __future__ import annotations

import json
import re
from functools import partial

import numpy as np
import pytest
from typer.testing import CliRunner

from diloco.main import app
from diloco.simulate import fleet, parameters
from diloco.simulate.advice import mean_and_half_width


def diloco(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_an_interval_is_students() -> None:
    values = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    mean, half = mean_and_half_width(values)
    assert mean == 4.5 and half == pytest.approx(2.3646 * values.std(ddof=1) / np.sqrt(8), rel=0.005)


def test_a_fleet_of_ones_own_gets_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "Run", partial(fleet.Run, 3, 60))  # short
    own = ("--chips", "5000", "--mtbi", "30d", "--recovery", "60s")
    code, output = diloco("goodput", *own, "--json")
    assert code == 0
    document = json.loads(output)
    assert document["parameters"]["downscale"] == {"value": 30.0, "source": "given"}
    assert document["parameters"]["slice"] == {"value": 8, "source": parameters.SLICE.source}
    assert document["enough"] in (2, 4, 8, 16, 32, 64)
    tried = {row["learners"]: row["value"] for row in document["rows"] if row["method"] == "decoupled"}
    assert tried[document["enough"]] >= max(tried.values()) - 1
    spares = [row for row in document["rows"] if row["method"] == "spares"]
    assert spares[-1]["value"] > spares[0]["value"] and spares[-1]["per_bought_chip"] < spares[-1]["value"]
    lifts = [row["ratio"] for row in document["rows"] if row["method"] == "recovery"]
    assert len(lifts) == 6 and min(lifts) == 1.0 and lifts[2] > lifts[5] > 1.0  # data-parallel gains more
    assert diloco("goodput", *own, "--json")[1] == output
    code, text = diloco("goodput", "--chips", "5000")
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
        ("--spares", "-1"),
    ],
)
def test_a_wrong_argument_is_named(option: str, wrong: str) -> None:
    code, output = diloco("goodput", "--chips", "5000", option, wrong)
    assert code == 2 and option in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--chips", "100", "--learners", "64"), "64 learners need a slice of 8 chips each, 512 in all"),
        (("--chips", "3"), "2 learners need a slice of 8 chips each, 16 in all"),
        (("--chips", "2.4M", "--mtbi", "1"), "one fails every 4.2e-07 s; write a time such as 30d or 1y"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_words(arguments: tuple[str, ...], words: str) -> None:
    code, output = diloco("goodput", *arguments)
    assert code == 2 and words in " ".join(re.sub("[│╭╮╰╯─]", " ", output).split())
