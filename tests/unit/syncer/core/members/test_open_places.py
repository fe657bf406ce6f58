"""Regions that may have more learners than places: who comes beyond them trains at once, and nobody misses it."""

from __future__ import annotations

import json

import pytest

from core_desk import Desk, config, of
from diloco_protocol.spec.load import parse_job
from diloco_protocol.vocabulary import JobPhase, SlotState
from diloco_syncer.core import events as ev
from diloco_syncer.core.config import CoreConfig
from diloco_syncer.core.core import Core
from shell_figures import SHELL

OPEN = {"open_places": {"r": 2}, "region_slots": {"r": 4}}
VISITOR = 100  # the ordinal of a place beyond the job's


def begun(slots: int = 2, quorum: int = 1, **changes: object) -> Desk:
    """A job whose places are all taken, at step 10 after 10 seconds."""
    desk = Desk(config(slots, quorum, **{**OPEN, **changes}))
    desk.begin(slots)
    for connection in range(1, slots + 1):
        desk.report(connection, 1)
    desk.now = 10.0
    for connection in range(1, slots + 1):
        desk.report(connection, 10)
    return desk


def seat(actions: list[ev.Action]) -> tuple[int, int] | None:
    """Slot and step of the one who was let in; None: it stands by."""
    (admit,) = of(actions, ev.Admit)
    return None if admit.seat is None else (admit.seat.slot, admit.seat.slot_step)


def current(desk: Desk) -> list[int]:
    return [slot.index for slot in desk.core.slots if not slot.retired]


def test_who_comes_beyond_the_places_trains_at_once_at_the_jobs_step() -> None:
    desk = begun()
    assert seat(desk.join(3, VISITOR)) == (2, 10)
    assert seat(desk.join(4, VISITOR + 1)) == (3, 10)
    assert current(desk) == [0, 1, 2, 3]


def test_the_bound_holds_and_who_comes_beyond_it_stands_by() -> None:
    desk = begun()
    for connection in (3, 4):
        desk.join(connection, VISITOR + connection)
    assert seat(desk.join(5, VISITOR + 5)) is None
    desk.report(1, 20)
    desk.do(ev.DrainRequested(3))
    actions = desk.do(ev.Drained(3))
    (promoted,) = of(actions, ev.Promote)
    assert (promoted.connection, promoted.seat.slot, promoted.seat.slot_step) == (5, 2, 20)


def test_without_open_places_it_stands_by() -> None:
    desk = begun(open_places={}, region_slots={"r": 2})
    assert seat(desk.join(3, VISITOR)) is None


def test_only_a_region_with_open_places_has_more_learners_and_takes_nobodys_slot() -> None:
    places = (("r", 0), ("s", 0))
    desk = Desk(config(2, places=places, open_places={"r": 1}, region_slots={"r": 2, "s": 2}))
    desk.join(1, 0)
    desk.do(ev.InitialModelStored("L", (8,)))
    assert seat(desk.join(2, VISITOR)) == (2, 0), "the slot of s is kept for it"
    assert seat(desk.join(3, 0, region="s")) == (1, 0)
    assert seat(desk.join(4, 1, region="s")) is None, "a spare of s stands by"


def test_a_place_beyond_that_is_empty_is_no_loss() -> None:
    """Nothing holds, no region is lost, its slot is retired and its work dropped as a killed process's is."""
    desk = begun(quorum=2, on_region_lost="Fail", region_lost_seconds=5.0)
    desk.join(3, VISITOR, "visitor")
    desk.do(ev.ProcessEnded("r", VISITOR, "visitor", "killed"))
    for _ in range(10):
        desk.now += 1.0
        desk.report(1, 10)
        desk.report(2, 10)
    assert desk.core.phase is JobPhase.TRAINING and current(desk) == [0, 1]
    assert desk.core.slots[2].state is SlotState.DRAINED
    document = desk.core.status(desk.now, SHELL)
    assert document.quorum.active == 2 and not document.regions_lost


def test_goodput_counts_a_slot_beyond_the_places_while_somebody_holds_it() -> None:
    desk = begun()  # ten seconds of two slots
    clock = desk.core._state.clock
    since = clock.slot_seconds(desk.now)
    desk.join(3, VISITOR)
    desk.now += 3.0
    desk.do(ev.Tick())
    assert clock.slot_seconds(desk.now) - since == pytest.approx(9.0)
    desk.do(ev.Drained(3))
    desk.now += 5.0
    assert clock.slot_seconds(desk.now) - since == pytest.approx(9.0 + 10.0)


def test_a_learner_beyond_the_places_makes_up_for_one_that_is_lost() -> None:
    """There are as many slots as places or learners, whichever are more: of whom none is missed twice."""
    desk = begun()
    desk.join(3, VISITOR)
    desk.do(ev.ProcessEnded("r", 0, "", "killed"))
    assert current(desk) == [1, 2], "two learners, two places"
    assert seat(desk.join(4, 0)) == (0, 10), "who comes back to the place has a slot at once"
    assert current(desk) == [0, 1, 2]
    desk.do(ev.Drained(2))
    desk.do(ev.Drained(3))
    assert len(current(desk)) == 2, "the place that nobody has is one of the job's"


