"""Bulk transfers: pushes, broadcasts, version 0 and optimizer state, as raw bytes beside protobuf.

A payload is split into **parts**: contiguous ranges of bytes, each sent by a call of its own, over one of several
channels (one connection each, because one TCP stream does not fill a wide-area link). A part's header says how long the
whole is, which range this is, and the xxh3-64 checksum of the range. The receiver knows the exact size before the first
chunk (from layout and encoding, or from an announcement), allocates it once, and receives into it. Every upload call
gets a reply: ``partial`` for a part that does not complete the payload, and the verdict for the one that does. A part
that breaks breaks its payload; a retry sends the whole again under the same id.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import grpc
import numpy as np
import xxhash
from grpc import aio

from diloco_protocol.common.meter import Meter
from diloco_protocol.vocabulary import TransferRefusal
from diloco_protocol.wire import convert, limits, sync_pb2
from diloco_protocol.wire.limits import WireError, transfer_seconds
from diloco_protocol.wire.services import DOWNLOAD, UPLOAD

Buffer = bytes | bytearray | memoryview
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Allocate = Callable[[int], Bytes]
"""Makes a writable uint8 array of so many bytes. May raise OSError."""


def allocate(total: int) -> Bytes:
    """Memory."""
    return np.empty(total, np.uint8)


class ChecksumError(WireError):
    """A part came whole, and its bytes are not those that its sender had."""


class TransferError(Exception):
    """A transfer did not come through. ``retry``: it may, if tried again later."""

    def __init__(self, message: str, retry: bool) -> None:
        super().__init__(message)
        self.retry = retry


def flat(data: Any) -> memoryview:
    """The bytes of a contiguous buffer (bytes, memoryview, numpy array), not copied."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def checksum(data: Any) -> int:
    """xxh3-64 of a contiguous buffer (bytes, memoryview, numpy array)."""
    return xxhash.xxh3_64_intdigest(flat(data))


