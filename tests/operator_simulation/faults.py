"""What fails in a random world: each fault begins, lasts, and ends; ``heal`` ends what still lasts.

``FAULTS`` has them by name. A fault is a coroutine that is given the world and ends when the fault does. What a person
does (an edit, a deletion) is among them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from diloco_operator.kube.kinds import CHILDREN, JOB, NODE, POD, STATEFUL_SET
from diloco_protocol.vocabulary import LABEL_JOB
from operator_simulation.kubernetes import Node, Process, now
from operator_simulation.world import NAMESPACE, SimulatedOperator, World

WEBHOOK = (
    'Internal error occurred: failed calling webhook "check.example.com": failed to call webhook: no route to host'
)
REFUSALS = [(409, "the object has been modified"), (410, "gone"), (429, "too many requests"), (500, WEBHOOK)]
"""How the writes of a kind are answered while something in the cluster is wrong."""
Fault = Callable[[World], Awaitable[None]]


def _some_learner(world: World) -> Process | None:
    learners = world.processes("learner")
    return world.rng.choice(learners) if learners else None


async def _some_operator(world: World) -> SimulatedOperator:
    """While the only one is being restarted there is none: then it is waited for."""
    while not world.operators:
        await world.sleep(1.0)
    return world.rng.choice(world.operators)


def _some_node(world: World) -> Node:
    kubernetes = world.rng.choice(list(world.clusters.values()))
    return world.rng.choice(list(kubernetes.nodes.values()))


async def delete_a_pod(world: World) -> None:
    pods = world.pods("learner") + world.pods("syncer")
    if pods:
        world.delete_pods([world.rng.choice(pods)], world.rng.choice([None, 0]))


async def delete_a_regions_pods(world: World) -> None:
    learner = _some_learner(world)
    if learner is not None:
        world.delete_pods(world.pods("learner", learner.region))


async def crash_a_learner(world: World) -> None:
    learner = _some_learner(world)
    if learner is not None:
        world.note(f"{learner.pod_name} crashes")
        learner.ended, learner.last_line = 1, "the disk is on fire"


async def crash_the_syncer(world: World) -> None:
    if world.programs.syncer is not None and world.programs.syncer.alive:
        world.note("the syncer crashes")
        world.programs.syncer.ended = 1


async def hang_a_learner(world: World) -> None:
    """It runs and is heard no more, by its own fault: somebody has to replace it."""
    learner, hub = _some_learner(world), next(iter(world.clusters))
    # Elsewhere nobody but the learner itself can notice.
    if learner is not None and learner.ready and learner.told_to_end is None and learner.node.cluster == hub:
        world.note(f"{learner.pod_name} hangs")
        learner.hung = True


async def cut_the_syncers_node_off_from_others(world: World) -> None:
    syncer = world.programs.syncer
    if syncer is None:
        return
    mine, kept = syncer.node.endpoint, {operator.node.endpoint for operator in world.operators}
    if world.rng.random() < 0.3:
        kept = set()
    world.note(f"{mine} is cut off from the other nodes")
    with world.cut(lambda e: e == mine, lambda e: "/n" in e and e != mine and e not in kept):
        await world.sleep(world.rng.uniform(5, 150))
    world.note(f"{mine} is heard again")


async def cut_two_clusters(world: World) -> None:
    if len(world.clusters) < 2:
        return
    one, other = world.rng.sample(sorted(world.clusters), 2)
    world.note(f"{one} and {other} are cut off from each other")
    with world.cut(lambda e: e.startswith(f"{one}/"), lambda e: e.startswith(f"{other}/")):
        await world.sleep(world.rng.uniform(5, 200))
    world.note(f"{one} and {other} reach each other")


async def cut_a_node_off(world: World) -> None:
    """A node that nobody reaches, and that runs on."""
    node = _some_node(world)
    world.note(f"{node.endpoint} is cut off")
    with world.cut(lambda e: e == node.endpoint, lambda e: e != node.endpoint):
        await world.sleep(world.rng.uniform(10, 240))
    world.note(f"{node.endpoint} is back")


async def power_a_node_off(world: World) -> None:
    node = _some_node(world)
    kubernetes = world.clusters[node.cluster]
    if not node.up:
        return
    world.note(f"{node.endpoint} loses power")
    kubernetes.power_off(node)
    await world.sleep(world.rng.uniform(10, 240))
    world.note(f"{node.endpoint} has power")
    kubernetes.power_on(node)


async def lose_a_cluster(world: World) -> None:
    """All of it: its machines have no power, and nobody reaches its API server."""
    kubernetes = world.rng.choice(list(world.clusters.values()))
    nodes = [node for node in kubernetes.nodes.values() if node.up]
    world.note(f"{kubernetes.name} is lost")
    for node in nodes:
        kubernetes.power_off(node)
    with world.cut(lambda e: e == kubernetes.api, lambda e: e != kubernetes.api):
        await world.sleep(world.rng.uniform(10, 200))
    world.note(f"{kubernetes.name} is back")
    for node in nodes:
        kubernetes.power_on(node)


async def stall_a_watch(world: World) -> None:
    operator = await _some_operator(world)
    kind = world.rng.choice([POD, POD, STATEFUL_SET, JOB, NODE])
    seconds = world.rng.uniform(5, 120)
    world.note(f"{operator.name} hears nothing of {kind.plural} for {seconds:.0f} s")
    operator.stall(kind, seconds)


async def lose_answers(world: World) -> None:
    operator = await _some_operator(world)
    operator.api.loss = 0.3
    await world.sleep(world.rng.uniform(20, 90))
    operator.api.loss = 0.0


async def cut_an_api_server_off(world: World) -> None:
    cluster = world.rng.choice(sorted(world.clusters))
    world.note(f"nobody reaches the API server of {cluster}")
    with world.cut(lambda e: e == f"{cluster}/api", lambda e: e != f"{cluster}/api"):
        await world.sleep(world.rng.uniform(5, 60))
    world.note(f"the API server of {cluster} answers")


async def restart_an_operator(world: World) -> None:
    await world.restart_operator(await _some_operator(world))


async def upgrade_an_operator(world: World) -> None:
    """Each cluster has its own operator, and may have another release than others."""
    await world.upgrade_operator(await _some_operator(world), f"2.{int(now())}")


async def upgrade_an_operator_then_edit_and_upgrade_the_job(world: World) -> None:
    await upgrade_an_operator(world)
    await world.sleep(world.rng.uniform(0, 30))
    await world.rng.choice([edit_a_setting, edit_a_template])(world)
    await world.sleep(world.rng.uniform(0, 30))
    world.upgrade_job()


async def start_another_operator_beside_one(world: World) -> None:
    """Two that both reach everything, as while a Deployment's pod moves from a node that was thought lost."""
    operator = await _some_operator(world)
    other = world.start_operator(operator.kubernetes.name, world.rng.choice(list(operator.kubernetes.nodes)))
    await world.sleep(world.rng.uniform(20, 90))
    await world.stop_operator(other)


