"""What the benchmarks share: SIGTERM ends what a benchmark has begun, figures beside a baseline, refusals in words."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from repository import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import common
import overlap

PROGRAM = """
import common, time
common.end_on_sigterm()
try:
    print("begun", flush=True)
    time.sleep(60)
finally:
    print("ended")
"""


def test_sigterm_ends_what_a_benchmark_has_begun() -> None:
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=ROOT / "bench", stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    assert program.stdout.readline() == "begun\n"
    program.terminate()
    said, _ = program.communicate(timeout=30)
    assert (said, program.returncode) == ("ended\n", 143)


def test_a_figure_is_shown_beside_its_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    rows = common.compare("ours", lambda: None, {"theirs": lambda: None}, work=10.0, unit="GB/s", rounds=3)
    common.show(rows, as_json=True)
    (printed,) = json.loads(capsys.readouterr().out)["rows"]
    assert (printed["name"], printed["against"]) == ("ours", "theirs")
    assert min(printed["value"], printed["baseline"], printed["ratio"]) > 0
    common.show([common.Row("held", 7.0, "B", "the bound", 8.0, 0.875)], as_json=False)
    assert "0.88 x the bound (8)" in capsys.readouterr().out


def test_a_device_that_is_not_there_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(common, "end_on_sigterm", lambda: None)  # or the tests' own process would have it from now on
    monkeypatch.setattr(sys, "argv", ["overlap.py", "--device", "cuda"])
    with pytest.raises(SystemExit) as refused:
        overlap.main()
    assert refused.value.code == 2 and "torch finds no CUDA device here" in capsys.readouterr().err
