"""The core's decisions, one situation each; the simulation has their combinations."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from core_desk import Desk, config, of, reason, report
from diloco_protocol.documents import Tokens
from diloco_protocol.vocabulary import EventKind, JobPhase, PushRefusal
from diloco_protocol.wire.records import DataSample, Evaluation
from diloco_syncer.core import events as ev
from diloco_syncer.core.books import recent_refusals
from diloco_syncer.core.books.deterministic import DeterministicMode
from diloco_syncer.core.books.rounds import RoundRules
from diloco_syncer.core.core import Core
from ledger_balance import imbalances
from shell_figures import SHELL


@pytest.mark.promise("A loss that is not finite is shown as none, and the slot as diverged")
def test_a_loss_that_is_not_finite_is_shown_as_none_and_diverged() -> None:
    """NaN alone says that the process has no loss yet; it does not replace the slot's last one."""
    desk = Desk(config())
    desk.begin(1)
    rows = []
    for step, loss, diverged in ((1, 2.5, False), (2, math.nan, False), (3, math.nan, True), (4, 1.5, False)):
        desk.do(ev.Reported(1, replace(report(step), loss=loss, diverged=diverged)))
        row = desk.core.status(0.0, SHELL).slots[0]
        rows.append((row.loss, row.diverged))
    assert rows == [(2.5, False), (2.5, False), (None, True), (1.5, False)]


def test_the_jobs_loss_is_that_of_active_learners_and_stays_when_all_have_left() -> None:
    desk = Desk(config())
    desk.begin(2)
    for connection, loss in ((1, 2.0), (2, 3.0)):
        desk.do(ev.Reported(connection, replace(report(4), loss=loss)))
    shown = [desk.core.status(0.0, SHELL).loss]
    for connection in (1, 2):
        desk.do(ev.DrainRequested(connection))
        shown.append(desk.core.status(0.0, SHELL).loss)
    assert shown == [2.5, 3.0, 2.5]


# ------------------------------------------------------------------ a round


def test_one_round_from_pull_to_announcement() -> None:
    desk = Desk(config())
    desk.begin(2)
    assert desk.core.phase is JobPhase.TRAINING
    assert not of(desk.report(1, 3), ev.Pull)
    pulls = of(desk.report(1, 4), ev.Pull)
    assert [(p.connection, p.fragment, p.version) for p in pulls] == [(1, 0, 0), (2, 0, 0)]
    assert reason(desk.push(0, 4)) is None
    (merge,) = of(desk.push(1, 2), ev.Merge)
    assert [r.header.slot for r in merge.responders] == [0, 1]
    assert [r.weight for r in merge.responders] == pytest.approx([2 / 3, 1 / 3])
    (announced,) = of(desk.do(ev.MergeDurable(0, 1, 0.1, (1.0, 1.0))), ev.Announce)
    assert announced.merged == {1: ev.MergedPush(1, 1), 2: ev.MergedPush(1, 1)}
    assert desk.core.versions == [1]


@pytest.mark.promise("What a learner brings too late for a merge is in the next merge of its fragment")
def test_grace_ends_and_the_late_push_is_merged_in_the_next_round() -> None:
    desk = Desk(config())
    desk.begin(2)
    desk.report(1, 4)
    late = desk.header(1, 3)
    assert not of(desk.push(0, 4), ev.Merge)
    assert desk.core.wake_at <= 5.0
    assert of(desk.later(5.0), ev.Merge)
    assert reason(desk.do(ev.PushReceived(late, 1.0, True, 7))) is None
    desk.report(2, 3)
    assert desk.core.ledger and desk.core.ledger.pending(1, 0) == 30
    desk.do(ev.MergeDurable(0, 1, 0.0, (1.0,)))
    opened = desk.report(1, 8, base=1, confirmed=40)
    assert not of(opened, ev.Merge), "who was asked has time to answer, though K slots have work in the round"
    told = report(8, 1, 40)
    again = dict(base_version=1, oldest_version=1, first_step=5, steps=4, tokens=40, sequence=2, report=told)
    (merge,) = of([*desk.push(0, 8, **again), *desk.later(5.0)], ev.Merge)
    assert [(r.header.slot, r.header.last_step) for r in merge.responders] == [(0, 8), (1, 3)]


@pytest.mark.promise(
    "The grace window is what the overlap leaves after quorum, merge, durability and broadcast, as measured (Eq. 3)"
)
def test_the_time_until_a_quorum_of_learners_has_a_version_is_measured() -> None:
    desk = Desk(config())
    desk.begin(2)
    desk.join(9, 0, evaluator=True)
    desk.report(1, 4)
    desk.push(0, 4)
    desk.later(5.0)
    desk.do(ev.MergeDurable(0, 1, 0.25, (1.0,)))
    rounds = desk.core._state.rounds
    assert rounds is not None
    desk.later(2.0)
    for nobody in (9, 77):  # an evaluator, and who is gone
        desk.do(ev.VersionSent(nobody, 0, 1))
    assert rounds.sync_seconds == 0.25
    desk.do(ev.VersionSent(2, 0, 1))
    assert rounds.sync_seconds == 2.25


