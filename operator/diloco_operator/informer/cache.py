"""The objects of jobs, as the informer and kopf told of them, kept small.

Theory of operation. The informer's threads (reflector.py) and kopf's events (job_events.py) put every object in; a
reconcile takes out what belongs to its job. Of each object only what a plan can depend on is kept, as compressed
JSON: thousands of pods as Python dicts would be hundreds of megabytes.

An object is only replaced by a newer one of the same UID. So the answer to a write of ours, put in at once, is not
undone by a watch that comes after it.

The cache remembers the UIDs that were dropped, and up to which version. An answer that comes later than the watch's
word that the object is gone does not bring the object back. Example: a list is answered with a pod, the watch tells
that the pod was deleted, and only then the list's answer is put in. No watch would ever mention that pod again.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from diloco_operator.kube.kinds import JOB, NODE, POD, Kind
from diloco_operator.model import Key, Object, Ref
from diloco_protocol.vocabulary import LABEL_JOB

_POD_SPEC = ("nodeName", "terminationGracePeriodSeconds", "restartPolicy", "schedulingGates", "priorityClassName")
_VOLUMES = ("persistentVolumeClaim", "ephemeral", "secret", "configMap", "csi", "nfs", "iscsi", "fc")
_CONTAINER_STATUS = ("name", "image", "restartCount", "state", "lastState")
_NODE_CONDITION = ("type", "status", "reason", "lastTransitionTime")
MAX_GONE = 10_000  # UIDs that are remembered; an answer is late by a minute at most


class Entry(NamedTuple):
    """One object."""

    uid: str
    version: str  # metadata.resourceVersion
    job: str  # the job's name; empty: none
    node: str  # a pod's node
    blob: bytes

    def load(self) -> Object:
        """The object, trimmed."""
        return dict(json.loads(zlib.decompress(self.blob)))


def trim(kind: Kind, obj: Object) -> Object:
    """What is kept of an object."""
    meta = {key: value for key, value in obj["metadata"].items() if key not in ("managedFields", "selfLink")}
    annotations = dict(meta.get("annotations") or {})
    if annotations.pop("kubectl.kubernetes.io/last-applied-configuration", None) is not None:
        meta["annotations"] = annotations
    if kind is POD:
        return {
            "metadata": meta,
            "spec": _pod_spec(obj.get("spec") or {}),
            "status": _pod_status(obj.get("status") or {}),
        }
    if kind is NODE:
        return _node(obj)
    return {**obj, "metadata": meta}


def _pod_spec(spec: Mapping[str, Any]) -> Object:
    kept: Object = {key: spec[key] for key in _POD_SPEC if key in spec}
    kept["containers"] = [
        {key: container[key] for key in ("name", "image") if key in container}
        for container in spec.get("containers") or ()
    ]
    volumes = [
        {"name": volume.get("name"), **{key: volume[key] for key in _VOLUMES if key in volume}}
        for volume in spec.get("volumes") or ()
        if any(key in volume for key in _VOLUMES)
    ]
    if volumes:
        kept["volumes"] = volumes
    return kept


def _pod_status(status: Mapping[str, Any]) -> Object:
    kept = {key: value for key, value in status.items() if key not in ("podIPs", "hostIPs", "resources")}
    for name in ("containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses"):
        if name in kept:
            kept[name] = [
                {key: container[key] for key in _CONTAINER_STATUS if key in container} for container in kept[name] or ()
            ]
    return kept


def _node(obj: Object) -> Object:
    # Heartbeats change a node all the time; without their times most changes are none.
    spec, status = obj.get("spec") or {}, obj.get("status") or {}
    return {
        "metadata": {key: obj["metadata"].get(key) for key in ("name", "uid", "creationTimestamp")},
        "spec": {key: spec[key] for key in ("unschedulable", "taints") if key in spec},
        "status": {
            "conditions": [
                {key: condition.get(key) for key in _NODE_CONDITION}
                for condition in status.get("conditions") or ()
                if condition.get("type") == "Ready"
            ]
        },
    }


def job_of(kind: Kind, meta: Mapping[str, Any]) -> str:
    """The name of the job that an object belongs to, as its label says; empty: none."""
    if kind is JOB:
        return str(meta["name"])
    return str((meta.get("labels") or {}).get(LABEL_JOB) or "")


def is_older(version: str, than: str) -> bool:
    """Whether an object's version is not newer than another of the same UID. Versions are numbers that
    rise with every write to the cluster (since Kubernetes 1.35 by contract); what is none is newer."""
    return version == than or (version.isdigit() and than.isdigit() and int(version) < int(than))


class Cache:
    """All objects that are watched. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, dict[Key, Entry]] = {}  # by kind; Key: the object's namespace and name
        self._of_job: dict[Key, set[tuple[str, str]]] = {}  # job -> kind and name of its objects
        self._gone: OrderedDict[str, str | None] = OrderedDict()  # UID -> the version until which it is gone; None: all

    # ------------------------------------------------------------------ what is told

    def put(self, kind: Kind, obj: Object) -> set[Key]:
        """An object as it is now, unless it was dropped since; returns the jobs for which that is news."""
        meta = obj["metadata"]
        key = (meta.get("namespace", ""), meta["name"])
        kept = trim(kind, obj)
        blob = zlib.compress(json.dumps(kept, separators=(",", ":")).encode(), 1)
        job = job_of(kind, meta)
        node = (obj.get("spec") or {}).get("nodeName", "") if kind is POD else ""
        entry = Entry(meta["uid"], meta.get("resourceVersion", ""), job, node, blob=blob)
        with self._lock:
            if self._is_gone(entry):
                return set()
            have = self._objects.setdefault(kind.name, {})
            before = have.get(key)
            if before is not None and before.uid == entry.uid and is_older(entry.version, before.version):
                return set()
            if before is not None and before.uid != entry.uid and kind is not JOB:
                self._remember_gone(before.uid, entry.version)
            have[key] = entry
            if kind is NODE:
                return self._on_node(key[1]) if before is None or before.blob != blob else set()
            news = self._unindex(kind, key, before) if before is not None and before.job != job else set()
            if job:
                news.add((key[0], job))
                if kind is not JOB:
                    self._of_job.setdefault((key[0], job), set()).add((kind.name, key[1]))
            return news

    def drop(
        self, kind: Kind, namespace: str, name: str, uid: str | None = None, version: str | None = None
    ) -> set[Key]:
        """An object is gone (``uid``: only that one); returns the jobs for which that is news.

        An object with this UID is not put in any more. ``version``: not up to this version, for an object that lost
        its label is gone from a watch, and comes back with the label. A job may always come back: kopf lists anew.
        """
        with self._lock:
            if uid is not None and kind is not JOB:
                self._remember_gone(uid, version)
            return self._drop(kind, (namespace, name), uid)

    def uids(self, kind: Kind, namespace: str | None = None) -> dict[Key, str]:
        """Namespace and name -> UID of all objects of a kind; ``namespace`` None: of all."""
        with self._lock:
            return {
                key: entry.uid
                for key, entry in self._objects.get(kind.name, {}).items()
                if namespace is None or key[0] == namespace
            }

    # ------------------------------------------------------------------ what reconciles read

    def jobs(self) -> list[Key]:
        """All jobs."""
        with self._lock:
            return list(self._objects.get(JOB.name, {}))

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """One object; None: not there."""
        with self._lock:
            entry = self._objects.get(kind.name, {}).get((namespace, name))
        return None if entry is None else entry.load()

    def of_job(self, key: Key) -> tuple[dict[Ref, Object], tuple[Object, ...]]:
        """The objects that carry the job's label, and its pods by name."""
        with self._lock:
            names = sorted(self._of_job.get(key, ()))
            entries = [(kind, name, self._objects[kind][key[0], name]) for kind, name in names]
        objects: dict[Ref, Object] = {}
        pods: list[Object] = []
        for kind, name, entry in entries:
            if kind == POD.name:
                pods.append(entry.load())
            else:
                objects[Ref(kind, name)] = entry.load()
        return objects, tuple(pods)

    def nodes(self, names: Iterable[str]) -> dict[str, Object]:
        """Those of the named nodes that are there."""
        with self._lock:
            have = self._objects.get(NODE.name, {})
            entries = {name: have[("", name)] for name in names if ("", name) in have}
        return {name: entry.load() for name, entry in entries.items()}

    def count(self) -> dict[str, int]:
        """How many objects of each kind."""
        with self._lock:
            return {kind: len(have) for kind, have in self._objects.items()}

    # ------------------------------------------------------------------ inside, under the lock

    def _remember_gone(self, uid: str, version: str | None) -> None:
        until = self._gone.pop(uid, version)
        if until is not None and version is not None and is_older(until, version):
            until = version
        self._gone[uid] = None if version is None else until
        while len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)

    def _is_gone(self, entry: Entry) -> bool:
        """Whether the cache was told that the object is gone, at this version or a later one."""
        if entry.uid not in self._gone:
            return False
        until = self._gone[entry.uid]
        return until is None or is_older(entry.version, until)

    def _unindex(self, kind: Kind, key: Key, entry: Entry) -> set[Key]:
        if not entry.job:
            return set()
        job = (key[0], entry.job)
        names = self._of_job.get(job)
        if names is not None:
            names.discard((kind.name, key[1]))
            if not names:
                del self._of_job[job]
        return {job}

    def _drop(self, kind: Kind, key: Key, uid: str | None) -> set[Key]:
        have = self._objects.get(kind.name, {})
        entry = have.get(key)
        if entry is None or (uid is not None and entry.uid != uid):
            return set()
        del have[key]
        return self._on_node(key[1]) if kind is NODE else self._unindex(kind, key, entry)

    def _on_node(self, name: str) -> set[Key]:
        pods = self._objects.get(POD.name, {})
        return {(key[0], entry.job) for key, entry in pods.items() if entry.node == name and entry.job}
