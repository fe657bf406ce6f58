"""The evaluator's side: a full model that follows the job's broadcasts, without a slot.

    with Observer.from_environment(model) as observer:
        while not observer.ended:
            observer.wait_for_change(timeout=1.0)
            if observer.complete and not observer.current:
                observer.refresh()
            elif observer.complete:
                observer.report(loss(model), final=observer.evaluating)

An observer hears of every merge and downloads none by itself, except the first model. Newer versions come when
``refresh`` asks for them: between two scores a fragment is merged many times, and a model that is not scored is
not worth its bytes.
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
from diloco_protocol.wire import convert, sync_pb2
from diloco_protocol.wire.records import Announcement, Evaluation
from diloco_worker.core.adoption import Kind
from diloco_worker.core.connection_status import ConnectionStatus
from diloco_worker.fragments import ModelFragments, build_layout
from diloco_worker.net.client import SyncerClient
from diloco_worker.net.inbox import Downloaded, Failed, FrozenDownloaded, Inbox, PhaseChanged, Welcomed
from diloco_worker.settings import ConfigurationError, WorkerSettings
from diloco_worker.status_page import open_port
from diloco_worker.sync.frozen_parameters import FrozenParameters

log = logging.getLogger(__name__)


class Observer:
    """Follows the job's broadcasts with ``model``, a model of the job's architecture on any one device.

    Use it from one thread, as a context manager. The model's parameters change only inside ``wait_for_change`` and
    ``poll``. ``phase`` and ``message`` are the job's; ``job_tokens`` were trained in the whole job at the newest
    merge in the model, ``announced_tokens`` at the newest merge announced. ``progress`` and ``announced_progress``: how
    much of the job's stop was reached then, 0 to 1.
    """

    def __init__(self, settings: WorkerSettings, model: torch.nn.Module) -> None:
        spec = settings.job.spec
        self.job: DiLoCoJob = settings.job
        self.layout = build_layout(model, spec.sync.fragments, spec.sync.every, spec.sync.merge.mean_tensors)
        self._fragments = ModelFragments(model, self.layout, keep_rounding=False)
        self._inbox = Inbox()
        fragments = self._fragments
        self._client = SyncerClient(
            settings, self.layout, self._inbox, fragments.pinned, begin_thread=fragments.set_device, eager=False
        )
        self._port = open_port(settings)
        self._port.attach(lambda: self.connection, self._figures)
        self.score: dict[str, float] = {}  # tokens and loss of the last report, for the status port
        self._versions: list[tuple[int, int] | None] = [None] * len(self.layout)
        self._announced: list[tuple[int, int]] = [(0, 0)] * len(self.layout)
        self._wanted: list[tuple[int, int]] | None = None  # what the last refresh asked for
        self._frozen = FrozenParameters(model, self._client)
        self.phase: str = JobPhase.WAITING
        self.message = ""
        self.job_tokens = 0  # trained in all, at the newest merge taken
        self.announced_tokens = 0  # the same, at the newest merge heard of
        self.progress = 0.0  # of the job's stop, at the newest merge taken
        self.announced_progress = 0.0  # the same, at the newest merge heard of

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
        self._port.close()

    def set_idle(self, idle: bool) -> None:
        """Show on the status port whether the job is over and this process waits to be removed."""
        self._port.set_idle(idle)

    def _figures(self) -> dict[str, float | None]:
        up, down = self._client.bytes_transferred
        return {**self.score, "bytes_up": up, "bytes_down": down, **self._client.link}

    @property
    def connection(self) -> ConnectionStatus:
        """The state of the connection to the syncer; for any thread."""
        return self._client.connection

    @property
    def complete(self) -> bool:
        """Whether the model is whole: every fragment and the frozen parameters have come."""
        return all(version is not None for version in self._versions) and not self._frozen.missing

    @property
    def ended(self) -> bool:
        """Whether the job is over: complete, failed, suspended or deleted."""
        return self.phase in ENDED_PHASES

    @property
    def evaluating(self) -> bool:
        """Whether the last merges are done and in the model, so that the final loss is awaited."""
        return self.phase == JobPhase.EVALUATING and self.complete and self.current

    @property
    def current(self) -> bool:
        """Whether everything that was announced is in the model."""
        return self._has(self._announced)

    def refresh(self) -> None:
        """Ask for the newest version of every fragment; ``refreshing`` until they are in the model."""
        self._wanted = list(self._announced)
        self._client.fetch_announced()

    @property
    def refreshing(self) -> bool:
        """Whether something of the last ``refresh`` is still on its way."""
        return self._wanted is not None and not self._has(self._wanted)

    def _has(self, wanted: list[tuple[int, int]]) -> bool:
        return all(have is not None and have >= want for have, want in zip(self._versions, wanted, strict=True))

    def current_versions(self) -> list[int]:
        """The version of each fragment in the model; -1: it did not come yet."""
        return [-1 if version is None else version[1] for version in self._versions]

    @property
    def sum_versions(self) -> int:
        """Merges in the model, over all fragments."""
        return sum(max(0, version) for version in self.current_versions())

    def poll(self) -> bool:
        """Read the inbox without waiting; whether the model or the phase changed. Raises WorkerError."""
        changed = False
        for message in self._inbox.take_all():
            match message:
                case Downloaded():
                    changed |= self._adopt(message)
                case Announcement():
                    if message.epoch > max(self._announced)[0]:
                        self.announced_tokens = 0  # a syncer whose store lost something knows of fewer
                    self._announced[message.fragment] = (message.epoch, message.version)
                    self.announced_tokens = max(self.announced_tokens, message.job_tokens)
                    self.announced_progress = message.progress
                case Welcomed():
                    if self.refreshing:  # the connection broke in the middle
                        self._client.fetch_announced()
                    self._frozen.repeat_request()
                case PhaseChanged():
                    changed |= message.phase != self.phase
                    self.phase = message.phase
                    self.message = message.message
                case FrozenDownloaded():
                    self._frozen.load(message)
                    changed = True
                case Failed():
                    raise message.error
                case _:
                    pass  # learners' business
        return changed

    def wait_for_change(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds until the model or the phase has changed; whether it has."""
        end = time.monotonic() + timeout
        while not self.poll():
            left = end - time.monotonic()
            if left <= 0 or not self._inbox.wait(left):
                return self.poll()
        return True

    def report(
        self, loss: float, tokens: int | None = None, final: bool = False, sum_versions: int | None = None
    ) -> None:
        """Send the model's mean loss (nats per token) to the syncer.

        ``tokens``: trained in the whole job when the model was merged (default: ``job_tokens``). ``sum_versions``:
        merges in the model (default: its own); 0 says that version 0 was scored. ``final``: no merge follows.
        """
        evaluation = Evaluation(
            tokens=self.job_tokens if tokens is None else tokens,
            loss=loss,
            sum_versions=self.sum_versions if sum_versions is None else sum_versions,
            final=final,
        )
        self.score = {"tokens": evaluation.tokens, "loss": evaluation.loss}
        initial = evaluation.sum_versions == 0
        key = "final" if final else "initial" if initial else "evaluation"
        # The initial score is made once, so it is sent in every session; a later one is followed by others.
        self._client.send(key, sync_pb2.LearnerMessage(evaluation=convert.to_wire(evaluation)), lasting=initial)

    def report_progress(self, share: float) -> None:
        """Tell the syncer that ``share`` (0 to 1) of the final score is made: the job waits while it comes on."""
        progress = sync_pb2.EvaluationProgress(share=min(1.0, max(0.0, share)))
        self._client.send("evaluation-progress", sync_pb2.LearnerMessage(evaluation_progress=progress))

    def _adopt(self, downloaded: Downloaded) -> bool:
        broadcast = downloaded.announcement
        have = self._versions[broadcast.fragment]
        if have is not None and (broadcast.epoch, broadcast.version) <= have:
            return False
        self._fragments.move(broadcast.fragment, Kind.OVERWRITE, downloaded.vector)
        if broadcast.epoch > max(version or (0, 0) for version in self._versions)[0]:
            self.job_tokens, self.progress = 0, 0.0  # and refuses a score of more than it knows of
        self._versions[broadcast.fragment] = (broadcast.epoch, broadcast.version)
        self.job_tokens = max(self.job_tokens, broadcast.job_tokens)
        self.progress = max(self.progress, broadcast.progress)
        self._frozen.request()
        return True
