"""That a learner's updates come too late is reported once it has lasted, with what it means and what helps."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.local import watch as watch_module
from diloco.local.screen import RunView, slot_note
from diloco.local.watch import LATE_SECONDS, StatusWatch
from diloco.processes.supervisor import Supervisor
from diloco.processes.workdir import Workdir
from diloco.syncer_client import SyncerClient
from diloco_protocol.documents import StatusDocument
from status_documents import slot_row, status_document


class Told:
    def __init__(self) -> None:
        self.events: list[str] = []

    def event(self, text: str, style: str = "") -> None:
        self.events.append(text)

    def update(self, view: RunView) -> None: ...

    def close(self) -> None: ...


class Canned(SyncerClient):
    """A syncer that tells what it is given."""

    document: StatusDocument

    async def status(self, seconds: float | None = None) -> StatusDocument:
        return self.document


@pytest.fixture
def looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """look(seconds later, the slot's fields) -> the events told so far."""
    workdir, told, now = Workdir(tmp_path), Told(), [1000.0]
    client = Canned(workdir.address, workdir.control_key)
    supervisor = Supervisor(3, random.Random(0))
    watch = StatusWatch(client, RunView("tiny"), told, supervisor, workers=[], store=tmp_path, on_merge=lambda: None)
    monkeypatch.setattr(watch_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def look(seconds: float, **slot: Any) -> list[str]:
        now[0] += seconds
        row = slot_row(1, **{"region": "local", "ordinal": 1, "state": "active", "starved": True, **slot})
        n = int(now[0])
        told_by_syncer = {"n": n, "time": 2e9, "kind": "starved", "slot": 1, "incarnation": 1, "message": f"late {n}"}
        client.document = status_document(phase="training", slots=[row], events=[told_by_syncer])
        asyncio.run(watch.poll())
        return told.events

    return look


def test_nothing_is_said_at_once_nor_of_steps_of_milliseconds(looks: Any) -> None:
    assert looks(0.0, step_seconds=0.5) == []
    assert looks(LATE_SECONDS - 1, step_seconds=0.5) == []
    assert looks(0.5, step_seconds=0.5, starved=False) == [], "in time again: it counts anew"
    assert looks(LATE_SECONDS - 1, step_seconds=0.5) == []
    assert looks(1000.0, step_seconds=0.005) == []


def test_what_lasts_is_said_once_with_what_helps(looks: Any) -> None:
    looks(0.0, step_seconds=0.5)
    (said,) = looks(LATE_SECONDS, step_seconds=0.5)
    assert "local-1's updates have arrived after the merge" in said
    assert "raise sync.every or sync.grace.capSeconds" in said
    assert len(looks(600.0, step_seconds=0.5)) == 1
    looks(1.0, step_seconds=0.5, starved=False)
    looks(1.0, step_seconds=0.5)
    assert len(looks(LATE_SECONDS, step_seconds=0.5)) == 2, "it was in time, and is late again"


def test_the_table_has_a_word_for_it() -> None:
    late: dict[str, Any] = {"state": "active", "starved": True}
    assert slot_note(slot_row(step_seconds=0.5, **late)) == "late"
    assert slot_note(slot_row(step_seconds=0.005, **late)) == ""
