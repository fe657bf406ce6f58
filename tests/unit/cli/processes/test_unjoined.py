"""Learners that run and never join are told of once, others never."""

from __future__ import annotations

from diloco.processes.unjoined import UNJOINED_SECONDS, UnjoinedLearners, unjoined_text


def test_who_runs_and_does_not_join_is_told_of_once_for_each_process() -> None:
    watch, late = UnjoinedLearners(), 10 * UNJOINED_SECONDS
    assert not watch.find(0.0, {"a": "p1", "b": "p2"})
    assert not watch.find(UNJOINED_SECONDS - 0.1, {"a": "p1"})
    assert watch.find(UNJOINED_SECONDS, {"a": "p1"}) == ["a"]
    assert not watch.find(late, {"a": "p1"})
    assert not watch.find(late, {"a": "p4"}), "a new process has its own time"
    assert watch.find(late + UNJOINED_SECONDS, {"a": "p4"}) == ["a"]
    assert "learner.batches()" in unjoined_text("a", "a.log") and "a.log" in unjoined_text("a", "a.log")
