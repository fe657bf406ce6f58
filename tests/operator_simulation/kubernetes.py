"""What Kubernetes does in one cluster: controllers, the scheduler, nodes and their kubelets.

As documented: a StatefulSet (Parallel, OnDelete) makes a pod when none of its name is there; a Deployment (Recreate)
makes a new pod when its last one ends; a node whose kubelet is silent for ``NODE_SILENT_SECONDS`` is NotReady, and
``TOLERATION_SECONDS`` later its pods are marked for deletion, which only their kubelet ends. A kubelet that cannot
reach the API server lets its containers run, and ends those whose pods are gone when it can again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from diloco_operator import names
from diloco_operator.job import rfc3339, unix_seconds
from diloco_operator.model import Object
from diloco_protocol.vocabulary import LABEL_JOB, LABEL_POD_INDEX, LABEL_REGION, LABEL_ROLE, LABEL_SHARD
from operator_simulation.api_server import ApiServer
from operator_simulation.virtual_time import WALL

NODE_SILENT_SECONDS, TOLERATION_SECONDS = 40.0, 20.0
CRASH_BACKOFF, LONGEST_CRASH_BACKOFF = 10.0, 300.0


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(eq=False)
class Process:
    """A container that runs on a node. ``id`` begins with its pod's UID, as a learner's does."""

    id: str
    role: str
    pod_uid: str
    pod_name: str
    region: str
    ordinal: int  # of its learner; of a shard its number
    rank: int  # of its pod in the learner
    pods: int  # of the learner
    node: Node
    job: Object  # the settings that it read when it started
    started: float
    image: str = ""
    command: tuple[str, ...] = ()
    ready: bool = False
    hung: bool = False  # its own fault: it runs, and does nothing any more
    told_to_end: float | None = None
    ends_at: float | None = None  # it has drained by then
    ended: int | None = None  # exit code
    last_line: str = ""
    group: tuple[Process, ...] = ()  # of a learner of several pods: the processes that found each other, by rank
    waits_since: float | None = None  # for others of its learner: until they are there, or after they fell silent

    @property
    def alive(self) -> bool:
        return self.ended is None and self.node.up

    @property
    def works(self) -> bool:
        return self.alive and not self.hung

    @property
    def place(self) -> str:
        """The name of its learner's leading pod; of another's its own pod's."""
        holder, _, index = self.pod_name.rpartition("-")
        return f"{holder}-{int(index) - self.rank}" if self.pods > 1 else self.pod_name


@dataclass(eq=False)
class Node:
    """A machine. ``endpoint`` names it in the network."""

    cluster: str
    name: str
    up: bool = True
    heard: float = 0.0  # by the API server
    ready: bool = True
    since: float = 0.0  # of ``ready``
    cordoned: bool = False
    processes: dict[str, Process] = field(default_factory=dict)  # by pod UID, the newest
    ends: dict[str, list[tuple[int, str, float]]] = field(default_factory=dict)  # by pod UID: exit codes
    start_at: dict[str, float] = field(default_factory=dict)  # by pod UID: no sooner
    mounted: dict[str, str] = field(
        default_factory=dict
    )  # by pod UID: the job's settings, which stay when they are gone

    @property
    def endpoint(self) -> str:
        return f"{self.cluster}/{self.name}"


