"""What looks at the syncer tell: a page is kept for a while, so one may be older than what was heard before it."""

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
    outcome = "complete"
    page: StatusDocument = status_document(phase="complete", output=row("writing"))

    async def status(self, seconds: float | None = None) -> StatusDocument:
        return self.page

    async def status_now(self) -> StatusDocument:
        return status_document(phase="draining")

    async def report(self) -> Report:
        return job_report(outcome=self.outcome, output=row(self.report_state))


@pytest.fixture
def client(tmp_path: Path) -> KeepsItsStatus:
    workdir = Workdir(tmp_path)
    return KeepsItsStatus(workdir.address, workdir.control_key)


@pytest.fixture
def watch(tmp_path: Path, client: KeepsItsStatus) -> StatusWatch:
    supervisor = Supervisor(3, random.Random(0))
    return StatusWatch(
        client, RunView("j"), Lines(io.StringIO()), supervisor, workers=[], store=tmp_path, on_merge=lambda: None
    )


def test_a_look_that_must_be_of_now_is_not_at_the_page(watch: StatusWatch) -> None:
    asyncio.run(watch.poll(now=True))
    assert watch.phase == "draining" and watch.closing
    asyncio.run(watch.poll())
    assert watch.phase == "complete"


def test_a_page_of_before_the_last_look_tells_nothing(watch: StatusWatch, client: KeepsItsStatus) -> None:
    client.page = status_document(phase="training", merges=3, elapsed_seconds=8.0)
    asyncio.run(watch.poll())
    client.page = status_document(phase="training", merges=4, elapsed_seconds=9.0)
    asyncio.run(watch.poll())
    client.page = status_document(phase="waiting", merges=3, elapsed_seconds=8.5)
    watch.supervisor.since_merge["local-0"] = 2
    assert asyncio.run(watch.poll()) and watch.phase == "training"
    client.page = status_document(phase="training", merges=4, elapsed_seconds=9.5)
    asyncio.run(watch.poll())
    assert watch.supervisor.since_merge == {"local-0": 2}, "there was no merge in between"
    client.page = status_document(phase="waiting", epoch=2)
    asyncio.run(watch.poll())
    assert watch.phase == "waiting", "of another syncer"


def test_a_learner_that_has_left_its_slot_has_joined(watch: StatusWatch, client: KeepsItsStatus) -> None:
    joined = {"n": 1, "time": 2e9, "kind": "joined", "slot": 0, "incarnation": 1, "message": "local-0 took slot 0"}
    client.page = status_document(phase="training", events=[{**joined, "details": {"process": "abc"}}])
    asyncio.run(watch.poll())
    assert watch.has_joined("abc") and not watch.has_joined("")


@pytest.mark.promise(
    "`diloco run` ends when the job's end is durable and nothing more comes of its output, and its exit code is of that"
)
def test_an_end_is_settled_when_its_report_is_here_and_no_more_comes_of_its_output(
    watch: StatusWatch, client: KeepsItsStatus
) -> None:
    client.outcome, client.report_state = "running", "waiting"
    asyncio.run(watch.poll())
    assert watch.ended and not watch.is_settled, "the report is of before the end"
    client.outcome = "complete"
    asyncio.run(watch.poll())
    assert watch.is_over and not watch.is_settled, "the output is written"
    client.report_state = "written"
    asyncio.run(watch.poll())
    assert watch.is_settled


@pytest.mark.promise(
    "`diloco run` ends when the job's end is durable and nothing more comes of its output, and its exit code is of that"
)
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


@pytest.mark.parametrize(("merges", "earlier"), [(0, 0.0), (7, 600.0)])
def test_the_clock_of_a_run_that_continues_counts_the_runs_before(
    watch: StatusWatch, client: KeepsItsStatus, merges: int, earlier: float
) -> None:
    client.page = status_document(phase="waiting", merges=merges, elapsed_seconds=600.0)
    asyncio.run(watch.poll())
    assert watch.view.earlier_seconds == earlier
    client.page = status_document(phase="training", merges=9, elapsed_seconds=690.0)
    asyncio.run(watch.poll())
    assert watch.view.earlier_seconds == earlier, "it is the time at the first look"
