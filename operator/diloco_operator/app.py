"""Putting the operator together, and its life from start to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from pathlib import Path
from typing import Any

from diloco_operator.health import Health
from diloco_operator.informer.cache import Cache
from diloco_operator.informer.census import Census
from diloco_operator.informer.reflector import Stream, Watches
from diloco_operator.kube.api import Api
from diloco_operator.kube.errors import ApiError
from diloco_operator.kube.kinds import NODE
from diloco_operator.kube.permissions import Permissions
from diloco_operator.logs import about
from diloco_operator.metrics import PHASES, Metrics
from diloco_operator.model import Key
from diloco_operator.plan.plan import plan
from diloco_operator.reconcile.event_recorder import EventWriter
from diloco_operator.reconcile.reconciler import PlanFunction, Reconciler
from diloco_operator.reconcile.root_key import KeyFinder
from diloco_operator.reconcile.syncer_poller import Asker
from diloco_operator.reconcile.workqueue import WorkQueue
from diloco_operator.settings import RELEASE, Settings
from diloco_protocol.common.http_server import AddressError

log = logging.getLogger(__name__)

STOP_SECONDS = 10.0


class Operator:
    """All parts, made for the running event loop. ``plan``: another plan, for tests."""

    def __init__(self, settings: Settings, config: Any, plan: PlanFunction = plan) -> None:
        self._loop = asyncio.get_running_loop()
        self.settings = settings
        self.metrics = metrics = Metrics()
        self.cache = cache = Cache()
        self.api = api = Api(
            config, settings.api_threads, settings.api_timeout_seconds, metrics.request, self._recovered
        )
        self.keys = KeyFinder(api, Path(settings.key_file), settings.namespace)
        self.permissions = Permissions(api, settings)
        self.asker = Asker(metrics, settings.syncer_calls, settings.syncer_timeout_seconds, self._answered)
        self.census = Census(api, cache, self._wake_all)
        self.watches = Watches(
            settings, config, api, cache, metrics, self._from_thread(self._wake_all), self._from_thread(self._listed)
        )
        self.reconciler = Reconciler(
            settings,
            api,
            cache,
            self.asker,
            self.keys,
            self.permissions,
            EventWriter(api, socket.gethostname()),
            metrics,
            self._nodes_are_read,
            plan,
        )
        self.queue = WorkQueue(self.reconciler.turn, settings.workers, self._failed)
        self.health = Health(api, self.watches, self.census, self.queue, self.keys, metrics)
        metrics.before = self._gauges

    async def run(self, stop: asyncio.Event) -> None:
        """Work until ``stop``. Raises OSError or AddressError if it cannot listen."""
        await self.health.start(self.settings.http)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(doing, name=name)
                    for name, doing in (
                        ("watches", self.watches.run()),
                        ("root key", self.keys.run()),
                        ("permissions", self.permissions.run()),
                        ("health", self.health.run()),
                        ("queue", self._work()),
                    )
                ]
                await stop.wait()
                log.info("stopping; training goes on without the operator")
                for task in tasks:
                    task.cancel()
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await self.census.close()
                    await self.asker.close()
                    await self.health.stop()
            self.api.close()

    async def _work(self) -> None:
        while not all(self.census.in_step(stream) for stream in self.watches.streams.values()):
            await asyncio.sleep(0.1)
        counts = ", ".join(f"{n} {kind}s" for kind, n in sorted(self.cache.count().items()))
        log.info("all watches are in step: %s", counts or "nothing is there yet")
        await self.queue.run()

    # ------------------------------------------------------------------ between the parts

    def _listed(self, stream: Stream) -> None:
        if stream.denied is not None:
            self.permissions.doubt()
        self.census.listed(stream)

    def _answered(self, key: Key) -> None:
        self.queue.add(key)

    def _recovered(self) -> None:
        """The API server answers again: what waits for it need not wait longer. Called from any thread."""
        self._from_thread(self._wake_all)(set(self.cache.jobs()))

    def _wake_all(self, keys: set[Key]) -> None:
        for key in keys:
            self.queue.add(key)

    def _from_thread(self, call: Any) -> Any:
        def safely(argument: set[Key] | Stream) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the program ends
                self._loop.call_soon_threadsafe(call, argument)

        return safely

    def _nodes_are_read(self) -> bool:
        stream = self.watches.streams.get((NODE.plural, None))
        return stream is not None and stream.denied is None and self.census.in_step(stream)

    def _failed(self, key: Key, error: Exception) -> None:
        if isinstance(error, ApiError):
            self.metrics.reconcile_errors.labels("unreachable" if error.unreachable else "api").inc()
            log.log(logging.INFO if error.unreachable else logging.WARNING, "%s; trying again", error, extra=about(key))
            return
        self.metrics.reconcile_errors.labels("internal").inc()
        log.error("the job could not be looked at", exc_info=error, extra=about(key))

    def _gauges(self) -> None:
        metrics = self.metrics
        metrics.queue_depth.set(self.queue.depth())
        metrics.queue_lag.set(self.queue.lag())
        phases = self.reconciler.phases()
        for phase in ("", *PHASES):
            metrics.jobs.labels(phase).set(phases.get(phase, 0))
        for kind, count in self.cache.count().items():
            metrics.objects.labels(kind).set(count)


async def run(settings: Settings, config: Any) -> int:
    """The operator until SIGTERM or SIGINT; the exit code."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    operator = Operator(settings, config)
    where = ", ".join(settings.watch_namespaces) or "all namespaces"
    log.info(
        "operator %s, cluster %s, %s, API server %s", RELEASE, settings.cluster or "unnamed", where, operator.api.host
    )
    try:
        await operator.run(stop)
    except (OSError, AddressError) as error:
        log.error("cannot serve on --http %s: %s; choose another address", settings.http, error)
        return 2
    except BaseExceptionGroup as group:
        log.critical("the operator ends: %s", group, exc_info=group)
        return 1
    return 0