class Kubernetes:
    """One cluster. ``reaches(a, b)``: whether two endpoints of the network reach each other now."""

    def __init__(self, name: str, nodes: int, rng: random.Random, reaches: Callable[[str, str], bool]) -> None:
        self.name = name
        self.server = ApiServer(name)
        self.nodes = {f"n{i}": Node(name, f"n{i}") for i in range(nodes)}
        self.quota: int | None = None
        self.pull_seconds = (0.5, 3.0)
        self.failures: list[tuple[float, str, int]] = []  # when, which pod's program, with which exit code
        self.no_volumes_since: float | None = None  # claims that are made since then do not bind; None: they do
        self.volume_gone: Callable[[], None] = lambda: None  # told when the syncer's volume is deleted
        self.programs: dict[str, Callable[[Process], None]] = {}
        self._rng = rng
        self._reaches = reaches
        self._templates: dict[int, tuple[Object, str]] = {}
        self._generation = 0
        for node in self.nodes.values():
            self._write_node(node)

    @property
    def api(self) -> str:
        return f"{self.name}/api"

    def processes(self, role: str) -> list[Process]:
        """All that run, reachable or not."""
        found = [p for node in self.nodes.values() for p in node.processes.values()]
        return [process for process in found if process.role == role and process.alive]

    def process_of(self, uid: str) -> Process | None:
        return next((node.processes[uid] for node in self.nodes.values() if uid in node.processes), None)

    def holds(self, pod: Object) -> bool:
        """Whether the pod is one of this cluster's, and has a node."""
        meta = pod["metadata"]
        live = self.server.find("Pod", meta["namespace"], meta["name"])
        return live is not None and live["metadata"]["uid"] == meta["uid"] and bool(live["spec"].get("nodeName"))

    def pods(self) -> list[Object]:
        return self.server.all("Pod")

    def tick(self) -> None:
        """Half a second passes."""
        for kind, control in (("StatefulSet", self._stateful_set), ("Deployment", self._deployment)):
            for obj in self.server.all(kind):
                if self._rng.random() < 0.8:  # controllers are not in step with anything
                    control(obj)
        self._nodes()
        self._claims()
        for pod in self.pods():
            if not pod["spec"].get("nodeName") and not pod["metadata"].get("deletionTimestamp"):
                self._schedule(pod)
        for node in self.nodes.values():
            if node.up:
                self._run(node)
                if self._reaches(node.endpoint, self.api):
                    self._kubelet(node)

    # ------------------------------------------------------------------ controllers

    def _owned(self, obj: Object) -> list[Object]:
        uid = obj["metadata"]["uid"]
        return [p for p in self.pods() if p["metadata"]["ownerReferences"][0]["uid"] == uid]

    def revision(self, obj: Object) -> str:
        template = obj["spec"]["template"]
        known = self._templates.get(id(template))
        if known is None:  # objects are never changed in place
            text = json.dumps(template, sort_keys=True)
            known = self._templates[id(template)] = (template, hashlib.sha256(text.encode()).hexdigest()[:10])
        return f"{obj['metadata']['name']}-{known[1]}"

    def _stateful_set(self, obj: Object) -> None:
        meta, replicas = obj["metadata"], obj["spec"]["replicas"]
        status = {"observedGeneration": meta["generation"], "updateRevision": self.revision(obj)}
        self.server.put("StatefulSet", {**obj, "status": {**(obj.get("status") or {}), **status}})
        for pod in self._owned(obj):
            over = pod["status"].get("phase") == "Failed"
            if over or int(pod["metadata"]["labels"][LABEL_POD_INDEX]) >= replicas:
                self._delete(pod)
        for ordinal in range(replicas):
            name = f"{meta['name']}-{ordinal}"
            if self.server.find("Pod", meta["namespace"], name) is None:
                labels = {LABEL_POD_INDEX: str(ordinal), names.POD_REVISION: self.revision(obj)}
                self._create(obj, obj, name, labels)

    def _deployment(self, obj: Object) -> None:
        meta, revision = obj["metadata"], self.revision(obj)
        mine = self._owned(obj)
        for pod in mine:
            if pod["metadata"]["labels"][names.POD_REVISION] != revision or not obj["spec"]["replicas"]:
                self._delete(pod)
        left = [p for p in mine if p["metadata"]["labels"][names.POD_REVISION] != revision]
        current = [
            p for p in mine if not p["metadata"].get("deletionTimestamp") and p["status"].get("phase") != "Failed"
        ]
        if obj["spec"]["replicas"] and not current and not left:
            self._generation += 1
            name = f"{revision}-{self._generation:05x}"
            made_by = {"metadata": {"name": revision, "uid": meta["uid"]}}
            self._create(obj, made_by, name, {names.POD_REVISION: revision}, kind="ReplicaSet")

    def _create(
        self, obj: Object, warned: Object, name: str, labels: dict[str, str], kind: str = "StatefulSet"
    ) -> None:
        if self.quota is not None and len(self.pods()) >= self.quota:
            message = f'pods "{name}" is forbidden: exceeded quota: small, used: pods={self.quota}'
            self.server.warn(kind, warned, "FailedCreate", message)
            return
        template, meta = obj["spec"]["template"], obj["metadata"]
        owner = {"kind": obj["kind"], "name": meta["name"], "uid": meta["uid"], "controller": True}
        self.server.create(
            "Pod",
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": name,
                    "namespace": meta["namespace"],
                    "labels": {**template["metadata"]["labels"], **labels},
                    "annotations": dict(template["metadata"]["annotations"]),
                    "ownerReferences": [owner],
                },
                "spec": template["spec"],
                "status": {"phase": "Pending"},
            },
        )

    def _delete(self, pod: Object, grace: int | None = None) -> None:
        meta = pod["metadata"]
        if not meta.get("deletionTimestamp") or grace == 0:
            self.server.delete("Pod", meta["namespace"], meta["name"], meta["uid"], grace)

    # ------------------------------------------------------------------ nodes and the scheduler

    def _write_node(self, node: Node) -> None:
        condition = {
            "type": "Ready",
            "status": "True" if node.ready else "Unknown",
            "lastTransitionTime": rfc3339(WALL + node.since),
        }
        before = self.server.find("Node", "", node.name)
        status = {"conditions": [condition]}
        if before is None:
            self.server.objects[("Node", "", node.name)] = {
                "kind": "Node",
                "metadata": {"name": node.name, "uid": f"node-{node.name}", "resourceVersion": "1"},
                "status": status,
            }
        else:
            self.server.put("Node", {**before, "status": status})

    def _nodes(self) -> None:
        at = now()
        for node in self.nodes.values():
            if node.up and self._reaches(node.endpoint, self.api):
                node.heard = at
            ready = at - node.heard < NODE_SILENT_SECONDS
            if ready != node.ready:
                node.ready, node.since = ready, at
                self._write_node(node)
            if ready or at - node.since < TOLERATION_SECONDS:
                continue
            for pod in self.pods():
                if pod["spec"].get("nodeName") == node.name and not pod["metadata"].get("deletionTimestamp"):
                    reason = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
                    self._set_status(pod, conditions=[*_other(pod, "DisruptionTarget"), reason])
                    self._delete(pod)

    def _claims(self) -> None:
        """A claim that is being deleted goes when no pod uses it, and its data with it."""
        for claim in self.server.all("PersistentVolumeClaim"):
            meta = claim["metadata"]
            used = any(
                pod["metadata"]["labels"].get(LABEL_ROLE) == "syncer"
                and pod["spec"].get("nodeName")
                and pod["status"].get("phase") != "Failed"
                for pod in self.pods()
            )
            phase, since = (claim.get("status") or {}).get("phase"), self.no_volumes_since
            if since is not None and phase is None and unix_seconds(meta["creationTimestamp"]) >= WALL + since:
                self.server.put("PersistentVolumeClaim", {**claim, "status": {"phase": "Pending"}})
            elif since is None and phase == "Pending":
                self.server.put("PersistentVolumeClaim", {**claim, "status": {"phase": "Bound"}})
            if meta.get("deletionTimestamp") and not used:
                self.server.patch(
                    "PersistentVolumeClaim", meta["namespace"], meta["name"], {"metadata": {"finalizers": None}}, ""
                )
                self.volume_gone()

    def _may_mount(self) -> bool:
        claims = self.server.all("PersistentVolumeClaim")
        return any(
            not claim["metadata"].get("deletionTimestamp") and (claim.get("status") or {}).get("phase") != "Pending"
            for claim in claims
        )

    def _schedule(self, pod: Object) -> None:
        role = pod["metadata"]["labels"].get(LABEL_ROLE)
        ready = [node.name for node in self.nodes.values() if node.ready and not node.cordoned]
        # The claim is ReadWriteOncePod: while one pod has it, no other is placed.
        has_claim = role == "syncer" and "persistentVolumeClaim" in json.dumps(pod["spec"])
        held = has_claim and any(
            other is not pod
            and other["metadata"]["labels"].get(LABEL_ROLE) == "syncer"
            and other["spec"].get("nodeName")
            and other["status"].get("phase") != "Failed"
            for other in self.pods()
        )
        if not ready or held or (has_claim and not self._may_mount()):
            message = "0/3 nodes are available: 3 Insufficient cpu."
            if held:
                message = "0/3 nodes: pod has pod using PersistentVolumeClaim with the same name and ReadWriteOncePod"
            elif has_claim and self.no_volumes_since is not None:
                message = "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims."
            row = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            self._set_status(pod, conditions=[row])
            return
        uid = pod["metadata"]["uid"]
        placed = {**pod, "spec": {**pod["spec"], "nodeName": self._rng.choice(ready)}}
        placed["status"] = {**pod["status"], "conditions": [{"type": "PodScheduled", "status": "True"}]}
        self.server.put("Pod", placed)
        self.nodes[placed["spec"]["nodeName"]].start_at[uid] = now() + self._rng.uniform(*self.pull_seconds)

    # ------------------------------------------------------------------ kubelets

    def _run(self, node: Node) -> None:
        """Containers, whether or not anybody sees them."""
        for process in node.processes.values():
            if process.ended is None and process.ends_at is not None and now() >= process.ends_at:
                process.ended = 0
            if process.ended is None:
                self.programs[process.role](process)

    def _kubelet(self, node: Node) -> None:
        mine = {p["metadata"]["uid"]: p for p in self.pods() if p["spec"].get("nodeName") == node.name}
        for uid, process in list(node.processes.items()):
            if uid not in mine:  # its pod was deleted by force, or while nobody could tell the kubelet
                self._end(process)
                if process.ended is not None:
                    del node.processes[uid]
        for uid, pod in mine.items():
            self._sync(node, uid, pod)

    def _end(self, process: Process) -> None:
        if process.told_to_end is None:
            process.told_to_end = now()
            in_vain = process.hung or (process.group and process.waits_since is not None)
            process.ends_at = now() + (30.0 if in_vain else self._rng.uniform(0.5, 4.0))

    def _sync(self, node: Node, uid: str, pod: Object) -> None:
        process = node.processes.get(uid)
        if pod["status"].get("phase") == "Failed" and not pod["metadata"].get("deletionTimestamp"):
            return  # it was evicted
        if pod["metadata"].get("deletionTimestamp"):
            if process is not None and process.ended is None:
                self._end(process)
            else:
                node.processes.pop(uid, None)
                meta = pod["metadata"]
                self.server.remove("Pod", meta["namespace"], meta["name"])
                return
        elif process is not None and process.ended is not None:
            ends = node.ends.setdefault(uid, [])
            ends.append((process.ended, process.last_line, now()))
            self.failures += [(now(), process.pod_name, process.ended)] if process.ended else []
            del node.processes[uid]
            process = None
            wait = CRASH_BACKOFF * 2.0 ** (len(ends) - 2) if len(ends) > 1 else 0.5
            node.start_at[uid] = now() + min(LONGEST_CRASH_BACKOFF, wait)
        elif process is None and now() >= node.start_at.get(uid, 0.0) and (uid in node.ends or self._mounts(pod)):
            process = self._start(node, uid, pod)  # again with what was mounted at first, if it had begun before
        self._show(node, uid, pod, process)

    def _mounts(self, pod: Object) -> bool:
        space = pod["metadata"]["namespace"]
        for volume in pod["spec"].get("volumes") or ():
            for field_name, kind, key in (("configMap", "ConfigMap", "name"), ("secret", "Secret", "secretName")):
                source = volume.get(field_name)
                if source and not source.get("optional") and self.server.find(kind, space, source[key]) is None:
                    missing = f'{kind.lower()} "{source[key]}" not found'
                    message = f'MountVolume.SetUp failed for volume "{volume["name"]}" : {missing}'
                    self.server.warn("Pod", pod, "FailedMount", message)
                    return False
        return True

    def _start(self, node: Node, uid: str, pod: Object) -> Process:
        labels, count = pod["metadata"]["labels"], len(node.ends.get(uid, ()))
        settings: Any = self.server.find("ConfigMap", pod["metadata"]["namespace"], f"{labels[LABEL_JOB]}-settings")
        if settings is not None:
            node.mounted[uid] = settings["data"]["job.json"]
        main = next(c for c in pod["spec"]["containers"] if c["name"] == _container(labels[LABEL_ROLE]))
        index = int(labels.get(LABEL_POD_INDEX, labels.get(LABEL_SHARD, -1)))
        pods = int(labels.get(names.GROUP_PODS, 1))
        process = Process(
            id=uid.replace("-", "") + f"{count:04x}",
            role=labels[LABEL_ROLE],
            pod_uid=uid,
            pod_name=pod["metadata"]["name"],
            region=labels.get(LABEL_REGION, ""),
            ordinal=index // pods,
            rank=index % pods,
            pods=pods,
            node=node,
            job=json.loads(node.mounted[uid]),
            started=now(),
            image=str(main["image"]),
            command=tuple(map(str, main["command"])),
        )
        node.processes[uid] = process
        return process

    def _show(self, node: Node, uid: str, pod: Object, process: Process | None) -> None:
        role = pod["metadata"]["labels"][LABEL_ROLE]
        ends = node.ends.get(uid, [])
        last = {}
        if ends:
            code, line, at = ends[-1]
            said = {"exitCode": code, "reason": "Error" if code else "Completed", "message": line}
            last = {"terminated": {**said, "finishedAt": rfc3339(WALL + at)}}
        if process is not None:
            state: Object = {"running": {"startedAt": rfc3339(WALL + process.started)}}
        elif ends:
            state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
        else:
            state = {"waiting": {"reason": "ContainerCreating"}}
        ready = process is not None and process.ready
        row = {
            "name": _container(role),
            "ready": ready,
            "restartCount": len(ends) if process is not None else max(0, len(ends) - 1),
            "state": state,
            "lastState": last,
        }
        condition = {"type": "Ready", "status": "True" if ready else "False"}
        self._set_status(
            pod,
            phase="Running" if process is not None or ends else "Pending",
            podIP=f"{node.endpoint}/{uid}",
            containerStatuses=[row],
            conditions=[*_other(pod, "Ready"), condition],
        )

    def _set_status(self, pod: Object, **fields: Any) -> None:
        live = self.server.find("Pod", pod["metadata"]["namespace"], pod["metadata"]["name"])
        if live is None or live["metadata"]["uid"] != pod["metadata"]["uid"]:
            return
        self.server.put("Pod", {**live, "status": {**live["status"], **fields}})

    # ------------------------------------------------------------------ faults

    def power_off(self, node: Node) -> None:
        """The machine dies, and its containers with it."""
        node.up = False
        for process in node.processes.values():
            if process.ended is None:
                process.ended, process.last_line = 255, ""

    def power_on(self, node: Node) -> None:
        node.up = True

    def evict_for_pressure(self, pod: Object) -> None:
        """The kubelet ends the pod, since its node has too little memory or disk. What is left of it is Failed."""
        node = self.nodes[pod["spec"]["nodeName"]]
        process = node.processes.pop(pod["metadata"]["uid"], None)
        if process is not None and process.ended is None:
            process.ended = 137
        reason = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
        conditions = [*_other(pod, "DisruptionTarget"), reason]
        self._set_status(pod, phase="Failed", reason="Evicted", conditions=conditions, containerStatuses=[])

    def evict(self, pod: Object) -> bool:
        """As `kubectl drain` asks for it; False: a PodDisruptionBudget does not allow it now."""
        region = pod["metadata"]["labels"].get(LABEL_REGION)
        for budget in self.server.all("PodDisruptionBudget"):
            mine = [p for p in self.pods() if region and p["metadata"]["labels"].get(LABEL_REGION) == region]
            away = sum(not _is_ready(p) for p in mine)
            if budget["metadata"]["name"].endswith(f"-{region}") and away >= budget["spec"]["maxUnavailable"]:
                return False
        reason = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
        self._set_status(pod, conditions=[*_other(pod, "DisruptionTarget"), reason])
        self._delete(pod)
        return True


def _container(role: str) -> str:
    """The name of the main container of a role's pods."""
    return "syncer" if role == names.SHARD else role


def _is_ready(pod: Object) -> bool:
    rows = pod["status"].get("conditions") or ()
    ready = any(row["type"] == "Ready" and row["status"] == "True" for row in rows)
    return ready and not pod["metadata"].get("deletionTimestamp")


def _other(pod: Object, kind: str) -> list[Object]:
    return [row for row in pod["status"].get("conditions") or () if row["type"] != kind]
