"""Pushes and offers whose bytes are here: decoded, waiting for their verdict or their merge.

A push is decoded when it arrives, and the norm of each of its pieces is taken: so
the core judges its norm, and a merge starts from float32 vectors and has its first pass
behind it. An accepted offer is spooled: its encoded bytes are made
durable before it is acknowledged, and removed when the merge that took it is
durable (or a newer offer that holds its steps too is).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from diloco_protocol.arrays import codec
from diloco_protocol.arrays.kernels import Float64s
from diloco_protocol.vocabulary import PushRefusal
from diloco_syncer.core import events as ev
from diloco_syncer.core.events import PushHeader
from diloco_syncer.messages import reply
from diloco_syncer.numerics.merge import piece_squares
from diloco_syncer.runtime.buffer_pool import Buffers
from diloco_syncer.runtime.multipart import Assemblies
from diloco_syncer.store.checkpoint import SpooledOffer
from diloco_syncer.store.records import Array, Floats

if TYPE_CHECKING:
    from diloco_syncer.runtime.driver import Engine

SWEEP_SECONDS = 10.0


@dataclass(slots=True)
class Payload:
    """One push's bytes. ``squares``: of each piece (merge.piece_squares); ``encoded`` is kept for
    offers only; ``settled``: an offer's, done when it is refused or durable."""

    header: PushHeader
    delta: Floats
    squares: Float64s
    norm: float
    encoded: Array | None
    verdict: asyncio.Future[bytes] | None
    settled: asyncio.Future[None] | None = None


class Payloads:
    """The bytes behind the core's handles."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = itertools.count(1)
        self._held: dict[int, Payload] = {}
        self._unsettled: dict[int, Payload] = {}  # by handle: offers neither refused nor durable yet
        self.assemblies = Assemblies()
        self.buffers = Buffers()

    def __len__(self) -> int:
        return len(self._held)

    async def receive(self, header: PushHeader, encoded: Array) -> bytes:
        """All bytes of a push are here: decode, ask the core; returns the reply."""
        loop = asyncio.get_running_loop()
        delta, squares = await loop.run_in_executor(
            self._engine.decode_thread, self._decode, header, encoded, self.buffers
        )
        norm = math.sqrt(math.fsum(squares))
        handle = next(self._numbers)
        verdict: asyncio.Future[bytes] = loop.create_future()
        kept = None if header.round else encoded
        payload = self._held[handle] = Payload(header, delta, squares, norm, kept, verdict)
        if not header.round:
            # Before the core accepts it: from then on a retry is "repeated", and may hear that only
            # when the bytes are durable, however long the verdict waits behind other actions.
            payload.settled = loop.create_future()
            self._unsettled[handle] = payload
        self._engine.handle(ev.PushReceived(header, norm, math.isfinite(norm), handle))
        return await verdict

    def _decode(self, header: PushHeader, encoded: Array, buffers: Buffers) -> tuple[Floats, Float64s]:
        """Values float32[elements], which may share ``encoded``'s memory, and ``piece_squares`` of them."""
        layout = self._engine.layout
        assert layout is not None
        elements = layout.elements(header.fragment)
        if header.encoding == "float32" and encoded.size == 4 * elements:
            values: Floats = encoded.view(np.float32)
        else:
            out = buffers.take(4 * elements).view(np.float32)
            values = codec.decode(encoded, header.encoding, elements, out)
        return values, piece_squares(layout.fragments[header.fragment], values)

    def restore(self, offer: SpooledOffer) -> int:
        """Take a spooled offer back at start; returns its handle. Raises ``codec.CodecError``."""
        handle = next(self._numbers)
        delta, squares = self._decode(offer.header, offer.encoded, self.buffers)
        self._held[handle] = Payload(offer.header, delta, squares, offer.norm, None, None)
        return handle

    async def settled(self, push_id: tuple[int, int, int, int]) -> None:
        """Return when no copy of this offer waits any more for its verdict or for the store."""
        for payload in list(self._unsettled.values()):
            if payload.header.id == push_id and payload.settled is not None:
                await asyncio.shield(payload.settled)

    def delta(self, handle: int) -> Floats:
        """A push's outer gradient, float32[elements]."""
        return self._held[handle].delta

    def squares(self, handle: int) -> Float64s:
        """The squared norms of its pieces, float64[pieces]."""
        return self._held[handle].squares

    # ------------------------------------------------------------- the core's answers

    def answer(self, verdict: ev.AnswerPush) -> None:
        """The core's verdict on a push."""
        payload = self._held[verdict.handle]
        if verdict.reason is not None:
            del self._held[verdict.handle]
            self._engine.refused[verdict.reason.value] += 1
            self._settle(verdict.handle)
            refusal = reply(False, verdict.reason.value, verdict.message)
            if verdict.reason is PushRefusal.REPEATED:
                # The first copy is accepted, but perhaps not durable yet: say so only when it is.
                self._engine.run_task(self._answer_after(payload, refusal))
            else:
                self._reply(payload, refusal)
        elif verdict.offer and payload.encoded is not None:
            self._engine.run_task(self._spool(verdict.handle, payload))
        else:
            self._settle(verdict.handle)
            self._reply(payload, reply(True))

    def _reply(self, payload: Payload, answer: bytes) -> None:
        if payload.verdict is not None and not payload.verdict.done():
            payload.verdict.set_result(answer)

    def _settle(self, handle: int) -> None:
        payload = self._unsettled.pop(handle, None)
        if payload is not None and payload.settled is not None and not payload.settled.done():
            payload.settled.set_result(None)

    async def _answer_after(self, payload: Payload, refusal: bytes) -> None:
        await self.settled(payload.header.id)
        self._reply(payload, refusal)

    async def _spool(self, handle: int, payload: Payload) -> None:
        assert payload.encoded is not None
        offer = SpooledOffer(payload.header, payload.encoded, payload.norm)
        await self._engine.durably(self._engine.checkpoints.spool_offer, offer)
        payload.encoded = None
        self._settle(handle)
        self._reply(payload, reply(True))

    def drop(self, handle: int) -> None:
        """The core needs these bytes no more."""
        payload = self._held.pop(handle, None)
        if payload is not None and not payload.header.round:
            self._engine.run_task(self._unspool(payload))

    async def _unspool(self, payload: Payload) -> None:
        """Remove an offer's spooled bytes, after any newer offer that replaces them is durable."""
        await self._all_settled()
        offer = SpooledOffer(payload.header, np.empty(0, np.uint8), 0.0)
        await self._engine.durably(self._engine.checkpoints.store.delete, offer.name)

    # ------------------------------------------------------------- upkeep

    async def sweep(self) -> None:
        """Drop uploads that nobody finishes."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.assemblies.sweep(time.monotonic())
            self.buffers.sweep(time.monotonic())

    async def settle(self, seconds: float) -> None:
        """Wait until accepted offers are durable, at most so long."""
        await self._all_settled(seconds)

    async def _all_settled(self, seconds: float | None = None) -> None:
        waiting = [payload.settled for payload in self._unsettled.values() if payload.settled is not None]
        if waiting:
            await asyncio.wait(waiting, timeout=seconds)

    def close(self) -> None:
        """Nobody gets a verdict any more: the calls end, and the senders try again elsewhere."""
        for payload in self._held.values():
            if payload.verdict is not None:
                payload.verdict.cancel()
        for payload in self._unsettled.values():
            if payload.settled is not None:
                payload.settled.cancel()
