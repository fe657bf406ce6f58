"""Deterministic mode's rules, each alone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from core_desk import Desk, config, of, reason, report
from diloco_protocol.vocabulary import EventKind, JobPhase, PushRefusal
from diloco_syncer.core import events as ev
from diloco_syncer.core.books.deterministic import DeterministicMode
from diloco_syncer.core.books.leases import LeaseBook
from diloco_syncer.core.books.ledger import Ledger
from diloco_syncer.core.books.norm_gate import GATE_PATIENCE
from diloco_syncer.core.books.rounds import OVERDUE_SECONDS
from diloco_syncer.core.books.shares import Stop
from diloco_syncer.core.books.slots import Slot

MODE = DeterministicMode(2)


def test_who_begins_before_the_job_goes_on_begins_where_the_furthest_is() -> None:
    desk = Desk(config(quorum=2, mode=MODE))
    desk.begin(2)
    desk.now = 1.0
    desk.report(1, 8)
    desk.report(2, 4)
    again = Desk(config(quorum=2, mode=MODE), json.loads(json.dumps(desk.core.state(1.0))), 2)
    (admitted,) = of(again.join(3, 1), ev.Admit)
    assert admitted.seat is not None and (admitted.seat.continuing, admitted.seat.slot_step) == (False, 8)


@pytest.mark.promise(
    "A deterministic job ends though its syncer restarts after the first learner has made its last step"
)
@pytest.mark.parametrize("stop", [("steps", 8), ("tokens", 160)])
def test_who_has_made_its_last_step_is_not_waited_for_after_a_restart(stop: Stop) -> None:
    rules = config(quorum=2, mode=MODE, stop=stop)
    desk = Desk(rules)
    desk.begin(2)
    desk.now = 1.0
    desk.report(1, 8)
    desk.report(2, 7)
    desk.do(ev.Drained(1))
    saved = json.loads(json.dumps(desk.core.state(1.0)))
    again = Desk(rules, saved, 2)
    again.join(3, 1, process="p2", tenure=2, previous_incarnation=2)
    assert again.core.phase is JobPhase.WAITING
    again.report(3, 7)
    assert again.core.phase in (JobPhase.TRAINING, JobPhase.HOLDING)
    again.report(3, 8)
    assert again.core.phase is JobPhase.DRAINING


@pytest.mark.parametrize(("trained", "reached"), [((10, 10), True), ((10, 9), False), ((11, 3), False)])
def test_the_job_stops_when_every_slot_has_its_share(trained: tuple[int, int], reached: bool) -> None:
    """Of 19 steps' tokens each slot's share is that of ten steps, less five tokens."""
    slots, ledger = [Slot(index, step=steps) for index, steps in enumerate(trained)], Ledger(1, 2)
    for slot in slots:
        ledger.open_tenure(slot.index, slot.index + 1)
        assert ledger.apply_report(slot.index, report(slot.step))
    assert MODE.is_stop_reached(("steps", 10), slots, ledger, lambda: 0.0) == reached
    assert MODE.is_stop_reached(("tokens", 190), slots, ledger, lambda: 0.0) == reached
    ledger.apply_report(0, replace(report(trained[0] + 1), trained_tokens=10 * trained[0] + 1))
    assert not MODE.is_stop_reached(("tokens", 20 * trained[1] + 1), slots, ledger, lambda: 0.0), (
        "one token more than two shares"
    )


@pytest.mark.parametrize(("round", "base", "opens"), [(3, 2, True), (2, 2, False), (3, 1, False), (2, 1, False)])
def test_a_push_opens_the_round_of_the_version_after_its_base(round: int, base: int, opens: bool) -> None:
    desk = Desk(config(mode=MODE))
    desk.begin(2)
    header = desk.header(0, 4, round=round, base_version=base)
    assert MODE.opens_round(header, 2) == opens


def push(desk: Desk, slot: int, growth: float, round: int = 1) -> list[ev.Action]:
    header = desk.header(slot, 4, round=round)
    return desk.do(ev.PushReceived(header, 1.0, True, 100 + slot, growth=growth))


@pytest.mark.promise(
    "A deterministic job in which one learner's update is out of scale fails by that learner's name, whoever comes "
    "first, and goes on when it is started again"
)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_push_out_of_scale_fails_the_job_by_name_whoever_comes_first(order: tuple[int, int]) -> None:
    desk = Desk(config(quorum=2, mode=MODE))
    desk.begin(2)
    for slot in order:
        assert desk.core.phase is not JobPhase.FAILED, "the others' pushes are waited for"
        assert reason(push(desk, slot, 1e30 if slot == 1 else 1.0)) is None
    assert desk.core.phase is JobPhase.FAILED and not of(desk.log, ev.Merge)
    message = desk.core.phase_message
    assert "the update of r-1 to fragment 0 is out of scale, and no other is" in message, message
    assert "1e+30 times" in message and "started again" in message, message
    again = Desk(config(quorum=2, mode=MODE), json.loads(json.dumps(desk.core.state(1.0))), 2)
    again.join(3, 0)
    again.join(4, 1)
    again.report(3, 0, epoch=2)
    again.report(4, 0, epoch=2)
    assert again.core.phase is JobPhase.TRAINING
    push(again, 0, 1.0)
    push(again, 1, 1.0)
    assert of(again.log, ev.Merge)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_updates_that_are_all_far_larger_than_the_parameters_are_merged(order: tuple[int, int]) -> None:
    """It was so that who came first was refused, never asked again, and waited for by all."""
    desk = Desk(config(quorum=2, mode=MODE))
    desk.begin(2)
    for slot in order:
        assert reason(push(desk, slot, 100.0)) is None
    (merge,) = of(desk.log, ev.Merge)
    assert [responder.header.slot for responder in merge.responders] == [0, 1]


def test_an_offer_out_of_scale_is_refused_whoever_comes_first() -> None:
    desk = Desk(config(quorum=2, mode=MODE))
    desk.begin(2)
    assert [reason(push(desk, slot, 100.0, round=0)) for slot in (0, 1, 0)] == [PushRefusal.OUT_OF_SCALE] * 3


def test_a_push_out_of_scale_is_not_merged_with_the_last_offers() -> None:
    desk = Desk(config(quorum=2, mode=MODE, stop=("steps", 4)))
    desk.begin(2)
    push(desk, 0, 1.0, round=0)
    push(desk, 1, 1e30)
    assert desk.core.phase is JobPhase.DRAINING, "the offer waits for the round's end"
    for connection in (1, 2):
        desk.report(connection, 4)
        desk.do(ev.Drained(connection))
    assert desk.core.phase is JobPhase.FAILED and not of(desk.log, ev.Merge)
    assert "the update of r-1 to fragment 0" in desk.core.phase_message


def test_a_deterministic_job_of_one_learner_that_moves_far_is_not_held_up() -> None:
    desk = Desk(config(slots=1, quorum=1, mode=DeterministicMode(1)))
    desk.begin(1)
    reasons = [reason(push(desk, 0, 100.0)) for _ in range(GATE_PATIENCE + 1)]
    assert reasons == [PushRefusal.OUT_OF_SCALE] * GATE_PATIENCE + [None] and of(desk.log, ev.Merge)


def test_a_push_that_was_refused_before_its_round_opened_is_named_while_the_round_waits() -> None:
    desk = Desk(config(quorum=2, mode=MODE))
    desk.begin(2)
    header = desk.header(1, 4, round=1)
    assert reason(desk.do(ev.PushReceived(replace(header, tokens=10**6), 1.0, True, 101))) is PushRefusal.INCONSISTENT
    push(desk, 0, 1.0)
    desk.later(OVERDUE_SECONDS + 1.0)
    (told,) = [row.message for row in of(desk.log, ev.RecordEvent) if row.kind is EventKind.ROUND_OVERDUE]
    assert "r-1 (inconsistent)" in told, told


def test_what_a_slot_returned_is_leased_to_that_slot() -> None:
    book = LeaseBook(3, 1000, 2)
    first = MODE.grant_lease(book, 0, ())
    book.return_leases(0)
    assert MODE.grant_lease(book, 1, ()).block != first.block
    assert MODE.grant_lease(book, 0, ()).block == first.block
