"""What ``auto`` and empty fields of sync.merge and sync.outer mean for a model (docs/decisions/062).

Measured on small models trained from scratch: after isotropic merges the loss is that of data-parallel training at
every length of run that was tried, and after RDA it is above. An isotropic merge takes about m² · n operations for each
matrix of m rows and n ≥ m columns, so that models from ``ISOTROPIC_BELOW`` parameters on have RDA, as has what was not
measured: weights that were trained before, and adapters. Runs that begin with trained weights are short, and momentum
0.9 overshoots there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.spec.sync import OuterSpec

Method = Literal["rda", "mean", "isotropic", "median", "isotropic-median"]

ISOTROPIC_BELOW = 10**8
"""Trained parameters from which on ``auto`` is RDA."""

UNMEASURED = (
    "Nothing was measured from 10^8 trained parameters on. With some 10^5, four learners and the default there, rda "
    "with nesterov at rate 0.7 and momentum 0.9, dense models and mixtures ended 11 to 28 % above data-parallel "
    "training's loss, and with isotropic at 1.4 and 0.5 they ended 1 to 8 % below it."
)
"""What is to be known of the default for large models (docs/results/quality.md)."""

# Nesterov's (lr, momentum), and the rate of plain steps.
_DILOCO = (0.7, 0.9)
_PRETRAINED = (1.0, 0.0)
_ISOTROPIC = (1.4, 0.5)
_PLAIN, _PLAIN_ISOTROPIC, _ADAPTIVE = 1.0, 2.0, 0.001


@dataclass(frozen=True, slots=True)
class OuterSettings:
    """spec.sync.outer with every field filled. Its fields are described there."""

    optimizer: str
    lr: float
    momentum: float
    betas: tuple[float, float]
    eps: float
    restart_every: int | None
    age_decay: float


def choose_merge(spec: JobSpec, parameters: int) -> tuple[Method, OuterSettings]:
    """How the pushes of a model of so many trained ``parameters`` are merged, and what the outer step does then."""
    model, asked = spec.training.model, spec.sync.merge.method
    pretrained = model is not None and (model.from_ is not None or model.lora is not None)
    method: Method = "rda" if asked == "auto" else asked
    if asked in ("auto", "median") and not (pretrained or parameters >= ISOTROPIC_BELOW):
        method = "isotropic" if asked == "auto" else "isotropic-median"
    return method, outer_settings(spec.sync.outer, method, pretrained)


def push_weights(method: str, weights: str) -> str:
    """By what pushes are weighted, by sync.merge: by nothing that learners say, where they need not be believed."""
    return "uniform" if method == "median" else weights


def is_isotropic(method: Method) -> bool:
    """Whether the singular values of each merged matrix are made equal."""
    return method in ("isotropic", "isotropic-median")


def is_unmeasured(spec: JobSpec, parameters: int) -> bool:
    """Whether a model of so many trained parameters has the default of large models, which nobody has measured."""
    return choose_merge(spec, 0)[0] != choose_merge(spec, parameters)[0]


def merge_text(method: Method, outer: OuterSettings) -> str:
    """How pushes are merged and what the outer step is, in words."""
    momentum = f", momentum {outer.momentum:g}" if outer.optimizer == "nesterov" else ""
    return f"{method}, {outer.optimizer} at rate {outer.lr:g}{momentum}"


def outer_settings(outer: OuterSpec, method: Method, pretrained: bool = False) -> OuterSettings:
    """The outer optimizer's settings after merges by ``method``. ``pretrained``: the weights were trained before."""
    isotropic = is_isotropic(method)
    lr, momentum = _ISOTROPIC if isotropic else _PRETRAINED if pretrained else _DILOCO
    if outer.optimizer == "sgd":
        lr = _PLAIN_ISOTROPIC if isotropic else _PLAIN
    elif outer.optimizer != "nesterov":
        lr = _ADAPTIVE
    return OuterSettings(
        optimizer=outer.optimizer,
        lr=lr if outer.lr is None else outer.lr,
        momentum=momentum if outer.momentum is None else outer.momentum,
        betas=(outer.betas[0], outer.betas[1]),
        eps=outer.eps,
        restart_every=outer.restart_every,
        age_decay=outer.age_decay,
    )
