"""Shards merge side by side, and what waits for one that is lost is merged, or asked for again, when it is back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core_desk import Desk, config, of, reason, report
from diloco_protocol.vocabulary import EventKind, JobPhase, PushRefusal
from diloco_protocol.wire.records import PushHeader
from diloco_syncer.core import events as ev
from diloco_syncer.core.books.deterministic import DeterministicMode
from diloco_syncer.core.merging.aggregation import LATE_ROUNDS
from ledger_balance import imbalances
from shell_figures import SHELL


class Job(Desk):
    """A job of as many shards as fragments: shard n has fragment n. H is 4 steps; two rounds may be open."""

    def __init__(self, learners: int = 2, shards: int = 2, **changes: object) -> None:
        rules = replace(config().rules, overlap=4, quorum=changes.pop("quorum", 1))  # type: ignore[arg-type]
        super().__init__(config(slots=learners, shards=shards, rules=rules, **changes))
        self.begin(learners, fragments=2)
        self.handles = 100

    def open_both(self) -> None:
        """Everybody makes 4 steps, and 6: a round of each fragment opens."""
        for step in (4, 6):
            for slot in self.core.slots:
                if slot.holder.connection is not None:
                    self.report(slot.holder.connection, step)
        assert set(self.core.open_rounds) == {0, 1}

    def make(self, slot: int, fragment: int, round: int | None = None, sequence: int = 1) -> PushHeader:
        round = self.core.open_rounds[fragment].id if round is None else round
        told = report(6, fragments=2)
        return self.header(slot, 6, fragment=fragment, round=round, sequence=sequence, report=told)

    def send(self, header: PushHeader) -> list[ev.Action]:
        self.handles += 1
        return self.do(ev.PushReceived(header, 1.0, True, handle=self.handles))

    def told(self, kind: EventKind) -> list[str]:
        return [event.message for event in of(self.log, ev.RecordEvent) if event.kind is kind]


def test_each_shard_merges_one_at_a_time_beside_the_others() -> None:
    job = Job(learners=1)
    job.open_both()
    (first,) = of(job.send(job.make(0, 0)), ev.Merge)
    (second,) = of(job.send(job.make(0, 1)), ev.Merge)
    assert (first.fragment, second.fragment) == (0, 1)
    job.do(ev.MergeDurable(1, 1, 0.1, (1.0,)))
    job.do(ev.MergeDurable(0, 1, 0.1, (1.0,)))
    assert job.core.versions == [1, 1]
    one = Job(learners=1, shards=1)
    one.open_both()
    assert of(one.send(one.make(0, 0)), ev.Merge)
    assert not of(one.send(one.make(0, 1)), ev.Merge), "the shard's only merge goes on"
    assert of(one.do(ev.MergeDurable(0, 1, 0.1, (1.0,))), ev.Merge)


def test_the_window_of_a_round_ends_while_another_shard_merges() -> None:
    job = Job()
    job.open_both()
    job.send(job.make(0, 0))
    job.later(1.0)
    job.send(job.make(0, 1))
    first, second = job.core.open_rounds[0].deadline, job.core.open_rounds[1].deadline
    assert first is not None and second is not None and first < second
    job.now = first
    job.do(ev.Tick())
    assert job.core.open_rounds[0].merging
    job.now = second - 0.25
    job.do(ev.Tick())
    assert job.core.wake_at == second
    job.do(ev.ShardLost(1))
    assert job.core.wake_at > second, "no merge begins then"


def test_nothing_is_begun_for_a_lost_shard() -> None:
    """No round opens, nobody is asked, no merge begins, and its open round keeps no other from opening."""
    job = Job(learners=1)
    job.do(ev.ShardLost(0))
    job.do(ev.ShardLost(0))
    job.report(1, 4)
    job.report(1, 6)
    assert set(job.core.open_rounds) == {1}
    assert job.told(EventKind.SHARD_LOST) == ["shard 0 is lost, which has 1 of 2 fragments"]
    job = Job(heartbeat_timeout=1e6)
    job.open_both()
    job.send(job.make(0, 0))
    job.do(ev.ShardLost(0))
    actions = job.later(20.0)
    assert not of(actions, ev.Merge) and {pull.fragment for pull in of(actions, ev.Pull)} == {1}


def test_a_round_that_waits_for_its_shard_leaves_room_for_another() -> None:
    job = Job(learners=1, most_rounds=lambda elements: 1)
    assert job.core._state.rounds
    job.core._state.rounds.exchanges.value = 1
    job.report(1, 4)
    (waiting,) = job.core.open_rounds
    job.do(ev.ShardLost(waiting))
    job.report(1, 6)
    assert set(job.core.open_rounds) == {0, 1}


def test_a_merge_that_was_under_way_is_told_of_before_the_shard_is_ready() -> None:
    job = Job(learners=1)
    job.open_both()
    job.send(job.make(0, 0))
    job.do(ev.ShardLost(0))
    assert job.core.open_rounds[0].merging
    job.do(ev.MergeDurable(0, 1, 0.1, (1.0,)))
    job.do(ev.ShardReady(0, {}))
    assert job.core.versions == [1, 0] and 0 not in job.core.open_rounds
    assert job.told(EventKind.SHARD_READY) == ["shard 0 is ready; of the updates that it had 0 are lost"]
    assert reason(job.send(job.make(0, 0, round=1))) is PushRefusal.REPEATED, "it is merged"


def test_a_merge_that_is_told_of_too_late_is_taken_from_the_store() -> None:
    """The round has begun anew by then; the store has the truth."""
    job = Job(learners=1)
    job.open_both()
    job.send(job.make(0, 0))
    job.do(ev.ShardReady(0, {}))
    (restart,) = of(job.do(ev.MergeDurable(0, 1, 0.1, (1.0,))), ev.RestartFromStore)
    assert restart.reason == "version 1 of fragment 0 is durable, and its merge was given up"
    assert job.core.versions == [0, 0]


def test_what_the_shard_has_no_more_is_asked_for_again() -> None:
    """The round begins anew, under a number that its learners have not answered, and takes the very same push."""
    job = Job(learners=1, heartbeat_timeout=1e6)
    job.open_both()
    lost = job.make(0, 0)
    job.send(lost)
    handle, before = job.handles, job.core.open_rounds[0]
    assert before.merging
    job.do(ev.ShardLost(0))
    job.now = 50.0
    actions = job.do(ev.ShardReady(0, {}))
    again = job.core.open_rounds[0]
    assert not again.merging and again.id > before.id and again.opened_at == 50.0
    assert ev.Pull(1, again.id, 0, 0) in of(actions, ev.Pull)
    assert of(actions, ev.ReleasePush) == [ev.ReleasePush(handle)]
    assert job.told(EventKind.SHARD_READY) == ["shard 0 is ready; of the updates that it had 1 are lost"]
    assert not imbalances(job.core.ledger)
    actions = job.send(lost)
    assert reason(actions) is None
    (merge,) = of(job.send(job.make(0, 0, sequence=2)), ev.Merge)
    assert merge.responders[0].handle == job.handles
    job.do(ev.MergeDurable(0, 1, 0.1, (1.0,)))
    assert not imbalances(job.core.ledger)


def test_a_push_that_was_merged_is_still_known_when_a_later_one_is_lost() -> None:
    """Any other refusal would tell its learner that it was not taken."""
    job = Job(learners=1)
    job.open_both()
    merged = job.make(0, 0)
    job.send(merged)
    job.do(ev.MergeDurable(0, 1, 0.1, (1.0,)))
    later = replace(merged, sequence=2, base_version=1, oldest_version=1, first_step=7, last_step=8, steps=2, tokens=20)
    later = replace(later, round=0, report=report(8, 1, confirmed=60, fragments=2))
    assert reason(job.send(later)) is None
    job.do(ev.ShardReady(0, {}))
    assert reason(job.send(merged)) is PushRefusal.REPEATED
    assert reason(job.send(later)) is None


def test_an_offer_that_the_shard_still_has_is_merged_under_its_new_handle() -> None:
    """Also where the shard is told of as ready twice, or was never told of as lost."""
    job = Job(quorum=2)
    job.open_both()
    job.send(job.make(0, 0, round=0))
    kept = job.handles
    job.send(job.make(1, 0))
    assert job.core.open_rounds[0].merging
    for _ in range(2):
        actions = job.do(ev.ShardReady(0, {kept: 900}))
    assert [push.handle for push in job.core.open_rounds[0].pushes] == [900]
    assert [pull.connection for pull in of(actions, ev.Pull)] == [2], "the other is asked"
    assert reason(job.send(job.make(0, 0, round=0))) is PushRefusal.REPEATED
    (merge,) = of(job.send(job.make(1, 0)), ev.Merge)
    assert [one.handle for one in merge.responders] == [900, job.handles]


def test_offers_that_wait_for_a_round_follow_their_shard() -> None:
    job = Job(quorum=2)
    for slot in (0, 1):
        job.send(job.make(slot, 1, round=0))
    job.do(ev.ShardLost(1))
    job.do(ev.ShardReady(1, {job.handles: 900}))
    assert [header.slot for header in job.core._aggregator.accepted_headers()] == [1]
    assert 1 not in job.core.open_rounds
    assert reason(job.send(job.make(0, 1, round=0))) is None, "its sender may have had no answer"


def test_work_that_is_lost_with_a_shard_and_its_learner_is_dropped() -> None:
    job = Job()
    job.open_both()
    job.send(job.make(0, 0))
    job.join(3, 0, process="q")
    assert job.core.ledger is not None
    (row, _) = job.core.ledger.rows()
    assert (row.pending, row.dropped) == (120, 0), "its push waits, and the other's work"
    job.do(ev.ShardReady(0, {}))
    (row, _) = job.core.ledger.rows()
    assert (row.pending, row.reasons) == (60, {"died": 60}) and not imbalances(job.core.ledger)
    assert "30 tokens of r-0 dropped (died)" in job.told(EventKind.DROPPED), "in one of two fragments"


def test_a_push_of_an_earlier_tenure_takes_back_no_number_of_the_present_one() -> None:
    job = Job(learners=1)
    job.open_both()
    job.core._state.rounds.open[0].merging = True  # type: ignore[union-attr]
    job.send(job.make(0, 0, sequence=7))
    job.join(2, 0, process="q")
    slot = job.core.slots[0]
    slot.pushes.mark_accepted(0, 3)
    job.do(ev.ShardReady(0, {}))
    assert slot.pushes.accepted_sequence[0] == 3


def test_nobody_is_late_in_a_round_whose_shard_is_lost() -> None:
    """A merge that began before the loss has pushes of some; the others had nobody to push to since."""
    for lost in (False, True):
        job = Job()
        job.open_both()
        slot = job.core.slots[1]
        slot.pushes.late_rounds = LATE_ROUNDS - 1
        job.send(job.make(0, 0))
        job.later(5.0)
        assert job.core.open_rounds[0].merging
        if lost:
            job.do(ev.ShardLost(0))
        job.do(ev.MergeDurable(0, 1, 0.1, (1.0,)))
        assert slot.pushes.starved is not lost
        rounds = job.core._state.rounds
        assert rounds is not None
        assert (1 in rounds._silent[0]) is not lost, "and its steps count"
        assert (0 in rounds._deliveries) is not lost, "nor is it measured how long the version takes to the learners"
        job.do(ev.ShardLost(0))
        assert 0 not in rounds._deliveries, "nor that of a version which they did not have by then"


def test_a_round_whose_shard_is_lost_is_not_overdue() -> None:
    job = Job(heartbeat_timeout=1e6)
    job.open_both()
    job.later(121.0)
    assert len(job.told(EventKind.ROUND_OVERDUE)) == 2
    job.do(ev.ShardLost(0))
    assert [row.overdue for row in job.core.status(job.now, SHELL).rounds] == [False, True]
    job.later(500.0)
    assert len(job.told(EventKind.ROUND_OVERDUE)) == 2
    job.do(ev.ShardReady(0, {}))
    job.later(119.0)
    assert len(job.told(EventKind.ROUND_OVERDUE)) == 2, "it waits since then"
    job.later(2.0)
    assert len(job.told(EventKind.ROUND_OVERDUE)) == 3


def test_a_drain_waits_for_a_lost_shard_and_the_job_is_not_complete_without_its_merges() -> None:
    job = Job(stop=("steps", 6), drain_seconds=30.0, heartbeat_timeout=1e6)
    for connection in (1, 2):
        job.report(connection, 6)
    assert job.core.phase is JobPhase.DRAINING
    for fragment in (0, 1):
        job.send(job.make(0, fragment, round=0))
    kept = job.handles
    job.do(ev.Drained(1))
    job.do(ev.ShardLost(1))
    job.later(600.0)
    assert job.core.slots[1].occupied, "it cannot offer its work of the lost fragment"
    job.do(ev.Drained(2))
    (merge,) = [action for action in of(job.log, ev.Merge) if action.last]
    assert merge.fragment == 0
    job.do(ev.MergeDurable(0, 1, 0.1, (1.0,)))
    job.later(job.core.config.most_drain_seconds - 601.0)
    assert job.core.phase is JobPhase.DRAINING
    (merge,) = of(job.do(ev.ShardReady(1, {kept: 900})), ev.Merge)
    assert (merge.fragment, merge.responders[0].handle) == (1, 900)
    job.do(ev.MergeDurable(1, 1, 0.1, (1.0,)))
    assert job.core.phase is JobPhase.COMPLETE


def test_a_drain_waits_so_long_for_a_shard_and_no_longer() -> None:
    job = Job(learners=1, stop=("steps", 6), drain_seconds=30.0, heartbeat_timeout=1e6)
    job.report(1, 6)
    waited = 0.0
    while job.core.slots[0].occupied:
        job.do(ev.ShardLost(1))
        job.later(20.0)
        job.do(ev.ShardReady(1, {}))  # and it is lost again
        waited += 20.0
        assert waited < 2 * job.core.config.most_drain_seconds
    assert waited >= job.core.config.most_drain_seconds
    job = Job(learners=1, stop=("steps", 6), drain_seconds=30.0, heartbeat_timeout=1e6)
    job.report(1, 6)
    job.do(ev.ShardLost(1))
    job.later(job.core.config.most_drain_seconds - 1.0)
    assert job.core.slots[0].occupied
    job.later(1.0)
    assert not job.core.slots[0].occupied


def drained_without_shards(most: float) -> Job:
    """A complete job's drain: all have left, and both shards with what was offered are lost since then."""
    job = Job(stop=("steps", 6), drain_seconds=30.0, most_drain_seconds=most, heartbeat_timeout=1e6)
    for connection in (1, 2):
        job.report(connection, 6)
    for fragment in (0, 1):
        job.send(job.make(0, fragment, round=0))
    for shard in (0, 1):
        job.do(ev.ShardLost(shard))
    for connection in (1, 2):
        job.do(ev.Drained(connection))
    return job


