"""Which pushes count, at the bounds; tests of whole situations are in test_core.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core_desk import Desk, config, of, reason, report
from diloco_protocol.vocabulary import EventKind, JobPhase, PushRefusal
from diloco_protocol.wire.records import FragmentReport, StepReport
from diloco_syncer.core import events as ev
from diloco_syncer.core.books.norm_gate import GATE_SAMPLES, GATE_WINDOW, NormGate
from diloco_syncer.core.merging.aggregation import FEW_MERGES, STARVED_QUIET_SECONDS


def refusal(desk: Desk, **changes: object) -> PushRefusal | None:
    """Of an offer of slot 0's four steps, so changed."""
    refused = desk.core.check_push(desk.header(0, 4, round=0, **changes))
    return refused[0] if refused is not None else None


def at_version(version: int, epochs: list[tuple[int, list[int]]]) -> Desk:
    """A job whose store has this version, made in the newest of these epochs."""
    desk = Desk(config(slots=1))
    desk.begin(1)
    state = desk.core._state
    assert state.rounds is not None
    state.rounds.versions[0], state.epochs, state.epoch = version, epochs, epochs[-1][0]
    return desk


@pytest.mark.parametrize(
    ("epoch", "base", "known"), [(1, 1, True), (1, 2, False), (2, 2, True), (2, 3, False), (3, 3, True), (4, 1, False)]
)
def test_a_base_is_known_up_to_where_the_next_epoch_began(epoch: int, base: int, known: bool) -> None:
    """Epoch 2 began at version 1, and epoch 3 at version 2: what epoch 1 made above 1 was lost."""
    desk = at_version(3, [(1, [0]), (2, [1]), (3, [2])])
    refused = refusal(desk, epoch=epoch, base_version=base, oldest_version=base)
    assert (refused is not PushRefusal.OTHER_EPOCH) == known


def test_steps_may_be_as_old_as_the_job_allows() -> None:
    desk = at_version(6, [(1, [0])])
    oldest = 6 - desk.core.config.max_versions
    assert refusal(desk, base_version=6, oldest_version=oldest) is None
    assert refusal(desk, base_version=6, oldest_version=oldest - 1) is PushRefusal.TOO_OLD


def test_a_lost_slots_push_counts_and_a_drained_ones_does_not() -> None:
    """The process of a lost slot may be slow, or cut off, and its work is as good as any."""
    desk = Desk(config())
    desk.begin(2)
    desk.report(1, 4)
    late = desk.header(1, 3)
    desk.do(ev.ProcessEnded("r", 1, "p2", "killed"))
    assert desk.core.slots[1].state == "lost" and desk.core.check_push(late) is None
    desk = Desk(config())
    desk.begin(2)
    desk.report(1, 4)
    desk.do(ev.Drained(2))
    refused = desk.core.check_push(desk.header(1, 3))
    assert refused is not None and refused[0] is PushRefusal.NO_SLOT


def test_an_offer_of_steps_that_are_being_merged_waits_for_that_merge() -> None:
    desk = Desk(config(slots=1))
    desk.begin(1)
    desk.report(1, 4)
    assert of(desk.push(0, 4), ev.Merge)
    refused = desk.core.check_push(desk.header(0, 6, round=0, sequence=2))
    assert refused is not None and refused[0] is PushRefusal.ALREADY_MERGED and "being merged" in refused[1]


