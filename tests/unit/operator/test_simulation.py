"""The operator in simulated clusters: what must always be true, whatever fails (tests/operator_simulation)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from diloco_operator import names
from diloco_operator.kube.kinds import CHILDREN, JOB, POD
from diloco_operator.leadership.election import Election
from diloco_operator.objects import manifests
from diloco_operator.plan import desired, lifecycle, planning
from diloco_operator.plan.pods import replacement, silence
from diloco_operator.plan.view import View
from diloco_operator.reconcile import apply, reconciler
from diloco_protocol.vocabulary import LABEL_JOB
from operator_simulation.faults import REFUSALS, scale_everything_to_nothing
from operator_simulation.kubernetes import now
from operator_simulation.random_faults import run_random_faults
from operator_simulation.world import SimulatedOperator, World, simulate
from operator_world import SPREAD, job_object

IN_CI = [pytest.mark.slow]
BUDGET = "PodDisruptionBudget"
OTHER_KINDS = [kind.name for kind in CHILDREN if kind.name != BUDGET]
Scenario = Callable[[World], Awaitable[None]]
Patch = pytest.MonkeyPatch


def spread_job(**spec: Any) -> dict[str, Any]:
    return job_object(**{**SPREAD, **spec})


# ------------------------------------------------------------------ what it costs


@pytest.mark.promise(
    "At rest, and in an hour in which a learner crashes after each start, turns and writes are bounded"
)
def test_a_job_starts_trains_and_comes_to_rest() -> None:
    async def scenario(world: World) -> None:
        operator = world.start_operator()
        await world.until(World.whole, 120)
        await world.run(120)
        turns, writes = operator.turns, operator.api.writes
        await world.run(600)
        assert world.programs.store.merges > 500
        assert not world.deletions
        assert operator.turns - turns < 600 and operator.api.writes - writes <= 12

    simulate(lambda: World(job_object()), scenario)


@pytest.mark.promise(
    "At rest, and in an hour in which a learner crashes after each start, turns and writes are bounded"
)
@pytest.mark.slow
def test_while_a_learner_never_comes_to_work_turns_and_writes_are_bounded() -> None:
    """A learner crashes whenever it has started, for an hour: a turn a second, and few writes."""

    async def scenario(world: World) -> None:
        operator = world.start_operator()
        await world.until(World.whole, 120)
        turns, writes = operator.turns, operator.api.writes
        for _ in range(600):
            for learner in world.processes("learner"):
                if learner.pod_name == "job-local-1":
                    learner.ended, learner.last_line = 1, "the disk is on fire"
            await world.run(6.0)
        assert operator.turns - turns < 4000 and operator.api.writes - writes < 1000
        assert world.deletions.total() <= 14 and set(world.deletions) == {"job-local-1"}

    simulate(lambda: World(job_object()), scenario)


# ------------------------------------------------------------------ what reviews found


async def cut_around_the_syncers_node(world: World) -> None:
    """Eight learners, most of which the syncer does not hear for 90 s, while the API server hears everybody."""
    operator = world.start_operator()
    await world.until(World.whole, 120)
    assert world.programs.syncer is not None
    kept = (world.programs.syncer.node.endpoint, operator.node.endpoint)
    with world.cut(lambda e: e == kept[0], lambda e: "/n" in e and e not in kept):
        await world.run(90)
    await world.until(World.whole, 120)
    assert not world.deletions


async def frozen_view_of_pods(world: World) -> None:
    """The watch of pods brings nothing for 90 s, and a learner is replaced meanwhile."""
    operator = world.start_operator()
    await world.until(World.whole, 120)
    operator.stall(POD, 90)
    world.delete_pods(world.pods("learner")[:1])
    await world.run(60)
    assert world.programs.active() == 3
    await world.until(World.whole, 120)


async def zombie_operator(world: World) -> None:
    """The operator's node loses the API server and not the pods; a successor starts, and pods are replaced."""
    zombie = world.start_operator(node="n0")
    await world.until(World.whole, 120)
    with world.cut(lambda e: e == zombie.node.endpoint, lambda e: e == zombie.kubernetes.api):
        world.start_operator(node="n1")
        world.delete_pods([pod for pod in world.pods("learner") if pod["spec"]["nodeName"] != "n0"])
        await world.run(30)
        world.edit(learners={"podTemplate": {"spec": {"containers": [{"name": "learner", "image": "other"}]}}})
        await world.run(150)
        assert not [line for line in world.log if f"{zombie.name} calls" in line or f"{zombie.name} deletes" in line]
    await world.until(World.whole, 300)


