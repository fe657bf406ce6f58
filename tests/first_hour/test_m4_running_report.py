"""The report of a job that goes on says that it is running, on every page that shows it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import RootModel

from core_desk import Desk, config
from diloco.processes.workdir import claim, locked
from diloco_protocol.common.http_server import HttpServer, json_page
from diloco_protocol.spec.load import parse_job
from diloco_protocol.vocabulary import JobPhase
from diloco_syncer.core import events as ev
from diloco_syncer.core.documents import report
from shell_figures import SHELL
from status_documents import job_report, status_document

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: tiny}
spec:
  learners: {command: [python, train.py]}
  regions: [{learners: 2}]
"""


def outcome(desk: Desk) -> str:
    return report(desk.core._state, desk.now, SHELL, "digest", 0).outcome


def test_m4_a_job_is_running_until_its_phase_is_an_end() -> None:
    desk = Desk(config())
    assert desk.core.phase is JobPhase.WAITING and outcome(desk) == "running"
    desk.begin(2)
    desk.report(1, 1)
    assert desk.core.phase is JobPhase.TRAINING and outcome(desk) == "running"
    desk.do(ev.EndRequested(JobPhase.SUSPENDED, "for the night"))
    assert desk.core.phase is JobPhase.DRAINING and outcome(desk) == "running"
    for connection in (1, 2):
        desk.do(ev.Drained(connection))
    desk.later(600.0)  # nobody gives an optimizer state for the checkpoint
    assert desk.core.phase is JobPhase.SUSPENDED and outcome(desk) == "interrupted"


@pytest.mark.parametrize(
    ("phase", "said", "message"), [(JobPhase.FAILED, "failed", "enough"), (JobPhase.DELETED, "interrupted", "")]
)
def test_m4_of_other_ends(phase: JobPhase, said: str, message: str) -> None:
    desk = Desk(config())
    desk.do(ev.EndRequested(phase, "enough"))
    assert desk.core.phase is phase and outcome(desk) == said
    assert desk.core.report(desk.now, SHELL, "", 0).message == message


async def test_m4_diloco_report_of_a_run_that_goes_on(tmp_path: Path) -> None:
    """It is the syncer's, as it stands; an earlier run's report beside it is not looked at."""
    now = job_report(outcome="running", merges=7)
    pages = {
        "/status": json_page(lambda: RootModel(status_document(job="tiny", phase="training").model_dump(mode="json"))),
        "/report": json_page(lambda: now),
    }
    server = HttpServer(pages)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    with locked(tmp_path / "run") as workdir:
        claim(workdir, parse_job(JOB), tmp_path)
        workdir.report.write_text(job_report(outcome="interrupted", merges=3).model_dump_json())
        addresses = {"sync": address, "control": address, "http": address, "pid": os.getpid(), "epoch": 1}
        workdir.address.write_text(json.dumps(addresses))
        program = [sys.executable, "-m", "diloco.main", "report", str(workdir.path), "--json"]
        done = await asyncio.to_thread(subprocess.run, program, capture_output=True, text=True, timeout=60)
    await server.stop()
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["outcome"], said["merges"]) == ("running", 7)
