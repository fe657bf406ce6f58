"""Bounds of the plan's waits, counts and messages, and the order of what it does."""

from __future__ import annotations

import dataclasses

import pytest

from diloco_operator import names
from diloco_operator.job import place_job, read_job
from diloco_operator.model import Backoff, Delete, Ref
from diloco_operator.plan import planning
from diloco_operator.plan.conditions.condition_set import ConditionSet
from diloco_operator.plan.conditions.decide import HANDOVER_SECONDS
from diloco_operator.plan.pods import node_loss, replacement
from diloco_operator.plan.view import View
from operator_world import World, started, template


def says_for_ever(world: World, phase: str) -> None:
    """Its syncer answers, and never comes to what it is told."""
    document = world.document
    world.document = lambda: document().model_copy(update={"phase": phase})  # type: ignore[method-assign]


def view_of(world: World) -> View:
    job = read_job(world.job)
    return View(world.observed(), world.memory, world.settings, job, here=place_job(job.spec, None))


def test_a_failed_jobs_learners_go_though_its_syncer_never_says_that_it_has_failed() -> None:
    world = started(2, sync={"quorum": 2}, failurePolicy={"maxReplacements": 0})
    says_for_ever(world, "training")
    world.crashing = {"job-local-1": 1}
    world.until(lambda w: w.truth("Failed") == "True", 100)
    world.run(20)
    assert len(world.of("learner")) == 2
    world.run(25)
    assert not world.of("learner")


def test_a_suspension_whose_syncer_never_says_that_it_is_done_ends() -> None:
    world = started(suspendPolicy="Anyway")
    says_for_ever(world, "draining")
    world.edit(suspend=True)
    world.run(280)
    assert len(world.of("learner")) == 3
    world.run(40)
    assert not world.of("learner") and not world.of("syncer")


def test_messages_of_conditions_are_cut_and_what_was_not_decided_is_kept() -> None:
    before = {"type": "QuorumMet", "status": "True", "reason": "Met", "message": "", "lastTransitionTime": "x"}
    conditions = ConditionSet([before], 1, 0.0)
    conditions.set("Ready", False, "InvalidSpec", "m" * 5000)
    conditions.keep_undecided()
    rows = {row["type"]: row for row in conditions.rows()}
    assert len(rows["Ready"]["message"]) == 4000 and rows["QuorumMet"]["status"] == "True"


class Counting(World):
    """Notes how often a pod had ended when it was deleted."""

    def _delete(self, delete: Delete) -> None:
        pod = self.pods.get(delete.uid)
        if pod is not None:
            self.ends = [*getattr(self, "ends", []), pod.container["restartCount"]]
        super()._delete(delete)


def test_a_pod_is_replaced_after_three_ends_of_its_program_and_not_at_once() -> None:
    world = started(failurePolicy={"maxReplacements": 1000})
    world.__class__ = Counting
    began = world.now
    world.crashing = {"job-local-1": 1}
    world.until(lambda w: bool(w.taken), 200)
    assert world.ends[0] == 3  # type: ignore[attr-defined]
    assert world.taken[0][0] - began >= replacement.FIRST_BACKOFF


def test_a_pod_whose_backoff_is_over_is_replaced_when_its_program_has_ended_for_the_third_time() -> None:
    world = started(failurePolicy={"maxReplacements": 1000})
    world.__class__ = Counting
    world.memory.backoffs["job-local-1"] = Backoff()
    world.crashing = {"job-local-1": 1}
    world.until(lambda w: bool(w.taken), 200)
    assert world.ends[0] == replacement.CRASHES - 1, "restarts"  # type: ignore[attr-defined]


def test_backoffs_of_a_place_grow_to_five_minutes_and_no_further() -> None:
    world = started()
    view = view_of(world)
    pod, gaps, last = view.learners["job-local-1"], [], world.now
    while len(gaps) < 8:
        world.now += 1.0
        if replacement._pass_backoff(view_of(world), pod.name, pod):
            gaps.append(world.now - last)
            last = world.now
    assert gaps == sorted(gaps) and gaps[-1] <= 1.1 * replacement.LAST_BACKOFF + 1
    assert gaps[-1] >= 0.9 * replacement.LAST_BACKOFF


def test_a_rollout_goes_from_the_last_ordinal_down() -> None:
    world = started()
    world.edit(learners=template("other:1"))
    world.until(lambda w: len(w.taken) == 3)
    assert [name for _, name in world.taken] == ["job-local-2", "job-local-1", "job-local-0"]


