"""The plan against a small cluster: shards of the syncer in pods of their own."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_operator import names
from diloco_operator.model import ClusterEvent, Ref
from diloco_operator.plan.pod_status import newest_message
from operator_world import PodSim, World, idle, job_object, started, template

BUCKET = {"storage": {"uri": "s3://bucket/job"}}


def sharded(shards: int = 2, **syncer: Any) -> dict[str, Any]:
    """``spec.syncer`` of a job whose shards have pods."""
    return {"shards": shards, "shardPods": {}, **BUCKET, **syncer}


def image(name: str) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "syncer", "image": name}]}}


def shard(world: World, number: int) -> PodSim:
    """Its pod that stays."""
    (found,) = [
        p
        for p in world.of("shard")
        if p.obj["metadata"]["labels"]["diloco.io/shard"] == str(number) and not p.terminating
    ]
    return found


class Beginning(set[str]):
    """All names that begin so."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __contains__(self, name: object) -> bool:
        return str(name).startswith(self.text)


def deployments(world: World) -> list[str]:
    return sorted(ref.name for ref in world.objects if ref.kind == "Deployment")


def test_a_job_has_a_pod_for_each_shard_as_long_as_one_for_its_syncer() -> None:
    world = started(2, syncer=sharded(3))
    assert deployments(world) == ["job-syncer", *(f"job-syncer-shard-{n}" for n in range(3))]
    assert [shard(world, n).image for n in range(3)] == 3 * ["diloco-syncer:1"]
    idle(world)
    world.edit(suspend=True)
    world.until(lambda w: w.truth("Suspended") == "True")
    assert not world.pods and len(deployments(world)) == 4
    world.edit(suspend=False)
    world.until(World.whole)
    assert len(world.of("shard")) == 3
    world.delete_job()
    world.until(lambda w: w.gone)


@pytest.mark.promise("Status and an Event name the shard's pod that cannot start, and why")
def test_a_shards_pod_that_finds_no_node_is_named() -> None:
    world = World(job_object(count=2, syncer=sharded()))
    world.unschedulable = Beginning("job-syncer-shard-1-")
    world.until(lambda w: w.condition("SyncerReady").get("reason") == "Unschedulable")
    row, pending = world.condition("SyncerReady"), shard(world, 1).name
    assert row["status"] == "False" and f"Pod {pending}: no node takes it" in row["message"]
    assert world.truth("Ready") == "False" and world.told("SyncerUnschedulable") == 1
    world.run(60)
    assert world.told("SyncerUnschedulable") == 1 and not world.status.get("replacements")
    world.unschedulable = set()
    world.until(World.whole)
    assert world.truth("SyncerReady") == "True"


def test_a_shard_that_crashes_is_named_and_fails_no_job() -> None:
    """Kubernetes starts it again, and merges of its fragments alone wait; what no restart mends the syncer ends by."""
    world = started(2, syncer=sharded(), failurePolicy={"maxReplacements": 0})
    victim = shard(world, 0)
    world.crashing = {victim.name: 1}
    world.until(lambda w: w.condition("SyncerReady").get("reason") == "ShardCrashing")
    said = world.condition("SyncerReady")["message"]
    assert said.startswith(f"Pod {victim.name}: its program ended with exit code 1: the disk is on fire")
    world.run(300)
    assert world.told("SyncerShardCrashing") >= 1 and world.truth("Failed") == "False"
    assert not world.status.get("replacements") and world.told("SyncerCrashed") == 0
    world.crashing = {}
    world.until(World.whole, 400)
    assert victim.uid in world.pods, "its kubelet starts it again"


def test_a_shard_that_ran_out_of_memory_is_told_what_it_needs() -> None:
    world = started(2, syncer=sharded())
    world.memory.model_size = (10**9, 24)
    victim = shard(world, 1)
    world.crashing = {victim.name: 137}
    world.until(lambda w: not victim.running)
    victim.container["lastState"]["terminated"]["reason"] = "OOMKilled"
    needed = "give it more with resources.limits.memory: the disk is on fire. A shard of this model needs up to"
    world.until(lambda w: needed in w.condition("SyncerReady").get("message", ""), 60)


def test_what_keeps_a_shards_pod_from_being_made_is_not_said_of_the_syncers() -> None:
    """Names of the shards' ReplicaSets begin as the syncer's."""
    said = [ClusterEvent("ReplicaSet", "job-syncer-shard-1-6c9f", "FailedCreate", "exceeded quota", time=1.0)]
    refs = [names.syncer_deployment("job"), *(names.shard_deployment("job", shard) for shard in (1, 10))]
    assert [newest_message(said, ref, "FailedCreate") for ref in refs] == ["", "exceeded quota", ""]
    world = started(1, syncer=sharded())
    world.quota = len(world.pods) - 1
    world.delete_pod(shard(world, 1).name)
    world.until(lambda w: w.condition("SyncerReady").get("reason") == "NotCreated")
    assert "exceeded quota" in world.condition("SyncerReady")["message"]
    nudged = [m for plan in world.plans for m in plan.apply if "diloco.io/nudged" in m["metadata"]["annotations"]]
    assert {m["metadata"]["name"] for m in nudged} == {"job-syncer-shard-1"}
    world.quota = None
    world.until(World.whole)


