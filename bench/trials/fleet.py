"""Learners that train: replicas for a world in virtual time, and the data-parallel reference.

All learners' weights lie in one array, a row for each; a learner's model is the product's, its parameters being views
into its row, so that fragments are taken and moved by the product's code (``diloco_worker.fragments``). Steps that end
together are computed together (models.py); each learner has an optimizer of its own (``torch.optim``).

*The reference.* Data-parallel training averages the gradients of M learners' batches. In one process that is the mean
loss over the same sequences, so the reference is one process with the whole batch, and the same for every M;
``bench/quality.py`` compares it with torch's DistributedDataParallel over gloo.

*The same data.* The step s of the job trains the sequences s·n to (s + 1)·n of the seed's order (n: a step's),
whoever trains them: learner m of M takes the m-th of M parts, equal ones but where the trial says others. A learner
that died leaves a gap. What a learner beyond the M trains comes after all that is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from diloco_protocol.arrays.kernels import Float32s
from diloco_protocol.arrays.layout import Layout
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.training import OptimizerSpec
from diloco_worker import device
from diloco_worker.core.adoption import Kind
from diloco_worker.core.progress import schedule_step
from diloco_worker.fragments import ModelFragments, Vector, build_layout, model_tensors
from diloco_worker.training import optimizer as optimizers
from lab.world.parts import Replica, StepOrder, StepResult
from trials import models
from trials.tasks import TASKS, TrialData, build_model

MakeOptimizer = Callable[[torch.nn.Module, OptimizerSpec], torch.optim.Optimizer]


@dataclass(eq=False)
class Row:
    """One learner's copy: row ``index`` of the weights."""

    index: int
    model: torch.nn.Module
    fragments: ModelFragments
    optimizer: torch.optim.Optimizer

    def snapshot(self, fragment: int) -> Float32s:
        return self.fragments.snapshot(fragment).array

    def move(self, fragment: int, kind: Kind, new: Float32s, reference: Float32s | None, alpha: float) -> None:
        under = None if reference is None else Vector.from_array(reference)
        self.fragments.move(fragment, kind, Vector.from_array(new), under, alpha)

    def optimizer_state(self) -> object:
        return {
            index: {name: value.clone() for name, value in state.items()}
            for index, state in enumerate(self.optimizer.state.values())
        }

    def set_optimizer_state(self, state: object) -> None:
        assert isinstance(state, dict)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            self.optimizer.state[parameter] = {name: value.clone() for name, value in state[index].items()}


class Fleet:
    """Weights and gradients of up to ``rows`` learners of one job, float32 [rows, parameters]."""

    def __init__(
        self,
        kind: str,
        size: str,
        job: DiLoCoJob,
        rows: int,
        make_optimizer: MakeOptimizer = optimizers.build_optimizer,
    ) -> None:
        self.job, self._make_optimizer = job, make_optimizer
        self._losses = models.loss_function(TASKS[kind, size].config)
        self.device = torch.device(TASKS[kind, size].device)
        self._precision = device.precision(job.spec, self.device)
        self.first = build_model(job)
        sync = job.spec.sync
        self.layout: Layout = build_layout(self.first, sync.fragments, sync.every, sync.merge.mean_tensors)
        shapes = {name: p.shape for name, p in model_tensors(self.first).items()}
        total = sum(shape.numel() for shape in shapes.values())
        self._weights = torch.zeros(rows, total, device=self.device)
        self._gradients = torch.zeros(rows, total, device=self.device)
        self._spans: dict[str, tuple[slice, torch.Size]] = {}
        start = 0
        for name, shape in shapes.items():
            self._spans[name] = slice(start, start + shape.numel()), shape
            start += shape.numel()
        self._free = list(range(rows))

    def initial(self) -> list[Float32s]:
        """Version 0: the first model's fragments."""
        fragments = ModelFragments(self.first, self.layout)
        return [fragments.snapshot(p).array for p in range(len(self.layout))]

    def open_row(self) -> Row:
        """A copy that begins with the first model's weights."""
        index = self._free.pop(0)
        model = build_model(self.job)
        for name, parameter in model_tensors(model).items():
            span, shape = self._spans[name]
            home = self._weights[index, span].view(shape)
            home.copy_(parameter.detach())
            parameter.data = home
            parameter.grad = self._gradients[index, span].view(shape)
        optimizer = self._make_optimizer(model, self.job.spec.training.optimizer)
        return Row(index, model, ModelFragments(model, self.layout), optimizer)

    def close_row(self, row: Row) -> None:
        self._free.append(row.index)

    def step(self, rows: Sequence[Row], batch: dict[str, torch.Tensor], rates: Sequence[float]) -> list[float]:
        """One inner step of each row on its part of ``batch`` ([rows, sequences, ...]); their losses in nats."""
        indices = [row.index for row in rows]
        together = indices == list(range(indices[0], indices[0] + len(indices)))
        taken: Any = slice(indices[0], indices[0] + len(indices)) if together else indices
        leaves = {
            name: self._weights[taken, span].view(len(rows), *shape).detach().requires_grad_()
            for name, (span, shape) in self._spans.items()
        }
        with device.autocast(self.device, self._precision):
            losses, nats = self._losses(leaves, device.to_device(batch, self.device))
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()))
        for (span, _), gradient in zip(self._spans.values(), gradients, strict=True):
            self._gradients[taken, span] = gradient.reshape(len(rows), -1)
        clip = self.job.spec.training.optimizer.clip_norm
        for row, rate in zip(rows, rates, strict=True):
            if clip is not None:
                norm = float(self._gradients[row.index].norm())
                if norm > clip:
                    self._gradients[row.index] *= clip / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_
            optimizers.set_learning_rate(row.optimizer, rate)
            row.optimizer.step()
        found: list[float] = nats.tolist()
        return found


