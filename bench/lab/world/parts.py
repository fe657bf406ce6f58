"""What a world is given: what learners train, and what the syncer keeps of the model. And both without any values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from diloco_protocol.arrays import codec
from diloco_protocol.arrays.kernels import Bytes, Float32s
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.wire.records import Payload, PushHeader
from diloco_syncer.core import events as ev
from diloco_worker.core.adoption import Kind


class Replica(Protocol):
    """One learner's copy of the model, with its inner optimizer. Vectors are float32[elements of the fragment]."""

    def snapshot(self, fragment: int) -> Float32s:
        """A copy of θ_p."""

    def move(self, fragment: int, kind: Kind, new: Float32s, reference: Float32s | None, alpha: float) -> None:
        """Move θ_p to the base ``new`` as ``kind`` says (core/adoption.py of the worker)."""

    def optimizer_state(self) -> object:
        """A copy of the inner optimizer's state."""

    def set_optimizer_state(self, state: object) -> None:
        """Go on from another learner's state."""


@dataclass(frozen=True, slots=True)
class StepOrder:
    """A step that a learner has made the time for: the slot's step ``step`` (counted from 0), when ``progress`` (0 to
    1) of the job's stop was reached as far as the learner knows. ``since_start``: steps of this process."""

    replica: Replica | None
    slot: int
    step: int
    progress: float
    since_start: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step trained; ``loss`` in nats per prediction."""

    tokens: int
    loss: float = math.nan


class Training(Protocol):
    """What the learners of a world train."""

    def open_replica(self, slot: int) -> Replica | None:
        """The copy of a process that begins in the slot; None: there are no values."""

    def close_replica(self, replica: Replica) -> None:
        """The process is gone."""

    def train(self, orders: Sequence[StepOrder]) -> Sequence[StepResult]:
        """Make the steps of learners that end theirs at the same time, one of each learner."""


class Versions(Protocol):
    """What the syncer holds of the model: its newest versions, and pushes that wait for their merge."""

    layout_digest: str
    elements: tuple[int, ...]

    def receive(self, handle: int, header: PushHeader, encoded: Bytes | None) -> tuple[float, bool, float]:
        """Keep a push under ``handle``; its norm, whether it is finite, and its size beside the parameters
        (``merge.growth``)."""

    def release(self, handle: int) -> None:
        """The push is not needed any more."""

    def merge(self, action: ev.Merge, epoch: int) -> tuple[float, ...]:
        """Make the next version, which is in force from ``publish`` on; the norms of the pushes."""

    def publish(self, fragment: int) -> None:
        """Put the version that ``merge`` made in force."""

    def payload(self, fragment: int) -> Payload:
        """What stands for the bytes of the newest version."""

    def download(self, fragment: int, held: int | None) -> tuple[int, Float32s | None]:
        """The newest version as a learner gets it that has version ``held`` (None: none): bytes, and values."""


class CountedSteps:
    """Steps of ``tokens`` tokens each, and nothing behind them."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def open_replica(self, slot: int) -> Replica | None:
        return None

    def close_replica(self, replica: Replica) -> None:
        pass

    def train(self, orders: Sequence[StepOrder]) -> Sequence[StepResult]:
        return [StepResult(self._tokens)] * len(orders)


class CountedVersions:
    """Versions of ``elements`` (per fragment) values each, of which only the bytes are counted."""

    def __init__(self, job: DiLoCoJob, elements: Sequence[int], versions: Sequence[int] = ()) -> None:
        """``versions``: of a job that goes on."""
        self.layout_digest = "0" * 64
        self.elements = tuple(elements)
        self._versions = list(versions) or [0] * len(elements)
        self._down = job.spec.sync.compression.down

    def receive(self, handle: int, header: PushHeader, encoded: Bytes | None) -> tuple[float, bool, float]:
        return 1.0, True, 0.0

    def release(self, handle: int) -> None:
        pass

    def merge(self, action: ev.Merge, epoch: int) -> tuple[float, ...]:
        return (1.0,) * len(action.responders)

    def publish(self, fragment: int) -> None:
        self._versions[fragment] += 1

    def payload(self, fragment: int) -> Payload:
        return Payload("none", self._bytes("float32", fragment), self._versions[fragment])

    def download(self, fragment: int, held: int | None) -> tuple[int, Float32s | None]:
        update = self._down.startswith("delta-")
        if update and held == self._versions[fragment] - 1:
            return self._bytes(self._down.removeprefix("delta-"), fragment), None
        return self._bytes("float32" if update else self._down, fragment), None

    def _bytes(self, encoding: str, fragment: int) -> int:
        return codec.encoded_bytes(encoding, self.elements[fragment])
