"""A small pure cluster for the operator's plan: controllers, kubelets and a syncer as plain data.

Theory of operation. Time is a number. ``World.run`` lets it pass in steps; in each step the
controllers make and delete pods as Kubernetes' own do, kubelets start, crash and end
containers, the syncer (if one runs) seats learners and merges, and, when the last plan said
so, the operator takes a turn: the world is frozen into an ``Observed`` and the plan is
carried out. The status document is as old as the plan's polling makes it.

Every plan is held to what must always be true, whatever happens (``_check``): no foreign
object is touched, of no region two learners are taken at once, no learner that works is
taken when the quorum would be missed, no Event is told twice in a row.

A learner of several pods trains when all of them run. It ends when one of them does, unless that one's node is lost:
then nobody has closed its connections, and the others hang. Its leading pod alone joins.

Faults are attributes: ``bad_images``, ``crashing`` (pod name -> exit code), ``deaf`` (UIDs of
pods that run and are not heard), ``lost_nodes``, ``quota``, ``syncer_silent``, ``unschedulable``.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json, to_json

from diloco_operator import names
from diloco_operator.job import rfc3339, unix_seconds
from diloco_operator.model import (
    ApplyError,
    ClusterEvent,
    Delete,
    EventWanted,
    JobPlan,
    Object,
    Observed,
    PlanMemory,
    PlanSettings,
    ProgramAnswer,
    Ref,
)
from diloco_operator.plan.job_status import differs_beyond_progress
from diloco_operator.plan.planning import plan_job
from diloco_protocol.documents import Report, StatusDocument
from diloco_protocol.vocabulary import FINALIZER, LABEL_JOB, LABEL_POD_INDEX, LABEL_REGION, LABEL_ROLE, WorkerExit
from status_documents import job_report, learner_page, slot_row, status_document

SETTINGS = PlanSettings(None, "diloco-system", "diloco-syncer:1", "diloco-worker:1")
START = 1_700_000_000.0
HOLDING = ("active", "suspect", "draining")
START_SECONDS, JOIN_SECONDS, DRAIN_SECONDS = 2.0, 1.0, 2.0
IN_USE = (
    "0/3 nodes are available: 3 node has pod using PersistentVolumeClaim with the same name and "
    "ReadWriteOncePod access mode."
)
SPREAD = {
    "syncer": {
        "cluster": "hub",
        "tls": {"secretName": "s"},
        "endpoint": {"type": "NodePort", "nodePort": 30700, "address": "10.0.0.1"},
    },
    "learners": {"credentials": {"secretName": "l"}},
    "regions": [{"name": "near", "cluster": "hub", "learners": 1}, {"name": "away", "cluster": "far", "learners": 2}],
}
"""What of a job's spec makes it span the clusters hub and far."""


def job_object(name: str = "job", count: int = 3, **spec: Any) -> Object:
    """A DiLoCoJob as the API server would send it (defaults left out, as the models fill them in)."""
    training = {
        "model": {"config": {"model_type": "llama"}},
        "data": {"paths": ["python-stdlib"]},
        "stop": {"tokens": 10**12},
        "evaluation": None,
    } | spec.pop("training", {})
    return {
        "apiVersion": "diloco.io/v1alpha1",
        "kind": "DiLoCoJob",
        "metadata": {
            "name": name,
            "namespace": "ns",
            "uid": "aaaaaaaa-0000-0000-0000-000000000001",
            "generation": 1,
            "finalizers": [],
            "labels": {},
        },
        "spec": {"training": training, "regions": [{"name": "local", "learners": count}], **spec},
    }


@dataclass
class SlotSim:
    region: str
    ordinal: int
    process: str = ""
    state: str = "empty"
    ready_at: float = 0.0
    heard: float = 0.0
    merged: int = 0
    place: tuple[str, int] = ("", 0)


@dataclass
class SyncerSim:
    """The syncer's durable state (its store) and, while ``pod`` is set, its process."""

    epoch: int = 0
    merges: int = 0
    tokens: int = 0
    phase: str = "waiting"
    slots: list[SlotSim] = field(default_factory=list)
    standbys: list[str] = field(default_factory=list)
    pod: str = ""  # UID
    up_at: float = 0.0
    target: str = ""
    moves_at: float = 0.0
    misses: str = ""  # why it holds with a quorum
    problem: str = ""  # why its store cannot be written: nothing is merged, and no drain ends
    lost: list[str] = field(default_factory=list)  # regions that it counts as lost
    required: int = 1
    stop: int = 10**12
    places: int = 0  # slots beyond these are of learners beyond their region's places
    bounds: dict[str, int] = field(default_factory=dict)  # by region: learners at most


