"""What an arrival resets, what it may not move, and what is written before it is answered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core_desk import Desk, config, of, report
from diloco_protocol.vocabulary import EventKind, JobPhase, SlotState
from diloco_protocol.wire.records import LeaseCursor
from diloco_syncer.core import events as ev
from diloco_syncer.core.books import slots
from diloco_syncer.core.books.slots import LastReport, SlotTable
from shell_figures import SHELL


def test_a_replacement_goes_on_at_its_slots_step_not_at_the_jobs_greatest() -> None:
    desk = Desk(config())
    desk.begin(2)
    desk.now = 1.0
    desk.report(1, 9)
    desk.report(2, 3)
    desk.now = 2.0
    (admitted,) = of(desk.join(9, 1), ev.Admit)
    assert admitted.seat is not None and not admitted.seat.continuing and admitted.seat.slot_step == 3


def test_who_comes_back_opens_no_round_before_its_first_report() -> None:
    """Fragment 1 is due when fragment 0's merge ends; its only learner has not said yet what it holds."""
    desk = Desk(config(slots=1))
    desk.begin(1, fragments=2)
    assert of(desk.report(1, 2), ev.Pull)
    assert of(desk.push(0, 2), ev.Merge)
    desk.report(1, 4)
    desk.do(ev.ConnectionLost(1))
    desk.join(9, 0, process="p1", previous_incarnation=1)
    assert not of(desk.do(ev.MergeDurable(0, 1, 0.1, (1.0,))), ev.Pull)
    assert [(p.connection, p.fragment) for p in of(desk.report(9, 4), ev.Pull)] == [(9, 1)]


def test_who_comes_back_is_asked_again_for_the_rounds_that_are_open() -> None:
    desk = Desk(config(slots=1))
    desk.begin(1)
    (pull,) = of(desk.report(1, 4), ev.Pull)
    desk.do(ev.ConnectionLost(1))
    assert not of(desk.join(9, 0, process="p1", previous_incarnation=1), ev.Pull)
    (again,) = of(desk.report(9, 4), ev.Pull)
    assert (again.connection, again.round) == (9, pull.round)


@pytest.mark.promise("A process that claims a huge incarnation does not change the counter")
def test_a_process_that_claims_a_huge_incarnation_does_not_move_the_counter() -> None:
    desk = Desk(config())
    desk.join(1, 0, previous_incarnation=1 << 62)
    assert desk.core.slots[0].holder.incarnation == 1
    desk.join(2, 1, tenure=1 << 62)
    assert desk.core.slots[1].holder.incarnation == 2
    desk.join(3, 1, previous_incarnation=1000)
    assert desk.core.slots[1].holder.incarnation == 1001, "a lost state may have given that one"


def test_pods_and_places_are_forgotten_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "PODS_KEPT", 3)
    monkeypatch.setattr(slots, "PLACES_KEPT", 2)
    table = SlotTable([("r", i) for i in range(4)])

    def come(ordinal: int, pod: str) -> bool:
        return table.register_pod(
            ev.Join(1, pod, "r", ordinal, evaluator=False, layout_digest="L", digests={}, sequences=0, held=(), pod=pod)
        )

    assert all(come(0, f"pod-{i}") for i in range(5))
    assert table.pods == {("r", 0): ["pod-2", "pod-3", "pod-4"]}
    assert not come(0, "pod-3") and come(0, "pod-4")
    assert come(1, "a") and come(2, "b") and come(3, "c")
    assert table.pods == {("r", 2): ["b"], ("r", 3): ["c"]}


@pytest.mark.promise("A lease is durable before it is given")
def test_a_lease_is_written_before_it_is_given_and_none_is_given_while_the_job_ends() -> None:
    desk = Desk(config())
    desk.join(1, 0, sequences=100)
    actions = desk.do(ev.LeaseRequested(1))
    assert [type(action) for action in actions] == [ev.Persist, ev.GrantLease]
    desk.do(ev.InitialModelStored("L", (8,)))
    desk.report(1, 1)
    desk.do(ev.EndRequested(JobPhase.SUSPENDED, "interrupted"))
    assert desk.core.phase is JobPhase.DRAINING
    assert not of(desk.do(ev.LeaseRequested(1)), ev.GrantLease)


def test_leases_of_a_learner_that_may_come_back_are_given_to_nobody() -> None:
    desk = Desk(config())
    desk.join(1, 0, sequences=128)  # in blocks of one
    desk.join(2, 1)
    desk.do(ev.LeaseRequested(2))
    desk.do(ev.ConnectionLost(2))
    assert desk.core.slots[1].state is SlotState.SUSPECT
    granted = [of(desk.do(ev.LeaseRequested(1)), ev.GrantLease)[0].lease.data_epoch for _ in range(128)]
    assert granted == [0] * 127 + [1], "the last one of the epoch is with who may come back"


