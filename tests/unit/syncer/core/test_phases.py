"""When a phase is left: holds, drains, suspensions and scores at their bounds."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from core_desk import Desk, config, of, reason, report
from diloco_protocol.documents import Tokens, TrainingLoss
from diloco_protocol.vocabulary import JobPhase, PushRefusal, SlotState
from diloco_protocol.wire.records import Evaluation, Held
from diloco_syncer.core import events as ev
from diloco_syncer.core.books import slots
from diloco_syncer.core.books.slots import Absence, SlotTable
from diloco_syncer.core.core import Core
from shell_figures import SHELL


def join_of(region: str, ordinal: int = 0) -> ev.Join:
    return ev.Join(
        7, f"{region}{ordinal}", region, ordinal, evaluator=False, layout_digest="L", digests={}, sequences=0, held=()
    )


def test_a_hold_that_ended_has_its_end_in_the_report() -> None:
    desk = Desk(config(slots=2, quorum=2))
    desk.begin(2)
    desk.report(1, 1)  # the job's time begins
    desk.now = 5.0
    desk.do(ev.ProcessEnded("r", 1, "", "killed"))
    desk.now = 9.0
    desk.join(9, 1)
    assert desk.core.phase is JobPhase.TRAINING
    desk.now = 20.0
    assert desk.core.status(20.0, SHELL).hold_since_seconds is None
    (hold,) = desk.core.report(20.0, SHELL, "", 0).holds
    assert (hold.from_seconds, hold.to_seconds) == (5.0, 9.0)


def test_a_drain_that_comes_on_is_not_cut_short() -> None:
    desk = Desk(config(slots=2, stop=("steps", 4), drain_seconds=30.0, heartbeat_timeout=1e6))
    desk.begin(2)
    desk.report(1, 4)
    assert desk.core.phase is JobPhase.DRAINING
    desk.later(25.0)
    assert reason(desk.push(0, 4, round=0)) is None
    desk.later(25.0)
    assert desk.core.phase is JobPhase.DRAINING
    desk.do(ev.Drained(1))
    desk.later(29.0)
    assert desk.core.phase is JobPhase.DRAINING
    (merge,) = of(desk.later(1.0), ev.Merge)
    desk.do(ev.MergeDurable(0, merge.version, 0.1, (1.0,)))
    assert desk.core.phase is JobPhase.COMPLETE


def test_a_stop_that_is_reached_without_any_merge_is_no_complete_job() -> None:
    """The model would be the one that the job began with, under the name of a trained one."""
    desk = Desk(config(slots=2, quorum=2, stop=("steps", 4), evaluated=True, heartbeat_timeout=1e6))
    desk.begin(2)
    desk.report(1, 4)
    desk.push(0, 4, round=0)
    desk.do(ev.Drained(1))
    desk.do(ev.ProcessEnded("r", 1, "", "exit code 5"))
    core = desk.core
    assert core.phase is JobPhase.FAILED, "and no evaluator is waited for"
    message = core.status(desk.now, SHELL).message
    assert message.startswith("the stop is reached, and nothing was merged: fewer than 2 learners had work to offer")
    assert core.report(desk.now, SHELL, "", 0).outcome == "failed"


def test_with_a_quorum_of_one_no_learner_had_work() -> None:
    desk = Desk(config(slots=1, stop=("steps", 4), heartbeat_timeout=1e6))
    desk.begin(1)
    desk.report(1, 4)
    desk.do(ev.ProcessEnded("r", 0, "", "exit code 5"))
    assert desk.core.phase is JobPhase.FAILED
    message = desk.core.status(desk.now, SHELL).message
    assert "nothing was merged: no learner had work" in message
    assert message.endswith("; started again on its store, the job goes on")


def test_a_job_that_once_merged_is_complete_though_its_last_learners_end() -> None:
    desk = Desk(config(slots=1, stop=("steps", 8), heartbeat_timeout=1e6))
    desk.begin(1)
    desk.report(1, 4)
    (merge,) = of(desk.push(0, 4, round=0), ev.Merge)
    desk.do(ev.MergeDurable(0, merge.version, 0.1, (1.0,)))
    desk.report(1, 8)
    desk.do(ev.ProcessEnded("r", 0, "", "exit code 5"))
    assert desk.core.phase is JobPhase.COMPLETE


def test_a_job_without_version_0_is_suspended_at_once() -> None:
    desk = Desk(config())
    desk.join(1, 0)
    desk.do(ev.EndRequested(JobPhase.SUSPENDED, "interrupted"))
    assert desk.core.phase is JobPhase.SUSPENDED


def test_a_score_that_comes_on_for_ever_is_waited_for_so_long_and_no_longer() -> None:
    desk = Desk(config(slots=1, stop=("tokens", 40), evaluated=True, most_evaluation_seconds=1000.0))
    desk.begin(1)
    desk.do(ev.Join(8, "e", "r", 0, evaluator=True, layout_digest="L", digests={}, sequences=0, held=()))
    desk.report(1, 4)
    desk.push(0, 4, round=0)
    (merge,) = of(desk.do(ev.Drained(1)), ev.Merge)
    desk.do(ev.MergeDurable(0, merge.version, 0.1, (1.0,)))
    for percent in range(10):
        assert desk.core.phase is JobPhase.EVALUATING
        desk.later(100.0)
        desk.do(ev.EvaluationAdvanced(8, percent / 100))
    assert desk.core.phase is JobPhase.COMPLETE and desk.now == 1000.0


@pytest.mark.promise(
    "An offer that arrives during the last merges is refused, and its learner reports what was not merged"
)
def test_an_offer_that_comes_after_the_last_merges_is_refused() -> None:
    """It would be acknowledged, and never merged: its learner says what was not taken over. An offer that was taken
    before is said to be so: who believes that it was not ends when it hears of its merge."""
    desk = Desk(config(stop=("steps", 4), evaluated=True, drain_seconds=5.0))
    desk.begin(2)
    desk.report(2, 3)
    desk.report(1, 4)
    assert reason(desk.push(0, 4, round=0)) is None
    assert reason(desk.push(1, 3, round=0)) is None
    desk.do(ev.ConnectionLost(2))
    desk.do(ev.Drained(1))
    (merge,) = of(desk.later(11.0), ev.Merge)
    assert merge.version == 1
    desk.do(ev.MergeDurable(0, 1, 0.1, (1.0, 1.0)))
    assert desk.core.phase is JobPhase.EVALUATING
    desk.join(3, 1, "p2", previous_incarnation=2)
    assert reason(desk.push(1, 3, round=0)) is PushRefusal.REPEATED
    desk.report(3, 5)
    assert reason(desk.push(1, 5, round=0, sequence=2)) is PushRefusal.ENDED
    desk.do(ev.Drained(3))
    assert desk.core.ledger is not None
    assert desk.core.ledger.totals() == Tokens(trained=90, merged=70, pending=0, dropped=20)


def test_only_the_score_of_the_end_is_final_and_only_version_0s_is_the_first() -> None:
    desk = Desk(config(evaluated=True))
    desk.begin(1)
    desk.do(ev.Join(8, "e", "r", 0, evaluator=True, layout_digest="L", digests={}, sequences=0, held=()))
    desk.report(1, 4)
    desk.push(0, 4)
    desk.do(ev.MergeDurable(0, 1, 0.1, (1.0,)))
    desk.do(ev.Evaluated(8, Evaluation(40, 2.5, 1, True)))
    told = desk.core.report(0.0, SHELL, "", 0)
    assert (told.initial_loss, told.final_loss) == (None, None)
    desk.do(ev.Evaluated(8, Evaluation(0, 5.5, 0, True)))
    told = desk.core.report(0.0, SHELL, "", 0)
    assert (told.initial_loss, told.final_loss) == (5.5, None)


def test_the_report_has_the_learners_training_loss_until_the_model_is_scored() -> None:
    desk = Desk(config(evaluated=True))

    def training_loss() -> TrainingLoss | None:
        return desk.core.report(0.0, SHELL, "", 0).training_loss

    desk.begin(2)
    assert training_loss() is None
    desk.do(ev.Reported(1, replace(report(1), loss=6.0)))
    assert training_loss() == TrainingLoss(first=6.0, last=6.0)
    desk.do(ev.Reported(1, replace(report(4), loss=3.0)))
    desk.do(ev.Reported(2, replace(report(1), loss=math.nan)))  # it has none yet
    desk.do(ev.Reported(2, replace(report(2), loss=4.0)))
    desk.do(ev.Reported(2, replace(report(3), loss=2.0)))
    assert training_loss() == TrainingLoss(first=5.0, last=2.5)
    saved = json.loads(json.dumps(desk.core.state(desk.now)))
    restarted = Core(config(evaluated=True), saved, 2, 0.0)
    assert [slot.first_loss for slot in restarted.slots[:2]] == [6.0, 4.0]
    desk.do(ev.Join(8, "e", "r", 0, evaluator=True, layout_digest="L", digests={}, sequences=0, held=()))
    desk.do(ev.Evaluated(8, Evaluation(0, 5.5, 0, True)))
    assert training_loss() is None


def test_the_report_names_each_slots_learner_also_where_it_never_came() -> None:
    desk = Desk(config(slots=3, quorum=2))
    desk.begin(2)
    rows = desk.core.report(0.0, SHELL, "", 0).learners or []
    assert [row.learner for row in rows] == ["r-0", "r-1", "r-2"] and rows[2].incarnations == 0


def test_after_a_restart_learners_come_back_before_the_job_goes_on() -> None:
    desk = Desk(config())
    desk.begin(2)
    assert desk.core.phase is JobPhase.TRAINING
    again = Desk(config(), desk.core.state(0.0), 2)
    assert again.core.phase is JobPhase.WAITING
    assert again.core.phase_message == "continued: the learners have to join again"
    assert [slot.state for slot in again.core.slots] == [SlotState.SUSPECT] * 2
    again.join(1, 0, process="p1", previous_incarnation=1)
    again.do(ev.Reported(1, report(0)))
    assert again.core.phase is JobPhase.TRAINING
    again.now = 9.0
    again.do(ev.Reported(1, report(0)))
    again.later(1.5)
    assert [slot.state for slot in again.core.slots] == [SlotState.ACTIVE, SlotState.LOST]


# ------------------------------------------------------------------ regions and places


def test_a_region_of_which_somebody_stands_by_is_not_lost() -> None:
    table = SlotTable([("r", 0), ("far", 0)])
    table.give_slot(table.slots[1], join_of("far"), 0.0)
    table.slots[1].state = SlotState.LOST
    table.standby[7] = join_of("far")
    for now in (0.0, 100.0):
        table.update_lost_regions(now, 60.0)
        assert table.lost_regions == []
    table.standby.clear()
    for now, lost in ((100.0, []), (159.0, []), (160.0, ["far"])):
        table.update_lost_regions(now, 60.0)
        assert table.lost_regions == lost


def test_an_absence_begins_when_the_region_was_last_there_and_so_many_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slots, "ABSENCES", 2)
    table = SlotTable([("far", 0)])
    table.absences = [Absence("a", 1.0, 2.0), Absence("b", 3.0, 4.0)]
    table.lost_regions, table.silent_since = ["far"], {"far": 40.0}
    assert table.record_absences(100.0, 90.0) == (["far"], [])
    assert table.absences == [Absence("b", 3.0, 4.0), Absence("far", 30.0, None)]
    table.absences, table.silent_since = [], {"far": -math.inf}
    table.record_absences(100.0, 90.0)
    assert table.absences == [Absence("far", 90.0, None)], "since an earlier life, which has said so"


def test_of_two_slots_that_a_place_has_had_it_keeps_the_newest() -> None:
    table = SlotTable([("r", 0), ("r", 1)])
    for index in (1, 0, 1):
        table.give_slot(table.slots[index], join_of("r"), 0.0)
    for slot in table.slots:
        slot.state = SlotState.LOST
    again = SlotTable([("r", 0), ("r", 1)])
    again.load(table.to_json(), 0.0)
    assert again.nominal[("r", 0)].index == 1


@pytest.mark.promise("Once a job's last merges begin, no version is restored from a learner in their place")
def test_no_version_is_taken_back_once_the_last_merges_begin() -> None:
    """Else the version that a merge is making could come from a learner, too."""
    settings = config(slots=1, stop=("tokens", 40))
    desk = Desk(settings)
    desk.begin(1)
    desk.report(1, 4)
    offer = desk.header(0, 4, round=0)
    assert reason(desk.push(0, 4, round=0)) is None
    desk.do(ev.Drained(1))
    saved = json.loads(json.dumps(desk.core.state(0.0)))
    core = Core(settings, saved, 2, 0.0)
    core.close_superseded_tenures([offer], [])
    assert core.restore_offer(offer, 1, 1.0)
    actions = core.start(0.0, [1])
    assert core.phase is JobPhase.DRAINING
    (merge,) = of(actions, ev.Merge)
    first_persist = next(i for i, action in enumerate(actions) if isinstance(action, ev.Persist))
    assert first_persist < actions.index(merge) and core.newest_settled_epoch == 2
    held = (Held(1, merge.version, 1),)  # it had been made before, and the store has lost it
    actions = core.handle(
        ev.Join(
            5,
            "p1",
            "r",
            0,
            evaluator=False,
            layout_digest="L",
            digests={},
            sequences=0,
            held=held,
            previous_incarnation=1,
        ),
        1.0,
    )
    assert not of(actions + core.handle(ev.Tick(), 2.0), ev.RequestVersion)
    core.handle(ev.MergeDurable(0, merge.version, 0.1, (1.0,)), 3.0)
    assert core.phase is JobPhase.COMPLETE


@pytest.mark.promise(
    "A drain waits for an offer whose bytes arrive, however slow its link is, on both sides and within a bound"
)
def test_bytes_of_an_offer_that_comes_on_prolong_a_drain_though_not_for_ever() -> None:
    """A large fragment over a slow link takes longer than the patience between two offers."""
    desk = Desk(config(slots=1, stop=("steps", 4), drain_seconds=30.0, heartbeat_timeout=1e6))
    desk.begin(1)
    desk.report(1, 4)
    assert desk.core.phase is JobPhase.DRAINING
    waited = 0.0
    while desk.core.slots[0].occupied:
        desk.later(20.0)
        waited += 20.0
        assert waited < 2 * desk.core.config.most_drain_seconds
        desk.do(ev.PushAdvanced())
    assert waited >= desk.core.config.most_drain_seconds


@pytest.mark.promise("Offers that are refused do not hold up a job's end", section="Syncer")
def test_refused_offers_do_not_hold_up_the_end() -> None:
    desk = Desk(config(slots=1, stop=("steps", 4), drain_seconds=30.0, heartbeat_timeout=1e6))
    desk.begin(1)
    desk.report(1, 4)
    assert desk.core.phase is JobPhase.DRAINING
    for number in (1, 2):
        assert desk.core.slots[0].occupied
        offer = replace(desk.header(0, 4), round=0, sequence=number)
        (answer,) = of(desk.do(ev.PushReceived(offer, 1.0, False, number)), ev.AnswerPush)
        assert answer.reason is PushRefusal.NOT_FINITE
        desk.later(20.0)
    assert not desk.core.slots[0].occupied, "30 s after the drain began"