def test_k_is_never_lowered() -> None:
    desk = Desk(config(slots=2, quorum=2))
    desk.begin(2)
    desk.report(1, 4)
    desk.report(2, 4)
    desk.push(0, 4)
    holding = desk.do(ev.ProcessEnded("r", 1, "", "killed"))
    assert desk.core.phase is JobPhase.HOLDING
    assert "1 of 2" in of(holding, ev.SetPhase)[0].message
    assert not of(desk.later(3600.0), ev.Merge)
    assert desk.core.status(desk.now, SHELL).hold_since_seconds is not None
    # A hold that a syncer's end left open is over when training goes on under the next one, or is the same one still.
    for back in (2, 1):
        again = Desk(config(slots=2, quorum=2), json.loads(json.dumps(desk.core.state(desk.now))), 2)
        for connection in range(1, back + 1):
            again.join(connection, connection - 1)
            again.report(connection, 4)
        again.later(2.0)
        (hold,) = again.core.report(again.now, SHELL, "", 0).holds
        assert (hold.to_seconds < again.core.status(again.now, SHELL).elapsed_seconds - 1) == (back == 2)


# ------------------------------------------------------------------ a whole region is lost

TWO_REGIONS = (("r", 0), ("r", 1), ("far", 0))


def two_regions(policy: str, state: dict | None = None, epoch: int = 1) -> Desk:
    return Desk(config(slots=3, places=TWO_REGIONS, on_region_lost=policy, region_lost_seconds=60.0), state, epoch)


def train_in_both(desk: Desk) -> None:
    desk.join(1, 0)
    desk.join(2, 1)
    desk.join(3, 0, region="far")
    desk.do(ev.InitialModelStored("L", (8,)))
    for connection in (1, 2, 3):
        desk.report(connection, 0)
    assert desk.core.phase is JobPhase.TRAINING
    for connection in (1, 2, 3):
        desk.report(connection, 1)  # the job's time begins


def stay(desk: Desk, seconds: float) -> None:
    """So long, with the region that is there heard all the time."""
    for _ in range(round(seconds / 5)):
        desk.later(5.0)
        for connection in (1, 2):
            desk.report(connection, 1)


def full_round(desk: Desk) -> list[ev.Action]:
    desk.report(1, 4)
    desk.report(2, 4)
    return desk.push(0, 4) + desk.push(1, 4)


@pytest.mark.parametrize("policy", ["Continue", "Hold", "Fail"])
def test_a_region_is_lost(policy: str) -> None:
    desk = two_regions(policy)
    train_in_both(desk)
    desk.do(ev.ProcessEnded("far", 0, "", "cut off"))
    stay(desk, 55)
    assert desk.core.phase is JobPhase.TRAINING, "not yet"
    stay(desk, 5)
    expected = {"Continue": JobPhase.TRAINING, "Hold": JobPhase.HOLDING, "Fail": JobPhase.FAILED}
    assert desk.core.phase is expected[policy]
    if policy != "Continue":
        assert "region far was heard for 60 s" in desk.core.phase_message
    if policy == "Fail":
        return
    told = [note.kind for note in of(desk.log, ev.RecordEvent)]
    assert told.count("region-lost") == 1 and "region-back" not in told
    assert desk.core.status(desk.now, SHELL).regions_lost == ["far"]
    assert bool(of(full_round(desk), ev.Merge)) == (policy == "Continue")
    if policy == "Hold":
        assert desk.core.status(desk.now, SHELL).hold_since_seconds is not None
    assert of(desk.join(4, 0, region="far"), ev.RecordEvent)
    assert [note.kind for note in of(desk.log, ev.RecordEvent)].count("region-back") == 1
    assert desk.core.status(desk.now, SHELL).regions_lost == []
    (row,) = desk.core.report(desk.now, SHELL, "", 0).regions_lost
    assert row.region == "far" and 60 <= row.to_seconds - row.from_seconds < 70
    if policy == "Hold":
        assert desk.core.phase is JobPhase.TRAINING
        assert of(desk.log, ev.Merge), "what waited is merged"


def test_a_hold_for_a_region_outlives_the_syncer() -> None:
    desk = two_regions("Hold")
    train_in_both(desk)
    desk.do(ev.ProcessEnded("far", 0, "", "cut off"))
    stay(desk, 60)
    assert desk.core.phase is JobPhase.HOLDING
    again = two_regions("Hold", json.loads(json.dumps(desk.core.state(desk.now))), 2)
    for connection in (1, 2):
        again.join(connection, connection - 1)
        again.report(connection, 0)
    assert again.core.phase is JobPhase.HOLDING
    again.join(3, 0, region="far")
    assert again.core.phase is JobPhase.TRAINING
    (row,) = again.core.report(again.now, SHELL, "", 0).regions_lost  # one, not another for each syncer
    assert row.region == "far" and row.to_seconds - row.from_seconds >= 60