async def cut_an_operator_off_and_start_another(world: World) -> None:
    """The first reaches the pods and not the API server, and goes on by what it knew."""
    operator = await _some_operator(world)
    kubernetes, node = operator.kubernetes, operator.node
    world.note(f"{operator.name} does not reach the API server, and has a successor")
    with world.cut(lambda e: e == node.endpoint, lambda e: e == kubernetes.api):
        world.start_operator(kubernetes.name, world.rng.choice([n for n in kubernetes.nodes if n != node.name]))
        await world.sleep(world.rng.uniform(30, 150))
        await world.stop_operator(operator)


async def stop_an_operator_for_a_while(world: World) -> None:
    """Its process stands still, with whatever it is at, while a standby is there."""
    operator = await _some_operator(world)
    other = world.start_operator(operator.kubernetes.name, world.rng.choice(list(operator.kubernetes.nodes)))
    await world.sleep(world.rng.uniform(0, 20))
    operator.stands_still_until = now() + world.rng.uniform(1, 60)
    world.note(f"{operator.name} stands still until {operator.stands_still_until:.0f}")
    await world.sleep(world.rng.uniform(30, 90))
    await world.stop_operator(other)


async def slow_an_api_server_down(world: World) -> None:
    """Requests of one operator take up to some seconds."""
    operator = await _some_operator(world)
    operator.api.slow = world.rng.uniform(1, 6)
    world.note(f"requests of {operator.name} take up to {operator.api.slow:.1f} s")
    await world.sleep(world.rng.uniform(20, 60))
    operator.api.slow = 0.05


async def refuse_what_was_deleted(world: World) -> None:
    """A person deletes objects of the job, and the namespace's quota lets none of their kinds be made again."""
    kubernetes = world.rng.choice(list(world.clusters.values()))
    kinds = world.rng.sample(["Service", "ConfigMap", "StatefulSet", "Secret", "PodDisruptionBudget"], 2)
    kubernetes.server.full |= frozenset(kinds)
    world.note(f"the quota of {kubernetes.name} is used up for {kinds}")
    for kind in kinds:
        world.delete_an_object(kubernetes, kind)
    await world.sleep(world.rng.uniform(5, 60))
    kubernetes.server.full -= frozenset(kinds)
    world.note(f"the quota of {kubernetes.name} is raised for {kinds}")


