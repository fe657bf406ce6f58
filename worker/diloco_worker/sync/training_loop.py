"""What every kind of learner does for a training loop, and what a loop may do wrong that would end in another model
than the job's.

A Learner raises what is found. It does so at the first step boundary after the mistake, before any of it is pushed.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.wire.limits import MAX_STEP_TOKENS
from diloco_worker import device, logs
from diloco_worker.core.stall_rule import LifeSigns
from diloco_worker.data.map_style import check_map_style
from diloco_worker.errors import shorten
from diloco_worker.fragments import build_layout, refuse_running_statistics
from diloco_worker.group.ranks import Ranks
from diloco_worker.named_parameters import ModelWatch
from diloco_worker.settings import WorkerError
from diloco_worker.sync.boundary_guard import BoundaryGuard
from diloco_worker.sync.inner_optimizers import InnerOptimizers
from diloco_worker.sync.stall_watchdog import StallWatchdog
from diloco_worker.sync.step_metrics import StepMetrics

log = logging.getLogger(__name__)


class TrainingLoop:
    """The loop of one process, one of the learner's ``ranks``; a context manager from the thread that trains. Raises
    ConfigurationError for a model that cannot be exchanged.

    ``layout``: how the model's parameters are cut into fragments.
    """

    def __init__(self, spec: JobSpec, model: torch.nn.Module, ranks: Ranks) -> None:
        refuse_running_statistics(model)
        self.layout = build_layout(model, spec.sync.fragments, spec.sync.every, spec.sync.merge.mean_tensors)
        self._ranks = ranks
        self._metrics = StepMetrics()
        self._started = False
        self._signalled = False  # this process was told to end
        self._compute_from: float | None = None
        self._previous_handler: Any = None

    def _begin_loop(self) -> None:
        if self._started:
            raise WorkerError("a Learner runs one loop: make a new one for another")
        self._started = True

    def _count_batch(self, spec: JobSpec, dataset: Any, sequences: int | None) -> int:
        """How many sequences a batch has. Raises what is wrong with the data set."""
        check_map_style(dataset)
        batch = spec.training.batch
        return sequences if sequences is not None else batch.sequences * batch.accumulation

    def _end_compute(self) -> float:
        """The loop has made a step: how many seconds it computed. Raises WorkerError if it was given no batch."""
        if self._compute_from is None:
            raise WorkerError(
                "after_step was called before the first batch: iterate over learner.batches(dataset), "
                "or over learner.steps() where the loop brings its own data"
            )
        return self._metrics.begin_wait() - self._compute_from

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGTERM, self._terminate)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._end_well()
            else:
                self._ranks.close()
        finally:
            self._close()

    def _end_well(self) -> None:
        self.leave()

    def _close(self) -> None:
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)

    def _terminate(self, signum: int, frame: FrameType | None) -> None:
        self._signalled = True

    def leave(self) -> None:
        """End the loop's part in its job."""
        raise NotImplementedError


class JobLoop(TrainingLoop):
    """The loop of one process in a job: a watchdog observes it, and its step boundaries happen whole."""

    def __init__(self, job: DiLoCoJob, model: torch.nn.Module, ranks: Ranks) -> None:
        logs.set_fields(job=job.metadata.name)
        if job.spec.sync.deterministic:
            device.be_deterministic()
        super().__init__(job.spec, model, ranks)
        self._guard = BoundaryGuard()
        self._watchdog = StallWatchdog(job.spec.learners.stall_seconds, self._life_signs, ranks)

    def _life_signs(self) -> LifeSigns:
        """For the watchdog, from its thread."""
        raise NotImplementedError

    def _begin_loop(self) -> None:
        super()._begin_loop()
        self._watchdog.start()

    def __enter__(self) -> Self:
        self._guard.hold_interrupts()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watchdog.stop()
        super().__exit__(kind, value, trace)

    def _close(self) -> None:
        self._guard.release_interrupts()
        super()._close()


class LoopChecks:
    """The checks of one loop. ``every``: steps of a turn, sync.every."""

    def __init__(self, inner: InnerOptimizers, watch: ModelWatch, every: int) -> None:
        self.inner = inner
        self._watch = watch
        self._every = every
        self._steps = 0
        self._without_tokens = 0  # steps, in a row
        self._thread = 0
        self._told: set[str] = set()  # names of what has changed

    def check_step(self, tokens: int) -> int:
        """Check what can be seen at a step boundary, and return the step's tokens. Raises WorkerError."""
        for error in self.find_errors(tokens):
            raise error
        for warning in self.find_warnings():
            log.warning("%s", warning)
        return int(tokens)

    def find_errors(self, tokens: int) -> Iterator[WorkerError]:
        """What would have to end the loop, after a step of ``tokens``."""
        self._steps += 1
        model = (self._check_modes, self._watch.check, self.inner.check_parameters)
        for check in (self._check_thread, *model, lambda: self._check_tokens(tokens)):
            try:
                check()
            except WorkerError as error:
                yield error

    def find_warnings(self) -> Iterator[str]:
        """What it should know, once in a turn."""
        if self._steps % self._every:
            return
        new = [name for name in self._watch.changed_state() if name not in self._told]
        self._told.update(new)
        if new:
            yield (
                f"training changes {shorten(new, 3)}, which is no trained parameter: each learner keeps its "
                "own, and no merge or export has it. Keep averages beside the model, not in it; register a buffer that "
                "is only a cache with persistent=False"
            )

    def _check_thread(self) -> None:
        self._thread = self._thread or threading.get_ident()
        if threading.get_ident() != self._thread:
            raise WorkerError("two threads call after_step: one thread trains, and a process has one Learner")

    def _check_modes(self) -> None:
        if self._steps == 1:
            refuse_running_statistics(self.inner.model)  # modules may be in another mode than at the start

    def _check_tokens(self, tokens: int) -> None:
        """The counts of a job only rise, and a push without tokens is not merged."""
        try:
            count = int(tokens)
        except (TypeError, ValueError, OverflowError):
            count = -1
        if not 0 <= count <= MAX_STEP_TOKENS:
            raise WorkerError(
                f"after_step(tokens={tokens!r}): tokens is how many tokens were trained in this step, a whole number "
                f"from 0 to {MAX_STEP_TOKENS:,}"
            )
        self._without_tokens = 0 if count else self._without_tokens + 1
        if self._without_tokens >= self._every:
            raise WorkerError(
                f"after_step(tokens=0) in {self._every} steps running: a push without tokens is not merged, so this "
                "learner's work would be lost. Count the tokens that were trained, padding left out"
            )