def test_a_region_that_was_never_there_is_not_lost() -> None:
    desk = two_regions("Fail")
    desk.join(1, 0)
    desk.join(2, 1)
    desk.do(ev.InitialModelStored("L", (8,)))
    for connection in (1, 2):
        desk.report(connection, 0)
    stay(desk, 100)
    assert desk.core.phase is JobPhase.TRAINING


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"slot": 9}, PushRefusal.NO_SLOT),
        ({"incarnation": 99}, PushRefusal.FENCED),
        ({"layout_digest": "other"}, PushRefusal.OTHER_LAYOUT),
        ({"encoding": "int4"}, PushRefusal.WRONG_ENCODING),
        ({"epoch": 2}, PushRefusal.OTHER_EPOCH),
        ({"base_version": 5, "oldest_version": 5}, PushRefusal.FUTURE_BASE),
        ({"round": 77}, PushRefusal.OTHER_ROUND),
        ({"steps": 3}, PushRefusal.INCONSISTENT),
        ({"tokens": 10**9}, PushRefusal.INCONSISTENT),
        ({"oldest_version": 3}, PushRefusal.INCONSISTENT),
        ({"steps": 0, "first_step": 5, "last_step": 4, "tokens": 0}, PushRefusal.NO_STEPS),
        ({"tokens": 0}, PushRefusal.NO_TOKENS),
        ({"fragment": 3}, PushRefusal.INCONSISTENT),
        ({"compute_seconds": float("nan")}, PushRefusal.INCONSISTENT),
    ],
)
def test_a_wrong_header_is_refused_by_name(changes: dict[str, object], expected: PushRefusal) -> None:
    desk = Desk(config())
    desk.begin(2)
    desk.report(1, 4)
    refused = desk.core.check_push(desk.header(0, 4, **changes))
    assert refused is not None and refused[0] is expected
    assert desk.core.check_push(desk.header(0, 4)) is None


def test_not_finite_and_repeated() -> None:
    desk = Desk(config())
    desk.begin(2)
    desk.report(1, 4)
    assert reason(desk.push(0, 4, finite=False)) is PushRefusal.NOT_FINITE
    assert reason(desk.push(0, 4)) is None
    assert reason(desk.push(0, 4)) is PushRefusal.REPEATED


@pytest.mark.promise(
    "A durable offer is reported as accepted even if the store has lost its base: its steps are not merged twice"
)
def test_an_offer_that_waits_is_repeated_though_the_store_has_lost_its_base() -> None:
    """Any other answer means that it was not accepted: its steps would be offered again, and merged twice."""
    desk = Desk(config(slots=2, quorum=2))
    desk.begin(2)
    desk.report(1, 4)
    offer = desk.header(0, 4, round=0)
    saved = json.loads(json.dumps(desk.core.state(desk.now)))
    assert reason(desk.do(ev.PushReceived(offer, 1.0, True, 50))) is None  # and its answer is lost
    on_lost_base = replace(offer, base_version=3, oldest_version=3)
    again = Desk(config(slots=2, quorum=2), saved, 2)
    assert again.core.restore_offer(on_lost_base, 51, 1.0)
    verdict = again.core.check_push(on_lost_base)
    assert verdict is not None and verdict[0] is PushRefusal.REPEATED


def test_steps_merged_once_stay_merged() -> None:
    """A push from the old base after the merge that its learner has not heard of."""
    desk = Desk(config(slots=1))
    desk.begin(1)
    desk.report(1, 4)
    desk.push(0, 4)
    desk.do(ev.MergeDurable(0, 1, 0.1, (1.0,)))
    again = desk.header(0, 6, sequence=2, round=0)
    refused = desk.core.check_push(again)
    assert refused is not None and refused[0] is PushRefusal.ALREADY_MERGED


# ------------------------------------------------------------------ membership


def test_an_older_pod_does_not_take_its_place_back() -> None:
    desk = Desk(config())
    desk.do(ev.InitialModelStored("L", (8,)))
    desk.join(1, 0, "a1", pod="aa")
    desk.join(2, 1, "b1", pod="bb")
    desk.join(3, 0, "c1", pod="cc")  # the node of pod aa was given up; its successor
    again = [
        desk.join(4, 0, "a1", pod="aa", previous_incarnation=1),  # its process is alive
        desk.join(5, 0, "a2", pod="aa"),  # its container was started once more
    ]
    for actions in again:
        (refused,) = of(actions, ev.Refuse)
        assert (refused.reason, refused.fatal) == ("superseded", True)
    state = desk.core.state(0.0)
    assert desk.core.slots[0].holder.process == "c1"
    # The same after a restart of the syncer; a container of the newest pod is welcome.
    desk.core._state.members.load(state["job"]["members"], 0.0)
    (refused,) = of(desk.join(6, 0, "a3", pod="aa"), ev.Refuse)
    assert refused.reason == "superseded"
    assert not [r for r in of(desk.join(7, 0, "c2", pod="cc"), ev.Refuse) if r.connection == 7]
    assert desk.core.slots[0].holder.process == "c2"


def test_a_process_whose_place_went_to_a_newer_one_does_not_take_it_back() -> None:
    desk = Desk(config())
    desk.do(ev.InitialModelStored("L", (8,)))
    desk.join(1, 0, "a1")
    desk.join(2, 0, "a2")
    (refused,) = of(desk.join(3, 0, "a1", previous_incarnation=1), ev.Refuse)
    assert (refused.connection, refused.reason, refused.fatal) == (3, "superseded", True)
    desk.do(ev.ProcessEnded("r", 0, "a2", "killed"))
    assert not of(desk.join(4, 0, "a1", previous_incarnation=1), ev.Refuse), "nobody holds it now"


def test_a_newcomer_in_the_same_place_supersedes_at_once() -> None:
    desk = Desk(config())
    desk.begin(2)
    desk.report(2, 3)
    old = desk.header(1, 3)
    actions = desk.join(9, 1)
    (refused,) = of(actions, ev.Refuse)
    assert (refused.connection, refused.reason, refused.fatal) == (2, "superseded", True)
    (admitted,) = of(actions, ev.Admit)
    assert admitted.seat is not None and admitted.seat.slot == 1 and not admitted.seat.continuing
    assert admitted.seat.slot_step == 3
    fenced = desk.core.check_push(old)
    assert fenced is not None and fenced[0] is PushRefusal.FENCED
    assert desk.core.ledger and desk.core.ledger.dropped(1, 0) == {"died": 30}


