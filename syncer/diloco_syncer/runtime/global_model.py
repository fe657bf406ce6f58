"""The global model: Θ, the outer optimizer's state, and what is broadcast of them.

Theory of operation. A merge is three steps, none of which changes what is in force before the last: ``merge``
computes the record of the next version from the pushes; the caller makes the record durable; ``publish`` puts it in
force. So a merge whose record cannot be written is repeated or dropped without a trace.

Broadcasts (``compression.down``). With float32 and bfloat16 Θ_p itself is sent. With ``delta-int8`` and
``delta-int4`` the update u = Θ' - Θ is quantised, plus the residual r that earlier quantisations
dropped. The *dequantised* update is applied here too, so whoever holds the version before holds the
same bits as the syncer afterwards; r becomes what was dropped, and is part of the record. A learner
that lacks the version before downloads Θ_p whole, in float32. All arithmetic is float32.

The last merges, after which nobody trains (``ev.Merge.last``). Work that is ``OLD_VERSIONS`` old was made on
parameters that others have moved since, and no step follows that would repair an outer step too far along it. So such
a merge is the weighted mean, at rate 1 and without momentum: Θ ← Θ − Σ w·Δ, whatever the job's method and outer step;
with the median it is the mean of pushes that are cut to the median length.

Of each fragment the newest two broadcasts can be downloaded (where updates are broadcast, the newest whole and
two updates), and older ones whose download has begun and is not finished (active_downloads.py): at most
``MAX_SUPERSEDED`` of a fragment, and half a model in all (but ``MAX_SUPERSEDED`` where it has few fragments).
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from diloco_protocol.arrays import codec
from diloco_protocol.arrays.kernels import Float64s
from diloco_protocol.arrays.layout import Layout, tensors_to_json
from diloco_protocol.merging import choose_merge, is_isotropic, merge_text
from diloco_protocol.resources import record_floats
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.wire import bulk, limits
from diloco_protocol.wire.records import Payload, Receipt
from diloco_syncer.core import events as ev
from diloco_syncer.numerics import isotropic, merge, outer
from diloco_syncer.runtime.active_downloads import ActiveDownloads
from diloco_syncer.runtime.buffer_pool import BufferPool
from diloco_syncer.store.records import Array, Floats, MergeRecord, RecordedPush, Recovered, theta_digest
from diloco_syncer.version_tags import Announced, VersionTags, content_digest

OLD_VERSIONS = 2  # the mean age from which on a last merge is the mean alone
MAX_SUPERSEDED = 4  # versions of one fragment kept for slow readers, beside the newest two


class Diverged(Exception):
    """A merge would make Θ infinite or NaN; the job cannot go on from it."""


@dataclass(frozen=True, slots=True)
class Broadcast:
    """One version of a fragment as it is sent. ``delta`` None: only the whole is to be had."""

    fragment: int
    version: int
    full: Array | None  # the encoded bytes; None: of this version only the delta is to be had any more
    full_payload: Payload
    delta: Array | None = None
    delta_payload: Payload | None = None
    digest: bytes = b""  # of all of ``full``
    receipt: bytes = b""  # of a version that is not the newest any more (the newest's is made when it is asked for)
    checksums: dict[tuple[int, ...], int] = field(default_factory=dict)  # of its parts, by what of it was asked for


class GlobalModel:
    """Θ and the outer state of all fragments, at their newest durable versions; empty until version 0 exists.

    ``layout`` None: there is no version 0 yet. ``newest``: the record of each fragment's newest version.
    ``broadcasts``: what is sent of it. ``previous``: the broadcast before. ``superseded``: those before
    that which are still being downloaded. ``frozen``: the name in the store of the frozen parameters,
    ``frozen_digest`` their digest.
    ``outer_state_reset``: the records' outer state was another optimizer's, and begins anew. ``optimizer``: instead of
    the outer optimizer that the job names. ``control_key``: by which versions are known again (version_tags.py).
    ``buffers``: the memory of versions and what is sent of them, which comes back when nobody reads them any more.
    """

    def __init__(
        self, job: DiLoCoJob, threads: int, optimizer: outer.Outer | None = None, control_key: bytes = b""
    ) -> None:
        self._job = job.metadata.name
        self._tags = VersionTags(control_key, self._job)
        self._spec = job.spec
        self._given = optimizer
        self.threads = threads
        self._down = job.spec.sync.compression.down
        self._choose_merge(0)
        self.layout: Layout | None = None
        self.frozen = ""
        self.frozen_digest = ""
        self.outer_state_reset = False
        self.newest: list[MergeRecord] = []
        self.broadcasts: list[Broadcast] = []
        self.previous: list[Broadcast | None] = []
        self.superseded: list[list[Broadcast]] = []
        self._squares: dict[int, tuple[int, Float64s]] = {}  # by fragment: a version, and ``piece_squares`` of its Θ
        self.downloads = ActiveDownloads()
        self.buffers = BufferPool()

    def record_bytes(self, layout: Layout) -> int:
        """Of the arrays of a record of the layout's largest fragment."""
        return 4 * record_floats(self._spec.sync) * max(layout.elements(p) for p in range(len(layout)))

    def begin(
        self,
        layout: Layout,
        newest: Sequence[MergeRecord],
        frozen: str = "",
        frozen_digest: str = "",
        broadcasts: Sequence[Broadcast] | None = None,
    ) -> None:
        """Go on from these records, one for each fragment. ``broadcasts``: what ``encode`` has made of them; None: it
        is made here, which takes long.

        Raises ``outer.OuterError`` if a record's outer state does not fit its fragment.
        """
        self._choose_merge(layout.total_elements)
        records = [record if self._outer.owns(record.outer) else replace(record, outer={}) for record in newest]
        for record in records:
            self._outer.check(record.outer, layout.elements(record.fragment))
        self.outer_state_reset = any(not self._outer.owns(record.outer) for record in newest)
        self.broadcasts = list(broadcasts or (self.encode(record, None) for record in records))
        self.previous = [None] * len(records)
        self.superseded = [[] for _ in records]
        self.newest, self.layout, self.frozen, self.frozen_digest = records, layout, frozen, frozen_digest

    def _choose_merge(self, parameters: int) -> None:
        """Choose how a model of so many parameters is merged, and by which outer optimizer."""
        self._method, settings = choose_merge(self._spec, parameters)
        self._outer = self._given or outer.make(settings, max_versions=self._spec.sync.staleness.max_versions)

    @property
    def merging(self) -> str:
        """How pushes are merged and what the outer step is, in words."""
        return merge_text(self._method, self._outer.settings)

    @property
    def versions(self) -> list[int]:
        return [record.version for record in self.newest]

    def tensors(self) -> bytes:
        """The layout's tensors, for a learner that is refused because it has others; empty: there is no layout yet, or
        it has more than a message may hold."""
        text = tensors_to_json(self.layout.tensors) if self.layout is not None else b""
        return text if len(text) <= limits.MAX_CONTROL_BYTES // 2 else b""

    @property
    def delta_encoding(self) -> str | None:
        """int8 or int4 where updates are broadcast, else None."""
        return self._down.removeprefix("delta-") if self._down.startswith("delta-") else None

    @property
    def full_encoding(self) -> str:
        """How a whole fragment is broadcast."""
        return "float32" if self.delta_encoding is not None else self._down

    def merge(
        self, action: ev.Merge, deltas: Sequence[merge.Delta], squares: Sequence[Float64s], epoch: int, number: int
    ) -> tuple[MergeRecord, Broadcast]:
        """Merge the pushes (float32[elements] or encoded, in the action's order; ``squares``: ``merge.piece_squares``
        of each) into the next version.

        Raises ``Diverged``. Takes long; call it in a thread.
        """
        began = time.perf_counter()
        old = self.newest[action.fragment]
        if action.version != old.version + 1:
            raise ValueError(f"fragment {action.fragment}: {action.version} does not follow {old.version}")
        assert self.layout is not None
        pieces = self.layout.fragments[action.fragment]
        weights, ages = [r.weight for r in action.responders], [r.age for r in action.responders]
        plain = action.last and math.fsum(map(operator.mul, weights, ages)) >= OLD_VERSIONS
        method: str = self._method
        if plain:
            method = "clipped" if method.endswith("median") else "mean"
        slots = [r.header.slot for r in action.responders]
        merged = merge.merge(
            pieces,
            deltas,
            weights,
            method,
            squares=squares,
            out=self.buffers.allocate(old.theta.nbytes).view(np.float32),
            slots=slots,
            threads=self.threads,
        )
        if not plain and is_isotropic(self._method):
            spans = isotropic.find_matrices(self.layout, pieces)
            isotropic.equalize_singular_values(merged.delta, spans, self.threads)
        theta, state = self._copy(old.theta), {name: self._copy(array) for name, array in old.outer.items()}
        if plain:
            theta -= merged.delta
        else:
            state = self._outer.step(theta, merged.delta, state, ages=ages, weights=weights, threads=self.threads)
        # Where whole values are broadcast nothing is dropped, and what was dropped once is out of date.
        feedback: Floats | None = None
        delta: Array | None = None
        if self.delta_encoding is not None:
            theta, feedback, delta = self._quantised(old, theta, self.delta_encoding)
        theta_squares = merge.piece_squares(pieces, theta, threads=self.threads)
        if not np.isfinite(theta_squares).all():
            raise Diverged(
                f"fragment {action.fragment} would become infinite in version {action.version}: the training diverged; "
                "lower the learning rates, or sync.normGate.factor"
            )
        self._squares[action.fragment] = action.version, theta_squares
        record = MergeRecord(
            job=self._job,
            epoch=epoch,
            fragment=action.fragment,
            version=action.version,
            theta=theta,
            outer=state,
            feedback=feedback,
            responders=tuple(
                RecordedPush(r.header, r.weight, r.age, norm, batch=r.batch)
                for r, norm in zip(action.responders, merged.norms, strict=True)
            ),
            number=number,
            round=action.round,
            time=time.time(),
            quorum_seconds=action.quorum_seconds,
            waited_seconds=action.waited_seconds,
            merge_seconds=time.perf_counter() - began,
            job_tokens=action.job_tokens,
            digest=theta_digest(theta),
            before=old.body(),
            norm=merged.norm,
        )
        return record, self.encode(record, delta)

    def growth(self, fragment: int, squares: Float64s) -> float:
        """How large a push is beside Θ (``merge.growth``), by ``merge.piece_squares`` of it."""
        assert self.layout is not None
        theta, pieces = self.theta_squares(self.newest[fragment]), self.layout.fragments[fragment]
        seen = dict(self._squares)
        elements = sum(self.layout.elements(p) for p in seen)
        usual = math.fsum(float(theta.sum()) for _, theta in seen.values()) / elements
        return merge.growth(pieces, squares, theta, usual)

    def theta_squares(self, record: MergeRecord) -> Float64s:
        """``merge.piece_squares`` of a version's Θ, which are taken once. May take long."""
        assert self.layout is not None
        known = self._squares.get(record.fragment)
        if known is None or known[0] != record.version:
            pieces = self.layout.fragments[record.fragment]
            known = record.version, merge.piece_squares(pieces, record.theta, threads=self.threads)
            self._squares[record.fragment] = known
        return known[1]

    def know_squares(self, fragment: int, version: int, squares: Float64s) -> None:
        """``piece_squares`` of a version's Θ, which is not here."""
        self._squares[fragment] = version, squares

    def _copy(self, array: Floats) -> Floats:
        copied: Floats = self.buffers.allocate(array.nbytes).view(array.dtype)
        copied[:] = array
        return copied

    def _quantised(self, old: MergeRecord, theta: Floats, encoding: str) -> tuple[Floats, Floats, Array]:
        """The version in whole, what was dropped, and the update. ``theta`` is overwritten, and is the first."""
        update = np.subtract(theta, old.theta, out=theta)
        encoded, dropped = codec.encode_with_feedback(update, old.feedback, encoding, threads=self.threads)
        return codec.apply_delta(old.theta, encoded, encoding, out=theta), dropped, encoded

    def encode(self, record: MergeRecord, delta: Array | None) -> Broadcast:
        """What is sent of a version, with checksums. In float32 it is the record's own array, which never changes."""
        encoding = self.full_encoding
        if encoding == "float32":
            full = record.theta.view(np.uint8)
        else:
            out = self.buffers.allocate(codec.encoded_bytes(encoding, record.theta.size))
            full = codec.encode(record.theta, encoding, out, threads=self.threads)
        made = None
        if delta is not None and self.delta_encoding is not None:
            made = Payload(self.delta_encoding, delta.nbytes, bulk.checksum(delta))
        payload = Payload(encoding, full.nbytes, bulk.checksum(full))
        if record.sent.partition(":")[0] != encoding:
            known = record.digest if encoding == "float32" else ""
            record.sent = f"{encoding}:{known or content_digest(full).hex()}"
        digest = bytes.fromhex(record.sent.partition(":")[2])
        return Broadcast(record.fragment, record.version, full, payload, delta=delta, delta_payload=made, digest=digest)

    # ------------------------------------------------------------- what proves a version

    def make_receipt(self, broadcast: Broadcast, rows: Receipt) -> bytes:
        """The receipt that goes with a version's bytes; empty where it would be too large."""
        assert self.layout is not None
        announced = Announced(broadcast.version, broadcast.digest, rows)
        model = model_name(self.layout, self.frozen)
        return self._tags.make(announced, broadcast.fragment, broadcast.full_payload.encoding, model)

    def check_receipt(self, data: bytes, fragment: int, layout: Layout, frozen: str) -> Announced:
        """What a receipt that a learner gives back proves, of the model with this layout and these frozen parameters.
        Raises ``WireError`` if no syncer of this job has made it."""
        return self._tags.check(data, fragment, self.full_encoding, model_name(layout, frozen))

    def publish(self, record: MergeRecord, broadcast: Broadcast, now: float, receipt: bytes = b"") -> None:
        """Put a durable version in force. ``now``: monotonic seconds; ``receipt``: of the version before."""
        fragment = record.fragment
        self.newest[fragment] = record
        before = self.previous[fragment]
        if before is not None:
            self.superseded[fragment].append(before)
        self.previous[fragment] = self._shortened(replace(self.broadcasts[fragment], receipt=receipt), now)
        self.broadcasts[fragment] = broadcast
        self._keep_downloaded(fragment, now)

    def _shortened(self, previous: Broadcast, now: float) -> Broadcast:
        """A version that is not the newest. Where updates are broadcast it is whole only for who is reading it: whoever
        begins to read takes the newest whole, or this one's update."""
        if self.delta_encoding is None or self.downloads.is_active(previous.fragment, previous.version, now):
            return previous
        return replace(previous, full=None)

    def _keep_downloaded(self, fragment: int, now: float) -> None:
        """Keep those superseded versions that are being downloaded; of too many the ones touched last."""

        def touched(broadcast: Broadcast) -> float:
            return self.downloads.last_touched(broadcast.fragment, broadcast.version)

        kept = [b for b in self.superseded[fragment] if self.downloads.is_active(fragment, b.version, now)]
        self.superseded[fragment] = sorted(kept, key=touched)[-MAX_SUPERSEDED:]
        there = sorted((b for kept in self.superseded for b in kept), key=touched)
        for broadcast in there[: -max(MAX_SUPERSEDED, len(self.newest) // 2)]:
            self.superseded[broadcast.fragment].remove(broadcast)

    def drop_superseded(self, now: float) -> None:
        """Drop superseded versions that are not being downloaded any more. ``now``: monotonic seconds."""
        for fragment, previous in enumerate(self.previous):
            self._keep_downloaded(fragment, now)
            if previous is not None:
                self.previous[fragment] = self._shortened(previous, now)
        there = (*self.broadcasts, *self.previous, *(b for kept in self.superseded for b in kept))
        self.downloads.drop_idle(now, {(b.fragment, b.version) for b in there if b is not None})

    def find_broadcast(self, fragment: int, version: int) -> Broadcast | None:
        """A version that can still be downloaded: the newest, the one before, or one being downloaded; else None."""
        if not 0 <= fragment < len(self.newest):
            return None
        for found in (self.broadcasts[fragment], self.previous[fragment], *self.superseded[fragment]):
            if found is not None and found.version == version:
                return found
        return None


def model_name(layout: Layout, frozen: str) -> str:
    """Which model a version belongs to: its layout, and by their name in the store its frozen parameters."""
    _, _, content = frozen.rpartition("-")  # which the name says
    return f"{layout.digest} {content}"


def first_records(
    job: str, epoch: int, fragments: Mapping[int, Floats], origins: Sequence[int] = ()
) -> list[MergeRecord]:
    """Make the records of version 0, by fragment, from the parameters that a learner uploaded. ``origins``: where an
    empty store is rebuilt, the epoch of each fragment's version (core/recovery)."""
    return [
        MergeRecord(
            job=job,
            epoch=epoch,
            fragment=p,
            version=0,
            theta=theta,
            time=time.time(),
            recovered=Recovered(0, origins[p], ()) if origins else None,
        )
        for p, theta in sorted(fragments.items())
    ]