def test_a_shard_that_never_returns_fails_the_job_whose_last_merges_it_has() -> None:
    """So does one that comes back and is lost again and again, and one that another shard's merge is not about."""
    job = drained_without_shards(900.0)
    job.later(899.0)
    assert job.core.phase is JobPhase.DRAINING
    job.later(1.0)
    assert job.core.phase is JobPhase.FAILED
    assert job.core.phase_message == (
        "the stop is reached, and the last merges of the offered work wait for shard 0 and 1 of the syncer, which did"
        " not come back within 900 s; see why it ends; started again on its store, the job goes on"
    )
    job = drained_without_shards(900.0)
    kept = job.handles
    lost = 0.0
    while job.core.phase is JobPhase.DRAINING and lost < 2000.0:
        job.later(20.0)
        for shard, handle in ((1, kept), (0, kept - 1)):
            job.do(ev.ShardReady(shard, {handle: handle}))
            job.do(ev.ShardLost(shard))
        lost += 20.0
    assert (job.core.phase, lost) == (JobPhase.FAILED, 900.0)
    job = drained_without_shards(900.0)
    job.later(800.0)
    job.do(ev.ShardReady(1, {job.handles: job.handles}))
    job.do(ev.MergeDurable(1, 1, 0.1, (1.0,)))
    job.later(99.0)
    assert job.core.phase is JobPhase.DRAINING
    job.later(1.0)
    assert job.core.phase is JobPhase.FAILED and job.core.versions == [0, 1]