def test_the_same_process_comes_back_with_its_work() -> None:
    desk = Desk(config())
    desk.begin(2)
    desk.report(2, 3)
    desk.do(ev.ConnectionLost(2))
    desk.later(11.0)
    assert desk.core.slots[1].state == "lost"
    (admitted,) = of(desk.join(9, 1, process="p2", previous_incarnation=2), ev.Admit)
    assert admitted.seat is not None and admitted.seat.continuing
    assert admitted.seat.incarnation == 3
    assert desk.core.ledger and desk.core.ledger.pending(1, 0) == 30


def test_who_came_back_has_a_first_step_and_a_first_merge_again() -> None:
    desk = Desk(config())

    def told(actions: list[ev.Action]) -> list[tuple[str, int]]:
        return [(n.kind, n.incarnation) for n in of(actions, ev.RecordEvent) if n.kind.startswith("first-")]

    desk.begin(1)
    assert told(desk.report(1, 4)) == [("first-step", 1)]
    desk.push(0, 4)
    assert told(desk.do(ev.MergeDurable(0, 1, 0.1, (1.0,)))) == [("first-merge", 1)]
    assert told(desk.report(1, 5, base=1, confirmed=40)) == []
    desk.do(ev.ConnectionLost(1))
    desk.later(11.0)
    desk.join(9, 0, process="p1", previous_incarnation=1)
    assert told(desk.report(9, 5, base=1, confirmed=40)) == []  # what was known is no step since
    assert told(desk.report(9, 8, base=1, confirmed=40)) == [("first-step", 2)]
    changes = {"base_version": 1, "first_step": 5, "steps": 4, "tokens": 40, "sequence": 2}
    assert reason(desk.push(0, 8, **changes, report=report(8, 1, 40))) is None
    assert told(desk.do(ev.MergeDurable(0, 2, 0.1, (1.0,)))) == [("first-merge", 2)]


def test_a_program_started_again_under_the_same_id_begins_a_new_tenure() -> None:
    desk = Desk(config())
    desk.begin(2)
    desk.report(2, 3)
    (admitted,) = of(desk.join(9, 1, process="p2"), ev.Admit)
    assert admitted.seat is not None and not admitted.seat.continuing
    assert desk.core.ledger and desk.core.ledger.dropped(1, 0) == {"died": 30}


def test_a_push_of_another_process_and_an_evaluation_of_a_learner_do_not_count() -> None:
    desk = Desk(config())
    desk.begin(2)
    desk.report(1, 4)
    refused = desk.core.check_push(desk.header(0, 4), process="p2")
    assert refused is not None and refused[0] is PushRefusal.FENCED
    assert desk.core.check_push(desk.header(0, 4), process="p1") is None
    desk.do(ev.Evaluated(1, Evaluation(100, 0.1, 0, False)))
    assert desk.core.report(0.0, SHELL, "", 0).eval_loss == []


def test_a_draining_core_does_not_ask_to_be_woken_in_the_past() -> None:
    desk = Desk(config(stop=("steps", 5)))
    desk.begin(2)
    desk.report(1, 4)
    desk.push(0, 4)
    desk.report(1, 5)
    assert desk.core.phase is JobPhase.DRAINING
    assert not of(desk.later(6.0), ev.Merge), "the other one may offer more until it has left"
    assert desk.core.wake_at > desk.now


def test_uptime_counts_what_learners_computed_unheard() -> None:
    desk = Desk(config(slots=1))
    desk.begin(1)
    desk.now = 100.0
    desk.report(1, 1)
    desk.now = 130.0
    desk.report(1, 2)
    assert desk.core.status(desk.now, SHELL).uptime == pytest.approx(2 / 30)
    desk.now = 160.0
    told = replace(report(3), compute_seconds=29.0)
    desk.do(ev.Reported(1, told))
    assert desk.core.status(desk.now, SHELL).uptime == pytest.approx((2 + 29) / 60)


def test_a_spare_takes_a_lost_slot_at_once_and_the_old_process_becomes_a_spare() -> None:
    desk = Desk(config())
    desk.begin(2)
    (waiting,) = of(desk.join(5, 2), ev.Admit)
    assert waiting.seat is None
    (promoted,) = of(desk.do(ev.ProcessEnded("r", 1, "p2", "killed")), ev.Promote)
    assert (promoted.connection, promoted.seat.slot) == (5, 1)
    (late,) = of(desk.join(6, 1, process="p2", previous_incarnation=2), ev.Admit)
    assert late.seat is None


@pytest.mark.parametrize(("timeout", "most"), [(0.4, 0.1), (60.0, 1.0)])
def test_a_silence_is_looked_for_four_times_in_the_timeout_and_each_second(timeout: float, most: float) -> None:
    desk = Desk(config(heartbeat_timeout=timeout))
    desk.begin(1)
    assert desk.core.wake_at - desk.now == pytest.approx(most)