def first_sequence(parts: Sequence[int], total: int, slot: int, step: int) -> int:
    """The place, in the order of the data, of the first sequence that this slot's learner trains in this step.
    ``parts``: those of the learners that are there all the time; ``total``: steps of the trial."""
    visitor, sequences = slot - len(parts), sum(parts)
    if visitor < 0:
        return step * sequences + sum(parts[:slot])
    return (visitor + 1) * total * sequences + step * parts[-1]


class TrialTraining:
    """What a world's learners train (lab.world.parts.Training). ``parts``: sequences that the learner of each
    slot trains in a step, the task's in all. ``visitors``: learners beyond those, of as many sequences as the last.
    ``total``: steps of the trial."""

    def __init__(self, fleet: Fleet, data: TrialData, parts: Sequence[int], visitors: int, total: int) -> None:
        self._fleet, self._data, self._own, self._total = fleet, data, tuple(parts), total
        self._parts = (*parts, *[parts[-1]] * visitors)

    def open_replica(self, slot: int) -> Replica:
        return self._fleet.open_row()

    def close_replica(self, replica: Replica) -> None:
        assert isinstance(replica, Row)
        self._fleet.close_row(replica)

    def train(self, orders: Sequence[StepOrder]) -> Sequence[StepResult]:
        """Steps of as many sequences are computed together."""
        results: dict[int, StepResult] = {}
        for part in sorted(set(self._parts)):
            chosen = [i for i, order in enumerate(orders) if self._parts[order.slot] == part]
            chosen.sort(key=lambda i: _row(orders[i]).index)
            if chosen:
                losses = self._train([orders[i] for i in chosen], part)
                results |= {i: StepResult(part * self._length, loss) for i, loss in zip(chosen, losses, strict=True)}
        return [results[i] for i in range(len(orders))]

    def _train(self, orders: Sequence[StepOrder], part: int) -> list[float]:
        spec = self._fleet.job.spec
        first = np.array([first_sequence(self._own, self._total, order.slot, order.step) for order in orders])
        batch = self._data.batch(first[:, None] + np.arange(part))
        rates = []
        for order in orders:
            # The stop is one step before the last (tasks.make_job), so a share of it is one of so many steps.
            place = schedule_step(spec, order.step, order.progress, self._total - 1)
            rates.append(optimizers.learning_rate(spec.training.optimizer, order.step, place, self._total))
        return self._fleet.step([_row(order) for order in orders], batch, rates)

    @property
    def _length(self) -> int:
        """Tokens of a sequence."""
        data = self._fleet.job.spec.training.data
        return data.sequence_length if data and data.source == "text" else 1


def _row(order: StepOrder) -> Row:
    assert isinstance(order.replica, Row)
    return order.replica


def train_alone(
    kind: str, size: str, job: DiLoCoJob, total: int, seed: int, optimizer: MakeOptimizer
) -> torch.nn.Module:
    """The reference: one process with the whole batch, ``total`` steps."""
    fleet = Fleet(kind, size, job, 1, make_optimizer=optimizer)
    data, row, spec = TrialData(kind, size, seed), fleet.open_row(), job.spec.training.optimizer
    sequences = TASKS[kind, size].sequences
    for step in range(total):
        batch = data.batch(np.arange(step * sequences, (step + 1) * sequences)[None])
        fleet.step([row], batch, [optimizers.learning_rate(spec, step, step, total)])
    return row.model