def test_a_shard_is_waited_for_anew_after_a_merge_and_from_the_drain_on() -> None:
    job = drained_without_shards(900.0)
    job.later(800.0)
    kept = job.handles
    job.do(ev.ShardReady(1, {kept: kept}))
    job.do(ev.ShardReady(0, {kept - 1: kept - 1}))
    job.do(ev.MergeDurable(1, 1, 0.1, (1.0,)))
    job.do(ev.ShardLost(0))
    job.later(899.0)
    assert job.core.phase is JobPhase.DRAINING
    job.later(1.0)
    assert job.core.phase is JobPhase.FAILED
    job = Job(learners=1, stop=("steps", 8), most_drain_seconds=900.0, heartbeat_timeout=1e6)
    job.report(1, 4)
    job.send(job.make(0, 1, round=0))
    job.do(ev.ShardLost(1))
    job.later(500.0)
    job.report(1, 8)
    assert job.core.phase is JobPhase.DRAINING
    job.do(ev.Drained(1))
    job.later(899.0)
    assert job.core.phase is JobPhase.DRAINING
    job.later(1.0)
    assert job.core.phase is JobPhase.FAILED


def test_a_loss_says_why_and_the_rounds_of_the_shard_say_that_they_wait() -> None:
    job = Job(learners=1)
    job.open_both()
    job.do(ev.ShardLost(1, "its process has ended"))
    assert job.told(EventKind.SHARD_LOST) == ["shard 1 is lost, which has 1 of 2 fragments: its process has ended"]
    assert [(row.fragment, row.unserved) for row in job.core.status(job.now, SHELL).rounds] == [(0, False), (1, True)]
    job.do(ev.ShardReady(1, {}))
    assert not any(row.unserved for row in job.core.status(job.now, SHELL).rounds)


