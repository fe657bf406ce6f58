"""A learner within the loop of another library, which asks for micro-batches and tells when a step is over.

The library's loop owns the steps: it may accumulate several micro-batches into one. ``FrameworkLoop.batches`` gives it
micro-batches until the job ends, and ``end_step`` is called when its optimizer has stepped. It must not read ahead of
its steps: what was read counts as trained with the next step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from diloco_worker.learner import Learner
from diloco_worker.settings import ConfigurationError

log = logging.getLogger(__name__)

NO_LIMIT = 1_000_000_000  # steps, where a loop wants a number: the job's end decides
SCHEDULE_STEPS = 10_000  # for how many steps a schedule is made that then follows the job's progress
IGNORED = -100  # what a label is that no loss counts

Count = Callable[[Any], int]


def count_tokens(batch: Any) -> int:
    """How many tokens a micro-batch trains: the labels that count, else the token ids, else the rows."""
    if isinstance(batch, Mapping):
        if (
            isinstance(labels := batch.get("labels"), torch.Tensor)
            and not labels.is_floating_point()
            and labels.ndim > 1
        ):
            return int((labels != IGNORED).sum())
        if isinstance(ids := batch.get("input_ids"), torch.Tensor):
            return ids.numel()
        batch = next((value for value in batch.values() if isinstance(value, torch.Tensor)), None)
    elif isinstance(batch, Sequence) and batch:
        batch = batch[0]
    if not isinstance(batch, torch.Tensor) or not batch.ndim:
        raise ConfigurationError(
            "the tokens of a batch cannot be counted: give tokens=FUNCTION, which is called with each batch"
        )
    return batch.shape[0]


class FrameworkLoop:
    """``count``: tokens of a micro-batch."""

    def __init__(self, learner: Learner, count: Count = count_tokens) -> None:
        self.learner = learner
        self._count = count
        self._tokens = 0
        self._losses: list[torch.Tensor | float] = []

    def batches(
        self, dataset: Any, sequences: int, *, accumulation: int, collate: Callable[[list[Any]], Any]
    ) -> Iterator[Any]:
        """Yield micro-batches of ``sequences`` items that the syncer leases, ``accumulation`` of them for each step."""

        def split(items: list[Any]) -> list[Any]:
            return [collate(items[at : at + sequences]) for at in range(0, len(items), sequences)]

        for whole in self.learner.batches(dataset, sequences * accumulation, split):
            torch.manual_seed(self.learner.seed)
            yield from map(self._counted, whole)

    def own_batches(self, loader: Iterable[Any], accumulation: int) -> Iterator[Any]:
        """Yield the micro-batches of the program's own loader, which is begun anew at its end, until the job ends."""
        batches = self._endless(loader)
        for _ in self.learner.steps():
            torch.manual_seed(self.learner.seed)
            for _ in range(accumulation):
                yield self._counted(next(batches))

    def _endless(self, loader: Iterable[Any]) -> Iterator[Any]:
        while True:
            empty = True
            for batch in loader:
                empty = False
                yield batch
            if empty:
                raise ConfigurationError("the program's own data loader is empty")

    def _counted(self, batch: Any) -> Any:
        self._tokens += self._count(batch)
        return batch

    def add_loss(self, loss: torch.Tensor | float) -> None:
        """Add a micro-batch's share of the step's mean loss, in nats per token."""
        self._losses.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)

    def end_step(self, lr: float | None = None) -> None:
        """The optimizer has stepped. Raises WorkerError."""
        loss = sum(self._losses[1:], self._losses[0]) if self._losses else None
        tokens, self._tokens = self._tokens, 0
        self._losses.clear()
        self.learner.after_step(tokens=tokens, loss=loss, lr=lr)


def follow_progress(schedule: LRScheduler, learner: Learner, steps: int, warmup_steps: int = 0) -> None:
    """Let a schedule that was made for ``steps`` steps run on the job's progress instead of on this process's steps.

    Of those the first ``warmup_steps`` stay steps, of the slot. Every rate is reduced while the optimizer's state is
    fresh in the middle of a job. A schedule that is no LambdaLR is left as it is, with a warning.
    """
    if not isinstance(schedule, LambdaLR):
        log.warning(
            "%s counts the steps of this process, and not the job's progress: give a LambdaLR, as transformers' "
            "schedules are",
            type(schedule).__name__,
        )
        return

    def position() -> float:
        if learner.step < warmup_steps:
            return learner.step
        return max(float(warmup_steps), learner.progress * steps)

    def follow(factor: Callable[[Any], float]) -> Callable[[int], float]:
        return lambda _: factor(position()) * learner.rewarm_scale()

    schedule.lr_lambdas = [follow(factor) for factor in schedule.lr_lambdas]
