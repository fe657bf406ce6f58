"""The Kubernetes client of the operator, the command line and the benchmarks.

Theory of operation. The official client reads the kubeconfig or the pod's ServiceAccount: certificates, tokens that
rotate, credential plugins, proxies. Requests go through its urllib3 pool, and objects stay the dicts that the API
server sends: the generated model classes would cost many times their memory.

A request is tried once and has a timeout; its caller knows whether to try again. Every failure is an ``ApiError``.
A list is read in pages. ``stream`` hands out a reply as it comes, for watches and logs.

The package ``kubernetes`` is loaded when a configuration is read, not before: ``diloco --help`` works without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict, Unpack
from urllib.parse import urlencode

import urllib3

from diloco_operator.kube.errors import UNREADABLE, ApiError, ConfigError, parse_object, refusal
from diloco_operator.model import Object

MAX_REPLY_BYTES = 64 << 20  # a page of a list is far below
PAGE = 250  # objects of one page
JSON = "application/json"
APPLY_PATCH = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


class RequestParts(TypedDict, total=False):
    """What of a request is not as usual."""

    query: Mapping[str, Any] | None  # what follows the path
    body: Any  # sent as JSON
    content: str  # type of the body, if not JSON
    accept: str  # type of the reply, if not JSON


def configuration(kubeconfig: str | None = None) -> Any:
    """How to reach the API server: the pod's ServiceAccount, else a kubeconfig (``kubeconfig``: its path;
    None: KUBECONFIG or ~/.kube/config). Raises ConfigError."""
    import kubernetes.client
    import kubernetes.config

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
    return made


class Client:
    """Blocking requests to one API server, from any thread.

    ``connections``: kept open for further requests. ``connect_seconds``: the longest to wait for a connection.
    """

    def __init__(self, config: Any, agent: str, connections: int = 16, connect_seconds: float = 5.0) -> None:
        from kubernetes.client.rest import RESTClientObject

        self.config = config
        self._agent = agent
        self._connect_seconds = connect_seconds
        config.retries = False  # trying again is decided by the caller, and counted
        config.connection_pool_maxsize = connections
        self._pool = RESTClientObject(config).pool_manager

    @property
    def host(self) -> str:
        """The API server's URL."""
        return str(self.config.host)

    def authorization(self) -> dict[str, str]:
        """The headers that say who asks, as they are now: a token is renewed here. Raises ApiError."""
        try:
            settings = self.config.auth_settings().values()
        except Exception as error:  # whatever a credential plugin raises
            raise ApiError("", "", 0, f"the credentials cannot be had: {error}", reason="Credentials") from error
        return {one["key"]: one["value"] for one in settings if one["in"] == "header" and one["value"]}

    def request(self, method: str, path: str, *, seconds: float = 30.0, **parts: Unpack[RequestParts]) -> Object:
        """One request; the JSON object of the reply. Raises ApiError."""
        return self.request_with_status(method, path, seconds=seconds, **parts)[1]

    def request_with_status(
        self, method: str, path: str, *, seconds: float, **parts: Unpack[RequestParts]
    ) -> tuple[int, Object]:
        """One request; the HTTP status and the JSON object of the reply. Raises ApiError."""
        with self.stream(method, path, silence=seconds, total=seconds, **parts) as reply:
            document = parse_object(self._body(method, path, reply))
            if document is None:
                raise _unreadable(method, path, f"{self.host} answered {path} with something that is no JSON object")
            return int(reply.status), document

    @contextlib.contextmanager
    def stream(
        self,
        method: str,
        path: str,
        *,
        silence: float | None,
        total: float | None = None,
        **parts: Unpack[RequestParts],
    ) -> Iterator[Any]:
        """A reply as it comes: urllib3's response, its bytes unread.

        ``silence``: seconds without a byte that are borne (None: any). Raises ApiError until the reply has begun;
        reading it raises urllib3's errors.
        """
        query, body = parts.get("query"), parts.get("body")
        headers = {"Accept": parts.get("accept", JSON), "User-Agent": self._agent, **self.authorization()}
        if body is not None:
            headers["Content-Type"] = parts.get("content", JSON)
        try:
            reply = self._pool.request(
                method,
                self.host + path + (f"?{urlencode(query)}" if query else ""),
                body=None if body is None else json.dumps(body, allow_nan=False).encode(),
                headers=headers,
                timeout=urllib3.Timeout(
                    connect=min(self._connect_seconds, total or self._connect_seconds), read=silence, total=total
                ),
                retries=False,
                preload_content=False,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise self._unanswered(method, path, error) from error
        except UnicodeError as error:
            raise ApiError(method.lower(), path, 400, f"{path!r} cannot be asked for: {error}") from error
        try:
            if reply.status >= 300:
                body, pause = self._body(method, path, reply), reply.headers.get("Retry-After")
                raise refusal(method.lower(), path, int(reply.status), body, retry_after=pause)
            yield reply
        finally:
            # A connection whose reply was not read to its end cannot serve the next request.
            reply.release_conn() if reply.closed else reply.close()

    def pages(
        self, path: str, *, page: int = PAGE, seconds: float = 30.0, **parts: Unpack[RequestParts]
    ) -> Iterator[Object]:
        """A collection, a page (the list's whole document) at a time. Raises ApiError."""
        parts["query"] = query = {**(parts.get("query") or {}), "limit": page}
        while True:
            document = self.request("GET", path, seconds=seconds, **parts)
            yield document
            query["continue"] = (document.get("metadata") or {}).get("continue")
            if not query["continue"]:
                return

    def items(self, path: str, *, page: int = PAGE, **parts: Unpack[RequestParts]) -> Iterator[Object]:
        """All objects of a collection, read in pages. Raises ApiError."""
        for document in self.pages(path, page=page, **parts):
            yield from document.get("items") or ()

    def _body(self, method: str, path: str, reply: Any) -> bytes:
        try:
            data = bytes(reply.read(MAX_REPLY_BYTES + 1))
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise self._unanswered(method, path, error) from error
        if len(data) > MAX_REPLY_BYTES:
            raise _unreadable(method, path, f"{self.host} answered {path} with more than {MAX_REPLY_BYTES} bytes")
        return data

    def _unanswered(self, method: str, path: str, error: Exception) -> ApiError:
        said = f"the API server at {self.host} does not answer: {describe_error(error)}"
        return ApiError(method.lower(), path, 0, said)


def _unreadable(method: str, path: str, message: str) -> ApiError:
    return ApiError(method.lower(), path, 0, message, reason=UNREADABLE)


def describe_error(error: Exception) -> str:
    """The network's error in a few words, the same for the same error: who logs only what is new compares them."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    inner = getattr(error, "reason", None)
    text = re.sub(" at 0x[0-9a-f]+", "", str(inner if isinstance(inner, Exception) else error))
    return text[:300] or type(error).__name__
