"""Uploads: pushes and offers, version 0, optimizer states, and versions that the store has lost.

Everything is decided from the header: which process sends it, and how many bytes it must have. Only then
are the chunks read, into a buffer of that size. A refusal is a reply with a fixed word; only a broken
transfer is an error of the call.

The head of core/merging/push_checks.py lists the checks of a push, in their order.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from diloco_protocol.arrays import codec
from diloco_protocol.common.meter import Meter
from diloco_protocol.vocabulary import ConnectionRefusal, PushRefusal, TransferRefusal
from diloco_protocol.wire import bulk as wire_bulk
from diloco_protocol.wire import limits, sync_pb2
from diloco_protocol.wire.limits import WireError
from diloco_syncer import messages
from diloco_syncer.core import events as ev
from diloco_syncer.core.core import Core
from diloco_syncer.messages import upload_reply
from diloco_syncer.runtime.buffer_pool import BufferPool
from diloco_syncer.runtime.durability import Durability
from diloco_syncer.runtime.global_model import GlobalModel
from diloco_syncer.runtime.initial_model import InitialModelUpload, InitialRefused
from diloco_syncer.runtime.multipart import MultipartUploads, TooManyUploads
from diloco_syncer.runtime.optimizer_relay import OptimizerRelay, Relayed, largest_state
from diloco_syncer.runtime.pushes import ReceivedPushes
from diloco_syncer.runtime.traffic import Traffic
from diloco_syncer.runtime.version_recovery import VersionRefused, VersionUploads
from diloco_syncer.server.sessions import Sessions
from diloco_syncer.server.tls.access import CallAuthorizer
from diloco_syncer.store.records import Array

log = logging.getLogger(__name__)


class UploadRefused(Exception):
    """An upload is refused: a fixed word, and a message for people."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass
class Uploads:
    """The upload call of the Bulk service. ``job``: its name; ``refused``: counts by reason."""

    job: str
    core: Core
    model: GlobalModel
    durability: Durability
    authorizer: CallAuthorizer
    sessions: Sessions
    multipart: MultipartUploads
    buffers: BufferPool
    pushes: ReceivedPushes
    initial_model: InitialModelUpload
    versions: VersionUploads
    relay: OptimizerRelay
    traffic: Traffic
    emit: Callable[[ev.Event], None]
    refused: Counter[str]

    async def upload(self, stream: AsyncIterator[bytes], context: Any) -> bytes:
        """One part of a payload; the reply is ``partial``, or the verdict."""
        peer = await self.authorizer.authorize(context, stream)
        try:
            async with asyncio.timeout(limits.STALL_SECONDS):
                raw = await anext(stream, b"")
            header = limits.parse(sync_pb2.UploadHeader, raw, limits.MAX_HEADER_BYTES)
            limits.check_format(header.format)
            if objection := self.sessions.check_process(header.process, peer, context):
                raise UploadRefused(ConnectionRefusal.WRONG_PROCESS, objection)
            return await self._route(header, stream)
        except UploadRefused as error:
            self.refused[error.reason] += 1
            return upload_reply(False, error.reason, str(error))
        except InitialRefused as error:
            self.refused[TransferRefusal.INITIAL] += 1
            return upload_reply(False, TransferRefusal.INITIAL, str(error))
        except VersionRefused as error:
            self.refused[TransferRefusal.BASE] += 1
            log.warning("a version from a learner is refused: %s", error)
            return upload_reply(False, TransferRefusal.BASE, str(error))
        except TooManyUploads:
            return upload_reply(False, TransferRefusal.BUSY, "too many uploads at once: try again after a pause")
        except TimeoutError:
            return upload_reply(False, TransferRefusal.BAD_TRANSFER, f"no header within {limits.STALL_SECONDS:.0f} s")
        except WireError as error:
            wrong = isinstance(error, wire_bulk.ChecksumError)
            word = PushRefusal.BAD_CHECKSUM.value if wrong else TransferRefusal.BAD_TRANSFER
            self.refused[word] += 1
            log.warning("upload refused: %s", error)
            return upload_reply(False, word, str(error))

    async def _route(self, header: sync_pb2.UploadHeader, stream: AsyncIterator[bytes]) -> bytes:
        if header.job != self.job:
            raise UploadRefused(
                PushRefusal.OTHER_JOB.value, f"job {header.job[:80]!r}: this syncer serves {self.job!r}"
            )
        kind = header.WhichOneof("what")
        if kind == "push":
            return await self._receive_push(header, stream)
        if kind == "initial":
            return await self._receive_initial(header, stream)
        if kind == "peer_state":
            return await self._receive_peer_state(header, stream)
        if kind == "base":
            return await self._receive_version(header, stream)
        raise WireError("the header says not what is uploaded")

    async def _receive_payload(
        self, key: tuple[Any, ...], header: sync_pb2.UploadHeader, stream: AsyncIterator[bytes], buffer: Any
    ) -> Array | None:
        """One part into a buffer made by ``buffer()``; the whole payload, or None if parts are missing."""

        def make() -> tuple[Array, memoryview]:
            array: Array = buffer()
            return array, wire_bulk.flat(array)

        connection = self.sessions.find_process(header.process)
        meter = Meter() if connection is None else connection.link.up
        received: int | None = None
        meter.begin(time.monotonic())
        try:
            done = await self.multipart.receive_part(key, header, stream, header.total_bytes, make)
            received = header.bytes
        finally:
            meter.end(time.monotonic(), received)
        self.traffic.count_received(*self.sessions.find_place(connection), header.bytes)
        return done

    async def _receive_push(self, header: sync_pb2.UploadHeader, stream: AsyncIterator[bytes]) -> bytes:
        push = messages.push_from(header)
        if self.core.is_recovering:
            raise TooManyUploads
        refusal = self.core.check_push(push, header.process)
        if refusal is not None:
            if refusal[0] is PushRefusal.REPEATED:
                await self.pushes.wait_offer_spooled(push.id)
            raise UploadRefused(refusal[0].value, refusal[1])
        assert self.model.layout is not None
        elements = self.model.layout.elements(push.fragment)
        size = codec.encoded_bytes(push.encoding, elements)
        if header.total_bytes != size:
            raise UploadRefused(
                PushRefusal.WRONG_SIZE.value,
                f"{header.total_bytes} bytes: {elements} elements as {push.encoding} are {size}",
            )
        whole = await self._receive_payload(
            ("push", push.id, header.process), header, stream, lambda: self.buffers.allocate(size)
        )
        if whole is None:
            return upload_reply(True, TransferRefusal.PARTIAL)
        return await self.pushes.judge_push(push, whole)

    async def _receive_initial(self, header: sync_pb2.UploadHeader, stream: AsyncIterator[bytes]) -> bytes:
        initial = self.initial_model
        connection = self.sessions.find_process(header.process)
        number = connection.number if connection else 0
        part, fragment = header.initial.part, header.initial.fragment
        with initial.track_part(number):
            size = initial.check_part(number, part, fragment, header.total_bytes)
            attempt = initial.attempt
            whole = await self._receive_payload(
                ("initial", header.process, part, fragment), header, stream, lambda: np.empty(size, np.uint8)
            )
            if whole is None:
                return upload_reply(True, TransferRefusal.PARTIAL)
            await initial.store_part(number, attempt, part, fragment, whole)
        return upload_reply(True)

    async def _receive_peer_state(self, header: sync_pb2.UploadHeader, stream: AsyncIterator[bytes]) -> bytes:
        transfer = header.peer_state.transfer
        asked = self.relay.find_expected(transfer)
        connection = self.sessions.find_process(header.process)
        if asked is None or connection is None or connection.number != asked[0]:
            raise UploadRefused(TransferRefusal.NOT_ASKED, f"nobody asked this process for transfer {transfer}")
        assert self.model.layout is not None
        largest = largest_state(self.model.layout.total_elements)
        if header.total_bytes > largest:
            raise UploadRefused(
                TransferRefusal.TOO_LARGE, f"{header.total_bytes} bytes of optimizer state; at most {largest}"
            )
        if len(header.peer_state.versions) > limits.MAX_FRAGMENTS:
            raise WireError("versions: more than there can be fragments")
        try:
            whole = await self._receive_payload(
                ("peer", transfer), header, stream, lambda: self.relay.allocate(header.total_bytes)
            )
        except OSError as error:
            self.emit(ev.PeerStateFailed(transfer))
            raise UploadRefused(TransferRefusal.NO_SPACE, f"the syncer has no room for it: {error.strerror}") from error
        if whole is None:
            return upload_reply(True, TransferRefusal.PARTIAL)
        versions = tuple((held.epoch, held.version) for held in header.peer_state.versions)
        self.relay.add_arrived(Relayed(transfer, whole, versions, asked[1]))
        if asked[1]:
            await self.durability.write_optimizer(whole)
        self.emit(ev.PeerStateReceived(transfer))
        return upload_reply(True)

    async def _receive_version(self, header: sync_pb2.UploadHeader, stream: AsyncIterator[bytes]) -> bytes:
        base = header.base
        connection = self.sessions.find_process(header.process)
        number = connection.number if connection else 0
        rows = self.versions.check_version(number, base, header.total_bytes)
        whole = await self._receive_payload(
            ("base", header.process, base.fragment), header, stream, lambda: np.empty(header.total_bytes, np.uint8)
        )
        if whole is None:
            return upload_reply(True, TransferRefusal.PARTIAL)
        await self.versions.store_version(number, base, rows, whole)
        return upload_reply(True)
