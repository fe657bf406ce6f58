"""Whether the operator is alive, and whether it is ready.

It is alive while turns end (a long queue that moves is work, which a restart would only add to) and no stream is
silent though the API server answers. A missing API server, CRD or permission is nothing that a restart would cure,
and so never fails liveness. It is ready when every stream is in step (or forbidden), the Lease was read and the root
key is known; one that stands by is ready too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from diloco_operator.informer.job_events import JobEvents
from diloco_operator.informer.reflector import Informer, Reflector
from diloco_operator.kube.api import Api
from diloco_operator.leadership.candidate import Candidate
from diloco_operator.metrics import Metrics
from diloco_operator.reconcile.root_key import RootKeyFinder
from diloco_operator.reconcile.workqueue import WorkQueue
from diloco_protocol.common.http_server import METRICS_TYPE, HttpServer, Page, split_address, text_page

log = logging.getLogger(__name__)

STUCK_SECONDS = 300.0
LOOK_SECONDS = 30.0


@dataclass
class Health:
    """Serves ``/healthz``, ``/readyz`` and ``/metrics``."""

    api: Api
    informer: Informer
    job_events: JobEvents
    queue: WorkQueue
    keys: RootKeyFinder
    metrics: Metrics
    candidate: Candidate
    crd_missing: bool = True

    def __post_init__(self) -> None:
        self._silent: list[Reflector] = []  # streams that were silent though the API server answered
        self._server = HttpServer(self.pages())

    def pages(self) -> dict[str, Page]:
        """By path."""
        return {
            "/healthz": text_page(lambda: _answer(self.problem())),
            "/readyz": text_page(lambda: _answer(self.not_ready())),
            "/metrics": text_page(lambda: (200, self.metrics.page()), METRICS_TYPE),
        }

    async def start(self, address: str) -> int:
        """Listen; returns the port. Raises OSError, AddressError."""
        return await self._server.start(*split_address(address, "--http"))

    async def stop(self) -> None:
        """Serve no more."""
        await self._server.stop()

    async def run(self) -> None:
        """Look after the streams until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            silent = self.informer.dead(time.monotonic())
            self._silent = silent if silent and await self.api.answers() else []
            for stream in self._silent:
                log.error("the watch of %s is silent though the API server answers", stream.where())

    def problem(self) -> str:
        """Why the operator is not alive; empty: it is."""
        still = self.queue.standstill()
        if still > STUCK_SECONDS:
            return f"stuck: for {still:.0f} s no look at a job has ended, or one has taken so long"
        if self._silent:
            names = ", ".join(stream.kind.plural for stream in self._silent)
            return f"watches are silent though the API server answers: {names}"
        if self.job_events.dead:
            return "kopf does not bring the changes of DiLoCoJobs that the API server has"
        return ""

    def not_ready(self) -> str:
        """Why the operator is not ready; empty: it is."""
        if self.crd_missing:
            return "the API server does not know DiLoCoJobs: install the CRD, or see the log"
        behind = [stream.where() for stream in self.informer.streams.values() if not stream.in_step]
        if behind:
            return f"reading for the first time: {', '.join(behind)}"
        if not self.candidate.has_read:
            return f"the Lease is not read yet {self.candidate.problem}".strip()
        return self.keys.problem if self.keys.key is None else ""


def _answer(problem: str) -> tuple[int, bytes]:
    return (503, problem.encode() + b"\n") if problem else (200, b"ok\n")