def test_a_rollout_takes_nobody_while_another_of_the_region_is_on_its_way_out() -> None:
    world = started()
    pod = world.named("job-local-0")
    assert pod is not None
    world.delete_pod("job-local-0")
    pod.obj["drained_at"] = world.now + 20
    world.edit(learners=template("other:1"))
    world.run(18)
    assert not world.taken
    world.until(lambda w: len(w.taken) == 2)


def test_a_rollout_counts_nobody_who_has_gone_since_the_syncer_answered() -> None:
    regions = [{"name": "a", "learners": 2}, {"name": "b", "learners": 2}]
    world = started(regions=regions, sync={"quorum": 3})
    world.unschedulable = {"job-a-0"}
    world.edit(learners=template("other:1"))
    world.delete_pod("job-a-0", force=True)
    world.run(30)  # the world holds every deletion against the quorum
    assert {name for _, name in world.taken} <= {"job-a-0"}, "it has joined no more"
    world.unschedulable = set()
    world.until(lambda w: w.told("RolledOut") == 2, 200)


def test_a_pod_that_is_deleted_for_two_reasons_is_deleted_once_and_by_force() -> None:
    ref = Ref("Pod", "p")
    twice = [Delete(ref, "u", "its template has changed"), Delete(ref, "u", "its node is lost", force=True)]
    assert planning._merge_deletes(twice) == [twice[1]]


def test_a_claim_that_is_not_known_counts_as_one_that_only_one_node_may_write() -> None:
    world = started()
    view = view_of(world)
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": "somebodys"}}
    pod = dataclasses.replace(view.learners["job-local-0"], spec={"volumes": [volume]})
    assert node_loss._own_volume(view, pod) == "somebodys"


def test_an_answer_from_before_the_last_failure_fails_no_job() -> None:
    """The syncer is asked every ten seconds, and may have merged since it was asked last."""
    world = started(failurePolicy={"maxReplacements": 0})
    world.run(30)
    world.crashing = {"job-local-1": 1}
    world.until(lambda w: w.told("LearnerCrashed") == 1, 60)
    world.crashing = {}
    world.run(60)
    assert world.truth("Failed") == "False" and world.status["replacements"]["sinceMerge"] == 0


@pytest.mark.promise(
    "A syncer's answer counts as of the time of the question: a failure that was counted meanwhile ends "
    "no job that has merged"
)
def test_a_failure_during_a_call_that_is_not_answered_fails_no_job() -> None:
    """The syncer has merged since it was asked last, and the next answer tells of that."""
    world = started(failurePolicy={"maxReplacements": 0})
    world.run(30)
    world.crashing = {"job-local-1": 1}
    world.syncer_silent, world.asked_at = True, -1e9
    world.until(lambda w: w.told("LearnerCrashed") == 1, 60)
    world.crashing = {}
    world.run(2)
    world.syncer_silent = False
    world.run(60)
    assert world.truth("Failed") == "False" and world.status["replacements"]["sinceMerge"] == 0


def test_a_failure_beside_a_syncer_that_answers_no_more_fails_the_job() -> None:
    world = started(failurePolicy={"maxReplacements": 0})
    world.syncer_silent = True
    world.crashing = {"job-local-1": 1}
    world.until(lambda w: w.truth("Failed") == "True", 60)


def test_a_volume_that_another_pod_holds_for_long_is_told() -> None:
    world = started()
    old = world.of("syncer")[0]
    world.delete_pod(old.name)
    old.obj["drained_at"] = world.now + 60
    world.run(10)
    assert world.condition("SyncerReady")["reason"] == "Starting"
    world.run(HANDOVER_SECONDS)
    told = world.condition("SyncerReady")
    assert told["reason"] == "VolumeUnavailable" and "ReadWriteOncePod" in told["message"]
    world.run(45)
    world.until(World.whole)


@pytest.mark.promise("A deleted job's volume stays if the job's spec names another volume")
@pytest.mark.parametrize("storage", [{"claimName": "mine"}, {"uri": "s3://bucket/job"}], ids=str)
def test_a_volume_that_the_job_does_not_name_stays(storage: dict[str, str]) -> None:
    """An earlier job of that name had it, and it carries this one's labels."""
    world = started()
    world.edit(syncer={"storage": {"onDelete": "Delete", **storage}})
    world.delete_job()
    world.run(60)
    assert world.gone and names.claim("job") in world.objects
