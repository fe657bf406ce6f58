"""The inner optimizer of the built-in trainer, and its learning rate.

The learning rate never depends on a process's own count: a replacement goes on where its predecessor was. Warm-up is
linear, over the slot's steps. Then the rate stays at the peak, or falls along half a cosine to FLOOR (2 %) of the peak
at the job's stop. How far it has fallen is the whole job's progress (``Learner.progress``), not the slot's: a slot that
is faster than others, or trains for absent ones, reaches the floor when the job ends and no sooner.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from diloco_protocol.spec.training import OptimizerSpec, StopSpec

FLOOR = 0.02


def total_steps(stop: StopSpec, learners: int, tokens_per_step: int) -> int | None:
    """The last step of a slot that trains its fair share of training.stop; None if that names none (seconds).

    ``learners``: of the job; ``tokens_per_step``: one learner's, all its accumulated batches together.
    """
    if stop.steps is not None:
        return stop.steps
    if stop.tokens is not None:
        return max(1, math.ceil(stop.tokens / (learners * tokens_per_step)))
    return None


def learning_rate(optimizer: OptimizerSpec, step: int, place: float, total: int | None) -> float:
    """The rate for the slot's step ``step``, counted from 0: 0 steps are behind it.

    ``place``: how far the job is, in steps of ``total``, the steps that it would have if all learners made as many.
    The first step of a warm-up has lr / warmupSteps, not zero; the last step of the decay still has something.
    """
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    if optimizer.schedule == "constant" or total is None:
        return optimizer.lr
    span = max(1, total - optimizer.warmup_steps)
    progress = min(1.0, max(0.0, (place - optimizer.warmup_steps) / span))
    return optimizer.lr * max(FLOOR, 0.5 * (1 + math.cos(math.pi * progress)))


def build_optimizer(model: nn.Module, spec: OptimizerSpec) -> torch.optim.Optimizer:
    """AdamW over the model's trained parameters.

    Weight decay is for matrices alone: biases and the gains of norms have none.
    The fused implementation makes one pass over the memory.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=spec.lr,
        betas=(spec.betas[0], spec.betas[1]),
        eps=spec.eps,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
