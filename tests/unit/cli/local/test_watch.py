"""What became of output.uri: the status document of a look may be older than the report that is fetched after it."""

from __future__ import annotations

import asyncio
import io
import random
from pathlib import Path
from typing import Any

import pytest

from diloco.local.outcome import last_output
from diloco.local.screen import Lines, RunView
from diloco.local.watch import StatusWatch
from diloco.processes.supervisor import Supervisor
from diloco.processes.workdir import Workdir
from diloco.syncer_client import SyncerClient
from diloco_protocol.documents import Report, StatusDocument
from status_documents import job_report, status_document


def row(state: str) -> dict[str, Any]:
    return {"uri": "out", "state": state}


class KeepsItsStatus(SyncerClient):
    """A syncer whose status page is kept for a while, and whose report is as of the call."""

    report_state = "writing"

    async def status(self) -> StatusDocument:
        return status_document(phase="complete", output=row("writing"))

    async def status_now(self) -> StatusDocument:
        return status_document(phase="draining")

    async def report(self) -> Report:
        return job_report(outcome="complete", output=row(self.report_state))


@pytest.fixture
def client(tmp_path: Path) -> KeepsItsStatus:
    workdir = Workdir(tmp_path)
    return KeepsItsStatus(workdir.address, workdir.control_key)


@pytest.fixture
def watch(tmp_path: Path, client: KeepsItsStatus) -> StatusWatch:
    supervisor = Supervisor(3, random.Random(0))
    return StatusWatch(client, RunView("j"), Lines(io.StringIO()), supervisor, [], tmp_path, lambda: None)


def test_a_look_that_must_be_of_now_is_not_at_the_page(watch: StatusWatch) -> None:
    asyncio.run(watch.poll(now=True))
    assert watch.phase == "draining" and watch.closing
    asyncio.run(watch.poll())
    assert watch.phase == "complete"


@pytest.mark.parametrize("state", ["failed", "written"])
def test_the_report_of_an_ended_syncer_tells_of_the_output_where_its_status_is_older(
    watch: StatusWatch, client: KeepsItsStatus, state: str
) -> None:
    asyncio.run(watch.poll())
    assert watch.ended and watch.is_writing_output
    client.report_state = state
    asyncio.run(watch.poll())
    assert not watch.is_writing_output
    assert watch.output is not None and watch.output.state == state


@pytest.mark.parametrize(
    ("status", "report", "last"),
    [
        (None, None, None),
        ("writing", None, "writing"),
        (None, "failed", "failed"),
        ("writing", "failed", "failed"),
        ("failed", "writing", "failed"),
        ("written", "writing", "written"),
    ],
)
def test_last_output_is_the_one_that_no_more_comes_of(status: str | None, report: str | None, last: str | None) -> None:
    found = last_output(
        None if status is None else status_document(output=row(status)),
        None if report is None else job_report(output=row(report)),
    )
    assert (None if found is None else found.state) == last
