"""The status port: what a learner or evaluator is doing, for probes, people and metrics.

``DILOCO_STATUS=HOST:PORT`` opens it, in the library, so that a user's own program has it too. A thread of its own
serves it (diloco_protocol.common.http_server), whatever the training thread is doing. It shows the client's
``ConnectionStatus``, which is one value, and figures, which are plain numbers read as they are.

    /livez     200: the process lives, whatever its training does
    /healthz   200; 503 where training has made no step for half of learners.stallSeconds
    /readyz    200 once this process has joined, for its whole life; 503 before. A syncer that
               is away is no reason to call a learner unready: it trains on
    /status    JSON (docs/contracts.md)
    /metrics   Prometheus

A process has one. The built-in program opens it before it loads data and model, which may
take long; a Learner or Observer finds it open, or opens it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from diloco_protocol.common.http_server import METRICS_TYPE, AddressError, ThreadedPages, json_page, text_page
from diloco_protocol.documents import LearnerLink, LearnerPage, LearnerRefusal
from diloco_protocol.vocabulary import JobPhase
from diloco_worker.core.connection_status import ConnectionStatus
from diloco_worker.settings import ConfigurationError, WorkerSettings

Figures = Mapping[str, float | None]

# Figures by name: kind, what they are called in metrics, and what they are.
_METRICS = {
    "step": ("gauge", "step", "Inner steps of the slot"),
    "tokens": ("gauge", "tokens", "Tokens trained in the slot; of an evaluator: in the job, when it scored"),
    "loss": ("gauge", "loss_nats", "Loss per token: of the last step; of an evaluator: the merged model's"),
    "step_seconds": ("gauge", "step_seconds", "Median time of a step"),
    "compute_seconds": ("counter", "compute_seconds", "Time in forward, backward and optimizer"),
    "stalled_seconds": ("counter", "stalled_seconds", "Time in which training waited for this system"),
    "bytes_up": ("counter", "sent_bytes", "Bulk bytes sent to the syncer"),
    "bytes_down": ("counter", "received_bytes", "Bulk bytes received from the syncer"),
    "link_up": ("gauge", "link_up_bytes_per_second", "Uploads' speed, until the syncer's answer"),
    "link_down": ("gauge", "link_down_bytes_per_second", "Downloads' speed while their bytes arrived"),
    "ranks": ("gauge", "ranks", "Processes of the learner"),
    "slowest_rank": ("gauge", "slowest_rank", "The rank that comes last to the ends of steps"),
    "slowest_rank_seconds": ("gauge", "slowest_rank_seconds", "By how much it comes after the first, a mean of steps"),
    "round_trip_seconds": ("gauge", "link_round_trip_seconds", "Shortest of the last echoes of reports"),
}
_open: dict[str | None, StatusPort] = {}


def open_port(settings: WorkerSettings) -> StatusPort:
    """The process's status port. Raises ConfigurationError."""
    if settings.status not in _open:
        _open[settings.status] = StatusPort(settings, settings.status)
    return _open[settings.status]


class StatusPort:
    """Serves until ``close``, on no port where ``address`` is None. It shows what ``attach`` was given; nothing but the
    settings before."""

    def __init__(self, settings: WorkerSettings, address: str | None) -> None:
        self._settings = settings
        self._address = address
        self._connection: Callable[[], ConnectionStatus] = ConnectionStatus
        self._figures: Callable[[], Figures] = dict
        self._problem: Callable[[], str] = str
        self._idle = False
        pages = {
            "/livez": text_page(lambda: (200, b"ok\n")),
            "/healthz": text_page(self._healthy),
            "/readyz": text_page(self._ready),
            "/status": json_page(self.document),
            "/metrics": text_page(lambda: (200, self._metrics()), METRICS_TYPE),
        }
        try:
            self._pages = ThreadedPages(pages, address, "DILOCO_STATUS") if address is not None else None
        except AddressError as error:
            raise ConfigurationError(str(error)) from error

    def attach(
        self,
        connection: Callable[[], ConnectionStatus],
        figures: Callable[[], Figures],
        problem: Callable[[], str] = str,
    ) -> None:
        """Show from now on what these return; they are called in the port's own thread. ``problem()``: why the process
        is not healthy; empty: it is."""
        self._connection = connection
        self._figures = figures
        self._problem = problem

    def set_idle(self, idle: bool) -> None:
        """Show whether the job is over and this process waits to be removed."""
        self._idle = idle

    def close(self) -> None:
        _open.pop(self._address, None)
        if self._pages is not None:
            self._pages.stop()

    def document(self) -> LearnerPage:
        """The page's content."""
        settings, connection, figures = self._settings, self._connection(), self._figures()
        refused, message = connection.refused, connection.message
        if not connection.connected:
            message = f"no session with the syncer: {connection.reason}"
        return LearnerPage(
            job=settings.job.metadata.name,
            role=settings.role,
            region=settings.region,
            ordinal=settings.ordinal,
            process=settings.process,
            phase=connection.phase,
            message=message,
            connected=connection.connected,
            tried=connection.tried,
            joined=connection.joined,
            standby=connection.standby,
            idle=self._idle,
            slot=connection.slot if connection.slot >= 0 else None,
            merges=connection.merges,
            step=figures.get("step"),
            tokens=figures.get("tokens"),
            loss=figures.get("loss"),
            epoch=connection.epoch or None,
            link=LearnerLink(
                up_bytes_per_second=figures.get("link_up"),
                down_bytes_per_second=figures.get("link_down"),
                round_trip_seconds=figures.get("round_trip_seconds"),
            ),
            refused=None if refused is None else LearnerRefusal(reason=refused[0], message=refused[1]),
            settings=None if connection.settings is None else connection.settings.model_dump(mode="json"),
        )

    def _healthy(self) -> tuple[int, bytes]:
        problem = self._problem()
        return (503, f"{problem}\n".encode()) if problem else (200, b"ok\n")

    def _ready(self) -> tuple[int, bytes]:
        connection = self._connection()
        if connection.joined:
            return 200, b"ok\n"
        return 503, f"not joined yet: {connection.reason}\n".encode()

    def _metrics(self) -> bytes:
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Any]:
        """The metrics, as a registry of prometheus_client asks for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        settings, connection, figures = self._settings, self._connection(), self._figures()
        names = ["job", "role", "region", "ordinal"]
        labels = [settings.job.metadata.name, settings.role, settings.region, str(settings.ordinal)]
        said = (
            ("gauge", "connected", "1 while there is a session with the syncer", connection.connected),
            ("gauge", "joined", "1 once this process has joined", connection.joined),
            ("gauge", "standby", "1 while it waits for a slot", connection.standby),
            ("counter", "reconnects", "Sessions with the syncer after the first", max(0, connection.sessions - 1)),
        )
        for kind, name, text, value in (*((*row, figures.get(key)) for key, row in _METRICS.items()), *said):
            if value is not None and math.isfinite(value):
                family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
                made = family(f"diloco_worker_{name}", text, labels=names)
                made.add_metric(labels, float(value))
                yield made
        phase = GaugeMetricFamily(
            "diloco_worker_phase", "1 for the job's phase as last heard", labels=[*names, "phase"]
        )
        for word in JobPhase:
            phase.add_metric([*labels, word.value], float(connection.phase == word))
        yield phase
