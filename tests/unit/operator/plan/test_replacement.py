"""The plan against a small cluster: what is lost or does not work is replaced."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from diloco_operator import names
from diloco_operator.model import Observed, PlanMemory
from diloco_protocol.vocabulary import CONTROL_PORT
from operator_world import World, idle, started


def test_a_learner_is_deleted() -> None:
    world = started()
    world.delete_pod("job-local-1", force=True)
    world.until(lambda w: w.told("LearnerReplaced") == 1)
    (gone,) = [event for _, event in world.events if event.reason == "LearnerGone"]
    assert "(it was deleted, or has lost its labels)" in gone.message
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
    assert calls and all(c.method == "process-ended" and c.body["process"].startswith(uid) for c in calls)
    assert calls[0].body["region"] == "local" and calls[0].body["ordinal"] == 1
    slot = next(s for s in world.syncer.slots if s.process.startswith(uid))
    assert slot.state == "lost", "before its heartbeat is missed"
    count = len(calls)
    world.run(30)
    assert len([c for p in world.plans for c in p.calls]) == count, "only as long as it is listed"


def test_an_operator_that_was_away_fences_after_a_moment() -> None:
    world = started()
    world.memory, world.operator_away = PlanMemory(), True
    world.unschedulable = {"job-local-1"}
    world.delete_pod("job-local-1", force=True)
    world.syncer.slots[1].heard = world.now + 1000  # a long heartbeat timeout
    world.run(2)
    world.operator_away = False
    world.run(12)
    assert world.syncer.slots[1].state == "lost"
    assert world.told("LearnerGone") == 0 and not world.status.get("replacements")


def test_the_count_outlives_the_operator_and_has_what_operators_saw() -> None:
    """A pod that goes while no operator runs is not known to the next one, which counts on from the status."""
    world = started()
    world.delete_pod("job-local-1", force=True)
    world.until(lambda w: w.told("LearnerReplaced") == 1)
    world.memory, world.operator_away = PlanMemory(), True
    world.delete_pod("job-local-2", force=True)
    world.run(60)
    world.operator_away, world.next_turn = False, world.now
    world.run(10)
    assert world.status["replacements"]["total"] == 1
    world.delete_pod("job-local-0", force=True)
    world.until(lambda w: w.told("LearnerReplaced") == 2)
    assert world.status["replacements"]["total"] == 2
    world.edit(regions=[{"name": "local", "learners": 2}])
    world.until(lambda w: len(w.of("learner")) == 2)
    world.until(World.whole)
    idle(world)
    assert world.status["replacements"]["total"] == 2, "who is not wanted any more is not lost"


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


@pytest.mark.parametrize(("rule", "fails", "counted"), [("Fail", True, 0), ("Ignore", False, 0), ("Replace", False, 1)])
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
    assert world.told("SyncerGone") == 1 and world.told("SyncerReplaced") == 1
    assert world.status["replacements"]["total"] == 1
    idle(world)


def test_a_volume_that_changes_hands_is_nothing_to_tell() -> None:
    """The successor is made while the one before it still ends."""
    world = started()
    world.delete_pod(world.of("syncer")[0].name)
    seen = set()
    for _ in range(40):
        world.run(0.5)
        seen.add(world.condition("SyncerReady")["reason"])
        if world.syncer.epoch == 2 and world.truth("SyncerReady") == "True":
            break
    world.until(World.whole)
    assert seen <= {"Serving", "Restarting", "Starting"}, seen
    assert not [e.reason for _, e in world.events if e.reason in ("SyncerVolumeUnavailable", "SyncerUnschedulable")]


def test_a_syncer_that_does_not_answer_is_told_after_a_while() -> None:
    """Learners may reach it all the same: what is not known is not told as lost."""
    world = started()
    world.syncer_silent = True
    world.run(12)
    assert world.truth("SyncerReady") == "True" and world.truth("QuorumMet") == "True", "one call that failed"
    world.run(30)
    ready = world.condition("SyncerReady")
    assert (ready["status"], ready["reason"]) == ("False", "NotAnswering")
    assert "no answer" in ready["message"] and str(CONTROL_PORT) in ready["message"]
    assert world.truth("QuorumMet") == "Unknown" and world.condition("Ready")["reason"] == "SyncerNotAnswering"
    assert world.told("SyncerNotAnswering") == 1 and world.told("QuorumLost") == 0
    assert world.status["learners"] == "3/3", "as it was last known"
    assert not world.taken and not world.status.get("replacements")
    world.syncer_silent = False
    world.until(World.whole, 60)
    idle(world)


@pytest.mark.promise("A syncer that has just become ready gets time to answer before it is reported as silent")
def test_a_syncer_that_was_not_there_is_given_time_to_answer() -> None:
    """After a suspension, and after it has read its store for long, the first answers may still be missing."""
    world = started()
    world.edit(suspend=True)
    world.until(lambda w: w.status["phase"] == "Suspended")
    world.run(100)
    world.edit(suspend=False)
    world.syncer_silent = True
    world.until(lambda w: any(p.ready_to_start + 1 <= w.now for p in w.of("syncer")), 60)
    world.run(10)
    world.syncer_silent = False
    world.until(World.whole, 60)
    assert world.told("SyncerNotAnswering") == 0


@pytest.mark.promise("A full volume is reported, with the field that enlarges it")
def test_a_store_that_cannot_be_written_is_told() -> None:
    world = started()
    document = world.document
    full = {"store_problem": "no space left on /var/lib/diloco"}
    world.document = lambda: document().model_copy(update=full)  # type: ignore[method-assign]
    world.run(30)
    ready = world.condition("SyncerReady")
    assert ready["reason"] == "StoreProblem" and "No space left on /var/lib/diloco" in ready["message"]
    assert "syncer.storage.size" in ready["message"], "the field that makes room"
    assert world.truth("Ready") == "False" and world.told("SyncerStoreProblem") == 1
    world.document = document  # type: ignore[method-assign]
    world.until(World.whole, 60)


def test_a_syncer_that_cannot_work_with_the_job_fails_it() -> None:
    world = started()
    world.crashing = {world.of("syncer")[0].name: 2}
    world.until(lambda w: w.truth("Failed") == "True", 30)
    assert world.condition("Failed")["reason"] == "SyncerConfiguration"
    world.until(lambda w: not w.of("learner"), 60)


@pytest.mark.promise("Settings that somebody edits fail no job whose programs start meanwhile: they are put back first")
def test_a_program_that_read_edited_settings_fails_no_job() -> None:
    world = started()
    before = set(world.pods)
    world.operator_away = True
    world.objects[names.settings_map("job")]["data"] = {}
    world.crashing = {world.of("syncer")[0].name: 2}
    world.run(5)
    world.operator_away = False
    world.run(60)
    assert world.truth("Failed") == "False" and world.objects[names.settings_map("job")]["data"]
    kept, world.crashing = world.crashing, {}
    world.until(World.whole, 120)
    assert set(world.pods) == before
    world.crashing = kept
    world.until(lambda w: w.truth("Failed") == "True", 400)
    assert world.condition("Failed")["reason"] == "SyncerConfiguration"


def test_a_syncer_that_crashes_is_counted_and_waited_for() -> None:
    world = started(failurePolicy={"maxReplacements": 3})
    world.crashing = {world.of("syncer")[0].name: 4}
    world.run(8)
    world.crashing = {}
    world.until(World.whole, 100)
    assert world.told("SyncerCrashed") >= 1 and world.status["replacements"]["total"] >= 1


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
    assert "job-local-2: it runs, but has not joined" in world.region()["cause"]
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


@pytest.mark.promise(
    "A node that the operator sees after its pod is not reported as lost, and an old Event about a quota "
    "explains no later gap"
)
@pytest.mark.parametrize("role", ["learner", "syncer"])
def test_a_quota_that_was_used_up_earlier_does_not_explain_a_pod_that_is_being_replaced(role: str) -> None:
    """An Event stays for ten minutes, and a pod was made since."""
    world = started()

    def replace_pod() -> None:
        world.delete_pod(world.of(role)[0].name, force=True)
        world.turn()  # before its controller makes another

    def is_explained() -> bool:
        said = world.region()["cause"] if role == "learner" else world.condition("SyncerReady")["message"]
        return "exceeded quota" in said

    world.quota = 0
    replace_pod()
    assert not is_explained()
    world.until(lambda _: is_explained(), 20)
    world.quota = None
    world.until(World.whole)
    world.run(300)
    assert any(event.reason == "FailedCreate" for event in world.observed().cluster_events)
    told = world.told("SyncerNotCreated")
    replace_pod()
    assert not is_explained() and world.truth("Degraded") == "False", world.story()
    assert role == "learner" or world.condition("SyncerReady")["reason"] == "Starting"
    world.until(World.whole)
    assert world.told("SyncerNotCreated") == told
    world.quota = 0
    replace_pod()
    world.until(lambda _: is_explained(), 20)


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
    assert world.told(f"{kind}Gone") == 1
    assert any("to save resources" in event.message for _, event in world.events)


def test_children_deleted_by_hand_come_back() -> None:
    world = started(2)
    epoch = world.syncer.epoch
    for ref in (names.settings_map("job"), names.syncer_service("job"), names.stateful_set("job", "local")):
        world.remove_object(ref)
    world.until(lambda w: all(r in w.objects for r in (names.settings_map("job"), names.stateful_set("job", "local"))))
    world.until(World.whole)
    assert world.syncer.epoch == epoch
    idle(world)


def test_a_pod_that_has_lost_its_label_and_trains_is_named_with_the_cure() -> None:
    """Its StatefulSet lets it go and can make no other of its name; the syncer hears it as before."""
    world = started()
    everything = world.observed
    hidden = "job-local-1"

    def without_it() -> Observed:
        seen = everything()
        return replace(seen, pods=tuple(pod for pod in seen.pods if pod["metadata"]["name"] != hidden))

    world.observed = without_it  # type: ignore[method-assign]
    world._call = lambda method, body: None  # type: ignore[method-assign]  # the API server has the pod: no call is made
    world.run(40)
    assert f"kubectl label pod {hidden} diloco.io/job=job" in world.region()["cause"]
    assert world.status["learners"] == "3/3" and world.truth("Ready") == "True"
