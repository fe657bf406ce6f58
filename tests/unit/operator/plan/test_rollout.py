"""The plan against a small cluster: changed pod templates."""

from __future__ import annotations

import dataclasses

import pytest

from diloco_operator.model import ApplyError, Delete, Observed
from operator_world import START, World, idle, job_object, lost_learner, started, template


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
    assert reasons.count("LearnerReplaced") == 3 and reasons.count("LearnerGone") == 0
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
    assert world.told("LearnerGone") == 0
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


@pytest.mark.promise("A rollout goes on where the syncer has no slot yet for the learners that the same edit adds")
def test_learners_that_wait_for_the_syncers_change_do_not_stop_the_rollout_for_which_it_waits() -> None:
    world = started(3, sync={"quorum": 3})
    other = {"podTemplate": {"spec": {"containers": [{"name": "syncer", "image": "other-syncer:1"}]}}}
    world.edit(regions=[{"name": "local", "learners": 4}], learners=template("other:1"), syncer=other)
    world.until(lambda w: w.whole() and {p.image for p in w.of("learner")} == {"other:1"}, 300)
    assert len(world.of("learner")) == 4 and world.syncer.epoch == 2


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


@pytest.mark.promise("A rollout relies on no learner that has just missed heartbeats")
def test_a_learner_that_has_just_fallen_silent_is_not_relied_on() -> None:
    """The syncer waits for it for a while yet, but it may be cut off, and then nothing would be merged."""

    def edited() -> World:
        world = started(2, sync={"quorum": 1})
        world.edit(learners=template("other:1"))
        return world

    first = edited()
    first.until(lambda w: w.taken)
    ((when, name),) = first.taken
    assert name == "job-local-1"
    for quiet, takes in ((4.0, True), (7.0, False)):  # the syncer has it as lost after 10 s
        world = edited()
        world.run(when - quiet - world.now)
        world.deaf |= {pod.uid for pod in world.of("learner") if pod.name == "job-local-0"}
        world.run(quiet + 1.0)
        assert world.syncer.slots[0].state == "active" and bool(world.taken) == takes
        world.deaf.clear()
        world.until(lambda w: w.whole() and {p.image for p in w.of("learner")} == {"other:1"})


def test_no_learner_is_relied_on_by_an_answer_that_is_old() -> None:
    """A job in which nothing happens is asked every 10 s, and others may be cut off since."""
    world = started(2, sync={"quorum": 1})
    world.answer_age = 6.0
    world.edit(learners=template("other:1"))
    world.run(60)
    assert not world.taken
    world.answer_age = 0.0
    world.until(lambda w: w.taken)


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
    other = {"podTemplate": {"spec": {"containers": [{"name": "syncer", "image": "other-syncer:1"}]}}}
    world.edit(learners=template("other:1"), syncer=other)
    world.until(lambda w: len(w.taken) == 3)
    assert syncer in world.pods
    assert "waits until learners" in world.condition("Ready")["message"]
    world.until(lambda w: syncer not in w.pods)
    assert {p.image for p in world.of("learner") if not p.terminating} == {"other:1"}
    world.until(World.whole)
    assert world.told("SyncerReplaced") == 1 and world.told("SyncerGone") == 0
    assert not world.status.get("replacements")


def test_settings_do_not_wait_for_a_rollout() -> None:
    """Which itself waits, for learners that are not here yet: a stop that was raised is in force."""
    regions = [{"name": "near", "learners": 2}, {"name": "far", "learners": 1}]
    world = World(job_object(regions=regions, sync={"quorum": 2}))
    world.unschedulable = {"job-far-0"}
    world.until(lambda w: w.truth("QuorumMet") == "True", 120)
    world.edit(learners=template("other:1"), training={**world.job["spec"]["training"], "stop": {"tokens": 10**11}})
    world.until(lambda w: w.syncer.stop == 10**11 and w.truth("QuorumMet") == "True", 60)
    assert {name for _, name in world.taken} <= {"job-far-0"}
    assert "no other is restarted" in world.condition("Ready")["message"]
    assert "waits until" not in world.condition("Ready")["message"]
    world.unschedulable = set()
    world.until(lambda w: w.whole() and {p.image for p in w.of("learner")} == {"other:1"})


def test_a_syncer_that_does_not_work_does_not_wait() -> None:
    world = World(job_object(syncer={"podTemplate": {"spec": {"containers": [{"name": "syncer", "image": "bad"}]}}}))
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


class Guarded(World):
    """Something refuses that its pods are deleted, and says why."""

    refused = True

    def _delete(self, delete: Delete) -> None:
        if not self.refused:
            super()._delete(delete)

    def observed(self) -> Observed:
        tried = {delete.ref for plan in self.plans for delete in plan.deletes} if self.refused else set()
        errors = tuple(ApplyError(ref, "forbidden", "the webhook says no") for ref in sorted(tried))
        return dataclasses.replace(super().observed(), apply_errors=errors)


@pytest.mark.promise("A rollout whose deletion is refused reports that, and continues when the refusal ends")
def test_a_rollout_says_why_a_pod_cannot_be_deleted() -> None:
    world = Guarded(job_object(count=3))
    world.until(World.whole, 120)
    world.edit(learners=template("diloco-worker:2"))
    world.run(30)
    assert "job-local-2 cannot be deleted: the webhook says no" in world.region()["cause"], world.story()
    assert world.told("RollingOut") == 1
    world.refused = False
    world.until(lambda w: w.told("RolledOut") == 1, 120)