@pytest.mark.parametrize("policy", ["Wait", "ForceDelete"])
def test_a_shard_of_a_lost_node_starts_on_another(policy: str) -> None:
    world = World(job_object(count=2, syncer=sharded(), nodeLoss={"policy": policy, "afterSeconds": 30}), seed=1)
    world.nodes = dict.fromkeys([*world.nodes, "node-3", "node-4"], True)
    world.node_since = dict.fromkeys(world.nodes, world.now)
    world.until(World.whole, 120)
    others = {p.obj["spec"]["nodeName"] for p in world.pods.values() if p.role != "shard"}
    victim = shard(world, 0)
    victim.obj["spec"]["nodeName"] = node = next(n for n in world.nodes if n not in others)
    world.lose(node)
    world.until(lambda w: w.condition("SyncerReady").get("reason") == "NodeLost")
    assert (
        victim.name in world.condition("SyncerReady")["message"] and node in world.condition("SyncerReady")["message"]
    )
    world.until(World.whole, 120)
    assert shard(world, 0).uid != victim.uid and world.told("SyncerNodeLost") == 1
    world.run(120)
    assert (victim.uid in world.pods) == (policy == "Wait")
    assert world.told("PodForceDeleted") == (policy == "ForceDelete")
    assert world.truth("SyncerReady") == "True" and world.syncer.epoch == 1


@pytest.mark.parametrize("edited", [{"shards": 4}, {"shards": 1, "shardPods": None}, {"shardPods": None}])
def test_the_number_of_shards_changes_while_the_job_trains(edited: dict[str, Any]) -> None:
    world = started(2, syncer=sharded(3))
    learners = {p.uid for p in world.of("learner")}
    world.edit(syncer=sharded(**({"shards": 3} | edited)))
    world.until(lambda w: w.syncer.epoch == 2 and w.whole())
    count = edited.get("shards", 3) if "shardPods" not in edited else 0
    assert deployments(world) == ["job-syncer", *(f"job-syncer-shard-{n}" for n in range(count))]
    left = [ref for ref in world.objects if "-syncer-shard" in ref.name]
    assert len(left) == (2 * count + 2 if count else 0)
    world.until(lambda w: len(w.of("shard")) == count)
    assert {p.uid for p in world.of("learner")} == learners
    idle(world)


@pytest.mark.promise("A syncer and its shards' pods change together, after the learners")
def test_a_syncer_and_its_shards_change_together() -> None:
    """With settings that the shards' changed pods would not share with their syncer's unchanged one, too."""
    world = started(3, syncer=sharded(3))
    before = {p.uid for p in (*world.of("syncer"), *world.of("shard"))}
    other = sharded(2, shardPods={"podTemplate": image("other-shard:1")})
    world.edit(learners=template("other:1"), syncer=other, sync={"every": 30})
    while any(p.image != "other:1" for p in world.of("learner")) or len(world.of("learner")) < 3:
        world.run(0.5)
        assert before <= world.pods.keys() and not any(world.pods[uid].terminating for uid in before)
        assert Ref("Service", "job-syncer-shard-2") in world.objects and world.syncer.epoch == 1
    world.until(lambda w: w.syncer.epoch == 2 and w.whole())
    assert not before & world.pods.keys()
    assert [shard(world, n).image for n in range(2)] == 2 * ["other-shard:1"] and len(world.of("shard")) == 2
    assert world.told("SyncerReplaced") == 1 and not world.status.get("replacements")


def test_shards_get_the_image_of_the_jobs_release() -> None:
    world = started(1, syncer=sharded())
    newer = world.settings.__class__(None, "diloco-system", "diloco-syncer:2", "diloco-worker:2", release="2")
    world.settings = newer
    world.run(60)
    assert shard(world, 0).image == "diloco-syncer:1" and world.syncer.epoch == 1
    world.edit(release="now")
    world.until(lambda w: w.whole() and w.syncer.epoch == 2)
    world.until(lambda w: len(w.of("shard")) == 2)
    assert {p.image for p in (*world.of("syncer"), *world.of("shard"))} == {"diloco-syncer:2"}


def test_a_foreign_service_of_a_shards_name_is_not_touched() -> None:
    world = World(job_object(count=1, syncer=sharded()))
    theirs = names.shard_service("job", 1)
    world.foreign[theirs] = {"metadata": {"name": theirs.name, "uid": "x", "labels": {}}, "spec": {}}
    world.run(60)
    assert world.truth("NameConflict") == "True" and theirs.name in world.condition("NameConflict")["message"]
