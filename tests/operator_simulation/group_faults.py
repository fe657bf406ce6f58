"""What happens to learners of several pods: one pod of a learner is lost, they are cut in two, half of one waits.

``GROUP_FAULTS`` has them by name, as faults.py has the others.
"""

from __future__ import annotations

from operator_simulation.faults import Fault
from operator_simulation.kubernetes import Process
from operator_simulation.world import World


def _some_group(world: World) -> tuple[Process, ...]:
    """The processes of a learner that are together; empty: there is no such learner."""
    groups = [p.group for p in world.processes("learner") if p.group and p.rank == 0]
    return world.rng.choice(groups) if groups else ()


def _pod_of(world: World, process: Process) -> list[dict[str, object]]:
    return [pod for pod in world.pods("learner") if pod["metadata"]["uid"] == process.pod_uid]


async def delete_a_pod_of_a_learner(world: World) -> None:
    group = _some_group(world)
    if group:
        world.delete_pods(_pod_of(world, world.rng.choice(group)), world.rng.choice([None, 0]))


async def crash_a_process_of_a_learner(world: World) -> None:
    group = _some_group(world)
    if group:
        one = world.rng.choice(group)
        world.note(f"{one.pod_name} crashes, of learner {one.place}")
        one.ended, one.last_line = 1, "out of memory"


async def cut_a_learner_in_two(world: World) -> None:
    """Two of its nodes do not reach each other. Both reach the API server, and the syncer."""
    nodes = {process.node.endpoint for process in _some_group(world)}
    if len(nodes) < 2:
        return
    one, other = world.rng.sample(sorted(nodes), 2)
    world.note(f"{one} and {other} are cut off from each other")
    with world.cut(lambda e: e == one, lambda e: e == other):
        await world.sleep(world.rng.choice([world.rng.uniform(5, 50), world.rng.uniform(60, 200)]))
    world.note(f"{one} and {other} reach each other")


async def hold_half_a_learner_back(world: World) -> None:
    """A pod of it goes, and no node takes pods for a while."""
    group = _some_group(world)
    if not group:
        return
    one = world.rng.choice(group)
    nodes = world.clusters[one.node.cluster].nodes.values()
    world.note(f"no node of {one.node.cluster} takes pods")
    for node in nodes:
        node.cordoned = True
    world.delete_pods(_pod_of(world, one), world.rng.choice([None, 0]))
    await world.sleep(world.rng.uniform(20, 240))
    for node in nodes:
        node.cordoned = False
    world.note(f"nodes of {one.node.cluster} take pods")


async def have_room_for_half_a_learner(world: World) -> None:
    """A quota lets only some pods of it be made again."""
    group = _some_group(world)
    if not group:
        return
    kubernetes = world.clusters[group[0].node.cluster]
    kubernetes.quota = len(kubernetes.pods()) - world.rng.randint(1, len(group) - 1)
    world.note(f"a quota of {kubernetes.quota} pods in {kubernetes.name}")
    world.delete_pods(_pod_of(world, world.rng.choice(group)))
    await world.sleep(world.rng.uniform(20, 240))
    kubernetes.quota = None
    world.note(f"no quota in {kubernetes.name}")


GROUP_FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        delete_a_pod_of_a_learner,
        crash_a_process_of_a_learner,
        cut_a_learner_in_two,
        hold_half_a_learner_back,
        have_room_for_half_a_learner,
    )
}
