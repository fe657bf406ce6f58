"""The watches: kopf reads the API server's streams, and every object that they tell of goes to the cache.

Theory of operation. kopf is used for what it does well, listing and watching many kinds
with server-side selectors, in pages, reconnecting; and for nothing else: no handler of
change, no timer, no annotation, no finalizer, no peering. It runs in a thread with an
event loop of its own, because it ends every task of its loop when it ends. If it does end
(an error in a stream that it takes for fatal, a CRD that was deleted), ``Watches`` starts
it again, after a backoff, once the API server has our kind.

kopf does not say when a list is complete, nor what was deleted while it was not watching.
Its requests tell: a session of our own is under it, whose trace sees each. When a stream
is watched (again) after a list, the kind is compared with a list of names (``census.py``).
The trace is also how we know that a stream is alive: the API server ends each watch after
``WATCH_SECONDS``, so a stream for which nothing was asked for much longer is dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import kopf

from diloco_operator.informer.cache import Cache
from diloco_operator.kube.api import Api
from diloco_operator.kube.errors import ApiError
from diloco_operator.kube.kinds import JOB, LABELLED, NODE, Kind
from diloco_operator.metrics import Metrics
from diloco_operator.model import Key
from diloco_operator.settings import Settings
from diloco_protocol.vocabulary import DOMAIN, LABEL_JOB, VERSION

log = logging.getLogger(__name__)

WATCH_SECONDS = 270
SILENT_SECONDS = WATCH_SECONDS + 150
ABANDON_SECONDS = 3.0
PAGE = 100  # objects of one answer: bounds what is in memory at once
_CRD_HINT = (
    f"the API server does not know DiLoCoJobs ({JOB.api_version}): install the CRD "
    "(`kubectl apply -f manifests/crd.yaml`, or the chart with crds.install=true); waiting for it"
)


class Stream:
    """One kind in one namespace (or all), as kopf's requests tell of it. Times are monotonic."""

    def __init__(self, kind: Kind, namespace: str | None) -> None:
        self.kind = kind
        self.namespace = namespace
        self.listing = True  # a list was begun and no watch after it yet
        self.lists = 0
        self.answered_at: float | None = None
        self.denied: str | None = None  # the verb that is forbidden

    @property
    def selector(self) -> str:
        """Server-side, of labels."""
        return LABEL_JOB if self.kind in LABELLED else ""

    def where(self) -> str:
        """For people."""
        return "in the whole cluster" if self.namespace is None else f"in namespace {self.namespace}"


class Backoffs:
    """Seconds between tries of one request, without end; kopf gives up a stream after the last."""

    def __iter__(self) -> Iterator[float]:
        wait = 0.5
        while True:
            yield wait * random.uniform(0.6, 1.0)
            wait = min(2 * wait, 10.0)