def test_a_push_carries_no_more_than_its_steps_and_its_tenure_can_have_trained() -> None:
    desk = Desk(config(slots=1, step_tokens=10))
    desk.begin(1)
    desk.report(1, 4)
    told = StepReport(5, 5, 41, (FragmentReport(1, 0, 5, 41),))
    assert refusal(desk, tokens=40, report=told) is None
    assert refusal(desk, tokens=41, report=told) is PushRefusal.INCONSISTENT
    assert reason(desk.push(0, 4)) is None
    desk.do(ev.MergeDurable(0, 1, 0.1, (1.0,)))
    told = StepReport(6, 6, 50, (FragmentReport(1, 1, 2, 20),))
    changes = {"first_step": 5, "steps": 2, "base_version": 1, "oldest_version": 1, "sequence": 2, "report": told}
    assert desk.core.check_push(desk.header(0, 6, **changes, round=0, tokens=10)) is None
    refused = desk.core.check_push(desk.header(0, 6, **changes, round=0, tokens=20))
    assert refused == (PushRefusal.INCONSISTENT, "20 tokens, 40 were merged before, and its learner has trained 50")


def test_a_push_tells_of_its_learners_steps() -> None:
    """It may come before the report."""
    desk = Desk(config(slots=1))
    desk.begin(1)
    desk.report(1, 4)
    assert reason(desk.push(0, 6)) is None
    assert desk.core.trained_tokens == 60


def test_a_new_tenures_pushes_are_numbered_anew() -> None:
    desk = Desk(config(slots=1))
    desk.begin(1)
    desk.report(1, 4)
    assert reason(desk.push(0, 4, sequence=5)) is None
    desk.do(ev.MergeDurable(0, 1, 0.1, (1.0,)))
    desk.join(9, 0)
    told = StepReport(5, 1, 10, (FragmentReport(1, 1, 1, 10, confirmed_tokens=0),))
    desk.do(ev.Reported(9, told))
    changes = {"first_step": 5, "steps": 1, "tokens": 10, "base_version": 1, "oldest_version": 1}
    assert reason(desk.push(0, 5, **changes, round=0, sequence=1, report=told)) is None


def test_a_push_that_was_merged_is_known_after_a_restart() -> None:
    desk = Desk(config(slots=1))
    desk.begin(1)
    desk.report(1, 4)
    desk.push(0, 4, sequence=3)
    desk.do(ev.MergeDurable(0, 1, 0.1, (1.0,)))
    again = Desk(config(slots=1), desk.core.state(0.0), 2)
    again.join(1, 0, process="p1", previous_incarnation=1)
    changes = {"first_step": 5, "steps": 1, "tokens": 10, "base_version": 1, "oldest_version": 1}
    told = report(5, base=1, confirmed=40)
    for sequence, expected in ((3, PushRefusal.REPEATED), (4, None)):
        refused = again.core.check_push(again.header(0, 5, **changes, sequence=sequence, round=0, report=told))
        assert (refused[0] if refused is not None else None) is expected


def test_the_gate_judges_after_enough_pushes_and_by_the_newest() -> None:
    gate = NormGate(3.0)
    gate.add(0, [(1.0, 4)] * (GATE_SAMPLES - 1))
    assert not gate.objection(0, 100.0, 4)
    gate.add(0, [(1.0, 4)])
    assert not gate.objection(0, 3.0, 4) and gate.objection(0, 3.1, 4) and not gate.objection(1, 100.0, 4)
    gate.add(0, [(1.0, 4)] * 100)
    gate.add(0, [(100.0, 4)] * GATE_WINDOW)
    assert not gate.objection(0, 250.0, 4), "those before are forgotten"


# ------------------------------------------------------------------ rounds that some miss


def merge_alone(desk: Desk, number: int, late_one_too: bool = False, lost: bool = False) -> list[ev.Action]:
    """Slot 0's four steps become version ``number``; slot 1 is waited for, and may push its first step,
    or leave (``lost``)."""
    version = number - 1
    told = report(4 * number, version, 40 * version)
    desk.do(ev.Reported(1, told))
    changes = {"base_version": version, "oldest_version": version, "first_step": 4 * version + 1, "steps": 4}
    assert reason(desk.push(0, 4 * number, **changes, sequence=number, tokens=40, report=told)) is None
    if late_one_too:
        assert reason(desk.push(1, 1)) is None
    elif lost:
        desk.later(1.0)
        desk.do(ev.Drained(2))
        desk.later(4.0)
    else:
        desk.later(5.0)
        desk.report(2, 1)  # it is there
    norms = (1.0,) * len(of(desk.log, ev.Merge)[-1].responders)
    return desk.do(ev.MergeDurable(0, number, 0.0, norms))


