"""A learner that trains and never finishes a step is told of, with what its loop may lack; a slow first step is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core_desk import Desk, config, of, report
from diloco_protocol.common.first_step import BATCHES_SECONDS, MANY_BATCHES
from diloco_protocol.vocabulary import JobPhase
from diloco_syncer.core import events as ev
from diloco_syncer.core.members.first_steps import LONG_SECONDS


def given(desk: Desk, connection: int, batches: int, step: int = 0) -> None:
    desk.do(ev.Reported(connection, replace(report(step), batches=batches)))


def told(desk: Desk) -> list[ev.RecordEvent]:
    return [action for action in of(desk.log, ev.RecordEvent) if action.kind == "no-steps"]


def problems(desk: Desk) -> list[str]:
    return [slot.told.problem for slot in desk.core.slots]


@pytest.mark.promise("A loop that never calls `after_step` is reported; a slow first step is not")
def test_a_loop_that_is_given_batches_and_ends_no_step_is_told_of_once() -> None:
    desk = Desk(config())
    desk.begin(2)
    desk.report(2, 1)
    for n in range(60):
        given(desk, 1, n)
        desk.later(1.0)
    (event,) = told(desk)
    assert event.slot == 0 and "learner.after_step()" in event.message and event.message.startswith("r-0: ")
    assert "learner.after_step()" in problems(desk)[0] and not problems(desk)[1]
    desk.report(1, 1)
    desk.later(0.0)
    assert problems(desk) == ["", ""] and len(told(desk)) == 1


@pytest.mark.promise("A loop that never calls `after_step` is reported; a slow first step is not")
def test_neither_some_batches_nor_some_seconds_are_enough() -> None:
    desk = Desk(config())
    desk.begin(1)
    desk.now = BATCHES_SECONDS - 0.1
    given(desk, 1, 1000)
    assert not told(desk), "an eager loop puts several batches into one step"
    slow = Desk(config())
    slow.begin(1)
    slow.now = LONG_SECONDS - 0.1
    given(slow, 1, MANY_BATCHES - 1)
    assert not told(slow), "compiling takes minutes"
    slow.now = LONG_SECONDS
    given(slow, 1, MANY_BATCHES - 1)
    assert "a slow first step" in told(slow)[0].message


def test_time_counts_only_while_it_could_step() -> None:
    desk = Desk(config(slots=2, quorum=2))
    desk.join(1, 0)
    desk.do(ev.InitialModelStored("L", (8,)))
    given(desk, 1, 0)
    desk.now = LONG_SECONDS
    given(desk, 1, MANY_BATCHES)
    assert desk.core.phase is JobPhase.WAITING and not told(desk)


def test_a_successor_has_its_own_time() -> None:
    desk = Desk(config())
    desk.begin(1)
    desk.now = BATCHES_SECONDS - 1
    given(desk, 1, MANY_BATCHES)
    desk.do(ev.ProcessEnded("r", 0, "", "killed"))
    desk.join(2, 0)
    given(desk, 2, MANY_BATCHES)
    desk.now += BATCHES_SECONDS - 1
    given(desk, 2, MANY_BATCHES)
    assert not told(desk)
    desk.now += 1
    given(desk, 2, MANY_BATCHES)
    assert len(told(desk)) == 1