def test_a_lost_process_comes_back_to_its_slot_with_its_work() -> None:
    desk = begun()
    desk.join(3, VISITOR, "visitor")
    desk.report(3, 10)
    incarnation = desk.core.slots[2].holder.incarnation
    desk.do(ev.ConnectionLost(3))
    for _ in range(4):
        desk.now += 3.0
        desk.report(1, 10)
        desk.report(2, 10)
    assert desk.core.slots[2].state is SlotState.LOST and current(desk) == [0, 1]
    actions = desk.join(9, VISITOR, "visitor", previous_incarnation=incarnation, tenure=incarnation)
    (admit,) = of(actions, ev.Admit)
    assert admit.seat is not None and admit.seat.slot == 2 and admit.seat.continuing
    assert current(desk) == [0, 1, 2]


@pytest.mark.parametrize("known", [True, False])
def test_its_data_go_to_others_when_it_is_lost(known: bool) -> None:
    desk = Desk(config(1, open_places={"r": 1}, region_slots={"r": 2}))
    desk.join(1, 0, sequences=1000)
    desk.do(ev.InitialModelStored("L", (8,)))
    desk.join(2, VISITOR, "visitor", sequences=1000)
    (granted,) = of(desk.do(ev.LeaseRequested(2)), ev.GrantLease)
    if known:
        desk.do(ev.ProcessEnded("r", VISITOR, "visitor", "killed"))
    else:
        desk.now = 6.0
        desk.report(1, 10)
        desk.later(5.0)
    (again,) = of(desk.do(ev.LeaseRequested(1)), ev.GrantLease)
    assert (again.lease.data_epoch, again.lease.block) == (granted.lease.data_epoch, granted.lease.block)


def test_the_slot_of_one_that_may_come_back_with_its_work_is_the_last_that_is_taken() -> None:
    desk = begun()
    desk.join(3, VISITOR, "visitor")
    desk.do(ev.ConnectionLost(3))
    for _ in range(4):
        desk.now += 3.0
        desk.report(1, 10)
        desk.report(2, 10)
    assert desk.core.slots[2].state is SlotState.LOST
    assert seat(desk.join(4, VISITOR + 1)) == (3, 10), "rather a new one"
    desk.do(ev.Drained(4))
    assert seat(desk.join(5, VISITOR + 2)) == (3, 10), "rather one that was left"
    assert seat(desk.join(6, VISITOR + 3)) == (2, 10)


def test_slots_are_used_again_and_do_not_pile_up() -> None:
    desk = begun()
    for turn in range(20):
        desk.now += 1.0
        desk.join(10 + turn, VISITOR + turn)
        desk.report(10 + turn, 10)
        if turn % 2:
            desk.do(ev.Drained(10 + turn))
        else:
            desk.do(ev.ConnectionLost(10 + turn))
            desk.now += 11.0
            desk.report(1, 10)
            desk.report(2, 10)
    assert len(desk.core.slots) <= 4


def test_over_a_restart_who_is_there_keeps_slot_and_place() -> None:
    desk = begun()
    desk.join(3, VISITOR, "visitor")
    desk.do(ev.ProcessEnded("r", 0, "", "killed"))
    desk.report(3, 10)
    state = json.loads(json.dumps(desk.core.state(desk.now, desk.now)))
    again = Desk(config(2, **OPEN), state, 2)
    assert current(again) == [1, 2]
    join = again.join(7, VISITOR, "visitor", previous_incarnation=desk.core.slots[2].holder.incarnation)
    assert seat(join) == (2, 10)
    assert seat(again.join(8, 0)) is not None
    assert len(current(again)) == 3


def test_the_time_without_a_syncer_counts_for_those_who_were_there() -> None:
    desk = begun()
    desk.join(3, VISITOR, "visitor")
    desk.do(ev.Tick())
    state = desk.core.state(desk.now, wall=100.0)
    before = desk.core._state.clock.slot_seconds(desk.now)
    again = Core(config(2, **OPEN), json.loads(json.dumps(state)), 2, 0.0, wall=110.0)
    assert again._state.clock.slot_seconds(0.0) == pytest.approx(before + 3 * 10.0)


def test_a_lower_bound_lets_who_is_there_train_on_in_a_retired_slot() -> None:
    desk = begun()
    desk.join(3, VISITOR, "visitor")
    state = json.loads(json.dumps(desk.core.state(desk.now, desk.now)))
    again = Desk(config(2, region_slots={"r": 2}), state, 2)
    assert current(again) == [0, 1]
    assert again.core.slots[2].retired and again.core.slots[2].occupied
    desk.join(4, VISITOR + 1)
    state = json.loads(json.dumps(desk.core.state(desk.now, desk.now)))
    again = Desk(config(2, open_places={"r": 1}, region_slots={"r": 3}), state, 2)
    assert current(again) == [0, 1, 2] and again.core.slots[3].occupied


def test_the_jobs_file_says_how_many() -> None:
    text = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: j}
spec:
  training: {stop: {steps: 1}}
  learners: {command: [x]}
  regions: [{name: a, learners: 2, maxLearners: 5}, {name: b, learners: 1, spares: 1}]
"""
    found = CoreConfig.from_job(parse_job(text))
    assert found.places == (("a", 0), ("a", 1), ("b", 0))
    assert found.open_places == {"a": 3} and found.region_slots == {"a": 5, "b": 2}
