"""The store has lost the version that its state tells of: the books go back with it, and forward again."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from core_desk import Desk, config
from diloco_protocol.wire.records import Receipt
from diloco_syncer.core import events as ev
from diloco_syncer.core.books.slots import MergedPush
from diloco_syncer.core.core import Core
from diloco_syncer.store.records import MergeRecord
from diloco_syncer.store.replay import take_back_versions
from diloco_syncer.store.restore import StoreUnusable
from ledger_balance import imbalances

CONFIG = config(slots=2)


def merged_twice() -> tuple[Desk, Receipt]:
    """Version 1 has four steps of slot 0, version 2 its next four and four of slot 1, whose process is gone. The last
    is version 2's receipt."""
    desk = Desk(CONFIG)
    desk.begin(2)
    desk.report(1, 4)
    desk.report(2, 4)
    desk.push(0, 4)
    desk.later(6.0)
    desk.do(ev.MergeDurable(0, 1, 0.1, (1.0,)))
    desk.report(1, 8, base=1, confirmed=40)
    desk.report(2, 4, base=1)
    desk.push(0, 8, sequence=2, first_step=5, steps=4, tokens=40, base_version=1, oldest_version=1)
    desk.push(1, 4, oldest_version=0)
    desk.later(6.0)
    desk.do(ev.MergeDurable(0, 2, 0.1, (1.0, 1.0)))
    assert desk.core.versions == [2] and not imbalances(ledger(desk.core))
    desk.join(3, 1, "another")
    desk.report(1, 8, base=1, confirmed=40)
    return desk, desk.core.receipt(0)


def ledger(core: Core) -> Any:
    assert core.ledger is not None
    return core.ledger


def restarted(desk: Desk) -> Core:
    return Core(CONFIG, json.loads(json.dumps(desk.core.state(0.0))), 2, 0.0)


def test_the_books_go_back_one_version_and_forward_again() -> None:
    desk, receipt = merged_twice()
    core = restarted(desk)
    assert core.take_back_version(0, 1) and core.versions == [1] and core.merges == 1
    assert [ledger(core).merged(slot, 0) for slot in (0, 1)] == [40, 0]
    assert ledger(core).pending(0, 0) == 40, "the learner has it, or says otherwise"
    assert ledger(core).dropped(1, 0) == {"died": 40} and not imbalances(ledger(core))
    assert core.slots[0].pushes.merged[0] == MergedPush(1, 1) and core.slots[0].merged_last_step[0] == 4
    core.apply_recovered_version(0, 2, 1, receipt, 2)
    core.start(0.0, (1,))
    assert core.versions == [2] and core.merges == 2 and not imbalances(ledger(core))
    assert [ledger(core).merged(slot, 0) for slot in (0, 1)] == [80, 40]
    assert not ledger(core).dropped(1, 0)
    assert core.slots[0].pushes.merged[0] == MergedPush(2, 2) and core.slots[0].merged_last_step[0] == 8


def test_books_that_do_not_know_the_version_go_back_to_none() -> None:
    """A version comes from a learner only whole, and its receipt counts from there."""
    desk, receipt = merged_twice()
    core = restarted(desk)
    assert not core.take_back_version(0, 0) and core.versions == [0] and core.merges == 0
    assert [ledger(core).merged(slot, 0) for slot in (0, 1)] == [0, 0] and not imbalances(ledger(core))
    assert not core.slots[0].pushes.merged[0].sequence
    core.apply_recovered_version(0, 2, 1, receipt, 2)
    core.start(0.0, (1,))
    assert [ledger(core).merged(slot, 0) for slot in (0, 1)] == [80, 40] and not imbalances(ledger(core))


def newest(version: int) -> list[MergeRecord]:
    return [MergeRecord("j", 1, 0, version, theta=np.ones(8, np.float32))]


def test_what_fits_the_books_is_gone_on_with_and_else_a_stand_in() -> None:
    desk, _ = merged_twice()
    for version, kept in ((2, 2), (1, 1), (0, 0)):
        core = restarted(desk)
        (record,) = take_back_versions(core, newest(version))
        assert core.versions == [record.version] == [kept] and (record.made_in == 0) == (version == 0)
        core.start(0.0, [record.made_in])
        assert core.is_recovering == (version < 2)
    assert "no whole version of fragments 0" in core.phase_message


@pytest.mark.parametrize("phase", ["complete", "evaluating"])
def test_a_job_that_has_ended_is_not_gone_on_with_from_a_stand_in(phase: str) -> None:
    """Nobody comes any more who could hold it."""
    state = merged_twice()[0].core.state(0.0)
    state["job"]["phase"]["name"] = phase
    reached = replace(CONFIG, stop=("steps", 8))
    with pytest.raises(StoreUnusable, match="no version is left that fits"):
        take_back_versions(Core(reached, state, 2, 0.0), newest(0))
    assert [record.version for record in take_back_versions(Core(reached, state, 2, 0.0), newest(1))] == [1]


@pytest.mark.promise("A last merge that the store lost is made again of the offers that it has again")
def test_an_offer_of_a_version_that_was_lost_waits_again_and_a_job_that_awaited_its_score_merges_it() -> None:
    desk, _ = merged_twice()
    state = desk.core.state(0.0)
    state["job"]["phase"]["name"] = "evaluating"
    state["job"]["scores"]["final"] = 2.0
    core = Core(replace(CONFIG, stop=("steps", 8)), json.loads(json.dumps(state)), 2, 0.0)
    assert core.take_back_version(0, 1)
    offer = desk.header(1, 4, round=0, sequence=9, incarnation=2)
    assert not core.restore_offer(replace(offer, tokens=41), 5, 1.0), "so much of that slot was not lost"
    assert core.restore_offer(offer, 6, 1.0)
    assert ledger(core).pending(1, 0) == 40 and not ledger(core).dropped(1, 0) and not imbalances(ledger(core))
    core.start(0.0, (1,))
    assert core.phase == "draining" and core.state(0.0)["job"]["scores"]["final"] is None
    left = core.handle(ev.Tick(), CONFIG.drain_seconds)
    (merge,) = [action for action in left if isinstance(action, ev.Merge)]
    assert merge.last and [responder.header.slot for responder in merge.responders] == [1]
    core.handle(ev.MergeDurable(0, 2, 0.1, (1.0,)), CONFIG.drain_seconds)
    assert core.phase != "draining" and core.versions == [2] and not imbalances(ledger(core))


def test_a_job_that_awaits_its_score_goes_on_awaiting_it() -> None:
    state = merged_twice()[0].core.state(0.0)
    state["job"]["phase"]["name"] = "evaluating"
    core = Core(replace(CONFIG, stop=("steps", 8)), state, 2, 0.0)
    core.start(0.0, (1,))
    assert core.phase == "evaluating"
