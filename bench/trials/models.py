"""The trials' models with many learners' weights at once.

A tensor of the model has one more dimension in front here, the learner: [k, ...]. Every learner's loss is the one that
the product's model (transformers) has on its batch; only how often Python is entered differs, which at these sizes is
most of a step's time. tests/unit/project/test_trials.py compares losses and gradients with transformers'.

Each ``*_loss`` takes the weights by name, the batch with [k, sequences, ...], and returns the training loss and the
mean cross-entropy (nats) of each learner, float32 [k].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Weights = Mapping[str, Tensor]
Losses = tuple[Tensor, Tensor]


def loss_function(config: Mapping[str, Any]) -> Callable[[Weights, Mapping[str, Tensor]], Losses]:
    """The losses of this configuration (training.model.config of the job)."""
    make = {"llama": _language, "mixtral": _language, "vit": _vision}[config["model_type"]]
    return make(config)


# ---------------------------------------------------------------- parts


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [k, n, in] · weight [k, out, in] + bias [k, out]."""
    if bias is None:
        return torch.bmm(x, weight.transpose(1, 2))
    return torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))


def _rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain[:, None]


def _layer_norm(x: Tensor, weights: Weights, name: str, eps: float) -> Tensor:
    normed = functional.layer_norm(x, x.shape[-1:], eps=eps)
    return normed * weights[f"{name}.weight"][:, None] + weights[f"{name}.bias"][:, None]