@dataclass
class PodSim:
    obj: Object
    ready_to_start: float
    joined: bool = False
    joins_at: float = 0.0
    generation: int = 0  # of its process: a container that restarts has a new one

    @property
    def uid(self) -> str:
        return str(self.obj["metadata"]["uid"])

    @property
    def name(self) -> str:
        return str(self.obj["metadata"]["name"])

    @property
    def role(self) -> str:
        return str(self.obj["metadata"]["labels"][LABEL_ROLE])

    @property
    def region(self) -> str:
        return str(self.obj["metadata"]["labels"].get(LABEL_REGION, ""))

    @property
    def index(self) -> int:
        return int(self.obj["metadata"]["labels"].get(LABEL_POD_INDEX, -1))

    @property
    def group_pods(self) -> int:
        return int(self.obj["metadata"]["labels"].get(names.GROUP_PODS, 1))

    @property
    def ordinal(self) -> int:
        """Of its learner."""
        return self.index // self.group_pods

    @property
    def rank(self) -> int:
        return self.index % self.group_pods

    @property
    def learner(self) -> tuple[str, int]:
        return self.region, self.ordinal

    @property
    def terminating(self) -> bool:
        return "deletionTimestamp" in self.obj["metadata"]

    @property
    def container(self) -> Object:
        found: Object = self.obj["status"]["containerStatuses"][0]
        return found

    @property
    def running(self) -> bool:
        return "running" in self.container["state"]

    @property
    def process(self) -> str:
        return self.uid.replace("-", "") + f"{self.generation:04x}"

    @property
    def image(self) -> str:
        return str(self.obj["spec"]["containers"][0]["image"])


