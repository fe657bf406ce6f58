"""After a hard kill ``status`` tells of the run that was killed, not of the end of the one before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from diloco.console import CommandError
from diloco.local import status
from diloco.main import app
from diloco.processes.workdir import Workdir, claim, locked
from diloco_protocol.spec.load import parse_job
from status_documents import job_report, status_document

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: tiny}
spec:
  learners: {command: [python, train.py]}
  regions: [{learners: 2}]
"""
HOLD = "import sys, time; from pathlib import Path; from diloco.processes.workdir import locked\n"
HOLD += "with locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)\n"


def diloco(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


def killed_runner(path: Path) -> None:
    """A process that holds the directory as a run does, until it is killed."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as runner:
        assert runner.stdout is not None and runner.stdout.readline() == "held\n"
        assert Workdir(path).runner() is not None
        runner.send_signal(signal.SIGKILL)
        runner.wait(30)


def sample(tokens: int, steps: int, at: float = 5.0) -> str:
    row: dict[str, Any] = {"source": "status", "time": time.time() + at, "phase": "training", "epoch": 2,
                           "elapsed_seconds": 90.5, "step": steps, "merges": 40, "tokens_per_second": 100.0,
                           "tokens": {"trained": tokens, "merged": tokens - 800, "pending": 800, "dropped": 0},
                           "goodput": 0.5, "uptime": 1.0, "bytes_up": 10, "bytes_down": 20, "versions": [3, 4],
                           "active": 2, "eval_loss": [400000, 2.25]}  # fmt: skip
    return json.dumps(row)


def test_the_figures_are_those_of_the_run_that_was_killed(tmp_path: Path) -> None:
    tokens = {"trained": 227456, "merged": 227456, "pending": 0, "dropped": 0}
    with locked(tmp_path / "run") as workdir:
        claim(workdir, parse_job(JOB), tmp_path)
        workdir.report.write_text(job_report(outcome="interrupted", steps=948, tokens=tokens).model_dump_json())
    code, said = diloco("status", workdir.path)
    assert code == 0 and "interrupted" in said and "killed" not in said, "that run ended by itself"

    # The next one is killed before anything was seen of it, and then once more after it was.
    os.utime(workdir.report, (time.time() - 60,) * 2)
    killed_runner(workdir.path)
    code, said = diloco("status", workdir.path)
    assert code == 0 and "killed before it reported anything" in said and "227,456 trained" in said
    workdir.metrics_file.write_text(sample(492_000, 1968) + "\n" + sample(492_800, 1969) + '\n{"source": "sta')
    code, said = diloco("status", workdir.path)
    assert code == 0 and "not running" in said and "killed" in said and "interrupted" not in said
    assert "492,800 trained" in said and "1,969 steps" in said and "2.250" in said and "227,456" not in said
    report = json.loads(diloco("status", workdir.path, "--json")[1])["report"]
    assert (report["outcome"], report["steps"], report["syncer"]["epoch"]) == ("killed", 1969, 2)
    assert diloco("status", workdir.path, "--watch")[0] == 1
    assert "killed" in diloco("report", workdir.path)[1]

    # One that ends by itself has the last word again.
    with locked(workdir.path):
        workdir.report.write_text(job_report(outcome="complete", steps=2000).model_dump_json())
    code, said = diloco("status", workdir.path)
    assert "complete" in said and "killed" not in said and workdir.lock.read_text() == ""


def test_a_run_that_goes_on_is_not_told_by_an_older_end_either(tmp_path: Path) -> None:
    """While its syncer is away, of whatever reason."""
    with locked(tmp_path / "run") as workdir:
        claim(workdir, parse_job(JOB), tmp_path)
        workdir.report.write_text(job_report(outcome="interrupted", steps=948).model_dump_json())
        os.utime(workdir.report, (time.time() - 60,) * 2)
        workdir.metrics_file.write_text(sample(492_800, 1969) + "\n")
        code, said = diloco("status", workdir.path)
        assert code == 0 and "running, but its syncer does not answer" in said
        assert "492,800 trained" in said and "interrupted" not in said and "948" not in said
        assert json.loads(diloco("status", workdir.path, "--json")[1])["report"]["outcome"] == "running"


def test_a_run_that_has_just_begun_again_is_running(tmp_path: Path) -> None:
    """Nothing of it was seen yet, and what lies there is of the run before."""
    with locked(tmp_path / "run") as workdir:
        claim(workdir, parse_job(JOB), tmp_path)
        workdir.report.write_text(job_report(outcome="interrupted", steps=948).model_dump_json())
        os.utime(workdir.report, (time.time() - 60,) * 2)
        workdir.metrics_file.write_text(sample(1000, 4, at=-60.0) + "\n")
        code, said = diloco("status", workdir.path)
        assert code != 0 and "is running, but its syncer does not answer yet" in said
        (row,) = json.loads(diloco("list", tmp_path, "--json")[1])["items"]
        assert (row["state"], row["running"]) == ("starting", True)


def test_a_run_that_ends_while_its_report_is_asked_for_has_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with locked(tmp_path / "run") as workdir:
        claim(workdir, parse_job(JOB), tmp_path)
    ended = job_report(outcome="complete", steps=948)
    answers: list[Any] = [status_document(phase="training"), ended]
    monkeypatch.setattr(status, "read_status", lambda where: answers.pop(0))
    assert status.read_report(str(workdir.path)) == ended
    answers += [status_document(phase="training")] * 2
    with pytest.raises(CommandError, match="try again"):
        status.read_report(str(workdir.path))


def test_a_report_that_is_newer_than_the_run_is_its_report(tmp_path: Path) -> None:
    """Earlier versions left their process id in the lock at every end."""
    with locked(tmp_path / "run") as workdir:
        claim(workdir, parse_job(JOB), tmp_path)
    killed_runner(workdir.path)
    assert workdir.was_killed()
    workdir.report.write_text(job_report(outcome="complete").model_dump_json())
    os.utime(workdir.report, (time.time() + 5,) * 2)
    assert not workdir.was_killed() and "killed" not in diloco("status", workdir.path)[1]


def test_samples_of_the_run_before_are_not_taken_for_the_killed_ones(tmp_path: Path) -> None:
    with locked(tmp_path / "run") as workdir:
        claim(workdir, parse_job(JOB), tmp_path)
        workdir.metrics_file.write_text(sample(1000, 4, at=-60.0) + "\n")
    killed_runner(workdir.path)
    code, said = diloco("status", workdir.path)
    assert code == 2 and "has left no report" in said
