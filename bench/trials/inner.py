"""Inner optimizers of trials: the built-in trainer's AdamW, and Muon for its matrices."""

from __future__ import annotations

from collections.abc import Callable

import torch

from diloco_protocol.spec.training import OptimizerSpec
from diloco_worker.training import optimizer as optimizers


class Together(torch.optim.Optimizer):
    """Two optimizers of one model, stepped one after the other; groups and state are those of both."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts
        super().__init__([p for part in parts for group in part.param_groups for p in group["params"]], {})
        self.param_groups = [group for part in parts for group in part.param_groups]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def make_muon(model: torch.nn.Module, spec: OptimizerSpec) -> torch.optim.Optimizer:
    """torch.optim.Muon for the matrices within the layers, with updates of AdamW's size (its ``match_rms_adamw``), so
    that one learning rate serves both; AdamW for embeddings, the output and vectors, as its authors do."""
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, p in model.named_parameters():
        (matrices if p.ndim == 2 and "layers" in name else rest).append(p)
    decayed = [p for p in rest if p.ndim >= 2]
    groups = [{"params": decayed, "weight_decay": spec.weight_decay}]
    groups.append({"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0})
    return Together(
        [
            torch.optim.Muon(matrices, lr=spec.lr, weight_decay=spec.weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(groups, lr=spec.lr, betas=(spec.betas[0], spec.betas[1]), eps=spec.eps, fused=True),
        ]
    )


MAKE: dict[str, Callable[[torch.nn.Module, OptimizerSpec], torch.optim.Optimizer]] = {
    "adamw": optimizers.build_optimizer,
    "muon": make_muon,
}