async def leaders_come_and_go(world: World) -> None:
    """Two operators; the leader is cut off, stands still, is killed and ends in good order, and learners are replaced
    all the while. After each, one of those that are left acts."""

    async def someone_acts() -> None:
        world.delete_pods([world.rng.choice(world.pods("learner"))], 0)
        world.edit(ttlSecondsAfterFinished=1000 + len(world.log))
        job = world.job()
        assert job is not None
        generation = job["metadata"]["generation"]
        await world.until(lambda w: w.status()["observedGeneration"] == generation, 60)
        await world.until(World.whole, 120)

    def leader() -> SimulatedOperator:
        return next(operator for operator in world.operators if operator.candidate.leads())

    world.start_operator(node="n0")
    await world.until(World.whole, 120)
    world.start_operator(node="n1")
    cut_off = leader().node.endpoint
    with world.cut(lambda e: e == cut_off, lambda e: e == "hub/api"):
        await someone_acts()
    first = leader()
    first.stands_still_until = now() + 40.0
    await someone_acts()
    assert leader() is not first
    await world.run(40)
    for in_good_order in (True, False):
        ended = leader()
        world.operators.remove(ended)
        await ended.stop(in_good_order)
        world.start_operator(node=ended.node.name)
        await someone_acts()
    await world.run(60)
    assert sum(operator.candidate.leads() for operator in world.operators) == 1


async def edit_after_an_upgrade(world: World) -> None:
    """`helm upgrade` to a release with other templates, an edit of ttlSecondsAfterFinished, then the user's word."""
    operator = world.start_operator()
    await world.until(World.whole, 120)
    started = {pod["metadata"]["uid"] for pod in world.pods("learner") + world.pods("syncer")}
    operator = await world.upgrade_operator(operator, "2")
    await world.run(30)
    world.edit(ttlSecondsAfterFinished=1000)
    await world.run(60)
    assert started == {pod["metadata"]["uid"] for pod in world.pods("learner") + world.pods("syncer")}
    assert world.whole()
    world.upgrade_job()
    await world.run(30)
    await world.until(lambda w: {p.image.rpartition(":")[2] for p in w.processes("learner")} == {"2"}, 300)
    await world.until(World.whole, 120)
    assert world.programs.syncer is not None and world.programs.syncer.image == "diloco-syncer:2"


async def quota_is_used_up_from_the_start(world: World) -> None:
    """Nothing of the job can be made for ten minutes; it is said, tried at a bounded rate, and then it starts."""
    server, kinds = world.clusters["hub"].server, ["ConfigMap", "PersistentVolumeClaim", "StatefulSet"]
    for first in range(len(kinds)):
        server.full = frozenset(kinds[first:])
        operator = world.start_operator()
        await world.run(60)
        assert world.condition("Ready")["reason"] == "QuotaExceeded", world.condition("Ready")
        turns, writes = operator.turns, operator.api.writes
        await world.run(200)
        assert operator.turns - turns < 200 and operator.api.writes - writes < 200
        assert not world.pods("learner") and world.events["QuotaExceeded"] <= 6
        await world.stop_operator(operator)
    server.full = frozenset()
    world.start_operator()
    await world.until(World.whole, 120)


async def sixty_pods_deleted_at_once(world: World) -> None:
    world.start_operator()
    await world.until(World.whole, 120)
    world.delete_pods(world.pods("learner"))
    await world.run(30)
    await world.until(World.whole, 300)


async def all_pods_of_the_job_killed_at_once(world: World) -> None:
    """By hand, or with all nodes: syncer and learners go at the same moment, and the job goes on from its store."""
    for cluster in world.clusters:
        world.start_operator(cluster)
    await world.until(World.whole, 240)
    merges = world.programs.store.merges
    world.delete_pods(world.pods("learner") + world.pods("syncer"), 0)
    await world.run(5)
    await world.until(World.whole, 300)
    for kubernetes in world.clusters.values():
        for node in kubernetes.nodes.values():
            kubernetes.power_off(node)
    await world.run(5)
    for kubernetes in world.clusters.values():
        for node in kubernetes.nodes.values():
            kubernetes.power_on(node)
    await world.until(World.whole, 300)
    assert world.programs.store.merges > merges and world.status()["phase"] == "Running"


