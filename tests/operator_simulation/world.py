"""The world: clusters, the network between all that runs there, the job, operators, and what must always be true.

``World.run`` lets time pass. Operators act through ``SimulatedApi`` and control calls; each act is judged when it is
carried out (``_judge_write``, ``_judge_call``) by what is really so, not by what the operator has seen:

- no learner is deleted that works, that the job wants, and whose template is the present one; one that the syncer
  does not hear, while it hears another of its region, may be, and one at a time;
- a rollout takes one learner of a region at a time, waits for its successor, and takes none that the quorum needs;
- of a learner of several pods that is whole none is taken but all, and what waits for a pod is not taken
  (group_judge.py);
- no process is said to have ended that has not;
- no object is touched that is not the job's; a deletion names the UID of what it means, and is judged by what it
  really deletes;
- what status says of an end, of what is saved and of the quorum is so, or was until ``LAG_SECONDS`` ago;
- nothing is written, and the syncer is told nothing, but by the operator whom the cluster's Lease names;
- no program is given the flags of another release than its image's.

Faults are methods and attributes; each may be undone. ``heal`` undoes them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from diloco_operator import names
from diloco_operator.informer import job_events
from diloco_operator.informer.cache import Cache
from diloco_operator.informer.job_events import JobEvents
from diloco_operator.job import unix_seconds
from diloco_operator.kube.kinds import CHILDREN, JOB, LABELLED, NODE, POD, STATEFUL_SET, Kind
from diloco_operator.leadership.candidate import Candidate
from diloco_operator.metrics import Metrics
from diloco_operator.model import Key, Object
from diloco_operator.objects import manifests
from diloco_operator.plan.lifecycle import NOT_SAVED, SAVED
from diloco_operator.plan.planning import plan_job
from diloco_operator.reconcile import (
    apply,
    event_reader,
    event_recorder,
    reconciler,
    status_writer,
    syncer_poller,
    workqueue,
)
from diloco_operator.reconcile.event_recorder import EventRecorder
from diloco_operator.reconcile.job_secrets import RootKey
from diloco_operator.reconcile.leading import run_while_leading
from diloco_operator.reconcile.reconciler import Reconciler
from diloco_operator.reconcile.syncer_poller import SyncerPoller
from diloco_operator.reconcile.workqueue import WorkQueue
from diloco_operator.settings import Settings
from diloco_protocol.vocabulary import LABEL_JOB, LABEL_POD_INDEX, LABEL_REGION, LABEL_ROLE, ControlMethod
from diloco_protocol.wire.control_client import ControlError
from operator_simulation import virtual_time
from operator_simulation.api_server import SimulatedApi, SimulatedLease, copied, merged, wall
from operator_simulation.group_judge import GroupJudge, place_of
from operator_simulation.kubernetes import Kubernetes, Node, Process, now
from operator_simulation.programs import JOIN_SECONDS, RELEASE_FLAG, Programs

STEP = 0.5
LAG_SECONDS = 45.0
"""So long after something has changed an operator may say in a status what was so before."""
HEARD_SECONDS = 150.0
"""So long an operator whose watch of jobs stands still may act by what the job asked for before."""
WATCH_SECONDS = 1.5
"""So long after somebody else's deletion of a pod an operator may not know of it."""
ASKED_SECONDS = 6.0
"""So long ago an operator may have asked the syncer whom it hears."""
OLD_VIEW_SECONDS = 20.0
"""By a view of the cluster that is older an operator takes no pod."""
NAMESPACE = "ns"
_OPERATOR: contextvars.ContextVar[SimulatedOperator] = contextvars.ContextVar("operator")
"""The operator that runs now."""


class Violation(AssertionError):
    """What must always be true was not."""


class _Stream:
    """What an operator hears of one kind: late, in order, and sometimes not at all."""

    def __init__(self, operator: SimulatedOperator, kind: Kind) -> None:
        self.kind = kind
        self.heard_at = now()
        self.stalled_until = 0.0
        self.delay = operator.world.rng.uniform(0.01, 0.3)
        self._operator = operator
        self._events: asyncio.Queue[tuple[float, str, Object]] = asyncio.Queue()

    def tell(self, what: str, obj: Object) -> None:
        self._events.put_nowait((now() + self.delay, what, obj))

    async def run(self) -> None:
        server = self._operator.kubernetes.server
        while not self._hears():
            await asyncio.sleep(0.5)
        while not self._events.empty():
            self._events.get_nowait()
        for obj in server.all(self.kind.name):
            self._take("MODIFIED", obj)
        while True:
            try:
                async with asyncio.timeout(30.0):
                    due, what, obj = await self._events.get()
            except TimeoutError:
                if self._hears():
                    self.heard_at = now()  # a bookmark
                continue
            await asyncio.sleep(due - now())
            while not self._hears():
                await asyncio.sleep(0.5)
            self._take(what, obj)

    def _hears(self) -> bool:
        operator = self._operator
        return now() >= max(self.stalled_until, operator.stands_still_until) and operator.reaches_api()

    def _take(self, what: str, obj: Object) -> None:
        operator, meta = self._operator, obj["metadata"]
        version = None if what == "DELETED" else meta["resourceVersion"]  # it left the selection, and may come back
        self.heard_at = now()
        if self.kind is JOB:
            operator.job_events.handle({"type": what, "object": copied(obj)})
        elif what == "DELETED" or (self.kind is not NODE and LABEL_JOB not in (meta.get("labels") or {})):
            operator.wake(operator.cache.drop(self.kind, meta.get("namespace", ""), meta["name"], meta["uid"], version))
        else:
            operator.wake(operator.cache.put(self.kind, copied(obj)))


