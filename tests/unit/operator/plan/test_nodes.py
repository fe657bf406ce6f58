"""The plan against a small cluster: lost nodes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from diloco_operator.job import rfc3339
from diloco_operator.model import Observed, PlanMemory
from operator_world import World, job_object, lost_learner


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


@pytest.mark.promise("A node gets its full `afterSeconds`, whatever the operator's clock shows")
@pytest.mark.parametrize("ahead", [1000.0, -1000.0], ids=["ahead", "behind"])
def test_a_node_has_its_time_whatever_the_operators_clock_says(ahead: float) -> None:
    """The time at which a node was lost is the API server's word, and the operator's clock is not the API server's."""
    world = World(job_object(nodeLoss={"policy": "ForceDelete", "afterSeconds": 150}), seed=3)
    world.until(World.whole, 120)
    victim = lost_learner(world)
    observed = world.observed
    lost_at = world.now

    def by_another_clock() -> Observed:
        world.node_since[victim.obj["spec"]["nodeName"]] = lost_at - ahead
        return observed()

    world.lose(victim.obj["spec"]["nodeName"])
    world.run(21)  # it is tainted
    world.observed = by_another_clock  # type: ignore[method-assign]
    world.run(119)
    assert victim.terminating and victim.uid in world.pods
    world.run(40)
    assert victim.uid not in world.pods


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


@pytest.mark.promise(
    "A node that the operator sees after its pod is not reported as lost, and an old Event about a quota "
    "explains no later gap"
)
@pytest.mark.parametrize("seen", ["not yet", "not ready"])
@pytest.mark.parametrize("role", ["learner", "syncer"])
def test_a_node_that_is_seen_after_its_pod_is_not_lost(role: str, seen: str) -> None:
    """Pods and nodes come by two watches. A new node was made minutes ago, and was not ready then."""
    world = World(job_object(), seed=3)
    world.until(World.whole, 120)
    pod, observed = world.of(role)[0], world.observed
    node = pod.obj["spec"]["nodeName"]

    def behind() -> Observed:
        found = observed()
        nodes = {name: known for name, known in (found.nodes or {}).items() if name != node or seen == "not ready"}
        if seen == "not ready":
            since = rfc3339(world.now - 100)
            unready = {"type": "Ready", "status": "False", "lastTransitionTime": since}
            nodes[node] = {"metadata": {"name": node}, "status": {"conditions": [unready]}}
        return dataclasses.replace(found, nodes=nodes)

    world.observed = behind  # type: ignore[method-assign]
    for _ in range(5):
        world.turn()
        world.run(0.5)
    assert not world.region()["cause"] and world.truth("SyncerReady") == "True", world.story()
    world.observed = observed  # type: ignore[method-assign]
    world.run(30)
    assert not world.told("NodeLost") and not world.told("SyncerNodeLost"), world.story()


def test_an_operator_that_starts_goes_on_with_the_lost_nodes_of_the_status() -> None:
    world = World(job_object(), seed=3)
    world.until(World.whole, 120)
    victim = lost_learner(world)
    world.lose(victim.obj["spec"]["nodeName"])
    world.until(lambda w: w.told("NodeLost") > 0, 40)
    told = world.told("NodeLost")
    world.memory = PlanMemory()
    for _ in range(40):
        world.turn()
        assert "has been lost since" in world.region()["cause"] and world.truth("Degraded") == "True"
        world.run(0.5)
    assert world.told("NodeLost") == told


def test_one_that_is_stuck_does_not_keep_others_from_being_replaced() -> None:
    """Under Wait the region has a pod on its way out for as long as the node is lost."""
    world = World(job_object(count=6, nodeLoss={"policy": "Wait", "afterSeconds": 10}), seed=3)
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
    world.until(lambda w: w.status["learners"] == f"{w.active()}/6" and w.active() >= 1, 60)
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
    volumes = [{"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": {"accessModes": ["ReadWriteOnce"]}}}}]
    world = World(job_object(learners={"podTemplate": {"spec": {"volumes": volumes}}}, **spread()), seed=3)
    world.until(World.whole, 120)
    victim = lost_learner(world)
    world.lose(victim.obj["spec"]["nodeName"])
    world.run(120)
    assert victim.uid in world.pods and "scratch" in world.region()["cause"]


def test_the_budget_of_force_deletions() -> None:
    from diloco_operator.plan.pods import node_loss

    world = World(job_object(count=16, **spread()), seed=1)
    world.until(World.whole, 120)
    for node in list(world.nodes)[1:]:
        world.lose(node)
    world.run(100)
    forced = [d for p in world.plans for d in p.deletes if d.force]
    assert len(forced) <= node_loss.BUDGET
    world.run(400)
    assert len([d for p in world.plans for d in p.deletes if d.force]) > node_loss.BUDGET
