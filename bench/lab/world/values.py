"""Learners and syncer with real parameters: what the programs do with numbers, done here with the same code.

On the learner: Δ = base - θ, with error feedback, encoded (``diloco_worker.net.transfers.encode_push``). On the
syncer: decoded, merged, the outer step, and the broadcast's encoding (``diloco_syncer.runtime.global_model``). Vectors
are float32[elements of their fragment].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco_protocol.arrays import codec
from diloco_protocol.arrays.kernels import Bytes, Float32s, Float64s
from diloco_protocol.arrays.layout import Layout
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.wire.records import Payload, PushHeader, PushPlan, StepReport
from diloco_syncer.core import events as ev
from diloco_syncer.numerics.merge import piece_squares
from diloco_syncer.numerics.outer import Outer
from diloco_syncer.runtime.global_model import Broadcast, GlobalModel, first_records
from diloco_syncer.store.records import MergeRecord
from diloco_worker.core.adoption import Decision, Kind
from lab.world.parts import Replica


class LearnerValues:
    """One process's parameters, the bases under them, and the snapshots whose fate is open."""

    def __init__(self, replica: Replica, fragments: int, encoding: str, error_feedback: bool) -> None:
        from diloco_worker.net.error_feedback import ErrorFeedback  # loads torch

        self.replica = replica
        self._encoding = encoding
        self._feedback = ErrorFeedback(fragments, error_feedback)
        self._bases: list[Float32s | None] = [None] * fragments
        self._snapshots: dict[tuple[int, int], Float32s] = {}

    def begin_tenure(self) -> None:
        """Forget the bases: they are taken from the syncer."""
        self._bases = [None] * len(self._bases)
        self._snapshots.clear()
        self._feedback.forget_open_pushes()

    def move(self, decision: Decision, new: Float32s) -> None:
        """Move the parameters to the base ``new`` as the adoption rule decided."""
        fragment, base = decision.fragment, self._bases[decision.fragment]
        reference = self._snapshots[fragment, decision.reference] if decision.kind is Kind.KEEP else base
        self.replica.move(fragment, decision.kind, new, reference, decision.alpha)
        for sequence in decision.move:
            assert base is not None
            self._snapshots[fragment, sequence] = self._snapshots[fragment, sequence] + (new - base)
        self._bases[fragment] = new
        self.resolve_pushes(fragment, decision.merged, decision.forget)

    def take_snapshot(self, plan: PushPlan, given_up: Sequence[int]) -> None:
        """Keep θ_p as it is now, for this push."""
        self.resolve_pushes(plan.fragment, 0, given_up)
        self._snapshots[plan.fragment, plan.sequence] = self.replica.snapshot(plan.fragment)
        self._feedback.expect_push(plan.fragment, plan.sequence)

    def encode(self, plan: PushPlan, report: StepReport) -> Bytes:
        """The push's bytes."""
        from diloco_worker.fragments import Vector
        from diloco_worker.net.transfers import Push, encode_push

        base = self._bases[plan.fragment]
        assert base is not None
        theta = Vector.from_array(self._snapshots[plan.fragment, plan.sequence])
        return encode_push(Push(plan, Vector.from_array(base), theta, report), self._encoding, self._feedback)

    def resolve_pushes(self, fragment: int, merged: int, forget: Sequence[int]) -> None:
        """The fate of pushes is known: ``merged`` (0: none) was merged, and ``forget`` are not needed any more."""
        for sequence in forget:
            self._snapshots.pop((fragment, sequence), None)
        if merged or forget:
            self._feedback.resolve_pushes(fragment, merged, forget)


@dataclass(slots=True)
class _Held:
    delta: Float32s
    squares: Float64s


@dataclass
class MergedVersions:
    """The syncer's versions with their values. ``initial``: version 0, one vector for each fragment. ``on_publish``:
    called with the fragment when a version comes into force. ``optimizer``: instead of the job's outer optimizer."""

    job: DiLoCoJob
    layout: Layout
    initial: Sequence[Float32s]
    on_publish: Callable[[int], None] = lambda fragment: None
    optimizer: Outer | None = None
    layout_digest: str = field(init=False)
    elements: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.layout_digest = self.layout.digest
        self.elements = tuple(self.layout.elements(p) for p in range(len(self.layout)))
        self._model = GlobalModel(self.job, 1, self.optimizer)
        first = {p: np.array(values, np.float32) for p, values in enumerate(self.initial)}
        self._model.begin(self.layout, first_records(self.job.metadata.name, 1, first))
        self._held: dict[int, _Held] = {}
        self._made: dict[int, tuple[MergeRecord, Broadcast]] = {}
        self._merges = 0

    def theta(self, fragment: int) -> Float32s:
        """Θ_p of the newest version."""
        return self._model.newest[fragment].theta

    def outer_state(self, fragment: int) -> Mapping[str, NDArray[Any]]:
        """The outer optimizer's state of the newest version."""
        return self._model.newest[fragment].outer

    def delta(self, handle: int) -> Float32s:
        """A copy of a push's decoded values."""
        return self._held[handle].delta.copy()

    def replace_delta(self, handle: int, fragment: int, delta: Float32s) -> None:
        """Have other values merged in place of a push's."""
        self._held[handle] = _Held(delta, piece_squares(self.layout.fragments[fragment], delta))

    def receive(self, handle: int, header: PushHeader, encoded: Bytes | None) -> tuple[float, bool, float]:
        assert encoded is not None
        self.replace_delta(
            handle, header.fragment, codec.decode(encoded, header.encoding, self.elements[header.fragment])
        )
        norm = math.sqrt(math.fsum(self._held[handle].squares))
        return norm, math.isfinite(norm), self._model.growth(header.fragment, self._held[handle].squares)

    def release(self, handle: int) -> None:
        self._held.pop(handle, None)

    def merge(self, action: ev.Merge, epoch: int) -> tuple[float, ...]:
        held = [self._held[responder.handle] for responder in action.responders]
        self._merges += 1
        deltas, squares = [one.delta for one in held], [one.squares for one in held]
        record, broadcast = self._model.merge(action, deltas, squares, epoch, self._merges)
        self._made[action.fragment] = record, broadcast
        return tuple(responder.norm for responder in record.responders)

    def publish(self, fragment: int) -> None:
        record, broadcast = self._made.pop(fragment)
        self._model.publish(record, broadcast, 0.0)
        self.on_publish(fragment)

    def payload(self, fragment: int) -> Payload:
        return self._model.broadcasts[fragment].full_payload

    def download(self, fragment: int, held: int | None) -> tuple[int, Float32s | None]:
        broadcast = self._model.broadcasts[fragment]
        if broadcast.delta is not None and held == broadcast.version - 1:
            # Who adds the update to the version before has the syncer's own bits.
            return broadcast.delta.nbytes, self.theta(fragment)
        assert broadcast.full is not None
        encoding = self._model.full_encoding
        return broadcast.full.nbytes, codec.decode(broadcast.full, encoding, self.elements[fragment])
