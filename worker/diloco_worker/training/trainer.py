"""The built-in trainer: an ordinary training loop around the public Learner, nothing more.

A user's own loop can do all that is done here. The model and the data come from the job; each of the learner's batches
is one optimizer step, cut into ``training.batch.accumulation`` forward passes. Learning rate and dropout depend on
(seed, slot, slot step) and not on the process, so that a replacement continues its predecessor's course. The ranks of a
learner share each batch and divide the model (``parallel/sharding.py``); all of them run this loop.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from diloco_protocol.spec.job import DiLoCoJob
from diloco_worker import data, device
from diloco_worker.core.progress import schedule_step
from diloco_worker.learner import Learner
from diloco_worker.training import models
from diloco_worker.training import optimizer as optimizers
from diloco_worker.training.parallel import sharding

log = logging.getLogger(__name__)


def train(job: DiLoCoJob) -> int:
    """Train as one learner of the job, until it ends or SIGTERM. Returns the process's exit code.

    Raises JobError for what is wrong with the job, settings.WorkerError for the rest.
    """
    spec = job.spec
    device.configure(spec)
    ranks = sharding.begin_ranks(spec)
    where = device.device(spec)
    dtype = device.precision(spec, where)
    # Data first: a wrong path is said before a large model is built.
    dataset = data.load(spec)
    model = sharding.build_model(
        lambda: models.build(spec, spec.seed), lambda: models.outline(spec), spec, where=where, dtype=dtype, ranks=ranks
    )
    models.check_batch(model, dataset[0], spec.training.data.source if spec.training.data else "")
    optimizer = optimizers.build_optimizer(model, spec.training.optimizer)
    log.info(
        "%s: %d parameters, %d trained; %d sequences; %s, %s",
        type(model).__name__,
        sum(p.numel() for p in model.parameters()),
        sum(p.numel() for p in model.parameters() if p.requires_grad),
        len(dataset),
        where,
        dtype,
    )

    total: int | None = None
    known: DiLoCoJob | None = None  # for which ``total`` is
    with Learner.from_environment(model, optimizer) as learner:
        for batch in learner.batches(dataset):
            tokens = data.tokens_in(batch)  # of this rank, and each has as many
            if learner.job is not known:  # the stop may be moved while the job runs
                known = learner.job
                total = optimizers.total_steps(known.spec.training.stop, learner.learners, tokens * ranks)
            place = schedule_step(known.spec, learner.step, learner.progress, total)
            rate = optimizers.learning_rate(spec.training.optimizer, learner.step, place, total)
            rate *= learner.rewarm_scale()
            optimizers.set_learning_rate(optimizer, rate)
            torch.manual_seed(learner.seed)
            nats = step(
                model,
                optimizer,
                batch,
                spec.training.batch.accumulation,
                clip_norm=spec.training.optimizer.clip_norm,
                dtype=dtype,
                ranks=ranks,
            )
            learner.after_step(tokens=tokens, loss=nats, lr=rate)
    return learner.exit_code


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Mapping[str, torch.Tensor],
    accumulation: int,
    clip_norm: float | None,
    dtype: torch.dtype,
    ranks: int = 1,
) -> torch.Tensor:
    """One optimizer step on ``batch`` (on the CPU; of several ``ranks`` this one's share), in ``accumulation`` forward
    passes.

    Each prediction weighs the same, however many a pass or a rank has. They are counted on the CPU, so nothing here
    waits for the device. Returns the mean cross-entropy in nats per prediction of ``batch``, a detached scalar on the
    model's device. Raises JobError for a token that the model does not have.
    """
    models.check_ids(model, batch)
    where = next(model.parameters()).device
    counts = [models.predictions(part) for part in parts(batch, accumulation)]
    total = torch.zeros((), device=where)
    optimizer.zero_grad(set_to_none=True)
    weights = sharding.loss_weights(counts, ranks, where)
    for part, count, weight in zip(parts(device.to_device(batch, where), accumulation), counts, weights, strict=True):
        with device.autocast(where, dtype):
            loss = models.loss(model, part)
        (loss.value * weight).backward()
        total += loss.nats.float() * (count / max(1, sum(counts)))
    if clip_norm is not None:  # the norm before stays on the device, and nothing waits for it
        nn.utils.clip_grad_norm_((p for p in model.parameters() if p.requires_grad), clip_norm)
    optimizer.step()
    return total


def parts(batch: Mapping[str, torch.Tensor], count: int) -> Iterator[dict[str, torch.Tensor]]:
    """The batch in ``count`` parts along its first dimension, as equal as can be."""
    rows = next(iter(batch.values())).shape[0]
    for i in range(count):
        start, end = rows * i // count, rows * (i + 1) // count
        if end > start:
            yield {name: tensor[start:end] for name, tensor in batch.items()}
