"""Worlds with random faults: what tests/unit/operator/test_simulation.py and tests/worlds.py run.

| setting | has |
|---|---|
| FAULTS | what fails, and what people edit |
| LIVES | that, and jobs that end, fail, are scaled, go and come again, with any quorum; operators' clocks differ |
| GROUPS | that, with learners of one to three pods: they lose one, are cut in two, or wait for one |
| SHARDED | as LIVES, with a store in a bucket; shards of the syncer have pods, which go, crash, become more or fewer |
"""

from __future__ import annotations

import asyncio
import random

from diloco_operator.model import Object
from operator_simulation.faults import FAULTS
from operator_simulation.group_faults import GROUP_FAULTS
from operator_simulation.kubernetes import now
from operator_simulation.life_faults import FATAL, LIFE_FAULTS, continue_what_failed, label_the_claim
from operator_simulation.shard_faults import SHARD_FAULTS
from operator_simulation.world import World, simulate
from operator_world import SPREAD, job_object

SETTINGS: dict[str, dict[str, int]] = {
    "FAULTS": {"faults": 12},
    "LIVES": {"faults": 12, "lives": 1},
    "GROUPS": {"faults": 12, "lives": 1, "pods": 3},
    "SHARDED": {"faults": 12, "lives": 1, "shards": 4},
}


def make_world(seed: int, lives: bool, pods: int = 1, shards: int = 1) -> World:
    """One cluster with a few learners, or two with a region each. ``pods``: of a learner at most; ``shards``: of the
    syncer at most, each with a pod where it may have several."""
    rng = random.Random(seed)
    if rng.random() < 0.5:
        count = rng.randint(2, 5)
        spec = _draw_spec(rng, count) if lives else {}
        job, clusters = _with_pods(rng, job_object(count=count, **spec), pods), ("hub",)
        return World(_with_shards(rng, job, shards), clusters, nodes=4, seed=seed)
    spec = _draw_spec(rng, 3) if lives else {}
    job = _with_pods(rng, job_object(**SPREAD, **spec), pods)
    return World(_with_shards(rng, job, shards), ("hub", "far"), nodes=3, seed=seed)


def _with_pods(rng: random.Random, job: Object, most: int) -> Object:
    """The job with learners of several pods, in some region or in all."""
    if most > 1:
        regions = [{**region, "pods": rng.randint(1, most)} for region in job["spec"]["regions"]]
        rng.choice(regions)["pods"] = rng.randint(2, most)
        job["spec"] |= {"regions": regions}
        job["spec"]["training"] |= {"batch": {"sequences": 12}}
    return job


def _with_shards(rng: random.Random, job: Object, most: int) -> Object:
    """The job with a pod for each shard of its syncer."""
    if most > 1:
        given = {"shards": rng.randint(2, most), "shardPods": {}, "storage": {"uri": "s3://bucket/job"}}
        job["spec"] |= {"syncer": {**job["spec"].get("syncer", {}), **given}}
    return job


def _draw_spec(rng: random.Random, learners: int) -> dict[str, object]:
    """What of a job decides how it lives."""
    policy = {"maxReplacements": rng.choice([2, 50]), "rules": [{"exitCodes": [FATAL], "action": "Fail"}]}
    return {
        "sync": {"quorum": rng.randint(1, learners)},
        "failurePolicy": policy,
        "nodeLoss": rng.choice([{"policy": "Wait"}, {"policy": "ForceDelete", "afterSeconds": 30}]),
        "suspendPolicy": rng.choice(["WhenSaved", "WhenSaved", "Anyway"]),
    }


def is_held(world: World) -> bool:
    """Whether the job waits for a person, since its volume was deleted while it was suspended."""
    return world.condition("Stalled").get("reason") == "StoreLost"


def is_told_of_the_loss(world: World) -> bool:
    """An operator that was away cannot know how many merges were lost, and says that the volume is another."""
    lost = world.condition("Durable").get("reason") == "StoreLost"
    return lost or world.events["StoreLost"] > 0 or world.events["VolumeReplaced"] > 0


