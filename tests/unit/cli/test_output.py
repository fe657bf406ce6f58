"""Where the output goes: a full disk, a terminal of few characters; and which page is made of what."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from diloco.main import app
from diloco.processes.workdir import claim, locked
from diloco_protocol.spec.load import parse_job
from status_documents import job_report

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: tiny}
spec:
  learners: {command: [python, train.py]}
  regions: [{learners: 2}]
"""


def a_run(path: Path) -> Path:
    with locked(path) as workdir:
        claim(workdir, parse_job(JOB), path)
        workdir.report.write_text(job_report(outcome="complete", spec_digest="ab").model_dump_json())
    return path


def test_a_full_disk_is_one_line_and_an_exit_code(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    for words in (["report", str(run)], ["report", str(run), "--json"], ["examples"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "diloco.main", *words], stdout=full, stderr=subprocess.PIPE, text=True
            )
        assert done.returncode == 1, (words, done.stderr)
        assert done.stderr == "error: the output cannot be written: No space left on device\n", words


def test_a_terminal_without_a_character_shows_another_one() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "diloco.main", "explain", "tau"],
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
    )
    assert "Traceback" not in done.stderr and "UnicodeEncodeError" not in done.stderr, done.stderr
    assert (done.stdout + done.stderr).isascii() and "?" in done.stdout + done.stderr


def test_a_page_of_a_runs_report_has_the_jobs_name(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    page = tmp_path / "x.html"
    result = CliRunner().invoke(app, ["report", str(run / "report.json"), "--html", str(page)])
    assert result.exit_code == 0 and "tiny: report of the run" in page.read_text(), result.output


def test_a_page_of_a_run_that_is_not_there() -> None:
    result = CliRunner().invoke(app, ["report", "nothere", "--html"])
    assert result.exit_code == 2 and "there is no run nothere here" in result.output
