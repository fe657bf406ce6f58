"""``diloco status`` and ``diloco list``: what running and finished jobs look like, from outside."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from diloco.console import FAILED, CommandError
from diloco.local.metrics_log import read_rows
from diloco.local.training_loss import read_training_loss
from diloco.processes.workdir import MAX_REPORT_BYTES, Workdir, WorkdirError, find, read_address
from diloco.syncer_client import SyncerError, fetch_document
from diloco_protocol.common.files import read_bounded
from diloco_protocol.common.reach import unreachable
from diloco_protocol.documents import DocumentError, Report, StatusDocument, read_document

REPORT_SECONDS = 30.0
SAMPLE_BYTES = 1 << 20  # of the end of metrics.jsonl
_KILLED = (
    "the run ended without a report: it was killed, or this machine went down. The figures are those last seen, at"
    " {seen}; `diloco run` continues from its last checkpoint"
)
_ADDRESS = re.compile(r"(?:http://)?(\[[0-9a-fA-F:]+\]|[^:/\s]+):([0-9]{1,5})(?:/status)?/?")


class UnansweredRun(CommandError):
    """The run goes on, its syncer does not answer, and nothing is known of it yet."""


def read_status(where: str | None) -> StatusDocument | Report:
    """The status document of the job whose run directory or status page's address this is.

    None: the newest run below ./runs. Of a run that is not going on it is the last report. Raises CommandError, of
    which UnansweredRun tells of a run that has just begun.
    """
    if (address := _as_address(where)) is not None:
        return _from_address(address)
    try:
        workdir = find(where)
    except WorkdirError as error:
        hint = "" if where is None else "; an address would be host:port"
        raise CommandError(f"{error}{hint}") from error
    unread = ""
    try:
        there = read_address(workdir.address)
        document = asyncio.run(fetch_document(str(there["http"]), "/status", StatusDocument))
        if document.job == workdir.job_name() and document.epoch == there["epoch"]:  # else the port is another's by now
            return document
    except (OSError, WorkdirError, SyncerError) as error:
        # It is not running, or the port is another's: what it left is shown.
        unread = f" ({error})" if isinstance(error.__cause__, DocumentError) else ""
    killed = workdir.was_killed()
    if workdir.is_unfinished():
        if (last := last_seen(workdir, killed)) is not None:
            return last
        if workdir.runner() is not None:  # a report that lies there is of the run before
            raise UnansweredRun(_unanswered_text(workdir, unread))
    try:
        report = read_document(Report, read_bounded(workdir.report, MAX_REPORT_BYTES))
        if killed:
            before = f"the last run was killed before it reported anything; this is the run before: {report.outcome}"
            report = report.model_copy(update={"outcome": "killed", "message": before})
        return report
    except FileNotFoundError as error:
        if workdir.runner() is not None:
            raise UnansweredRun(_unanswered_text(workdir, unread)) from error
        raise CommandError(
            f"the run in {workdir.path} is not running and has left no report{unread}; `diloco run` continues it"
        ) from error
    except (OSError, ValueError) as error:
        raise CommandError(f"{workdir.report} cannot be read: {error}") from error


def _unanswered_text(workdir: Workdir, unread: str) -> str:
    return f"the run in {workdir.path} is running, but its syncer does not answer yet{unread}: ask again"


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run in the list of runs. ``state``: the phase of one that goes on (``starting``: its syncer does not answer
    yet), else how it ended; ``unknown``: it has left nothing that can be read. ``changed``: when its state last did,
    Unix seconds."""

    job: str
    workdir: Path
    state: str
    running: bool
    changed: float
    step: int | None = None
    tokens: int | None = None
    loss: float | None = None
    goodput: float | None = None

    @property
    def document(self) -> dict[str, Any]:
        return {**asdict(self), "workdir": str(self.workdir)}


def list_runs(directory: Path) -> list[RunRow]:
    """The runs in a directory, the newest first. Raises CommandError if it cannot be read."""
    try:
        found = [job.parent for job in directory.glob("*/job.json")]
    except OSError as error:
        raise CommandError(f"{directory} cannot be read: {error.strerror or error}") from error
    return sorted((_run_row(path) for path in found), key=lambda row: -row.changed)


def _run_row(path: Path) -> RunRow:
    workdir = Workdir(path)
    changed = workdir.changed()
    head = (workdir.job_name() or path.name, path)
    try:
        document = read_status(str(path))
    except UnansweredRun:
        return RunRow(*head, "starting", True, changed)
    except CommandError:
        return RunRow(*head, "unknown", False, changed)
    tokens = document.tokens.trained
    if isinstance(document, StatusDocument):
        loss = document.eval_loss[-1][1] if document.eval_loss else document.loss
        step, goodput = document.step, document.goodput
        return RunRow(*head, str(document.phase), True, changed, step, tokens, loss, goodput)
    loss = document.final_loss
    if loss is None and document.eval_loss:
        loss = document.eval_loss[-1][1]
    goes_on = document.outcome == "running"
    return RunRow(*head, document.outcome, goes_on, changed, document.steps, tokens, loss, document.goodput)