def test_a_broken_stream_makes_suspect_and_silence_makes_lost() -> None:
    desk = Desk(config(heartbeat_timeout=10.0))
    desk.begin(2)
    desk.do(ev.ConnectionLost(2))
    assert desk.core.slots[1].state == "suspect"
    desk.later(9.0)
    assert desk.core.slots[1].state == "suspect"
    desk.report(1, 1)
    desk.later(2.0)
    assert [slot.state.value for slot in desk.core.slots] == ["active", "lost"]


def test_a_slot_first_taken_later_starts_at_the_greatest_step() -> None:
    desk = Desk(config())
    desk.begin(1)
    desk.now = 1.0
    desk.report(1, 3)
    desk.now = 2.0
    (admitted,) = of(desk.join(9, 1), ev.Admit)
    assert admitted.seat is not None and admitted.seat.slot_step == 3


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layout_digest": "M"}, "other-layout"),
        ({"digests": {"seed": "x"}}, "spec-drift"),
        ({"digests": {"seed": "x"}, "layout_digest": "M"}, "spec-drift"),  # whose fields say more
        ({"sequences": 11}, "other-data"),
        ({"data_samples": (DataSample(0, 1, "aa"), DataSample(9, 1, "cc"))}, "other-data"),
    ],
)
def test_a_learner_of_another_job_is_refused_and_told_why(changes: dict[str, object], expected: str) -> None:
    desk = Desk(config(digests={"seed": "y"}))
    samples = (DataSample(0, 1, "aa"), DataSample(9, 1, "bb"))
    desk.join(1, 0, sequences=10, data_samples=samples)
    desk.do(ev.InitialModelStored("L", (8,)))
    (refused,) = of(desk.join(2, 1, **{"sequences": 10, "data_samples": samples, **changes}), ev.Refuse)
    assert (refused.reason, refused.fatal) == (expected, True)


@pytest.mark.promise("A learner whose data have another content than the job's is refused, with the first place of it")
def test_learners_with_other_data_of_the_same_size_are_refused() -> None:
    desk = Desk(config(3))
    desk.join(1, 0, sequences=10)  # its data are not compared
    assert of(desk.join(2, 1, sequences=10, data_samples=(DataSample(0, 4, "aa"), DataSample(6, 4, "bb"))), ev.Admit)
    for samples, admitted in (
        ((DataSample(0, 4, "aa"), DataSample(6, 4, "cc")), False),
        ((DataSample(0, 4, "aa"), DataSample(6, 4, "bb")), True),
        ((DataSample(0, 1, "zz"),), True),  # of a place that nobody else has told
        ((), True),
    ):
        again = Desk(config(3), json.loads(json.dumps(desk.core.state(0.0))), epoch=2)
        for world in (desk, again):
            found = world.join(3, 2, sequences=10, data_samples=samples)
            assert bool(of(found, ev.Refuse)) is not admitted
            if not admitted:
                (refused,) = of(found, ev.Refuse)
                assert "items 6 to 9 are the first that differ" in refused.message


def test_the_status_names_whom_it_refused_until_somebody_of_that_place_is_let_in() -> None:
    desk = Desk(config(digests={"seed": "y", "training.model": "m"}))
    desk.join(1, 0)
    desk.do(ev.InitialModelStored("L", (8,)))
    assert desk.core.status(desk.now, SHELL).refusals == []
    desk.join(2, 1, digests={"seed": "x", "training.model": "other", "unknown": "z"})
    desk.now = 5.0
    (row,) = desk.core.status(desk.now, SHELL).refusals
    assert (row.role, row.ordinal, row.reason) == ("learner", 1, "spec-drift")
    assert row.fields == ["seed", "training.model"] and row.seconds_ago == 5.0
    assert "seed, training.model differ" in row.message
    desk.join(3, 1, digests={"seed": "x", "training.model": "m"})
    (row,) = desk.core.status(desk.now, SHELL).refusals
    assert row.fields == ["seed"] and row.seconds_ago == 0.0
    desk.join(4, 1)
    assert desk.core.status(desk.now, SHELL).refusals == []


def test_a_refusal_is_an_event_once_for_each_reason_of_a_place() -> None:
    desk = Desk(config(digests={"seed": "y"}))
    desk.join(1, 0)
    desk.do(ev.InitialModelStored("L", (8,)))

    def told(connection: int, **changes: object) -> list[EventKind]:
        notes = of(desk.join(connection, 1, **changes), ev.RecordEvent)
        return [note.kind for note in notes if note.kind == EventKind.REFUSED]

    assert told(2, digests={"seed": "x"}) == [EventKind.REFUSED]
    assert told(3, digests={"seed": "z"}) == [], "it comes again and again"
    assert told(4, layout_digest="M") == [EventKind.REFUSED], "for another reason"
    assert told(5) == []
    assert told(6, digests={"seed": "x"}) == [EventKind.REFUSED], "somebody of that place was let in meanwhile"


def test_so_many_refusals_are_remembered_and_no_more() -> None:
    desk = Desk(config(digests={"seed": "y"}))
    desk.join(1, 0)
    for ordinal in range(1, 200):
        desk.join(1 + ordinal, ordinal, digests={"seed": "x"})
    rows = desk.core.status(desk.now, SHELL).refusals
    assert [row.ordinal for row in rows] == list(range(200 - recent_refusals.MOST, 200))


def test_the_next_one_is_asked_when_the_initialiser_fails() -> None:
    desk = Desk(config())
    assert of(desk.join(1, 0), ev.Admit)[0].initialise
    assert not of(desk.join(2, 1), ev.Admit)[0].initialise
    assert of(desk.do(ev.ConnectionLost(1)), ev.RequestInitialModel) == [ev.RequestInitialModel(2)]


