"""The learner as a library: what a PyTorch training loop of your own imports.

    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    with Learner.from_environment(model, optimizer) as learner:
        for batch in learner.batches(dataset):       # ends when the job does, or on SIGTERM
            loss = model(batch)                      # batch: what the default collate stacks
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.after_step(tokens=batch.numel(), loss=loss)
    sys.exit(learner.exit_code)

The loop trains by itself. Everything else happens in a background thread (``net.client``) and, for as long as
copying a fragment takes, at the step boundaries that ``after_step`` marks (``sync.synchronizer``). The time that
the training thread spends inside this library, waiting included, is ``metrics["stalled_seconds"]``; the rest,
from a batch being handed out to ``after_step``, is ``compute_seconds``.

Under torchrun the processes that it starts are one learner (*ranks*), of a model that is sharded (``fully_shard``),
replicated (DistributedDataParallel) or both. Rank 0 leads, with all that is said here; in the others
``Learner.from_environment`` gives a ``Follower``, which the same loop uses in the same way.

Errors are ``settings.WorkerError`` and its subclasses; each has the ``exit_code`` that the process should end with.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, Self, cast

import torch
from torch.utils.data import default_collate

from diloco_protocol.spec.job import DiLoCoJob, SyncerSettings
from diloco_protocol.vocabulary import (
    ENDED_PHASES,
    ENDS_FOR_RESUME,
    FINISHING_PHASES,
    STOPPED_PHASES,
    TRAINING_PHASES,
    JobPhase,
)
from diloco_protocol.wire import sync_pb2
from diloco_protocol.wire.records import LeaseCursor, RanksReport, StepReport
from diloco_worker import exit_hooks, logs
from diloco_worker.core.stall_rule import FIRST_STEP, LifeSigns
from diloco_worker.data.map_style import sample_items
from diloco_worker.data.prefetch import Batch, BatchPrefetcher
from diloco_worker.data.shuffle import step_seed
from diloco_worker.following.follower import Follower
from diloco_worker.following.operations import build_parts
from diloco_worker.group.ranks import Command, Group, Ranks, join_ranks
from diloco_worker.metrics_file import MetricsFile
from diloco_worker.net.client import SyncerClient
from diloco_worker.net.inbox import Inbox
from diloco_worker.settings import ConfigurationError, WorkerSettings, variables_of_a_job
from diloco_worker.standalone.learner import StandaloneLearner
from diloco_worker.standalone.rehearsal import VARIABLE as REHEARSAL
from diloco_worker.standalone.rehearsal import RehearsalLearner
from diloco_worker.status_page import open_port
from diloco_worker.sync import optimizer_state
from diloco_worker.sync.drain import offer_everything
from diloco_worker.sync.inner_optimizers import refuse_arguments
from diloco_worker.sync.slot_checkpoint import SlotCheckpoint
from diloco_worker.sync.step_metrics import StepMetrics
from diloco_worker.sync.synchronizer import Synchronizer
from diloco_worker.sync.training_loop import JobLoop, LoopChecks

log = logging.getLogger(__name__)

_RESOLVE_SECONDS = 60.0  # deterministic mode: for the merges that are on their way at the stop
_GOODBYE_SECONDS = 10.0
_FAREWELL_SECONDS = 2.0  # of the drain's time, to say goodbye
_IDLE_SLICE = 0.2
_STALL_SLACK = 60.0  # by which a rank's own watchdog is earlier than the others' patience


class Learner(JobLoop):
    """One learner process. Use it as a context manager, from the thread that trains.

    Leaving the block normally drains: the work that is not merged yet is offered to the syncer, which acknowledges
    it once it is durable. Leaving it by an exception does not; the syncer notices that the process has ended. Nor does
    it after an exception inside the library, such as one for want of memory, even if the loop has handled it.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        model: torch.nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        ranks: Ranks | None = None,
    ) -> None:
        spec = settings.job.spec
        self._job = settings.job
        self._settings = settings
        super().__init__(settings.job, model, Ranks() if ranks is None else ranks)
        if self.layout.note:
            log.warning("%s", self.layout.note)
        self._prefetcher: BatchPrefetcher | None = None
        self._terminated = False  # some rank was told to end, and all of them know
        self._terminated_at = 0.0
        self._left = False
        self._used: list[LeaseCursor] = []  # of batches handed out since the last step
        self._used_tenure = 0
        self._record = MetricsFile(settings.metrics_path())
        self._checkpoint = SlotCheckpoint(
            settings.state_path(),
            self._job.metadata.name,
            self.layout.digest,
            spec.syncer.checkpoint.every_seconds,
            limit=optimizer_state.max_state_bytes(model),
        )
        self._inbox = Inbox()
        fragments, inner = build_parts(model, optimizers, self.layout, self._ranks)
        self._own_loss = StepMetrics()  # of this rank
        self._told_settings: Any = None
        self._checks = LoopChecks(inner, fragments.watch, spec.sync.every)
        self._client = SyncerClient(
            settings, self.layout, self._inbox, fragments.pinned, begin_thread=fragments.set_device
        )
        self._client.complete_reports(self._complete_report)
        self._synchronizer = Synchronizer(
            spec,
            model,
            inner,
            self.layout,
            client=self._client,
            inbox=self._inbox,
            fragments=fragments,
            checkpoint=self._checkpoint,
            metrics=self._metrics,
            stopping=lambda: self._terminated,
            hold=self._hold,
        )
        self._guard = self._synchronizer.guard
        self._port = open_port(settings)
        self._port.attach(lambda: self._client.connection, self._figures, self._watchdog.problem)

    @classmethod
    def from_environment(
        cls,
        model: torch.nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        data_rank: tuple[int, int] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Self:
        """Build from the environment variables ``DILOCO_*`` (docs/contracts.md); opens no connection yet.

        ``model``: its trainable parameters are floating point, of any shape, contiguous, on the one device where
        they will be trained, and keep their memory (no ``.to`` afterwards). ``optimizers``: the inner optimizer, or
        several, each for parameters of its own; their state is handed over between learners where it is tensors and
        numbers. One that keeps a copy of the parameters (schedule-free, float32 masters) is refused.

        The processes of torch's default process group are one learner: the program calls ``init_process_group`` and
        shards its model first. ``data_rank``: which share of each batch this rank loads, as (index, how many shares);
        default: each rank one of its own. Ranks that are tensor-parallel to each other give the same.

        Where no such variable names a job or a syncer, as with plain ``python train.py``, it warns and gives a
        ``StandaloneLearner``: the same loop in this process alone.

        Raises ConfigurationError. If the program does not handle it, it ends with the error's exit code.
        """
        exit_hooks.install()
        variables = os.environ if environ is None else environ
        if REHEARSAL in variables:
            return cast(Self, RehearsalLearner(model, optimizers, variables))
        refuse_arguments(model, optimizers)
        # What is no subclass would have to build what a session needs; tests hold their public names together.
        if not variables_of_a_job(variables):
            ranks = join_ranks(variables, data_rank)
            return cast(Self, StandaloneLearner.from_environment(model, optimizers, variables, ranks))
        settings = WorkerSettings.from_environment(environ)
        if settings.role != "learner":
            raise ConfigurationError(f"DILOCO_ROLE is {settings.role!r}: a training loop needs the role learner")
        stall = settings.job.spec.learners.stall_seconds
        ranks = join_ranks(variables, data_rank, None if stall is None else FIRST_STEP * stall + _STALL_SLACK)
        if isinstance(ranks, Group) and not ranks.leads:
            return cast(Self, Follower(settings, model, optimizers, ranks))
        return cls(settings, model, optimizers, ranks)

    # ------------------------------------------------------------------ state

    @property
    def job(self) -> DiLoCoJob:
        """The job. For ``sync`` and ``training.stop`` the syncer's settings take precedence over the job file's; when
        they change this is another object."""
        if self._synchronizer.spec is not self._job.spec:
            self._job = self._job.model_copy(update={"spec": self._synchronizer.spec})
        return self._job

    @property
    def learners(self) -> int:
        """M: slots of the job, as the syncer has it."""
        return self._synchronizer.learners

    @property
    def slot(self) -> int:
        """The number of the slot that this process holds; -1: none (yet)."""
        return self._synchronizer.slot

    @property
    def step(self) -> int:
        """The slot's step: how many inner steps were made in it, by all processes that held it. Warm-ups run on it."""
        return self._synchronizer.adoption.now.step

    @property
    def progress(self) -> float:
        """How near the whole job is to its stop (training.stop), 0 to 1, as of the newest version heard of. Schedules
        run on it: the slot's own count says nothing of when the job ends. Falls only if the stop is moved away."""
        return self._synchronizer.progress

    @property
    def seed(self) -> int:
        """A seed for the next step's randomness (dropout), below 2^63: another one for each slot and step of the job,
        the same in a process that takes the slot over."""
        return step_seed(self._job.spec.seed, self.slot, self.step)

    @property
    def tokens(self) -> int:
        """Tokens trained in the slot, by all processes that held it."""
        return self._synchronizer.tokens

    @property
    def phase(self) -> str:
        """waiting, training, holding, draining, evaluating, complete, failed, suspended or deleted."""
        return self._synchronizer.phase

    @property
    def draining(self) -> bool:
        """Whether no further step is to be made."""
        return self._synchronizer.must_stop

    @property
    def exit_code(self) -> int:
        """What the process should end with: 1 if the job failed, or this learner was interrupted inside the library,
        otherwise 0. In a cluster a failed job leaves it at 0: there the operator tells how the job ended, and the
        process ends when it is removed."""
        if self._synchronizer.guard.unfit:
            return 1
        return 1 if self.phase == JobPhase.FAILED and not self._settings.idle_at_end else 0

    @property
    def metrics(self) -> dict[str, float]:
        """Of this process: step, tokens, loss (nats per token), step_seconds (median of the last 15),
        compute_seconds, stalled_seconds, bytes_up, bytes_down."""
        return self._numbers(self._metrics.read_loss())

    def rewarm_scale(self) -> float:
        """Factor in (0, 1] for the next step's learning rate: it rises to 1 again after the inner optimizer had to
        start fresh in the middle of a job."""
        return self._synchronizer.rewarm.scale(self.step)

    # ------------------------------------------------------------------ the loop

    def batches(
        self, dataset: Any, sequences: int | None = None, collate: Callable[[list[Any]], Any] = default_collate
    ) -> Iterator[Any]:
        """Yield one batch per optimizer step, of the sequences that the syncer leases to this slot.

        ``dataset``: map-style (``__len__``, ``__getitem__``), the same in every learner. ``sequences`` of it make a
        batch (default: sequences x accumulation of the region's batch; a loop that accumulates splits the batch).
        Learners that read other items are refused: the first, the middle and the last are compared, unless they differ
        from one reading to the next, or the data set has an attribute ``compared_items`` of 0.
        ``collate`` gets the list of their items; the default, torch's, stacks tensors, or dicts of tensors, along a
        new first dimension. Batches are on the CPU.

        The first batch comes when this process has connected and taken version 0, and training has started. The
        iterator ends when the job does, on SIGTERM, or when the slot's work is done. Raises WorkerError, and what
        the data set raises.
        """
        spec = self.job.spec
        count = self._count_batch(spec, dataset, sequences)
        self._begin_loop()
        # At most half of this slot's share of an epoch, so that leasing ahead starves nobody.
        reserve = min(spec.max_steps_alone * count, len(dataset) // (2 * spec.most_slots))
        prefetcher = BatchPrefetcher(
            dataset,
            count,
            spec.seed,
            self._client.request_leases,
            notify=self._inbox.notify,
            collate=collate,
            reserve=reserve,
            data=self._ranks.data,
        )
        self._prefetcher = prefetcher
        self._synchronizer.prefetcher = prefetcher
        self._client.start(len(dataset), sample_items(dataset))
        try:
            yield from self._yield_batches(lambda: self._next_batch(prefetcher))
        finally:
            prefetcher.close()

    def steps(self) -> Iterator[int]:
        """Yield the slot's step before each step, for a loop that brings its own data (nothing is leased).

        Ends as ``batches`` does. Raises WorkerError.
        """
        self._begin_loop()
        self._client.start()
        yield from self._yield_batches(self._next_step)

    def _yield_batches(self, wait_for_next: Callable[[], Batch | None]) -> Iterator[Any]:
        """Yield what the loop is given for each step, until there is nothing more."""
        try:
            while True:
                self._metrics.begin_wait()
                batch = wait_for_next()
                self._tell_return(stop=batch is None, draw=batch.draw if batch is not None else 0)
                left = self._metrics.end_wait()
                if batch is None:
                    return
                self._used.extend(batch.cursors)
                self._used_tenure = self._synchronizer.tenure
                self._compute_from = left
                self._metrics.batches += 1
                yield batch.data
        finally:
            self._watchdog.stop()

    def after_step(self, tokens: int, loss: torch.Tensor | float | None = None, lr: float | None = None) -> None:
        """Mark a step boundary; call it once after each optimizer step.

        ``tokens``: how many were trained in this step. ``loss``: mean nats per token, a number or a scalar tensor; one
        on a GPU is read when the device has it, without waiting. ``lr`` only goes into the metrics file.

        Parameters may change here, and nowhere else. Raises WorkerError if the learner cannot go on, or ``tokens`` is
        no count.
        """
        tokens = self._checks.check_step(tokens)
        compute, synchronizer = self._end_compute(), self._synchronizer
        if self._ranks.size > 1:
            tokens, loss = self._join_step(tokens, loss)
        if loss is not None:
            self._metrics.put_loss(loss)
        if synchronizer.tenure == self._used_tenure and synchronizer.seated:
            with synchronizer.guard:
                self._metrics.add_step(compute)
                if self._prefetcher is not None:
                    self._prefetcher.commit(self._used)
                synchronizer.complete_step(tokens, compute)
        else:
            synchronizer.run_boundary()  # the slot was lost during the step, and its work with it
        self._used.clear()
        if not synchronizer.ready:
            synchronizer.await_ready()
        self._write_record(lr)
        self._tell_return()
        self._compute_from = self._metrics.end_wait()

    # ------------------------------------------------------------------ the other ranks

    def _join_step(self, tokens: int, loss: torch.Tensor | float | None) -> tuple[int, float | None]:
        """The tokens and the loss of all ranks. Of losses on a GPU they are those that have arrived, of the step before
        mostly: nothing waits for the device."""
        if loss is not None:
            self._own_loss.put_loss(loss)
        with self._synchronizer.guard:
            joined = self._ranks.join_step(tokens, self._own_loss.arrived_loss, self._signalled)
        self._end_if(joined.told)
        return joined.tokens, joined.loss

    def _hold(self) -> None:
        """In a wait: have the others wait too."""
        self._end_if(self._ranks.hold_others(self._signalled))

    def _tell_return(self, stop: bool = False, draw: int = 0) -> None:
        """Let the others' loops go on, with what they may read. ``draw``: the number of the batch that comes next."""
        if self._ranks.size == 1:
            return
        synchronizer, prefetcher = self._synchronizer, self._prefetcher
        last, draws = prefetcher.take_draws() if prefetcher is not None else (0, [])
        settings = SyncerSettings.of(synchronizer.spec).model_dump(mode="json")
        told = {} if settings == self._told_settings else {"settings": settings}
        self._told_settings = settings
        self._ranks.tell_others(
            Command.RETURN,
            [item for sequences in draws for item in sequences],
            at=(self.step, self.progress, self.slot, self.tokens),
            job=(self.learners, self.phase, self.draining, self.rewarm_scale()),
            draws=(last, len(draws[0]) if draws else 0, draw),
            stop=stop,
            **told,
        )

    # ------------------------------------------------------------------ the next batch

    def _next_step(self) -> Batch | None:
        """Of a loop that brings its own data: the step's number."""
        self._synchronizer.await_ready()
        return None if self._synchronizer.must_stop else Batch(self.step, ())

    def _next_batch(self, prefetcher: BatchPrefetcher) -> Batch | None:
        synchronizer = self._synchronizer
        while True:
            synchronizer.await_ready()
            if synchronizer.must_stop:
                return None
            tenure = synchronizer.tenure
            batch = prefetcher.pop_batch()
            if batch is not None and synchronizer.tenure == tenure:
                return batch
            if batch is None:
                synchronizer.wait(0.1)
                if not prefetcher.is_loading:  # a data set that hangs gives no sign of life
                    self._metrics.mark_alive()

    def _complete_report(self, report: StepReport) -> StepReport:
        """With what a heartbeat says too, from the client's thread: a loop that never ends a step makes no report."""
        slowest = self._ranks.slowest
        ranks = None if self._ranks.size == 1 else RanksReport(self._ranks.size, *(slowest or (0, 0.0)))
        return replace(report, batches=self._metrics.batches, ranks=ranks)

    def _life_signs(self) -> LifeSigns:
        synchronizer, metrics = self._synchronizer, self._metrics
        trains = synchronizer.seated and synchronizer.phase in (JobPhase.TRAINING, JobPhase.HOLDING)
        return LifeSigns(trains, metrics.signs_of_life, metrics.steps, metrics.step_seconds)

    # ------------------------------------------------------------------ figures

    def _figures(self) -> dict[str, float | None]:
        """For the status port, from its thread: nothing here waits, or asks a device."""
        if not self._started:
            return {}
        slowest = dict(zip(("slowest_rank", "slowest_rank_seconds"), self._ranks.slowest or (), strict=False))
        return {**self._numbers(self._metrics.known_loss), **self._client.link, "ranks": self._ranks.size, **slowest}

    def _numbers(self, loss: float) -> dict[str, float]:
        seconds, carried = self._synchronizer.adoption.now.seconds, self._client.bytes_transferred
        return self._metrics.describe(loss, self.step, self.tokens, seconds, carried)

    # ------------------------------------------------------------------ end

    def _end_well(self) -> None:
        self.leave()
        self._idle()
        self._ranks.tell_others(Command.END, exit_code=self.exit_code)

    def _close(self) -> None:
        self._client.stop()
        self._port.close()
        self._record.flush()
        self._checkpoint.close()
        super()._close()

    def _terminate(self, signum: int, frame: FrameType | None) -> None:
        if not self._signalled:
            self._signalled = True
            self._terminated_at = time.monotonic()
            self._terminated = self._ranks.size == 1  # else: once all ranks know, at the same step

    def _end_if(self, told: bool) -> None:
        """All ranks know whether some rank was told to end."""
        if told and not self._terminated:
            self._terminated = True
            self._terminated_at = self._terminated_at if self._signalled else time.monotonic()

    def _leave_by(self) -> float:
        """When the drain must be over, monotonic seconds."""
        if not self._terminated or self._settings.drain_seconds is None:
            return math.inf
        return self._terminated_at + self._settings.drain_seconds

    def leave(self) -> None:
        """Drain: offer everything, wait for the acknowledgements, give up the slot. Further calls do nothing.

        It takes a bounded time, after SIGTERM at most DILOCO_DRAIN_SECONDS. Raises WorkerError, and offers nothing, if
        an earlier call of this library was interrupted."""
        synchronizer, client = self._synchronizer, self._client
        if self._left:
            return
        self._left = True
        synchronizer.guard.check_fit()  # else: what it offers may be merged already
        if not synchronizer.seated or synchronizer.phase in ENDED_PHASES:
            return
        if synchronizer.phase not in FINISHING_PHASES:
            message = sync_pb2.LearnerMessage(drain_request=sync_pb2.DrainRequest())
            client.send("drain", message, lasting=True)
        if synchronizer.adoption.complete:
            if synchronizer.reached_own_stop:
                synchronizer.adopt_outstanding(_RESOLVE_SECONDS)
            offer_everything(synchronizer, lambda: self._leave_by() - _FAREWELL_SECONDS)
        if synchronizer.phase in ENDED_PHASES or not synchronizer.seated:
            return
        synchronizer.send_report()
        # A syncer that was away for all of the drain is not waited for again.
        goodbye = _GOODBYE_SECONDS if client.connected else _FAREWELL_SECONDS
        if not client.leave(min(goodbye, max(_FAREWELL_SECONDS, self._leave_by() - time.monotonic()))):
            log.warning("the syncer could not be told that this process leaves; it will notice by itself")
        else:
            log.info("drained: slot %d is free", synchronizer.slot)

    def _idle(self) -> None:
        """In a cluster: show the job's end on the status port until this process is removed.

        A learner's pod would be started again if its process ended by itself. But a job that goes on after its end
        (resumed, or its stop moved) needs a process that trains: then this one ends, and a new one takes its place."""
        if not self._settings.idle_at_end or self._terminated or not self._started:
            return
        self._client.stop()
        before = self._client.connection
        status = replace(before, slot=-1, standby=False)
        self._client = SyncerClient(self._settings, self.layout, Inbox(), idle=True, status=status)
        self._client.start()
        self._port.set_idle(True)
        logs.set_fields(slot=-1)
        log.info("the job is %s: idle until removed", before.phase)
        ended = before.phase in STOPPED_PHASES
        while not self._terminated:
            self._hold()
            phase = self._client.connection.phase
            ended |= phase in ENDED_PHASES
            if ended and phase in TRAINING_PHASES:
                log.info(ENDS_FOR_RESUME)
                exit_hooks.write_termination_message(ENDS_FOR_RESUME)
                return
            time.sleep(_IDLE_SLICE)

    # ------------------------------------------------------------------ metrics file

    def _write_record(self, lr: float | None) -> None:
        """One line per step."""
        synchronizer, loss = self._synchronizer, self._metrics.read_loss()
        row = {
            "time": round(time.time(), 3),
            "slot": synchronizer.slot,
            "step": synchronizer.adoption.now.step,
            "tokens": synchronizer.tokens,
            "loss": loss if math.isfinite(loss) else None,
            "lr": lr,
            "step_seconds": self._metrics.last_step_seconds,
            "compute_seconds": synchronizer.adoption.now.seconds,
            "stalled_seconds": self._metrics.stalled_seconds,
        }
        self._record.add(row)
