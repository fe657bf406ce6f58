"""The plan against a small cluster: learners of several pods are lost, replaced, rolled out and counted as one."""

from __future__ import annotations

import dataclasses

import pytest

from diloco_operator import names
from diloco_operator.job import read_job
from diloco_operator.model import Observed, PlanMemory, Ref
from diloco_operator.plan.pod_status import GroupPlace, place_in_group
from diloco_operator.reconcile.observe import learner_pods
from diloco_protocol.vocabulary import LABEL_POD_INDEX
from operator_world import SETTINGS, World, idle, started, template

SHARED = {"batch": {"sequences": 12}}  # by two ranks, or three


def groups(count: int = 3, pods: int = 2, **spec: object) -> World:
    learners: dict[str, object] = {"pods": pods} | dict(spec.pop("learners", {}))  # type: ignore[call-overload]
    return started(count, learners=learners, training=SHARED, **spec)


def uids(world: World) -> dict[str, str]:
    return {pod.name: pod.uid for pod in world.of("learner")}


def changed(world: World, before: dict[str, str]) -> set[str]:
    return {name for name, uid in uids(world).items() if before[name] != uid}


def causes(world: World) -> str:
    return str(world.region()["cause"])


def test_a_learner_of_several_pods_is_one_learner() -> None:
    world = groups(3, pods=2)
    assert world.objects[Ref("StatefulSet", "job-local")]["spec"]["replicas"] == 6
    assert world.status["learners"] == "3/3" and world.status["quorum"] == "3/1"
    row = world.region()
    assert (row["desired"], row["ready"], row["inQuorum"], row["state"]) == (3, 3, 3, "Running")
    assert {slot.process[:32] for slot in world.syncer.slots} == {
        uids(world)[f"job-local-{2 * i}"].replace("-", "") for i in range(3)
    }
    idle(world)


@pytest.mark.parametrize("lost", ["job-local-2", "job-local-3"])
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.promise("A learner of several pods that loses one is replaced as one, and no other learner is touched")
def test_a_pod_is_deleted_and_the_others_of_its_learner_go_with_it(lost: str, force: bool) -> None:
    world = groups()
    before = uids(world)
    world.delete_pod(lost, force=force)
    world.until(lambda w: w.told("LearnerReplaced") == 1)
    assert changed(world, before) == {"job-local-2", "job-local-3"}
    world.until(World.whole)
    assert world.status["replacements"]["total"] == 1, "one learner was lost"
    (gone,) = [event.message for _, event in world.events if event.reason == "LearnerGone"]
    assert f"Pod {lost}" in gone
    (told,) = [event.message for _, event in world.events if event.reason == "LearnerDeleted"]
    assert told == f"Learner job-local-2 is replaced, with all its pods: {lost} is lost."
    count = len(world.taken)
    world.run(120)
    assert len(world.taken) == count == 1, "only once"
    idle(world)


def test_all_pods_of_a_learner_are_deleted_at_once_and_that_is_one_loss() -> None:
    for force in (False, True):
        world = groups(3, pods=3)
        for index in (3, 4, 5):
            pod = world.named(f"job-local-{index}")
            assert pod is not None
            world._delete_pod(pod, force)
            pod.obj["drained_at"] = world.now + 2.0 * index  # one ends after the other
        world.until(lambda w: w.told("LearnerReplaced") == 1)
        world.until(World.whole)
        assert world.status["replacements"]["total"] == 1
        assert world.told("LearnerGone") == 1 and not world.taken


def test_a_pod_of_a_learner_is_evicted_and_that_counts_as_no_loss() -> None:
    world = groups()
    before = uids(world)
    pod = world.named("job-local-5")
    assert pod is not None
    pod.obj["status"] |= {
        "phase": "Failed",
        "reason": "Evicted",
        "containerStatuses": pod.obj["status"]["containerStatuses"],
    }
    world._condition(pod, "DisruptionTarget", True, "TerminationByKubelet")
    world.until(lambda w: changed(w, before) == {"job-local-4", "job-local-5"} and w.whole())
    assert not world.status.get("replacements", {}).get("total")