class _Blank(kopf.AnnotationsDiffBaseStorage):
    """kopf compares every object with its last state, for handlers that we do not have."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None


class Watches:
    """Keeps ``cache`` in step with the API server.

    ``news(jobs)`` and ``listed(stream)`` are called from another thread.
    """

    def __init__(
        self,
        settings: Settings,
        config: Any,
        api: Api,
        cache: Cache,
        metrics: Metrics,
        news: Callable[[set[Key]], None],
        listed: Callable[[Stream], None],
    ) -> None:
        self._settings = settings
        self._config = config
        self._api = api
        self._cache = cache
        self._metrics = metrics
        self._news = news
        self._listed = listed
        namespaces: tuple[str | None, ...] = settings.watch_namespaces or (None,)
        kinds = (JOB, *LABELLED)
        self.streams = {(kind.plural, namespace): Stream(kind, namespace) for kind in kinds for namespace in namespaces}
        if settings.watches_nodes:
            self.streams[NODE.plural, None] = Stream(NODE, None)
        self.crd_missing = True
        self.running = False
        self._stop: Callable[[], None] = lambda: None
        self._sessions: list[aiohttp.ClientSession] = []
        self._failure = ""  # the last answer that kopf takes for fatal

    # ------------------------------------------------------------------ supervision

    async def run(self) -> None:
        """Watch until cancelled."""
        wait = 1.0
        while True:
            await self._wait_for_crd()
            began = time.monotonic()
            error = await self._watch()
            self.running = False
            self._metrics.watch_restarts.labels("all").inc()
            wait = 1.0 if time.monotonic() - began > 60 else min(2 * wait, 30.0)
            log.warning("the watches ended (%s); they begin again in %.0f s", error or "no reason given", wait)
            await asyncio.sleep(wait * random.uniform(0.7, 1.0))

    async def _wait_for_crd(self) -> None:
        wait, said = 1.0, ""
        while True:
            try:
                found = JOB.plural in await self._api.resources(DOMAIN, VERSION)
                problem = "" if found else _CRD_HINT
            except ApiError as error:
                found, problem = False, f"{error}; trying again"
            self.crd_missing = problem == _CRD_HINT
            if found:
                if said:
                    log.info("the API server has DiLoCoJobs now; watching")
                return
            if problem != said or wait >= 30.0:
                log.warning("%s", problem)
                said = problem
            await asyncio.sleep(wait * random.uniform(0.7, 1.0))
            wait = min(2 * wait, 30.0 if self.crd_missing else 10.0)

    async def _watch(self) -> str:
        """kopf in a thread of its own; why it ended."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[str] = loop.create_future()

        def finish(reason: str) -> None:
            if not ended.done():
                ended.set_result(reason)

        def body() -> None:
            reason = self._run_kopf()
            try:
                loop.call_soon_threadsafe(finish, reason)
            except RuntimeError:  # the program ended first
                log.debug("the watches ended after the program: %s", reason)

        thread = threading.Thread(target=body, name="watches", daemon=True)
        thread.start()
        self.running = True
        try:
            return await ended
        finally:
            self._stop()
            await asyncio.to_thread(thread.join, 5.0)

    def _run_kopf(self) -> str:
        """kopf until it ends, in this thread; why it did.

        When one of kopf's streams fails for good, kopf stops, and may wait for ever for the others to do so.
        It says first that it cleans up; some seconds later its loop is abandoned with whatever is in it.
        """
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda loop, context: log.debug("watches: %s", context.get("message")))
        self._failure, sessions = "", self._sessions
        try:
            loop.run_until_complete(self._kopf(loop))
        except BaseException as error:  # kopf ends by exceptions of many kinds, CancelledError too
            self._failure = self._failure or f"{type(error).__name__}: {error}"
        finally:
            while sessions:
                with contextlib.suppress(Exception):
                    loop.run_until_complete(asyncio.wait_for(sessions.pop().close(), 1.0))
            loop.close()
        return self._failure

    async def _kopf(self, loop: asyncio.AbstractEventLoop) -> None:
        stop = asyncio.Event()

        def ask_to_stop() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(stop.set)

        def ends(**_: Any) -> None:
            loop.call_soon_threadsafe(loop.call_later, ABANDON_SECONDS, loop.stop)

        self._stop = ask_to_stop
        for stream in self.streams.values():
            stream.listing = True
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(self._login)
        kopf.on.cleanup(registry=registry)(ends)
        for kind in dict.fromkeys(stream.kind for stream in self.streams.values()):
            kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, id=f"see-{kind.plural}")(
                self._handler(kind)
            )
        namespaces = self._settings.watch_namespaces
        await kopf.operator(
            registry=registry,
            settings=self._kopf_settings(),
            standalone=True,
            stop_flag=stop,
            clusterwide=not namespaces,
            namespaces=namespaces,
        )

    def _kopf_settings(self) -> kopf.OperatorSettings:
        made = kopf.OperatorSettings()
        made.scanning.disabled = True  # no permission to watch CRDs and namespaces is needed
        made.posting.enabled = False
        made.process.ultimate_exiting_timeout = None
        made.networking.request_timeout = self._settings.api_timeout_seconds
        made.networking.connect_timeout = 5.0
        made.networking.error_backoffs = Backoffs()
        made.watching.server_timeout = WATCH_SECONDS
        made.watching.client_timeout = WATCH_SECONDS + 60
        made.watching.inactivity_timeout = 90.0
        made.watching.chunk_size = PAGE
        made.queueing.idle_timeout = 0.5  # a finished worker per object is memory
        made.persistence.diffbase_storage = _Blank()
        for kind in LABELLED:
            made.watching.label_selectors[kind.group, kind.version, kind.plural] = LABEL_JOB
        return made

    def _handler(self, kind: Kind) -> Any:
        async def see(event: Any, **_: Any) -> None:
            try:
                self._see(kind, event["type"], event["object"])
            except Exception:  # kopf would only log it, and its log is not heard
                log.exception("what the watch of %s told could not be taken in", kind.plural)

        return see

    def _see(self, kind: Kind, what: str | None, obj: Any) -> None:
        meta = obj["metadata"]
        if what == "DELETED":
            news = self._cache.drop(kind, meta.get("namespace", ""), meta["name"], meta["uid"])
        else:
            news = self._cache.put(kind, obj)
        if news:
            self._news(news)

    # ------------------------------------------------------------------ requests

    async def _login(self, **_: Any) -> kopf.AiohttpSession:
        config = self._config
        tls = ssl.create_default_context(cafile=config.ssl_ca_cert)
        if not config.verify_ssl:
            tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        if config.cert_file:
            tls.load_cert_chain(config.cert_file, config.key_file)
        trace = aiohttp.TraceConfig()
        trace.on_request_end.append(self._ended)
        trace.on_request_exception.append(self._failed)
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls),
            trace_configs=[trace],
            middlewares=(self._authorise,),
            headers={"User-Agent": "diloco-operator"},
            proxy=config.proxy or None,
        )
        self._sessions.append(session)
        return kopf.AiohttpSession(server=config.host, aiohttp_session=session)

    async def _authorise(self, request: Any, handler: Any) -> Any:
        """The token as it is now: a ServiceAccount's is renewed while the session lives.

        While it is refused this tries again, with backoff: kopf would log in anew at once, for ever.
        """
        for wait in Backoffs():
            if token := self._config.get_api_key_with_prefix("BearerToken"):
                request.headers["Authorization"] = token
            elif basic := (self._config.username and self._config.get_basic_auth_token()):
                request.headers["Authorization"] = basic
            response = await handler(request)
            if response.status != 401:
                break
            self._requested(request.url, 401)
            response.close()
            await asyncio.sleep(wait)
        return response

    async def _ended(self, session: Any, context: Any, params: aiohttp.TraceRequestEndParams) -> None:
        self._requested(params.url, params.response.status)

    async def _failed(self, session: Any, context: Any, params: aiohttp.TraceRequestExceptionParams) -> None:
        self._requested(params.url, 0)

    def _requested(self, url: Any, status: int) -> None:
        stream = self._stream_of(url.path)
        watching = url.query.get("watch") == "true"
        verb = "watch" if watching else "list"
        self._api.observe(verb, stream.kind.plural if stream else "discovery", status)
        if stream is None:
            return
        if status == 403:
            if stream.denied is None:
                log.error(
                    "forbidden: the operator may not %s %s %s; it needs that permission "
                    "(docs/operator.md, permissions)",
                    verb,
                    stream.kind.plural,
                    stream.where(),
                )
                stream.denied = verb
                self._listed(stream)
            return
        if status != 200:
            if 400 <= status < 500 and status not in (401, 410, 429):
                self._failure = f"{verb} {stream.kind.plural} {stream.where()}: HTTP status {status}"
            return
        stream.answered_at = time.monotonic()
        if stream.denied is not None and (watching or stream.denied == "list"):
            log.info("the operator may %s %s %s now", stream.denied, stream.kind.plural, stream.where())
            stream.denied = None
        if not watching:
            if "continue" not in url.query:
                stream.listing, stream.lists = True, stream.lists + 1
                if stream.lists > 1:
                    self._metrics.watch_restarts.labels(stream.kind.plural).inc()
        elif stream.listing:
            stream.listing = False
            self._listed(stream)

    def _stream_of(self, path: str) -> Stream | None:
        parts = path.strip("/").split("/")
        # api/v1/… or apis/GROUP/VERSION/…, then [namespaces/NAMESPACE/]PLURAL
        rest = parts[2:] if parts[0] == "api" else parts[3:]
        namespace = None
        if len(rest) == 3 and rest[0] == "namespaces":
            namespace, rest = rest[1], rest[2:]
        return self.streams.get((rest[0], namespace)) if len(rest) == 1 else None

    # ------------------------------------------------------------------ for liveness and status

    def silent(self, now: float) -> list[Stream]:
        """Streams for which nothing was answered for so long that they must be dead. That they are
        forbidden, or that the API server is away, is for the caller to weigh."""
        if not self.running:
            return []
        return [
            stream
            for stream in self.streams.values()
            if stream.answered_at is not None and now - stream.answered_at > SILENT_SECONDS
        ]

    def denied(self) -> list[Stream]:
        """Streams that the operator may not read."""
        return [stream for stream in self.streams.values() if stream.denied is not None]
