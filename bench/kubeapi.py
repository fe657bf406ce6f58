"""The API server, asked from a benchmark: plain blocking requests, and a list that is followed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlencode

import kubernetes.client
import kubernetes.config
import urllib3

SECONDS = 30.0
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
WATCH_SECONDS = 240


class ApiError(Exception):
    """A request was refused or not answered; ``status`` 0: no answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """``server``: URL; ``token``: of whoever asks, empty where ``pool`` has client certificates."""

    def __init__(self, server: str, token: str, pool: urllib3.PoolManager) -> None:
        self.server, self._token, self._pool = server, token, pool

    @classmethod
    def from_kubeconfig(cls, path: str) -> Api:
        """With the rights of the kubeconfig's current context."""
        made = kubernetes.client.Configuration()
        kubernetes.config.load_kube_config(path, client_configuration=made)
        pool = urllib3.PoolManager(
            maxsize=16,
            ca_certs=made.ssl_ca_cert,
            cert_file=made.cert_file,
            key_file=made.key_file,
            cert_reqs="CERT_REQUIRED" if made.verify_ssl else "CERT_NONE",
            retries=False,
        )
        return cls(made.host, made.get_api_key_with_prefix("BearerToken") or "", pool)

    # ------------------------------------------------------------- requests

    def raw(self, method: str, path: str, body: Any = None, content: str = "application/json", **query: str) -> bytes:
        """The answer's bytes. Raises ApiError."""
        headers = {"Content-Type": content} | ({"Authorization": self._token} if self._token else {})
        try:
            answer = self._pool.request(
                method,
                self.server + path + (f"?{urlencode(query)}" if query else ""),
                headers=headers,
                body=None if body is None else json.dumps(body).encode(),
                timeout=SECONDS,
            )
        except urllib3.exceptions.HTTPError as error:
            raise ApiError(0, f"{method} {path}: {error}") from error
        if answer.status >= 300:
            raise ApiError(answer.status, f"{method} {path}: {answer.status} {answer.data[:500]!r}")
        return bytes(answer.data)

    def ask(self, method: str, path: str, body: Any = None, **more: Any) -> dict[str, Any]:
        """The answer as JSON. Raises ApiError."""
        return dict(json.loads(self.raw(method, path, body, **more)))

    def get(self, path: str, **query: str) -> dict[str, Any]:
        """Raises ApiError."""
        return self.ask("GET", path, **query)

    def items(self, path: str, selector: str = "", page: int = 250) -> Iterator[dict[str, Any]]:
        """All objects of a collection, a page at a time."""
        query = {"limit": str(page)} | ({"labelSelector": selector} if selector else {})
        while True:
            answer = self.get(path, **query)
            yield from answer["items"]
            onward = answer["metadata"].get("continue")
            if not onward:
                return
            query["continue"] = onward

    def apply(self, path: str, manifest: dict[str, Any], **query: str) -> dict[str, Any]:
        """Server-side apply to the object's path. Raises ApiError."""
        query = {"fieldManager": "diloco-bench", "force": "true"} | query
        return self.ask("PATCH", path, manifest, content=APPLY, **query)

    def metrics(self) -> str:
        """The API server's own metrics, as text."""
        return self.raw("GET", "/metrics").decode()

    # ------------------------------------------------------------- following a list

    def follow(
        self, path: str, selector: str, saw: Callable[[bool, dict[str, Any]], None], stop: threading.Event
    ) -> None:
        """Tell ``saw(gone, object)`` of everything in a collection and of every change, until stopped.

        What was deleted while nobody watched is told from its last state.
        """
        known: dict[str, dict[str, Any]] = {}  # by UID
        version = ""
        while not stop.is_set():
            try:
                if not version:
                    version = self._list(path, selector, known, saw)
                version = self._watch(path, selector, version, known, saw, stop)
            except (ApiError, urllib3.exceptions.HTTPError, ValueError):
                version = ""
                time.sleep(1.0)

    def _list(
        self, path: str, selector: str, known: dict[str, dict[str, Any]], saw: Callable[[bool, dict[str, Any]], None]
    ) -> str:
        answer = self.get(path, labelSelector=selector)
        found = {item["metadata"]["uid"]: item for item in answer["items"]}
        for uid in set(known) - set(found):
            saw(True, known.pop(uid))
        for uid, item in found.items():
            known[uid] = item
            saw(False, item)
        return str(answer["metadata"]["resourceVersion"])

    def _watch(
        self,
        path: str,
        selector: str,
        version: str,
        known: dict[str, dict[str, Any]],
        saw: Callable[[bool, dict[str, Any]], None],
        stop: threading.Event,
    ) -> str:
        query = {"watch": "1", "labelSelector": selector, "resourceVersion": version}
        query |= {"timeoutSeconds": str(WATCH_SECONDS), "allowWatchBookmarks": "true"}
        headers = {"Authorization": self._token} if self._token else {}
        stream = self._pool.request(
            "GET",
            f"{self.server}{path}?{urlencode(query)}",
            headers=headers,
            preload_content=False,
            timeout=urllib3.Timeout(connect=SECONDS, read=WATCH_SECONDS + SECONDS),
        )
        try:
            if stream.status != 200:
                return ""
            rest = b""
            while not stop.is_set() and (chunk := stream.read1(1 << 20)):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        return ""
                    item = event["object"]
                    version = item["metadata"]["resourceVersion"]
                    if event["type"] == "BOOKMARK":
                        continue
                    gone = event["type"] == "DELETED"
                    if gone:
                        known.pop(item["metadata"]["uid"], None)
                    else:
                        known[item["metadata"]["uid"]] = item
                    saw(gone, item)
            return version
        finally:
            stream.release_conn() if stop.is_set() else stream.close()