class _Keys:
    key = RootKey(b"k" * 32)
    problem = ""


class _Permissions:
    def apply_errors(self, namespace: str) -> tuple[()]:
        return ()


class SimulatedCandidate(Candidate):
    """The product's, whose process may stand still, and then learns late what has happened meanwhile."""

    def __init__(self, operator: SimulatedOperator, store: Any) -> None:
        super().__init__(store, operator.identity, now)
        self._operator = operator

    async def wait_until_it_is_over(self, term: int) -> None:
        await super().wait_until_it_is_over(term)
        if now() < self._operator.stands_still_until:
            await self._operator.goes_on()
            await asyncio.sleep(self._operator.world.rng.uniform(0.0, 2.0))


class SimulatedOperator:
    """One operator: the product's parts, in one cluster, on one node."""

    def __init__(self, world: World, kubernetes: Kubernetes, node: Node, **settings: Any) -> None:
        self.world, self.kubernetes, self.node = world, kubernetes, node
        self.settings = Settings(cluster=kubernetes.name, **settings)
        self.name = f"operator@{node.endpoint}"
        world.operators_made += 1
        self.identity = f"{self.name} {world.operators_made}"
        self.stands_still_until = 0.0
        self.led_since = 0.0
        self.skew = world.rng.uniform(-200.0, 200.0) if world.clocks_differ else 0.0  # of its wall clock
        self.cache = Cache()
        self.turns = 0
        self.api: Any = SimulatedApi(
            kubernetes.server,
            world.rng,
            self.reaches_api,
            self.goes_on,
            acted=lambda *act: world.judge_write(self, *act),
            seconds_for_a_write=lambda: self.candidate.seconds_for_a_write(),
        )
        self.candidate = SimulatedCandidate(
            self, SimulatedLease(self.api, self.settings.namespace, self.settings.lease, self.skew)
        )
        metrics = Metrics()
        self.queue = WorkQueue(self._turn, 2, self._failed, clock=now)
        self.poller = SyncerPoller(metrics, 4, 3.0, self.queue.add, leads=self.candidate.leads)
        self.job_events = JobEvents(self.api, self.cache, self.wake)
        self.streams = [_Stream(self, kind) for kind in (JOB, *LABELLED, NODE)]
        permissions: Any = _Permissions()
        keys: Any = _Keys()
        self.reconciler = Reconciler(
            self.settings,
            self.api,
            self.cache,
            self.poller,
            keys=keys,
            permissions=permissions,
            events=EventRecorder(self.api, self.name),
            metrics=metrics,
            nodes_are_read=lambda: True,
            confirm=self.job_events.confirm,
            view_age=self._view_age,
            plan_job=self._plan,
        )
        kubernetes.server.watchers.append(self._tell)
        before = _OPERATOR.set(self)
        parts = (*(stream.run() for stream in self.streams), self._work(), self.candidate.run(), self.job_events.run())
        self._tasks = [asyncio.create_task(part) for part in parts]
        _OPERATOR.reset(before)

    def reaches_api(self) -> bool:
        return self.node.up and self.world.reaches(self.node.endpoint, self.kubernetes.api)

    def _view_age(self, namespace: str, at: float) -> float:
        return max(at - stream.heard_at for stream in self.streams if stream.kind in (POD, STATEFUL_SET, NODE))

    def is_unhindered(self) -> bool:
        """Whether nothing keeps it from seeing and doing, nor has lately."""
        since = now() - LAG_SECONDS
        late = max(stream.stalled_until for stream in self.streams)
        faults = self.api.loss or self.api.slow > 0.05 or self.kubernetes.server.refusing or not self.reaches_api()
        return not faults and 0 < self.led_since < since and max(late, self.stands_still_until) < since

    def stall(self, kind: Kind, seconds: float) -> None:
        """The stream of a kind brings nothing for so long, and then all of it."""
        next(stream for stream in self.streams if stream.kind is kind).stalled_until = now() + seconds

    def _plan(self, observed: Any, memory: Any, settings: Settings) -> Any:
        """What the product plans. By an old view no pod is taken."""
        plan = self.world.plan(observed, memory, settings)
        pods = [delete.ref.name for delete in plan.deletes if delete.ref.kind == POD.name]
        if pods and observed.view_age > OLD_VIEW_SECONDS:
            self.world._violated(f"{self.name}: {pods} are deleted by a view of {observed.view_age:.0f} s ago")
        return plan

    async def goes_on(self) -> None:
        """Wait while the process stands still, as after SIGSTOP or with its machine."""
        while now() < self.stands_still_until:
            await asyncio.sleep(self.stands_still_until - now())

    async def stop(self, in_good_order: bool = False) -> None:
        """The process ends, wherever it is in what it does; in good order it gives the Lease back."""
        self.kubernetes.server.watchers.remove(self._tell)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.poller.close()
        if in_good_order:
            await self.candidate.release(lambda: True)

    def wake(self, keys: set[Key]) -> None:
        for key in keys:
            self.queue.add(key)

    def _tell(self, kind: str, what: str, obj: Object) -> None:
        for stream in self.streams:
            if stream.kind.name == kind:
                stream.tell(what, obj)

    async def _work(self) -> None:
        await asyncio.sleep(2.0)  # until all streams are in step
        await run_while_leading(self.candidate, self.queue, self._begin_to_lead)

    def _begin_to_lead(self, another_led: bool) -> None:
        self.world.note(f"{self.name} leads")
        self.led_since = now()
        if another_led:
            self.reconciler.forget()
        self.wake(set(self.cache.jobs()))

    async def _turn(self, key: Key) -> float | None:
        await self.goes_on()
        self.turns += 1
        return await self.reconciler.turn(key)

    def _failed(self, key: Key, error: Exception) -> None:
        if isinstance(error, AssertionError) or not hasattr(error, "status"):
            self.world.violations.append(error)


