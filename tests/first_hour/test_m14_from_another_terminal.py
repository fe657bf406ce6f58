"""M14: ``logs``, ``events`` and ``status --watch`` take the directory of a run on this machine.

On commit 8f0ca90 the first two took it for a job's name, and the third refused it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import RootModel
from typer.testing import CliRunner

from diloco.main import app
from diloco.processes.workdir import Workdir, claim, locked
from diloco_protocol.common.http_server import HttpServer, json_page
from diloco_protocol.spec.load import parse_job
from status_documents import status_document

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: tiny}
spec:
  learners: {command: [python, train.py]}
  regions: [{learners: 2}]
"""
JOINED = "local-0 took slot 0 at step 0"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Workdir]:
    """A run that goes on, as far as its directory tells; its runner is this process."""
    with locked(tmp_path / "run") as workdir:
        claim(workdir, parse_job(JOB), tmp_path)
        entry = {"time": "2026-01-02T03:04:05.678Z", "level": "info", "slot": 0, "message": f"joined: {JOINED}"}
        workdir.log("syncer").write_text(json.dumps(entry) + "\n")
        workdir.log("local-0").write_text("2026-01-02 03:04:06,789 INFO    mine: loss 1.25\n")
        yield workdir


def diloco(*words: str | Path) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


def test_m14_logs_and_events_of_a_run(run: Workdir) -> None:
    said = diloco("logs", run.path)
    assert JOINED in said and "mine: loss 1.25" in said
    assert {line.split()[0] for line in said.splitlines()} == {"syncer", "local-0"}, "each line has its process"
    said = diloco("logs", run.path, "local-0", "--tail", "1")
    assert "mine: loss 1.25" in said and JOINED not in said
    (event,) = diloco("events", run.path).splitlines()
    assert event.split()[2:] == ["joined", *JOINED.split()]


@pytest.mark.parametrize(("phase", "code"), [("complete", 0), ("failed", 1)])
async def test_m14_a_run_is_watched_to_its_end(run: Workdir, phase: str, code: int) -> None:
    event = {"n": 1, "time": time.time() + 60, "kind": "joined", "slot": 0, "incarnation": 1, "message": JOINED}
    fields: dict[str, Any] = {"job": "tiny", "versions": [3], "events": [event]}
    looks = [status_document(phase=now, step=step, **fields) for now, step in (("training", 7), (phase, 9))]
    said = ""

    def look() -> RootModel[Any]:
        # The job ends when the command has shown that it trains: an answer that comes late is asked for again.
        return RootModel(looks["step 7" in said].model_dump(mode="json"))

    server = HttpServer({"/status": json_page(look)})
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    addresses = {"sync": address, "control": address, "http": address, "pid": os.getpid(), "epoch": 1}
    run.address.write_text(json.dumps(addresses))
    program = [sys.executable, "-m", "diloco.main", "status", str(run.path), "--watch"]
    pipe = asyncio.subprocess.PIPE
    watching = await asyncio.create_subprocess_exec(*program, stdout=pipe, stderr=asyncio.subprocess.STDOUT)
    assert watching.stdout is not None
    async with asyncio.timeout(100):
        while line := await watching.stdout.readline():
            said += line.decode()
    assert await watching.wait() == code, said
    await server.stop()
    assert said.count(f"joined: {JOINED}") == 1, "an event is told once"
    assert "training" in said and "step 7" in said
