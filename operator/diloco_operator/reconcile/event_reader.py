"""Kubernetes Events about a job's objects: why a pod does not start.

They are not watched, for there may be very many; they are listed when a job has something that waits for longer than
``PATIENCE_SECONDS``, at most every ``AGAIN_SECONDS`` for a namespace, whose jobs share the answer. Where a namespace
has more than one page of them, the first few objects that wait are asked about by name.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from diloco_operator.job import seconds_of
from diloco_operator.kube.api import Api
from diloco_operator.kube.errors import ApiError
from diloco_operator.model import ClusterEvent, Object, Ref

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 8.0
AGAIN_SECONDS = 15.0
FORGET_SECONDS = 600.0
MAX_EVENTS_OF_JOB = 100  # of one job
MOST = 3  # objects of a job that are asked about by name
KEPT = 256  # answers
MAX_MESSAGE = 1000


def find_waiting(objects: Mapping[Ref, Object], pods: Iterable[Object], now: float) -> list[Ref]:
    """What of a job is not started, or has not made its pods, that should have."""
    count: Counter[str] = Counter()  # pods by their owners
    found: list[Ref] = []
    for pod in pods:
        meta, status = pod["metadata"], pod.get("status") or {}
        for owner in meta.get("ownerReferences") or ():
            count[str(owner.get("name"))] += 1
        born = seconds_of(meta.get("creationTimestamp")) or now
        starts = status.get("phase") == "Pending" and not meta.get("deletionTimestamp")
        if starts and now - born > PATIENCE_SECONDS:
            found.append(Ref("Pod", str(meta["name"])))
    for ref, obj in objects.items():
        spec, status = obj.get("spec") or {}, obj.get("status") or {}
        born = seconds_of(obj["metadata"].get("creationTimestamp")) or now
        if now - born < PATIENCE_SECONDS:
            continue
        wanted = spec.get("replicas", 1)
        if (
            (ref.kind == "StatefulSet" and count[ref.name] < wanted)
            or (ref.kind == "Deployment" and (status.get("replicas") or 0) < wanted)
            or (ref.kind == "PersistentVolumeClaim" and status.get("phase") == "Pending")
        ):
            found.append(ref)
    return found


_Read = list[tuple[ClusterEvent, str]]
"""Events, each with the UID of what it is about."""


class EventReader:
    """Reads Events."""

    def __init__(self, api: Api) -> None:
        self._api = api
        # what was asked for -> when (monotonic), Events, and whether that is all
        self._read: OrderedDict[tuple[str, str], tuple[float, _Read, bool]] = OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}
        self._silent_until = 0.0

    async def about(
        self, namespace: str, job: str, waits: Sequence[Ref], uids: Mapping[Ref, str], now: float
    ) -> tuple[ClusterEvent, ...]:
        """The latest Events about a job's objects and pods (``uids``: their UIDs; those of an earlier pod of
        the same name are nobody's), oldest first; none if they cannot be read. ``waits``: whose are wanted
        most, where there are too many to read all."""
        # A Deployment's pods are made by a ReplicaSet, which is not watched.
        of_deployment = re.compile(re.escape(job) + r"-(syncer|evaluator)-[a-z0-9]+")
        async with self._locks.setdefault(namespace, asyncio.Lock()):
            read, whole = await self._ask(namespace, "")
            if not whole:
                for ref in waits[:MOST]:
                    read = read + (await self._ask(namespace, _selector(ref)))[0]
        found = {
            event
            for event, uid in read
            if now - event.time < FORGET_SECONDS
            and (
                uids.get(Ref(event.kind, event.name)) == uid
                or (event.kind == "ReplicaSet" and of_deployment.fullmatch(event.name))
            )
        }
        return tuple(sorted(found, key=lambda event: (event.time, event.name, event.reason))[-MAX_EVENTS_OF_JOB:])

    async def _ask(self, namespace: str, selector: str) -> tuple[_Read, bool]:
        """The warnings that ``selector`` (of fields) takes, as of the last AGAIN_SECONDS, and whether all."""
        key = (namespace, selector)
        at, cluster_events, whole = self._read.get(key, (-1e9, [], True))
        if time.monotonic() - at < AGAIN_SECONDS:
            return cluster_events, whole
        try:
            items, whole = await self._api.list_warnings(namespace, selector)
        except ApiError as error:
            if not error.unreachable and time.monotonic() > self._silent_until:
                log.warning("Kubernetes Events of namespace %s cannot be read: %s", namespace, error)
                self._silent_until = time.monotonic() + 300.0
            items, whole = [], True
        cluster_events = [event for item in items if (event := _cluster_event(item)) is not None]
        self._read[key] = (time.monotonic(), cluster_events, whole)
        self._read.move_to_end(key)
        while len(self._read) > KEPT:
            self._read.popitem(last=False)
        return cluster_events, whole


def _selector(ref: Ref) -> str:
    """Of the Events about one object; of a Deployment, about any ReplicaSet."""
    if ref.kind == "Deployment":
        return "involvedObject.kind=ReplicaSet"
    return f"involvedObject.kind={ref.kind},involvedObject.name={ref.name}"


def _cluster_event(item: Object) -> tuple[ClusterEvent, str] | None:
    """The event in an Event, and the UID of what it is about; None: it is not about anything."""
    about = item.get("involvedObject") or {}
    series = item.get("series") or {}
    times = (
        item.get("lastTimestamp"),
        series.get("lastObservedTime"),
        item.get("eventTime"),
        (item.get("metadata") or {}).get("creationTimestamp"),
    )
    when = next((at for text in times if (at := seconds_of(text)) is not None), None)
    if when is None or not about.get("kind") or not about.get("name"):
        return None
    message = str(item.get("message") or "")[:MAX_MESSAGE]
    event = ClusterEvent(str(about["kind"]), str(about["name"]), str(item.get("reason") or ""), message, time=when)
    return event, str(about.get("uid") or "")