def _heads(x: Tensor, sequences: int, heads: int) -> Tensor:
    """[k, sequences · tokens, heads · h] as [k · sequences, heads, tokens, h]."""
    k, n, width = x.shape
    return x.view(k * sequences, n // sequences, heads, width // heads).transpose(1, 2)


def _joined(x: Tensor, k: int) -> Tensor:
    """[k · sequences, heads, tokens, h] as [k, sequences · tokens, heads · h]."""
    _, heads, _, size = x.shape
    return x.transpose(1, 2).reshape(k, -1, heads * size)


def _rotary(tokens: int, size: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    frequencies = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32, device=device) / size)
    angles = torch.outer(torch.arange(tokens, dtype=torch.float32, device=device), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


# ---------------------------------------------------------------- language


def _language(config: Mapping[str, Any]) -> Callable[[Weights, Mapping[str, Tensor]], Losses]:
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    mixture = config["model_type"] == "mixtral"
    eps = 1e-5 if mixture else 1e-6  # transformers' defaults
    theta = 1e6 if mixture else 1e4
    width = config["hidden_size"]

    def losses(weights: Weights, batch: Mapping[str, Tensor]) -> Losses:
        ids = batch["input_ids"]
        k, sequences, tokens = ids.shape
        cos, sin = _rotary(tokens, width // heads, theta, ids.device)
        table = weights["model.embed_tokens.weight"]
        rows = ids.reshape(k, -1) + torch.arange(k, device=ids.device)[:, None] * table.shape[1]
        x = functional.embedding(rows, table.reshape(-1, width))
        routed: list[Tensor] = []
        for layer in range(config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            y = _rms_norm(x, weights[f"{name}.input_layernorm.weight"], eps)
            q, key, value = (
                _heads(_linear(y, weights[f"{name}.self_attn.{part}_proj.weight"]), sequences, count)
                for part, count in (("q", heads), ("k", groups), ("v", groups))
            )
            q, key = _rotated(q, cos, sin), _rotated(key, cos, sin)
            if groups != heads:
                key, value = (t.repeat_interleave(heads // groups, 1) for t in (key, value))
            mixed = functional.scaled_dot_product_attention(q, key, value, is_causal=True)
            x = x + _linear(_joined(mixed, k), weights[f"{name}.self_attn.o_proj.weight"])
            y = _rms_norm(x, weights[f"{name}.post_attention_layernorm.weight"], eps)
            x = x + (
                _experts(y, weights, name, config, routed=routed) if mixture else _gated(y, weights, f"{name}.mlp")
            )
        x = _rms_norm(x, weights["model.norm.weight"], eps)
        logits = _linear(x, weights["lm_head.weight"]).view(k, sequences, tokens, -1)
        predicted = logits[:, :, :-1].reshape(-1, logits.shape[-1])
        each = functional.cross_entropy(predicted, batch["labels"][:, :, 1:].reshape(-1), reduction="none")
        nats = each.view(k, -1).mean(1)
        if not mixture:
            return nats, nats.detach()
        return nats + config["router_aux_loss_coef"] * _balance(routed, config["num_experts_per_tok"]), nats.detach()

    return losses


def _gated(x: Tensor, weights: Weights, name: str) -> Tensor:
    gate = _linear(x, weights[f"{name}.gate_proj.weight"])
    up = _linear(x, weights[f"{name}.up_proj.weight"])
    return _linear(functional.silu(gate) * up, weights[f"{name}.down_proj.weight"])


def _experts(x: Tensor, weights: Weights, name: str, config: Mapping[str, Any], routed: list[Tensor]) -> Tensor:
    """The mixture: every expert sees every token here, and what is not routed to it has the factor 0, which is the
    same sum. ``routed``: gets the router's logits, [k, n, experts]."""
    logits = _linear(x, weights[f"{name}.mlp.gate.weight"])
    routed.append(logits)
    shares = functional.softmax(logits, -1)
    top, chosen = torch.topk(shares, config["num_experts_per_tok"], -1)
    factors = torch.zeros_like(shares).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
    k, n, width = x.shape
    experts = shares.shape[-1]
    gate_up, down = weights[f"{name}.mlp.experts.gate_up_proj"], weights[f"{name}.mlp.experts.down_proj"]
    inner = torch.bmm(x, gate_up.reshape(k, -1, width).transpose(1, 2)).view(k, n, experts, -1)
    gate, up = inner.chunk(2, -1)
    hidden = functional.silu(gate) * up * factors[..., None]
    flat = down.transpose(2, 3).reshape(k, -1, width)  # [k, experts · inner, width]
    return torch.bmm(hidden.view(k, n, -1), flat)


def _balance(routed: list[Tensor], count: int) -> Tensor:
    """The router's load-balancing loss of each learner (Switch Transformer, equations 4 to 6), as transformers has it:
    over the tokens of all layers."""
    shares = functional.softmax(torch.cat(routed, 1), -1)
    experts = shares.shape[-1]
    _, chosen = torch.topk(shares, count, -1)
    taken = functional.one_hot(chosen, experts).float().mean(1)  # [k, count, experts]
    return (taken * shares.mean(1)[:, None]).sum((1, 2)) * experts


# ---------------------------------------------------------------- vision


def _vision(config: Mapping[str, Any]) -> Callable[[Weights, Mapping[str, Tensor]], Losses]:
    heads, width, patch = config["num_attention_heads"], config["hidden_size"], config["patch_size"]
    eps = 1e-12  # transformers' default

    def losses(weights: Weights, batch: Mapping[str, Tensor]) -> Losses:
        pixels = batch["pixel_values"]
        k, images = pixels.shape[:2]
        squares = functional.unfold(pixels.flatten(0, 1), patch, stride=patch).transpose(1, 2)
        kernel = weights["vit.embeddings.patch_embeddings.projection.weight"].reshape(k, width, -1)
        bias = weights["vit.embeddings.patch_embeddings.projection.bias"]
        patches = _linear(squares.reshape(k, -1, patch * patch), kernel, bias).view(k, images, -1, width)
        first = weights["vit.embeddings.cls_token"].expand(k, images, 1, width)
        x = torch.cat((first, patches), 2) + weights["vit.embeddings.position_embeddings"]
        x = x.reshape(k, -1, width)
        for layer in range(config["num_hidden_layers"]):
            name = f"vit.layers.{layer}"
            y = _layer_norm(x, weights, f"{name}.layernorm_before", eps)
            q, key, value = (
                _heads(_biased(y, weights, f"{name}.attention.{part}_proj"), images, heads) for part in "qkv"
            )
            mixed = functional.scaled_dot_product_attention(q, key, value)
            x = x + _biased(_joined(mixed, k), weights, f"{name}.attention.o_proj")
            y = _layer_norm(x, weights, f"{name}.layernorm_after", eps)
            y = functional.gelu(_biased(y, weights, f"{name}.mlp.fc1"))
            x = x + _biased(y, weights, f"{name}.mlp.fc2")
        x = _layer_norm(x.view(k, images, -1, width)[:, :, 0], weights, "vit.layernorm", eps)
        logits = _biased(x, weights, "classifier")
        each = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        nats = each.view(k, images).mean(1)
        return nats, nats.detach()

    assert math.isqrt(config["image_size"]) >= 1
    return losses


def _biased(x: Tensor, weights: Weights, name: str) -> Tensor:
    return _linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])
