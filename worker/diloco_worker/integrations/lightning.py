"""Lightning's Trainer as a learner.

    learner = LearnerCallback(rows, sequences=8)
    trainer = lightning.Trainer(callbacks=[learner], max_epochs=-1, enable_checkpointing=False)
    trainer.fit(module, learner.batches)
    raise SystemExit(learner.exit_code)

Lightning's loop trains, with the optimizers that the module configures; the data come from the syncer's leases, and it
ends when the job does. Each learner would save its own copy of the model, so checkpointing is off: ``diloco export``
gives the merged model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import default_collate

from diloco_worker.integrations.framework_loop import NO_LIMIT, Count, FrameworkLoop, count_tokens, follow_progress
from diloco_worker.learner import Learner
from diloco_worker.settings import ConfigurationError


class LearnerCallback(pl.Callback):
    """The learner of one ``fit``.

    ``data``: a map-style data set, the same in every learner, of which the syncer leases ``sequences`` items for each
    batch, made by ``collate``; or, with ``own_data``, an iterable of batches, of which each learner must have another
    part. ``tokens``: counts those of a batch. ``schedule_steps``: for how many steps the module's LambdaLR schedules
    were made: they run on the job's progress then, whose warm-up, if any, is in the same measure.
    """

    def __init__(
        self,
        data: Any,
        sequences: int = 1,
        *,
        own_data: bool = False,
        collate: Callable[[list[Any]], Any] = default_collate,
        tokens: Count = count_tokens,
        schedule_steps: int | None = None,
    ) -> None:
        super().__init__()
        self._data, self._sequences, self._own_data, self._collate = data, sequences, own_data, collate
        self._tokens, self._schedule_steps = tokens, schedule_steps
        self._learner: Learner | None = None
        self._loop: FrameworkLoop | None = None
        self._stepped = 0
        self.batches = _Batches(self)  # what ``fit`` trains on

    @property
    def learner(self) -> Learner:
        """The learner, from ``on_train_start`` on. Raises ConfigurationError before."""
        if self._learner is None:
            raise ConfigurationError("the learner is made when training starts: give this callback to the Trainer")
        return self._learner

    @property
    def exit_code(self) -> int:
        """What the process should end with."""
        return self.learner.exit_code

    def make_batches(self, trainer: pl.Trainer) -> Iterator[Any]:
        """Yield micro-batches until the job ends."""
        assert self._loop is not None
        accumulation = trainer.accumulate_grad_batches
        if self._own_data:
            return self._loop.own_batches(self._data, accumulation)
        return self._loop.batches(self._data, self._sequences, accumulation=accumulation, collate=self._collate)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the learner: the model is where it is trained, and its optimizers are there. Raises
        ConfigurationError."""
        if trainer.world_size > 1:
            raise ConfigurationError(f"the Trainer has {trainer.world_size} devices: a learner has one (devices=1)")
        if not pl_module.automatic_optimization:
            raise ConfigurationError("manual optimization: call learner.after_step in a loop of your own instead")
        self._learner = Learner.from_environment(pl_module, trainer.optimizers)
        self._loop = FrameworkLoop(self._learner, self._tokens)
        if self._schedule_steps is not None:
            for config in trainer.lr_scheduler_configs:
                follow_progress(config.scheduler, self._learner, self._schedule_steps)
        self._stepped = trainer.global_step
        self.batches.trainer = trainer
        self._learner.__enter__()  # after Lightning's own handlers of signals: a drain comes before their exceptions

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Mark the boundary, where the optimizer has stepped."""
        assert self._loop is not None
        if isinstance(outputs, dict) and "loss" in outputs:
            self._loop.add_loss(outputs["loss"])
        if trainer.global_step != self._stepped:
            self._stepped = trainer.global_step
            self._loop.end_step(lr=trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Drain, and leave the slot."""
        self.learner.__exit__(None, None, None)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave without a drain."""
        if self._learner is not None:
            self._learner.__exit__(type(exception), exception, exception.__traceback__)


class _Batches:
    """What Lightning iterates over. It has a length because Lightning reads ahead of iterables without one."""

    def __init__(self, callback: LearnerCallback) -> None:
        self._callback = callback
        self.trainer: pl.Trainer | None = None

    def __len__(self) -> int:
        return NO_LIMIT

    def __iter__(self) -> Iterator[Any]:
        """Begin with the first batch that is asked for, when the learner is there."""
        if self.trainer is None:
            raise ConfigurationError("give the callback to the Trainer: Trainer(callbacks=[learner])")
        yield from self._callback.make_batches(self.trainer)
        self.trainer.should_stop = True
