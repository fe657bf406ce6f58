"""Bulk bytes up and down: encoding, uploading, downloading, decoding.

Runs in the background thread's loop. What takes long without waiting (codec,
checksums) runs in an executor thread, where numba's kernels hold no interpreter
lock. Error feedback lives here: the residual r_p of each fragment, and for each
push whose fate is open what its encoding dropped (algorithm.md section 7).
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from grpc import aio

from diloco_protocol.arrays import codec
from diloco_protocol.arrays.kernels import Bytes
from diloco_protocol.common.meter import Meter
from diloco_protocol.wire import bulk, limits, services, sync_pb2
from diloco_worker.core.adoption import PushPlan
from diloco_worker.fragments import Floats, Vector
from diloco_worker.net.fragment_cache import CachedVersion

T = TypeVar("T")
_BUSY_TRIES = 20
_TRIES = 4


@dataclass(frozen=True, slots=True)
class Push:
    """One push on its way: Δ = ``base`` - ``theta``, float32[elements] each."""

    plan: PushPlan
    base: Vector
    theta: Vector
    report: sync_pb2.Report


class ErrorFeedback:
    """Error feedback of all fragments: sum of what was decoded + residual = sum of merged Δ."""

    def __init__(self, fragments: int, enabled: bool) -> None:
        self.enabled = enabled
        self._residual: list[Floats | None] = [None] * fragments
        # Per fragment, of each push whose fate is open: what its encoding dropped, None before it is encoded.
        self._open: list[dict[int, Floats | None]] = [{} for _ in range(fragments)]
        self._lock = threading.Lock()  # encoding runs beside the loop

    def residual(self, fragment: int) -> Floats | None:
        """r_p, float32[elements]; None stands for zero."""
        return self._residual[fragment]

    @property
    def open_pushes(self) -> int:
        """Pushes whose fate is open, over all fragments."""
        return sum(len(pushes) for pushes in self._open)

    def expect_push(self, fragment: int, sequence: int) -> None:
        """A push will be encoded. One that is settled before that keeps nothing."""
        if self.enabled:
            with self._lock:
                self._open[fragment].setdefault(sequence, None)

    def record_dropped(self, fragment: int, sequence: int, dropped: Floats) -> None:
        """What r_p becomes if this push is merged."""
        with self._lock:
            if sequence in self._open[fragment]:
                self._open[fragment][sequence] = dropped

    def resolve_pushes(self, fragment: int, merged: int, forget: Sequence[int]) -> None:
        """``merged`` (0: none) was merged; the others in ``forget`` were not."""
        with self._lock:
            dropped = self._open[fragment].get(merged)
            if dropped is not None:
                self._residual[fragment] = dropped
            for sequence in (merged, *forget):
                self._open[fragment].pop(sequence, None)

    def forget_open_pushes(self) -> None:
        """Nothing of the tenure before will be confirmed; r_p of what was merged stays."""
        with self._lock:
            for pushes in self._open:
                pushes.clear()


@dataclass(frozen=True, slots=True)
class Identity:
    """Who speaks: the header fields that fence a stale process."""

    job: str
    process: str
    slot: int
    incarnation: int


class Transfers:
    """The bulk calls of one connection."""

    def __init__(
        self,
        channels: Sequence[aio.Channel],
        metadata: Sequence[tuple[str, str]],
        executor: Executor,
        up: Meter | None = None,
        down: Meter | None = None,
    ) -> None:
        self._channels = list(channels)
        self._up = up
        self._down = down
        self._metadata = tuple(metadata)
        self._executor = executor
        self.bytes_up = 0
        self.bytes_down = 0

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run ``work`` beside the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)

    # ------------------------------------------------------------------ up

    async def push(
        self, push: Push, who: Identity, encoding: str, layout_digest: str, feedback: ErrorFeedback
    ) -> sync_pb2.UploadReply:
        """Encode and upload one push; the syncer's verdict. Raises wire.TransferError when no
        answer came, in which case the push may have been accepted."""
        plan = push.plan
        encoded = await self.run(encode_push, push, encoding, feedback)
        header = sync_pb2.UploadHeader(
            job=who.job,
            slot=who.slot,
            incarnation=who.incarnation,
            process=who.process,
            push=sync_pb2.Push(
                fragment=plan.fragment,
                sequence=plan.sequence,
                round=plan.round,
                epoch=plan.epoch,
                base_version=plan.base_version,
                oldest_version=plan.oldest_version,
                first_step=plan.first_step,
                last_step=plan.last_step,
                steps=plan.steps,
                tokens=plan.tokens,
                compute_seconds=plan.compute_seconds,
                encoding=encoding,
                layout_digest=layout_digest,
                report=push.report,
            ),
        )
        return await self._upload(header, encoded)

    async def initial(self, who: Identity, layout_json: str, vectors: Sequence[Vector], frozen: bytes) -> None:
        """Upload version 0. Raises wire.TransferError if a part was refused or did not come through."""
        part = sync_pb2.Initial
        payloads: list[tuple[sync_pb2.Initial, Any]] = [
            (part(part=part.LAYOUT), layout_json.encode("ascii")),
            *((part(part=part.FRAGMENT, fragment=p), vector) for p, vector in enumerate(vectors)),
            *([(part(part=part.FROZEN), frozen)] if frozen else []),
            (part(part=part.DONE), b""),
        ]
        for what, payload in payloads:
            if isinstance(payload, Vector):
                payload = await self.run(lambda vector=payload: vector.array)
            header = sync_pb2.UploadHeader(
                job=who.job, slot=who.slot, incarnation=who.incarnation, process=who.process, initial=what
            )
            reply = await self._upload(header, payload)
            if not reply.accepted:
                raise bulk.TransferError(f"version 0 was refused ({reply.reason}): {reply.message}", retry=True)

    async def optimizer_state(
        self, who: Identity, transfer: int, data: bytes, versions: Sequence[tuple[int, int]]
    ) -> sync_pb2.UploadReply:
        """Upload this learner's inner optimizer state under ``transfer``."""
        header = sync_pb2.UploadHeader(
            job=who.job,
            slot=who.slot,
            incarnation=who.incarnation,
            process=who.process,
            peer_state=sync_pb2.PeerState(
                transfer=transfer, versions=[sync_pb2.Held(epoch=e, version=v) for e, v in versions]
            ),
        )
        return await self._upload(header, data)

    async def base(self, who: Identity, holding: CachedVersion) -> sync_pb2.UploadReply:
        """Give back a version that the syncer's store lost. Raises wire.TransferError."""
        news = holding.news
        header = sync_pb2.UploadHeader(
            job=who.job,
            slot=who.slot,
            incarnation=who.incarnation,
            process=who.process,
            base=sync_pb2.Base(
                fragment=news.fragment,
                epoch=news.epoch,
                version=news.version,
                encoding=news.full.encoding,
                receipt=holding.receipt,
            ),
        )
        return await self._upload(header, await self.run(holding.encoded))

    async def _upload(self, header: sync_pb2.UploadHeader, payload: Any) -> sync_pb2.UploadReply:
        """One upload under one id, tried again when the syncer is busy or a part broke."""
        broken = 0
        for attempt in range(_BUSY_TRIES):
            try:
                reply = await bulk.upload(self._channels, header, payload, metadata=self._metadata, meter=self._up)
            except bulk.TransferError as error:
                broken += 1
                if not error.retry or broken >= _TRIES:
                    raise
            except limits.WireError as error:
                raise bulk.TransferError(str(error), retry=False) from error
            else:
                if reply.accepted or reply.reason != services.BUSY:
                    self.bytes_up += len(bulk.flat(payload))
                    return reply
            await asyncio.sleep(pause(attempt))
        raise bulk.TransferError("the syncer was busy for too long", retry=True)

    # ------------------------------------------------------------------ down

    async def fragment(
        self, who: Identity, news: sync_pb2.Announcement, elements: int, held: CachedVersion | None
    ) -> CachedVersion | None:
        """The announced version of a fragment, float32[elements]; None: the syncer has it no more.

        ``held``: what this process has of the fragment; a delta may apply to it.
        """
        full = news.full
        if (
            news.HasField("delta")
            and held is not None
            and (held.news.epoch, held.news.version) == (news.epoch, news.version - 1)
            and not news.reset
        ):
            found = await self._fetch(who, sync_pb2.DownloadRequest.DELTA, news, news.delta)
            if found is not None:
                update = await self.run(codec.decode, found[1], news.delta.encoding, elements)
                values: Floats = held.values + update
                if full.encoding != "float32" or await self.run(bulk.checksum, values) == full.checksum:
                    return CachedVersion(news, values, found[0])
        found = await self._fetch(who, sync_pb2.DownloadRequest.FULL, news, full)
        if found is None:
            return None
        return CachedVersion(news, await self.run(codec.decode, found[1], full.encoding, elements), found[0])

    async def _fetch(
        self, who: Identity, what: Any, news: sync_pb2.Announcement, payload: sync_pb2.Payload
    ) -> tuple[bytes, Bytes] | None:
        """Receipt and bytes, uint8."""
        request = sync_pb2.DownloadRequest(
            job=who.job, process=who.process, what=what, fragment=news.fragment, epoch=news.epoch, version=news.version
        )
        header, data = await bulk.download(
            self._channels, request, size=payload.bytes, metadata=self._metadata, meter=self._down
        )
        if not header.found:
            return None
        self.bytes_down += payload.bytes
        if await self.run(bulk.checksum, data) != payload.checksum:
            raise limits.WireError(
                f"fragment {news.fragment} version {news.version}: its bytes are not those that were announced"
            )
        return header.receipt, data

    async def blob(
        self, who: Identity, what: Any, limit: int, transfer: int = 0
    ) -> tuple[sync_pb2.DownloadHeader, bytes] | None:
        """FROZEN, PEER_STATE, OPTIMIZER or LAYOUT, at most ``limit`` bytes; None: there is none."""
        request = sync_pb2.DownloadRequest(job=who.job, process=who.process, what=what, transfer=transfer)
        header, data = await bulk.download(
            self._channels, request, limit=limit, metadata=self._metadata, meter=self._down
        )
        if not header.found:
            return None
        self.bytes_down += data.nbytes
        return header, await self.run(data.tobytes)


def encode_push(push: Push, encoding: str, feedback: ErrorFeedback) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Δ = base - θ (plus the residual), encoded."""
    plan = push.plan
    delta: Floats = np.subtract(push.base.array, push.theta.array)
    if not feedback.enabled:
        return codec.encode(delta, encoding)
    residual = feedback.residual(plan.fragment)
    if residual is None:
        residual = np.zeros_like(delta)
    encoded, dropped = codec.encode_with_feedback(delta, residual, encoding)
    feedback.record_dropped(plan.fragment, plan.sequence, dropped)
    return encoded


def pause(attempt: int, first: float = 0.1, longest: float = 5.0) -> float:
    """Seconds to wait before try ``attempt`` + 1: exponential with full jitter above half."""
    return min(longest, first * 2.0**attempt) * random.uniform(0.5, 1.0)
