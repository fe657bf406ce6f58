"""A run that is refused leaves the directory of the run before as it was, and is no news for `diloco list`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.console import CommandError
from diloco.local.status import list_runs
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
  training: {stop: {steps: 5}}
  regions: [{learners: 2}]
"""
BEFORE = 1_700_000_000


def state_of(path: Path) -> dict[str, tuple[bytes, int]]:
    files = (path / name for name in ("job.json", "origin.json", "run.lock", "report.json"))
    return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


@pytest.mark.parametrize("pid", ["", "999999999\n"])  # the run before ended by itself, was killed
def test_a_refused_run_touches_nothing(tmp_path: Path, pid: str) -> None:
    path = tmp_path / "runs" / "tiny"
    with locked(path) as workdir:
        claim(workdir, parse_job(JOB), tmp_path)
    workdir.report.write_text(job_report(outcome="interrupted").model_dump_json())
    workdir.lock.write_text(pid)
    for file in path.iterdir():
        os.utime(file, (BEFORE, BEFORE))
    before = state_of(path)
    with pytest.raises(CommandError, match="refused"), locked(path) as workdir, workdir.unchanged_if_refused():
        claim(workdir, parse_job(JOB.replace("steps: 5", "steps: 9")), tmp_path)
        assert state_of(path) != before and workdir.runner() == os.getpid()
        raise CommandError("refused")
    assert state_of(path) == before
    (row,) = list_runs(tmp_path / "runs")
    assert row.changed == BEFORE


def test_a_run_that_goes_on_changes_with_its_figures(tmp_path: Path) -> None:
    with locked(tmp_path / "tiny") as workdir:
        claim(workdir, parse_job(JOB), tmp_path)
        os.utime(workdir.job, (BEFORE, BEFORE))
        workdir.metrics_file.write_text("")
        os.utime(workdir.metrics_file, (BEFORE + 60, BEFORE + 60))
        (row,) = list_runs(tmp_path)
        assert row.changed == BEFORE + 60


@pytest.mark.parametrize("name", ["nothere", "file.yaml"])
def test_what_is_no_directory_has_no_runs(tmp_path: Path, name: str) -> None:
    (tmp_path / "file.yaml").write_text("")
    result = CliRunner().invoke(app, ["list", str(tmp_path / name)])
    assert result.exit_code == 2 and "is not a directory" in result.output