def test_a_successor_goes_on_where_the_reports_of_its_slot_were_in_the_data() -> None:
    desk = Desk(config(slots=1))
    desk.join(1, 0, sequences=64 * 10)
    (granted,) = of(desk.do(ev.LeaseRequested(1)), ev.GrantLease)
    desk.do(ev.InitialModelStored("L", (8,)))
    desk.do(ev.Reported(1, replace(report(1), cursors=(LeaseCursor(granted.lease.lease, 3),))))
    (admitted,) = of(desk.join(2, 0), ev.Admit)
    assert admitted.seat is not None
    assert admitted.seat.leases == (replace(granted.lease, start=3),)


def test_version_0_that_comes_twice_makes_no_new_books() -> None:
    desk = Desk(config())
    desk.begin(1)
    desk.report(1, 3)
    assert not of(desk.do(ev.InitialModelStored("L", (8,))), ev.Announce)
    assert desk.core.trained_tokens == 30


def test_nobody_is_seated_while_the_job_ends() -> None:
    desk = Desk(config(slots=2))
    desk.begin(2)
    (spare,) = of(desk.join(5, 2), ev.Admit)
    assert spare.seat is None
    desk.report(1, 1)
    desk.do(ev.EndRequested(JobPhase.SUSPENDED, "interrupted"))
    assert not of(desk.do(ev.Drained(1)), ev.Promote)
    (late,) = of(desk.join(6, 0), ev.Admit)
    assert late.seat is None


def test_what_the_reports_of_a_process_said_is_not_said_of_its_successor() -> None:
    """Of the slot itself the step stays, and the first loss."""
    desk = Desk(config(slots=1))
    desk.begin(1)
    desk.do(ev.Reported(1, replace(report(3), loss=2.0)))
    desk.do(ev.Reported(1, replace(report(4), paused=True, diverged=True, young_optimizer=True, batches=9)))
    desk.join(2, 0, process="new")
    row, slot = desk.core.status(0.0, SHELL).slots[0], desk.core.slots[0]
    assert (row.process, row.paused, row.diverged, row.ready, row.step) == ("new", False, False, False, 4)
    assert slot.reported == LastReport(step_at_seat=4) and slot.first_loss == 2.0


def test_an_optimizer_that_begins_fresh_is_an_event_once_in_a_tenure() -> None:
    desk = Desk(config(slots=1))
    desk.begin(1)
    fresh = replace(report(3), fresh_optimizer="no peer has one")

    def told(actions: list[ev.Action]) -> list[str]:
        return [one.message for one in of(actions, ev.RecordEvent) if one.kind == "optimizer-fresh"]

    words = "r-0: its optimizer begins fresh, with warm-up: no peer has one"
    assert told(desk.do(ev.Reported(1, report(2)))) == []
    assert told(desk.do(ev.Reported(1, fresh))) == [words]
    assert told(desk.do(ev.Reported(1, fresh))) == []
    assert told(desk.do(ev.Reported(1, report(9)))) == []
    desk.join(2, 0, process="new")
    assert told(desk.do(ev.Reported(2, replace(report(1), fresh_optimizer="no peer has one")))) == [words]


def test_the_end_of_a_former_process_takes_nothing_from_its_successor_or_from_another_spare() -> None:
    desk = Desk(config(slots=1))
    desk.begin(1)
    desk.join(2, 0, process="new")
    desk.join(3, 1, process="spare")
    desk.do(ev.ProcessEnded("r", 0, "p1", "killed"))
    assert (desk.core.slots[0].holder.process, desk.core.slots[0].state) == ("new", "active")
    assert not of(desk.do(ev.ProcessEnded("r", 1, "other", "killed")), ev.Refuse)
    (told,) = of(desk.do(ev.ProcessEnded("r", 1, "spare", "killed")), ev.Refuse)
    assert (told.connection, told.fatal) == (3, False)
    assert not of(desk.do(ev.ProcessEnded("r", 0, "new", "killed")), ev.Promote), "the spare is gone"


def test_nobody_is_given_up_after_the_end() -> None:
    desk = Desk(config())
    desk.begin(2)
    desk.do(ev.EndRequested(JobPhase.FAILED, "x"))
    assert not of(desk.later(1000.0), ev.Refuse)


def test_a_superseded_process_is_no_refusal_of_its_place() -> None:
    desk = Desk(config())
    desk.join(1, 0, "a1", pod="aa")
    desk.join(2, 0, "b1", pod="bb")
    (refused,) = of(desk.join(3, 0, "a2", pod="aa"), ev.Refuse)
    assert refused.reason == "superseded"
    assert not desk.core._state.refusals.rows(0.0)


