"""Outer optimizers: what a merged outer gradient does to the global parameters.

Theory of operation
-------------------
``step`` takes a fragment's global parameters Θ, its merged outer gradient Δ = base − θ (uphill, as a gradient is), and
the optimizer's state for it. It changes Θ and returns the next state. The state is plain arrays and part of every merge
record; from a copy of it the job goes on bit for bit. All arithmetic is float32, element by element, with one rounding
per operation: the result is the same on every machine and for any number of threads.

* ``sgd``: Θ ← Θ − η·Δ.
* ``nesterov``: b ← μ·b + Δ, Θ ← Θ − η·(Δ + μ·b), which is torch.optim.SGD(nesterov=True)
  with Δ for the gradient (DiLoCo, arXiv 2311.08105).
* ``adamw``: Adam with bias correction; torch.optim.AdamW(weight_decay=0).
* ``cosine-gated``: Cosine-Gated Adam-Decay (arXiv 2605.09126). Before Δ enters Adam's two moments it is scaled by
  σ(τ) = γ(τ)·e^(−α·τ): τ is its age in versions, α is ``age_decay``, and the gate γ(τ) = (1 + cos(π·min(τ/τ_c, 1)))/2
  closes smoothly at the cutoff τ_c. At age 0 it is Adam. Three choices are ours. The paper scales each push; here the
  merged Δ is scaled once, by the weighted mean age of its pushes. The cutoff is ``staleness.maxVersions`` + 1, so
  that every accepted push counts. Adam's bias correction counts merges, not σ.

A job that is given another optimizer begins that one's state anew. Another learning rate or
momentum factor goes on with the same state.

``restart_every`` n clears the momentum before every n-th merge but the first
(outer-momentum restarting, arXiv 2605.28585). With Adam that is the first moment and
its bias correction; the second moment, which is a scale, stays (ours).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco_protocol.arrays import kernels
from diloco_protocol.arrays.kernels import F32_IN, F32_OUT, RANGE, Float32s, kernel
from diloco_protocol.merging import OuterSettings


class OuterError(ValueError):
    """A state that belongs to another optimizer or fragment, or vectors of the wrong size."""


State = dict[str, NDArray[Any]]  # of one fragment: float32 vectors, and merges (int64[1])


@dataclass(frozen=True, slots=True)
class _Moment:
    """When a step is made. ``merges`` and ``since`` (the momentum was clear) count this one."""

    age: float
    merges: int
    since: int
    threads: int


class Outer:
    """An outer optimizer without its state, so one serves all fragments. Subclasses name
    the vectors of the state and make the step."""

    vectors: tuple[str, ...] = ()
    momentum: tuple[str, ...] = ()  # those that a restart clears

    def __init__(self, settings: OuterSettings, max_versions: int) -> None:
        self.settings = settings
        self.max_versions = max_versions

    def owns(self, state: Mapping[str, Any]) -> bool:
        """Whether the state is one of this optimizer's, by its names; one that is empty is anybody's."""
        return not state or set(state) == {"merges", *self.vectors}

    def step(
        self,
        theta: Float32s,
        delta: Float32s,
        state: State,
        *,
        ages: Sequence[float] = (),
        weights: Sequence[float] = (),
        threads: int = 1,
    ) -> State:
        """One merge: ``theta`` (float32[elements], contiguous) and the vectors in ``state``
        are changed in place, and the state for the next step is returned.

        ``delta``: float32[elements], the merged outer gradient. ``state``: what the step before returned, or a copy
        of it from a checkpoint; empty at the fragment's first merge. ``ages`` in versions and ``weights`` (sum 1): of
        the pushes in it. Raises OuterError, and then nothing has changed.
        """
        elements = theta.size
        _check_vector("theta", theta, elements, writable=True)
        _check_vector("delta", delta, elements)
        age = math.fsum(a * w for a, w in zip(ages, weights, strict=True))
        if not (age >= 0 and math.isfinite(age)):
            raise OuterError(f"ages {list(ages)}: not numbers of versions")
        merges = self.check(state, elements)
        fresh: State = {name: np.zeros(elements, np.float32) for name in self.vectors}
        state = {**fresh, **state, "merges": np.array([merges + 1], np.int64)}
        since = merges % self.settings.restart_every if self.settings.restart_every else merges
        if since == 0:
            for name in self.momentum:
                state[name].fill(0)
        self._step(theta, delta, state, _Moment(age, merges + 1, since + 1, threads))
        return state

    def check(self, state: Mapping[str, NDArray[Any]], elements: int) -> int:
        """Whether ``state`` is one of this optimizer and a fragment of ``elements``: returns
        how many merges it has seen, raises OuterError. An empty one has seen none."""
        if not state:
            return 0
        name = self.settings.optimizer
        if not self.owns(state):
            raise OuterError(
                f"outer optimizer {name}: the state has {', '.join(sorted(state))},"
                f" and it needs {', '.join(sorted(('merges', *self.vectors)))}; was sync.outer changed?"
            )
        merges = state["merges"]
        if merges.dtype != np.int64 or merges.shape != (1,) or merges[0] < 1:
            raise OuterError(f"outer optimizer {name}: merges is not one whole number of at least 1")
        for key in self.vectors:
            _check_vector(f"outer optimizer {name}: {key}", state[key], elements, writable=True)
        return int(merges[0])

    def _step(self, theta: Float32s, delta: Float32s, state: State, at: _Moment) -> None:
        raise NotImplementedError


class Sgd(Outer):
    """Θ ← Θ − η·Δ."""

    def _step(self, theta: Float32s, delta: Float32s, state: State, at: _Moment) -> None:
        lr = np.float32(self.settings.lr)
        _run(_sgd, at.threads, lr, theta, delta)


class Nesterov(Outer):
    """b ← μ·b + Δ, Θ ← Θ − η·(Δ + μ·b)."""

    vectors = ("momentum",)
    momentum = ("momentum",)

    def _step(self, theta: Float32s, delta: Float32s, state: State, at: _Moment) -> None:
        lr, mu = np.float32(self.settings.lr), np.float32(self.settings.momentum)
        _run(_nesterov, at.threads, lr, mu, theta, delta, state["momentum"])


class Adam(Outer):
    """m ← β₁·m + (1−β₁)·g, v ← β₂·v + (1−β₂)·g², Θ ← Θ − η·m̂/(√v̂ + ε) with g = Δ."""

    vectors = ("first", "second")
    momentum = ("first",)

    def _scale(self, age: float) -> float:
        return 1.0

    def _step(self, theta: Float32s, delta: Float32s, state: State, at: _Moment) -> None:
        beta1, beta2 = self.settings.betas
        rate = self.settings.lr / (1 - beta1**at.since)
        root = 1 / math.sqrt(1 - beta2**at.merges)
        constants = (beta1, 1 - beta1, beta2, 1 - beta2, rate, root, self.settings.eps, self._scale(at.age))
        first, second = state["first"], state["second"]
        _run(_adam, at.threads, tuple(map(np.float32, constants)), theta, delta, first, second)


class CosineGated(Adam):
    """Adam of σ(age)·Δ."""

    def _scale(self, age: float) -> float:
        gate = (1 + math.cos(math.pi * min(age / (self.max_versions + 1), 1.0))) / 2
        return gate * math.exp(-self.settings.age_decay * age)


REGISTRY: dict[str, type[Outer]] = {"sgd": Sgd, "nesterov": Nesterov, "adamw": Adam, "cosine-gated": CosineGated}


def make(settings: OuterSettings, *, max_versions: int = 16) -> Outer:
    """The outer optimizer that ``settings`` (of spec.sync.outer) names. ``max_versions``:
    staleness.maxVersions."""
    return REGISTRY[settings.optimizer](settings, max_versions)


def _check_vector(name: str, vector: NDArray[Any], elements: int, writable: bool = False) -> None:
    if vector.dtype != np.float32 or vector.shape != (elements,) or not vector.flags.c_contiguous:
        raise OuterError(f"{name}: {vector.dtype} of shape {vector.shape}, fragment: {elements} float32")
    if writable and not vector.flags.writeable:
        raise OuterError(f"{name}: read-only")


def _run(target: kernels.Kernel, threads: int, *arguments: Any) -> None:
    kernels.run(target, arguments[-1].size, threads, *arguments, align=kernels.BLOCK)


# ---------------------------------------------------------------- kernels


@kernel("float32", F32_OUT, F32_IN, RANGE)
def _sgd(lr: np.float32, theta: Float32s, delta: Float32s, first: int, last: int) -> None:
    for i in range(np.uint64(first), np.uint64(last)):
        theta[i] -= lr * delta[i]


@kernel("float32", "float32", F32_OUT, F32_IN, F32_OUT, RANGE)
def _nesterov(
    lr: np.float32, mu: np.float32, theta: Float32s, delta: Float32s, momentum: Float32s, first: int, last: int
) -> None:
    for i in range(np.uint64(first), np.uint64(last)):
        b = mu * momentum[i] + delta[i]
        momentum[i] = b
        theta[i] -= lr * (delta[i] + mu * b)


@kernel("UniTuple(float32, 8)", F32_OUT, F32_IN, F32_OUT, F32_OUT, RANGE)
def _adam(
    constants: tuple[np.float32, ...],
    theta: Float32s,
    delta: Float32s,
    moment1: Float32s,
    moment2: Float32s,
    first: int,
    last: int,
) -> None:
    beta1, rest1, beta2, rest2, rate, root, eps, scale = constants
    for i in range(np.uint64(first), np.uint64(last)):
        g = scale * delta[i]
        m = beta1 * moment1[i] + rest1 * g
        v = beta2 * moment2[i] + rest2 * (g * g)
        moment1[i] = m
        moment2[i] = v
        theta[i] -= rate * m / (np.sqrt(v) * root + eps)