async def refuse_a_kinds_writes(world: World) -> None:
    """Somebody's webhook for one kind is down, or refuses for a while in one way or another."""
    kubernetes = world.rng.choice(list(world.clusters.values()))
    kind = world.rng.choice([*(kind.name for kind in CHILDREN), "Secret", "Event", JOB.name])
    answer = world.rng.choice(REFUSALS)
    kubernetes.server.refusing[kind] = answer
    world.note(f"writes of {kind} are answered with {answer} in {kubernetes.name}")
    if kind not in (JOB.name, "PersistentVolumeClaim"):
        world.delete_an_object(kubernetes, kind)
    await world.sleep(world.rng.uniform(10, 90))
    kubernetes.server.refusing.pop(kind, None)
    world.note(f"writes of {kind} are taken again in {kubernetes.name}")


async def refuse_pods(world: World) -> None:
    kubernetes = world.rng.choice(list(world.clusters.values()))
    kubernetes.quota = max(1, len(kubernetes.pods()) - 1)
    world.note(f"a quota of {kubernetes.quota} pods in {kubernetes.name}")
    await world.sleep(world.rng.uniform(10, 90))
    kubernetes.quota = None


async def edit_a_setting(world: World) -> None:
    world.edit(ttlSecondsAfterFinished=world.rng.randrange(100, 10_000))


async def edit_a_template(world: World) -> None:
    value = str(world.rng.randrange(10**6))
    container = {"name": "learner", "env": [{"name": "TRIED", "value": value}]}
    world.edit(learners={"podTemplate": {"spec": {"containers": [container]}}})


async def scale_by_hand(world: World) -> None:
    """Whoever saves costs at night, "restarts the syncer", or edits a number."""
    kubernetes = world.rng.choice(list(world.clusters.values()))
    replicas = world.rng.choice([0, 0, 1, 7])
    world.edit_an_object(kubernetes, ["StatefulSet", "Deployment"], {"spec": {"replicas": replicas}})


async def scale_everything_to_nothing(world: World) -> None:
    kubernetes = world.rng.choice(list(world.clusters.values()))
    for kind in ("Deployment", "StatefulSet"):
        for obj in kubernetes.server.all(kind):
            kubernetes.server.patch(kind, NAMESPACE, obj["metadata"]["name"], {"spec": {"replicas": 0}}, "")
    world.note(f"a person scales everything in {kubernetes.name} to 0")


async def edit_labels_or_owners(world: World) -> None:
    """By hand, or by a program that restores a backup."""
    kubernetes = world.rng.choice(list(world.clusters.values()))
    metadata = world.rng.choice([{"labels": {LABEL_JOB: None}}, {"ownerReferences": None}, {"labels": None}])
    world.edit_an_object(kubernetes, [kind.name for kind in CHILDREN], {"metadata": metadata})


async def delete_the_claim(world: World) -> None:
    """The claim stays while the syncer's pod has it. A person then follows the status: the pod goes, and the store is
    made anew from learners."""
    hub = next(iter(world.clusters.values()))
    world.delete_an_object(hub, "PersistentVolumeClaim")
    await world.sleep(world.rng.uniform(5, 60))
    job = world.job()
    if job is not None and not job["spec"].get("suspend"):
        world.delete_pods(world.pods("syncer"))


async def suspend_and_resume(world: World) -> None:
    world.edit(suspend=True)
    await world.sleep(world.rng.uniform(5, 90))
    world.edit(suspend=False)


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        delete_a_pod,
        delete_a_regions_pods,
        crash_a_learner,
        crash_the_syncer,
        hang_a_learner,
        cut_the_syncers_node_off_from_others,
        cut_two_clusters,
        cut_a_node_off,
        power_a_node_off,
        lose_a_cluster,
        stall_a_watch,
        lose_answers,
        cut_an_api_server_off,
        restart_an_operator,
        upgrade_an_operator,
        upgrade_an_operator_then_edit_and_upgrade_the_job,
        stop_an_operator_for_a_while,
        slow_an_api_server_down,
        refuse_what_was_deleted,
        refuse_a_kinds_writes,
        start_another_operator_beside_one,
        cut_an_operator_off_and_start_another,
        refuse_pods,
        edit_a_setting,
        edit_a_template,
        scale_by_hand,
        scale_everything_to_nothing,
        edit_labels_or_owners,
        delete_the_claim,
        suspend_and_resume,
    )
}