def test_a_drain_does_not_wait_for_a_shard_without_fragments() -> None:
    job = Job(learners=1, shards=3, stop=("steps", 6), drain_seconds=30.0, heartbeat_timeout=1e6)
    job.report(1, 6)
    job.do(ev.ShardLost(2))
    job.later(31.0)
    assert not job.core.slots[0].occupied


def test_a_suspension_does_not_wait_for_a_lost_shard() -> None:
    """What was offered is merged when the job is resumed."""
    job = Job(learners=1)
    job.open_both()
    job.do(ev.EndRequested(JobPhase.SUSPENDED, "suspended"))
    job.send(job.make(0, 1, round=0))
    job.do(ev.ShardLost(1))
    job.do(ev.Drained(1))
    job.later(30.0)  # its optimizer's state is waited for
    assert job.core.phase is JobPhase.SUSPENDED


def test_a_deterministic_job_begins_again_from_its_store() -> None:
    """Its learners push by their schedule, and send no push again that was accepted."""
    job = Job(learners=2, mode=DeterministicMode(2))
    (restart,) = of(job.do(ev.ShardLost(1)), ev.RestartFromStore)
    assert restart == ev.RestartFromStore("shard 1 is lost, which has 1 of 2 fragments", 0)


@pytest.mark.parametrize("shard", [0, 1, 7])
def test_a_shard_that_is_lost_before_version_0_is_waited_for(shard: int) -> None:
    desk = Desk(config(slots=1, shards=2, rules=replace(config().rules, overlap=4)))
    desk.join(1, 0)
    desk.do(ev.ShardLost(shard))
    desk.do(ev.InitialModelStored("L", (8, 8)))
    desk.report(1, 0)
    desk.report(1, 4)
    assert set(desk.core.open_rounds) == ({1} if shard == 0 else {0})
    desk.do(ev.ShardReady(shard, {}))
    desk.report(1, 8)
    assert 0 in desk.core.open_rounds
