"""Kubernetes Events about jobs: what ``kubectl describe dilocojob`` shows at its end.

One that is said again within ``REPEAT_SECONDS`` raises the count of the first instead of being another. Events are
worth less than what they tell of: one that cannot be written is logged once and given up.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence

from diloco_operator.job import rfc3339
from diloco_operator.kube.api import Api
from diloco_operator.kube.errors import ApiError
from diloco_operator.kube.kinds import EVENT, JOB
from diloco_operator.logs import about
from diloco_operator.model import EventWanted, Key, Object
from diloco_operator.names import MANAGER
from diloco_operator.plan.pods.pod_status import shortened
from diloco_protocol.vocabulary import DOMAIN

log = logging.getLogger(__name__)

REPEAT_SECONDS = 600.0
KNOWN = 4096  # Events that can still be counted up
MAX_NOTE = 1000  # characters; the API server takes 1024


class EventRecorder:
    """Writes Events. ``instance``: this operator's pod, or host."""

    def __init__(self, api: Api, instance: str) -> None:
        self._api = api
        self._instance = instance
        self._known: OrderedDict[str, tuple[str, int, float]] = OrderedDict()  # what -> name, count, when
        self._silent_until = 0.0

    async def record(self, key: Key, job: Object, events: Sequence[EventWanted], now: float) -> None:
        """Write them, and log each. ``now``: wall-clock unix seconds. Raises nothing."""
        for event in events:
            level = logging.WARNING if event.type == "Warning" else logging.INFO
            log.log(level, "%s: %s", event.reason, event.message, extra=about(key))
            try:
                await self._write(key, job, event, now)
            except ApiError as error:
                if time.monotonic() > self._silent_until:
                    log.warning("an Event could not be written: %s", error, extra=about(key))
                    self._silent_until = time.monotonic() + 300.0

    async def _write(self, key: Key, job: Object, event: EventWanted, now: float) -> None:
        uid = job["metadata"]["uid"]
        what = hashlib.sha256("\0".join((uid, event.type, event.reason, event.message)).encode()).hexdigest()
        known = self._known.get(what)
        if known is not None and now - known[2] < REPEAT_SECONDS:
            name, count, _ = known
            patch: Object = {"count": count + 1, "lastTimestamp": rfc3339(now)}
            try:
                await self._api.merge_patch(EVENT, key[0], name, patch)
            except ApiError as error:
                if error.status != 404:
                    raise
            else:
                self._remember(what, name, count + 1, now)
                return
        name = f"{key[1]}.{secrets.token_hex(8)}"
        await self._api.create(EVENT, key[0], self._manifest(key, uid, event, name, now))
        self._remember(what, name, 1, now)

    def _remember(self, what: str, name: str, count: int, now: float) -> None:
        self._known[what] = (name, count, now)
        self._known.move_to_end(what)
        while len(self._known) > KNOWN:
            self._known.popitem(last=False)

    def _manifest(self, key: Key, uid: str, event: EventWanted, name: str, now: float) -> Object:
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": key[0]},
            "involvedObject": {
                "apiVersion": JOB.api_version,
                "kind": JOB.name,
                "namespace": key[0],
                "name": key[1],
                "uid": uid,
            },
            "type": event.type,
            "reason": event.reason,
            "message": shortened(event.message, MAX_NOTE),
            "source": {"component": MANAGER},
            "reportingComponent": f"{DOMAIN}/{MANAGER}",
            "reportingInstance": self._instance[:128],
            "action": "Reconcile",
            "firstTimestamp": rfc3339(now),
            "lastTimestamp": rfc3339(now),
            "count": 1,
        }
