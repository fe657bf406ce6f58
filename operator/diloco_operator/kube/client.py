"""The API server, asked through the official client in a bounded pool of threads.

Objects are the plain dicts that the API server sends. Every request has a timeout and is
tried once: who asks knows whether to try again. The ServiceAccount's token is read anew as
it rotates (the official configuration does it), for watches too (reflector.py).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal
from urllib.parse import urlencode

import kubernetes.client
import kubernetes.config
import urllib3

from diloco_operator.kube.kinds import ACCESS_REVIEW, EVENT, Kind
from diloco_operator.model import Object

log = logging.getLogger(__name__)

FIELD_MANAGER = "diloco-operator"
CONNECT_SECONDS = 5.0
MAX_ANSWER = 64 << 20  # bytes; a page of a list is far below

_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

Observer = Callable[[str, str, int, float], None]
"""Told of every request: verb, resource, HTTP status (0: no answer), seconds."""


class ConfigError(Exception):
    """There is no way to the API server; the message says what was looked for."""


class ApiError(Exception):
    """A request failed. ``status``: HTTP status, 0 where nobody answered. ``reason``, ``causes``: as
    the API server gives them (causes: field and message)."""

    def __init__(
        self,
        verb: str,
        resource: str,
        status: int,
        message: str,
        reason: str = "",
        causes: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.verb = verb
        self.resource = resource
        self.status = status
        self.reason = reason
        self.causes = causes

    @property
    def unreachable(self) -> bool:
        """No answer, or one from something that is not ready: trying again helps."""
        return self.status == 0 or self.status == 429 or self.status >= 500


def configuration(kubeconfig: str | None = None) -> Any:
    """How to reach the API server: the pod's ServiceAccount, else a kubeconfig (``kubeconfig``: its path;
    None: KUBECONFIG or ~/.kube/config). Raises ConfigError."""
    made = kubernetes.client.Configuration()
    try:
        try:
            kubernetes.config.load_incluster_config(client_configuration=made)
        except kubernetes.config.ConfigException as inside:
            try:
                kubernetes.config.load_kube_config(
                    kubeconfig or os.environ.get("KUBECONFIG"), client_configuration=made
                )
            except kubernetes.config.ConfigException as outside:
                raise ConfigError(
                    f"no way to the API server: {inside} (as a pod), {outside} (as a kubeconfig); "
                    "run in a pod with a ServiceAccount, or set KUBECONFIG"
                ) from outside
    except (OSError, ValueError) as error:
        raise ConfigError(f"the API server's configuration cannot be read: {error}") from error
    made.retries = False  # trying again is decided above, and counted
    return made


class Api:
    """Requests to the API server. ``threads``: side by side; ``timeout``: seconds for each; ``recovered``
    is told when there is an answer again after a request that had none."""

    def __init__(
        self,
        config: Any,
        threads: int,
        timeout: float,
        observer: Observer | None = None,
        recovered: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        config.connection_pool_maxsize = threads
        self._client = kubernetes.client.ApiClient(config)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="api")
        self._timeout = timeout
        self._observer = observer
        self._recovered = recovered
        self._failing = False  # the last request had no answer

    @property
    def host(self) -> str:
        """The API server's URL."""
        return str(self._config.host)

    def close(self) -> None:
        """Let go of threads; what they are at is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ verbs

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        """The object; None if there is none. Raises ApiError."""
        try:
            return await self._ask("get", kind, "GET", kind.path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list_versions(
        self, kind: Kind, namespace: str | None, selector: str = "", page: int = 250
    ) -> dict[tuple[str, str], tuple[str, str]]:
        """(namespace, name) -> (uid, resourceVersion) of all objects. Raises ApiError."""
        found: dict[tuple[str, str], tuple[str, str]] = {}
        onward = ""
        while True:
            query = {"limit": str(page)} | ({"labelSelector": selector} if selector else {})
            query |= {"continue": onward} if onward else {}
            answer = await self._ask("list", kind, "GET", kind.path(namespace), query, accept=_METADATA)
            for item in answer.get("items") or ():
                meta = item["metadata"]
                found[meta.get("namespace", ""), meta["name"]] = meta["uid"], meta["resourceVersion"]
            onward = (answer.get("metadata") or {}).get("continue") or ""
            if not onward:
                return found

    async def warnings(self, namespace: str, selector: str = "", limit: int = 500) -> tuple[list[Object], bool]:
        """Kubernetes Events of a namespace that are not Normal (``selector``: and that these fields select),
        at most ``limit``, and whether that is all. Raises ApiError."""
        fields = ",".join(["type!=Normal", *([selector] if selector else [])])
        query = {"limit": str(limit), "fieldSelector": fields}
        answer = await self._ask("list", EVENT, "GET", EVENT.path(namespace), query)
        return list(answer.get("items") or ()), not (answer.get("metadata") or {}).get("continue")

    async def create(self, kind: Kind, namespace: str | None, manifest: Object) -> Object:
        """POST. Raises ApiError (409: it exists)."""
        return await self._ask("create", kind, "POST", kind.path(namespace), {}, manifest)

    async def apply(self, kind: Kind, manifest: Object, dry_run: bool = False) -> Object:
        """Server-side apply as our field manager, forced: conflicts are only over fields in ``manifest``.
        Unknown fields are refused. Raises ApiError."""
        meta = manifest["metadata"]
        query = {"fieldManager": FIELD_MANAGER, "force": "true", "fieldValidation": "Strict"}
        query |= {"dryRun": "All"} if dry_run else {}
        path = kind.path(meta["namespace"], meta["name"])
        return await self._ask("patch", kind, "PATCH", path, query, manifest, content=_APPLY)

    async def merge(self, kind: Kind, namespace: str, name: str, patch: Object, sub: str = "") -> Object:
        """A merge patch of the object or its subresource ``sub``; with a resourceVersion in its metadata
        it is refused (409) if the object has changed. Raises ApiError."""
        query = {"fieldManager": FIELD_MANAGER}
        path = kind.path(namespace, name, sub)
        return await self._ask("patch", kind, "PATCH", path, query, patch, content=_MERGE, sub=sub)

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
            answer = await self._ask("delete", kind, "DELETE", kind.path(namespace, name), {}, body)
        except ApiError as error:
            if error.status in (404, 409):  # gone; or another of that name is there
                return None
            raise
        ends = (answer.get("metadata") or {}).get("deletionTimestamp") and answer.get("kind") == kind.name
        return answer if ends else None

    async def allowed(self, group: str, resource: str, verb: str, namespace: str | None) -> bool:
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
        answer = await self._ask("create", ACCESS_REVIEW, "POST", ACCESS_REVIEW.path(), {}, review)
        return bool((answer.get("status") or {}).get("allowed"))

    async def resources(self, group: str, version: str) -> set[str]:
        """The plural names that the API server serves in a group; empty: it has not the group.

        Raises ApiError.
        """
        try:
            answer = await self.raw("get", "apigroup", "GET", f"/apis/{group}/{version}")
        except ApiError as error:
            if error.status == 404:
                return set()
            raise
        return {item["name"] for item in answer.get("resources") or ()}

    # ------------------------------------------------------------------ one request

    async def _ask(
        self,
        verb: str,
        kind: Kind,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content: str = "application/json",
        accept: str = "application/json",
        sub: str = "",
    ) -> Object:
        resource = f"{kind.plural}/{sub}" if sub else kind.plural
        return await self.raw(verb, resource, method, path, query, body, content, accept)

    async def raw(
        self,
        verb: str,
        resource: str,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content: str = "application/json",
        accept: str = "application/json",
    ) -> Object:
        """One request; ``verb`` and ``resource`` are for metrics and errors. Raises ApiError."""
        loop = asyncio.get_running_loop()
        began = time.monotonic()
        try:
            # The request has its own timeout; this one also ends a wait for a thread that does not come.
            async with asyncio.timeout(4 * self._timeout):
                status, text = await loop.run_in_executor(
                    self._pool, self._blocking, method, path, query, body, content, accept
                )
        except (urllib3.exceptions.HTTPError, OSError, TimeoutError) as error:
            self._heard(False)
            self._count(verb, resource, 0, began)
            raise ApiError(
                verb, resource, 0, f"the API server at {self.host} does not answer: {_words(error)}"
            ) from error
        self._heard(True)
        self._count(verb, resource, status, began)
        if status >= 300:
            raise _error(verb, resource, status, text)
        try:
            answer = json.loads(text) if text else {}
        except ValueError as error:
            raise ApiError(verb, resource, 0, f"{method} {path}: the answer is not JSON") from error
        return answer if isinstance(answer, dict) else {}

    def _blocking(
        self, method: str, path: str, query: Mapping[str, str] | None, body: Object | None, content: str, accept: str
    ) -> tuple[int, bytes]:
        headers = {"Accept": accept, "User-Agent": FIELD_MANAGER}
        if body is not None:
            headers["Content-Type"] = content
        queries: list[tuple[str, str]] = []
        self._client.update_params_for_auth(headers, queries, ["BearerToken"], path, method, body, None)
        url = self.host + path + ("?" + urlencode(query) if query else "")
        answer = self._client.rest_client.pool_manager.request(
            method,
            url,
            headers=headers,
            body=None if body is None else json.dumps(body).encode(),
            timeout=urllib3.Timeout(connect=CONNECT_SECONDS, total=self._timeout),
            preload_content=False,
        )
        try:
            text = answer.read(MAX_ANSWER)
        finally:
            answer.release_conn()
        return int(answer.status), text

    def _heard(self, answered: bool) -> None:
        before, self._failing = self._failing, not answered
        if before and answered:
            self._recovered()

    def _count(self, verb: str, resource: str, status: int, began: float) -> None:
        if self._observer is not None:
            self._observer(verb, resource, status, time.monotonic() - began)


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    inner = getattr(error, "reason", None)
    return str(inner if isinstance(inner, Exception) else error)[:300] or type(error).__name__


def _error(verb: str, resource: str, status: int, text: bytes) -> ApiError:
    try:
        document = json.loads(text)
        message, reason = str(document.get("message") or ""), str(document.get("reason") or "")
        details = document.get("details") or {}
        causes = tuple(
            (str(cause.get("field") or ""), str(cause.get("message") or "")) for cause in details.get("causes") or ()
        )
    except (ValueError, AttributeError, TypeError):
        message, reason, causes = text[:300].decode("utf-8", "replace"), "", ()
    if status == 500 and "failed to create typed patch object" in message:
        status = 422  # how server-side apply says that a field is unknown or of another type
    return ApiError(verb, resource, status, message or f"HTTP status {status}", reason, causes)


Failure = Literal["conflict", "invalid", "forbidden", "quota", "other"]


def failure(error: ApiError) -> Failure:
    """The reason of a failed write, as ``model.ApplyError`` has it."""
    if error.status == 403 and "exceeded quota" in str(error):
        return "quota"
    if error.status in (401, 403):
        return "forbidden"
    if error.status in (400, 422):
        return "invalid"
    return "other"