def test_a_node_is_lost_with_one_pod_of_a_learner() -> None:
    """The other one hangs: nobody has closed its connections. It goes when the lost pod is marked, and its successor,
    which waits for the lost one's, is not taken again when that is deleted by force."""
    world = groups(3, nodeLoss={"policy": "ForceDelete", "afterSeconds": 60})
    for pod in world.of("learner"):  # one of each learner on a node of its own
        pod.obj["spec"]["nodeName"] = "node-1" if pod.name == "job-local-3" else "node-0"
    world.formed = {}
    world._groups()
    for pod in world.of("syncer"):
        pod.obj["spec"]["nodeName"] = "node-0"
    before = uids(world)
    world.lose("node-1")
    world.until(lambda w: "its node node-1 has been lost" in causes(w), 60)
    assert causes(world).startswith("job-local-2: its pod job-local-3: its node node-1 has been lost since")
    world.until(lambda w: uids(w).get("job-local-2", "") not in ("", before["job-local-2"]), 60)
    successor = uids(world)["job-local-2"]
    world.until(World.whole, 300)
    assert changed(world, before) == {"job-local-2", "job-local-3"}
    assert uids(world)["job-local-2"] == successor, "it had waited, and was not taken again"


def test_a_pod_that_stays_terminating_takes_its_learner_once() -> None:
    world = groups(3, nodeLoss={"policy": "Wait"})
    for pod in world.of("learner"):
        pod.obj["spec"]["nodeName"] = "node-1" if pod.name == "job-local-3" else "node-0"
    world.formed = {}
    world._groups()
    world.lose("node-1")
    world.until(lambda w: any(name == "job-local-2" for _, name in w.taken), 90)
    world.run(600)
    assert [name for _, name in world.taken] == ["job-local-2"]
    assert "job-local-3: its node node-1 has been lost" in causes(world)
    world.back("node-1")
    world.until(World.whole, 120)


def test_half_a_learner_is_pending_and_waits_for_the_other_half() -> None:
    world = World(_job(unschedulable={"job-local-3"}))
    world.unschedulable = {"job-local-3"}
    world.until(lambda w: w.status.get("learners") == "2/3", 120)
    world.run(60)
    before = uids(world)
    said = causes(world)
    assert said == "job-local-2: its pod job-local-3: no node takes it: 0/3 nodes are available: 3 Insufficient cpu."
    (told,) = [event.message for _, event in world.events if event.reason == "LearnerNotStarting"]
    assert told.startswith("Learner job-local-2 (pod job-local-3) does not start: no node takes it")
    world.delete_pod("job-local-3")
    pending = world.named("job-local-3")
    assert pending is not None
    pending.obj["drained_at"] = world.now + 3.0
    world.run(120)
    assert changed(world, before) == {"job-local-3"}, "the other half has broken nothing, and waits"
    world.unschedulable = set()
    world.until(World.whole, 120)
    assert uids(world)["job-local-2"] == before["job-local-2"]


def _job(count: int = 3, pods: int = 2, **_: object) -> dict[str, object]:
    from operator_world import job_object

    return job_object(count=count, learners={"pods": pods}, training=SHARED)


def test_a_quota_that_is_enough_for_half_a_learner_is_told_by_learner() -> None:
    world = World(_job(count=2, pods=4))
    world.quota = 1 + 4 + 2  # the syncer, one learner, and half of the other
    world.until(lambda w: w.status.get("learners") == "1/2", 120)
    world.run(30)
    assert causes(world).startswith("job-local-4: 2 of its 4 pods are made; its pod job-local-6: its pod cannot be")
    assert "raise the namespace's quota" in causes(world)
    before = uids(world)
    world.run(120)
    assert uids(world) == before, "those that are made wait"
    world.quota = None
    world.until(World.whole, 120)
    assert {name: uids(world)[name] for name in before} == before


def test_a_program_ends_in_one_pod_and_the_learner_is_counted_once() -> None:
    world = groups()
    before, world.last_words = uids(world), "the disk is on fire"
    pod = world.named("job-local-3")
    assert pod is not None
    world._crash(pod, 1)
    world.until(lambda w: w.told("LearnerReplaced") == 1)
    world.until(World.whole)
    assert not changed(world, before), "their kubelets start them again where they are"
    assert world.status["replacements"]["total"] == 1
    (told,) = [event.message for _, event in world.events if event.reason == "LearnerCrashed"]
    assert told == "Learner job-local-2 (pod job-local-3): its program ended with exit code 1: the disk is on fire."