def test_a_spare_that_takes_the_initialisers_slot_is_asked_by_a_new_session() -> None:
    """A promotion asks nobody for version 0: without another session the job would wait for ever."""
    desk = Desk(config(slots=1))
    assert of(desk.join(1, 0), ev.Admit)[0].initialise
    assert of(desk.join(2, 1), ev.Admit)[0].seat is None
    done = desk.do(ev.ProcessEnded("r", 0, "p1", "killed"))
    assert of(done, ev.Promote) and of(done, ev.RequestInitialModel) == [ev.RequestInitialModel(2)]
    desk.do(ev.ConnectionLost(2))
    assert of(desk.join(3, 1, "p2", previous_incarnation=2), ev.Admit)[0].initialise


def test_whoever_failed_to_initialise_is_asked_after_the_others() -> None:
    desk = Desk(config(slots=3))
    for ordinal in range(3):
        desk.join(ordinal + 1, ordinal)
    asked = of(desk.do(ev.InitialModelFailed(1)), ev.RequestInitialModel)
    assert asked == [ev.RequestInitialModel(2)]
    # Its session ends, for only a Welcome can ask; that is no reason to ask the others meanwhile.
    assert of(desk.do(ev.ConnectionLost(2)), ev.RequestInitialModel) == []
    assert not of(desk.join(4, 0, "p1"), ev.Admit)[0].initialise, "it failed, and another one is expected"
    assert of(desk.join(5, 1, "p2", previous_incarnation=2), ev.Admit)[0].initialise
    # It fails too: now the third, who does not come back; then the first again.
    assert of(desk.do(ev.InitialModelFailed(5)), ev.RequestInitialModel) == [ev.RequestInitialModel(3)]
    desk.do(ev.ConnectionLost(3))
    desk.now += 9.0
    for connection in (4, 5):
        desk.do(ev.Reported(connection, report(0)))
    assert of(desk.later(1.5), ev.RequestInitialModel) == [ev.RequestInitialModel(4)]
    assert not of(desk.join(6, 2, "p3", previous_incarnation=3), ev.Admit)[0].initialise, (
        "it did not come when it was asked"
    )


def test_a_newcomer_initialises_rather_than_who_failed() -> None:
    desk = Desk(config())
    desk.join(1, 0)
    assert of(desk.do(ev.InitialModelFailed(1)), ev.RequestInitialModel) == [ev.RequestInitialModel(1)], "it is alone"
    assert of(desk.join(2, 1), ev.Admit)[0].initialise


# ------------------------------------------------------------------ the end


def test_stop_drains_merges_evaluates_and_completes() -> None:
    desk = Desk(config(slots=2, stop=("tokens", 100), evaluated=True))
    desk.begin(2)
    desk.do(ev.Join(8, "e", "r", 0, evaluator=True, layout_digest="L", digests={}, sequences=0, held=()))
    desk.report(1, 4)
    actions = desk.report(2, 6)
    assert desk.core.phase is JobPhase.DRAINING and of(actions, ev.SetPhase)
    for slot, last in ((0, 4), (1, 6)):
        assert reason(desk.push(slot, last, round=0)) is None
        actions = desk.do(ev.Drained(slot + 1))
    (merge,) = of(actions, ev.Merge)
    assert len(merge.responders) == 2
    desk.do(ev.MergeDurable(0, 1, 0.1, (1.0, 1.0)))
    assert desk.core.phase is JobPhase.EVALUATING
    desk.do(ev.Evaluated(8, Evaluation(100, 2.5, 1, True)))
    assert desk.core.phase is JobPhase.COMPLETE
    told = desk.core.report(desk.now, SHELL, "", 0)
    assert told.final_loss == 2.5
    assert told.tokens == Tokens(trained=100, merged=100, pending=0, dropped=0)

    saved = json.loads(json.dumps(desk.core.state(desk.now)))
    same = Desk(config(slots=2, stop=("tokens", 100), evaluated=True), saved, 2)
    assert same.core.phase is JobPhase.COMPLETE and same.core.report(0.0, SHELL, "", 0).final_loss == 2.5
    further = Desk(config(slots=2, stop=("tokens", 200), evaluated=True), saved, 2)
    assert further.core.phase is JobPhase.WAITING
    assert further.core.report(0.0, SHELL, "", 0).final_loss is None  # the next end is scored anew


def evaluating() -> Desk:
    """A job of one learner that waits for its final score; the evaluator has connection 8."""
    desk = Desk(config(slots=1, stop=("tokens", 40), evaluated=True))
    desk.begin(1)
    desk.do(ev.Join(8, "e", "r", 0, evaluator=True, layout_digest="L", digests={}, sequences=0, held=()))
    desk.report(1, 4)
    assert reason(desk.push(0, 4, round=0)) is None
    (merge,) = of(desk.do(ev.Drained(1)), ev.Merge)
    desk.do(ev.MergeDurable(0, merge.version, 0.1, (1.0,)))
    assert desk.core.phase is JobPhase.EVALUATING
    return desk


