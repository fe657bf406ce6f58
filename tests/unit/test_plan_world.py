"""The plan against a small cluster (operator_world.py): every scenario converges, and is told."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from diloco_operator import names
from diloco_operator.plan import plan
from diloco_operator.types import Asked, Note, PlanSettings, Ref
from operator_world import SETTINGS, START, World, job_object


def started(count: int = 3, **spec: Any) -> World:
    world = World(job_object(count=count, **spec))
    world.until(World.whole, 120)
    return world


def template(image: str) -> dict[str, Any]:
    return {"podTemplate": {"spec": {"containers": [{"name": "learner", "image": image}]}}}


def idle(world: World) -> None:
    """Nothing changes any more: the same observation gives the same plan, and nothing to do."""
    world.run(30)
    world.turn()
    one, two = world.turn(), world.turn()
    assert one.apply == two.apply and one.status == two.status
    assert not two.calls and not two.deletes and not two.events and not two.urgent
    assert {Ref(m["kind"], m["metadata"]["name"]) for m in two.apply} <= set(world.objects)


# ------------------------------------------------------------------ start and steady state


def test_a_job_starts_and_then_nothing_is_done() -> None:
    world = started()
    assert [e.reason for _, e in world.events] == ["Started", "QuorumMet"]
    assert world.status["startTime"] and world.status["image"] == {
        "syncer": "diloco-syncer:1", "worker": "diloco-worker:1",
    }  # fmt: skip
    idle(world)
    assert world.plans[-1].wake_in == 20 and world.plans[-1].poll_syncer == 10
    before = len(world.plans)
    world.run(120)
    assert len(world.plans) - before <= 7
    assert len(world.events) == 2


def test_settings_and_claim_come_before_what_holds_pods() -> None:
    world = World(job_object())
    first = world.turn()
    assert {m["kind"] for m in first.apply} == {
        "ConfigMap", "NetworkPolicy", "Service", "PodDisruptionBudget", "PersistentVolumeClaim",
    }  # fmt: skip
    assert first.wake_in < 1 and first.finalizer and not world.status.get("startTime")
    assert world.status["phase"] == "Pending"
    second = world.turn()
    assert [m["kind"] for m in second.apply if "template" in m.get("spec", {})] == [
        "Deployment",
        "StatefulSet",
    ]
    assert world.status["startTime"]


def test_conditions_say_of_which_generation_they_are_and_since_when() -> None:
    world = started()

    def times() -> dict[str, str]:
        rows = world.status["conditions"]
        generation = world.job["metadata"]["generation"]
        assert {row["observedGeneration"] for row in rows} == {generation}, rows
        assert all(row["reason"] for row in rows)
        return {row["type"]: row["lastTransitionTime"] for row in rows}

    first = times()
    world.run(60)
    world.edit(failurePolicy={"maxReplacements": 77})
    world.until(World.whole)
    assert times() == first, "what holds has held since then"
    world.edit(suspend=True)
    world.until(lambda w: w.truth("Suspended") == "True", 60)
    then = times()
    changed = {kind for kind in then if then[kind] != first[kind]}
    assert changed == {"Ready", "QuorumMet", "SyncerReady", "Suspended"}
    assert all(then[kind] > first[kind] for kind in changed)


def test_a_spare_takes_over_and_the_successor_stands_by() -> None:
    world = started(2, regions=[{"name": "local", "learners": 2, "spares": 1}])
    assert world.region()["desired"] == 3 and world.status["learners"] == "2/2"
    world.delete_pod("job-local-0")
    world.run(40)
    assert world.whole() and world.told("LearnerReplaced") == 1
    idle(world)


def test_an_operator_that_starts_anew_changes_and_tells_nothing() -> None:
    world = started()
    world.run(20)
    from diloco_operator.types import Memory

    events, uids = len(world.events), set(world.pods)
    world.memory = Memory()
    world.settings = PlanSettings(None, "diloco-system", "diloco-syncer:2", "diloco-worker:2")
    # Its first look is before the syncer has been asked.
    world.asked, before = Asked(None, "this pod has not been asked yet"), world.status
    first = world.turn()
    assert first.status == before and not first.urgent and not first.events
    idle(world)
    assert len(world.events) == events and set(world.pods) == uids
    # Not even when the templates are rendered anew: the images are those that the job started with.
    world.edit(failurePolicy={"maxReplacements": 77})
    world.until(World.whole)
    idle(world)
    assert set(world.pods) == uids and world.status["image"]["worker"] == "diloco-worker:1"


def test_another_rendering_by_a_new_operator_waits_for_a_new_generation(monkeypatch: Any) -> None:
    from diloco_operator import pods

    world = started()
    uids = set(world.pods)
    monkeypatch.setattr(pods, "TOLERATION_SECONDS", 25)
    world.run(60)
    assert set(world.pods) == uids
    kept = world.objects[names.stateful_set("job", "local")]["spec"]["template"]["spec"]["tolerations"]
    assert kept[0]["tolerationSeconds"] == 20
    world.edit(failurePolicy={"maxReplacements": 77})
    world.until(lambda w: not uids & set(w.pods))
    world.until(World.whole)


# ------------------------------------------------------------------ suspend, resume, ends


def test_suspended_from_its_creation_nothing_is_started() -> None:
    world = World(job_object(suspend=True))
    world.run(60)
    assert not world.objects and not world.pods and not world.secrets
    assert world.status["phase"] == "Suspended" and world.truth("Suspended") == "True"
    assert "startTime" not in world.status and "image" not in world.status
    # A job that was never started uses the defaults of the operator that starts it.
    world.settings = PlanSettings(None, "diloco-system", "diloco-syncer:9", "diloco-worker:9")
    world.edit(suspend=False)
    world.until(World.whole)
    assert world.status["image"]["worker"] == "diloco-worker:9"
    assert world.truth("Suspended") == "False"
    assert [e.reason for _, e in world.events] == ["Suspended", "Started", "QuorumMet"]


def test_suspend_and_resume() -> None:
    world = started()
    world.edit(suspend=True)
    world.until(lambda w: w.truth("Suspended") == "True", 60)
    assert not world.pods and world.status["phase"] == "Suspended"
    assert world.syncer.phase == "suspended" and world.status["progress"]["tokens"] > 0
    idle(world)
    tokens = world.syncer.tokens
    world.edit(suspend=False)
    world.until(World.whole)
    assert world.syncer.epoch == 2 and world.syncer.tokens >= tokens
    reasons = [e.reason for _, e in world.events]
    assert reasons == ["Started", "QuorumMet", "Suspending", "Suspended", "Resumed", "QuorumMet"]
    assert not world.status.get("replacements")
    idle(world)


def test_pods_stay_until_the_syncer_says_that_all_is_saved() -> None:
    world = started()
    world.edit(suspend=True)
    world.run(1)
    assert world.syncer.phase == "draining" and len(world.pods) == 4
    assert not any(p.terminating for p in world.pods.values())
    assert world.status["phase"] == "Suspending"


@pytest.mark.parametrize("delay", [0.5, 1.5, 2.5, 3.5, 5.0, 8.0])
def test_a_suspension_that_is_taken_back(delay: float) -> None:
    world = started()
    world.edit(suspend=True)
    world.run(delay)
    world.edit(suspend=False)
    world.until(World.whole, 200)
    world.until(lambda w: w.syncer.phase == "training")
    idle(world)


def test_a_syncer_that_does_not_answer_cannot_hold_up_a_suspension() -> None:
    world = started()
    world.syncer_silent = True
    world.run(20)
    world.edit(suspend=True)
    world.run(50)
    assert len(world.pods) == 4, "patience first"
    world.until(lambda w: w.truth("Suspended") == "True", 60)


def test_suspension_with_a_changed_spec_restarts_nothing_before() -> None:
    world = started()
    epoch = world.syncer.epoch
    world.edit(suspend=True, sync={"quorum": 2, "every": 48}, learners=template("other:1"))
    world.until(lambda w: w.truth("Suspended") == "True", 100)
    assert world.syncer.epoch == epoch and world.told("RollingOut") == 0
    world.edit(suspend=False)
    world.until(World.whole)
    assert world.syncer.required == 2 and all(p.image == "other:1" for p in world.of("learner"))


def test_complete() -> None:
    world = started(training={"stop": {"tokens": 4000}, "evaluation": {"fraction": 0.1}})
    assert len(world.of("evaluator")) == 1
    world.until(lambda w: w.truth("Complete") == "True", 200)
    assert world.status["report"] == {"outcome": "complete", "goodput": 0.9,
                                      "tokens": {"trained": world.syncer.tokens}}  # fmt: skip
    assert world.status["phase"] == "Complete" and world.status["completionTime"]
    world.until(lambda w: not w.of("learner") and not w.of("evaluator"))
    idle(world)
    assert len(world.of("syncer")) == 1, "it serves status and export"
    assert world.told("Complete") == 1 and world.told("QuorumLost") == 0
    # An end is final: an edit restarts nothing, and a syncer that is lost comes back to the same end.
    uid = world.of("syncer")[0].uid
    world.edit(training={**world.job["spec"]["training"], "stop": {"tokens": 10**9}})
    world.run(30)
    assert world.of("syncer")[0].uid == uid and world.truth("Complete") == "True"
    world.delete_pod(world.of("syncer")[0].name)
    world.run(30)
    assert world.syncer.phase == "complete" and world.truth("Complete") == "True"
    # A suspension frees what is left.
    world.edit(suspend=True)
    world.run(20)
    assert not world.pods and world.status["phase"] == "Complete"


def test_an_end_does_not_wait_for_its_report_for_ever() -> None:
    world = started(training={"stop": {"tokens": 2000}})
    world.until(lambda w: w.syncer.phase == "draining")
    world.report = None
    ask, world._ask = world._ask, lambda: None  # type: ignore[method-assign]

    def without_report() -> None:
        ask()
        world.report = None

    world._ask = without_report  # type: ignore[method-assign]
    world.until(lambda w: w.syncer.phase == "complete")
    world.run(20)
    assert world.truth("Complete") == "False" and world.status["phase"] == "Finishing"
    world.until(lambda w: w.truth("Complete") == "True", 80)


def test_time_to_live() -> None:
    world = started(training={"stop": {"tokens": 2000}}, ttlSecondsAfterFinished=40)
    world.until(lambda w: w.truth("Complete") == "True", 100)
    ended = world.now
    world.until(lambda w: w.gone, 100)
    assert 39 <= world.now - ended <= 75


def test_the_syncer_says_that_the_job_has_failed() -> None:
    world = started()
    world.syncer.phase = "failed"
    world.until(lambda w: w.truth("Failed") == "True", 30)
    world.until(lambda w: not w.of("learner"))
    assert world.status["phase"] == "Failed" and world.condition("Failed")["reason"] == "SyncerFailed"
    assert world.status["report"]["outcome"] == "failed" and len(world.of("syncer")) == 1
    idle(world)


# ------------------------------------------------------------------ deletion


def test_a_job_that_has_ended_is_deleted_without_waiting() -> None:
    world = started(training={"stop": {"tokens": 3000}})
    world.until(lambda w: w.truth("Complete") == "True" and not w.of("learner"), 100)
    world.delete_job()
    world.until(lambda w: w.gone, 3)


def test_a_claim_that_is_on_its_way_out_is_not_mounted() -> None:
    world = World(job_object())
    world.turn()
    world.objects[names.claim("job")]["metadata"]["deletionTimestamp"] = "2023-11-14T22:13:21Z"
    world.run(10)
    assert not world.of("syncer")


@pytest.mark.parametrize("on_delete", ["Retain", "Delete"])
def test_deletion_tells_learners_first(on_delete: str) -> None:
    world = started(syncer={"storage": {"onDelete": on_delete}})
    world.delete_job()
    world.until(lambda w: w.gone, 30)
    assert world.syncer.phase == "deleted"
    assert (names.claim("job") in world.objects) == (on_delete == "Retain")
    assert world.told("Deleting") == 1


def test_deletion_waits_thirty_seconds_at_most() -> None:
    world = started()
    world.syncer_silent = True
    world.delete_job()
    began = world.now
    world.until(lambda w: w.gone, 60)
    assert 29 <= world.now - began <= 33


def test_deletion_without_a_syncer_does_not_wait() -> None:
    world = World(job_object())
    world.bad_images = {"diloco-syncer:1"}
    world.run(20)
    world.delete_job()
    began = world.now
    world.until(lambda w: w.gone, 30)
    assert world.now - began <= 3


def test_a_job_whose_spec_cannot_be_read_can_be_deleted() -> None:
    world = started(syncer={"storage": {"onDelete": "Delete"}})
    world.edit(regions=[{"name": "local", "learners": 0}])
    world.run(5)
    assert world.status["phase"] == "Invalid"
    world.delete_job()
    world.until(lambda w: w.gone, 60)
    assert names.claim("job") not in world.objects


# ------------------------------------------------------------------ scaling and regions


def test_scaling_up_and_down() -> None:
    world = started()
    first = {p.name: p.uid for p in world.of("learner")}
    world.edit(regions=[{"name": "local", "learners": 5}])
    world.until(World.whole)
    assert world.status["learners"] == "5/5"
    now = {p.name: p.uid for p in world.of("learner")}
    assert {n: now[n] for n in first} == first, "a learner restarted"
    epoch = world.syncer.epoch
    assert epoch == 2, "the syncer reads the regions when it starts"
    world.edit(regions=[{"name": "local", "learners": 2}])
    world.until(lambda w: len(w.of("learner")) < 5)
    assert world.syncer.epoch == epoch, "who leaves drains to a syncer that knows it"
    world.until(lambda w: w.syncer.epoch == epoch + 1)
    world.until(World.whole)
    assert world.status["learners"] == "2/2"
    assert {p.name: p.uid for p in world.of("learner")} == {n: first[n] for n in sorted(first)[:2]}
    assert world.told("Scaled") == 2 and world.told("LearnerLost") == 0
    assert not world.status.get("replacements")
    idle(world)


def test_a_region_comes_and_another_goes() -> None:
    world = started(2)
    world.edit(regions=[{"name": "local", "learners": 2}, {"name": "far", "learners": 1}])
    world.until(World.whole)
    assert world.status["learners"] == "3/3" and world.region("far")["state"] == "Running"
    world.edit(regions=[{"name": "far", "learners": 1}])
    world.run(1.5)
    gone = [p for p in world.of("learner") if p.region == "local"]
    assert gone and all(p.terminating for p in gone), "they drain, by the StatefulSet's own scaling"
    assert names.stateful_set("job", "local") in world.objects
    world.until(World.whole)
    world.run(5)
    left = {ref for ref in world.objects if ref.name == "job-local"}
    assert not left, "StatefulSet, Service and budget are gone when the learners are"
    assert world.status["learners"] == "1/1"
    idle(world)


def test_evaluation_is_switched_off() -> None:
    world = started(training={"evaluation": {"fraction": 0.1}})
    assert world.of("evaluator")
    world.edit(training={**world.job["spec"]["training"], "evaluation": None})
    world.until(lambda w: not w.of("evaluator") and names.evaluator_deployment("job") not in w.objects)
    world.until(World.whole)


# ------------------------------------------------------------------ rollout


def test_a_changed_image_rolls_out_one_by_one() -> None:
    world = started()
    first, epoch = {p.uid for p in world.of("learner")}, world.syncer.epoch
    world.edit(learners=template("other:1"))
    fewest = 3
    while any(p.image != "other:1" for p in world.of("learner")) or len(world.of("learner")) < 3:
        fewest = min(fewest, len([p for p in world.of("learner") if not p.terminating]))
        world.run(0.5)
        assert world.now < START + 200
    world.until(World.whole)
    assert fewest == 2 and not first & set(world.pods) and world.syncer.epoch == epoch
    reasons = [e.reason for _, e in world.events]
    assert reasons.count("RollingOut") == 3 and reasons.count("RolledOut") == 1
    assert reasons.count("LearnerReplaced") == 3 and reasons.count("LearnerLost") == 0
    assert not world.status.get("replacements"), "what the operator does is not counted"
    idle(world)


def test_the_next_is_taken_only_when_the_last_is_in_the_quorum() -> None:
    world = started()
    world.edit(learners=template("other:1"))
    world.until(lambda w: len(w.taken) == 2)
    (first_at, _), (second_at, _) = world.taken
    assert second_at - first_at >= 5  # drain, start, join


def test_a_broken_image_stops_the_rollout_and_its_repair_begins_there() -> None:
    world = started()
    first = {p.uid for p in world.of("learner")}
    world.bad_images = {"broken:1"}
    world.edit(learners=template("broken:1"))
    world.run(90)
    assert len(world.taken) == 1 and len(first & set(world.pods)) == 2
    victim = world.taken[0][1]
    row = world.region()
    assert row["state"] == "RolloutStopped" and "broken:1" in row["cause"] and victim in row["cause"]
    assert world.truth("Degraded") == "True" and world.truth("Ready") == "True", "two go on"
    assert world.told("RolloutStopped") == 1 and world.status["phase"] == "Running"
    assert world.told("LearnerNotStarting") == 0, "one Event a transition"
    assert row["cause"].count("broken:1") == 1
    world.edit(learners=template("fixed:1"))
    world.until(lambda w: len(w.taken) == 2)
    assert world.taken[1][1] == victim, "the unready one first"
    world.until(lambda w: w.whole() and {p.image for p in w.of("learner")} == {"fixed:1"})
    assert world.truth("Degraded") == "False" and not world.status.get("replacements")
    idle(world)


def test_a_first_image_that_is_missing_and_its_repair() -> None:
    world = World(job_object(count=1))
    world.bad_images = {"diloco-worker:1"}
    world.run(60)
    assert "diloco-worker:1" in world.region()["cause"] and not world.taken
    assert world.told("LearnerNotStarting") == 1 and not world.status.get("replacements")
    world.edit(learners=template("fixed:1"))
    world.until(World.whole)


def test_a_pod_that_never_started_is_no_loss_when_it_goes() -> None:
    world = World(job_object(count=2, failurePolicy={"maxReplacements": 0}))
    world.unschedulable = {"job-local-1"}
    world.run(30)
    for _ in range(3):  # as somebody does who hopes that it helps
        world.delete_pod("job-local-1")
        world.run(10)
    assert world.truth("Failed") == "False" and not world.status.get("replacements")
    assert world.told("LearnerLost") == 0
    world.unschedulable = set()
    world.until(World.whole)


def test_every_learner_is_needed_so_the_job_holds_and_says_so() -> None:
    world = started(3, sync={"quorum": 3})
    world.edit(learners=template("other:1"))
    world.until(lambda w: w.taken)
    assert "holds" in world.region()["cause"] or "holds" in world.events[-1][1].message
    world.until(lambda w: w.status["phase"] == "Holding")
    world.until(lambda w: w.whole() and {p.image for p in w.of("learner")} == {"other:1"})
    assert world.syncer.epoch == 1


def test_no_healthy_learner_is_taken_at_k() -> None:
    world = started(3, sync={"quorum": 2})
    world.unschedulable = {"job-local-0"}
    world.delete_pod("job-local-0")
    world.run(20)
    world.edit(learners=template("other:1"))
    world.run(30)
    # The one that is pending has the old template: it goes first; then nobody may, for two are needed.
    assert [name for _, name in world.taken] == ["job-local-0"]
    world.unschedulable = set()
    world.until(lambda w: w.whole() and {p.image for p in w.of("learner")} == {"other:1"})


def test_a_silent_syncer_stops_the_taking_of_healthy_learners() -> None:
    world = started()
    world.syncer_silent = True
    world.run(20)
    world.edit(learners=template("other:1"))
    world.run(60)
    assert not world.taken and "does not answer" in world.region()["cause"]
    world.syncer_silent = False
    world.until(lambda w: w.whole() and {p.image for p in w.of("learner")} == {"other:1"})


def test_a_learner_on_a_lost_node_is_not_taken() -> None:
    """Its deletion would not end, and the rollout would wait for it."""
    world = World(job_object(nodeLoss={"policy": "Wait", "afterSeconds": 10}), seed=3)
    world.until(World.whole, 120)
    node = lost_learner(world).obj["spec"]["nodeName"]
    there = {p.name for p in world.of("learner") if p.obj["spec"]["nodeName"] == node}
    world.lose(node)
    world.run(12)  # they are not heard any more, and not told to go yet
    world.edit(learners=template("other:1"))
    world.run(6)
    assert not there & {name for _, name in world.taken}
    world.back(node)
    world.until(lambda w: w.whole() and {p.image for p in w.of("learner")} == {"other:1"})


def test_the_syncer_comes_last() -> None:
    world = started()
    syncer = world.of("syncer")[0].uid
    world.edit(learners=template("other:1"), sync={"every": 48})
    world.until(lambda w: len(w.taken) == 3)
    assert syncer in world.pods
    assert "waits until learners" in world.condition("Ready")["message"]
    world.until(lambda w: syncer not in w.pods)
    assert {p.image for p in world.of("learner") if not p.terminating} == {"other:1"}
    world.until(World.whole)
    assert world.told("SyncerReplaced") == 1 and world.told("SyncerLost") == 0
    assert not world.status.get("replacements")


def test_a_syncer_that_does_not_work_does_not_wait() -> None:
    world = World(
        job_object(syncer={"podTemplate": {"spec": {"containers": [{"name": "syncer", "image": "bad"}]}}})
    )
    world.bad_images = {"bad"}
    world.run(30)
    assert world.condition("SyncerReady")["reason"] == "ImageUnavailable"
    assert world.told("SyncerImageUnavailable") == 1
    world.edit(syncer={}, learners=template("other:1"))
    world.until(World.whole)


def test_settings_of_the_syncer_restart_no_learner() -> None:
    world = started()
    learners = {p.uid for p in world.of("learner")}
    world.edit(sync={"every": 48}, training={**world.job["spec"]["training"], "stop": {"tokens": 10**11}})
    world.until(lambda w: w.syncer.epoch == 2)
    world.until(World.whole)
    assert {p.uid for p in world.of("learner")} == learners


# ------------------------------------------------------------------ replacement


def test_a_learner_is_deleted() -> None:
    world = started()
    world.delete_pod("job-local-1", force=True)
    world.until(lambda w: w.told("LearnerReplaced") == 1)
    assert world.told("LearnerLost") == 1
    assert world.status["replacements"]["total"] == 1
    world.until(World.whole)
    idle(world)


def test_a_process_that_is_gone_is_fenced_at_once() -> None:
    world = started()
    uid = world.named("job-local-1").uid.replace("-", "")  # type: ignore[union-attr]
    world.unschedulable = {"job-local-1"}
    world.delete_pod("job-local-1", force=True)
    world.run(2)
    calls = [c for p in world.plans for c in p.calls]
    assert calls and all(c.method == "process-gone" and c.body["process"].startswith(uid) for c in calls)
    assert calls[0].body["region"] == "local" and calls[0].body["ordinal"] == 1
    slot = next(s for s in world.syncer.slots if s.process.startswith(uid))
    assert slot.state == "lost", "before its heartbeat is missed"
    count = len(calls)
    world.run(30)
    assert len([c for p in world.plans for c in p.calls]) == count, "only as long as it is listed"


def test_an_operator_that_was_away_fences_after_a_moment() -> None:
    world = started()
    from diloco_operator.types import Memory

    world.memory, world.operator_away = Memory(), True
    world.unschedulable = {"job-local-1"}
    world.delete_pod("job-local-1", force=True)
    world.syncer.slots[1].heard = world.now + 1000  # a long heartbeat timeout
    world.run(2)
    world.operator_away = False
    world.run(12)
    assert world.syncer.slots[1].state == "lost"
    assert world.told("LearnerLost") == 0 and not world.status.get("replacements")


def test_a_crashing_learner_is_counted_told_and_fails_the_job_at_the_limit() -> None:
    world = started(2, failurePolicy={"maxReplacements": 2}, sync={"quorum": 2})
    world.crashing = {"job-local-1": 1}
    world.until(lambda w: w.truth("Failed") == "True", 200)
    assert world.condition("Failed")["reason"] == "TooManyReplacements"
    message = world.condition("Failed")["message"]
    assert "maxReplacements" in message and "the disk is on fire" in message
    assert world.status["replacements"]["sinceMerge"] == 3
    # A merge from before the first crash, of which the syncer told after it, may forgive one.
    assert world.told("LearnerCrashed") in (3, 4) and world.told("Failed") == 1
    world.until(lambda w: not w.of("learner"))
    assert world.syncer.phase == "failed" and len(world.of("syncer")) == 1
    idle(world)


def test_merges_set_the_count_back() -> None:
    world = started(3, failurePolicy={"maxReplacements": 2})
    world.crashing = {"job-local-1": 1}
    world.run(300)
    assert world.truth("Failed") == "False", "the others merge"
    assert world.status["replacements"]["total"] >= 4
    assert "the disk is on fire" in world.region()["cause"]


def test_a_pod_that_crashes_again_and_again_is_replaced_with_backoff() -> None:
    world = started(3, failurePolicy={"maxReplacements": 1000})
    world.crashing = {"job-local-1": 1}
    world.run(1000)
    times = [at for at, name in world.taken if name == "job-local-1"]
    assert 3 <= len(times) <= 12
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert gaps[-1] >= 270 and max(gaps) < 500
    total = world.status["replacements"]["total"]
    world.crashing = {}
    world.until(World.whole, 400)
    idle(world)
    assert world.status["replacements"]["total"] <= total + 1, "its own deletions are not counted"


@pytest.mark.parametrize(
    ("rule", "fails", "counted"), [("Fail", True, 0), ("Ignore", False, 0), ("Replace", False, 1)]
)
def test_exit_codes_mean_what_the_rules_say(rule: str, fails: bool, counted: int) -> None:
    rules = {"rules": [{"exitCodes": [3], "action": "Replace"}, {"exitCodes": [2, 7], "action": rule}]}
    world = started(2, failurePolicy=rules)
    world.crashing = {"job-local-1": 2}
    world.until(lambda w: w.told("LearnerCrashed") == 1)
    world.crashing = {}
    world.run(20)
    assert (world.truth("Failed") == "True") == fails
    assert (world.status.get("replacements") or {}).get("total", 0) == counted


@pytest.mark.parametrize(("learners", "fails"), [(1, True), (2, False)])
def test_exit_code_2_fails_a_job_that_nobody_can_work_with(learners: int, fails: bool) -> None:
    world = started(learners)
    world.crashing = {f"job-local-{learners - 1}": 2}
    world.run(10)
    assert (world.truth("Failed") == "True") == fails
    if fails:
        assert world.condition("Failed")["reason"] == "LearnerConfiguration"


def test_the_syncer_is_deleted() -> None:
    world = started()
    learners = {p.uid for p in world.of("learner")}
    world.delete_pod(world.of("syncer")[0].name)
    world.until(lambda w: w.truth("SyncerReady") == "False", 30)
    world.until(World.whole)
    assert world.syncer.epoch == 2 and {p.uid for p in world.of("learner")} == learners
    assert world.told("SyncerLost") == 1 and world.told("SyncerReplaced") == 1
    assert world.status["replacements"]["total"] == 1
    idle(world)


def test_a_syncer_that_does_not_answer_is_told_after_a_while() -> None:
    """Learners may reach it all the same: what is not known is not told as lost."""
    world = started()
    world.syncer_silent = True
    world.run(12)
    assert world.truth("SyncerReady") == "True" and world.truth("QuorumMet") == "True", "one call that failed"
    world.run(30)
    ready = world.condition("SyncerReady")
    assert (ready["status"], ready["reason"]) == ("False", "NotAnswering")
    assert "no answer" in ready["message"] and str(names.CONTROL_PORT) in ready["message"]
    assert (
        world.truth("QuorumMet") == "Unknown" and world.condition("Ready")["reason"] == "SyncerNotAnswering"
    )
    assert world.told("SyncerNotAnswering") == 1 and world.told("QuorumLost") == 0
    assert world.status["learners"] == "3/3", "as it was last known"
    assert not world.taken and not world.status.get("replacements")
    world.syncer_silent = False
    world.until(World.whole, 60)
    idle(world)


def test_a_store_that_cannot_be_written_is_told() -> None:
    world = started()
    document = world.document
    full = {"store_problem": "no space left on /var/lib/diloco"}
    world.document = lambda: document() | full  # type: ignore[method-assign]
    world.run(30)
    ready = world.condition("SyncerReady")
    assert ready["reason"] == "StoreProblem" and "no space left" in ready["message"]
    assert world.truth("Ready") == "False" and world.told("SyncerStoreProblem") == 1
    world.document = document  # type: ignore[method-assign]
    world.until(World.whole, 60)


def test_a_syncer_that_cannot_work_with_the_job_fails_it() -> None:
    world = started()
    world.crashing = {world.of("syncer")[0].name: 2}
    world.until(lambda w: w.truth("Failed") == "True", 30)
    assert world.condition("Failed")["reason"] == "SyncerConfiguration"
    world.until(lambda w: not w.of("learner"), 60)


def test_a_syncer_that_crashes_is_counted_and_waited_for() -> None:
    world = started(failurePolicy={"maxReplacements": 3})
    world.crashing = {world.of("syncer")[0].name: 4}
    world.run(8)
    world.crashing = {}
    world.until(World.whole, 100)
    assert world.told("SyncerCrashed") >= 1 and world.status["replacements"]["total"] >= 1


def test_a_silent_learner_is_replaced() -> None:
    world = started()
    victim = world.named("job-local-2")
    assert victim is not None
    world.deaf = {victim.uid}
    world.run(40)
    assert not world.taken
    world.until(lambda w: w.told("LearnerReplaced") == 1, 60)
    assert [name for _, name in world.taken] == ["job-local-2"] and world.told("LearnerDeleted") == 1
    assert not world.status.get("replacements")
    world.until(World.whole)
    idle(world)


def test_a_learner_that_never_joins_is_told_and_left_alone() -> None:
    """As one that cannot reach the syncer: a new pod could not either."""
    world = started()
    world.delete_pod("job-local-2", force=True)
    world.run(0.5)
    successor = world.named("job-local-2")
    assert successor is not None
    world.deaf = {successor.uid}
    world.run(40)
    assert successor.running and "cause" not in {k for k, v in world.region().items() if v}
    world.run(40)
    assert "job-local-2: it runs, and has not joined" in world.region()["cause"]
    assert world.truth("Degraded") == "True" and world.truth("Ready") == "True" and not world.taken
    world.deaf = set()
    world.until(World.whole)
    assert world.truth("Degraded") == "False" and world.told("LearnerReplaced") == 1
    idle(world)


def test_a_pod_that_should_be_gone_is_named() -> None:
    """Its node is well: it is held by a finalizer, or its kubelet hangs."""
    world = started()
    pod = world.named("job-local-1")
    assert pod is not None
    world.delete_pod("job-local-1")
    pod.obj["drained_at"] = world.now + 1000
    world.run(40)
    assert not world.region()["cause"]
    world.run(20)
    cause = world.region()["cause"]
    assert "job-local-1" in cause and "finalizers" in cause and pod.obj["spec"]["nodeName"] in cause
    pod.obj["drained_at"] = world.now
    world.until(World.whole)
    assert world.truth("Degraded") == "False"
    idle(world)


def test_a_region_that_nobody_hears_is_not_deleted_empty() -> None:
    """All are silent, as when a network is cut: one at a time, more and more slowly."""
    world = started(3)
    world.deaf = {p.uid for p in world.of("learner")}

    def deafen(world: World) -> None:
        world.deaf |= {p.uid for p in world.of("learner")}

    for _ in range(1200):
        world.run(0.5)
        deafen(world)
    assert 1 <= len(world.taken) <= 4


def test_a_syncer_that_has_just_come_back_has_heard_nobody() -> None:
    world = started()
    for _ in range(5):
        world.delete_pod(world.of("syncer")[0].name)
        world.run(12)
    world.until(World.whole)
    assert not world.taken


def test_unschedulable_and_quota_are_told_and_heal() -> None:
    world = started(2)
    world.quota = 2
    world.edit(regions=[{"name": "local", "learners": 4}])
    world.run(20)
    assert "quota" in world.region()["cause"] and world.truth("Degraded") == "True"
    annotations = world.objects[names.stateful_set("job", "local")]["metadata"]["annotations"]
    assert "diloco.io/nudged" in annotations, "its controller is woken, for it tries ever more rarely"
    world.quota, world.unschedulable = None, {"job-local-3"}
    world.run(20)
    assert "Insufficient cpu" in world.region()["cause"] and world.told("LearnerNotStarting") == 1
    assert not world.taken and not world.status.get("replacements")
    world.unschedulable = set()
    world.until(World.whole)
    assert world.truth("Degraded") == "False"
    idle(world)


def test_preempted_learners_are_not_counted() -> None:
    world = started()
    pod = world.named("job-local-0")
    assert pod is not None
    world._condition(pod, "DisruptionTarget", True, "PreemptionByScheduler")
    world.run(1)
    world.delete_pod("job-local-0")
    world.until(lambda w: w.told("LearnerReplaced") == 1)
    assert not world.status.get("replacements")
    assert any("higher priority" in e.message for _, e in world.events)


@pytest.mark.parametrize("role", ["learner", "syncer"])
def test_pods_that_their_node_evicts_are_not_counted(role: str) -> None:
    """The kubelet ends the container and leaves the pod Failed: that is no crash."""
    world = started()
    pod = world.of(role)[0]
    ended = {"exitCode": 137, "reason": "Error", "finishedAt": "2023-11-14T22:13:21Z"}
    pod.container["state"] = {"terminated": ended}
    pod.obj["status"] |= {"phase": "Failed", "reason": "Evicted"}
    world._condition(pod, "DisruptionTarget", True, "TerminationByKubelet")
    if role == "syncer":
        world.syncer.pod = ""
    if role == "learner":  # whose StatefulSet takes it away at once
        world.turn()
    kind = "Syncer" if role == "syncer" else "Learner"
    world.until(lambda w: w.told(f"{kind}Replaced") == 1, 60)
    world.until(World.whole)
    assert not world.status.get("replacements") and world.told(f"{kind}Crashed") == 0
    assert world.told(f"{kind}Lost") == 1
    assert any("to save resources" in event.message for _, event in world.events)


def test_children_deleted_by_hand_come_back() -> None:
    world = started(2)
    epoch = world.syncer.epoch
    for ref in (names.settings_map("job"), names.syncer_service("job"), names.stateful_set("job", "local")):
        world.remove_object(ref)
    world.until(lambda w: all(r in w.objects for r in (names.settings_map("job"),
                                                      names.stateful_set("job", "local"))))  # fmt: skip
    world.until(World.whole)
    assert world.syncer.epoch == epoch
    idle(world)


# ------------------------------------------------------------------ nodes


def lost_learner(world: World) -> Any:
    """A learner on a node where the syncer is not."""
    taken = {p.obj["spec"]["nodeName"] for p in world.of("syncer")}
    return next(p for p in world.of("learner") if p.obj["spec"]["nodeName"] not in taken)


def spread() -> dict[str, Any]:
    return {"nodeLoss": {"policy": "ForceDelete", "afterSeconds": 30}}


def test_force_delete_moves_a_learner_to_another_node() -> None:
    world = World(job_object(**spread()), seed=3)
    world.until(World.whole, 120)
    victim = lost_learner(world)
    node, name = victim.obj["spec"]["nodeName"], victim.name
    world.lose(node)
    began = world.now
    world.until(lambda w: victim.uid not in w.pods, 120)
    assert world.now - began >= 50, "tainted after 20 s, then its grace of 30 s"
    world.until(World.whole)
    successor = world.named(name)
    assert successor is not None and successor.obj["spec"]["nodeName"] != node
    forced = [d for p in world.plans for d in p.deletes if d.force]
    assert forced and all(d.uid for d in forced)
    assert world.told("PodForceDeleted") == len(world.memory.force_deletions)
    assert not world.status.get("replacements")


def test_a_node_is_given_the_time_that_the_job_says() -> None:
    world = World(job_object(nodeLoss={"policy": "ForceDelete", "afterSeconds": 150}), seed=3)
    world.until(World.whole, 120)
    victim = lost_learner(world)
    node = victim.obj["spec"]["nodeName"]
    world.lose(node)
    world.run(140)  # its grace is long over
    assert victim.terminating and victim.uid in world.pods
    assert "force-deleted at" in world.region()["cause"]
    world.run(15)
    assert victim.uid not in world.pods
    # One that comes back in time keeps what it can keep.
    world.back(node)
    world.until(World.whole)
    other = lost_learner(world)
    world.lose(other.obj["spec"]["nodeName"])
    world.run(140)
    assert other.uid in world.pods
    forced = len(world.memory.force_deletions)
    world.back(other.obj["spec"]["nodeName"])
    world.until(World.whole)
    assert len(world.memory.force_deletions) <= forced


def test_under_wait_the_node_and_the_cures_are_named() -> None:
    world = World(job_object(nodeLoss={"policy": "Wait", "afterSeconds": 10}), seed=3)
    world.until(World.whole, 120)
    victim = lost_learner(world)
    node = victim.obj["spec"]["nodeName"]
    world.lose(node)
    world.run(120)
    assert victim.uid in world.pods and not any(d.force for p in world.plans for d in p.deletes)
    cause = world.region()["cause"]
    assert node in cause and "out-of-service" in cause and "ForceDelete" in cause
    assert world.truth("Degraded") == "True" and world.told("NodeLost") >= 1
    told = world.told("NodeLost")
    world.run(60)
    assert world.told("NodeLost") == told
    world.back(node)
    world.until(World.whole)
    assert world.truth("Degraded") == "False"


def test_one_that_is_stuck_does_not_keep_others_from_being_replaced() -> None:
    """Under Wait the region has a pod on its way out for as long as the node is lost."""
    world = World(job_object(nodeLoss={"policy": "Wait", "afterSeconds": 10}), seed=3)
    world.until(World.whole, 120)
    victim = lost_learner(world)
    node = victim.obj["spec"]["nodeName"]
    world.lose(node)
    world.run(70)
    assert victim.terminating and victim.uid in world.pods
    silent = next(p for p in world.of("learner") if p.obj["spec"]["nodeName"] != node)
    world.deaf = {silent.uid}
    world.run(120)
    assert [name for _, name in world.taken] == [silent.name] and victim.uid in world.pods
    world.until(lambda w: w.status["learners"] == f"{w.active()}/3" and w.active() >= 1, 60)
    world.back(node)
    world.until(World.whole)


@pytest.mark.parametrize("policy", ["Wait", "ForceDelete"])
def test_the_syncers_node(policy: str) -> None:
    world = World(job_object(nodeLoss={"policy": policy, "afterSeconds": 10}), seed=5)
    world.until(World.whole, 120)
    node = world.of("syncer")[0].obj["spec"]["nodeName"]
    world.lose(node)
    if policy == "Wait":
        world.run(100)
        condition = world.condition("SyncerReady")
        assert condition["status"] == "False" and condition["reason"] == "NodeLost"
        assert node in condition["message"] and "out-of-service" in condition["message"]
        assert world.told("SyncerNodeLost") == 1
        world.back(node)
    world.until(lambda w: w.syncer.epoch == 2, 200)
    world.until(World.whole, 200)


def test_nodes_that_may_not_be_read_are_not_judged() -> None:
    world = World(job_object(**spread()), seed=3)
    world.blind = True
    world.until(World.whole, 120)
    victim = lost_learner(world)
    world.lose(victim.obj["spec"]["nodeName"])
    world.run(120)
    assert victim.uid in world.pods and "may not read nodes" in world.region()["cause"]


def test_a_learner_with_a_volume_of_one_node_is_not_force_deleted() -> None:
    volumes = [{"name": "scratch", "ephemeral": {"volumeClaimTemplate": {
        "spec": {"accessModes": ["ReadWriteOnce"]}}}}]  # fmt: skip
    world = World(job_object(learners={"podTemplate": {"spec": {"volumes": volumes}}}, **spread()), seed=3)
    world.until(World.whole, 120)
    victim = lost_learner(world)
    world.lose(victim.obj["spec"]["nodeName"])
    world.run(120)
    assert victim.uid in world.pods and "scratch" in world.region()["cause"]


def test_the_budget_of_force_deletions() -> None:
    from diloco_operator import node_loss

    world = World(job_object(count=16, **spread()), seed=1)
    world.until(World.whole, 120)
    for node in list(world.nodes)[1:]:
        world.lose(node)
    world.run(100)
    forced = [d for p in world.plans for d in p.deletes if d.force]
    assert len(forced) <= node_loss.BUDGET
    world.run(400)
    assert len([d for p in world.plans for d in p.deletes if d.force]) > node_loss.BUDGET


# ------------------------------------------------------------------ wrong things


def test_a_foreign_object_stops_the_job_and_is_never_touched() -> None:
    world = World(job_object())
    ref = names.settings_map("job")
    foreign = {"metadata": {"name": ref.name, "uid": "f", "labels": {}}, "data": {"mine": "yes"}}
    world.foreign[ref] = foreign
    world.run(30)
    assert world.truth("NameConflict") == "True" and ref.name in world.condition("NameConflict")["message"]
    assert not world.pods and world.foreign[ref] is foreign and world.told("NameConflict") == 1
    assert world.truth("Ready") == "False"
    del world.foreign[ref]
    world.until(World.whole)
    assert world.truth("NameConflict") == "False" and world.told("NameConflictOver") == 1


def test_an_object_with_our_label_and_another_owner_is_foreign() -> None:
    world = started()
    ref = Ref("ConfigMap", "stray")
    world.foreign[ref] = {
        "kind": "ConfigMap",
        "metadata": {"name": "stray", "uid": "f", "labels": {names.LABEL_JOB: "job"},
                     "ownerReferences": [{"controller": True, "uid": "somebody else"}]},
    }  # fmt: skip
    world.run(60)  # _check holds each plan to it


def test_an_invalid_spec_touches_nothing() -> None:
    world = started()
    objects, uids = dict(world.objects), set(world.pods)
    world.edit(sync={"quorum": 9, "overlap": 500})
    world.run(30)
    ready = world.condition("Ready")
    assert ready["reason"] == "InvalidSpec" and "sync.quorum" in ready["message"]
    assert "sync.overlap" in ready["message"] and world.status["phase"] == "Invalid"
    assert world.status["observedGeneration"] == 2 and world.status["startTime"]
    assert not world.plans[-1].apply and set(world.pods) == uids and world.told("InvalidSpec") == 1
    assert {r: o["metadata"]["generation"] for r, o in world.objects.items()} == {
        r: o["metadata"]["generation"] for r, o in objects.items()
    }
    world.edit(sync={"quorum": 1})
    world.until(World.whole)
    assert set(world.pods) == uids


@pytest.mark.parametrize(
    ("spec", "reason", "words"),
    [
        ({"syncer": {"shards": 2}}, "Unsupported", ["syncer.shards", "set it to 1"]),
        ({"syncer": {"tls": {"secretName": "mine"}}}, "Unsupported", ["learners.credentials.secretName"]),
        ({"syncer": {"cluster": "a"}, "regions": [{"name": "local", "cluster": "a", "learners": 3}]},
         "NotPlaced", ["cluster a", "cluster.name"]),
        ({"learners": {"podTemplate": {"spec": {"restartPolicy": "Never"}}}}, "PodTemplate",
         ["spec.learners.podTemplate.spec.restartPolicy"]),
    ],
)  # fmt: skip
def test_a_job_that_is_not_taken_keeps_what_it_has(
    spec: dict[str, Any], reason: str, words: list[str]
) -> None:
    fresh = World(job_object(**spec))
    fresh.run(20)
    assert fresh.condition("Ready")["reason"] == reason and not fresh.objects
    assert all(word in fresh.condition("Ready")["message"] for word in words)
    assert fresh.told(reason) == 1 and fresh.status["phase"] == "Pending"

    world = started()
    before = world.job["spec"]
    uids = set(world.pods)
    world.edit(**spec)
    world.run(30)
    assert world.condition("Ready")["reason"] == reason and set(world.pods) == uids
    world.job["spec"] = {}
    world.edit(**before)
    world.until(World.whole)
    assert set(world.pods) == uids


def test_a_fault_that_the_dry_run_finds_is_told_and_heals() -> None:
    world = World(job_object(count=1))
    world.run(5)
    from diloco_operator.types import Trouble

    fault = Trouble(
        names.stateful_set("job", "local"), "invalid", "containers[0].ports[0].containerPort: wrong"
    )
    real = world._apply

    def refusing(made: Any) -> None:
        real(made)
        world.troubles = (*world.troubles, fault)
        world.next_turn = world.now

    world._apply = refusing  # type: ignore[method-assign]
    world.run(20)
    ready = world.condition("Ready")
    assert ready["reason"] == "Refused" and "containerPort" in ready["message"]
    assert world.told("Refused") == 1
    world._apply = real  # type: ignore[method-assign]
    world.troubles = ()
    world.until(World.whole)


def test_what_is_good_to_have_does_not_stop_training() -> None:
    from diloco_operator.types import Trouble

    world = started(1)
    fault = Trouble(Ref("PodDisruptionBudget", "job-local"), "forbidden", "poddisruptionbudgets is forbidden")
    world._apply, real = (lambda made: None), world._apply  # type: ignore[method-assign, assignment]
    world.troubles, world.next_turn = (fault,), world.now
    world.run(20)
    assert world.truth("Ready") == "True" and world.truth("Degraded") == "True"
    assert "poddisruptionbudgets" in world.condition("Degraded")["message"] and world.told("ApplyFailed") == 1
    world._apply = real  # type: ignore[method-assign]
    world.until(lambda w: w.truth("Degraded") == "False", 30)


def test_a_missing_secret_is_made_again() -> None:
    world = started(1)
    name = names.secret_name("job", "learner", world.job["metadata"]["uid"])
    assert name in world.secrets and not any(s.missed for s in world.plans[-1].secrets)
    world.delete_pod("job-local-0", force=True)
    world.run(0.5)
    world.notes.append(Note("Pod", "job-local-0", "FailedMount",
                            f'MountVolume.SetUp failed for volume "credentials" : secret "{name}" not found',
                            world.now))  # fmt: skip
    made = world.turn()
    assert [s.name for s in made.secrets if s.missed] == [name]


# ------------------------------------------------------------------ lost regions


def test_a_lost_region_is_told_and_comes_back() -> None:
    regions = [{"name": "near", "learners": 2}, {"name": "far", "learners": 1}]
    world = started(regions=regions, failurePolicy={"regionLostSeconds": 60, "onRegionLost": "Continue"})
    world.unschedulable = {"job-far-0"}
    world.delete_pod("job-far-0", force=True)
    world.run(40)
    assert world.truth("RegionLost") == "False" and world.region("far")["lostSince"]
    since = world.region("far")["lostSince"]
    from diloco_operator.types import Memory

    world.memory = Memory()  # the operator restarts: the time goes on
    world.run(40)
    assert world.truth("RegionLost") == "True" and "far" in world.condition("RegionLost")["message"]
    assert world.region("far")["lostSince"] == since and world.told("RegionLost") == 1
    assert world.truth("Ready") == "True", "two go on"
    world.unschedulable = set()
    world.until(World.whole)
    assert world.truth("RegionLost") == "False" and world.told("RegionBack") == 1
    assert "lostSince" not in world.region("far")


def test_the_plan_raises_nothing_whatever_the_status_says() -> None:
    """A status that an older or a foreign hand wrote is no reason to stop."""
    world = started()
    observed = world.observed()
    for status in (
        {},
        {"conditions": None, "regions": None, "replacements": None, "image": None},
        {"progress": {"tokens": "many", "pace": 3}, "syncer": {"mood": "good"}, "replacements": {"total": 2}},
        {"phase": "Sleeping", "conditions": [{}], "startTime": "2023-11-14T22:13:21Z"},
    ):
        observed.job["status"] = status
        plan(observed, world.memory, SETTINGS)
