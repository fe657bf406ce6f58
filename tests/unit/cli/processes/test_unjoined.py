"""Learners that run and never join are told of once, others never."""

from __future__ import annotations

from diloco.processes.unjoined import UNJOINED_SECONDS, UnjoinedLearners, unjoined_text
from diloco_protocol.documents import StatusDocument
from status_documents import slot_row, status_document


def knows(*processes: str, phase: str = "waiting") -> StatusDocument:
    rows = [slot_row(index, process=process, state="active") for index, process in enumerate(processes[1:])]
    return status_document(phase=phase, slots=rows, standbys=list(processes[:1]))


def test_who_runs_and_does_not_join_is_told_of_once_for_each_process() -> None:
    watch, late = UnjoinedLearners(), 10 * UNJOINED_SECONDS
    assert not watch.find(0.0, {"a": "p1", "b": "p2", "c": "p3"}, knows())
    assert not watch.find(UNJOINED_SECONDS - 0.1, {"a": "p1", "b": "p2", "c": "p3"}, knows("p2", "p3"))
    assert not watch.find(UNJOINED_SECONDS, {"a": "p1"}, None)
    assert not watch.find(UNJOINED_SECONDS, {"a": "p1"}, knows(phase="draining"))
    assert watch.find(UNJOINED_SECONDS, {"a": "p1", "b": "p2", "c": "p3"}, knows("p2", "p3")) == ["a"]
    assert not watch.find(late, {"a": "p1", "b": "p2", "c": "p3"}, knows()), "the others had joined"
    assert not watch.find(late, {"a": "p4"}, knows()), "a new process has its own time"
    assert watch.find(late + UNJOINED_SECONDS, {"a": "p4"}, knows()) == ["a"]
    assert "learner.batches()" in unjoined_text("a", "a.log") and "a.log" in unjoined_text("a", "a.log")
