"""The informer: lists and then watches what jobs made, and nodes, and keeps the cache equal to it.

Theory of operation. Each kind in each namespace has a ``Reflector``: a thread that lists the objects in pages and
then watches from the list's resourceVersion on. An object of the cache that a list does not have is dropped, so after
a list the cache is what the API server has (``synced``). Bookmarks move the version on where nothing happens; when
the API server has forgotten a version (410), the next thing is a list again.

A watch ends after ``WATCH_SECONDS`` by the server's clock, and after ``NO_BYTE_SECONDS`` without a byte (bookmarks come
every minute) by ours, so that a dead connection is noticed; it is taken up again from the last version. A request that
fails is tried again for ever, after a backoff with jitter. ``heard_at`` is the time of the last byte, which may be a
refusal or the beginning of a watch. ``cached_at`` is the time up to which the cache has what was sent: by it a plan
is told how old its view is.

Example: the API server restarts. The watch breaks off, connecting fails some times, and then the watch goes on from
its version; deletions in between come as events. If that version is gone, the list tells what was deleted.

An object that cannot be read costs that object: it is logged, and the stream goes on. Objects stay JSON's dicts, a
page at a time; the cache keeps what is needed of them. Why this is not a library's:
docs/decisions/041-kopf-watches-jobs-an-informer-the-rest.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import urllib3

from diloco_operator.informer.cache import Cache
from diloco_operator.kube.api import Api
from diloco_operator.kube.client import MAX_REPLY_BYTES
from diloco_operator.kube.errors import UNREADABLE, ApiError, refusal
from diloco_operator.kube.kinds import LABELLED, NODE, POD, STATEFUL_SET, Kind
from diloco_operator.metrics import Metrics
from diloco_operator.model import Key, Object
from diloco_operator.settings import Settings
from diloco_protocol.vocabulary import LABEL_JOB

log = logging.getLogger(__name__)

WATCH_SECONDS = 270
NO_BYTE_SECONDS = 90.0
DEAD_SECONDS = WATCH_SECONDS + 150  # a stream that heard nothing for so long is dead
LIST_SECONDS = 60.0  # for one page
PAGE = 100  # objects of one page: bounds what is in memory at once
SHORT_SECONDS = 1.0  # a watch that ended sooner is not begun again at once
STOP_SECONDS = 5.0
_CHUNK = 1 << 16


class Backoffs:
    """Seconds between tries of one request: doubling, with jitter, without end."""

    def __iter__(self) -> Iterator[float]:
        wait = 0.5
        while True:
            yield wait * random.uniform(0.6, 1.0)
            wait = min(2 * wait, 10.0)


@dataclass(eq=False)
class Reflector:
    """One kind in one namespace (None: in all), kept in the cache by a thread of its own.

    ``changed(jobs)`` is called for jobs whose objects changed, ``state_changed(reflector)`` when ``synced`` or
    ``denied`` did; both from the thread. Times are monotonic.
    """

    kind: Kind
    namespace: str | None
    api: Api
    cache: Cache
    metrics: Metrics
    changed: Callable[[set[Key]], None]
    state_changed: Callable[[Reflector], None]
    synced: bool = False  # the cache has had all that a list had
    denied: str | None = None  # the verb that is forbidden
    heard_at: float | None = None
    cached_at: float | None = None

    def __post_init__(self) -> None:
        self._version = ""  # to watch from; empty: list first
        self._unreadable = False  # the last answer, and that was logged
        self._reply: Any = None  # the watch under way
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch {self.kind.plural}", daemon=True)

    @property
    def in_step(self) -> bool:
        """Whether the cache has all objects, or never will: they are forbidden."""
        return self.synced or self.denied is not None

    def where(self) -> str:
        """What is watched, for people."""
        place = "the whole cluster" if self.namespace is None else f"namespace {self.namespace}"
        return f"{self.kind.plural} in {place}"

    def start(self) -> None:
        """List and watch in a new thread; once."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, without waiting for it."""
        self._stopped.set()
        reply = self._reply
        if reply is not None:
            with contextlib.suppress(Exception):  # the reply ends by itself at this moment
                reply.shutdown()

    def join(self, seconds: float) -> None:
        """Wait for the thread's end."""
        if self._thread.is_alive():
            self._thread.join(seconds)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        waits = iter(Backoffs())
        while not self._stopped.is_set():
            began = time.monotonic()
            verb, pause = "watch" if self._version else "list", 0.0
            try:
                if self._version:
                    self._watch()
                else:
                    self._list()
            except ApiError as error:
                self._record_failure(verb, error)
                pause = error.retry_after
            except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
                log.debug("%s %s broke off: %s", verb, self.where(), error)
            except Exception:
                log.exception("a fault in the watch of %s; it begins anew", self.kind.plural)
                self._version = ""
            else:
                if verb == "list" or time.monotonic() - began > SHORT_SECONDS:
                    waits = iter(Backoffs())
                    continue
            self._stopped.wait(max(pause, next(waits)))

    def _list(self) -> None:
        """Make the cache what the API server has. Raises ApiError."""
        gone = self.cache.uids(self.kind, self.namespace)
        began, version = time.monotonic(), ""
        for page in self.api.client.pages(
            self.kind.path(self.namespace), query=self._selector(), page=PAGE, seconds=LIST_SECONDS
        ):
            self._record_answer("list")
            version = str(page["metadata"]["resourceVersion"])
            for item in page.get("items") or ():
                meta = item.get("metadata") or {}
                gone.pop((meta.get("namespace", ""), meta.get("name", "")), None)
                self._store({"apiVersion": self.kind.api_version, "kind": self.kind.name, **item})
            if self._stopped.is_set():
                return
        for (namespace, name), uid in gone.items():
            if jobs := self.cache.drop(self.kind, namespace, name, uid, version):
                self.changed(jobs)
        self.cached_at = began
        self._version = version
        if self.synced:
            self.metrics.watch_restarts.labels(self.kind.plural).inc()
        self.synced = True
        self.state_changed(self)

    def _watch(self) -> None:
        """Follow changes from the last version on, until the server or silence ends it.

        Raises ApiError and what reading a reply raises.
        """
        query = {
            **self._selector(),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": WATCH_SECONDS,
        }
        with self.api.client.stream(
            "GET", self.kind.path(self.namespace), query=query, silence=NO_BYTE_SECONDS
        ) as reply:
            self._record_answer("watch")
            self._reply = reply
            try:
                rest = b""
                while not self._stopped.is_set() and (chunk := reply.read1(_CHUNK)):
                    self.heard_at = at = time.monotonic()
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        self._take_event(line)
                    self.cached_at = at
                    if len(rest) > MAX_REPLY_BYTES:
                        raise urllib3.exceptions.ProtocolError(f"an event of more than {MAX_REPLY_BYTES} bytes")
            finally:
                self._reply = None

    def _take_event(self, line: bytes) -> None:
        try:
            event = json.loads(line)
            what, obj = str(event["type"]), event["object"]
            version = str((obj.get("metadata") or {}).get("resourceVersion") or "")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.error("an event of %s cannot be read: %s", self.where(), error)
            return
        if what == "ERROR":
            raise refusal("watch", self.kind.plural, int(obj.get("code") or 500), json.dumps(obj).encode())
        if what == "DELETED":
            self._drop(obj)
        elif what != "BOOKMARK":
            self._store(obj)
        self._version = version or self._version

    def _store(self, obj: Object) -> None:
        self._change(obj, lambda: self.cache.put(self.kind, obj))

    def _drop(self, obj: Object) -> None:
        meta = obj["metadata"]
        self._change(
            obj,
            lambda: self.cache.drop(
                self.kind, meta.get("namespace", ""), meta["name"], meta["uid"], meta.get("resourceVersion")
            ),
        )

    def _change(self, obj: Object, change: Callable[[], set[Key]]) -> None:
        """Change the cache and tell of the jobs concerned; an object that cannot be read is logged."""
        try:
            jobs = change()
        except Exception as error:
            name = (obj.get("metadata") or {}).get("name")
            log.error("%s %s cannot be read (%s: %s)", self.kind.name, name, type(error).__name__, error)
            return
        if jobs:
            self.changed(jobs)

    def _selector(self) -> dict[str, str]:
        return {"labelSelector": LABEL_JOB} if self.kind in LABELLED else {}

    # ------------------------------------------------------------------ what became of a request

    def _record_answer(self, verb: str) -> None:
        self.heard_at = time.monotonic()
        self._unreadable = False
        self.api.observe(verb, self.kind.plural, 200)
        if self.denied is not None and (verb == "watch" or self.denied == "list"):
            log.info("the operator may %s %s now", self.denied, self.where())
            self.denied = None
            self.state_changed(self)

    def _record_failure(self, verb: str, error: ApiError) -> None:
        self.api.observe(verb, self.kind.plural, error.status)
        if error.status != 0:
            self.heard_at = time.monotonic()
        if error.status == 410:
            self._version = ""  # the API server has forgotten it
        elif error.reason == UNREADABLE and not self._unreadable:
            self._unreadable = True
            log.warning("%s %s: %s; trying again", verb, self.where(), error)
        elif error.status == 403 and self.denied is None:
            log.error(
                "forbidden: the operator may not %s %s; it needs that permission (docs/operator.md, permissions)",
                verb,
                self.where(),
            )
            self.denied = verb
            self.state_changed(self)
        elif not error.unreachable and error.status not in (401, 403):
            log.warning("%s %s: %s; trying again", verb, self.where(), error)