class World:
    """One job in one cluster."""

    def __init__(self, job: Object, seed: int = 0, settings: PlanSettings = SETTINGS) -> None:
        self.job = job
        self.settings = settings
        self.now = START
        self.rng = random.Random(seed)
        self.memory = PlanMemory()
        self.objects: dict[Ref, Object] = {}
        self.pods: dict[str, PodSim] = {}  # by UID
        self.broken: set[tuple[str, int]] = set()  # learners of several pods that have lost one since they formed
        self.formed: dict[tuple[str, int], dict[str, str]] = {}  # learner of several pods -> process -> node
        self.nodes = {f"node-{i}": True for i in range(3)}
        self.node_since = dict.fromkeys(self.nodes, START)
        self.cluster_events: list[ClusterEvent] = []
        self.apply_errors: tuple[ApplyError, ...] = ()
        self.kept_by_policy: set[Ref] = set()  # whose deletion is refused
        self.secrets: set[str] = set()
        self.syncer = SyncerSim()
        self.asked: ProgramAnswer[StatusDocument] | None = None
        self.asked_at = -1e9
        self.report: Report | None = None
        self.events: list[tuple[float, EventWanted]] = []
        self.plans: list[JobPlan] = []
        self._pods_seen: list[Object] | None = None
        self._templates: dict[Ref, tuple[Object, str]] = {}
        self.gone = False
        self.next_turn = self.now
        self.poll = 1.0
        self.status_at = -1e9
        self._uid = 0
        # faults
        self.bad_images: set[str] = set()
        self.crashing: dict[str, int] = {}
        self.last_words = "the disk is on fire"  # of what crashes
        self.deaf: set[str] = set()
        self.quota: int | None = None
        self.syncer_silent = False
        self.answer_age = 0.0  # of the syncer, in seconds
        self.unschedulable: set[str] = set()
        self.foreign: dict[Ref, Object] = {}
        self.operator_away = False
        self.blind = False  # the operator may not read nodes
        self.taken: list[tuple[float, str]] = []

    # ------------------------------------------------------------- time

    def run(self, seconds: float, step: float = 0.5) -> None:
        end = self.now + seconds
        while self.now < end and not self.gone:
            self.now += step
            self._controllers()
            self._kubelets()
            self._groups()
            self._syncer()
            if not self.operator_away:
                self._operator()

    def until(self, holds: Any, timeout: float = 300.0) -> None:
        end = self.now + timeout
        while not holds(self):
            if self.now >= end or self.gone:
                raise AssertionError(f"not so after {timeout} s:\n{self.story()}")
            self.run(0.5)

    def story(self) -> str:
        lines = [f"{at - START:8.1f} {e.type:7} {e.reason}: {e.message}" for at, e in self.events]
        lines.append(json.dumps(self.job.get("status"), indent=1))
        for pod in self.pods.values():
            lines.append(
                f"{pod.name} {pod.uid[:8]} {pod.obj['status']['phase']} {pod.container['state']}"
                f" {'terminating' if pod.terminating else ''} joined={pod.joined}"
            )
        lines.append(str(self.syncer))
        return "\n".join(lines)

    # ------------------------------------------------------------- what people do

    def edit(self, **spec: Any) -> None:
        """A new spec: fields replaced, the generation raised."""
        self.job = copy.deepcopy(self.job)
        self.job["spec"] |= spec
        self.job["metadata"]["generation"] += 1
        self.next_turn = self.now

    def delete_pod(self, name: str, force: bool = False) -> None:
        pod = self.named(name)
        assert pod is not None
        self._delete_pod(pod, force)

    def named(self, name: str) -> PodSim | None:
        return next((p for p in self.pods.values() if p.name == name), None)

    def of(self, role: str) -> list[PodSim]:
        return [pod for pod in self.pods.values() if pod.role == role]

    def lose(self, node: str) -> None:
        self.nodes[node] = False
        self.node_since[node] = self.now

    def back(self, node: str) -> None:
        self.nodes[node] = True
        self.node_since[node] = self.now
        for pod in [p for p in self.pods.values() if p.obj["spec"].get("nodeName") == node]:
            if pod.terminating:
                self._remove(pod)

    # ------------------------------------------------------------- what tests ask

    @property
    def status(self) -> Object:
        found: Object = self.job.get("status") or {}
        return found

    def condition(self, kind: str) -> Object:
        return next((c for c in self.status.get("conditions", []) if c["type"] == kind), {})

    def truth(self, kind: str) -> str:
        return str(self.condition(kind).get("status", ""))

    def region(self, name: str = "local") -> Object:
        return next(row for row in self.status["regions"] if row["name"] == name)

    def active(self) -> int:
        """Learners that are truly in the quorum."""
        return sum(self._in_quorum(slot) for slot in self.syncer.slots) if self.syncer.pod else 0

    def told(self, reason: str) -> int:
        return sum(event.reason == reason for _, event in self.events)

    def whole(self) -> bool:
        spec = self.job["spec"]
        wanted = sum(r["learners"] for r in spec["regions"])
        return (
            self.status.get("phase") == "Running"
            and self.status.get("learners") == f"{wanted}/{wanted}"
            and self.truth("Ready") == "True"
            and self.status.get("observedGeneration") == self.job["metadata"]["generation"]
        )

    # ------------------------------------------------------------- controllers

    def _new_uid(self) -> str:
        self._uid += 1
        digits = hashlib.sha256(f"{self._uid} {self.job['metadata']['uid']}".encode()).hexdigest()[:32]
        return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"

    def _controllers(self) -> None:
        for ref, obj in list(self.objects.items()):
            if ref.kind == "StatefulSet":
                self._stateful_set(ref, obj)
            elif ref.kind == "Deployment":
                self._deployment(ref, obj)
        for node, well in self.nodes.items():
            if well or self.now - self.node_since[node] < 20.0:
                continue
            for pod in self.pods.values():
                if pod.obj["spec"].get("nodeName") == node and not pod.terminating:
                    self._condition(pod, "DisruptionTarget", True, "DeletionByTaintManager")
                    self._delete_pod(pod, False)

    def _template_hash(self, ref: Ref, obj: Object) -> str:
        """Of the pod template; made anew when the template differs from the last one seen."""
        template = obj["spec"]["template"]
        if self._templates.get(ref, ({}, ""))[0] != template:
            self._templates[ref] = (_copy(template), _hash(template))
        return self._templates[ref][1]

    def _stateful_set(self, ref: Ref, obj: Object) -> None:
        revision = f"{ref.name}-{self._template_hash(ref, obj)}"
        obj["status"] = {"observedGeneration": obj["metadata"]["generation"], "updateRevision": revision}
        for pod in [p for p in self.pods.values() if p.obj["metadata"]["labels"].get("set") == ref.name]:
            if pod.obj["status"]["phase"] == "Failed" and not pod.terminating:
                self._delete_pod(pod, False)
            if pod.index >= obj["spec"]["replicas"] and not pod.terminating:
                self._delete_pod(pod, False)
        for ordinal in range(obj["spec"]["replicas"]):
            name = f"{ref.name}-{ordinal}"
            if self.named(name) is None and self._may_create(ref, name):
                labels = {"set": ref.name, LABEL_POD_INDEX: str(ordinal), names.POD_REVISION: revision}
                self._make(name, obj["spec"]["template"], labels)

    def _deployment(self, ref: Ref, obj: Object) -> None:
        mine = [p for p in self.pods.values() if p.obj["metadata"]["labels"].get("set") == ref.name]
        digest = self._template_hash(ref, obj)
        for pod in mine:
            stale = pod.obj["metadata"]["labels"]["hash"] != digest or obj["spec"]["replicas"] == 0
            if stale and not pod.terminating:
                self._delete_pod(pod, False)
        # Recreate orders rollouts only: after a deletion by hand the new pod does not wait for the old one.
        current = [p for p in mine if not p.terminating and p.obj["status"]["phase"] != "Failed"]
        old = [p for p in mine if p.obj["metadata"]["labels"]["hash"] != digest]
        if obj["spec"]["replicas"] and not current and not old:
            name = f"{ref.name}-{digest[:5]}-{self._uid}"
            if self._may_create(Ref("ReplicaSet", f"{ref.name}-{digest[:5]}"), name):
                self._make(name, obj["spec"]["template"], {"set": ref.name, "hash": digest})

    def _may_create(self, ref: Ref, name: str) -> bool:
        if self.quota is None or len(self.pods) < self.quota:
            return True
        message = f'pods "{name}" is forbidden: exceeded quota: small, requested: pods=1, used: pods={self.quota}'
        self.cluster_events = [n for n in self.cluster_events if (n.kind, n.name) != ref]
        self.cluster_events.append(ClusterEvent(ref.kind, ref.name, "FailedCreate", message, time=self.now))
        return False

    def _make(self, name: str, template: Object, labels: dict[str, str]) -> None:
        uid = self._new_uid()
        spec = _copy(template["spec"])
        main = spec["containers"][0]
        self.pods[uid] = PodSim(
            {
                "metadata": {
                    "name": name,
                    "uid": uid,
                    "creationTimestamp": rfc3339(self.now),
                    "labels": {**template["metadata"]["labels"], **labels},
                    "annotations": dict(template["metadata"]["annotations"]),
                },
                "spec": spec,
                "status": {
                    "phase": "Pending",
                    "conditions": [],
                    "containerStatuses": [
                        {
                            "name": main["name"],
                            "image": main["image"],
                            "restartCount": 0,
                            "state": {"waiting": {"reason": "ContainerCreating"}},
                            "lastState": {},
                        }
                    ],
                },
            },
            self.now + START_SECONDS,
        )

    def _delete_pod(self, pod: PodSim, force: bool) -> None:
        if pod.learner in self.formed:
            self.broken.add(pod.learner)
        if force:
            self._remove(pod)
            return
        if not pod.terminating:
            grace = pod.obj["spec"].get("terminationGracePeriodSeconds", 30)
            pod.obj["metadata"]["deletionTimestamp"] = rfc3339(self.now + grace)
            pod.obj["metadata"]["deletionGracePeriodSeconds"] = grace
            pod.obj["drained_at"] = self.now + (DRAIN_SECONDS if pod.running else 0.0)

    def _remove(self, pod: PodSim) -> None:
        self.pods.pop(pod.uid, None)
        if self.syncer.pod == pod.uid:
            self.syncer.pod = ""
        for slot in self.syncer.slots:
            if slot.process.startswith(pod.uid.replace("-", "")) and slot.state == "draining":
                slot.state = "drained"

    # ------------------------------------------------------------- kubelets

    def _kubelets(self) -> None:
        for pod in list(self.pods.values()):
            node = pod.obj["spec"].get("nodeName")
            if node is not None and not self.nodes[node]:
                self._condition(pod, "Ready", False, "")
                continue
            if pod.terminating and self.now >= pod.obj["drained_at"]:
                self._remove(pod)
            elif not pod.running:
                self._start(pod)
            elif pod.name in self.crashing and not pod.terminating and self.now >= pod.ready_to_start + 0.5:
                self._crash(pod, self.crashing[pod.name])
            if pod.running and pod.joined:
                self._condition(pod, "Ready", True, "")
            if pod.running and (pod.role != "learner" or pod.rank) and self.now >= pod.ready_to_start + 1:
                self._condition(pod, "Ready", True, "")

    def _groups(self) -> None:
        """Learners of several pods form when all of them run, and end as one."""
        groups: dict[tuple[str, int], list[PodSim]] = {}
        for pod in self.of("learner"):
            if pod.group_pods > 1:
                groups.setdefault(pod.learner, []).append(pod)
        for learner, pods in groups.items():
            running = [pod for pod in pods if pod.running and self._reachable(pod)]
            formed = self.formed.get(learner, {})
            ids = {pod.process for pod in pods if pod.running}
            missing = [node for process, node in formed.items() if process not in ids]
            mine = [pod for pod in running if pod.process in formed]
            if missing and any(self.nodes.get(node, True) for node in missing):
                for pod in mine:
                    self._crash(pod, WorkerExit.GROUP, "connection closed by peer") if not pod.terminating else None
                del self.formed[learner]
            elif formed and not mine:
                del self.formed[learner]
            elif not formed and len(running) == pods[0].group_pods:
                self.broken.discard(learner)
                self.formed[learner] = {pod.process: pod.obj["spec"]["nodeName"] for pod in running}
                for pod in running:
                    pod.joins_at = self.now + JOIN_SECONDS

    def _trains(self, pod: PodSim) -> bool:
        """Whether a pod that leads a learner has all its others."""
        return pod.group_pods == 1 or pod.process in self.formed.get(pod.learner, {})

    def _start(self, pod: PodSim) -> None:
        if pod.terminating or pod.obj["status"]["phase"] == "Failed":
            return
        status = pod.obj["status"]
        if pod.obj["spec"].get("nodeName") is None:
            well = [n for n, ok in self.nodes.items() if ok]
            # The claim is ReadWriteOncePod: while one pod has it, no other is placed.
            taken = pod.role == "syncer" and any(
                p is not pod and p.obj["spec"].get("nodeName") and p.obj["status"]["phase"] != "Failed"
                for p in self.of("syncer")
            )
            if pod.name in self.unschedulable or not well or taken:
                status["conditions"] = [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": IN_USE if taken else "0/3 nodes are available: 3 Insufficient cpu.",
                    }
                ]
                pod.ready_to_start = self.now + START_SECONDS
                return
            status["conditions"] = [{"type": "PodScheduled", "status": "True"}]
            pod.obj["spec"]["nodeName"] = self.rng.choice(well)
        if pod.image in self.bad_images:
            pod.container["state"] = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
            pod.ready_to_start = self.now + START_SECONDS
            return
        if self.now < pod.ready_to_start:
            return
        if pod.container["lastState"]:
            pod.container["restartCount"] += 1
        pod.generation += 1
        pod.joined = False
        pod.joins_at = self.now + JOIN_SECONDS
        pod.container["state"] = {"running": {"startedAt": rfc3339(self.now)}}
        status["phase"] = "Running"

    def _crash(self, pod: PodSim, code: int, words: str = "") -> None:
        said = words or self.last_words
        ended = {"exitCode": code, "reason": "Error", "message": said, "finishedAt": rfc3339(self.now)}
        pod.container["lastState"] = {"terminated": ended}
        pod.container["state"] = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
        self._condition(pod, "Ready", False, "")
        wait = min(300.0, 10.0 * 2 ** max(0, pod.container["restartCount"] - 1))
        pod.ready_to_start = self.now + (wait if pod.container["restartCount"] else 1.0)
        pod.joined = False
        if self.syncer.pod == pod.uid:
            self.syncer.pod = ""

    def _condition(self, pod: PodSim, kind: str, holds: bool, reason: str) -> None:
        rows = [c for c in pod.obj["status"]["conditions"] if c["type"] != kind]
        rows.append({"type": kind, "status": "True" if holds else "False", "reason": reason})
        pod.obj["status"]["conditions"] = rows

    # ------------------------------------------------------------- the syncer

    def _reachable(self, pod: PodSim) -> bool:
        node = pod.obj["spec"].get("nodeName")
        return node is None or self.nodes[node]

    def _in_quorum(self, slot: SlotSim) -> bool:
        return slot.state == "active" and self.now >= slot.ready_at

    def _syncer(self) -> None:
        syncer = self.syncer
        running = [p for p in self.of("syncer") if p.running and self._reachable(p)]
        current = next((p for p in running if p.uid == syncer.pod), None)
        if current is None:
            syncer.pod = ""
            fresh = [p for p in running if not p.terminating and self.now >= p.ready_to_start + 1]
            if fresh:
                self._claim_epoch(fresh[-1])
            return
        self._members(syncer)
        active = sum(self._in_quorum(s) for s in syncer.slots)
        if syncer.phase == "waiting" and active >= syncer.required:
            syncer.phase = "training"
        if syncer.phase in ("training", "holding"):
            syncer.phase = "training" if active >= syncer.required and not syncer.misses else "holding"
            if syncer.phase == "training" and not syncer.problem:
                syncer.merges += 1
                syncer.tokens += 100 * active
                for slot in syncer.slots:
                    slot.merged += self._in_quorum(slot)
            if syncer.tokens >= syncer.stop:
                syncer.phase, syncer.target, syncer.moves_at = "draining", "complete", self.now + 2
        elif syncer.phase == "draining" and self.now >= syncer.moves_at and not syncer.problem:
            syncer.phase = syncer.target

    def _claim_epoch(self, pod: PodSim) -> None:
        syncer, config = self.syncer, self.objects.get(names.settings_map(self.job["metadata"]["name"]))
        assert config is not None, "a syncer that runs without its settings"
        spec = json.loads(config["data"]["job.json"])["spec"]
        syncer.pod, syncer.epoch = pod.uid, syncer.epoch + 1
        syncer.required, syncer.stop = spec["sync"]["quorum"], spec["training"]["stop"]["tokens"] or 10**12
        known = {(s.region, s.ordinal): s for s in syncer.slots}
        places = [(r["name"], i) for r in spec["regions"] for i in range(r["learners"])]
        syncer.slots = [known.get(place, SlotSim(*place, place=place)) for place in places]
        syncer.places = len(places)
        syncer.bounds = {r["name"]: r["maxLearners"] or r["learners"] for r in spec["regions"]}
        for slot in syncer.slots:
            slot.state = "lost" if slot.process else "empty"
        if syncer.phase != "complete" or syncer.tokens < syncer.stop:
            syncer.phase = "waiting"
        for learner in self.of("learner"):
            learner.joins_at = max(learner.joins_at, self.now + 0.5)
            learner.joined = False

    def _members(self, syncer: SyncerSim) -> None:
        alive = {}
        for pod in self.of("learner"):
            if pod.running and pod.rank == 0 and self._reachable(pod) and pod.uid not in self.deaf:
                alive[pod.process] = pod
        for slot in syncer.slots:
            if slot.state in HOLDING:
                if slot.process in alive:
                    slot.heard = self.now
                    if alive[slot.process].terminating:
                        slot.state = "draining"
                elif slot.state == "draining":
                    slot.state = "drained"
                elif self.now - slot.heard > 10:
                    slot.state = "lost"
        beyond = [slot for slot in syncer.slots[syncer.places :] if slot.state in HOLDING]
        syncer.slots[syncer.places :] = beyond
        syncer.standbys = [p for p in syncer.standbys if p in alive]
        if syncer.phase not in ("waiting", "training", "holding"):
            return
        for process, pod in sorted(alive.items(), key=lambda item: item[1].name):
            if pod.terminating or self.now < pod.joins_at or not self._trains(pod):
                continue
            self._condition(pod, "Ready", True, "")
            pod.joined = True
            if any(s.process == process and s.state in HOLDING for s in syncer.slots):
                continue
            free = [s for s in syncer.slots if s.state in ("empty", "lost", "drained")]
            # A newcomer takes over the place where its predecessor was.
            old = [
                s for s in syncer.slots if s.process and s.place == (pod.region, pod.ordinal) and s.process not in alive
            ]
            own = [s for s in free if (s.region, s.ordinal) == (pod.region, pod.ordinal)]
            held = sum(s.place[0] == pod.region and s.state in HOLDING for s in syncer.slots)
            if not old and not free and held < syncer.bounds.get(pod.region, 0):
                free = [SlotSim(pod.region, pod.ordinal)]
                syncer.slots += free
            for slot in (*old, *own, *free):
                slot.process, slot.state, slot.heard = process, "active", self.now
                slot.ready_at, slot.place = self.now + JOIN_SECONDS, (pod.region, pod.ordinal)
                if process in syncer.standbys:
                    syncer.standbys.remove(process)
                break
            else:
                if process not in syncer.standbys:
                    syncer.standbys.append(process)

    def document(self) -> StatusDocument:
        syncer = self.syncer
        return status_document(
            phase=syncer.phase,
            message=syncer.misses,
            store_problem=syncer.problem,
            regions_lost=syncer.lost,
            epoch=syncer.epoch,
            merges=syncer.merges,
            goodput=0.9,
            loss=2.0 if self.active() else None,  # as a syncer that began again after the end
            quorum={"active": self.active(), "required": syncer.required},
            standby=len(syncer.standbys),
            standbys=list(syncer.standbys),
            tokens={"trained": syncer.tokens, "merged": syncer.tokens, "pending": 0, "dropped": 0},
            step=max((s.merged for s in syncer.slots), default=0),
            slots=[
                slot_row(
                    i,
                    region=s.place[0],
                    ordinal=s.place[1],
                    process=s.process,
                    state=s.state,
                    ready=self._in_quorum(s),
                    step=s.merged,
                    loss=2.0,
                    merged_pushes=s.merged,
                    heard_seconds_ago=self.now - s.heard if s.state in HOLDING else None,
                )
                for i, s in enumerate(syncer.slots)
            ],
        )

    def _ask(self) -> None:
        running = [p for p in self.of("syncer") if p.running]
        if not running:
            self.asked = None
            return
        if self.now - self.asked_at < self.poll:
            return
        self.asked_at = self.now
        if self.syncer.pod and not self.syncer_silent:
            self.asked = ProgramAnswer(self.document(), "", self.now - self.answer_age, None)
            if self.syncer.phase in ("complete", "failed"):
                tokens = {"trained": self.syncer.tokens, "merged": self.syncer.tokens, "pending": 0, "dropped": 0}
                self.report = job_report(outcome=self.syncer.phase, tokens=tokens, goodput=0.9)
        else:
            since = self.asked.failing_since if self.asked is not None else None
            self.asked = ProgramAnswer(None, "no answer", self.now, since if since is not None else self.now)

    # ------------------------------------------------------------- the operator

    def observed(self) -> Observed:
        nodes = {
            name: {
                "metadata": {"name": name},
                "status": {
                    "conditions": [
                        {
                            "type": "Ready",
                            "status": "True" if well else "Unknown",
                            "lastTransitionTime": rfc3339(self.node_since[name]),
                        }
                    ]
                },
            }
            for name, well in self.nodes.items()
        }
        return Observed(
            now=self.now,
            job=_copy(self.job),
            objects={ref: _copy(obj) for ref, obj in {**self.foreign, **self.objects}.items()},
            pods=tuple(_copy(pod.obj) for pod in self.pods.values()),
            nodes=None if self.blind else nodes,
            cluster_events=tuple(n for n in self.cluster_events if self.now - n.time < 600),
            apply_errors=self.apply_errors,
            syncer=self.asked,
            report=self.report,
        )

    def _operator(self) -> None:
        before = self.asked
        self._ask()
        news = (before is None) != (self.asked is None)
        if self.now < self.next_turn and not news and not self._pod_news():
            return
        self.next_turn = float("inf")
        made = self.turn()
        self.next_turn = min(self.next_turn, self.now + made.wake_in)

    def _pod_news(self) -> bool:
        pods = [pod.obj for pod in self.pods.values()]
        if pods == self._pods_seen:
            return False
        self._pods_seen = _copy(pods)
        return True

    def turn(self) -> JobPlan:
        """One turn: plan, check, carry out."""
        observed = self.observed()
        frozen = _copy([observed.job, list(observed.pods)])
        made = plan_job(observed, self.memory, self.settings)
        assert [observed.job, list(observed.pods)] == frozen, "the plan changed it"
        self._check(made)
        self._carry_out(made)
        self.plans.append(made)
        self.poll = made.poll_syncer
        return made

    def _check(self, made: JobPlan) -> None:
        if self.plans:
            again = set(made.events) & set(self.plans[-1].events)
            assert not again, f"told twice: {again}\n{self.story()}"
        for manifest in made.apply:
            ref = Ref(manifest["kind"], manifest["metadata"]["name"])
            assert manifest["metadata"]["labels"][LABEL_JOB] == self.job["metadata"]["name"], ref
        for delete in made.deletes:
            assert delete.ref not in self.foreign, f"a foreign object is deleted: {delete}"
        taken: dict[str, list[PodSim]] = {}
        asked = {delete.uid for delete in made.deletes}
        for delete in made.deletes:
            pod = self.pods.get(delete.uid)
            if delete.ref.kind != "Pod" or pod is None or delete.force or pod.terminating:
                continue
            assert pod.role == "learner", f"{delete} is not the operator's to delete"
            mates = [p for p in self.of("learner") if p.learner == pod.learner]
            left = [p for p in mates if p.uid not in asked and not p.terminating and p.joined]
            assert not left, f"of one learner some pods are taken: {pod.name}, and not {left}\n{self.story()}"
            if pod.learner in self.broken:  # the others go with the one that it has lost
                self.taken.append((self.now, pod.name))
                continue
            if pod.rank == 0:
                taken.setdefault(pod.region, []).append(pod)
        working = 0
        for region, pods in taken.items():
            others = [
                p
                for p in self.of("learner")
                if p.region == region
                and p.terminating
                and self.now <= unix_seconds(p.obj["metadata"]["deletionTimestamp"]) + 5
            ]
            wanted = next(
                (r["learners"] + r.get("spares", 0) for r in self.job["spec"]["regions"] if r["name"] == region), 0
            )
            others = [p for p in others if p.ordinal < wanted]
            assert len(pods) == 1 and not others, f"two of {region} at once: {pods} {others}\n{self.story()}"
            mine = [s for s in self.syncer.slots if s.process == pods[0].process and pods[0].running]
            if self.syncer.pod:
                working += any(self._in_quorum(s) for s in mine)
            else:
                works = pods[0].running and pods[0].joined and pods[0].uid not in self.deaf
                assert not works, f"one that works is taken without a syncer: {pods[0].name}\n{self.story()}"
            self.taken.append((self.now, pods[0].name))
        if working:
            k, m = self.syncer.required, len(self.syncer.slots)
            left = self.active() - working
            assert left >= k or (k == m and working == 1), f"below K by our hand: {left} < {k}\n{self.story()}"

    def _carry_out(self, made: JobPlan) -> None:
        metadata = self.job["metadata"]
        if made.finalizer and FINALIZER not in metadata["finalizers"]:
            metadata["finalizers"].append(FINALIZER)
        self.secrets |= {wanted.name for wanted in made.secrets}
        self._apply(made)
        for call in made.calls:
            self._call(call.method, call.body)
        for delete in made.deletes:
            self._delete(delete)
        if made.status is not None and (
            differs_beyond_progress(self.status, made.status) or self.now - self.status_at >= 60
        ):
            self.job["status"] = _copy(made.status)
            self.status_at = self.now
        self.events += [(self.now, event) for event in made.events]
        if made.delete_job and "deletionTimestamp" not in metadata:
            self.delete_job()
        if not made.finalizer and "deletionTimestamp" in metadata:
            metadata["finalizers"].remove(FINALIZER)
            self.gone = True

    def delete_job(self) -> None:
        self.job["metadata"]["deletionTimestamp"] = rfc3339(self.now)
        self.next_turn = self.now

    def _apply(self, made: JobPlan) -> None:
        apply_errors = [error for error in self.apply_errors if error.ref in self.kept_by_policy]
        for manifest in made.apply:
            ref = Ref(manifest["kind"], manifest["metadata"]["name"])
            if ref in self.foreign:
                apply_errors.append(ApplyError(ref, "conflict", f"{ref.kind} {ref.name} is not this job's"))
                continue
            live = self.objects.get(ref)
            new = _copy(manifest)
            if live is None:
                new["metadata"] |= {"uid": self._new_uid(), "generation": 1}
                self.next_turn = self.now
            else:
                generation = live["metadata"]["generation"] + (live.get("spec") != new.get("spec"))
                new["metadata"] |= {"uid": live["metadata"]["uid"], "generation": generation}
                new["status"] = live.get("status", {})
                if "deletionTimestamp" in live["metadata"]:
                    new["metadata"]["deletionTimestamp"] = live["metadata"]["deletionTimestamp"]
            self.objects[ref] = new
        if set(apply_errors) != set(self.apply_errors):
            self.next_turn = self.now
        self.apply_errors = tuple(apply_errors)

    def _call(self, method: str, body: Object) -> None:
        syncer = self.syncer
        if not syncer.pod or self.syncer_silent:
            return
        if method == "process-ended":
            for slot in syncer.slots:
                if slot.process == body["process"] and slot.state in HOLDING:
                    alive = [p for p in self.of("learner") if p.process == body["process"] and p.running]
                    assert not alive, f"a living process was said to have ended: {body}\n{self.story()}"
                    slot.state = "lost"
        elif method == "announce":
            phase = body["phase"]
            if syncer.phase in ("complete", "failed", "deleted", "suspended"):
                return
            if phase == "suspended":
                if syncer.phase != "draining":
                    syncer.phase, syncer.target, syncer.moves_at = "draining", "suspended", self.now + 2
            else:
                syncer.phase = phase

    def _delete(self, delete: Delete) -> None:
        if delete.ref.kind == "Pod":
            pod = self.pods.get(delete.uid)
            if pod is not None:
                self._delete_pod(pod, delete.force)
            return
        live = self.objects.get(delete.ref)
        if live is None or live["metadata"]["uid"] != delete.uid:
            return
        if delete.ref in self.kept_by_policy:
            error = ApplyError(delete.ref, "forbidden", "admission denied the request: volumes are kept")
            if error not in self.apply_errors:
                self.next_turn = self.now
            self.apply_errors = (*(e for e in self.apply_errors if e != error), error)
            return
        self.remove_object(delete.ref)

    def remove_object(self, ref: Ref) -> None:
        """An object goes, and what belongs to it."""
        del self.objects[ref]
        for pod in list(self.pods.values()):
            mine = pod.obj["metadata"]["labels"].get("set") == ref.name
            if mine and ref.kind in ("StatefulSet", "Deployment"):
                self._delete_pod(pod, False)