def is_well(world: World) -> bool:
    """Whether every learner takes part, and none that was not asked for, and the syncer has the quorum that was asked
    for; or the job has reached its stop, and has no learner any more."""
    if world.completed and not world.pods("learner"):
        return all(world.status(name).get("phase") == "Complete" for name in world.clusters)
    syncer, asked = world.programs.syncer, world.manifest["spec"].get("sync")
    as_asked = syncer is not None and (not asked or syncer.job["spec"]["sync"]["quorum"] == asked["quorum"])
    counted = world.counts_learners() and len(world.pods("learner")) == world.wanted_pods()
    return world.whole() and as_asked and counted and has_its_shards(world)


def has_its_shards(world: World) -> bool:
    """Whether the syncer hears the shards that were asked for, and there is no other pod of one."""
    asked, syncer = world.manifest["spec"].get("syncer") or {}, world.programs.syncer
    count = asked["shards"] if asked.get("shardPods") is not None else 0
    objects = [o for o in world.clusters["hub"].server.all("Deployment") if "-syncer-shard-" in o["metadata"]["name"]]
    known = syncer is not None and (not count or syncer.job["spec"]["syncer"]["shards"] == count)
    there = syncer is not None and world.programs.hears_shards(syncer)
    return known and there and len(world.pods("shard")) == len(objects) == count


async def break_and_heal(world: World, faults: int, lives: bool, groups: bool = False, sharded: bool = False) -> None:
    """Random faults, some at once; then all is well again, and stays so."""
    kinds = [*FAULTS.values(), *(2 * [*LIFE_FAULTS.values()] if lives else [])]
    kinds += 4 * [*GROUP_FAULTS.values()] if groups else []
    kinds += 4 * [*SHARD_FAULTS.values()] if sharded else []
    world.clocks_differ = lives
    for cluster in world.clusters:
        world.start_operator(cluster)
    await world.until(World.whole, 240)
    under_way: set[asyncio.Task[None]] = set()
    for _ in range(faults):
        fault = world.rng.choice(kinds)
        under_way.add(asyncio.create_task(fault(world)))
        await world.run(world.rng.choice([1.0, 10.0, 60.0]))
    latest = now() + 1200.0
    while any(not task.done() for task in under_way):
        assert now() < latest, f"a person waits in vain\n{world.story()}"
        await world.run(5.0)
    for task in under_way:
        task.result()
    world.note("no fault lasts any more")
    world.upgrade_job()  # or an edit after an upgrade waits for the user's word
    await world.run(30)
    if lives:
        await label_the_claim(world)
        healing = asyncio.create_task(continue_what_failed(world))
        while not healing.done():
            await world.run(5.0)
    await world.until(lambda w: is_well(w) or w.programs.lost or is_held(w), 900)
    if world.programs.lost or is_held(world):  # a claim went with the last learner
        await world.until(is_told_of_the_loss, 120)
        return
    await world.run(300 if groups else 60)  # until a rollout is over, of learners that take long to come together
    before, rest = [(one, one.turns, one.api.writes) for one in world.operators], 100 if lives else 300
    await world.run(rest)
    assert is_well(world), world.story()
    for operator, turns, writes in before:
        turns, writes = operator.turns - turns, operator.api.writes - writes
        assert turns < rest and writes <= rest / 10, f"{operator.name}: {turns} turns, {writes} writes\n{world.story()}"


def run_random_faults(
    seed: int, trace: list[str] | None = None, *, faults: int = 12, lives: int = 0, pods: int = 1, shards: int = 1
) -> World:
    """The world of this seed, with so many faults. ``trace``: gets a line for what happens."""

    def make() -> World:
        world = make_world(seed, lives > 0, pods, shards)
        world.log = world.log if trace is None else trace
        return world

    return simulate(make, lambda world: break_and_heal(world, faults, lives > 0, pods > 1, sharded=shards > 1))
