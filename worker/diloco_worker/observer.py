"""The evaluator's side of the exchange: a full model made current from broadcasts, without a slot.

with Observer.from_environment(model) as observer:
    while not observer.ended:
        observer.wait_for_change(timeout=1.0)
        if observer.complete and not observer.current:
            observer.refresh()
        elif observer.complete:
            observer.report(loss(model), final=observer.evaluating)

It hears of every merge and downloads none: the first model comes by itself, and newer
versions when ``refresh`` asks for them. Between two scores a fragment is merged many
times, and a model that nobody looks at is not worth its bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import torch

from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.vocabulary import ENDED_PHASES, JobPhase
from diloco_protocol.wire import sync_pb2
from diloco_worker.core.adoption import Kind
from diloco_worker.core.connection_status import ConnectionStatus
from diloco_worker.fragments import ModelFragments, build_layout, frozen_tensors, load_frozen, most_frozen_bytes
from diloco_worker.net.client import SyncerClient
from diloco_worker.net.inbox import Announced, Downloaded, Failed, FrozenDownloaded, Inbox, PhaseChanged, Welcomed
from diloco_worker.settings import ConfigurationError, WorkerSettings
from diloco_worker.status_page import open_port

log = logging.getLogger(__name__)


class Observer:
    """Brings ``model`` to the newest broadcasts. Use it from one thread; the model changes
    only inside ``wait_for_change`` and ``poll``."""

    def __init__(self, settings: WorkerSettings, model: torch.nn.Module) -> None:
        spec = settings.job.spec
        self.job: DiLoCoJob = settings.job
        self.layout = build_layout(model, spec.sync.fragments, spec.sync.every, spec.sync.merge.mean_tensors)
        self._model = model
        self._fragments = ModelFragments(model, self.layout)
        self._inbox = Inbox()
        self._client = SyncerClient(settings, self.layout, self._inbox, 0, self._fragments.pinned, eager=False)
        self._port = open_port(settings)
        if self._port is not None:
            self._port.connection, self._port.figures = lambda: self.connection, self._figures
        self.score: dict[str, float] = {}  # tokens and loss of the last report, for the status port
        self._versions: list[tuple[int, int] | None] = [None] * len(self.layout)
        self._announced: list[tuple[int, int]] = [(0, 0)] * len(self.layout)
        self._wanted: list[tuple[int, int]] | None = None  # what the last refresh asked for
        self._frozen_needed = bool(frozen_tensors(model))
        self._frozen_asked = False
        self.phase: str = JobPhase.WAITING
        self.message = ""
        self.job_tokens = 0  # trained in all, at the newest merge taken
        self.announced_tokens = 0  # the same, at the newest merge heard of

    @classmethod
    def from_environment(cls, model: torch.nn.Module, *, environ: Mapping[str, str] | None = None) -> Self:
        """Build from ``DILOCO_*`` (docs/contracts.md). Raises ConfigurationError."""
        settings = WorkerSettings.from_environment(environ)
        if settings.role != "evaluator":
            raise ConfigurationError(f"DILOCO_ROLE is {settings.role!r}: an observer needs the role evaluator")
        return cls(settings, model)

    def __enter__(self) -> Self:
        self._client.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._client.connected:
            self._client.wait_sent(5.0)
        self._client.stop()
        if self._port is not None:
            self._port.close()

    def idle(self, idle: bool) -> None:
        """Say on the status port that the job is over and this process waits to be removed."""
        if self._port is not None:
            self._port.idle = idle

    def _figures(self) -> dict[str, float | None]:
        up, down = self._client.bytes_transferred
        return {**self.score, "bytes_up": up, "bytes_down": down, **self._client.link}

    @property
    def connection(self) -> ConnectionStatus:
        """Where this process stands with the syncer; for any thread."""
        return self._client.connection

    @property
    def complete(self) -> bool:
        """Whether the model is whole: every fragment, and the frozen parameters, came."""
        return all(version is not None for version in self._versions) and not self._frozen_needed

    @property
    def ended(self) -> bool:
        """Whether the job is over: complete, failed, suspended or deleted."""
        return self.phase in ENDED_PHASES

    @property
    def evaluating(self) -> bool:
        """Whether the last merges are done, all of them are here, and the final loss is awaited."""
        return self.phase == "evaluating" and self.complete and self.current

    @property
    def current(self) -> bool:
        """Whether everything that was announced is in the model."""
        return all(
            have is not None and have >= said for have, said in zip(self._versions, self._announced, strict=True)
        )

    def refresh(self) -> None:
        """Ask for the newest version of every fragment; ``refreshing`` until they are in the model."""
        self._wanted = list(self._announced)
        self._client.fetch_announced()

    @property
    def refreshing(self) -> bool:
        """Whether something of the last ``refresh`` is still on its way."""
        return self._wanted is not None and any(
            have is None or have < wanted for have, wanted in zip(self._versions, self._wanted, strict=True)
        )

    def current_versions(self) -> list[int]:
        """The version of each fragment in the model; -1: it did not come yet."""
        return [-1 if version is None else version[1] for version in self._versions]

    @property
    def sum_versions(self) -> int:
        """Merges in the model, over all fragments."""
        return sum(max(0, version) for version in self.current_versions())

    def poll(self) -> bool:
        """Take what is here; whether the model or the phase changed. Raises WorkerError."""
        changed = False
        for item in self._inbox.take_all():
            match item:
                case Downloaded():
                    changed |= self._take(item)
                case Announced():
                    self._announced[item.broadcast.fragment] = (item.broadcast.epoch, item.broadcast.version)
                    self.announced_tokens = max(self.announced_tokens, item.job_tokens)
                case Welcomed():
                    if self.refreshing:  # the connection broke in the middle
                        self._client.fetch_announced()
                    if self._frozen_needed and self._frozen_asked:
                        self._client.fetch_frozen(most_frozen_bytes(self._model))
                case PhaseChanged():
                    changed |= item.phase != self.phase
                    self.phase = item.phase
                    self.message = item.message
                case FrozenDownloaded():
                    if item.data is None:
                        raise ConfigurationError(
                            "the job's version 0 has no frozen parameters and this model has: "
                            "give every process the same model"
                        )
                    load_frozen(self._model, item.data)
                    self._frozen_needed, changed = False, True
                case Failed():
                    raise item.error
                case _:
                    pass  # learners' business
        return changed

    def wait_for_change(self, timeout: float) -> bool:
        """Until the model or the phase changed, at most ``timeout`` seconds; whether it did."""
        end = time.monotonic() + timeout
        while not self.poll():
            left = end - time.monotonic()
            if left <= 0 or not self._inbox.wait(left):
                return self.poll()
        return True

    def report(
        self, loss: float, tokens: int | None = None, final: bool = False, sum_versions: int | None = None
    ) -> None:
        """Tell the syncer the mean loss (nats per token) of the model as it is. ``tokens``: the
        job's, default those of the newest merge taken. ``sum_versions`` 0: of version 0."""
        evaluation = sync_pb2.Evaluation(
            tokens=self.job_tokens if tokens is None else tokens,
            loss=loss,
            sum_versions=self.sum_versions if sum_versions is None else sum_versions,
            final=final,
        )
        self.score = {"tokens": evaluation.tokens, "loss": evaluation.loss}
        initial = evaluation.sum_versions == 0
        key = "final" if final else "initial" if initial else "evaluation"
        # The initial one is made once, so it is said in every session; of the others the next one serves.
        self._client.send(key, sync_pb2.LearnerMessage(evaluation=evaluation), lasting=initial)

    def _take(self, arrived: Downloaded) -> bool:
        news = arrived.broadcast
        have = self._versions[news.fragment]
        if have is not None and (news.epoch, news.version) <= have:
            return False
        self._fragments.move(news.fragment, Kind.OVERWRITE, arrived.vector)
        self._versions[news.fragment] = (news.epoch, news.version)
        self.job_tokens = max(self.job_tokens, arrived.job_tokens)
        if self._frozen_needed and not self._frozen_asked:
            self._frozen_asked = True
            self._client.fetch_frozen(most_frozen_bytes(self._model))
        return True