class Far(World):
    """The cluster without the syncer: its learners' status pages are what it sees of the syncer."""

    def __init__(self, job: Object) -> None:
        super().__init__(job, settings=PlanSettings("far", "diloco-system", "s:1", "w:1"))
        self.page: dict[str, Any] = {"phase": "training", "connected": True, "tried": True, "slot": 1}

    def observed(self) -> Observed:
        found = super().observed()
        pages = {
            pod.name: ProgramAnswer(learner_page(**{**self.page, "process": pod.process}), "", self.now)
            for pod in self.of("learner")
            if pod.running
        }
        return Observed(**{**{f: getattr(found, f) for f in found.__slots__}, "learners": pages})


def _copy(value: Any) -> Any:
    """As it comes back from the API server, through JSON."""
    return from_json(to_json(value))


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:10]


# ------------------------------------------------------------------ what many tests begin with


def started(count: int = 3, **spec: Any) -> World:
    world = World(job_object(count=count, **spec))
    world.until(World.whole, 120)
    return world


def template(image: str) -> dict[str, Any]:
    return {"podTemplate": {"spec": {"containers": [{"name": "learner", "image": image}]}}}


def lost_learner(world: World) -> Any:
    """A learner on a node where the syncer is not."""
    taken = {p.obj["spec"]["nodeName"] for p in world.of("syncer")}
    return next(p for p in world.of("learner") if p.obj["spec"]["nodeName"] not in taken)


def idle(world: World) -> None:
    """Nothing changes any more: the same observation gives the same plan, and nothing to do."""
    world.run(30)
    world.turn()
    one, before, two = world.turn(), world.status, world.turn()
    assert one.apply == two.apply and one.status == two.status and two.status is not None
    assert not two.calls and not two.deletes and not two.events
    assert not differs_beyond_progress(before, two.status)
    assert {Ref(m["kind"], m["metadata"]["name"]) for m in two.apply} <= set(world.objects)