@pytest.mark.promise(
    "The job waits for the final score while it makes progress, however long that takes, and for an "
    "evaluator that is being replaced"
)
def test_the_final_score_is_waited_for_while_it_comes_on() -> None:
    desk = evaluating()
    patience = config().evaluation_seconds
    for percent in range(10, 100, 10):  # in all nine times as long as it waits without progress
        desk.later(0.9 * patience)
        (told,) = of(desk.do(ev.EvaluationAdvanced(8, percent / 100)), ev.SetPhase)
        assert told.message == f"the merged model is evaluated: {percent}% of the final score"
    desk.do(ev.EvaluationAdvanced(7, 1.0))  # nobody's
    desk.do(ev.EvaluationAdvanced(8, 0.9))  # no progress
    desk.later(0.9 * patience)
    assert desk.core.phase is JobPhase.EVALUATING
    desk.later(0.2 * patience)
    assert desk.core.phase is JobPhase.COMPLETE
    assert desk.core.report(desk.now, SHELL, "", 0).final_loss is None


@pytest.mark.promise(
    "The job waits for the final score while it makes progress, however long that takes, and for an "
    "evaluator that is being replaced"
)
def test_an_evaluator_that_scored_before_is_waited_for_when_it_is_away() -> None:
    for scored in (False, True):
        desk = evaluating()
        if scored:
            desk.do(ev.Evaluated(8, Evaluation(0, 5.5, 0, False)))
        desk.do(ev.ConnectionLost(8))
        desk.later(2 * config().evaluator_seconds)
        assert (desk.core.phase is JobPhase.EVALUATING) == scored


def test_one_row_per_version_that_was_scored() -> None:
    desk = Desk(config(slots=2, evaluated=True))
    desk.begin(1)
    desk.report(1, 8)
    assert desk.core._state.rounds is not None
    desk.core._state.rounds.versions[0] = 3
    evaluator = ev.Join(8, "e", "r", 0, evaluator=True, layout_digest="L", digests={}, sequences=0, held=())
    desk.do(evaluator)

    def score(desk: Desk, tokens: int, loss: float, merges: int) -> list[tuple[int, float | None]]:
        desk.do(ev.Evaluated(8, Evaluation(tokens, loss, merges, False)))
        return desk.core.report(0.0, SHELL, "", 0).eval_loss

    assert score(desk, 0, 5.5, 0) == [(0, 5.5)]
    assert score(desk, 0, 5.5, 0) == [(0, 5.5)]  # said again in the next session
    assert score(desk, 40, 4.0, 1) == [(0, 5.5), (40, 4.0)]
    assert score(desk, 0, 5.5, 0) == [(0, 5.5), (40, 4.0)]
    assert score(desk, 40, 3.5, 2) == [(0, 5.5), (40, 4.0), (40, 3.5)]  # merged, not trained meanwhile
    saved = json.loads(json.dumps(desk.core.state(0.0)))
    again = Desk(config(slots=2, evaluated=True), saved, 2)
    again.do(evaluator)
    assert score(again, 40, 3.5, 2) == [(0, 5.5), (40, 4.0), (40, 3.5)]
    assert score(again, 80, 3.0, 3)[2:] == [(40, 3.5), (80, 3.0)]


@pytest.mark.promise(
    "An evaluator's scores count after a restart, also those of tokens that only the previous syncer knew"
)
def test_a_score_of_tokens_that_only_the_syncer_before_knew_is_taken() -> None:
    """Learners that do not come back will never tell of them again."""
    desk = Desk(config(slots=2, evaluated=True))
    desk.begin(1)
    desk.report(1, 8)
    saved = json.loads(json.dumps(desk.core.state(0.0)))
    desk.report(1, 12)
    known = desk.core.trained_tokens
    again = Desk(config(slots=2, evaluated=True), saved, 2)
    again.do(ev.Join(8, "e", "r", 0, evaluator=True, layout_digest="L", digests={}, sequences=0, held=()))
    again.do(ev.Evaluated(8, Evaluation(known, 4.0, 0, False)))
    assert again.core.report(0.0, SHELL, "", 0).eval_loss == [(again.core.trained_tokens, 4.0)]
    assert 0 < again.core.trained_tokens < known


def test_suspend_keeps_offers_short_of_k_and_resume_merges_them() -> None:
    desk = Desk(config(slots=2, quorum=2))
    desk.begin(2)
    desk.report(1, 4)
    desk.do(ev.EndRequested(JobPhase.SUSPENDED, "interrupted"))
    for transfer in range(1, 3):
        for donor in range(1, 3):
            desk.do(ev.PeerStateFailed(donor, transfer))
    offer = desk.header(0, 4, round=0)
    assert reason(desk.do(ev.PushReceived(offer, 1.0, True, 50))) is None
    desk.do(ev.Drained(1))
    desk.do(ev.Drained(2))
    assert desk.core.phase is JobPhase.SUSPENDED
    assert desk.core.ledger and desk.core.ledger.pending(0, 0) == 40

    saved = json.loads(json.dumps(desk.core.state(desk.now)))
    core = Core(config(slots=2, quorum=2), saved, 2, 0.0)
    assert core.restore_offer(offer, 51, 1.0)
    core.start(0.0)
    assert core.phase is JobPhase.WAITING
    assert core.ledger and imbalances(core.ledger) == [] and core.ledger.pending(0, 0) == 40


