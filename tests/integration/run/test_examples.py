"""Every example job runs to its end, with a nearer stop."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import Run, check_ledger

from repository import ROOT

EXAMPLES = ROOT / "examples"
STOP = {"tiny-vit": 5_000}  # an image is one token
FALL = {"tiny-vit": 0.0, "minimal": 0.3, "custom-loop": 0.3}  # nats that the loss falls at least, in so short a time

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.promise("A job with its own loop can be scored by its own program")
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_an_example_runs(start: Callable[..., Run], tmp_path: Path, path: Path) -> None:
    for script in EXAMPLES.glob("*.py"):
        shutil.copy(script, tmp_path)
    tokens = STOP.get(path.stem, 80_000)
    run = start("--set", f"training.stop.tokens={tokens}", text=path.read_text())
    assert run.ends() == 0, run.everything()
    report = run.report()
    assert report["outcome"] == "complete" and report["tokens"]["trained"] >= tokens
    assert report["tokens"]["merged"] > 0.7 * report["tokens"]["trained"], report["tokens"]
    assert report["versions"]["min"] >= 1
    check_ledger(report, len(report["ledger"]))
    assert math.isfinite(report["final_loss"])
    first = report["initial_loss"] if report["initial_loss"] is not None else report["eval_loss"][0][1]
    assert report["final_loss"] < first - FALL.get(path.stem, 1.0)
    assert not re.search("Traceback", run.everything()), run.everything()
