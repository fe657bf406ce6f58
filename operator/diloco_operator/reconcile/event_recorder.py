"""Kubernetes Events about jobs: what ``kubectl describe dilocojob`` shows at its end.

One that is said again within ``REPEAT_SECONDS`` raises the count of the first instead of being another. An Event that
the API server refuses is given up: Events are worth less than what they tell of. One that it does not answer stays on
its list, for another turn. It keeps its name, so an Event whose answer was lost is not written twice.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable

from diloco_operator.job import rfc3339
from diloco_operator.kube.api import Api
from diloco_operator.kube.errors import ApiError
from diloco_operator.kube.kinds import EVENT, JOB
from diloco_operator.logs import about
from diloco_operator.model import EventWanted, Key, Object
from diloco_operator.names import MANAGER
from diloco_protocol.common.program_errors import shorten
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
        # what -> name, count, when; of one that was sent and not answered the count is 0
        self._known: OrderedDict[str, tuple[str, int, float]] = OrderedDict()
        self._silent_until = 0.0

    def log_events(self, key: Key, events: Iterable[EventWanted]) -> None:
        """Log what Events tell, whatever becomes of them."""
        for event in events:
            level = logging.WARNING if event.type == "Warning" else logging.INFO
            log.log(level, "%s: %s", event.reason, event.message, extra=about(key))

    async def record(self, key: Key, job: Object, events: list[EventWanted], now: float) -> None:
        """Write them in order, and take each off the list once it is written or refused. Raises no ApiError.

        ``now``: wall-clock unix seconds. Where the API server does not answer, the rest stays on the list.
        """
        while events:
            try:
                await self._write(key, job, events[0], now)
            except ApiError as error:
                if time.monotonic() > self._silent_until:
                    log.warning("an Event could not be written: %s", error, extra=about(key))
                    self._silent_until = time.monotonic() + 300.0
                if error.unreachable:
                    return
            del events[0]

    async def _write(self, key: Key, job: Object, event: EventWanted, now: float) -> None:
        uid = job["metadata"]["uid"]
        what = hashlib.sha256("\0".join((uid, event.type, event.reason, event.message)).encode()).hexdigest()
        name, count, at = self._known.get(what, ("", 0, now))
        if count and now - at < REPEAT_SECONDS:
            patch: Object = {"count": count + 1, "lastTimestamp": rfc3339(now)}
            try:
                await self._api.merge_patch(EVENT, key[0], name, patch)
            except ApiError as error:
                if error.status != 404:
                    raise
            else:
                self._remember(what, name, count + 1, now)
                return
        sent_before = bool(name) and not count
        if not sent_before:
            name = f"{key[1]}.{secrets.token_hex(8)}"
            self._remember(what, name, 0, now)
        try:
            await self._api.create(EVENT, key[0], self._manifest(key, uid, event, name, now=now))
        except ApiError as error:
            if not (sent_before and error.status == 409):
                raise  # else it is there, and only the answer was lost
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
            "message": shorten(event.message, MAX_NOTE),
            "source": {"component": MANAGER},
            "reportingComponent": f"{DOMAIN}/{MANAGER}",
            "reportingInstance": self._instance[:128],
            "action": "Reconcile",
            "firstTimestamp": rfc3339(now),
            "lastTimestamp": rfc3339(now),
            "count": 1,
        }
