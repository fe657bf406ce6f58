"""The evaluator: the worker program without a slot, scoring the merged model on held-out data.

The model is scored once at version 0, then whenever the job has trained ``training.evaluation.everyTokens`` more (by
default whenever it is 1/50 nearer to its stop), and at the end, when the last merges are done; the broadcasts that make
it current are downloaded when a score is due. A score that is due while another runs is made from the newest state
afterwards, so a slow evaluator skips points rather than lag. Of the final score, for which the job waits, the syncer is
told how far it is.

A score is the mean cross-entropy in nats per prediction of ``batches`` x ``batch.sequences`` sequences, the same ones
each time, spread evenly over the held-out part. Sums are kept in float64 and weighted by the number of predictions, so
the batch size does not matter.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import torch
from torch import nn
from torch.utils.data import default_collate

from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.vocabulary import TRAINING_PHASES, JobPhase
from diloco_worker import data, device
from diloco_worker.metrics_file import MetricsFile
from diloco_worker.observer import Observer
from diloco_worker.settings import ConfigurationError, WorkerError, WorkerSettings
from diloco_worker.training import models

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
AGAIN_SECONDS = 5.0
SCORES = 50  # in a job, where training.evaluation.everyTokens is null


@dataclass(slots=True)
class EvaluationSchedule:
    """When a score is due: at the first model seen, then every ``every_tokens`` tokens; where that is None, at every
    1/SCORES of the job's progress to its stop (0 to 1)."""

    every_tokens: int | None
    next_turn: int = 0

    def _turn(self, tokens: int, progress: float) -> int:
        return tokens // self.every_tokens if self.every_tokens is not None else int(progress * SCORES)

    def is_due(self, tokens: int, progress: float) -> bool:
        """Whether a model of that many tokens and that progress would be scored."""
        return self._turn(tokens, progress) >= self.next_turn

    def claim(self, tokens: int, progress: float) -> bool:
        """Whether to score such a model now; counts it as scored."""
        if not self.is_due(tokens, progress):
            return False
        self.next_turn = self._turn(tokens, progress) + 1
        return True


def evaluate(settings: WorkerSettings) -> int:
    """Score the job's merged model until the job ends. Returns the process's exit code.

    Raises JobError for what is wrong with the job, WorkerError for the rest.
    """
    spec = settings.job.spec
    if spec.training.evaluation is None:
        raise ConfigurationError("DILOCO_ROLE is evaluator, and the job has training.evaluation: null")
    device.configure(spec)
    where = device.device(spec)
    held_out = data.load(spec, held_out=True)
    model = models.build(spec, spec.seed).to(where)
    models.check_batch(model, held_out[0], spec.training.data.source if spec.training.data else "")
    return _Evaluator(settings, model, chosen(held_out, spec), device.precision(spec, where)).run()


class _Stopped(Exception):
    """The process was told to end in the middle of a score."""