def show_runs(rows: Sequence[RunRow], directory: Path) -> None:
    from rich.table import Table

    from diloco.text_console import TextConsole

    console = TextConsole(soft_wrap=True, highlight=False)
    if not rows:
        console.print(f"there is no run in {directory}; `diloco run JOB.yaml` makes one in runs/")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("WORKDIR", "JOB", "STATE", "STEP", "TOKENS", "LOSS", "GOODPUT", "CHANGED"):
        right = title in ("STEP", "TOKENS", "LOSS", "GOODPUT")
        table.add_column(title, justify="right" if right else "left", no_wrap=True)
    for row in rows:
        changed = datetime.fromtimestamp(row.changed).astimezone().strftime("%Y-%m-%d %H:%M")
        counts = ("-" if count is None else f"{count:,}" for count in (row.step, row.tokens))
        shares = ("-" if share is None else f"{share:.3f}" for share in (row.loss, row.goodput))
        table.add_row(str(row.workdir), row.job, row.state, *counts, *shares, changed)
    console.print(table)


def _as_address(where: str | None) -> str | None:
    """host:port, where that is what the user has named. Raises CommandError."""
    named = None if where is None or os.path.exists(where) else _ADDRESS.fullmatch(where)
    if named is not None and int(named[2]) > 65535:
        raise CommandError(f"{where}: there is no port {named[2]}; a port is at most 65535")
    return None if named is None else f"{named[1]}:{named[2]}"


def read_report(where: str | None) -> Report:
    """The report of a run on this machine; of one that goes on, as it stands. Raises CommandError."""
    document = read_status(where)
    if isinstance(document, Report):
        return document
    try:
        address = _as_address(where) or str(read_address(find(where).address)["http"])
        return asyncio.run(fetch_document(address, "/report", Report, REPORT_SECONDS))
    except (OSError, WorkdirError, SyncerError) as error:
        if isinstance(document := read_status(where), Report):
            return document  # it has ended meanwhile
        raise CommandError(f"the run continues, but its report cannot be read now ({error}): try again") from error


def last_seen(workdir: Workdir, killed: bool) -> Report | None:
    """What is known of a run that has left no report, by the last sample of its status; None: there is none of it.
    ``killed``: it is over; else it goes on, and its syncer does not answer."""
    try:
        with workdir.metrics_file.open("rb") as file:
            file.seek(max(0, workdir.metrics_file.stat().st_size - SAMPLE_BYTES))
            lines = file.read().splitlines()
        job = json.loads(read_bounded(workdir.job, MAX_REPORT_BYTES))
        sample = next(row for row in read_rows(reversed(lines)) if row.get("source") == "status")
        seen = datetime.fromtimestamp(sample["time"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        if sample["time"] < workdir.lock.stat().st_mtime:
            return None  # of the run before
        low, high = sample["versions"]
        score = sample["eval_loss"]
        own = read_training_loss(workdir.metrics) if score is None else None
        content = {
            **{name: sample[name] for name in ("merges", "tokens", "goodput", "uptime", "bytes_up", "bytes_down")},
            "outcome": "killed" if killed else "running",
            "message": _KILLED.format(seen=seen) if killed else f"last seen at {seen}",
            "seed": job["spec"]["seed"],
            "spec_digest": "",
            "wall_seconds": sample["elapsed_seconds"],
            "steps": sample.get("step", 0),
            "versions": {"min": low, "max": high},
            "eval_loss": [] if score is None else [score],
            "training_loss": None if own is None else own.model_dump(),
            "syncer": {"epoch": sample["epoch"], "restarts": 0, "peak_rss_bytes": 0},
        }
        return read_document(Report, content)
    except (OSError, StopIteration, ValueError, KeyError, TypeError, OverflowError):
        return None


def _from_address(address: str) -> StatusDocument:
    try:
        return asyncio.run(fetch_document(address, "/status", StatusDocument))
    except SyncerError as error:
        raise CommandError(unreachable(address) or f"no syncer answers on {address}: {error}", FAILED) from error


def as_json(document: StatusDocument | Report) -> dict[str, Any]:
    content = document.model_dump(mode="json")
    if isinstance(document, StatusDocument):
        return {"running": True, **content}
    return {"running": False, "report": content}  # no status: its syncer does not answer


def ended_words(report: Report) -> str:
    """What is said above the report of a run that does not answer."""
    if report.outcome == "killed":
        return "not running: killed, without a report; its last known figures"
    if report.outcome == "running":
        return "running, but its syncer does not answer at the moment; its last known figures"
    return "not running; its last report"


def show(document: StatusDocument | Report) -> None:
    from diloco.local.screen import blocked_by, outside_view, picture
    from diloco.local.summary import summary
    from diloco.text_console import TextConsole

    console = TextConsole(soft_wrap=True)
    if isinstance(document, Report):
        console.print(f"{ended_words(document)}:")
        console.print(summary(document))
        return
    console.print(picture(outside_view(document), [], whole=True))
    if document.message and not blocked_by(document):
        console.print(document.message, highlight=False)
