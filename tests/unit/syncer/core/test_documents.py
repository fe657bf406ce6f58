"""The outcome in the core's report: of a job that is under way, and of its ends."""

from __future__ import annotations

import pytest

from core_desk import Desk, config
from diloco_protocol.vocabulary import JobPhase
from diloco_syncer.core import documents
from diloco_syncer.core import events as ev
from diloco_syncer.core.documents import report, status_document
from shell_figures import SHELL


def outcome(desk: Desk) -> str:
    return report(desk.core._state, desk.now, SHELL, "digest", peak_rss_bytes=0).outcome


def test_a_job_is_running_until_its_phase_is_an_end() -> None:
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
def test_a_job_that_failed_or_was_deleted_says_so(phase: JobPhase, said: str, message: str) -> None:
    desk = Desk(config())
    desk.do(ev.EndRequested(phase, "enough"))
    assert desk.core.phase is phase and outcome(desk) == said
    assert desk.core.report(desk.now, SHELL, "", 0).message == message


@pytest.mark.promise("The status document says how much of the job's stop is reached, and how long the rest takes")
def test_how_far_the_job_is_and_what_the_rest_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(config())
    desk.begin(2)
    desk.report(1, 1)
    state = desk.core._state
    document = status_document(state, desk.now, SHELL)
    assert document.progress == state.reached_amount(desk.now) / state.config.stop[1] < 1
    desk.later(30.0)
    monkeypatch.setattr(documents, "stop_progress", lambda state, now: 0.25)
    document = status_document(state, desk.now, SHELL)
    assert document.seconds_left == pytest.approx(3 * document.elapsed_seconds) and document.elapsed_seconds > 0
    desk.do(ev.EndRequested(JobPhase.SUSPENDED, "for the night"))
    assert status_document(state, desk.now, SHELL).seconds_left is None