def split(total: int, channels: int = 1) -> list[tuple[int, int]]:
    """Cut ``total`` bytes into parts ``(offset, bytes)``: as many as channels if they are worth it,
    as many more as ``MAX_PART_BYTES`` asks for; an empty payload is one empty part."""
    if total == 0:
        return [(0, 0)]
    wanted = min(max(channels, 1), max(total // limits.MIN_PART_BYTES, 1))
    count = max(wanted, -(-total // limits.MAX_PART_BYTES))
    edges = [total * i // count for i in range(count + 1)]
    return [(start, end - start) for start, end in itertools.pairwise(edges)]


def chunks(data: Any) -> Iterator[bytes]:
    """A part's bytes as messages of at most ``CHUNK_BYTES`` (gRPC wants ``bytes``: one copy each)."""
    view = flat(data)
    for start in range(0, view.nbytes, limits.CHUNK_BYTES):
        yield bytes(view[start : start + limits.CHUNK_BYTES])


async def receive_into(
    stream: AsyncIterator[bytes], target: memoryview, note_chunk: Callable[[], None] = lambda: None
) -> int:
    """Receive exactly ``target.nbytes`` of raw chunks into ``target``; returns their checksum. ``note_chunk`` is
    called after each chunk.

    Raises ``WireError`` for a chunk too large, too many or too few bytes, and for a
    sender that stalls for ``STALL_SECONDS``.
    """
    digest = xxhash.xxh3_64()
    position = 0
    while True:
        try:
            async with asyncio.timeout(limits.STALL_SECONDS):
                chunk = await anext(stream, None)
        except TimeoutError as error:
            raise WireError(
                f"no bytes for {limits.STALL_SECONDS:.0f} s, {position} of {target.nbytes} received"
            ) from error
        if chunk is None:
            break
        if len(chunk) > limits.MAX_CHUNK_BYTES:
            raise WireError(f"a chunk of {len(chunk)} bytes; at most {limits.MAX_CHUNK_BYTES} are allowed")
        if position + len(chunk) > target.nbytes:
            raise WireError(f"more than the {target.nbytes} bytes that the header announced")
        target[position : position + len(chunk)] = chunk
        digest.update(chunk)
        position += len(chunk)
        note_chunk()
    if position != target.nbytes:
        raise WireError(f"{position} bytes came, {target.nbytes} were announced")
    return digest.intdigest()


def _many(channels: aio.Channel | Sequence[aio.Channel]) -> list[aio.Channel]:
    made: list[aio.Channel] = [*channels] if isinstance(channels, Sequence) else [channels]
    if not made:
        raise ValueError("at least one channel is needed")
    return made


def _failed(error: aio.AioRpcError, what: str) -> TransferError:
    code = error.code()
    final = code in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    ) or "CERTIFICATE_VERIFY_FAILED" in (error.details() or "")  # the same certificate next time
    return TransferError(f"{what}: {code.name.lower().replace('_', ' ')}: {error.details()}", retry=not final)


async def _ended(call: Any, error: Exception, what: str) -> TransferError:
    """The error of a call that ended while we were writing to it."""
    if isinstance(error, aio.AioRpcError):
        return _failed(error, what)
    return TransferError(f"{what}: the call ended early: {await call.details()}", retry=True)


async def _run_parts(
    channels: list[aio.Channel], parts: list[tuple[int, int]], one: Callable[[aio.Channel, int, int], Any]
) -> None:
    """Run ``one(channel, offset, bytes)`` for every part, one at a time per channel; the first
    failure cancels the rest."""
    waiting = list(reversed(parts))

    async def work(channel: aio.Channel) -> None:
        while waiting:
            offset, size = waiting.pop()
            await one(channel, offset, size)

    tasks = [asyncio.create_task(work(channel)) for channel in channels[: len(parts)]]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # What failed holds this frame: without this a cycle would keep the call, and its channel, alive.
        tasks.clear()


async def upload(
    channels: aio.Channel | Sequence[aio.Channel],
    header: sync_pb2.UploadHeader,
    payload: Any,
    *,
    metadata: Sequence[tuple[str, str]] = (),
    timeout: float | None = None,
    meter: Meter | None = None,
    note_chunk: Callable[[], None] = lambda: None,
) -> sync_pb2.UploadReply:
    """Send ``payload`` (any contiguous buffer) in parts over the channels; returns the verdict.

    ``header``'s format, total_bytes, offset, bytes and checksum are filled in here. ``timeout`` (seconds, of each part;
    None: by its size) bounds the wait. ``meter`` hears of each part that was taken, until its answer. ``note_chunk``
    is called after each chunk that was sent. Raises ``TransferError`` if a part did not come through. A refusal is a
    reply, not an error.
    """
    view = flat(payload)
    made = _many(channels)
    meter = meter or Meter()
    verdict: sync_pb2.UploadReply | None = None

    class Refused(Exception):
        pass

    async def one(channel: aio.Channel, offset: int, size: int) -> None:
        nonlocal verdict
        part = view[offset : offset + size]
        head = sync_pb2.UploadHeader()
        head.CopyFrom(header)
        head.format, head.total_bytes = limits.FORMAT, view.nbytes
        head.offset, head.bytes, head.checksum = offset, size, checksum(part)
        first = head.SerializeToString()
        if len(first) > limits.MAX_HEADER_BYTES:
            raise WireError(
                f"the upload's header has {len(first)} bytes; at most {limits.MAX_HEADER_BYTES} are allowed"
            )
        limit = transfer_seconds(size) if timeout is None else timeout
        method: Any = channel.stream_stream(UPLOAD, request_serializer=None, response_deserializer=None)
        call = method(metadata=tuple(metadata), timeout=limit)
        reading = asyncio.ensure_future(call.read())  # a refusal may come before we have sent everything
        taken: int | None = None
        meter.begin(time.monotonic())
        try:
            # A refusal ends the call while we still send: then a write fails, and the answer that says why
            # has come all the same.
            with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(first)
                for chunk in chunks(part):
                    if reading.done():
                        break
                    await call.write(chunk)
                    note_chunk()
                else:
                    await call.done_writing()
            answer = await reading
            if not isinstance(answer, bytes):
                raise TransferError("upload: the call ended without a reply", retry=True)
            reply = convert.parse(sync_pb2.UploadReply, answer, limits.MAX_HEADER_BYTES)
            taken = size if reply.accepted else None
        except (aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await _ended(call, error, "upload") from error
        finally:
            meter.end(time.monotonic(), taken)
            reading.cancel()
            call.cancel()
        if not reply.accepted or reply.reason != TransferRefusal.PARTIAL:
            verdict = reply
        if not reply.accepted:
            raise Refused

    with contextlib.suppress(Refused):  # then the reply says why, and the other parts are of no use
        await _run_parts(made, split(view.nbytes, len(made)), one)
    if verdict is None:
        raise TransferError("upload: every part was received, and no verdict came", retry=True)
    return verdict


async def download(
    channels: aio.Channel | Sequence[aio.Channel],
    request: sync_pb2.DownloadRequest,
    *,
    size: int | None = None,
    limit: int = limits.MAX_FRAGMENT_BYTES,
    allocate: Allocate = allocate,
    metadata: Sequence[tuple[str, str]] = (),
    timeout: float | None = None,
    meter: Meter | None = None,
) -> tuple[sync_pb2.DownloadHeader, Bytes]:
    """Fetch what ``request`` names in parts over the channels, checksums verified.

    ``size``: the exact size in bytes where it is known (an announcement said it); another size is a ``WireError``. Else
    the first reply says it, up to ``limit``. ``allocate`` makes the array to receive into. ``meter`` hears
    of each part, from its header to its last byte. Returns the first part's header and uint8[total]; the array is empty
    when ``header.found`` is false. Raises ``TransferError`` if a part did not come through, ``WireError`` if it is
    wrong.
    """
    made = _many(channels)
    meter = meter or Meter()
    received: Bytes = np.empty(0, np.uint8)
    target: memoryview | None = None  # its bytes
    first: sync_pb2.DownloadHeader | None = None

    def buffer(total: int) -> memoryview:
        nonlocal received, target
        if target is None:
            received = allocate(total)
            target = flat(received)
        return target

    class NotFound(Exception):
        pass

    async def one(channel: aio.Channel, offset: int, count: int) -> None:
        nonlocal first
        ask = sync_pb2.DownloadRequest()
        ask.CopyFrom(request)
        ask.format, ask.offset, ask.bytes = limits.FORMAT, offset, count
        seconds = transfer_seconds(count) if timeout is None else timeout
        method: Any = channel.unary_stream(DOWNLOAD, request_serializer=None, response_deserializer=None)
        call = method(ask.SerializeToString(), metadata=tuple(metadata), timeout=seconds)
        try:
            stream = call.__aiter__()
            raw = await anext(stream, None)
            if raw is None:
                raise TransferError("download: the stream ended before its header", retry=True)
            header = convert.parse(sync_pb2.DownloadHeader, raw, limits.MAX_HEADER_BYTES)
            if not header.found:
                first = header
                raise NotFound
            if size is not None and header.total_bytes != size:
                raise WireError(f"{header.total_bytes} bytes are offered, {size} were announced")
            if header.total_bytes > limit:
                raise WireError(f"{header.total_bytes} bytes are offered; at most {limit} are allowed here")
            if first is not None and header.total_bytes != first.total_bytes:
                raise WireError("what is downloaded changed under way")
            want = count if size is not None or first is not None else min(header.total_bytes, limits.MAX_PART_BYTES)
            if header.bytes != want:
                raise WireError(f"a part of {header.bytes} bytes is offered, {want} were asked for")
            first = first or header
            whole = buffer(header.total_bytes)
            taken: int | None = None
            meter.begin(time.monotonic())
            try:
                digest = await receive_into(stream, whole[offset : offset + want])
                taken = want
            finally:
                meter.end(time.monotonic(), taken)
            if digest != header.checksum:
                raise ChecksumError("the checksum of a downloaded part is wrong")
        except aio.AioRpcError as error:
            raise _failed(error, "download") from error
        finally:
            call.cancel()

    try:
        if size is not None:
            if size > limit:
                raise WireError(f"{size} bytes were announced; at most {limit} are allowed here")
            buffer(size)
            await _run_parts(made, split(size, len(made)), one)
        else:
            await one(made[0], 0, 0)
            assert first is not None
            rest = first.total_bytes - first.bytes
            if rest:
                start = first.bytes
                await _run_parts(made, [(start + o, n) for o, n in split(rest, len(made))], one)
    except NotFound:
        pass  # the header says why
    assert first is not None
    return first, received


async def send_part(data: Any, offset: int, count: int, **fields: Any) -> AsyncIterator[bytes]:
    """The server's side of ``download``: header and chunks of ``data[offset:offset+count]``.

    ``count`` 0: to the end; more than ``MAX_PART_BYTES`` is never sent in one part.
    Raises ``WireError`` if the range lies outside. ``fields`` go into the header.
    """
    view = flat(data)
    if offset > view.nbytes or offset + count > view.nbytes or count > limits.MAX_PART_BYTES:
        raise WireError(
            f"bytes {offset} to {offset + count} of {view.nbytes} (a part has at most {limits.MAX_PART_BYTES} bytes)"
        )
    count = count or min(view.nbytes - offset, limits.MAX_PART_BYTES)
    part = view[offset : offset + count]
    header = sync_pb2.DownloadHeader(
        found=True, total_bytes=view.nbytes, bytes=count, checksum=checksum(part), **fields
    )
    yield header.SerializeToString()
    for chunk in chunks(part):
        yield chunk


async def not_found(reason: str) -> AsyncIterator[bytes]:
    """The server's side of ``download`` when there is no such thing."""
    yield sync_pb2.DownloadHeader(found=False, reason=reason).SerializeToString()
