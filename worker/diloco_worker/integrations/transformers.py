"""``transformers.Trainer`` as a learner.

    trainer = Trainer(model=model, args=args, train_dataset=rows, data_collator=collate)
    with as_learner(trainer) as learner:
        trainer.train()
    raise SystemExit(learner.exit_code)

The Trainer's loop trains; its data come from the syncer's leases, its schedule runs on the job's progress, and it ends
when the job does. Its logging is left as it is. Each learner would save its own copy of the model, so the arguments
should say ``save_strategy="no"``: ``diloco export`` gives the merged model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import transformers
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from diloco_worker.integrations.framework_loop import (
    NO_LIMIT,
    SCHEDULE_STEPS,
    Count,
    FrameworkLoop,
    count_tokens,
    follow_progress,
)
from diloco_worker.learner import Learner
from diloco_worker.settings import ConfigurationError

log = logging.getLogger(__name__)


class BoundaryCallback(TrainerCallback):
    """Marks the step boundaries. ``as_learner`` adds it."""

    def __init__(self, loop: FrameworkLoop) -> None:
        self._loop = loop

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        """The optimizer has stepped, and its gradients are cleared."""
        self._loop.end_step(lr=named["lr_scheduler"].get_last_lr()[0])


class _TrainLoader:
    """What the Trainer iterates over: one endless epoch, at whose end the training stops."""

    def __init__(self, batches: Iterator[Any], control: TrainerControl) -> None:
        self._batches, self._control = batches, control

    def __iter__(self) -> Iterator[Any]:
        yield from self._batches
        self._control.should_training_stop = True


@contextmanager
def as_learner(trainer: Trainer, *, own_data: bool = False, tokens: Count = count_tokens) -> Iterator[Learner]:
    """Make the Trainer's model and optimizer those of a learner while the block lasts; call ``trainer.train()`` in it.

    ``own_data``: train on the Trainer's own loader, of which each learner must have another part, instead of on leases
    of its map-style ``train_dataset``. ``tokens``: counts those of a batch. A step has the Trainer's batch,
    ``per_device_train_batch_size`` times ``gradient_accumulation_steps``. Raises ConfigurationError.
    """
    args = trainer.args
    if args.world_size > 1 or args.n_gpu > 1:
        raise ConfigurationError(f"the Trainer has {max(args.world_size, args.n_gpu)} devices: a learner has one")
    if str(args.save_strategy) != str(transformers.trainer_utils.SaveStrategy.NO):
        log.warning('each learner saves a copy of its own: give save_strategy="no"; diloco export has the merged model')
    loader = trainer.get_train_dataloader()
    if not own_data and isinstance(loader.dataset, IterableDataset):
        raise ConfigurationError(
            "train_dataset is a stream, and leases need a map-style data set: give as_learner(trainer, own_data=True)"
        )
    optimizer = trainer.create_optimizer()
    learner = Learner.from_environment(cast(torch.nn.Module, trainer.model), optimizer)
    loop = FrameworkLoop(learner, tokens)
    if trainer.lr_scheduler is None:
        trainer.lr_scheduler = _schedule(args, optimizer, learner)
    if args.max_steps <= 0:
        args.max_steps = NO_LIMIT
    accumulation = args.gradient_accumulation_steps
    if own_data:
        batches = loop.own_batches(loader, accumulation)
    else:
        size, collate = args.per_device_train_batch_size, loader.collate_fn
        batches = loop.batches(loader.dataset, size, accumulation=accumulation, collate=collate)
    train_step, callback = trainer.training_step, BoundaryCallback(loop)

    def training_step(*given: Any, **named: Any) -> torch.Tensor:
        loss = train_step(*given, **named)
        loop.add_loss(loss)
        return loss

    changed = {"get_train_dataloader": lambda: _TrainLoader(batches, trainer.control), "training_step": training_step}
    vars(trainer).update(changed)
    trainer.add_callback(callback)
    try:
        with learner:
            yield learner
    finally:
        trainer.remove_callback(callback)
        for name in changed:
            vars(trainer).pop(name, None)


def _schedule(args: TrainingArguments, optimizer: torch.optim.Optimizer, learner: Learner) -> Any:
    """The schedule that the arguments name, on the job's progress."""
    warmup = args.get_warmup_steps(SCHEDULE_STEPS)
    schedule = transformers.get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=SCHEDULE_STEPS,
        scheduler_specific_kwargs=cast("dict[str, Any] | None", args.lr_scheduler_kwargs),
    )
    given_in_steps = args.warmup_steps >= 1
    follow_progress(schedule, learner, SCHEDULE_STEPS, warmup if given_in_steps else 0)
    return schedule