async def the_syncers_node_is_lost_for_good(world: World) -> None:
    """Its pods are deleted by force, each once, although the answers come after the watch has told of the deletions.
    The syncer's successor has another name, so no later event of a pod puts the view right."""
    operator = world.start_operator()
    await world.until(World.whole, 120)
    assert world.programs.syncer is not None
    lost = world.programs.syncer.node
    assert lost is not operator.node, "another seed"
    pods = [pod for pod in world.pods("learner") + world.pods("syncer") if pod["spec"]["nodeName"] == lost.name]
    operator.api.slow = 3.0
    operator.kubernetes.power_off(lost)
    await world.until(lambda w: w.deletions.total() == len(pods), 900)
    await world.run(30)
    there = {pod["metadata"]["uid"] for pod in operator.kubernetes.pods()}
    assert set(operator.cache.uids(POD).values()) == there, world.story()
    forced = operator.reconciler.metrics.deletions.labels(POD.name, "true")
    assert forced._value.get() == len(pods) == world.events["PodForceDeleted"], world.story()


async def everything_is_scaled_to_nothing(world: World) -> None:
    """`kubectl scale --all --replicas=0`, of Deployments first, as what saves costs at night does."""
    world.start_operator()
    await world.until(World.whole, 120)
    learners = {pod["metadata"]["uid"] for pod in world.pods("learner")}
    for replicas in (0, 0, 7):
        world.edit_an_object(world.clusters["hub"], ["Deployment"], {"spec": {"replicas": replicas}})
        await world.run(20)
        await world.until(World.whole, 120)
    assert {pod["metadata"]["uid"] for pod in world.pods("learner")} == learners, world.story()
    await scale_everything_to_nothing(world)
    await world.run(20)
    await world.until(World.whole, 120)
    assert not world.events["Suspending"] and not world.events["Resumed"]


async def labels_and_owners_are_edited(world: World) -> None:
    operator = world.start_operator()
    await world.until(World.whole, 120)
    before = {pod["metadata"]["uid"] for pod in world.pods("learner") + world.pods("syncer")}
    server = operator.kubernetes.server
    metadata: list[dict[str, Any]] = [
        {"labels": None},
        {"ownerReferences": None},
        {"labels": None, "ownerReferences": None},
    ]
    for kind in CHILDREN:
        for edit in metadata:
            world.edit_an_object(operator.kubernetes, [kind.name], {"metadata": edit})
            await world.run(5)
        for obj in server.all(kind.name):
            owned = kind.name == "PersistentVolumeClaim" or obj["metadata"].get("ownerReferences")
            assert owned and obj["metadata"]["labels"][LABEL_JOB] == "job", (obj["metadata"], world.story())
    assert world.whole() and not world.events["NameConflict"]
    assert before == {pod["metadata"]["uid"] for pod in world.pods("learner") + world.pods("syncer")}


async def the_claim_goes(world: World) -> None:
    """`kubectl delete pvc`, then a suspension: it waits. When the syncer's pod is deleted, learners give all back. A
    claim that is deleted while the job is suspended is said, and the job does not begin anew."""
    operator = world.start_operator()
    await world.until(World.whole, 120)
    await world.run(70)  # until the status has the number of merges
    merges = world.programs.store.merges
    world.delete_an_object(operator.kubernetes, "PersistentVolumeClaim")
    await world.until(lambda w: w.condition("Durable").get("reason") == "VolumeGoing", 30)
    world.edit(suspend=True)
    await world.run(400)
    assert len(world.pods("learner")) == 3 and world.condition("Stalled")["reason"] == "VolumeGoing"
    world.delete_pods(world.pods("syncer"))
    await world.until(lambda w: w.condition("Suspended").get("reason") == "Saved", 120)
    assert world.programs.store.merges >= merges and world.events["VolumeGoing"] == 1
    await world.until(lambda w: not w.pods("learner") and not w.pods("syncer"), 60)
    world.delete_an_object(operator.kubernetes, "PersistentVolumeClaim")
    await world.until(lambda w: w.condition("Suspended").get("reason") == "NotSaved", 30)
    world.edit(suspend=False)
    await world.run(120)
    assert not world.pods("learner") and not world.pods("syncer"), world.story()
    assert world.condition("Ready")["status"] == "False" and world.condition("Stalled")["reason"] == "StoreLost"
    world.edit(suspendPolicy="Anyway")
    await world.until(lambda w: w.programs.lost > 0 and w.whole(), 120)


