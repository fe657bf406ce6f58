"""A rank of a learner that does not lead: what a training loop uses of a ``Learner``, by the leader's commands.

It has no session with the syncer, no port and no file. Between two steps it listens: it carries out the leader's
operations on its part of the model, until the leader lets the loop go on, with what the loop may read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from diloco_protocol.spec.job import DiLoCoJob, SyncerSettings
from diloco_protocol.vocabulary import JobPhase
from diloco_worker import logs
from diloco_worker.core.stall_rule import LifeSigns
from diloco_worker.core.syncer_settings import apply_settings
from diloco_worker.data.prefetch import ShareLoader, check_shares
from diloco_worker.data.shuffle import step_seed
from diloco_worker.following.operations import GroupOperations, build_parts
from diloco_worker.group.fragments import GroupFragments
from diloco_worker.group.ranks import Command, Group
from diloco_worker.settings import WorkerSettings
from diloco_worker.sync.training_loop import JobLoop, LoopChecks

log = logging.getLogger(__name__)

_SLICE = 0.5


class Follower(JobLoop):
    """One follower of a learner; its loop is the leader's. Raises ConfigurationError as ``Learner`` does."""

    def __init__(
        self,
        settings: WorkerSettings,
        model: torch.nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        group: Group,
    ) -> None:
        spec = settings.job.spec
        self.job: DiLoCoJob = settings.job
        logs.set_fields(rank=group.rank)
        super().__init__(settings.job, model, group)
        fragments, inner = build_parts(model, optimizers, self.layout, group)
        assert isinstance(fragments, GroupFragments) and inner.exchange is not None
        self._group = group
        self._operations = GroupOperations(fragments, inner, inner.exchange)
        self._checks = LoopChecks(inner, fragments.watch, spec.sync.every)
        self._loader: ShareLoader | None = None
        self._ended = False
        self._compute_seconds = 0.0
        self._train = 0  # the draw that is trained next
        self.learners, self.slot, self.step, self.tokens = spec.most_slots, -1, 0, 0
        self.progress, self.phase, self.draining, self.exit_code = 0.0, str(JobPhase.WAITING), False, 0
        self._rewarm = 1.0

    # ------------------------------------------------------------------ state, as the leader told it last

    @property
    def seed(self) -> int:
        """As Learner.seed: another one for each share of the learner's batch."""
        return step_seed(self.job.spec.seed, self.slot, self.step, self._group.data[0])

    @property
    def metrics(self) -> dict[str, float]:
        """As Learner.metrics, of this rank; no bytes travel."""
        return self._metrics.describe(self._metrics.read_loss(), self.step, self.tokens, self._compute_seconds)

    def rewarm_scale(self) -> float:
        """As Learner.rewarm_scale."""
        return self._rewarm

    # ------------------------------------------------------------------ the loop

    def batches(
        self, dataset: Any, sequences: int | None = None, collate: Callable[[list[Any]], Any] = default_collate
    ) -> Iterator[Any]:
        """As Learner.batches: this rank's shares of the batches that the leader draws."""
        count = self._count_batch(self.job.spec, dataset, sequences)
        check_shares(count, self._group.data[1])
        loader = self._loader = ShareLoader(dataset, collate, self._group.data)
        try:
            for _ in self.steps():
                self._metrics.begin_wait()
                while (batch := loader.pop(self._train, _SLICE)) is None:
                    if not loader.is_loading:  # a data set that hangs gives no sign of life
                        self._metrics.mark_alive()
                self._compute_from = self._metrics.end_wait()
                yield batch[0]
        finally:
            loader.close()

    def steps(self) -> Iterator[int]:
        """As Learner.steps."""
        self._begin_loop()
        try:
            while True:
                self._metrics.begin_wait()
                stop = self._follow()
                self._compute_from = self._metrics.end_wait()
                if stop:
                    return
                self._metrics.batches += 1
                yield self.step
        finally:
            self._watchdog.stop()

    def after_step(self, tokens: int, loss: torch.Tensor | float | None = None, lr: float | None = None) -> None:
        """As Learner.after_step, with this rank's own tokens and loss. ``lr`` is not written anywhere."""
        tokens = self._checks.check_step(tokens)
        seconds = self._end_compute()
        if loss is not None:
            self._metrics.put_loss(loss)
        self._compute_seconds += seconds
        self._metrics.add_step(seconds)
        with self._guard:
            self._group.join_step(tokens, self._metrics.arrived_loss, self._signalled)
            self._follow()
        self._compute_from = self._metrics.end_wait()

    def _follow(self) -> bool:
        """Carry out what the leader tells, until the loop may go on; whether it ends instead."""
        while not self._ended:
            with self._guard:
                told = self._group.hear()
                self._metrics.mark_alive()
                if told.command is Command.END:
                    self._ended = True
                    self.exit_code = int(told.words["exit_code"])
                elif told.command is Command.HOLD:
                    self._group.agree(self._signalled)
                elif told.command is Command.RETURN:
                    return self._read_return(told.words, told.items.tolist())
                else:
                    self._operations.carry_out(told)
        return True

    def _read_return(self, words: Any, items: list[int]) -> bool:
        self.step, self.progress, self.slot, self.tokens = words["at"]
        self.learners, self.phase, self.draining, self._rewarm = words["job"]
        if "settings" in words:
            spec = apply_settings(SyncerSettings.model_validate(words["settings"]), self.job.spec)
            self.job = self.job.model_copy(update={"spec": spec})
        last, each, self._train = words["draws"]
        if self._loader is not None and each:
            count = len(items) // each
            for turn in range(count):
                self._loader.add_draw(last - count + 1 + turn, items[turn * each : (turn + 1) * each])
        return bool(words["stop"])

    def _life_signs(self) -> LifeSigns:
        metrics = self._metrics
        trains = self.slot >= 0 and self.phase in (JobPhase.TRAINING, JobPhase.HOLDING)
        return LifeSigns(trains, metrics.signs_of_life, metrics.steps, metrics.step_seconds)

    # ------------------------------------------------------------------ end

    def leave(self) -> None:
        """As Learner.leave: give what the leader offers, until it lets go."""
        while not self._follow():
            pass
