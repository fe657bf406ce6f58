"""Low-rank adapters: a linear layer W that trains only B·A of a small rank beside it.

y = W·x + (alpha / rank) · B·(A·x), A [rank, in] and B [out, rank], from LoRA (arXiv 2106.09685, section 4.1): A starts
random, B at zero, so that the adapted model starts as the model it adapts. Everything but A and B is frozen: it
travels in version 0 only, and merges exchange the adapters alone.

Adapted are torch's ``nn.Linear``, whose weight is [out, in], and transformers' ``Conv1D``, which GPT-2 and its like
have: despite its name a linear layer, with a weight of [in, out]. A and B have the same shapes for both.

The layer keeps its parameters' names (``weight``, ``bias``) and adds ``lora_a`` and
``lora_b``, so that weights of the plain model load into it as they are.
"""

from __future__ import annotations

import math
from collections import Counter
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
        self.lora_a, self.lora_b = _adapter(base.weight, rank, self.in_features, self.out_features)

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


class LoraConv1D(nn.Module):
    """transformers' ``Conv1D`` with an adapter: y = x·W + bias, W [in, out]. Takes over the parameters of ``base``."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, base: nn.Module, rank: int, alpha: float) -> None:
        super().__init__()
        assert isinstance(base.weight, nn.Parameter) and isinstance(base.bias, nn.Parameter)
        self.nx, self.nf = base.weight.shape  # Conv1D's own names for its sizes
        self.weight = base.weight
        self.bias = base.bias
        self.scale = alpha / rank
        self.lora_a, self.lora_b = _adapter(base.weight, rank, self.nx, self.nf)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        plain = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)
        return plain + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)

    def merged(self) -> nn.Module:
        """The plain layer that computes the same: W + (alpha / rank)·(B·A)ᵀ, the product in float64."""
        with torch.device("meta"):
            plain = _conv1d()(self.nf, self.nx)
        added = self.scale * (self.lora_b.double() @ self.lora_a.double())
        plain.weight = nn.Parameter((self.weight.double() + added.T).to(self.weight.dtype))
        plain.bias = self.bias
        return plain


Adapted = LoraLinear | LoraConv1D


def linear_names(model: nn.Module) -> list[str]:
    kinds = (nn.Linear, _conv1d())
    return [name for name, module in model.named_modules() if isinstance(module, kinds)]


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
        layer = LoraLinear(base, rank, alpha) if isinstance(base, nn.Linear) else LoraConv1D(base, rank, alpha)
        setattr(model.get_submodule(parent), own, layer)
    return chosen


def adapters(model: nn.Module) -> dict[str, Adapted]:
    """The adapted layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear | LoraConv1D)}


def merge(model: nn.Module) -> None:
    """Replace every adapted layer by the plain layer that computes the same."""
    holders = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    config = getattr(model, "config", None)
    if config is not None and any(holders[id(layer.weight)] > 1 for layer in adapters(model).values()):
        config.tie_word_embeddings = False  # a head with an adapter folded in is the embedding no longer
    for name, module in adapters(model).items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, module.merged())


def _adapter(weight: torch.Tensor, rank: int, inputs: int, outputs: int) -> tuple[nn.Parameter, nn.Parameter]:
    """A, random, and B, zero, of the device and dtype of ``weight``."""
    a = nn.Parameter(weight.new_empty(rank, inputs))
    b = nn.Parameter(weight.new_zeros(outputs, rank))
    nn.init.kaiming_uniform_(a, a=math.sqrt(5))
    return a, b


def _conv1d() -> type[nn.Module]:
    from transformers.pytorch_utils import Conv1D  # late: transformers loads slowly

    return Conv1D
