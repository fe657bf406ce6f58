"""Output into a file or a pipe: nothing is said twice, and what is in the way stands in the line."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from core_desk import Desk, config, of
from diloco.local.screen import SAME_LINE_SECONDS, Lines, RunView
from diloco.local.watch import QUIET_EVENTS
from diloco_protocol.vocabulary import EventKind, JobPhase
from diloco_syncer.core import events as ev
from status_documents import status_document


class Printed:
    """Plain lines, with a clock that stands still unless told."""

    def __init__(self) -> None:
        self.now = 0.0
        self._out = io.StringIO()
        self.screen = Lines(self._out, lambda: self.now)

    def tell(self, seconds: float, **status: Any) -> None:
        self.now += seconds
        self.screen.update(RunView("tiny", ("tokens", 2000), status_document(**status), {}, notes={}, serving=True))

    @property
    def lines(self) -> list[str]:
        return self._out.getvalue().splitlines()


def test_a_line_is_printed_when_something_has_changed() -> None:
    printed = Printed()
    for _ in range(3):
        printed.tell(5.0)
    assert len(printed.lines) == 1, "nothing happens: it waits for its learners"
    printed.tell(0.5, versions=[0] * 24)
    assert len(printed.lines) == 1, "version 0 is there, of which the line has nothing to say"
    printed.tell(4.5, sessions=3, versions=[0], phase="training")
    assert len(printed.lines) == 2
    trained = {"trained": 20, "merged": 0, "pending": 20, "dropped": 0}
    printed.tell(4.0, versions=[0], phase="training", step=2, tokens=trained)
    assert len(printed.lines) == 2, "not more than one in five seconds"
    printed.tell(1.0, versions=[0], phase="training", step=2, tokens=trained)
    assert len(printed.lines) == 3


def test_while_it_starts_and_waits_a_line_comes_each_quarter_of_a_minute() -> None:
    printed = Printed()
    printed.screen.update(RunView("tiny"))
    for _ in range(30):
        printed.now += 1.0
        printed.screen.update(RunView("tiny", run_seconds=printed.now))
    assert [line.split() for line in printed.lines] == [[at, "s", "starting"] for at in ("0.0", "15.0", "30.0")]
    for _ in range(60):
        printed.tell(1.0, message="0 of 2 learners that a merge needs are active")
    assert len(printed.lines) == 3 + 4 and "0 of 2 learners" in printed.lines[-1]


def test_while_nothing_changes_there_is_one_line_a_minute_with_the_reason() -> None:
    printed = Printed()
    full = "disk full: 4 MB are needed below /data/run"
    frozen = {"phase": "training", "step": 9, "store_problem": full, "message": full}
    for second in range(121):  # the time and the pace change, and nothing else
        printed.tell(1.0, **frozen, elapsed_seconds=100.0 + second, tokens_per_second=1000.0 / (1 + second))
    assert len(printed.lines) == 1 + 120 // SAME_LINE_SECONDS
    assert all(f"({full})" in line for line in printed.lines)


@pytest.mark.parametrize("phase", [JobPhase.HOLDING, JobPhase.WAITING])
def test_why_it_holds_or_waits_stands_in_the_line(phase: JobPhase) -> None:
    printed = Printed()
    printed.tell(0.0, phase=phase, message="1 of 2 learners that a merge needs are active")
    assert "(1 of 2 learners that a merge needs are active)" in printed.lines[0]


def test_a_hold_and_its_end_are_told_once(tmp_path: Path) -> None:
    desk = Desk(config(quorum=2))
    desk.begin(2)
    desk.do(ev.ProcessEnded("r", 1, "p2", "exit code 1"))
    assert desk.core.phase is JobPhase.HOLDING
    desk.join(3, 1)
    desk.report(3, 0)
    assert desk.core.phase is JobPhase.TRAINING
    told = [note.message for note in of(desk.log, ev.RecordEvent) if note.kind not in QUIET_EVENTS]
    assert len([text for text in told if "1 of 2 learners that a merge needs are active" in text]) == 1
    kinds = [note.kind for note in of(desk.log, ev.RecordEvent)]
    assert EventKind.HOLD in kinds and EventKind.RESUME in kinds, "events and their files have them still"