def test_who_is_late_three_times_running_is_starved_until_it_is_in_time() -> None:
    desk = Desk(config(heartbeat_timeout=1e6))
    desk.begin(2)
    told = []
    for number in range(1, 8):
        merge_alone(desk, number, late_one_too=number == 4)
        told.append(desk.core.slots[1].pushes.starved)
    assert told == [False, False, True, False, False, False, True]


def test_who_is_gone_is_not_starved() -> None:
    desk = Desk(config(heartbeat_timeout=1e6))
    desk.begin(2)
    merge_alone(desk, 1)
    merge_alone(desk, 2)
    assert desk.core.slots[1].pushes.late_rounds == 2
    merge_alone(desk, 3, lost=True)
    assert not desk.core.slots[1].occupied
    assert (desk.core.slots[1].pushes.starved, desk.core.slots[1].pushes.late_rounds) == (False, 0)


@pytest.mark.parametrize(("pause", "events"), [(0.0, 1), (STARVED_QUIET_SECONDS, 2)])
def test_that_a_slot_is_starved_is_an_event_once_a_minute(pause: float, events: int) -> None:
    """With steps of some milliseconds it becomes starved, and is in time again, many times a second."""
    desk = Desk(config(heartbeat_timeout=1e6))
    desk.begin(2)
    for number in range(1, 8):
        merge_alone(desk, number, late_one_too=number == 4)
        desk.later(pause if number == 4 else 0.0)
    assert desk.core.slots[1].pushes.starved
    assert sum(note.kind == "starved" for note in of(desk.log, ev.RecordEvent)) == events


@pytest.mark.promise("Where merges have far fewer learners than there are, an event says so, with both times")
def test_that_merges_have_few_learners_is_told_with_both_times() -> None:
    desk = Desk(config(heartbeat_timeout=1e6))
    desk.begin(2)
    for number in range(1, FEW_MERGES + 3):
        merge_alone(desk, number)
        desk.do(ev.VersionSent(1, 0, number))
    (told,) = [note for note in of(desk.log, ev.RecordEvent) if note.kind is EventKind.FEW_LEARNERS]
    assert told.message.startswith("merges have 1.0 of 2 learners: an exchange takes ")
    assert "and the 1 steps that it may overlap take 1.25 s" in told.message
    desk = Desk(config(heartbeat_timeout=1e6))
    desk.begin(1)
    for number in range(1, FEW_MERGES + 3):
        merge_alone(desk, number)
        desk.do(ev.VersionSent(1, 0, number))
    assert all(note.kind is not EventKind.FEW_LEARNERS for note in of(desk.log, ev.RecordEvent)), "there is no other"


# ------------------------------------------------------------------ the last merges


def test_two_offers_of_one_slot_are_no_quorum_of_two() -> None:
    desk = Desk(config(slots=2, quorum=2))
    desk.begin(2)
    desk.do(ev.DrainRequested(1))
    assert reason(desk.push(0, 2, round=0)) is None
    desk.do(ev.Drained(1))
    desk.join(9, 0)  # goes on where that one left
    told = StepReport(3, 1, 10, (FragmentReport(1, 0, 1, 10, confirmed_tokens=0),))
    desk.do(ev.Reported(9, told))
    desk.do(ev.EndRequested(JobPhase.SUSPENDED, "interrupted"))
    assert reason(desk.push(0, 3, round=0, first_step=3, steps=1, tokens=10, report=told)) is None
    for connection in (9, 2):
        desk.do(ev.Drained(connection))
    desk.later(desk.core.config.checkpoint_seconds)
    assert desk.core.phase is JobPhase.SUSPENDED
    assert not of(desk.log, ev.Merge) and not desk.core.open_rounds, "they wait for a resume"