async def the_claim_goes_while_no_operator_runs(world: World) -> None:
    """With all learners. When an operator looks again the new store has as many merges as the status: the volume is
    another, and that is said once, and also where learners gave everything back."""
    operator = world.start_operator()
    await world.until(World.whole, 120)
    await world.stop_operator(operator)
    world.delete_an_object(operator.kubernetes, "PersistentVolumeClaim")
    for cluster in world.clusters.values():
        for node in cluster.nodes.values():
            cluster.power_off(node)
    world.delete_pods(world.pods("learner") + world.pods("syncer"), 0)
    await world.run(30)
    for cluster in world.clusters.values():
        for node in cluster.nodes.values():
            cluster.power_on(node)
    world.start_operator()
    await world.until(World.whole, 300)
    await world.until(lambda w: w.programs.store.merges > 150, 300)
    assert world.programs.lost > 0, world.story()
    assert world.events["VolumeReplaced"] == 1, world.story()


def _is_hung(world: World, pod: dict[str, Any]) -> bool:
    process = world.clusters["hub"].process_of(pod["metadata"]["uid"])
    return process is not None and process.hung


def writes_are_refused(kind: str, answer: tuple[int, str]) -> Scenario:
    """An object of the kind is deleted and cannot be made again. A learner is killed; then the job is suspended."""

    async def scenario(world: World) -> None:
        operator = world.start_operator()
        await world.until(World.whole, 120)
        server = operator.kubernetes.server
        server.refusing[kind] = answer
        if kind not in (JOB.name, "PersistentVolumeClaim", "StatefulSet", "Deployment"):
            world.delete_an_object(operator.kubernetes, kind)
        await world.run(5)
        operator.kubernetes.quota = 3  # or a successor would take the slot over
        world.processes("learner")[0].hung = True  # nor does it say itself that it leaves
        world.delete_pods([pod for pod in world.pods("learner") if _is_hung(world, pod)], 0)
        at = len(world.log)
        await world.until(lambda w: any("calls process-ended" in line for line in w.log[at:]), 9)
        if kind != JOB.name:
            await world.until(lambda w: w.status()["learners"] != "3/3", 10)
            await world.until(lambda w: w.condition("QuorumMet").get("message", "").startswith("2 learners"), 10)
        turns = operator.turns
        world.edit(suspend=True)
        await world.until(lambda w: w.programs.store.phase == "suspended", 30)
        await world.run(60)
        assert operator.turns - turns < 200, world.story()
        if kind not in ("StatefulSet", "Deployment"):
            assert not world.pods("learner") and not world.pods("syncer"), world.story()
        del server.refusing[kind]
        operator.kubernetes.quota = None
        await world.until(lambda w: w.condition("Suspended").get("reason") == "Saved", 60)
        world.edit(suspend=False)
        await world.run(5)
        await world.until(World.whole, 120)

    return scenario


def eight_learners() -> World:
    return World(job_object(count=8), nodes=4, seed=3)


def three_learners() -> World:
    return World(job_object(), seed=4)


def sixty_learners() -> World:
    return World(job_object(count=60, sync={"quorum": 60}), nodes=6, seed=5)


@pytest.mark.promise(
    "A cut between the syncer's node and the other nodes, shorter than `regionLostSeconds`, deletes no learner"
)
def test_a_cut_around_the_syncers_node_deletes_nobody() -> None:
    simulate(eight_learners, cut_around_the_syncers_node)


