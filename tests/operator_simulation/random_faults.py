"""Worlds with random faults: what tests/unit/operator/test_simulation.py and tests/worlds.py run."""

from __future__ import annotations

import asyncio
import random

from operator_simulation.faults import FAULTS
from operator_simulation.world import World, simulate
from operator_world import SPREAD, job_object

SETTINGS: dict[str, dict[str, int]] = {"FAULTS": {"faults": 12}}


def make_world(seed: int) -> World:
    """One cluster with a few learners, or two with a region each."""
    rng = random.Random(seed)
    if rng.random() < 0.5:
        return World(job_object(count=rng.randint(2, 5)), nodes=4, seed=seed)
    return World(job_object(**SPREAD), ("hub", "far"), nodes=3, seed=seed)


def is_held(world: World) -> bool:
    """Whether the job waits for a person, since its volume was deleted while it was suspended."""
    return world.condition("Stalled").get("reason") == "StoreLost"


def is_told_of_the_loss(world: World) -> bool:
    """An operator that was away cannot know how many merges were lost, and says that the volume is another."""
    lost = world.condition("Durable").get("reason") == "StoreLost"
    return lost or world.events["StoreLost"] > 0 or world.events["VolumeReplaced"] > 0


async def break_and_heal(world: World, faults: int) -> None:
    """Random faults, some at once; then all is well again, and stays so."""
    for cluster in world.clusters:
        world.start_operator(cluster)
    await world.until(World.whole, 240)
    under_way: set[asyncio.Task[None]] = set()
    for _ in range(faults):
        fault = world.rng.choice(list(FAULTS.values()))
        under_way.add(asyncio.create_task(fault(world)))
        await world.run(world.rng.choice([1.0, 10.0, 60.0]))
    while any(not task.done() for task in under_way):
        await world.run(5.0)
    for task in under_way:
        task.result()
    world.note("no fault lasts any more")
    world.upgrade_job()  # or an edit after an upgrade waits for the user's word
    await world.run(30)
    await world.until(lambda w: w.whole() or w.programs.lost or is_held(w), 900)
    if world.programs.lost or is_held(world):  # a claim went with the last learner
        await world.until(is_told_of_the_loss, 120)
        return
    await world.run(60)
    before = [(operator, operator.turns, operator.api.writes) for operator in world.operators]
    await world.run(300)
    assert world.whole(), world.story()
    for operator, turns, writes in before:
        assert operator.turns - turns < 300 and operator.api.writes - writes <= 30, world.story()


def run_random_faults(seed: int, trace: list[str] | None = None, *, faults: int = 12) -> World:
    """The world of this seed, with so many faults. ``trace``: gets a line for what happens."""

    def make() -> World:
        world = make_world(seed)
        world.log = world.log if trace is None else trace
        return world

    return simulate(make, lambda world: break_and_heal(world, faults))
