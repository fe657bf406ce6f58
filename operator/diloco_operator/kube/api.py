"""The operator's requests to the API server, in a bounded pool of threads beside the event loop.

Objects are the plain dicts that the API server sends. Every request has a timeout and is tried once: the caller
knows whether to try again. Where the API server asks to be left alone (429 or 503 with ``Retry-After``), this operator
sends no request before, but for the Lease's. All requests, those of the informer's streams too, are reported to
``Api.observe``, which counts them and logs when the API server goes away, comes back, or refuses the operator's
credentials.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Unpack

from diloco_operator.kube.client import APPLY_PATCH, MERGE_PATCH, Client, RequestParts
from diloco_operator.kube.errors import ApiError
from diloco_operator.kube.kinds import ACCESS_REVIEW, EVENT, Kind
from diloco_operator.model import Object
from diloco_operator.names import MANAGER

log = logging.getLogger(__name__)

PAGE = 250  # objects of one answer
AWAY_SECONDS = 3.0  # without an answer until it is logged

Observer = Callable[[str, str, int, float | None], None]
"""Called after every request: verb, resource, HTTP status (0: no answer), seconds (None: a stream)."""


class Availability:
    """Whether the API server answers and accepts the operator's credentials; each change is logged once.

    ``recovered`` is called when there is an answer again after a request that had none. Thread-safe.
    """

    def __init__(self, host: str, recovered: Callable[[], None]) -> None:
        self._host = host
        self._recovered = recovered
        self._lock = threading.Lock()
        self._away_since: float | None = None
        self._logged_away = False
        self._refused = False

    def record(self, status: int) -> None:
        """A request ended with this HTTP status (0: no answer)."""
        with self._lock:
            back = status != 0 and self._away_since is not None
            if status == 0:
                self._record_silence()
            else:
                self._record_answer(status)
        if back:
            self._recovered()

    def _record_silence(self) -> None:
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
        elif not self._logged_away and now - self._away_since > AWAY_SECONDS:
            self._logged_away = True
            log.warning("the API server at %s does not answer; trying again", self._host)

    def _record_answer(self, status: int) -> None:
        if self._away_since is not None:
            if self._logged_away:
                log.info("the API server answers again, after %.0f s", time.monotonic() - self._away_since)
            self._away_since = None
            self._logged_away = False
        if (status == 401) == self._refused:
            return
        self._refused = status == 401
        if self._refused:
            log.error(
                "the API server refuses the operator's token (401): has its ServiceAccount been deleted, or its "
                "kubeconfig expired? Trying again"
            )
        else:
            log.info("the API server accepts the operator's token again")


class NotLeading(ApiError):
    """A write was not sent, for another operator may act."""


class Api:
    """Requests to the API server.

    ``seconds_for_a_write``: how long a write that begins now may take; 0: it may not be sent (``NotLeading``).
    ``threads``: requests side by side; ``streams``: connections for the informer beside them; ``timeout``: seconds
    for each request; ``recovered``: called when there is an answer again after a request that had none.
    """

    def __init__(
        self,
        config: Any,
        threads: int,
        timeout: float,
        observer: Observer | None = None,
        recovered: Callable[[], None] = lambda: None,
        streams: int = 0,
        seconds_for_a_write: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._seconds_for_a_write = seconds_for_a_write
        self._lock = threading.Lock()
        self._writing = 0
        self.client = Client(config, MANAGER, threads + streams)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="api")
        self._timeout = timeout
        self._observer = observer
        self._availability = Availability(self.client.host, recovered)
        self._quiet_until = -math.inf  # monotonic

    @property
    def writing(self) -> bool:
        """Whether a write is under way: sent, and not yet answered."""
        return self._writing > 0

    def close(self) -> None:
        """Let go of threads; requests under way are not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def observe(self, verb: str, resource: str, status: int, seconds: float | None = None) -> None:
        """A request has ended. Thread-safe."""
        self._availability.record(status)
        if self._observer is not None:
            self._observer(verb, resource, status, seconds)

    # ------------------------------------------------------------------ verbs

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        """The object; None if there is none. Raises ApiError."""
        try:
            return await self.ask("get", kind.plural, "GET", kind.path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list_objects(
        self, kind: Kind, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> list[Object]:
        """The objects that these selectors choose, as they are now. Raises ApiError."""
        query = {"labelSelector": labels, "fieldSelector": fields, "limit": str(PAGE)}
        found: list[Object] = []
        while True:
            answer = await self.ask("list", kind.plural, "GET", kind.path(namespace), query=query)
            for item in answer.get("items") or ():
                found.append({"apiVersion": kind.api_version, "kind": kind.name, **item})
            token = (answer.get("metadata") or {}).get("continue")
            if not token:
                return found
            query = {**query, "continue": str(token)}

    async def list_warnings(self, namespace: str, selector: str = "", limit: int = 500) -> tuple[list[Object], bool]:
        """Kubernetes Events of a namespace that are not Normal (``selector``: and that these fields select),
        at most ``limit``, and whether that is all. Raises ApiError."""
        fields = ",".join(["type!=Normal", *([selector] if selector else [])])
        query = {"limit": str(limit), "fieldSelector": fields}
        answer = await self.ask("list", EVENT.plural, "GET", EVENT.path(namespace), query=query)
        return list(answer.get("items") or ()), not (answer.get("metadata") or {}).get("continue")

    async def create(self, kind: Kind, namespace: str | None, manifest: Object) -> Object:
        """POST. Raises ApiError (409: it exists)."""
        return await self.write("create", kind.plural, "POST", kind.path(namespace), body=manifest)

    async def apply(self, kind: Kind, manifest: Object, dry_run: bool = False) -> Object:
        """Server-side apply as our field manager. Unknown fields are refused. With a UID in ``manifest`` it is forced,
        and refused if the object is another by now or gone. Without one nothing is there, as far as is known: what
        others own in an object that was made meanwhile is not taken from them (409). Raises ApiError."""
        meta = manifest["metadata"]
        force = "true" if meta.get("uid") else "false"
        query = {"fieldManager": MANAGER, "force": force, "fieldValidation": "Strict"}
        query |= {"dryRun": "All"} if dry_run else {}
        path = kind.path(meta["namespace"], meta["name"])
        return await self.write("patch", kind.plural, "PATCH", path, query=query, body=manifest, content=APPLY_PATCH)

    async def merge_patch(self, kind: Kind, namespace: str, name: str, patch: Object, sub: str = "") -> Object:
        """A merge patch of the object or its subresource ``sub``; with a resourceVersion in its metadata
        it is refused (409) if the object has changed. Raises ApiError."""
        query = {"fieldManager": MANAGER}
        path = kind.path(namespace, name, sub)
        resource = f"{kind.plural}/{sub}" if sub else kind.plural
        return await self.write("patch", resource, "PATCH", path, query=query, body=patch, content=MERGE_PATCH)

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str, grace: int | None = None) -> Object | None:
        """Delete the object with this UID. What remains of it while it ends; None: it is gone. ``grace``:
        seconds; None: its own. Raises ApiError."""
        body: Object = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid},
        }
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        try:
            answer = await self.write("delete", kind.plural, "DELETE", kind.path(namespace, name), body=body)
        except ApiError as error:
            if error.status == 404 or (error.status == 409 and not await self._is_there(kind, namespace, name, uid)):
                return None  # gone; or another of that name is there
            raise
        ends = (answer.get("metadata") or {}).get("deletionTimestamp") and answer.get("kind") == kind.name
        return answer if ends else None

    async def _is_there(self, kind: Kind, namespace: str, name: str, uid: str) -> bool:
        found = await self.get(kind, namespace, name)
        return found is not None and found["metadata"]["uid"] == uid

    async def is_allowed(self, group: str, resource: str, verb: str, namespace: str | None) -> bool:
        """Whether this operator may do it (SelfSubjectAccessReview). Raises ApiError."""
        resource, _, sub = resource.partition("/")
        asked = {"group": group, "resource": resource, "subresource": sub, "verb": verb}
        if namespace is not None:
            asked["namespace"] = namespace
        review = {
            "apiVersion": ACCESS_REVIEW.api_version,
            "kind": ACCESS_REVIEW.name,
            "spec": {"resourceAttributes": asked},
        }
        answer = await self.ask("create", ACCESS_REVIEW.plural, "POST", ACCESS_REVIEW.path(), body=review)
        return bool((answer.get("status") or {}).get("allowed"))

    async def served_resources(self, group: str, version: str) -> set[str]:
        """The plural names that the API server serves in a group; empty: it has not the group.

        Raises ApiError.
        """
        try:
            answer = await self.ask("get", "apigroup", "GET", f"/apis/{group}/{version}")
        except ApiError as error:
            if error.status == 404:
                return set()
            raise
        return {item["name"] for item in answer.get("resources") or ()}

    async def answers(self) -> bool:
        """Whether the API server answers this operator, if only that it may not ask."""
        try:
            await self.ask("get", "version", "GET", "/version")
        except ApiError as error:
            return error.status == 403
        return True

    # ------------------------------------------------------------------ one request

    async def ask(self, verb: str, resource: str, method: str, path: str, **parts: Unpack[RequestParts]) -> Object:
        """One request; ``verb`` and ``resource`` are for metrics and errors. Raises ApiError."""
        return await self._run(
            verb, resource, lambda: self.client.request_with_status(method, path, seconds=self._timeout, **parts)
        )

    async def write(self, verb: str, resource: str, method: str, path: str, **parts: Unpack[RequestParts]) -> Object:
        """One request that only the leader may send. Raises ApiError."""
        return await self._run(verb, resource, lambda: self._write(verb, resource, method, path, parts=parts))

    def _write(self, verb: str, resource: str, method: str, path: str, parts: RequestParts) -> tuple[int, Object]:
        with self._lock:
            self._writing += 1
        try:  # asked here, since it may have waited for this thread
            seconds = min(self._timeout, self._seconds_for_a_write())
            if seconds <= 0:
                raise NotLeading(verb, resource, 0, "this operator does not lead, and writes nothing")
            return self.client.request_with_status(method, path, seconds=seconds, **parts)
        finally:
            with self._lock:
                self._writing -= 1

    async def _run(self, verb: str, resource: str, request: Callable[[], tuple[int, Object]]) -> Object:
        loop = asyncio.get_running_loop()
        while (left := self._quiet_until - time.monotonic()) > 0:
            await asyncio.sleep(left * random.uniform(1.0, 1.2))
        began = time.monotonic()
        try:
            # The request has its own timeout; this one also ends a wait for a thread that does not come.
            async with asyncio.timeout(4 * self._timeout):
                status, answer = await loop.run_in_executor(self._pool, request)
        except TimeoutError as error:
            self.observe(verb, resource, 0, time.monotonic() - began)
            raise ApiError(
                verb, resource, 0, f"the API server at {self.client.host} does not answer in time"
            ) from error
        except NotLeading:
            raise
        except ApiError as error:
            self.observe(verb, resource, error.status, time.monotonic() - began)
            self._quiet_until = max(self._quiet_until, time.monotonic() + error.retry_after)
            error.verb, error.resource = verb, resource
            raise
        self.observe(verb, resource, status, time.monotonic() - began)
        return answer
