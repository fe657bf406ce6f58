"""What happens to a job in its life beside faults: it ends, fails, goes, comes again, grows and shrinks.

``LIFE_FAULTS`` has them by name, as faults.py has the others: a coroutine that is given the world, and ends when what
it does is over. Many are what a person does, who looks at the status and does what it says.
"""

from __future__ import annotations

from diloco_operator import names
from diloco_operator.model import Object
from operator_simulation.faults import Fault
from operator_simulation.kubernetes import now
from operator_simulation.world import NAMESPACE, World

MOST_LEARNERS = 6
FATAL = 77
"""The exit code for which the job's own rule says that it fails."""


def _regions(world: World) -> list[Object]:
    found: list[Object] = world.manifest["spec"]["regions"]
    return found


async def delete_the_job_and_apply_it_again(world: World) -> None:
    """Under its name, at once or later. Its volume stays, and the job goes on from it."""
    await world.delete_the_job()
    await world.sleep(world.rng.choice([0.0, 0.0, world.rng.uniform(1, 60)]))
    world.apply_the_job()


async def complete_the_job(world: World) -> None:
    """Some leave it so. Others delete it with its volume, and train again from the beginning."""
    world.note("the stop is reached")
    world.programs.reach_the_stop()
    await world.sleep(world.rng.uniform(5, 60))
    if world.rng.random() < 0.7:
        await begin_anew(world)


async def begin_anew(world: World) -> None:
    """A job that has reached its stop is deleted with its volume, and applied again."""
    if world.programs.store.phase != "complete":
        return
    await world.delete_the_job()
    hub = next(iter(world.clusters.values()))
    world.delete_an_object(hub, "PersistentVolumeClaim")
    going = {claim["metadata"]["uid"] for claim in hub.server.all("PersistentVolumeClaim")}
    while any(claim["metadata"]["uid"] in going for claim in hub.server.all("PersistentVolumeClaim")):
        await world.sleep(1.0)
    world.apply_the_job()


async def fail_the_job(world: World) -> None:
    """A learner ends with a code that the job has a rule for. A person continues the job later."""
    learners = world.processes("learner")
    if learners:
        learner = world.rng.choice(learners)
        world.note(f"{learner.pod_name} ends with a fatal code")
        learner.ended, learner.last_line = FATAL, "it is out of range"
    await world.sleep(world.rng.uniform(10, 60))
    await continue_what_failed(world)


async def keep_crashing_a_learner(world: World) -> None:
    """Whenever it has started; with a quorum that needs it, the job may fail."""
    learners = world.processes("learner")
    if not learners:
        return
    place, end = world.rng.choice(learners).pod_name, now() + world.rng.uniform(20, 120)
    world.note(f"{place} crashes again and again")
    while now() < end:
        for learner in world.processes("learner"):
            if learner.pod_name == place:
                learner.ended, learner.last_line = 1, "the disk is on fire"
        await world.sleep(world.rng.choice([1.0, 5.0]))
    world.note(f"{place} crashes no more")
    await continue_what_failed(world)


async def continue_what_failed(world: World) -> None:
    """As the status says: suspend: true, and then false."""
    if any(world.condition("Failed", cluster).get("status") == "True" for cluster in world.clusters):
        world.edit(suspend=True)
        await world.sleep(world.rng.uniform(1, 40))
        world.edit(suspend=False)


async def label_the_claim(world: World) -> None:
    """As the status says of a claim whose labels a hand removed while there was no job."""
    for name, kubernetes in world.clusters.items():
        if "kubectl label pvc" in (said := str(world.condition("NameConflict", name).get("message"))):
            labels = dict(word.rstrip(".").split("=") for word in said.split() if "=" in word)
            world.note(f"a person labels the claim: {labels}")
            ref = names.claim(world.manifest["metadata"]["name"])
            kubernetes.server.patch(ref.kind, NAMESPACE, ref.name, {"metadata": {"labels": labels}}, "")


async def scale_a_region(world: World) -> None:
    """Its learners become more or fewer, and the quorum no more than there are."""
    regions = [dict(region) for region in _regions(world)]
    region = world.rng.choice(regions)
    region["learners"] = world.rng.randint(1, MOST_LEARNERS)
    count = sum(one["learners"] for one in regions)
    world.edit(regions=regions, sync={"quorum": min(count, world.manifest["spec"]["sync"]["quorum"])})


async def edit_the_quorum(world: World) -> None:
    count = sum(region["learners"] for region in _regions(world))
    world.edit(sync={"quorum": world.rng.randint(1, count)})


async def evict_a_pod_for_pressure(world: World) -> None:
    """The kubelet takes it, since its node has no memory or disk left."""
    found = [(k, pod) for k in world.clusters.values() for pod in k.pods() if pod["status"].get("phase") == "Running"]
    if found:
        kubernetes, pod = world.rng.choice(found)
        if kubernetes.nodes[pod["spec"]["nodeName"]].up:
            world.note(f"{pod['metadata']['name']} is evicted for pressure")
            kubernetes.evict_for_pressure(pod)


async def drain_a_node(world: World) -> None:
    """`kubectl drain`: no pod comes, and those that are there are evicted as the budgets allow. Later it is back."""
    kubernetes = world.rng.choice(list(world.clusters.values()))
    node = world.rng.choice(list(kubernetes.nodes.values()))
    node.cordoned = True
    world.note(f"{node.endpoint} is drained")
    end = now() + world.rng.uniform(20, 120)
    while now() < end:
        for pod in kubernetes.pods():
            if pod["spec"].get("nodeName") == node.name and not pod["metadata"].get("deletionTimestamp"):
                kubernetes.evict(pod)
        await world.sleep(5.0)
    node.cordoned = False
    world.note(f"{node.endpoint} takes pods again")


async def bind_no_claims(world: World) -> None:
    """No volume is made for a while, and the job's claim goes meanwhile, or not."""
    hub = next(iter(world.clusters.values()))
    hub.no_volumes_since = now()
    world.note("claims do not bind")
    if world.rng.random() < 0.5:
        world.delete_an_object(hub, "PersistentVolumeClaim")
        if not world.manifest["spec"].get("suspend"):
            world.delete_pods(world.pods("syncer"))
    await world.sleep(world.rng.uniform(20, 120))
    hub.no_volumes_since = None
    world.note("claims bind")


LIFE_FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        delete_the_job_and_apply_it_again,
        complete_the_job,
        fail_the_job,
        keep_crashing_a_learner,
        scale_a_region,
        edit_the_quorum,
        evict_a_pod_for_pressure,
        drain_a_node,
        bind_no_claims,
    )
}
