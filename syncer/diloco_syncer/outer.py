"""Outer optimizers: what a merged outer gradient does to the global parameters.

Theory of operation
-------------------
Each fragment has one ``Outer``. ``step`` takes the fragment's global parameters Θ and
the merged outer gradient Δ = base − θ, which points uphill like a gradient, and changes
Θ in place. Its state is part of every checkpoint and merge record: ``load(state())``
continues bit for bit. Everything is float32, element by element, one rounding per
operation, so that the result is the same on every machine and for any number of threads.

* ``sgd``: Θ ← Θ − η·Δ.
* ``nesterov``: b ← μ·b + Δ, Θ ← Θ − η·(Δ + μ·b), which is torch.optim.SGD(nesterov=True)
  with Δ for the gradient (DiLoCo, arXiv 2311.08105).
* ``adamw``: Adam with bias correction; torch.optim.AdamW(weight_decay=0).
* ``cosine-gated``: Cosine-Gated Adam-Decay (arXiv 2605.09126): Δ is scaled by
  σ(τ) = γ(τ)·e^(−α·τ) before it enters Adam's two moments, where τ is its age in
  versions, α is ``age_decay``, and the gate γ(τ) = (1 + cos(π·min(τ/τ_c, 1)))/2 closes
  smoothly at a cutoff τ_c. At age 0 it is Adam. Ours: the paper scales each push, and
  here the merged Δ is scaled by one age, the weighted mean of its pushes'; the cutoff is
  one version beyond ``staleness.maxVersions``, so that no push that is accepted is lost;
  and Adam's bias correction counts merges, not σ.

``restart_every`` n clears the momentum before every n-th merge but the first
(outer-momentum restarting, arXiv 2605.28585). With Adam that is the first moment and
its bias correction; the second moment is a scale and stays (ours).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from diloco_protocol import kernels
from diloco_protocol.kernels import F32_IN, F32_OUT, RANGE, Float32s, kernel


class OuterError(ValueError):
    """A state that belongs to another optimizer or fragment, or vectors of the wrong size."""


class OuterSettings(Protocol):
    """What of ``spec.sync.outer`` is read."""

    @property
    def optimizer(self) -> str: ...
    @property
    def lr(self) -> float: ...
    @property
    def momentum(self) -> float: ...
    @property
    def betas(self) -> Sequence[float]: ...
    @property
    def eps(self) -> float: ...
    @property
    def restart_every(self) -> int | None: ...
    @property
    def age_decay(self) -> float: ...


class Outer:
    """One fragment's outer optimizer. Subclasses name their vectors and make the step."""

    vectors: tuple[str, ...] = ()
    momentum: tuple[str, ...] = ()  # those that a restart clears

    def __init__(self, settings: OuterSettings, elements: int, max_versions: int) -> None:
        self.settings = settings
        self.elements = elements
        self.max_versions = max_versions
        self.merges = 0
        self._buffers = {name: np.zeros(elements, np.float32) for name in self.vectors}

    def step(self, theta: Float32s, delta: Float32s, age: float = 0.0, *, threads: int = 1) -> None:
        """Change ``theta`` (float32[elements], contiguous) by ``delta`` (likewise), whose
        ``age`` is in versions. Raises OuterError, and then nothing has changed."""
        for name, vector in (("theta", theta), ("delta", delta)):
            if (
                vector.dtype != np.float32
                or vector.shape != (self.elements,)
                or not vector.flags.c_contiguous
            ):
                raise OuterError(
                    f"{name}: {vector.dtype} of shape {vector.shape}, fragment: {self.elements} float32"
                )
        if not theta.flags.writeable:
            raise OuterError("theta: read-only")
        if not (age >= 0 and math.isfinite(age)):
            raise OuterError(f"age {age!r}: not a number of versions")
        since = self._since_restart()
        if since == 0:
            for name in self.momentum:
                self._buffers[name].fill(0)
        self.merges += 1
        self._step(theta, delta, age, since + 1, threads)

    def _since_restart(self) -> int:
        """Merges since the momentum was last clear."""
        every = self.settings.restart_every
        return self.merges % every if every else self.merges

    def _step(self, theta: Float32s, delta: Float32s, age: float, since: int, threads: int) -> None:
        raise NotImplementedError

    def state(self) -> dict[str, NDArray[Any]]:
        """A copy of what the next step depends on: ``merges`` (int64[1]) and float32
        vectors of the fragment's size."""
        state: dict[str, NDArray[Any]] = {name: vector.copy() for name, vector in self._buffers.items()}
        state["merges"] = np.array([self.merges], np.int64)
        return state

    def load(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from ``state``, which is copied. Raises OuterError if it is not one of
        this optimizer and fragment, or holds a value that is not finite."""
        name = self.settings.optimizer
        if set(state) != {"merges", *self.vectors}:
            raise OuterError(
                f"outer optimizer {name}: state has {', '.join(sorted(state)) or 'nothing'},"
                f" and needs {', '.join(sorted(('merges', *self.vectors)))}; was sync.outer changed?"
            )
        merges = state["merges"]
        if merges.dtype != np.int64 or merges.shape != (1,) or merges[0] < 0:
            raise OuterError(f"outer optimizer {name}: merges is not one whole number")
        loaded = {}
        for key in self.vectors:
            vector = state[key]
            if vector.dtype != np.float32 or vector.shape != (self.elements,):
                raise OuterError(
                    f"outer optimizer {name}: {key} is {vector.dtype} of shape {vector.shape},"
                    f" fragment: {self.elements} float32"
                )
            loaded[key] = np.array(vector, np.float32, order="C")
            if not math.isfinite(kernels.square_sum(loaded[key])):
                raise OuterError(f"outer optimizer {name}: {key} holds a value that is not finite")
        self.merges, self._buffers = int(merges[0]), loaded


class Sgd(Outer):
    """Θ ← Θ − η·Δ."""

    def _step(self, theta: Float32s, delta: Float32s, age: float, since: int, threads: int) -> None:
        lr = np.float32(self.settings.lr)
        _run(_sgd, threads, lr, theta, delta)


class Nesterov(Outer):
    """b ← μ·b + Δ, Θ ← Θ − η·(Δ + μ·b)."""

    vectors = ("momentum",)
    momentum = ("momentum",)

    def _step(self, theta: Float32s, delta: Float32s, age: float, since: int, threads: int) -> None:
        lr, mu = np.float32(self.settings.lr), np.float32(self.settings.momentum)
        _run(_nesterov, threads, lr, mu, theta, delta, self._buffers["momentum"])


class Adam(Outer):
    """m ← β₁·m + (1−β₁)·g, v ← β₂·v + (1−β₂)·g², Θ ← Θ − η·m̂/(√v̂ + ε) with g = Δ."""

    vectors = ("first", "second")
    momentum = ("first",)

    def _scale(self, age: float) -> float:
        return 1.0

    def _step(self, theta: Float32s, delta: Float32s, age: float, since: int, threads: int) -> None:
        beta1, beta2 = self.settings.betas
        rate = self.settings.lr / (1 - beta1**since)
        root = 1 / math.sqrt(1 - beta2**self.merges)
        constants = (beta1, 1 - beta1, beta2, 1 - beta2, rate, root, self.settings.eps, self._scale(age))
        first, second = self._buffers["first"], self._buffers["second"]
        _run(_adam, threads, *(np.float32(value) for value in constants), theta, delta, first, second)


class CosineGated(Adam):
    """Adam of σ(age)·Δ."""

    def _scale(self, age: float) -> float:
        gate = (1 + math.cos(math.pi * min(age / (self.max_versions + 1), 1.0))) / 2
        return gate * math.exp(-self.settings.age_decay * age)


REGISTRY: dict[str, type[Outer]] = {
    "sgd": Sgd,
    "nesterov": Nesterov,
    "adamw": Adam,
    "cosine-gated": CosineGated,
}


def create(settings: OuterSettings, elements: int, *, max_versions: int = 16) -> Outer:
    """The outer optimizer that ``settings`` (spec.sync.outer) names, for a fragment of
    ``elements``. ``max_versions``: staleness.maxVersions. Raises OuterError."""
    kind = REGISTRY.get(settings.optimizer)
    if kind is None:
        raise OuterError(f"sync.outer.optimizer: {settings.optimizer!r} is none of {', '.join(REGISTRY)}")
    return kind(settings, elements, max_versions)


def _run(target: kernels.Kernel, threads: int, *arguments: Any) -> None:
    elements = arguments[-1].size
    work: Callable[[int, int], None] = lambda first, last: target(*arguments, first, last)  # noqa: E731
    kernels.share(work, elements, max(1, -(-elements // max(1, threads))), threads)


# ---------------------------------------------------------------- kernels


@kernel("float32", F32_OUT, F32_IN, RANGE)
def _sgd(lr: np.float32, theta: Float32s, delta: Float32s, first: int, last: int) -> None:
    for i in range(np.uint64(first), np.uint64(last)):
        theta[i] -= lr * delta[i]


@kernel("float32", "float32", F32_OUT, F32_IN, F32_OUT, RANGE)
def _nesterov(
    lr: np.float32,
    mu: np.float32,
    theta: Float32s,
    delta: Float32s,
    momentum: Float32s,
    first: int,
    last: int,
) -> None:
    for i in range(np.uint64(first), np.uint64(last)):
        b = mu * momentum[i] + delta[i]
        momentum[i] = b
        theta[i] -= lr * (delta[i] + mu * b)


@kernel(*["float32"] * 8, F32_OUT, F32_IN, F32_OUT, F32_OUT, RANGE)
def _adam(
    beta1: np.float32,
    rest1: np.float32,
    beta2: np.float32,
    rest2: np.float32,
    rate: np.float32,
    root: np.float32,
    eps: np.float32,
    scale: np.float32,
    theta: Float32s,
    delta: Float32s,
    moment1: Float32s,
    moment2: Float32s,
    first: int,
    last: int,
) -> None:
    for i in range(np.uint64(first), np.uint64(last)):
        g = scale * delta[i]
        m = beta1 * moment1[i] + rest1 * g
        v = beta2 * moment2[i] + rest2 * (g * g)
        moment1[i] = m
        moment2[i] = v
        theta[i] -= rate * m / (np.sqrt(v) * root + eps)