class Informer:
    """The reflectors of all kinds that jobs make, and of nodes, in the namespaces that are watched.

    ``make_stream``: makes the reflector of one kind in one namespace.
    """

    def __init__(self, settings: Settings, make_stream: Callable[[Kind, str | None], Reflector]) -> None:
        namespaces: tuple[str | None, ...] = settings.watch_namespaces or (None,)
        self._places = [(kind, namespace) for kind in LABELLED for namespace in namespaces]
        if settings.watches_nodes:
            self._places.append((NODE, None))
        self._make_stream = make_stream
        self.streams = self._make_streams()

    def _make_streams(self) -> dict[tuple[Kind, str | None], Reflector]:
        return {place: self._make_stream(*place) for place in self._places}

    async def run(self) -> None:
        """Keep the cache true until cancelled. May run again, and lists anew then."""
        self.streams = self._make_streams()
        streams = self.streams.values()
        try:
            for stream in streams:
                stream.start()
            await asyncio.Event().wait()
        finally:
            for stream in streams:
                stream.stop()
            until = time.monotonic() + STOP_SECONDS
            for stream in streams:
                await asyncio.to_thread(stream.join, max(0.0, until - time.monotonic()))

    def in_step(self) -> bool:
        """Whether the cache has all objects that may be read."""
        return all(stream.in_step for stream in self.streams.values())

    def nodes_are_read(self) -> bool:
        """Whether all nodes are in the cache."""
        stream = self.streams.get((NODE, None))
        return stream is not None and stream.denied is None and stream.synced

    def age(self, namespace: str, now: float) -> float:
        """For how many seconds the cache has got nothing new of the pods and StatefulSets of a namespace, or of nodes,
        by the stream that is behind longest. ``now``: monotonic.

        It is infinite where one is forbidden, or has not listed yet. Forbidden nodes do not count: nobody reads them.
        """
        streams = [
            stream
            for (kind, place), stream in self.streams.items()
            if kind in (POD, STATEFUL_SET, NODE) and place in (None, namespace)
        ]
        if any(stream.denied is not None or stream.cached_at is None for stream in streams if stream.kind is not NODE):
            return math.inf
        times = [stream.cached_at for stream in streams if stream.denied is None and stream.cached_at is not None]
        return max((now - at for at in times), default=math.inf)

    def dead(self, now: float) -> list[Reflector]:
        """Streams that are allowed and have heard nothing for ``DEAD_SECONDS``. Whether the API server is away
        is for the caller to weigh."""
        return [
            stream
            for stream in self.streams.values()
            if stream.denied is None and stream.heard_at is not None and now - stream.heard_at > DEAD_SECONDS
        ]