def test_a_round_that_is_short_of_its_quorum_is_not_merged_at_the_end() -> None:
    desk = Desk(config(slots=2, quorum=2))
    desk.begin(2)
    desk.report(1, 4)
    assert of(desk.report(2, 4), ev.Pull)
    assert reason(desk.push(0, 4)) is None
    desk.do(ev.EndRequested(JobPhase.SUSPENDED, "interrupted"))
    for connection in (1, 2):
        desk.do(ev.Drained(connection))
    desk.later(desk.core.config.checkpoint_seconds)
    assert desk.core.phase is JobPhase.SUSPENDED and not of(desk.log, ev.Merge)


def test_an_offer_that_was_taken_is_repeated_when_the_job_is_over_too() -> None:
    """Its learner did not hear the answer. Told that the job has ended it would forget the offer, and stop at the
    announcement that says in which version it was merged."""
    desk = Desk(config(slots=1))
    desk.begin(1)
    early = desk.header(0, 4, round=0)
    desk.do(ev.EndRequested(JobPhase.FAILED, "no reason"))
    assert desk.core.check_push(early) == (PushRefusal.ENDED, "the job is failed")
    desk = Desk(config(slots=1, stop=("steps", 4)))
    desk.begin(1)
    desk.report(1, 4)
    offer = desk.header(0, 4, round=0)
    assert reason(desk.push(0, 4, round=0)) is None
    desk.join(9, 0, process="p1", previous_incarnation=1)
    again = replace(offer, incarnation=desk.core.slots[0].holder.incarnation)
    desk.later(desk.core.config.drain_seconds)
    (merge,) = of(desk.log, ev.Merge)
    (announced,) = of(desk.do(ev.MergeDurable(0, merge.version, 0.1, (1.0,))), ev.Announce)
    assert desk.core.phase is JobPhase.COMPLETE and announced.merged == {}, "nobody is there"
    refused = desk.core.check_push(again, "p1")
    assert refused is not None and refused[0] is PushRefusal.REPEATED
    for other, process in (
        (replace(again, sequence=2), "p1"),
        (offer, "p1"),
        (again, "p2"),
        (replace(again, slot=9), "p1"),
    ):
        assert desk.core.check_push(other, process) == (PushRefusal.ENDED, "the job is complete")


def test_of_two_copies_of_an_offer_that_the_store_has_one_is_restored() -> None:
    """A syncer that was succeeded while it wrote one makes it durable late, when its learner has sent it again."""
    desk = Desk(config(slots=1))
    desk.begin(1)
    desk.report(1, 4)
    first = desk.header(0, 4, round=0)
    again = Desk(config(slots=1), desk.core.state(0.0), 2)
    again.join(1, 0, process="p1", previous_incarnation=1)
    second = replace(first, incarnation=again.core.slots[0].holder.incarnation)
    core = Desk(config(slots=1), again.core.state(0.0), 3).core
    for handle, offer in ((51, first), (52, second)):
        assert core.restore_offer(offer, handle, 1.0)
    assert [release.handle for release in of(core.start(0.0), ev.ReleasePush)] == [51]
    core.write_off_learners()
    assert core.ledger is not None and core.ledger.imbalances(0) == []
    assert core.ledger.pending(0, 0) == 40 and not core.ledger.dropped(0, 0)


def test_a_record_that_is_applied_twice_counts_once() -> None:
    desk = Desk(config(slots=1))
    desk.begin(1)
    saved = desk.core.state(0.0)
    again = Desk(config(slots=1), saved, 2).core
    header = replace(desk.header(0, 4, round=1), round=1)
    for _ in range(2):
        again.apply_record(0, 1, [header], 1)
    assert again.ledger is not None and again.ledger.merged(0, 0) == 40 and again.merges == 1
