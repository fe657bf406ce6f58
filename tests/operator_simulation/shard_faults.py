"""What happens to shards of the syncer that have pods of their own, as faults.py has the other faults."""

from __future__ import annotations

from operator_simulation.faults import Fault
from operator_simulation.kubernetes import now
from operator_simulation.world import World


async def delete_a_shards_pod(world: World) -> None:
    if pods := world.pods("shard"):
        world.delete_pods([world.rng.choice(pods)], world.rng.choice([None, 0]))


async def keep_crashing_a_shard(world: World) -> None:
    """Whenever it has started, for a while."""
    number, end = world.rng.randrange(4), now() + world.rng.uniform(1, 60)
    world.note(f"shard {number} crashes")
    while now() < end:
        for shard in world.processes("shard"):
            if shard.ordinal == number:
                shard.ended, shard.last_line = 1, "the disk is on fire"
        await world.sleep(world.rng.choice([1.0, 5.0]))


async def cut_the_syncers_node_off_from_shards(world: World) -> None:
    """Its other connections hold."""
    syncer, shards = world.programs.syncer, world.processes("shard")
    if syncer is None or not shards:
        return
    mine, theirs = syncer.node.endpoint, world.rng.choice(shards).node.endpoint
    if mine == theirs:
        return
    world.note(f"no bytes pass between {mine} and {theirs}")
    with world.cut(lambda end: end == mine, lambda end: end == theirs):
        await world.sleep(world.rng.uniform(5, 60))


async def change_the_number_of_shards(world: World) -> None:
    """One is a syncer without shards."""
    count = world.rng.randint(1, 4)
    world.edit(syncer={"shards": count, "shardPods": {} if count > 1 else None})


async def edit_the_shards_template(world: World) -> None:
    if world.manifest["spec"]["syncer"].get("shardPods") is not None:
        container = {"name": "syncer", "env": [{"name": "TRIED", "value": str(world.rng.randrange(10**6))}]}
        world.edit(syncer={"shardPods": {"podTemplate": {"spec": {"containers": [container]}}}})


SHARD_FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        delete_a_shards_pod,
        keep_crashing_a_shard,
        cut_the_syncers_node_off_from_shards,
        change_the_number_of_shards,
        edit_the_shards_template,
    )
}