def test_a_rule_for_an_exit_code_holds_for_whichever_pod_ends_with_it() -> None:
    world = groups(failurePolicy={"rules": [{"exitCodes": [42], "action": "Fail"}]})
    pod = world.named("job-local-5")
    assert pod is not None
    world._crash(pod, 42)
    world.until(lambda w: w.truth("Failed") == "True", 30)
    assert world.condition("Failed")["reason"] == "ExitCode"
    assert "Learner job-local-4 (pod job-local-5)" in world.condition("Failed")["message"]


def test_a_pod_that_keeps_crashing_is_replaced_with_its_learner() -> None:
    world = groups(3)
    world.crashing = {"job-local-3": 1}
    before = uids(world)
    world.until(lambda w: bool(w.taken), 400)
    assert [name for _, name in world.taken] == ["job-local-2"], "the learner, by its leading pod"
    world.crashing = {}
    world.until(World.whole, 120)
    assert changed(world, before) == {"job-local-2", "job-local-3"}
    told = [event.message for _, event in world.events if event.reason == "LearnerDeleted"]
    assert len(told) == 1 and told[0].startswith(
        "Pod job-local-3 is replaced, with all pods of learner job-local-2: it keeps crashing: its program ended with "
        "exit code 1: the disk is on fire"
    )


def test_a_silent_leader_is_replaced_with_all_its_pods() -> None:
    world = groups(3)
    before = uids(world)
    world.deaf = {before["job-local-4"]}
    world.until(lambda w: changed(w, before) == {"job-local-4", "job-local-5"} and w.whole(), 300)


def test_a_changed_template_reaches_one_learner_after_another() -> None:
    world = groups(3, sync={"quorum": 2})
    before = uids(world)
    world.edit(learners={"pods": 2, **template("mine:2")})
    world.until(lambda w: len(changed(w, before)) == 6 and w.whole(), 300)
    assert [name for _, name in world.taken] == ["job-local-4", "job-local-2", "job-local-0"]
    assert {pod.image for pod in world.of("learner")} == {"mine:2"}
    told = [event.message for _, event in world.events if event.reason == "RollingOut"]
    assert told[0] == "Learner job-local-4 is restarted with a changed template."


def test_a_pod_of_an_old_template_makes_its_learner_old() -> None:
    """As where one of its deletions was lost, and the operator was started anew."""
    world = groups(3, sync={"quorum": 2})
    world.edit(learners={"pods": 2, **template("mine:2")})
    world.until(lambda w: bool(w.taken), 60)
    follower = world.named("job-local-5")
    assert follower is not None and follower.terminating
    del follower.obj["metadata"]["deletionTimestamp"], follower.obj["metadata"]["deletionGracePeriodSeconds"]
    world.operator_away = True
    world.run(20)
    world.memory, world.operator_away, world.next_turn = PlanMemory(), False, world.now
    world.plans.clear()
    assert {pod.image for pod in world.of("learner") if pod.ordinal == 2} == {"mine:2", "diloco-worker:1"}
    world.until(lambda w: {pod.image for pod in w.of("learner")} == {"mine:2"} and w.whole(), 300)


def test_the_rollout_stops_at_the_pod_that_cannot_start() -> None:
    world = groups(3, sync={"quorum": 2})
    world.unschedulable = {"job-local-5"}
    world.edit(learners={"pods": 2, **template("mine:2")})
    world.until(lambda w: w.region()["state"] == "RolloutStopped", 120)
    assert "the rollout stops at job-local-5, which does not start: no node takes it" in causes(world)
    world.unschedulable = set()
    world.until(lambda w: {pod.image for pod in w.of("learner")} == {"mine:2"} and w.whole(), 300)


def test_a_region_grows_and_shrinks_by_whole_learners() -> None:
    world = groups(2, pods=3)
    before = uids(world)
    world.edit(regions=[{"name": "local", "learners": 3}])
    world.until(lambda w: w.whole() and len(w.of("learner")) == 9, 120)
    world.edit(regions=[{"name": "local", "learners": 1}])
    world.until(lambda w: w.whole() and set(uids(w)) == {f"job-local-{i}" for i in range(3)}, 120)
    assert {name: before[name] for name in uids(world)} == uids(world) and not world.taken
    told = [event.message for _, event in world.events if event.reason == "Scaled"]
    assert told == [
        "Region local: from 2 to 3 learners, spares included.",
        "Region local: from 3 to 1 learners, spares included.",
    ]


