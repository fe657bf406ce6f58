"""The Bulk service: pushes, version 0 and optimizer states up; broadcasts and blobs down.

Everything is decided from the header: who may send it, and how many bytes it must
have. Only then the chunks are read, into a buffer of that size. A refusal
is a reply with a fixed word; only a broken transfer is an error of the call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

from diloco_protocol.arrays import codec
from diloco_protocol.common.meter import Meter
from diloco_protocol.security.identity import akin
from diloco_protocol.vocabulary import ConnectionRefusal, PushRefusal, TransferRefusal
from diloco_protocol.wire import bulk as wire_bulk
from diloco_protocol.wire import limits, sync_pb2
from diloco_protocol.wire.limits import WireError
from diloco_syncer import messages
from diloco_syncer.core import events as ev
from diloco_syncer.messages import held_to, reply
from diloco_syncer.runtime.initial_model import InitialRefused
from diloco_syncer.runtime.multipart import Busy
from diloco_syncer.runtime.optimizer_relay import Relayed, largest_state
from diloco_syncer.runtime.traffic import NOBODY
from diloco_syncer.runtime.version_recovery import BaseRefused
from diloco_syncer.server.pages.job_page import handout
from diloco_syncer.server.tls.connection_limits import Peer
from diloco_syncer.store.records import Array

if TYPE_CHECKING:
    from diloco_syncer.runtime.driver import Engine
    from diloco_syncer.server.sessions import Connection

log = logging.getLogger(__name__)

FRAGMENTS = (sync_pb2.DownloadRequest.FULL, sync_pb2.DownloadRequest.DELTA)


class Refused(Exception):
    """An upload is refused: a fixed word, and a message for people."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Bulk:
    """The two calls of the Bulk service."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def _objection(self, process: str, peer: Peer, context: Any) -> str:
        """Why this peer may not speak for a process: it is of another certificate. Empty: it may."""
        sessions = self._engine.sessions
        connection = sessions.of_process(process) if sessions.doors.secure else None
        if connection is None:
            return ""
        if akin(connection.peer.names, peer.names):
            sessions.doors.assign_place(context, connection.place)
            return ""
        message = "a process with another certificate has this id"
        sessions.doors.record_refusal(peer, ConnectionRefusal.WRONG_PROCESS, message)
        return message

    # ------------------------------------------------------------- up

    async def upload(self, stream: AsyncIterator[bytes], context: Any) -> bytes:
        """One part of a payload; the reply is ``partial``, or the verdict."""
        peer = await self._engine.sessions.doors.authorize(context)
        refused = self._engine.refused
        try:
            async with asyncio.timeout(limits.STALL_SECONDS):
                raw = await anext(stream, b"")
            header = limits.parse(sync_pb2.UploadHeader, raw, limits.MAX_HEADER_BYTES)
            limits.check_format(header.format)
            if objection := self._objection(header.process, peer, context):
                raise Refused(ConnectionRefusal.WRONG_PROCESS, objection)
            return await self._route(header, stream)
        except Refused as error:
            refused[error.reason] += 1
            return reply(False, error.reason, str(error))
        except InitialRefused as error:
            refused["initial"] += 1
            return reply(False, TransferRefusal.INITIAL, str(error))
        except BaseRefused as error:
            refused["base"] += 1
            log.warning("a base is refused: %s", error)
            return reply(False, TransferRefusal.BASE, str(error))
        except Busy:
            return reply(False, TransferRefusal.BUSY, "too many uploads at once: try again after a pause")
        except TimeoutError:
            return reply(False, TransferRefusal.BAD_TRANSFER, f"no header within {limits.STALL_SECONDS:.0f} s")
        except WireError as error:
            wrong = isinstance(error, wire_bulk.ChecksumError)
            word = PushRefusal.BAD_CHECKSUM.value if wrong else TransferRefusal.BAD_TRANSFER
            refused[word] += 1
            log.warning("upload refused: %s", error)
            return reply(False, word, str(error))

    async def _route(self, header: sync_pb2.UploadHeader, stream: AsyncIterator[bytes]) -> bytes:
        job = self._engine.job.metadata.name
        if header.job != job:
            raise Refused(PushRefusal.OTHER_JOB.value, f"job {header.job[:80]!r}: this syncer serves {job!r}")
        kind = header.WhichOneof("what")
        if kind == "push":
            return await self._push(header, stream)
        if kind == "initial":
            return await self._initial(header, stream)
        if kind == "peer_state":
            return await self._peer_state(header, stream)
        if kind == "base":
            return await self._base(header, stream)
        raise WireError("the header says not what is uploaded")

    async def _receive(
        self, key: tuple[Any, ...], header: sync_pb2.UploadHeader, stream: AsyncIterator[bytes], buffer: Any
    ) -> Array | None:
        """One part into a buffer made by ``buffer()``; the whole payload, or None if parts are missing."""

        def make() -> tuple[Array, memoryview]:
            array: Array = buffer()
            return array, wire_bulk.flat(array)

        connection = self._engine.sessions.of_process(header.process)
        meter = Meter() if connection is None else connection.link.up
        received: int | None = None
        meter.begin(time.monotonic())
        try:
            assemblies = self._engine.payloads.assemblies
            done = await assemblies.receive(key, header, stream, header.total_bytes, make)
            received = header.bytes
        finally:
            meter.end(time.monotonic(), received)
        self._engine.bytes_up += header.bytes
        self._engine.traffic.received(*self._whose(connection), header.bytes)
        return done

    def _whose(self, connection: Connection | None) -> tuple[str, int | None]:
        """The place and the slot that a transfer is counted to."""
        if connection is None:
            return NOBODY, None
        slot = self._engine.core.slot_by_connection(connection.number)
        return connection.place, None if slot is None else slot.index

    async def _push(self, header: sync_pb2.UploadHeader, stream: AsyncIterator[bytes]) -> bytes:
        engine = self._engine
        push = messages.push_from(header)
        if engine.core.is_recovering:
            raise Busy
        refusal = engine.core.check_push(push, header.process)
        if refusal is not None:
            if refusal[0] is PushRefusal.REPEATED:
                await engine.payloads.settled(push.id)
            raise Refused(refusal[0].value, refusal[1])
        assert engine.layout is not None
        elements = engine.layout.elements(push.fragment)
        size = codec.encoded_bytes(push.encoding, elements)
        if header.total_bytes != size:
            raise Refused(
                PushRefusal.WRONG_SIZE.value,
                f"{header.total_bytes} bytes: {elements} elements as {push.encoding} are {size}",
            )
        whole = await self._receive(
            ("push", push.id, header.process), header, stream, lambda: engine.payloads.buffers.take(size)
        )
        if whole is None:
            return reply(True, TransferRefusal.PARTIAL)
        return await engine.payloads.receive(push, whole)

    async def _initial(self, header: sync_pb2.UploadHeader, stream: AsyncIterator[bytes]) -> bytes:
        initial = self._engine.initial
        connection = self._engine.sessions.of_process(header.process)
        number = connection.number if connection else 0
        part, fragment = header.initial.part, header.initial.fragment
        with initial.uploading(number):
            size = initial.admit(number, part, fragment, header.total_bytes)
            attempt = initial.attempt
            whole = await self._receive(
                ("initial", header.process, part, fragment), header, stream, lambda: np.empty(size, np.uint8)
            )
            if whole is None:
                return reply(True, TransferRefusal.PARTIAL)
            await initial.take(number, attempt, part, fragment, whole)
        return reply(True)

    async def _peer_state(self, header: sync_pb2.UploadHeader, stream: AsyncIterator[bytes]) -> bytes:
        engine = self._engine
        transfer = header.peer_state.transfer
        asked = engine.relay.asked(transfer)
        connection = engine.sessions.of_process(header.process)
        if asked is None or connection is None or connection.number != asked[0]:
            raise Refused(TransferRefusal.NOT_ASKED, f"nobody asked this process for transfer {transfer}")
        assert engine.layout is not None
        largest = largest_state(engine.layout.total_elements)
        if header.total_bytes > largest:
            raise Refused(
                TransferRefusal.TOO_LARGE, f"{header.total_bytes} bytes of optimizer state; at most {largest}"
            )
        if len(header.peer_state.versions) > limits.MAX_FRAGMENTS:
            raise WireError("versions: more than there can be fragments")
        try:
            whole = await self._receive(
                ("peer", transfer), header, stream, lambda: engine.relay.allocate(header.total_bytes)
            )
        except OSError as error:
            engine.handle(ev.PeerStateFailed(transfer))
            raise Refused(TransferRefusal.NO_SPACE, f"the syncer has no room for it: {error.strerror}") from error
        if whole is None:
            return reply(True, TransferRefusal.PARTIAL)
        versions = tuple((held.epoch, held.version) for held in header.peer_state.versions)
        engine.relay.arrived(Relayed(transfer, whole, versions, asked[1]))
        if asked[1]:
            await engine.keep_optimizer(whole)
        engine.handle(ev.PeerStateReceived(transfer))
        return reply(True)

    async def _base(self, header: sync_pb2.UploadHeader, stream: AsyncIterator[bytes]) -> bytes:
        bases, base = self._engine.bases, header.base
        connection = self._engine.sessions.of_process(header.process)
        number = connection.number if connection else 0
        rows = bases.admit(number, base, header.total_bytes)
        whole = await self._receive(
            ("base", header.process, base.fragment), header, stream, lambda: np.empty(header.total_bytes, np.uint8)
        )
        if whole is None:
            return reply(True, TransferRefusal.PARTIAL)
        await bases.take(number, base, rows, whole)
        return reply(True)

    # ------------------------------------------------------------- down

    async def download(self, raw: bytes, context: Any) -> AsyncIterator[bytes]:
        """What is asked for, or the word why not."""
        peer = await self._engine.sessions.doors.authorize(context)
        try:
            request = limits.parse(sync_pb2.DownloadRequest, raw, limits.MAX_HEADER_BYTES)
            limits.check_format(request.format)
            if objection := self._objection(request.process, peer, context):
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, objection)
            receipt = self._receipt(request)
            data, versions, word = await self._find(request)
            if data is None:
                async for part in wire_bulk.not_found(word):
                    yield part
                return
            parts = wire_bulk.send_part(
                data, request.offset, request.bytes, versions=held_to(versions), receipt=receipt
            )
            sent, whole = 0, wire_bulk.flat(data).nbytes
            wanted = min(request.bytes or limits.MAX_PART_BYTES, whole - request.offset)
            self._reading(request, whole)
            try:
                async for part in parts:
                    yield part
                sent = wanted
            finally:
                self._read(request, sent)
            self._engine.bytes_down += sent
            connection = self._engine.sessions.of_process(request.process)
            self._engine.traffic.sent(*self._whose(connection), sent)
        except WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    def _reading(self, request: sync_pb2.DownloadRequest, size: int) -> None:
        """A fragment's version that is being read is kept for its reader."""
        parameters = self._engine.parameters
        if parameters is not None and request.what in FRAGMENTS:
            reader = (request.process[: limits.MAX_REGIONS_TEXT], request.what)
            parameters.readers.begin(request.fragment, request.version, reader, size, time.monotonic())

    def _read(self, request: sync_pb2.DownloadRequest, sent: int) -> None:
        parameters = self._engine.parameters
        if parameters is not None and request.what in FRAGMENTS:
            reader = (request.process[: limits.MAX_REGIONS_TEXT], request.what)
            parameters.readers.end(request.fragment, request.version, reader, sent, time.monotonic())

    def _receipt(self, request: sync_pb2.DownloadRequest) -> bytes:
        """What goes with a version's bytes; nothing where it would be too large, or is not known."""
        engine, kinds = self._engine, sync_pb2.DownloadRequest
        if request.what not in (kinds.FULL, kinds.DELTA) or request.epoch != engine.epoch:
            return b""
        found = engine.parameters.broadcast(request.fragment, request.version) if engine.parameters else None
        if found is None:
            return b""
        if found.version == engine.core.versions[found.fragment]:
            return messages.receipt_to(engine.core.receipt(found.fragment))
        return found.receipt

    async def _find(self, request: sync_pb2.DownloadRequest) -> tuple[Array | None, tuple[tuple[int, int], ...], str]:
        """The bytes asked for (None: not to be had), the versions they go with, and the word why not."""
        engine, kinds = self._engine, sync_pb2.DownloadRequest
        if request.what == kinds.JOB and not request.job:  # who asks for it may not know its name
            return np.frombuffer(handout(engine.job), np.uint8), (), ""
        if request.job != engine.job.metadata.name:
            return None, (), PushRefusal.OTHER_JOB.value
        if request.what in FRAGMENTS:
            found = None
            if engine.parameters is not None and request.epoch == engine.epoch:
                found = engine.parameters.broadcast(request.fragment, request.version)
            if found is None:
                return None, (), "superseded"
            data = found.full if request.what == kinds.FULL else found.delta
            return data, (), "no-delta"
        if request.what == kinds.LAYOUT and engine.layout is not None:
            return np.frombuffer(engine.layout.to_json().encode(), np.uint8), (), ""
        if request.what == kinds.PEER_STATE:
            relayed = engine.relay.get(request.transfer)
            return (None, (), "unknown-transfer") if relayed is None else (relayed.data, relayed.versions, "")
        name = {kinds.FROZEN: engine.frozen, kinds.OPTIMIZER: engine.optimizer}.get(request.what, "")
        if not name:
            return None, (), "none"
        return await engine.blob(name), (), ""