def test_the_nominal_slot_of_a_place_is_not_taken_from_who_holds_it() -> None:
    desk = Desk(config(slots=2))
    desk.begin(1)  # r-0 has slot 0
    desk.join(5, 7, process="elsewhere")  # r-7 has no place: it gets slot 1, r-1's
    assert desk.core.slots[1].holder.process == "elsewhere"
    (spare,) = of(desk.join(6, 1), ev.Admit)
    assert spare.seat is None and desk.core.slots[1].holder.process == "elsewhere"


def test_a_region_holds_no_more_slots_than_the_job_gives_it_and_one_that_the_job_lacks_none() -> None:
    desk = Desk(config(places=(("r", 0), ("s", 0)), region_slots={"r": 1, "s": 1}))
    desk.join(1, 0)
    desk.do(ev.InitialModelStored("L", (8,)))
    (spare,) = of(desk.join(2, 1), ev.Admit)
    assert spare.seat is None, "though the slot of s is free"
    for idle in (False, True):
        (refused,) = of(desk.join(3, 0, region="zz", idle=idle), ev.Refuse)
        assert (refused.reason, refused.fatal) == ("no-such-region", False)
    (admitted,) = of(desk.join(4, 0, region="s"), ev.Admit)
    assert admitted.seat is not None and admitted.seat.slot == 1


def test_who_has_no_place_of_its_own_gets_a_slot_of_its_region_first() -> None:
    desk = Desk(config(places=(("r", 0), ("r", 1), ("s", 0))))
    for connection, slot in ((1, 2), (2, 0)):
        (admitted,) = of(desk.join(connection, 7 + connection, region="s"), ev.Admit)
        assert admitted.seat is not None and admitted.seat.slot == slot


def test_a_process_id_from_another_place_is_not_the_process_that_has_the_slot() -> None:
    desk = Desk(config())
    desk.begin(2)
    (admitted,) = of(desk.join(9, 0, process="p2", previous_incarnation=2), ev.Admit)
    assert admitted.seat is not None and (admitted.seat.slot, admitted.seat.continuing) == (0, False)
    assert desk.core.slots[1].holder.connection == 2


def test_of_three_evaluators_the_first_is_told_to_leave() -> None:
    desk = Desk(config(evaluated=True))
    for connection in (7, 8):
        assert not of(desk.join(connection, 0, process="e", evaluator=True), ev.Refuse)
    (told,) = of(desk.join(9, 0, process="e", evaluator=True), ev.Refuse)
    assert (told.connection, told.reason, told.fatal) == (7, "superseded", False)
    assert desk.core._state.members.evaluators == {8, 9}


@pytest.mark.promise(
    "A learner with another model is refused before anything is announced to it, and the refusal names "
    "the first tensor that differs"
)
def test_who_joined_with_another_model_before_there_was_one_is_refused_before_anything_is_announced() -> None:
    desk = Desk(config(slots=3))
    desk.join(1, 0)
    desk.join(2, 1, layout_digest="M")
    desk.join(3, 2)
    desk.join(4, 9, layout_digest="M")  # stands by
    desk.join(5, 0, evaluator=True, layout_digest="M")
    actions = desk.do(ev.InitialModelStored("L", (8,)))
    refused = {action.connection: action for action in of(actions, ev.Refuse)}
    assert set(refused) == {2, 4, 5} and all(r.reason == "other-layout" and r.fatal for r in refused.values())
    kinds = [type(action) for action in actions]
    assert max(i for i, kind in enumerate(kinds) if kind is ev.Refuse) < kinds.index(ev.Announce)
    (announced,) = of(actions, ev.Announce)
    assert set(announced.merged) == {1, 3}
    (lost,) = [note.message for note in of(actions, ev.RecordEvent) if note.kind == EventKind.LOST]
    assert desk.core.slots[1].state == "lost" and "its model is not the job's" in lost
    assert [note.kind for note in of(actions, ev.RecordEvent)].count(EventKind.REFUSED) == 3, "each place is told once"
    desk.report(1, 0), desk.report(3, 0)
    assert not of(desk.do(ev.ConnectionLost(2)), ev.Refuse)
    assert not of(desk.join(6, 1), ev.Refuse), "its successor has the job's model"


def test_whose_session_ended_meanwhile_is_refused_when_it_comes_back() -> None:
    desk = Desk(config())
    desk.join(1, 0)
    desk.join(2, 1, layout_digest="M")
    desk.do(ev.ConnectionLost(2))
    assert not of(desk.do(ev.InitialModelStored("L", (8,))), ev.Refuse)
    (refused,) = of(desk.join(3, 1, layout_digest="M"), ev.Refuse)
    assert refused.reason == "other-layout"
