"""Outer optimizers on trial: candidates for a default that the job file cannot name (yet).

Δ is the merged outer gradient, b the momentum, t the number of the fragment's merge, counted from 1, and T the merges
of a fragment that the job will have. All are of the form of ``diloco_syncer.numerics.outer``: float32, element by
element. In plain numpy; the product's are compiled.

* ``heavy-ball``: b ← μ·b + Δ, Θ ← Θ − η·b: momentum without Nesterov's look ahead.
* ``warm-up``: Nesterov, with the momentum factor min(μ, 1 − 1/t): the first steps are those of sgd, and the sum of the
  factors of past gradients grows with the number of merges rather than with the limit 1/(1 − μ).
* ``corrected``: b ← μ·b + (1 − μ)·Δ, b̂ = b/(1 − μ^t), Θ ← Θ − η·((1 − μ)·Δ + μ·b̂): Nesterov on a running mean whose
  start at zero is corrected, as in Adam. In the long run it is Nesterov at the rate η·(1 − μ).
* ``horizon``: Nesterov with μ = max(0, 1 − c/T), and η scaled so that the whole step a gradient has in the long run,
  η/(1 − μ), is ``lr``: long jobs have much momentum, short ones none.
* ``delayed``: Delayed Nesterov (Asynchronous Local-SGD, arXiv 2401.09135, algorithm 4): gradients are applied at once
  with the rate η/N, and every N-th merge the momentum, with their mean.
* ``heloco``: Nesterov, and before the merge each learner's Δ is turned, tensor by tensor, where it lies across the
  momentum (HeLoCo, arXiv 2606.00271, algorithm 1 with the constants of its table 3).
* ``isoloco``: Nesterov, after merges as IsoLoCo has them (arXiv 2607.03011): of each matrix the weighted mean, with all
  singular values at their mean. The product's isotropic merge has RDA's length instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco_protocol.arrays.kernels import Float32s
from diloco_protocol.merging import OuterSettings, outer_settings
from diloco_protocol.spec.sync import OuterSpec
from diloco_syncer.numerics import isotropic
from diloco_syncer.numerics.outer import Nesterov, Outer, State, _Moment

MOMENTUM_MERGES = 10.0  # c of ``horizon``


class HeavyBall(Outer):
    vectors = ("momentum",)

    def _step(self, theta: Float32s, delta: Float32s, state: State, at: _Moment) -> None:
        b = state["momentum"]
        b *= np.float32(self.settings.momentum)
        b += delta
        theta -= np.float32(self.settings.lr) * b


class WarmUp(Outer):
    vectors = ("momentum",)

    def _factor(self, merges: int) -> float:
        return min(self.settings.momentum, 1 - 1 / merges)

    def _step(self, theta: Float32s, delta: Float32s, state: State, at: _Moment) -> None:
        b, mu = state["momentum"], np.float32(self._factor(at.merges))
        b *= mu
        b += delta
        theta -= np.float32(self._rate()) * (delta + mu * b)

    def _rate(self) -> float:
        return self.settings.lr


class Horizon(WarmUp):
    def __init__(self, settings: OuterSettings, max_versions: int, merges: int) -> None:
        super().__init__(settings, max_versions)
        self._mu = min(settings.momentum, max(0.0, 1 - MOMENTUM_MERGES / merges))

    def _factor(self, merges: int) -> float:
        return self._mu

    def _rate(self) -> float:
        return self.settings.lr * (1 - self._mu)


class Corrected(Outer):
    vectors = ("momentum",)

    def _step(self, theta: Float32s, delta: Float32s, state: State, at: _Moment) -> None:
        b, mu = state["momentum"], self.settings.momentum
        b *= np.float32(mu)
        b += np.float32(1 - mu) * delta
        mean = np.float32(mu / (1 - mu**at.merges)) * b
        theta -= np.float32(self.settings.lr) * (np.float32(1 - mu) * delta + mean)


class Delayed(Outer):
    vectors = ("momentum", "buffer")
    every = 4

    def _step(self, theta: Float32s, delta: Float32s, state: State, at: _Moment) -> None:
        lr, mu, n = self.settings.lr, self.settings.momentum, self.every
        b, buffer = state["momentum"], state["buffer"]
        buffer += delta
        theta -= np.float32(lr / n) * delta
        if at.merges % n == 0:
            b *= np.float32(mu)
            b += buffer / np.float32(n)
            theta -= np.float32(lr * mu) * b
            buffer.fill(0)


class HeLoCo(Nesterov):
    """The product's Nesterov; versions.py turns the pushes (``turn_delta``)."""


class IsoLoCo(Nesterov):
    """The product's Nesterov; versions.py makes the singular values of the mean equal (``equalize_to_mean``)."""


def equalize_to_mean(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    """The matrix with each of its singular values, but for rounding error, at the mean of all."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    kept = values > isotropic.TINY * values[0]
    return np.asarray(values.mean() * (left[:, kept] @ right[kept]), np.float32)


_ALIGNED, _SHRINK, _TURN, _MOST_SHRINK, _TRUST, _TINY = 0.2, 0.5, 1.0, 0.5, 3.0, 1e-8  # HeLoCo's table 3


def turn_delta(delta: Float32s, momentum: Float32s) -> Float32s:
    """One tensor's outer gradient of one learner, corrected by the momentum.

    With c the cosine between them and f = ‖Δ‖/(‖Δ‖ + κ·‖b‖): aligned ones (c >= 0.2) stay; one that points against the
    momentum loses min(k·(−c)·f, β) of what points against it; one in between is turned towards the momentum by the
    share min((1 − c)·f, 1) and keeps its length.
    """
    length, pull = float(np.linalg.norm(delta)), float(np.linalg.norm(momentum))
    if length < _TINY or pull < _TINY:
        return delta
    cosine = float(np.dot(delta.astype(np.float64), momentum.astype(np.float64))) / (length * pull)
    if cosine >= _ALIGNED:
        return delta
    trust = length / (length + _TRUST * pull + _TINY)
    if cosine < 0:
        share = min(-_SHRINK * cosine * trust, _MOST_SHRINK)
        return delta - np.float32(share * cosine * length / pull) * momentum
    share = min(_TURN * (1 - cosine) * trust, 1.0)
    turned = np.float32((1 - share) / length) * delta + np.float32(share / pull) * momentum
    return turned * np.float32(length / max(float(np.linalg.norm(turned)), _TINY))


def make(settings: Mapping[str, Any], merges: int) -> Outer | None:
    """The optimizer ``{"name", "lr", "momentum"}`` of a job of so many merges of each fragment; None: the job's own."""
    if not settings:
        return None
    spec = outer_settings(OuterSpec(lr=settings["lr"], momentum=settings.get("momentum")), "rda")
    name = settings["name"]
    if name == "horizon":
        return Horizon(spec, 16, merges)
    kinds: dict[str, type[Outer]] = {
        "heloco": HeLoCo,
        "isoloco": IsoLoCo,
        "heavy-ball": HeavyBall,
        "warm-up": WarmUp,
        "corrected": Corrected,
        "delayed": Delayed,
    }
    return kinds[name](spec, 16)