class _Evaluator:
    def __init__(
        self, settings: WorkerSettings, model: nn.Module, batches: list[dict[str, torch.Tensor]], dtype: torch.dtype
    ) -> None:
        assert settings.job.spec.training.evaluation is not None
        self._settings = settings
        self._model = model
        self._batches = batches
        self._dtype = dtype
        self._due = EvaluationSchedule(settings.job.spec.training.evaluation.every_tokens)
        self._metrics = MetricsFile(settings.metrics_path())
        self._terminated = False

    def run(self) -> int:
        previous = signal.signal(signal.SIGTERM, self._terminate)
        try:
            # Every party builds version 0 alike. Scored before broadcasts change it, because when
            # they are first complete a merge may be among them.
            initial = self._loss()
            with Observer(self._settings, self._model) as observer:
                self._follow(observer, initial)
                while self._settings.idle_at_end and self._idled(observer):
                    self._follow(observer, initial)  # the job goes on after its end
                if observer.phase == JobPhase.FAILED and not self._settings.idle_at_end:
                    log.error("the job failed: %s", observer.message)
                    return WorkerError.exit_code
        except _Stopped:
            pass
        finally:
            signal.signal(signal.SIGTERM, previous)
        return 0

    def _idled(self, observer: Observer) -> bool:
        """In a cluster: wait until this process is removed (False), or the job goes on (True)."""
        if not self._terminated:
            log.info("the job is %s: idle until removed", observer.phase)
        observer.set_idle(True)
        while not self._terminated and observer.phase not in TRAINING_PHASES:
            observer.wait_for_change(POLL_SECONDS)
        observer.set_idle(False)
        return not self._terminated

    def _loss(self, told: Callable[[float], None] = lambda share: None) -> float:
        """The model's score as it is. Raises _Stopped when the process is told to end meanwhile."""

        def on_batch(share: float) -> None:
            if self._terminated:
                raise _Stopped
            told(share)

        return mean_loss(self._model, self._batches, self._dtype, on_batch)

    def _terminate(self, signum: int, frame: FrameType | None) -> None:
        self._terminated = True

    def _follow(self, observer: Observer, initial: float) -> None:
        started = False
        final: float | None = None
        scored: list[int] = []  # the versions that the final score was made from
        told = 0.0
        while not observer.ended and not self._terminated:
            observer.wait_for_change(POLL_SECONDS)
            if observer.phase in TRAINING_PHASES or observer.current_versions() != scored:
                final = None  # a new syncer may have a later stop: then there is another model to score at the end
            if not observer.complete:
                continue
            if not started:
                started = True
                if observer.sum_versions > 0:  # a job that has recorded it ignores it
                    self._report(observer, initial, 0, 0, final=False)
            if observer.refreshing:
                continue
            if observer.evaluating:
                if final is None:
                    scored = observer.current_versions()
                    final = self._score(observer, final=True)
                    told = time.monotonic()
                elif time.monotonic() - told > AGAIN_SECONDS:  # a syncer that restarted has not heard it
                    observer.report(final, final=True)
                    told = time.monotonic()
            elif self._due.claim(observer.job_tokens, observer.progress):
                self._score(observer, final=False)
            elif observer.phase == JobPhase.EVALUATING or self._due.is_due(
                observer.announced_tokens, observer.announced_progress
            ):
                observer.refresh()

    def _score(self, observer: Observer, final: bool) -> float:
        """Score the model as it is, and report it."""
        tokens, merges, started = observer.job_tokens, observer.sum_versions, time.monotonic()
        loss = self._loss(observer.report_progress) if final else self._loss()
        self._report(observer, loss, tokens, merges, final=final, seconds=time.monotonic() - started)
        return loss

    def _report(
        self, observer: Observer, loss: float, tokens: int, merges: int, final: bool, seconds: float = 0.0
    ) -> None:
        observer.report(loss, tokens=tokens, final=final, sum_versions=merges)
        log.info("%d tokens, %d merges: loss %.4f nats (%.1f s)", tokens, merges, loss, seconds)
        row = {"tokens": tokens, "loss": loss, "merges": merges, "seconds": seconds, "final": final}
        self._metrics.add({"time": time.time(), **row}, now=True)


def chosen(held_out: data.Dataset, spec: JobSpec) -> list[dict[str, torch.Tensor]]:
    """The batches that every score is made on: training.evaluation.batches of them (fewer if there is not so much),
    their sequences evenly spread over the held-out part."""
    assert spec.training.evaluation is not None
    size = spec.training.batch.sequences
    count = min(len(held_out), spec.training.evaluation.batches * size)
    indices = [i * len(held_out) // count for i in range(count)]
    return [default_collate([held_out[i] for i in indices[start : start + size]]) for start in range(0, count, size)]


def mean_loss(
    model: nn.Module,
    batches: list[dict[str, torch.Tensor]],
    dtype: torch.dtype,
    on_batch: Callable[[float], None] = lambda share: None,
) -> float:
    """Mean cross-entropy of all predictions in the batches, in nats; leaves the model in training mode.

    ``on_batch(share)`` is called before each batch with the share of them (0 to 1) that is done; it may raise."""
    where = next(model.parameters()).device
    total, predictions = 0.0, 0
    model.eval()
    try:
        with torch.no_grad(), device.autocast(where, dtype):
            for index, batch in enumerate(batches):
                on_batch(index / len(batches))
                loss = models.loss(model, device.to_device(batch, where))
                count = models.predictions(batch)
                total += float(loss.nats) * count
                predictions += count
    finally:
        model.train()
    if not predictions:
        raise ConfigurationError("the held-out data have no labels to score: every one is -100")
    return total / predictions
