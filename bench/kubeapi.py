"""The API server, asked from a benchmark: the one Kubernetes client, and a list that is followed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import kubernetes.client
import kubernetes.config
import urllib3

from diloco_operator.kube.client import APPLY_PATCH, Client
from diloco_operator.kube.errors import ApiError

WATCH_SECONDS = 240


class Api(Client):
    """Blocking requests with the rights of a kubeconfig's current context."""

    def __init__(self, kubeconfig: str) -> None:
        config = kubernetes.client.Configuration()
        kubernetes.config.load_kube_config(kubeconfig, client_configuration=config)
        super().__init__(config, "diloco-bench")

    def get(self, path: str) -> dict[str, Any]:
        """One object. Raises ApiError."""
        return self.request("GET", path)

    def apply(self, path: str, manifest: dict[str, Any], **query: str) -> dict[str, Any]:
        """Server-side apply to the object's path. Raises ApiError."""
        query = {"fieldManager": "diloco-bench", "force": "true"} | query
        return self.request("PATCH", path, query, manifest, APPLY_PATCH)

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
        answer = self.request("GET", path, {"labelSelector": selector})
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
        with self.stream("GET", path, query, silence=WATCH_SECONDS + 30.0) as stream:
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
