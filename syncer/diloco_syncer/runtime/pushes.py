"""Pushes and offers whose bytes are here, and wait for their verdict or their merge.

The norm of each piece of a push is computed when it arrives. So the core can judge its norm, and a merge has its first
pass behind it. A push stays as it came. Norms and merge decode of it what they are adding, which stays in the cache:
to write the values to memory, and to read them twice, costs more than to decode them once more.

An accepted offer is spooled: its bytes are made durable before it is acknowledged. They are removed when the merge that
took the offer is durable, or when a newer offer that contains its steps is. An offer may wait for a merge for long, and
at the job's end those of all learners wait. So its bytes are dropped once they are durable, and a merge maps the
spooled file.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Iterable
from concurrent.futures import Executor
from dataclasses import InitVar, dataclass, field
from typing import Any

import numpy as np

from diloco_protocol.arrays import codec
from diloco_protocol.arrays.kernels import Float64s
from diloco_protocol.vocabulary import PushRefusal
from diloco_protocol.wire import convert, sync_pb2
from diloco_protocol.wire.records import PushHeader
from diloco_syncer.core import events as ev
from diloco_syncer.numerics.merge import Delta, piece_squares
from diloco_syncer.runtime.durability import StoreWriter
from diloco_syncer.runtime.global_model import GlobalModel
from diloco_syncer.runtime.multipart import ReadPayload, TooManyUploads, UploadRefused, upload_reply
from diloco_syncer.store.checkpoint import SpooledOffer, offer_name
from diloco_syncer.store.records import Array

PUSH = "push"  # in an upload's key


@dataclass(slots=True)
class Payload:
    """One push. ``squares``: of each piece (merge.piece_squares). ``encoded``: its bytes; an offer's only until they
    are durable. ``verdict``: the reply to the sender.
    """

    header: PushHeader
    squares: Float64s
    norm: float
    encoded: Array | None
    verdict: asyncio.Future[sync_pb2.UploadReply] | None


@dataclass
class ReceivedPushes:
    """The bytes behind the core's handles. ``check`` judges a push of a process by its header, and raises
    ``UploadRefused``, or ``TooManyUploads`` while none is taken. ``refused``: refused uploads by reason, counted on
    here. ``on_spooled`` hears of each offer that is durable, before its sender does."""

    check: Callable[[PushHeader, str], None]
    is_recovering: Callable[[], bool]
    model: GlobalModel
    writer: StoreWriter
    decode_threads: Executor
    emit: Callable[[ev.Event], None]
    run_task: Callable[[Coroutine[Any, Any, None]], object]
    refused: Counter[str]
    on_spooled: Callable[[int], None] = lambda handle: None
    first_handle: InitVar[int] = 1
    _held: dict[int, Payload] = field(default_factory=dict)
    _tell_at: float = 0.0  # of the next bytes; time.monotonic()
    # By handle: offers neither refused nor durable yet, and what is done when they are.
    _unspooled: dict[int, tuple[PushHeader, asyncio.Future[None]]] = field(default_factory=dict)

    def __post_init__(self, first_handle: int) -> None:
        self._numbers = itertools.count(first_handle)

    def note_chunk(self, key: Hashable) -> None:
        """Some bytes of an upload came. Of pushes the core hears so once a second."""
        now = time.monotonic()
        if isinstance(key, tuple) and key[0] == PUSH and now >= self._tell_at:
            self._tell_at = now + 1.0
            self.emit(ev.PushAdvanced())

    async def receive(
        self, upload: sync_pb2.UploadHeader, connection: int, read: ReadPayload
    ) -> sync_pb2.UploadReply | None:
        """Receive a part of a push or offer; the core judges it by its header, and again when all of it is here."""
        push = convert.push_header(upload)
        try:
            self.check(push, upload.process)
        except UploadRefused as error:
            if error.reason == PushRefusal.REPEATED:
                await self.wait_offer_spooled(push)
            raise
        assert self.model.layout is not None
        elements = self.model.layout.elements(push.fragment)
        size = codec.encoded_bytes(push.encoding, elements)
        if upload.total_bytes != size:
            words = f"{upload.total_bytes} bytes: {elements} elements as {push.encoding} are {size}"
            raise UploadRefused(PushRefusal.WRONG_SIZE, words)
        whole = await read((PUSH, push.id, upload.process), lambda: self.model.buffers.allocate(size))
        return None if whole is None else await self._judge_push(push, whole)

    async def _judge_push(self, header: PushHeader, encoded: Array) -> sync_pb2.UploadReply:
        """Measure a push, whose bytes are all here, and ask the core; returns the reply."""
        loop = asyncio.get_running_loop()
        squares, growth = await loop.run_in_executor(self.decode_threads, self._measure, header, encoded)
        if self.is_recovering():  # since its bytes began to come: a version with a part of its steps may be found
            raise TooManyUploads
        norm = math.sqrt(math.fsum(squares))
        handle = next(self._numbers)
        verdict: asyncio.Future[sync_pb2.UploadReply] = loop.create_future()
        self._held[handle] = Payload(header, squares, norm, encoded, verdict=verdict)
        if not header.round:
            # Before the core accepts it: from then on a retry is "repeated", and may be told so only
            # when the bytes are durable, however long the verdict waits behind other actions.
            self._unspooled[handle] = header, loop.create_future()
        del encoded
        self.emit(ev.PushReceived(header, norm, math.isfinite(norm), handle, growth=growth))
        return await verdict

    def _measure(self, header: PushHeader, encoded: Array) -> tuple[Float64s, float]:
        """``piece_squares`` of a push, and how large it is beside Θ."""
        layout = self.model.layout
        assert layout is not None
        squares = piece_squares(layout.fragments[header.fragment], self._values(header, encoded))
        return squares, self.model.growth(header.fragment, squares)

    def _values(self, header: PushHeader, encoded: Array) -> Delta:
        assert self.model.layout is not None
        if header.encoding == "float32":
            return encoded.view(np.float32)
        return codec.EncodedValues(encoded, header.encoding, self.model.layout.elements(header.fragment))

    def restore_offer(self, offer: SpooledOffer, handle: int | None = None) -> int:
        """Take back a spooled offer, at start; returns its handle (None: a new one). Raises ``codec.CodecError`` if it
        does not fit its fragment."""
        layout, header = self.model.layout, offer.header
        if layout is None or header.fragment >= len(layout):
            raise codec.CodecError("its fragment does not exist")
        size = codec.encoded_bytes(header.encoding, layout.elements(header.fragment))
        if offer.encoded_bytes != size or offer.squares.shape != (len(layout.fragments[header.fragment]),):
            raise codec.CodecError(f"{offer.encoded_bytes} bytes as {header.encoding}: its fragment has {size}")
        handle = next(self._numbers) if handle is None else handle
        self._held[handle] = Payload(header, offer.squares, offer.norm, None, verdict=None)
        return handle

    def gradients(self, handles: Iterable[int]) -> tuple[list[Delta], list[Float64s]]:
        """Of each push its outer gradient and the squared norms of its pieces, float64[pieces]. An offer's gradient is
        encoded, and read from the store; blocks. Raises OSError, ``StoreUnusable``."""
        held = [self._held[handle] for handle in handles]
        return [self._gradient(payload) for payload in held], [payload.squares for payload in held]

    def squares(self, handle: int) -> Float64s:
        """``merge.piece_squares`` of a push."""
        return self._held[handle].squares

    def norm(self, handle: int) -> float:
        """The L2 norm of a push."""
        return self._held[handle].norm

    def _gradient(self, payload: Payload) -> Delta:
        encoded = payload.encoded
        if encoded is None:  # an offer's, which is durable
            encoded = self.writer.checkpoints.read_offer(payload.header)
        return self._values(payload.header, encoded)

    # ------------------------------------------------------------- the core's actions

    def reply(self, verdict: ev.AnswerPush) -> None:
        """Answer the sender of a push with the core's verdict; an accepted offer when it is durable."""
        payload = self._held[verdict.handle]
        if verdict.reason is not None:
            del self._held[verdict.handle]
            self.refused[verdict.reason.value] += 1
            self._mark_spooled(verdict.handle)
            refusal = upload_reply(False, verdict.reason.value, verdict.message)
            if verdict.reason is PushRefusal.REPEATED:
                # The first copy is accepted, but perhaps not durable yet: say so only when it is.
                self.run_task(self._reply_when_spooled(payload, refusal))
            else:
                self._send_reply(payload, refusal)
        elif verdict.offer and payload.encoded is not None:
            self.run_task(self._spool(verdict.handle, payload, payload.encoded))
        else:
            self._mark_spooled(verdict.handle)
            self._send_reply(payload, upload_reply(True))

    def refuse_for_now(self, handle: int) -> None:
        """Forget a push: its sender is told to try again after a pause."""
        self.fail(handle, TooManyUploads())
        self._held.pop(handle, None)

    def fail(self, handle: int, error: Exception) -> bool:
        """Answering this push failed: its call ends with the error. False: there is no such push any more."""
        payload = self._held.get(handle)
        if payload is None or payload.verdict is None:
            return False
        self._mark_spooled(handle)
        if not payload.verdict.done():
            payload.verdict.set_exception(error)
        return True

    def release(self, action: ev.ReleasePush) -> None:
        """Drop bytes that the core needs no more, an offer's in the store too."""
        payload = self._held.pop(action.handle, None)
        if payload is not None and not payload.header.round:
            self.run_task(self._unspool(payload))

    def _send_reply(self, payload: Payload, answer: sync_pb2.UploadReply) -> None:
        if payload.verdict is not None and not payload.verdict.done():
            payload.verdict.set_result(answer)

    # ------------------------------------------------------------- offers

    async def _reply_when_spooled(self, payload: Payload, refusal: sync_pb2.UploadReply) -> None:
        await self.wait_offer_spooled(payload.header)
        self._send_reply(payload, refusal)

    async def _spool(self, handle: int, payload: Payload, encoded: Array) -> None:
        spool = self.writer.checkpoints.spool_offer
        await self.writer.run_write(spool, payload.header, payload.norm, payload.squares, encoded)
        payload.encoded = None
        self.on_spooled(handle)
        self._mark_spooled(handle)
        self._send_reply(payload, upload_reply(True))

    async def _unspool(self, payload: Payload) -> None:
        """Remove an offer's spooled bytes, after any newer offer that replaces them is durable."""
        await self.wait_spooled()
        await self.writer.run_write(self.writer.checkpoints.store.delete, offer_name(payload.header))

    def _mark_spooled(self, handle: int) -> None:
        _, spooled = self._unspooled.pop(handle, (None, None))
        if spooled is not None and not spooled.done():
            spooled.set_result(None)

    async def wait_offer_spooled(self, header: PushHeader) -> None:
        """Wait until no copy of this offer waits any more for its verdict or for the store. Its learner may have sent
        one in an earlier session, under another incarnation."""
        for offer, spooled in list(self._unspooled.values()):
            if (offer.slot, offer.fragment) == (header.slot, header.fragment):
                await asyncio.shield(spooled)

    async def wait_spooled(self, seconds: float | None = None) -> None:
        """Wait until all offers that are here are refused or durable, at most ``seconds``."""
        if self._unspooled:
            await asyncio.wait([spooled for _, spooled in self._unspooled.values()], timeout=seconds)

    def close(self) -> None:
        """Cancel all verdicts: the calls end, and the senders try again at the next syncer."""
        for payload in self._held.values():
            if payload.verdict is not None:
                payload.verdict.cancel()
        for _, spooled in self._unspooled.values():
            spooled.cancel()