@pytest.mark.parametrize("end", [JobPhase.DELETED, JobPhase.FAILED])
def test_a_job_that_is_applied_again_after_its_end_goes_on_from_its_store(end: JobPhase) -> None:
    desk = Desk(config(slots=1, stop=("steps", 100)))
    desk.begin(1)
    desk.report(1, 4)
    desk.do(ev.EndRequested(end, "x"))
    assert desk.core.phase is end
    core = Core(config(slots=1), json.loads(json.dumps(desk.core.state(desk.now))), 2, 0.0)
    core.start(0.0)
    assert core.phase is JobPhase.WAITING
    assert core.ledger and imbalances(core.ledger) == []


def test_what_does_not_drain_in_time_is_given_up() -> None:
    desk = Desk(config(slots=1, stop=("steps", 4), drain_seconds=30.0))
    desk.begin(1)
    desk.report(1, 4)
    desk.push(0, 4, round=0)
    assert desk.core.phase is JobPhase.DRAINING
    merges: list[ev.Merge] = []
    for _ in range(31):
        merges += of(desk.later(1.0), ev.Merge)
        desk.report(1, 4)
    desk.do(ev.MergeDurable(0, merges[0].version, 0.1, (1.0,)))
    assert desk.core.phase is JobPhase.COMPLETE


def test_a_crashed_syncers_downtime_counts_and_suspension_does_not() -> None:
    desk = Desk(config(slots=1))
    desk.begin(1)
    desk.report(1, 1)
    desk.now = 10.0
    running = desk.core.state(10.0, wall=1000.0)
    assert Core(config(slots=1), running, 2, 0.0, wall=1005.0)._state.clock.elapsed(0.0) == pytest.approx(15.0)
    desk.do(ev.EndRequested(JobPhase.FAILED, "x"))
    ended = desk.core.state(10.0, wall=1000.0)
    assert Core(config(slots=1), ended, 2, 0.0, wall=1005.0)._state.clock.elapsed(0.0) == pytest.approx(10.0)


def test_deterministic_slots_are_places_and_rounds_open_by_themselves() -> None:
    rules = RoundRules(every=4, overlap=1, quorum=2, grace_factor=0.9, grace_cap=5.0)
    desk = Desk(config(rules=rules, mode=DeterministicMode(2)))
    (second,) = of(desk.join(2, 1), ev.Admit)
    assert second.seat is not None and second.seat.slot == 1 and not second.initialise
    assert of(desk.join(1, 0), ev.Admit)[0].initialise
    desk.do(ev.InitialModelStored("L", (8,)))
    desk.report(1, 0)
    assert desk.core.phase is JobPhase.WAITING
    desk.report(2, 0)
    assert not of(desk.report(1, 4), ev.Pull)
    assert not of(desk.push(1, 4, round=1), ev.Merge)
    (merge,) = of(desk.push(0, 4, round=1), ev.Merge)
    assert [r.header.slot for r in merge.responders] == [0, 1]


# ------------------------------------------------------------------ a newcomer's optimizer state


def test_the_longest_tenure_gives_its_state_and_the_next_is_asked_on_failure() -> None:
    desk = Desk(config(slots=3))
    desk.begin(2)
    desk.report(1, 5)
    desk.report(2, 9)
    desk.join(3, 2)
    (ask,) = of(desk.do(ev.PeerStateRequested(3)), ev.RequestPeerState)
    assert ask.connection == 2
    (again,) = of(desk.do(ev.PeerStateFailed(2, ask.transfer)), ev.RequestPeerState)
    assert again.connection == 1
    assert of(desk.do(ev.PeerStateReceived(again.transfer)), ev.OfferPeerState) == [
        ev.OfferPeerState(3, again.transfer)
    ]


@pytest.mark.promise(
    "After the loss of all learners at once, the newest optimizer state on any disk is used, also by "
    "learners whose own disk has none"
)
def test_a_patient_newcomer_gets_the_state_of_one_that_makes_its_first_step_after_a_common_end() -> None:
    """All were lost; slot 1's learner found its state on its disk, slot 0's did not."""
    desk = Desk(config())
    desk.begin(2)
    impatient, patient = ev.PeerStateRequested(1), ev.PeerStateRequested(1, patient=True)
    assert of(desk.do(impatient), ev.OfferPeerState) == [ev.OfferPeerState(1, 0)]
    assert not of(desk.do(patient), ev.OfferPeerState)
    (ask,) = of(desk.report(2, 1), ev.RequestPeerState)
    assert ask.connection == 2
    # Nobody waits for one that waits itself, or for longer than for a transfer.
    assert of(desk.do(ev.PeerStateReceived(ask.transfer)), ev.OfferPeerState) == [ev.OfferPeerState(1, ask.transfer)]
    both = Desk(config())
    both.begin(2)
    both.do(patient)
    answers = of(both.do(ev.PeerStateRequested(2, patient=True)), ev.OfferPeerState)
    assert answers == [ev.OfferPeerState(1, 0), ev.OfferPeerState(2, 0)]
    late = Desk(config())
    late.begin(2)
    late.do(patient)
    answers = []
    while not answers and late.now < 10 * late.core.config.peer_seconds:
        late.report(1, 0)
        late.report(2, 0)  # it never makes its first step
        answers = of(late.later(1.0), ev.OfferPeerState)
    assert answers == [ev.OfferPeerState(1, 0)] and late.now >= late.core.config.peer_seconds


def test_without_a_healthy_peer_the_answer_is_none() -> None:
    desk = Desk(config())
    desk.begin(1)
    assert of(desk.do(ev.PeerStateRequested(1)), ev.OfferPeerState) == [ev.OfferPeerState(1, 0)]
