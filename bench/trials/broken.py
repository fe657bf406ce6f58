"""Broken learners on trial: what one learner of a job pushes in place of its work.

The first learner that takes a seat is the broken one, from its first push to its last. It trains as the others do; what
is broken is Δ, between its training and the job's encoding of pushes. ``FAULTS`` has the ways by name.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from diloco_protocol.arrays import codec
from diloco_protocol.arrays.kernels import Bytes, Float32s
from diloco_protocol.wire.records import PushPlan, StepReport
from lab.world.parts import Replica
from lab.world.values import LearnerValues

HUGE = 3e38


def _times(factor: float) -> Callable[[Float32s, int, Float32s], Float32s]:
    return lambda delta, fragment, first: np.float32(factor) * delta


def _noise(delta: Float32s, fragment: int, first: Float32s) -> Float32s:
    """Of the same norm."""
    noise = np.random.default_rng(fragment).standard_normal(delta.size, np.float32)
    return noise * np.float32(np.linalg.norm(delta) / np.linalg.norm(noise))


FAULTS: dict[str, Callable[[Float32s, int, Float32s], Float32s]] = {  # of Δ, its fragment, and the fragment's first Δ
    "its work": _times(1),
    "× 10": _times(10),
    "× 100": _times(100),
    "× -1": _times(-1),
    "× -5": _times(-5),
    "noise of the same norm": _noise,
    "always its first Δ": lambda delta, fragment, first: first,
    "× 1e-6": _times(1e-6),
    "3e38": lambda delta, fragment, first: np.full_like(delta, HUGE),
}


class BrokenValues(LearnerValues):
    """A learner whose pushes are broken in one of the ``FAULTS``."""

    fault = "its work"

    def __init__(self, replica: Replica, fragments: int, encoding: str, error_feedback: bool) -> None:
        super().__init__(replica, fragments, encoding, error_feedback)
        self._first: dict[int, Float32s] = {}

    def encode(self, plan: PushPlan, report: StepReport) -> Bytes:
        base = self._bases[plan.fragment]
        assert base is not None
        delta = base - self._snapshots[plan.fragment, plan.sequence]
        first = self._first.setdefault(plan.fragment, delta)
        return codec.encode(FAULTS[self.fault](delta, plan.fragment, first), self._encoding)


def first_is_broken(fault: str) -> Callable[[Replica, int, str, bool], LearnerValues]:
    """What makes a world's learners, of which the first is broken."""
    there: list[LearnerValues] = []

    def make(replica: Replica, fragments: int, encoding: str, error_feedback: bool) -> LearnerValues:
        made = (LearnerValues if there else BrokenValues)(replica, fragments, encoding, error_feedback)
        if isinstance(made, BrokenValues):
            made.fault = fault
        there.append(made)
        return made

    return make