@pytest.mark.promise(
    "An object that is gone does not return with a late answer, so no pod of a lost node is deleted by force twice"
)
@pytest.mark.parametrize("seed", [4, 5, 6])
def test_pods_of_a_lost_node_are_deleted_by_force_once_each(seed: int) -> None:
    job = job_object(count=2, nodeLoss={"policy": "ForceDelete", "afterSeconds": 30})
    simulate(lambda: World(job, nodes=4, seed=seed), the_syncers_node_is_lost_for_good)


@pytest.mark.promise("A process whose pod runs is never reported as ended, however old the operator's view is")
def test_a_frozen_view_of_pods_fences_nobody() -> None:
    simulate(three_learners, frozen_view_of_pods)


@pytest.mark.promise(
    "An operator that is cut off from the API server, and has a successor, deletes nothing and reports no process"
)
def test_a_zombie_operator_takes_nothing_from_anybody() -> None:
    simulate(eight_learners, zombie_operator)


@pytest.mark.promise(
    "Only the operator that the Lease names writes anything or calls a syncer, whatever fails; while "
    "leaders come and go, one acts"
)
def test_whoever_leads_goes_another_goes_on() -> None:
    simulate(three_learners, leaders_come_and_go)


@pytest.mark.promise(
    "After an upgrade of the operator an edit restarts no process, and no program gets another release's flags"
)
def test_an_edit_after_an_upgrade_restarts_nobody() -> None:
    simulate(three_learners, edit_after_an_upgrade)


@pytest.mark.promise(
    "A used-up quota is reported, and the operator retries at a bounded rate until the quota is raised"
)
def test_a_quota_that_is_used_up_is_told_and_waited_for() -> None:
    simulate(three_learners, quota_is_used_up_from_the_start)


@pytest.mark.promise("Sixty pods deleted at once do not fail a job")
def test_sixty_pods_deleted_at_once_do_not_fail_a_job() -> None:
    simulate(sixty_learners, sixty_pods_deleted_at_once)


@pytest.mark.promise("A job continues after all its pods, or all its nodes, were lost at once")
@pytest.mark.parametrize("clusters", [("hub",), ("hub", "far")])
def test_a_job_whose_pods_are_all_killed_at_once_goes_on(clusters: tuple[str, ...]) -> None:
    job = job_object() if len(clusters) == 1 else spread_job()
    simulate(lambda: World(job, clusters, seed=6), all_pods_of_the_job_killed_at_once)


@pytest.mark.promise(
    "Whoever scales a job's Deployments or StatefulSets: no learner that works is removed by the operator"
)
def test_what_is_scaled_by_hand_is_scaled_back_and_nobody_is_taken() -> None:
    simulate(three_learners, everything_is_scaled_to_nothing)


@pytest.mark.promise(
    "Labels and owners of a job's objects that are edited by hand are put back, and no process restarts"
)
def test_labels_and_owners_that_are_edited_are_put_back() -> None:
    simulate(three_learners, labels_and_owners_are_edited)


@pytest.mark.promise("A claim that goes is reported, a suspension waits for it, and a job never begins anew unsaid")
def test_a_claim_that_goes_is_told_and_takes_no_learner() -> None:
    simulate(three_learners, the_claim_goes)


def test_another_volume_is_told_by_an_operator_that_was_away() -> None:
    simulate(three_learners, the_claim_goes_while_no_operator_runs)


@pytest.mark.promise(
    "While the writes of one kind of object are refused, whatever the answer, lost learners are reported to the "
    "syncer, the status goes on, and a suspension ends"
)
@pytest.mark.parametrize("answer", REFUSALS, ids=lambda answer: str(answer[0]))
@pytest.mark.parametrize("kind", [BUDGET, JOB.name, *(pytest.param(k, marks=IN_CI) for k in OTHER_KINDS)])
def test_refused_writes_of_a_kind_cost_that_kind_alone(kind: str, answer: tuple[int, str]) -> None:
    simulate(three_learners, writes_are_refused(kind, answer))


# ------------------------------------------------------------------ and that they are found here


def end_the_turn_at_the_first_failure(patch: Patch) -> None:
    """A write that is answered with 429 or 5xx says that the API server is not there."""
    of_one_object = apply.apply_error_of

    async def raise_it(api: Any, ref: Any, error: Any) -> Any:
        if error.unreachable:
            raise error
        return await of_one_object(api, ref, error)

    patch.setattr(apply, "apply_error_of", raise_it)
    patch.setattr(reconciler, "apply_error_of", raise_it)


