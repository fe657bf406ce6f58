"""What the benchmarks share: SIGTERM ends what a benchmark has begun, figures beside a baseline, refusals in words."""

from __future__ import annotations

import argparse
import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from diloco_operator.informer.cache import Cache
from repository import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import ablations
import common
import kubeapi
import overlap
import quality

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
    common.show([common.Row("held", 7.0, "B", "the bound", baseline=8.0, ratio=0.875)], as_json=False)
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


def test_options_are_numbers_within_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench")
    parser.add_argument("--jobs", type=common.whole_number(1, 16))
    parser.add_argument("--mbit", type=common.number(above=0))
    parser.add_argument("--latency", type=common.number(least=0))
    taken = parser.parse_args(["--jobs", "16", "--mbit", "0.5", "--latency", "0"])
    assert (taken.jobs, taken.mbit, taken.latency) == (16, 0.5, 0.0)
    for option, wrong, words in (
        ("--jobs", "0", "must be a whole number of at least 1 and at most 16, not '0'"),
        ("--jobs", "1.5", "must be a whole number of at least 1 and at most 16, not '1.5'"),
        ("--jobs", "17", "must be a whole number of at least 1 and at most 16, not '17'"),
        ("--mbit", "0", "must be a number above 0, not '0'"),
        ("--latency", "nan", "must be a number of at least 0, not 'nan'"),
        ("--latency", "inf", "must be a number of at least 0, not 'inf'"),
    ):
        with pytest.raises(SystemExit) as refused:
            parser.parse_args([option, wrong])
        assert refused.value.code == 2 and f"{option}: {words}" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    parser = argparse.ArgumentParser(prog="bench")
    common.add_report(parser)
    with pytest.raises(SystemExit) as refused:
        parser.parse_args(["--report", str(tmp_path / "file")])
    assert refused.value.code == 2 and "name a folder that can be written" in capsys.readouterr().err
    assert parser.parse_args(["--report", str(tmp_path / "new")]).report.is_dir()


def test_an_interrupted_benchmark_says_so_in_a_line() -> None:
    program = "import common, signal, os\ncommon.run_to_exit(lambda: os.kill(os.getpid(), signal.SIGINT) or 0)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT / "bench", capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (130, 1) and done.stderr.startswith("interrupted")


@pytest.mark.parametrize(
    ("bench", "arguments", "words"),
    [
        (quality, ["--arms", "nosuch"], "no arm has 'nosuch' in its name; there are M = 1, M = 2"),
        (quality, ["--sync", '{"evry": 3}'], "spec.sync.evry = 3: is not a known field: did you mean every?"),
        (quality, ["--lengths", "0"], "--lengths: must be a whole number of at least 1"),
        (quality, ["--show", "--cache", "/nowhere/x"], "--cache /nowhere/x: there is no such file"),
        (quality, ["--cache", str(ROOT / "README.md")], "no line of it is a trial's result"),
        (quality, ["--cache", str(ROOT)], "Is a directory"),
        (ablations, ["--groups", "inner", "--arms", "nosuch"], "no arm of these groups has 'nosuch' in its name"),
        (ablations, ["--learners", "0"], "--learners"),
        (ablations, ["--seeds", "0"], "--seeds: must be a whole number of at least 1"),
    ],
)
def test_what_trials_refuse(
    bench: ModuleType, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        bench.main(arguments)
    assert refused.value.code == 2 and words in capsys.readouterr().err


def test_show_without_a_result_says_so(tmp_path: Path) -> None:
    for bench in (quality, ablations):
        with pytest.raises(SystemExit, match="no result of these trials is kept"):
            bench.main(["--show", "--lengths", "7"])
    # What had no time to be trained is not an error of --show.
    assert quality.main(["--hours", "0", "--lengths", "7", "--sizes", "small", "--cache", str(tmp_path / "new")]) == 3


def test_quick_ablations_leave_kept_results_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[Path] = []
    monkeypatch.setattr(ablations, "run_ablations", lambda chosen, file: files.append(file) or 0)
    kept = tmp_path / "trials.jsonl"
    assert ablations.main(["--cache", str(kept)]) == ablations.main(["--quick", "--cache", str(kept)]) == 0
    assert files[0] == kept != files[1]


def test_what_stands_in_for_the_operators_cache_is_called_as_the_cache_is() -> None:
    for name in ("put", "drop"):
        taken = list(inspect.signature(getattr(kubeapi.Told, name)).parameters)
        assert taken == list(inspect.signature(getattr(Cache, name)).parameters)