def test_spares_are_whole_learners_too() -> None:
    world = World(_job())
    world.job["spec"]["regions"] = [{"name": "local", "learners": 2, "spares": 1}]
    world.until(lambda w: w.whole() and len(w.syncer.standbys) == 1, 120)
    assert len(world.of("learner")) == 6
    assert world.region()["desired"] == 3


@pytest.mark.parametrize("asked", [1, 3])
def test_the_number_of_pods_changes_only_where_there_are_none(asked: int) -> None:
    world = groups(2)
    before = uids(world)
    world.edit(learners={"pods": asked})
    world.until(lambda w: w.condition("Ready").get("reason") == "Unsupported", 30)
    message = world.condition("Ready")["message"]
    assert message.startswith(
        f"spec.learners.pods is {asked}, and learners of 2 pods are there (region local): suspend"
    )
    world.run(60)
    assert uids(world) == before
    world.edit(suspend=True)
    world.until(lambda w: not w.of("learner") and w.status["phase"] == "Suspended", 120)
    world.edit(suspend=False)
    world.until(lambda w: w.whole() and len(w.of("learner")) == 2 * asked, 120)
    idle(world)


def test_an_operator_that_was_away_completes_what_is_left_of_a_learner() -> None:
    """A pod terminates while no operator runs: the next one deletes the other, and no successor of it."""
    world = groups(3)
    before = uids(world)
    world.memory, world.operator_away = PlanMemory(), True
    pod = world.named("job-local-3")
    assert pod is not None
    world._delete_pod(pod, False)
    pod.obj["drained_at"] = world.now + 25.0
    world.run(5)
    world.operator_away = False
    world.next_turn = world.now
    world.until(lambda w: changed(w, before) == {"job-local-2", "job-local-3"} and w.whole(), 120)


def test_an_old_view_takes_nothing_until_a_fresh_one_says_the_same() -> None:
    world = groups(3)
    observed = world.observed

    def stale() -> Observed:
        return dataclasses.replace(observed(), view_age=60.0)

    world.observed = stale  # type: ignore[method-assign]
    world.delete_pod("job-local-3", force=True)
    world.run(1)
    assert not world.taken and any(made.wants_fresh_view for made in world.plans[-3:])
    world.observed = observed  # type: ignore[method-assign]
    world.next_turn = world.now
    world.until(lambda w: [name for _, name in w.taken] == ["job-local-2"], 10)
    world.until(World.whole, 60)


@pytest.mark.parametrize(
    ("name", "labels", "place"),
    [
        ("job-local-5", {LABEL_POD_INDEX: "5", names.GROUP_PODS: "2"}, GroupPlace(2, 1, 2)),
        ("job-local-4", {LABEL_POD_INDEX: "4", names.GROUP_PODS: "2"}, GroupPlace(2, 0, 2)),
        ("job-local-5", {}, GroupPlace(5, 0, 1)),
        ("job-local-5", {names.GROUP_PODS: "0"}, GroupPlace(5, 0, 1)),
        ("job-local-5", {names.GROUP_PODS: "many"}, GroupPlace(5, 0, 1)),
        ("job-local-5", {names.GROUP_PODS: "9" * 5000}, GroupPlace(5, 0, 1)),
        ("job-local-x", {names.GROUP_PODS: "3"}, GroupPlace(-1, 0, 3)),
    ],
)
def test_the_place_of_a_pod_is_read_from_its_labels(name: str, labels: dict[str, str], place: GroupPlace) -> None:
    assert place_in_group(name, labels) == place


def test_only_the_leading_pod_has_a_status_page() -> None:
    world = groups(2)
    pods = [{**pod.obj, "status": {**pod.obj["status"], "podIP": "10.0.0.1"}} for pod in world.of("learner")]
    assert set(learner_pods(pods)) == {"job-local-0", "job-local-2"}


def test_a_region_may_have_another_number_of_pods() -> None:
    job = _job()
    job["spec"]["regions"] = [{"name": "big", "learners": 1, "pods": 3}, {"name": "small", "learners": 2, "pods": 1}]  # type: ignore[index]
    assert [read_job(job).spec.group(name).pods for name in ("big", "small")] == [3, 1]
    world = World(job, settings=SETTINGS)
    world.until(World.whole, 120)
    before = uids(world)
    world.delete_pod("job-big-1")
    world.until(lambda w: len(changed(w, before)) == 3 and w.whole(), 120)
    world.delete_pod("job-small-1")
    world.until(lambda w: len(changed(w, before)) == 4 and w.whole(), 120)