def take_no_replicas_for_a_suspension(patch: Patch) -> None:
    """A syncer's Deployment without replicas is what a suspension leaves."""

    def has_drained(view: View) -> bool:
        return view.replicas(names.syncer_deployment(view.job.name)) == 0

    patch.setattr(lifecycle, "has_drained", has_drained)


def believe_every_silence(patch: Patch) -> None:
    """Whoever is silent for long enough is replaced, whatever the others say."""

    def find(view: View) -> dict[str, Any]:
        unheard = silence._time_silences(view)
        return {view.learners[place].region: view.learners[place] for place, s in unheard.items() if s > 30.0}

    patch.setattr(replacement, "find_broken_by_silence", find)


def believe_the_cache(patch: Patch) -> None:
    """What the cache says is done, however old it is."""

    async def keep_all(api: Any, cache: Any, key: Any, seen: Any, calls: Any) -> list[Any]:
        return list(calls)

    patch.setattr(reconciler, "keep_confirmed", keep_all)
    patch.setattr(View, "may_act", lambda view: True)


def count_all_losses(patch: Patch) -> None:
    """Every loss of the whole job counts against maxReplacements."""

    def count(view: View, replacements: dict[str, Any], changes: replacement.PodChanges) -> None:
        replacements["sinceMerge"] += changes.lost
        replacements["place"] = "job-local-0" if replacements["sinceMerge"] else None

    patch.setattr(planning, "_count_losses", count)


def trust_the_lease_for_too_long(patch: Patch) -> None:
    """A leader that cannot renew acts for longer than others wait for it. And it does what the cache says."""

    def seconds_left(one: Election, at: float) -> float:
        return 0.0 if one._sent_at is None else max(0.0, one._sent_at + 90.0 - at)

    patch.setattr(Election, "seconds_to_act", seconds_left)
    patch.setattr(Election, "seconds_for_a_write", seconds_left)
    believe_the_cache(patch)


def render_when_the_generation_changes(patch: Patch) -> None:
    """Objects are rendered by this release's templates, with the images that the job has, whenever it is edited."""

    def render(view: View, ref: Any, before: Any) -> Any:
        if before is not None and before.generation == view.job.generation:
            return before
        now = manifests.origin_of(view.job, view.here, ref, view.settings.release)
        release = desired.job_release(view)
        spec = manifests.render_pod_holder(view.job, view.here, ref, release, settings=view.settings)
        return manifests.Rendering(view.job.generation, spec, now)

    patch.setattr(desired, "_render", render)


@pytest.mark.promise("The simulation finds each corrected fault when it is put back")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("put_back", "make", "scenario"),
    [
        (believe_every_silence, eight_learners, cut_around_the_syncers_node),
        (believe_the_cache, three_learners, frozen_view_of_pods),
        (trust_the_lease_for_too_long, eight_learners, zombie_operator),
        (render_when_the_generation_changes, three_learners, edit_after_an_upgrade),
        (end_the_turn_at_the_first_failure, three_learners, writes_are_refused(BUDGET, REFUSALS[-1])),
        (take_no_replicas_for_a_suspension, three_learners, everything_is_scaled_to_nothing),
        (count_all_losses, sixty_learners, sixty_pods_deleted_at_once),
    ],
)
def test_the_simulation_finds_what_was_mended(
    monkeypatch: Patch, put_back: Callable[[Patch], None], make: Callable[[], World], scenario: Scenario
) -> None:
    put_back(monkeypatch)
    with pytest.raises(AssertionError):
        simulate(make, scenario)


# ------------------------------------------------------------------ whatever fails


@pytest.mark.promise(
    "Whatever fails, in one cluster or two: no healthy process is deleted, rollouts keep the quorum, the "
    "job is well when the faults end, and then turns and writes are few"
)
@pytest.mark.promise(
    "Only the operator that the Lease names writes anything or calls a syncer, whatever fails; while "
    "leaders come and go, one acts"
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=IN_CI) for seed in (1, 2))])
def test_random_faults_take_nothing_healthy_and_end_well(seed: int) -> None:
    """Random faults, some at once; then all is well again, and stays so. tests/worlds.py runs new seeds."""
    run_random_faults(seed)