def is_of_a_job(obj: Object) -> bool:
    """Whether an operator made the object, whatever of it was edited since."""
    meta = obj["metadata"]
    return LABEL_JOB in (meta.get("labels") or {}) or names.JOB_UID in (meta.get("annotations") or {})


def _is_true(rows: dict[str, Object], kind: str) -> bool:
    return rows.get(kind, {}).get("status") == "True"


def pods_of(spec: Object, region: Object) -> int:
    """Of how many pods a learner of the region is."""
    return int(region.get("pods") or (spec.get("learners") or {}).get("pods") or 1)


def _named_secrets(job: Object) -> set[str]:
    """Secrets that a person makes."""
    spec = job["spec"]
    tls = (spec.get("syncer") or {}).get("tls") or {}
    credentials = (spec.get("learners") or {}).get("credentials") or {}
    return {found["secretName"] for found in (tls, credentials) if found.get("secretName")}


class World:
    """``clusters``: their names; the first has the job's syncer, unless the job names none."""

    def __init__(self, job: Object, clusters: tuple[str, ...] = ("hub",), nodes: int = 3, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.plan: Any = plan_job
        self.cuts: list[tuple[Callable[[str], bool], Callable[[str], bool]]] = []
        self.clusters = {name: Kubernetes(name, nodes, self.rng, self.reaches) for name in clusters}
        self.judges = {name: GroupJudge(k, lambda k=k: self._is_calm(k)) for name, k in self.clusters.items()}
        self.programs = Programs(self.processes, self.reaches)
        self.operators: list[SimulatedOperator] = []
        self.operators_made = 0
        self.violations: list[BaseException] = []
        self.log: list[str] = []
        self.acts = 0  # of operators, that were judged
        self.deletions: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.before_resume: set[str] = set()  # UIDs of pods that were there while the job was suspended
        self.taken: set[str] = set()  # places whose silent learner an operator deleted
        self.deleted: set[str] = set()  # UIDs of pods of an earlier template that operators deleted
        self.rolled: set[str] = set()  # places that a rollout took, whose successor has not taken part yet
        self.completed = False  # the job, by its syncer's word
        self.too_few_since: float | None = None  # that take part
        self.clocks_differ = False  # those of operators that start from now on
        self.manifest = copied(job)
        self.asked: list[tuple[float, Object]] = [(-HEARD_SECONDS, self.manifest["spec"])]  # specs, and since when
        self.job_name = job["metadata"]["name"]
        for kubernetes in self.clusters.values():
            for role in ("syncer", names.SHARD, "learner", "evaluator"):
                kubernetes.programs[role] = getattr(self.programs, f"run_{role}")
            kubernetes.volume_gone = self._lose_the_volume
            kubernetes.server.create(JOB.name, {"kind": JOB.name, **copied(job)})
            for name in _named_secrets(job):
                kubernetes.server.create("Secret", {"metadata": {"name": name, "namespace": NAMESPACE}})

    # ------------------------------------------------------------------ time

    async def run(self, seconds: float) -> None:
        """Let time pass."""
        end = now() + seconds
        while now() < end:
            await asyncio.sleep(STEP)
            for kubernetes in self.clusters.values():
                kubernetes.tick()
            self._watch_learners()
            if self.violations:
                raise Violation(f"{self.violations[0]}\n{self.story()}") from self.violations[0]

    async def until(self, holds: Callable[[World], bool], seconds: float = 300.0) -> None:
        """Let time pass until it holds."""
        end = now() + seconds
        while not holds(self):
            if now() >= end:
                raise Violation(f"not so after {seconds:.0f} s\n{self.story()}")
            await self.run(STEP)

    async def sleep(self, seconds: float) -> None:
        """Let a fault last while another task runs the world."""
        await asyncio.sleep(seconds)

    def note(self, what: str) -> None:
        """One line of the story."""
        self.log.append(f"{now():8.1f} {what}")

    def story(self) -> str:
        """What has happened, for whoever reads a failure."""
        lines = self.log[-80:]
        for kubernetes in self.clusters.values():
            lines.append(f"-- {kubernetes.name}: {self.status(kubernetes.name).get('conditions')}")
            for pod in kubernetes.pods():
                process = kubernetes.process_of(pod["metadata"]["uid"])
                deleted = " terminating" if pod["metadata"].get("deletionTimestamp") else ""
                node = pod["spec"].get("nodeName")
                lines.append(
                    f"{pod['metadata']['name']} on {node} {pod['status'].get('phase')}{deleted} {process}"[:200]
                )
        lines += [str(slot) for slot in self.programs.store.slots]
        return "\n".join(lines)

    # ------------------------------------------------------------------ operators

    def start_operator(self, cluster: str = "hub", node: str = "n0", **settings: Any) -> SimulatedOperator:
        kubernetes = self.clusters[cluster]
        made = SimulatedOperator(self, kubernetes, kubernetes.nodes[node], **settings)
        self.operators.append(made)
        self.note(f"{made.name} starts")
        return made

    async def restart_operator(self, operator: SimulatedOperator, **settings: Any) -> SimulatedOperator:
        """Another process, which remembers nothing. ``settings``: of a new release, for one."""
        await self.stop_operator(operator)
        before = operator.settings
        kept = {name: getattr(before, name) for name in ("syncer_image", "worker_image", "release")}
        return self.start_operator(operator.kubernetes.name, operator.node.name, **(kept | settings))

    async def upgrade_operator(self, operator: SimulatedOperator, release: str) -> SimulatedOperator:
        """A release with other images, and with another template for each of the programs."""
        images = {"syncer_image": f"diloco-syncer:{release}", "worker_image": f"diloco-worker:{release}"}
        return await self.restart_operator(operator, release=release, **images)

    async def stop_operator(self, operator: SimulatedOperator) -> None:
        """The process ends, in good order or not."""
        if operator in self.operators:
            self.operators.remove(operator)
            in_good_order = self.rng.random() < 0.5
            self.note(f"{operator.name} ends{', in good order' if in_good_order else ''}")
            await operator.stop(in_good_order)

    async def stop(self) -> None:
        for operator in self.operators:
            await operator.stop()

    # ------------------------------------------------------------------ the network

    def reaches(self, a: str, b: str) -> bool:
        return not any((one(a) and other(b)) or (one(b) and other(a)) for one, other in self.cuts)

    @contextlib.contextmanager
    def cut(self, one: Callable[[str], bool], other: Callable[[str], bool]) -> Iterator[None]:
        """No bytes pass between the endpoints of two groups."""
        both = (one, other)
        self.cuts.append(both)
        try:
            yield
        finally:
            if both in self.cuts:
                self.cuts.remove(both)

    # ------------------------------------------------------------------ what tests ask

    def processes(self, role: str) -> list[Process]:
        return [process for kubernetes in self.clusters.values() for process in kubernetes.processes(role)]

    def job(self, cluster: str = "hub") -> Object | None:
        return self.clusters[cluster].server.find(JOB.name, NAMESPACE, self.job_name)

    def status(self, cluster: str = "hub") -> Object:
        return (self.job(cluster) or {}).get("status") or {}

    def condition(self, kind: str, cluster: str = "hub") -> Object:
        rows = self.status(cluster).get("conditions") or []
        return next((row for row in rows if row["type"] == kind), {})

    def wanted(self) -> int:
        job = self.job()
        return sum(region["learners"] for region in job["spec"]["regions"]) if job is not None else 0

    def wanted_pods(self) -> int:
        """How many pods learners have, spares left out."""
        return sum(region["learners"] * pods_of(self.manifest["spec"], region) for region in self._regions())

    def _regions(self) -> list[Object]:
        job = self.job()
        found: list[Object] = job["spec"]["regions"] if job is not None else []
        return found

    def counts_learners(self) -> bool:
        """Whether every status has learners in its numbers, however many pods these have."""
        rows = [row for name in self.clusters for row in self.status(name).get("regions") or ()]
        asked = {region["name"]: region["learners"] for region in self._regions()}
        return all(row["desired"] == row["ready"] == asked[row["name"]] for row in rows)

    def whole(self) -> bool:
        """Whether every learner takes part, and every cluster's status says so."""
        return self.programs.active() == self.wanted() and all(
            self.status(name).get("phase") == "Running" and self.condition("Ready", name).get("status") == "True"
            for name in self.clusters
        )

    # ------------------------------------------------------------------ what people do

    def edit(self, **spec: Any) -> None:
        """Fields of the spec, in every cluster's copy, and in the person's file."""
        self.manifest = merged(self.manifest, {"spec": spec})
        for name, kubernetes in self.clusters.items():
            job = self.job(name)
            if job is None:
                continue  # until the person applies the file
            if job["spec"].get("suspend"):
                self.before_resume |= {pod["metadata"]["uid"] for pod in kubernetes.pods()}
            kubernetes.server.patch(JOB.name, NAMESPACE, self.job_name, {"spec": spec}, "")
        self.asked.append((now(), self.manifest["spec"]))
        self.note(f"a person edits {spec}")

    async def delete_the_job(self) -> None:
        """Every cluster's copy; until all are gone, and what was taken from the job meanwhile."""
        self.note("a person deletes the job")
        going = {name: job["metadata"]["uid"] for name in self.clusters if (job := self.job(name)) is not None}
        for name, uid in going.items():
            self.clusters[name].server.delete(JOB.name, NAMESPACE, self.job_name, uid, None)
        # Another person may do the same, and have applied the job again by then.
        while any((job := self.job(name)) is not None and job["metadata"]["uid"] == uid for name, uid in going.items()):
            await self.sleep(STEP)
        self.programs.is_noticed, self.programs.lost, self.completed = False, 0, False
        for kubernetes in self.clusters.values():
            for kind in {kind.name for kind in CHILDREN} - {"PersistentVolumeClaim"}:
                for obj in kubernetes.server.all(kind):
                    if is_of_a_job(obj) and not obj["metadata"].get("ownerReferences"):
                        meta = obj["metadata"]
                        self.note(f"a person deletes {kind} {meta['name']}, which has no owner")
                        kubernetes.server.delete(kind, NAMESPACE, meta["name"], meta["uid"], None)

    def apply_the_job(self) -> None:
        """Under its name, in every cluster that has none."""
        self.note("a person applies the job")
        for name, kubernetes in self.clusters.items():
            if self.job(name) is None:
                made = {"kind": JOB.name, **copied(self.manifest)}
                kubernetes.server.create(JOB.name, made)

    def upgrade_job(self) -> None:
        """As ``diloco upgrade``: every copy of the job goes to the release that its operator has."""
        self.edit(release=f"at-{now():.0f}")

    def delete_an_object(self, kubernetes: Kubernetes, kind: str) -> None:
        """One object of the job, if it has one of the kind."""
        labelled = [o for o in kubernetes.server.all(kind) if LABEL_JOB in (o["metadata"].get("labels") or {})]
        if labelled:
            meta = self.rng.choice(labelled)["metadata"]
            self.note(f"a person deletes {kind} {meta['name']}")
            kubernetes.server.delete(kind, NAMESPACE, meta["name"], meta["uid"], None)

    def edit_an_object(self, kubernetes: Kubernetes, kinds: Sequence[str], patch: Object) -> None:
        """One object of the job of one of these kinds, by hand."""
        every = [(kind, obj) for kind in kinds for obj in kubernetes.server.all(kind)]
        mine = [(kind, obj["metadata"]["name"]) for kind, obj in every if is_of_a_job(obj)]
        if mine:
            kind, name = self.rng.choice(mine)
            self.note(f"a person edits {kind} {name}: {patch}")
            kubernetes.server.patch(kind, NAMESPACE, name, patch, "")

    def delete_pods(self, pods: list[Object], grace: int | None = None) -> None:
        for pod in pods:
            meta = pod["metadata"]
            self.note(f"a person deletes {meta['name']}")
            server = next(k.server for k in self.clusters.values() if k.server.find("Pod", NAMESPACE, meta["name"]))
            server.delete("Pod", NAMESPACE, meta["name"], meta["uid"], grace)

    def pods(self, role: str, region: str | None = None) -> list[Object]:
        return [
            pod
            for kubernetes in self.clusters.values()
            for pod in kubernetes.pods()
            if pod["metadata"]["labels"].get(LABEL_ROLE) == role
            and region in (None, pod["metadata"]["labels"].get(LABEL_REGION))
        ]

    # ------------------------------------------------------------------ what must always be true

    def judge_write(self, operator: SimulatedOperator, verb: str, kind: str, name: str, body: Any) -> None:
        """An operator's write, just before it happens."""
        self.acts += 1
        self._judge_leader(operator, f"{verb} of {kind} {name}")
        if kind == "Event":
            if verb == "create":
                self.events[body["reason"]] += 1
                self.note(f"{operator.name}: Event {body['reason']}: {body['message']}")
            return
        server = operator.kubernetes.server
        obj = server.find(kind, NAMESPACE, name)
        goes = verb == "delete" and obj is not None and body["uid"] in (None, obj["metadata"]["uid"])
        touched = obj is not None and (goes or verb == "apply") and kind != JOB.name
        if touched and kind != POD.name and not is_of_a_job(obj):
            self._violated(f"{operator.name}: {verb} of the foreign {kind} {name}")
        if verb == "patch" and kind == JOB.name and "status" in body:
            self._judge_words(operator, body["status"])
        if verb == "apply" and kind in ("StatefulSet", "Deployment"):
            self._judge_scale(operator, kind, name, body["spec"]["replicas"])
        if verb == "delete" and body["uid"] is None:
            self._violated(f"{operator.name}: the deletion of {kind} {name} is of whatever has that name by then")
        if not goes or obj is None or kind != POD.name:
            return
        if obj["metadata"].get("deletionTimestamp") and body["grace"] != 0:
            return  # said again
        self.note(f"{operator.name} deletes {name}{' by force' if body['grace'] == 0 else ''}")
        self.deletions[name] += 1
        self._judge_deletion(operator, obj, body["grace"] == 0)

    def _judge_words(self, operator: SimulatedOperator, status: Object) -> None:
        """ "Saved" is said only where the store has it, an end only where it is so, and the quorum is as it is."""
        cluster = operator.kubernetes
        rows = {row["type"]: row for row in status.get("conditions") or ()}
        before = self.condition("Suspended", cluster.name).get("reason")
        phase, hub = self.programs.store.phase, cluster is next(iter(self.clusters.values()))
        if rows.get("Suspended", {}).get("reason") == "Saved" != before and phase != "suspended":
            self._violated(f"{operator.name}: all is said to be saved, and the store's phase is {phase}")
        if _is_true(rows, "Complete") and not self.completed and phase != "complete":
            self._violated(f"{operator.name}: the job is said to be complete, and its phase is {phase}")
        if not hub:
            return
        if _is_true(rows, "QuorumMet") and self.too_few_since is not None:
            # A new leader keeps what the status has until it has asked the syncer.
            lasts = now() - max(self.too_few_since, operator.led_since, operator.stands_still_until)
            if lasts > LAG_SECONDS:
                self._violated(f"{operator.name}: the quorum is said to be met, and is not for {lasts:.0f} s")
        if _is_true(rows, "Durable") and self._claim_goes_for() > LAG_SECONDS:
            self._violated(f"{operator.name}: what is trained is said to be safe, and the claim is going")

    def _claim_goes_for(self) -> float:
        """For how many seconds the claim is being deleted; 0: it is not."""
        hub = next(iter(self.clusters.values()))
        marks = [claim["metadata"].get("deletionTimestamp") for claim in hub.server.all("PersistentVolumeClaim")]
        return max((wall() - unix_seconds(mark) for mark in marks if mark), default=0.0)

    def _lose_the_volume(self) -> None:
        self.programs.lose_the_volume(int((self.status().get("syncer") or {}).get("merges") or 0))

    def _watch_learners(self) -> None:
        """What the judge remembers of who takes part, and of the job's end."""
        self.completed = self.completed or self.programs.store.phase == "complete"
        syncer = self.programs.syncer
        required = syncer.job["spec"]["sync"]["quorum"] if syncer is not None else 1
        if self.programs.active() >= required:
            self.too_few_since = None
        elif self.too_few_since is None:
            self.too_few_since = now()
        self.rolled -= {p.place for p in self.processes("learner") if p.told_to_end is None and self._is_back(p)}
        self.taken -= {p.place for p in self.processes("learner") if self.programs.taking_part(p)}
        for name, judge in self.judges.items():
            judge.watch()
            left = judge.find_left()
            if left:
                self._violated(f"{name}: {left}")

    def _is_back(self, process: Process) -> bool:
        """Whether it takes part, as far as its cluster can see: elsewhere a learner's page says that it has a slot."""
        hub = process.node.cluster == next(iter(self.clusters))
        slots = [s for s in self.programs.store.slots if s.process == process.id and s.state == "active"]
        return self.programs.taking_part(process) or process.id in self.programs.standbys or bool(slots and not hub)

    def _always_wanted(self, place: str) -> bool:
        """Whether the job has asked for this learner, or for its syncer, all the while that an operator may know of."""
        recent = [spec for at, spec in self.asked if at >= now() - HEARD_SECONDS]
        earlier = [spec for at, spec in self.asked if at < now() - HEARD_SECONDS]
        for spec in (*earlier[-1:], *recent):
            wanted = {
                f"{self.job_name}-{r['name']}": (r["learners"] + r.get("spares", 0)) * pods_of(spec, r)
                for r in spec["regions"]
            }
            holder, _, ordinal = place.rpartition("-")
            if holder in wanted and int(ordinal) >= wanted[holder]:
                return False
        return True

    def _judge_unsaved(self, operator: SimulatedOperator, job: Object, kind: str, replicas: int) -> None:
        """Learners are taken down for a suspension only when the store has what they trained."""
        waits = job["spec"].get("suspendPolicy", "WhenSaved") == "WhenSaved"
        hub = next(iter(self.clusters.values()))
        if (
            kind != "StatefulSet"
            or replicas
            or operator.kubernetes is not hub
            or not waits
            or not self.programs.store.merges
        ):
            return
        if self.programs.store.phase != "suspended" and any(p.works for p in hub.processes("learner")):
            self._violated(f"{operator.name}: learners are taken down, and {self.programs.store.phase} is no end")

    def _judge_scale(self, operator: SimulatedOperator, kind: str, name: str, replicas: int) -> None:
        """The number of pods that an object is to have. One that is scaled down loses those that work."""
        kubernetes = operator.kubernetes
        job = self.job(kubernetes.name)
        ended = self.programs.store.phase in ("complete", "failed") or self.status(kubernetes.name).get(
            "completionTime"
        )
        if job is None or job["metadata"].get("deletionTimestamp") or ended or self._may_fail(kubernetes, job):
            return
        if job["spec"].get("suspend"):
            self._judge_unsaved(operator, job, kind, replicas)
            return
        if self.status(kubernetes.name).get("drain") in (SAVED, NOT_SAVED):
            return  # the suspension is finished first: what there is was made before the resumption, or in its place
        for pod in kubernetes.pods():
            meta = pod["metadata"]
            process, ordinal = kubernetes.process_of(meta["uid"]), int(meta["labels"].get(LABEL_POD_INDEX, 0))
            held = meta["ownerReferences"][0]["name"] == name and replicas <= ordinal
            held = held and (kind == "Deployment" or self._always_wanted(meta["name"]))
            goes = meta.get("deletionTimestamp") or meta["uid"] in self.before_resume
            if held and not goes and process is not None and process.works:
                self._violated(f"{operator.name}: {kind} {name} gets {replicas} replicas, and {meta['name']} works")

    def _is_calm(self, kubernetes: Kubernetes) -> bool:
        """Whether the job runs in a cluster, and nothing keeps the operator there from its work."""
        job, spec = self.job(kubernetes.name), self.manifest["spec"]
        operators = [one for one in self.operators if one.kubernetes is kubernetes]
        edited = self.asked[-1][0] > now() - LAG_SECONDS
        runs = job is not None and not job["metadata"].get("deletionTimestamp") and not spec.get("suspend")
        runs = runs and not edited and self.status(kubernetes.name).get("phase") in ("Running", "Degraded", "Starting")
        calm = len(operators) == 1 and operators[0].is_unhindered() and not self.cuts and not kubernetes.server.full
        return runs and calm and not self.completed

    def _place_named(self, kubernetes: Kubernetes, name: str) -> str:
        """The learner of a pod, by its name."""
        pod = kubernetes.server.find(POD.name, NAMESPACE, name)
        return place_of(pod) if pod is not None else name

    def _may_fail(self, kubernetes: Kubernetes, job: Object) -> bool:
        """Whether what happened in this cluster makes the job fail, by the job's own rules."""
        policy = job["spec"].get("failurePolicy") or {}
        fatal = {code for rule in policy.get("rules") or () if rule["action"] == "Fail" for code in rule["exitCodes"]}
        recent = [(place, code) for at, place, code in kubernetes.failures if at >= now() - HEARD_SECONDS]
        learners = Counter(self._place_named(kubernetes, name) for name, _ in recent)
        most = max(learners.values(), default=0)
        return most > policy.get("maxReplacements", 50) or any(code in fatal for _, code in recent)

    def _judge_deletion(self, operator: SimulatedOperator, pod: Object, force: bool) -> None:
        meta, kubernetes = pod["metadata"], operator.kubernetes
        name, region = meta["name"], meta["labels"].get(LABEL_REGION)
        process = kubernetes.process_of(meta["uid"])
        if meta["labels"][LABEL_ROLE] != "learner" and not force:
            self._violated(f"{operator.name}: {name} is not the operator's to delete")
        policy = (self.manifest["spec"].get("nodeLoss") or {}).get("policy", "Wait")
        if force and policy == "Wait":
            self._violated(f"{operator.name}: {name} is deleted by force, and nodeLoss.policy is Wait")
        job, holder = self.job(kubernetes.name), meta["ownerReferences"][0]
        if job is None or job["metadata"].get("deletionTimestamp") or job["spec"].get("suspend"):
            return
        owner = kubernetes.server.find(holder["kind"], NAMESPACE, holder["name"])
        unwanted = meta["labels"][LABEL_ROLE] == "learner" and not self._always_wanted(name)
        if process is None or not process.works or owner is None or unwanted:
            return
        if force and not process.node.ready:
            return  # it may run on; a volume that two may have is what the plan looks at
        if process.pods > 1 and meta["labels"][LABEL_ROLE] == "learner":
            judge = self.judges[kubernetes.name]
            judge.watch()
            newest = meta["labels"][names.POD_REVISION] == kubernetes.revision(owner)
            if not judge.is_whole(process):
                wrong = judge.find_wrong(pod, process)
                if wrong and newest and not force:
                    self._violated(f"{operator.name}: {name} is deleted: {wrong}")
                return
            if newest and judge.may_go(pod):
                return
            process = process.group[0]  # the one that the syncer hears
        if meta["labels"][names.POD_REVISION] == kubernetes.revision(owner):
            self._judge_silent(operator, process)
            return
        others = [
            other
            for other in self.pods("learner", region)
            if other["metadata"].get("deletionTimestamp") and place_of(other) != place_of(pod)
            if self._always_wanted(other["metadata"]["name"])  # one that somebody scaled up by hand leaves anyway
            if self._was_heard_to_leave(other)
        ]
        self.deleted.add(meta["uid"])
        if others and not force and self.programs.taking_part(process):
            self._violated(f"{operator.name}: {name} is taken while {others[0]['metadata']['name']} leaves")
        if not force:
            self._judge_order(operator, process)
        syncer = self.programs.syncer
        if syncer is None or not syncer.works or syncer.node.cluster != kubernetes.name:
            return  # it has just gone, and with it the quorum; or this operator, in another cluster, cannot know that
        required = syncer.job["spec"]["sync"]["quorum"]
        if not self.programs.taking_part(process):
            return  # one that has not joined yet, or is cut off: the quorum is as before
        left = self.programs.active() - 1
        if left < required < min(self.wanted(), len(self.programs.store.slots)):
            self._violated(f"{operator.name}: {name} is taken, and {left} are left of {required}")

    def _was_heard_to_leave(self, pod: Object) -> bool:
        """Whether the operator deleted this pod itself, or a watch has brought it what somebody else did."""
        meta = pod["metadata"]
        asked_at = unix_seconds(meta["deletionTimestamp"]) - meta["deletionGracePeriodSeconds"]
        return meta["uid"] in self.deleted or asked_at < wall() - WATCH_SECONDS

    def _judge_order(self, operator: SimulatedOperator, process: Process) -> None:
        """A rollout takes a learner that the syncer hears: that before it in its region takes part again, or its node
        is lost."""
        places = {place for place in self.rolled if place.rpartition("-")[0] == process.place.rpartition("-")[0]}
        waits = {place for place in places - {process.place} if self._always_wanted(place)}
        stuck = {place_of(p) for p in self.pods("learner") if self._is_on_a_lost_node(p)}
        if waits - stuck and self.programs.heard(process):
            self._violated(f"{operator.name}: {process.pod_name} is taken before {sorted(waits - stuck)} takes part")
        self.rolled.add(process.place)

    def _is_on_a_lost_node(self, pod: Object) -> bool:
        found = [k.nodes[pod["spec"]["nodeName"]] for k in self.clusters.values() if k.holds(pod)]
        return any(not node.ready for node in found)

    def _judge_silent(self, operator: SimulatedOperator, process: Process) -> None:
        """The deletion of a learner that works, and that the syncer may not hear."""
        heard = [other for other in self.processes("learner") if self.programs.heard(other)]
        regions = Counter(other.region for other in self.processes("learner") if other.rank == 0)
        slot = next((slot for slot in self.programs.store.slots if slot.process == process.id), None)
        back = slot is not None and now() < slot.ready_at - JOIN_SECONDS + ASKED_SECONDS
        if process in heard and not back:
            self._violated(f"{operator.name}: {process.pod_name} works and is heard, and is deleted")
        if not any(other.region == process.region or regions[process.region] == 1 for other in heard):
            self._violated(f"{operator.name}: {process.pod_name} is deleted, and nobody of its region is heard")
        others = [place for place in self.taken if place.rpartition("-")[0] == process.place.rpartition("-")[0]]
        if others:
            self._violated(f"{operator.name}: {process.pod_name} is deleted before {others} takes part again")
        self.taken.add(process.place)

    def _judge_leader(self, operator: SimulatedOperator, act: str) -> None:
        """What is done while the Lease names another was done by two at once."""
        lease = operator.kubernetes.server.find("Lease", operator.settings.namespace, operator.settings.lease)
        holder = lease["spec"]["holderIdentity"] if lease is not None else "nobody"
        if holder != operator.identity:
            self._violated(f"{operator.identity}: {act}, and {holder or 'nobody'} has the Lease")

    def judge_call(self, operator: SimulatedOperator, method: str, body: dict[str, Any]) -> None:
        """A control call that reaches the syncer."""
        self.acts += 1
        if method in (ControlMethod.STATUS, ControlMethod.REPORT):
            return
        self._judge_leader(operator, f"call of {method}")
        self.note(f"{operator.name} calls {method} {body}")
        if method == ControlMethod.PROCESS_ENDED:
            for process in self.processes("learner"):
                if process.id == body["process"] and self._has_pod(process):
                    self._violated(f"{process.pod_name} lives, and is said to be gone: {body}")

    def _has_pod(self, process: Process) -> bool:
        """Whether its pod is there; the container of one that was deleted by force lives a little longer."""
        pod = self.clusters[process.node.cluster].server.find(POD.name, NAMESPACE, process.pod_name)
        return pod is not None and pod["metadata"]["uid"] == process.pod_uid

    def _violated(self, what: str) -> None:
        self.note(f"VIOLATED: {what}")
        self.violations.append(Violation(what))


# ------------------------------------------------------------------ sockets of the poller


def _control_client(world: World) -> Any:
    class Client:
        """A control call through the simulated network."""

        def __init__(self, address: str, key: bytes, largest: int) -> None:
            self._uid = address.rpartition(":")[0].rpartition("/")[2]

        async def call(self, method: str, body: Any = None, timeout: float = 3.0) -> dict[str, Any]:
            await asyncio.sleep(world.rng.uniform(0.005, 0.05))
            syncer = world.programs.syncer
            caller = _OPERATOR.get()
            there = (
                syncer is not None
                and syncer.pod_uid == self._uid
                and syncer.works
                and caller.node.up
                and world.reaches(caller.node.endpoint, syncer.node.endpoint)
            )
            if not there:
                await asyncio.sleep(timeout)
                raise ControlError("unreachable", "nobody answers")
            world.judge_call(caller, method, body or {})
            answer = copied(world.programs.call(method, body or {}))
            await caller.goes_on()
            return answer

        async def close(self) -> None:
            pass

    return Client


def _page_of(world: World) -> Any:
    async def page(ip: str, port: int, path: str, seconds: float) -> bytes:
        uid = ip.rpartition("/")[2]
        for process in world.processes("learner"):
            if process.pod_uid == uid:
                return world.programs.page(process)
        raise OSError("nobody answers")

    return page


def simulate(make: Callable[[], World], scenario: Callable[[World], Any]) -> World:
    """Run a scenario in a world, in simulated time, and return the world as it is then."""
    clock = virtual_time.Clock(lambda: one.skew if (one := _OPERATOR.get(None)) is not None else 0.0)
    modules = (apply, event_reader, event_recorder, job_events, reconciler, status_writer, syncer_poller, workqueue)
    render = manifests.render_pod_holder

    def render_of_release(job: Any, here: Any, ref: Any, images: Any, settings: Any) -> Object:
        rendered = render(job, here, ref, images, settings)
        rendered["template"]["spec"]["containers"][0]["command"].append(f"{RELEASE_FLAG}{settings.release}")
        return rendered

    async def main() -> World:
        world = make()
        random.seed(world.rng.random())
        with contextlib.ExitStack() as stack:
            for module in modules:
                stack.enter_context(mock.patch.object(module, "time", clock))
            stack.enter_context(mock.patch.object(manifests, "render_pod_holder", render_of_release))
            stack.enter_context(mock.patch.object(syncer_poller, "ControlClient", _control_client(world)))
            stack.enter_context(mock.patch.object(syncer_poller, "_read_page", _page_of(world)))
            try:
                await scenario(world)
            finally:
                await world.stop()
        return world

    found: World = virtual_time.run(main())
    return found
