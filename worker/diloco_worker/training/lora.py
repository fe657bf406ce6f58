"""Low-rank adapters: a linear layer W that trains only B·A of a small rank beside it.

y = W·x + (alpha / rank) · B·(A·x), A [rank, in] and B [out, rank], from LoRA (arXiv 2106.09685, section 4.1): A starts
random, B at zero, so that the adapted model starts as the model it adapts. Everything but A and B is frozen: it
travels in version 0 only, and merges exchange the adapters alone.

The layer keeps its parameters' names (``weight``, ``bias``) and adds ``lora_a`` and
``lora_b``, so that weights of the plain model load into it as they are.
"""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn import functional as F


class LoraLinear(nn.Linear):
    """A linear layer with an adapter; takes over the parameters of ``base``."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        nn.Module.__init__(self)
        self.in_features = base.in_features
        self.out_features = base.out_features
        self.weight = base.weight
        self.bias = base.bias
        self.scale = alpha / rank
        self.lora_a = nn.Parameter(base.weight.new_empty(rank, self.in_features))
        self.lora_b = nn.Parameter(base.weight.new_zeros(self.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight, self.bias) + self.scale * F.linear(
            F.linear(input, self.lora_a), self.lora_b
        )

    def merged(self) -> nn.Linear:
        """The plain layer that computes the same: W + (alpha / rank)·B·A, the product in float64."""
        plain = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        added = self.scale * (self.lora_b.double() @ self.lora_a.double())
        plain.weight = nn.Parameter((self.weight.double() + added).to(self.weight.dtype))
        plain.bias = self.bias
        return plain


def linear_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def adapt(model: nn.Module, rank: int, alpha: float, targets: list[str]) -> list[str]:
    """Give every linear layer that a pattern of ``targets`` matches an adapter, freeze all else.

    Returns the names of the adapted layers, possibly none. Draws from torch's
    global random state, in the order of the model's modules.
    """
    chosen = [name for name in linear_names(model) if any(fnmatchcase(name, t) for t in targets)]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name in chosen:
        parent, _, own = name.rpartition(".")
        base = model.get_submodule(name)
        assert isinstance(base, nn.Linear)
        setattr(model.get_submodule(parent), own, LoraLinear(base, rank, alpha))
    return chosen


def merge(model: nn.Module) -> None:
    """Replace every adapted layer by the plain layer that computes the same."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLinear):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, module.merged())
