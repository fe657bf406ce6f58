"""Kubernetes Events about a job's objects: why a pod does not start.

They are not watched, for there may be very many; they are listed when a job has something
that waits for longer than ``PATIENCE_SECONDS``, at most every ``AGAIN_SECONDS`` for a
namespace, whose jobs share the answer.
"""

from __future__ import annotations

import asyncio
import calendar
import logging
import re
import time
from collections.abc import Iterable, Mapping

from .api import Api, ApiError
from .types import Note, Object, Ref

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 8.0
AGAIN_SECONDS = 15.0
FORGET_SECONDS = 600.0
MAX_NOTES = 100  # of one job
MAX_MESSAGE = 1000


def seconds(text: str | None) -> float | None:
    """Wall-clock unix seconds of a time as the API server writes it; None if it is none."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?Z", text or "")
    if found is None:
        return None
    whole = calendar.timegm(time.strptime(found[1], "%Y-%m-%dT%H:%M:%S"))
    return whole + float(found[2] or 0)


def waits(objects: dict[Ref, Object], pods: Iterable[Object], now: float) -> bool:
    """Whether something of a job is not there, or not started, that should be."""
    count: dict[str, int] = {}
    for pod in pods:
        meta, status = pod["metadata"], pod.get("status") or {}
        for owner in meta.get("ownerReferences") or ():
            count[str(owner.get("name"))] = count.get(str(owner.get("name")), 0) + 1
        born = seconds(meta.get("creationTimestamp")) or now
        starts = status.get("phase") == "Pending" and not meta.get("deletionTimestamp")
        if starts and now - born > PATIENCE_SECONDS:
            return True
    for ref, obj in objects.items():
        spec, status = obj.get("spec") or {}, obj.get("status") or {}
        born = seconds(obj["metadata"].get("creationTimestamp")) or now
        if now - born < PATIENCE_SECONDS:
            continue
        wanted = spec.get("replicas", 1)
        if ref.kind == "StatefulSet" and count.get(ref.name, 0) < wanted:
            return True
        if ref.kind == "Deployment" and (status.get("replicas") or 0) < wanted:
            return True
        if ref.kind == "PersistentVolumeClaim" and status.get("phase") == "Pending":
            return True
    return False


class Notes:
    """Reads Events."""

    def __init__(self, api: Api) -> None:
        self._api = api
        # namespace -> when (monotonic), notes with the UIDs of what they are about
        self._read: dict[str, tuple[float, list[tuple[Note, str]]]] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._silent_until = 0.0

    async def about(self, namespace: str, job: str, uids: Mapping[Ref, str], now: float) -> tuple[Note, ...]:
        """The latest notes about a job's objects and pods (``uids``: their UIDs; those of an earlier pod of
        the same name are nobody's), oldest first; none if they cannot be read."""
        # A Deployment's pods are made by a ReplicaSet, which is not watched.
        of_deployment = re.compile(re.escape(job) + r"-(syncer|evaluator)-[a-z0-9]+")
        found = [
            note for note, uid in await self._namespace(namespace)
            if now - note.time < FORGET_SECONDS
            and (uids.get(Ref(note.kind, note.name)) == uid
                 or (note.kind == "ReplicaSet" and of_deployment.fullmatch(note.name)))
        ]  # fmt: skip
        return tuple(sorted(found, key=lambda note: note.time)[-MAX_NOTES:])

    async def _namespace(self, namespace: str) -> list[tuple[Note, str]]:
        async with self._locks.setdefault(namespace, asyncio.Lock()):
            at, notes = self._read.get(namespace, (-AGAIN_SECONDS, []))
            if time.monotonic() - at < AGAIN_SECONDS:
                return notes
            try:
                items = await self._api.warnings(namespace)
            except ApiError as error:
                if not error.unreachable and time.monotonic() > self._silent_until:
                    log.warning("Kubernetes Events of namespace %s cannot be read: %s", namespace, error)
                    self._silent_until = time.monotonic() + 300.0
                notes = []
            else:
                notes = [note for item in items if (note := _note(item)) is not None]
            self._read[namespace] = (time.monotonic(), notes)
            while len(self._read) > 64:
                del self._read[next(iter(self._read))]
            return notes


def _note(item: Object) -> tuple[Note, str] | None:
    """The note in an Event, and the UID of what it is about; None: it is not about anything."""
    about = item.get("involvedObject") or {}
    series = item.get("series") or {}
    times = (
        item.get("lastTimestamp"), series.get("lastObservedTime"), item.get("eventTime"),
        (item.get("metadata") or {}).get("creationTimestamp"),
    )  # fmt: skip
    when = next((at for text in times if (at := seconds(text)) is not None), None)
    if when is None or not about.get("kind") or not about.get("name"):
        return None
    message = str(item.get("message") or "")[:MAX_MESSAGE]
    note = Note(str(about["kind"]), str(about["name"]), str(item.get("reason") or ""), message, when)
    return note, str(about.get("uid") or "")
