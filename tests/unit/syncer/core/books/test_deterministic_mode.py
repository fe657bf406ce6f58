"""Deterministic mode's rules, each alone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from core_desk import Desk, config, of, report
from diloco_protocol.vocabulary import JobPhase
from diloco_syncer.core import events as ev
from diloco_syncer.core.books.deterministic import DeterministicMode
from diloco_syncer.core.books.leases import LeaseBook
from diloco_syncer.core.books.ledger import Ledger
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


def test_what_a_slot_returned_is_leased_to_that_slot() -> None:
    book = LeaseBook(3, 1000, 2)
    first = MODE.grant_lease(book, 0, ())
    book.return_leases(0)
    assert MODE.grant_lease(book, 1, ()).block != first.block
    assert MODE.grant_lease(book, 0, ()).block == first.block
