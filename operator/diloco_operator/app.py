"""Putting the operator together, and its life from start to stop.

Theory of operation. kopf runs the operator: its startup handler starts the parts (informer, work queue, root key,
permissions), its cleanup handler ends them, and its events of DiLoCoJobs wake their reconciles. kopf ends when its
watch fails for good, for example because the CRD was deleted. Then the parts end too, and all of it begins again,
after a backoff, once the API server has our kind. The pages for probes are served all the time.

Several operators may run. All watch; one leads, by a Lease (``leadership``), and it alone turns jobs. When it cannot
renew the Lease, its turns end. ``Api`` and ``SyncerPoller`` ask again before each write and call, so that a process
that stood still writes nothing when it goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import signal
import socket
import time
from pathlib import Path
from typing import Any

import kopf

from diloco_operator.handlers import make_registry, make_settings
from diloco_operator.health import Health
from diloco_operator.informer.cache import Cache
from diloco_operator.informer.job_events import JobEvents
from diloco_operator.informer.reflector import Informer, Reflector
from diloco_operator.kube.api import Api
from diloco_operator.kube.errors import ApiError
from diloco_operator.kube.kinds import JOB, LABELLED
from diloco_operator.kube.permissions import Permissions
from diloco_operator.leadership.candidate import Candidate, LeaseStore
from diloco_operator.logs import about
from diloco_operator.metrics import PHASES, Metrics
from diloco_operator.model import RELEASE, Key
from diloco_operator.plan import planning
from diloco_operator.reconcile.event_recorder import EventRecorder
from diloco_operator.reconcile.leading import run_while_leading
from diloco_operator.reconcile.reconciler import PlanFunction, Reconciler
from diloco_operator.reconcile.root_key import RootKeyFinder
from diloco_operator.reconcile.syncer_poller import SyncerPoller
from diloco_operator.reconcile.workqueue import WorkQueue
from diloco_operator.settings import Settings
from diloco_protocol.common.http_server import AddressError

log = logging.getLogger(__name__)

STOP_SECONDS = 10.0
LONGEST_BACKOFF = 30.0
SIGNALS_SECONDS = 0.5
_CRD_HINT = (
    f"the API server does not know DiLoCoJobs ({JOB.api_version}): install the CRD "
    "(`kubectl apply -f manifests/crd.yaml`, or the chart with crds.install=true); waiting for it"
)


class Operator:
    """All parts, made for the running event loop.

    ``plan_job``: another plan, for tests. ``signals``: those that end it, in a main thread.
    """

    def __init__(
        self,
        settings: Settings,
        config: Any,
        plan_job: PlanFunction = planning.plan_job,
        signals: tuple[signal.Signals, ...] = (),
    ) -> None:
        self._signals = signals
        self._loop = asyncio.get_running_loop()
        self.settings = settings
        self.metrics = metrics = Metrics()
        self.cache = cache = Cache()
        streams = (len(LABELLED) + 1) * max(1, len(settings.watch_namespaces))
        self.api = api = Api(
            config,
            settings.api_threads,
            settings.api_timeout_seconds,
            metrics.request,
            recovered=self._recovered,
            streams=streams + 1,
            seconds_for_a_write=lambda: self.candidate.seconds_for_a_write(),
        )
        self.candidate = Candidate(
            LeaseStore(api.client, settings.namespace, settings.lease, api.observe),
            f"{socket.gethostname()}_{secrets.token_hex(4)}",
        )
        self.keys = RootKeyFinder(api, Path(settings.key_file), settings.namespace)
        self.permissions = Permissions(api, settings)
        self.poller = SyncerPoller(
            metrics,
            settings.syncer_calls,
            settings.syncer_timeout_seconds,
            lambda key: self.queue.add(key),
            leads=self.candidate.leads,
        )
        self.job_events = JobEvents(api, cache, self._wake_all)
        told = self._from_thread(self._wake_all), self._from_thread(self._stream_changed)
        self.informer = Informer(settings, lambda kind, place: Reflector(kind, place, api, cache, metrics, *told))
        self.reconciler = Reconciler(
            settings,
            api,
            cache,
            self.poller,
            keys=self.keys,
            permissions=self.permissions,
            events=EventRecorder(api, socket.gethostname()),
            metrics=metrics,
            nodes_are_read=self.informer.nodes_are_read,
            confirm=self.job_events.confirm,
            view_age=self.informer.age,
            plan_job=plan_job,
        )
        self.queue = WorkQueue(self.reconciler.turn, settings.workers, self._failed)
        self.health = Health(
            api, self.informer, self.job_events, self.queue, keys=self.keys, metrics=metrics, candidate=self.candidate
        )
        metrics.before = self._gauges
        self._parts: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Work until ``stop``. Raises OSError or AddressError if it cannot listen, and what a part failed of."""
        await self.health.start(self.settings.http)
        checks = asyncio.create_task(self.health.run(), name="health")
        try:
            await self._run_kopf_again_and_again(stop)
        finally:
            checks.cancel()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await self.poller.close()
                    await self.health.stop()
            self.api.close()
        if self._failure is not None:
            raise self._failure

    async def _run_kopf_again_and_again(self, stop: asyncio.Event) -> None:
        backoff = 1.0
        self._take_signals(stop)
        while await self._wait_for_crd(stop):
            began = time.monotonic()
            try:
                await self._run_kopf(stop)
                stop.set()  # it ends so when told to: by the signal that it took, or by ``stop``
            except Exception as error:
                if stop.is_set():
                    return
                self.metrics.watch_restarts.labels("all").inc()
                backoff = 1.0 if time.monotonic() - began > 60 else min(2 * backoff, LONGEST_BACKOFF)
                reason = f"{type(error).__name__}: {error}"
                log.warning("kopf ended (%s); it starts again in %.0f s", reason, backoff)
                await _sleep(stop, backoff)

    def _take_signals(self, stop: asyncio.Event) -> None:
        for number in self._signals:
            self._loop.add_signal_handler(number, stop.set)

    async def _run_kopf(self, stop: asyncio.Event) -> None:
        """kopf, and within its life the parts. Raises what kopf ends with, which may be anything."""
        namespaces = self.settings.watch_namespaces
        await kopf.operator(
            registry=make_registry(
                self.api, lambda: self._begin(stop), lambda: self._end(stop), self.job_events.handle
            ),
            settings=make_settings(self.settings),
            standalone=True,
            stop_flag=stop,
            clusterwide=not namespaces,
            namespaces=namespaces,
        )

    async def _wait_for_crd(self, stop: asyncio.Event) -> bool:
        """Wait until the API server has DiLoCoJobs; False: told to stop."""
        wait, said = 1.0, ""
        while not stop.is_set():
            try:
                found = JOB.plural in await self.api.served_resources(JOB.group, JOB.version)
                problem = "" if found else _CRD_HINT
            except ApiError as error:
                found, problem = False, f"{error}; trying again"
            self.health.crd_missing = problem == _CRD_HINT
            if found:
                if said:
                    log.info("the API server has DiLoCoJobs now; watching")
                return True
            if problem != said or wait >= LONGEST_BACKOFF:
                log.warning("%s", problem)
                said = problem
            await _sleep(stop, wait)
            wait = min(2 * wait, LONGEST_BACKOFF if self.health.crd_missing else 10.0)
        return False

    # ------------------------------------------------------------------ the parts, within kopf's life

    def _begin(self, stop: asyncio.Event) -> None:
        # kopf takes the signals as it starts, and would lose one that comes while it ends for another reason.
        self._loop.call_later(SIGNALS_SECONDS, self._take_signals, stop)
        self.job_events.start()
        self._parts = asyncio.create_task(self._run_parts(stop), name="parts")

    async def _run_parts(self, stop: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.informer.run(), name="informer")
                group.create_task(self.job_events.run(), name="job events")
                group.create_task(self.keys.run(), name="root key")
                group.create_task(self.permissions.run(), name="permissions")
                group.create_task(self.candidate.run(), name="candidate")
                group.create_task(self._reconcile(), name="reconciles")
        except Exception as error:
            self._failure = error
            stop.set()

    async def _end(self, stop: asyncio.Event) -> None:
        if stop.is_set():
            log.info("stopping; training continues without the operator")
        if self._parts is not None:
            self._parts.cancel()
            await asyncio.wait([self._parts], timeout=STOP_SECONDS)
        await self.candidate.release(lambda: not self.api.writing)

    async def _reconcile(self) -> None:
        while not self.informer.in_step():
            await asyncio.sleep(0.1)
        counts = ", ".join(f"{n} {kind}s" for kind, n in sorted(self.cache.count().items()))
        log.info("all watches are in step: %s", counts or "nothing is there yet")
        await run_while_leading(self.candidate, self.queue, self._begin_to_lead)

    def _begin_to_lead(self, another_led: bool) -> None:
        if another_led:
            self.reconciler.forget()
        self._wake_all(set(self.cache.jobs()))

    # ------------------------------------------------------------------ between the parts

    def _stream_changed(self, stream: Reflector) -> None:
        if stream.denied is not None:
            self.permissions.recheck()

    def _recovered(self) -> None:
        """The API server answers again: what waits for it need not wait longer. Called from any thread."""
        self._from_thread(self._wake_all)(set(self.cache.jobs()))

    def _wake_all(self, keys: set[Key]) -> None:
        for key in keys:
            self.queue.add(key)

    def _from_thread(self, call: Any) -> Any:
        def safely(argument: set[Key] | Reflector) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the program ends
                self._loop.call_soon_threadsafe(call, argument)

        return safely

    def _failed(self, key: Key, error: Exception) -> None:
        if isinstance(error, ApiError):
            self.metrics.reconcile_errors.labels("unreachable" if error.unreachable else "api").inc()
            log.log(logging.INFO if error.unreachable else logging.WARNING, "%s; trying again", error, extra=about(key))
            return
        self.metrics.reconcile_errors.labels("internal").inc()
        log.error("the job could not be processed", exc_info=error, extra=about(key))

    def _gauges(self) -> None:
        metrics = self.metrics
        metrics.leads.set(self.candidate.leads())
        metrics.queue_depth.set(self.queue.depth())
        metrics.queue_lag.set(self.queue.lag())
        phases = self.reconciler.phases()
        for phase in ("", *PHASES):
            metrics.jobs.labels(phase).set(phases.get(phase, 0))
        for kind, count in self.cache.count().items():
            metrics.objects.labels(kind).set(count)


async def _sleep(stop: asyncio.Event, seconds: float) -> None:
    """Wait about so long, or until told to stop."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds * random.uniform(0.7, 1.0)):
            await stop.wait()


async def run(settings: Settings, config: Any) -> int:
    """The operator until SIGTERM or SIGINT; the exit code."""
    stop = asyncio.Event()
    operator = Operator(settings, config, signals=(signal.SIGTERM, signal.SIGINT))
    where = ", ".join(settings.watch_namespaces) or "all namespaces"
    host = operator.api.client.host
    log.info("operator %s, cluster %s, %s, API server %s", RELEASE, settings.cluster or "unnamed", where, host)
    try:
        await operator.run(stop)
    except (OSError, AddressError) as error:
        log.error("cannot serve on --http %s: %s; choose another address", settings.http, error)
        return 2
    except BaseExceptionGroup as group:
        log.critical("the operator ends: %s", group, exc_info=group)
        return 1
    return 0
