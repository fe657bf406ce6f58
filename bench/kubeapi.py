"""The API server, asked from a benchmark: the one Kubernetes client, and the operator's reflector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import kubernetes.client
import kubernetes.config

from diloco_operator.informer.cache import Cache
from diloco_operator.informer.reflector import Reflector
from diloco_operator.kube import api as operator_api
from diloco_operator.kube.client import APPLY_PATCH, Client
from diloco_operator.kube.kinds import Kind
from diloco_operator.metrics import Metrics


def configure(kubeconfig: str) -> kubernetes.client.Configuration:
    """How to reach the API server of a kubeconfig's current context."""
    config = kubernetes.client.Configuration()
    kubernetes.config.load_kube_config(kubeconfig, client_configuration=config)
    return config


class Api(Client):
    """Blocking requests with the rights of a kubeconfig's current context."""

    def __init__(self, kubeconfig: str) -> None:
        super().__init__(configure(kubeconfig), "diloco-bench")

    def get(self, path: str) -> dict[str, Any]:
        """One object. Raises ApiError."""
        return self.request("GET", path)

    def apply(self, path: str, manifest: dict[str, Any], **query: str) -> dict[str, Any]:
        """Server-side apply to the object's path. Raises ApiError."""
        query = {"fieldManager": "diloco-bench", "force": "true"} | query
        return self.request("PATCH", path, query=query, body=manifest, content=APPLY_PATCH)


class Told:
    """In the place of the operator's cache: ``saw(gone, object)`` is told of every object that its reflector puts in
    or drops. What was deleted while nobody watched is told from its last state."""

    def __init__(self, saw: Callable[[bool, dict[str, Any]], None]) -> None:
        self._saw = saw
        self._known: dict[tuple[str, str], dict[str, Any]] = {}

    def put(self, kind: Kind, obj: dict[str, Any]) -> set[Any]:
        """An object as it is now."""
        meta = obj["metadata"]
        before = self._known.get((meta["namespace"], meta["name"]))
        if before is not None and before["metadata"]["uid"] != meta["uid"]:
            self._saw(True, before)
        self._known[meta["namespace"], meta["name"]] = obj
        self._saw(False, obj)
        return set()

    def drop(self, kind: Kind, namespace: str, name: str, uid: str, version: str | None = None) -> set[Any]:
        """An object is not there any more. ``version``: as of the operator's cache, and not needed here."""
        before = self._known.get((namespace, name))
        if before is not None and before["metadata"]["uid"] == uid:
            del self._known[namespace, name]
            self._saw(True, before)
        return set()

    def uids(self, kind: Kind, namespace: str | None) -> dict[tuple[str, str], str]:
        """Namespace and name -> UID of all objects."""
        return {key: obj["metadata"]["uid"] for key, obj in self._known.items()}


def follow(kubeconfig: str, kind: Kind, saw: Callable[[bool, dict[str, Any]], None]) -> Reflector:
    """Tell ``saw`` of all objects of a kind that carry the job's label, in a thread, until the reflector is stopped."""
    api = operator_api.Api(configure(kubeconfig), 1, 15.0, streams=1)
    nothing: Any = lambda _: None  # noqa: E731
    stream = Reflector(
        kind, None, api, cast("Cache", Told(saw)), metrics=Metrics(), changed=nothing, state_changed=nothing
    )
    stream.start()
    return stream
