"""The wire: limits, channel options, and bulk bytes beside protobuf.

Control messages are protobuf and small. Bulk bytes (pushes, broadcasts, version
0, optimizer state) never are protobuf: the two methods of the Bulk service carry
one header message and then raw chunks, with identity serialisers, so that a
chunk is copied once on its way in and once on its way out and is never parsed.

A payload is split into **parts**: contiguous ranges of bytes, each sent by a call
of its own, over one of several channels (one connection each, because one TCP
stream does not fill a wide-area link). A part's header says how long the whole
is, which range this is, and the xxh3-64 checksum of the range. The receiver knows
the exact size before the first chunk (from layout and encoding, or from an
announcement), allocates it once, and receives into it. Every upload call gets a
reply: ``partial`` for a part that does not complete the payload, and the verdict
for the one that does. A part that breaks breaks its payload; a retry sends the
whole again under the same id.

Limits. gRPC limits message sizes per connection and not per method, so a control
message is measured here (``parse``) before protobuf sees it.

Keepalive: an idle connection is pinged every ``KEEPALIVE_SECONDS``: less than the
shortest idle timeout of common load balancers (60 s), and not so often that a
server or a firewall takes it for abuse; a dead peer is noticed ``KEEPALIVE_ANSWER_SECONDS``
later. Proxies of the environment are never used: a learner's proxy settings are
for the web, and gRPC through an HTTP proxy loses its long streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, TypeVar

import grpc
import numpy as np
import xxhash
from google.protobuf.message import DecodeError, Message
from grpc import aio

from . import sync_pb2
from .meter import Meter

FORMAT = 1  # of messages; the present and the previous one are understood
PREVIOUS_FORMAT = 1  # there is none before the first

MAX_CONTROL_BYTES = 1 << 20  # any protobuf message
MAX_REPLY_BYTES = 16 << 20  # a reply of the control service, status and report included
MAX_HEADER_BYTES = 64 << 10  # UploadHeader, DownloadRequest, DownloadHeader
MAX_FRAGMENTS = 512  # a Report has a row of at most 90 bytes per fragment: 46 KiB of a push's header
MAX_RECEIPT_BYTES = 48 << 10  # in a DownloadHeader or a Base; about 50 bytes per slot
MAX_CURSORS = 256  # leases that a slot may hold; 36 bytes each in a Report
MAX_REGIONS_TEXT = 64  # characters of a region's name, and of a process id
MAX_TEXT = 4096  # characters of any other text in a control message
CHUNK_BYTES = 2 << 20  # measured on loopback: 1-2 MiB is the plateau, 4 MiB halves it
MAX_CHUNK_BYTES = 4 << 20  # accepted
MAX_PART_BYTES = 64 << 20
MIN_PART_BYTES = 4 << 20  # smaller payloads are not split further
MAX_FRAGMENT_BYTES = 1 << 36  # 64 GiB: a fragment's size as anybody may state it

KEEPALIVE_SECONDS = 30
KEEPALIVE_ANSWER_SECONDS = 20
CONNECT_SECONDS = 2  # one try to connect, TCP and TLS; after it the name is resolved anew
JOIN_SECONDS = 10.0  # a session's first message, both ways
STALL_SECONDS = 30.0  # without a chunk in or out, a transfer is given up
SLOWEST_BYTES_PER_SECOND = 256 << 10  # a transfer slower than this is given up

SERVICE = "diloco.v1.Bulk"
UPLOAD = f"/{SERVICE}/Upload"
DOWNLOAD = f"/{SERVICE}/Download"
SESSION_SERVICE = "diloco.v1.Sync"
SESSION = f"/{SESSION_SERVICE}/Session"

PARTIAL = "partial"  # UploadReply.reason of a part that does not complete its payload
BUSY = "busy"  # UploadReply.reason: too many uploads at once; try again after a pause

M = TypeVar("M", bound=Message)
Option = tuple[str, Any]
Buffer = bytes | bytearray | memoryview


class WireError(Exception):
    """A message or payload breaks the rules of the wire; the message says which."""


class ChecksumError(WireError):
    """A part came whole, and its bytes are not those that its sender had."""


class TransferError(Exception):
    """A transfer did not come through. ``retry``: it may, if tried again later."""

    def __init__(self, message: str, retry: bool) -> None:
        super().__init__(message)
        self.retry = retry


def channel_options(bulk: bool = False) -> list[Option]:
    """Options of a client's channel; ``bulk`` for channels that carry Bulk calls.

    Each channel has a connection of its own (no shared subchannels).
    """
    largest = MAX_CHUNK_BYTES if bulk else MAX_CONTROL_BYTES
    return [
        *_common(largest),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", CONNECT_SECONDS * 1000),  # how long one try may take
        ("grpc.max_reconnect_backoff_ms", CONNECT_SECONDS * 1000),
    ]


def control_options() -> list[Option]:
    """Options of a control client's channel: replies may be large, and a connection that is not
    used is given up, for an operator talks to many syncers."""
    return [
        *_common(MAX_REPLY_BYTES),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", CONNECT_SECONDS * 1000),
        ("grpc.max_reconnect_backoff_ms", CONNECT_SECONDS * 1000),
        ("grpc.client_idle_timeout_ms", 15_000),
    ]


def server_options(reply_bytes: int = MAX_CHUNK_BYTES, connections: int | None = None) -> list[Option]:
    """Options of the syncer's servers; ``reply_bytes``: the largest message down; ``connections``: the
    most at once, None: any number. A port in use is an error (no SO_REUSEPORT)."""
    return [
        *([("grpc.max_allowed_incoming_connections", connections)] if connections is not None else []),
        *_common(MAX_CHUNK_BYTES, reply_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", int(JOIN_SECONDS * 1000)),  # until HTTP/2 has begun
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_SECONDS * 1000 // 3),
        ("grpc.http2.max_ping_strikes", 5),
        ("grpc.max_concurrent_streams", 1024),
    ]


def _common(largest: int, sent: int = MAX_CHUNK_BYTES) -> list[Option]:
    return [
        ("grpc.max_send_message_length", sent),
        ("grpc.max_receive_message_length", largest),
        ("grpc.max_metadata_size", 16 << 10),
        ("grpc.http2.max_frame_size", 1 << 20),  # the default of 16 KiB halves the throughput
        ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_ANSWER_SECONDS * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_http_proxy", 0),
    ]


def flat(data: Any) -> memoryview:
    """The bytes of a contiguous buffer (bytes, memoryview, numpy array), not copied."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def checksum(data: Any) -> int:
    """xxh3-64 of a contiguous buffer (bytes, memoryview, numpy array)."""
    return xxhash.xxh3_64_intdigest(flat(data))


def parse(kind: type[M], data: bytes, limit: int = MAX_CONTROL_BYTES) -> M:
    """Parse one protobuf message from the network; ``WireError`` if it is too large or garbage."""
    if len(data) > limit:
        raise WireError(f"{kind.__name__} has {len(data)} bytes; at most {limit} are allowed")
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise WireError(f"this is not a {kind.__name__}") from error
    return message


def check_format(number: int) -> None:
    """``WireError`` unless the peer's format number is one of those understood."""
    if not PREVIOUS_FORMAT <= number <= FORMAT:
        raise WireError(
            f"format {number} is not understood here (known: {PREVIOUS_FORMAT} to {FORMAT}); "
            "run the same release of the software on both sides"
        )


def split(total: int, channels: int = 1) -> list[tuple[int, int]]:
    """Cut ``total`` bytes into parts ``(offset, bytes)``: as many as channels if they are worth it,
    as many more as ``MAX_PART_BYTES`` asks for; an empty payload is one empty part."""
    if total == 0:
        return [(0, 0)]
    wanted = min(max(channels, 1), max(total // MIN_PART_BYTES, 1))
    count = max(wanted, -(-total // MAX_PART_BYTES))
    edges = [total * i // count for i in range(count + 1)]
    return [(start, end - start) for start, end in itertools.pairwise(edges)]


def chunks(data: Any) -> Iterator[bytes]:
    """A part's bytes as messages of at most ``CHUNK_BYTES`` (gRPC wants ``bytes``: one copy each)."""
    view = flat(data)
    for start in range(0, view.nbytes, CHUNK_BYTES):
        yield bytes(view[start : start + CHUNK_BYTES])


def transfer_seconds(size: int) -> float:
    """How long a transfer of ``size`` bytes may take before it is given up."""
    return STALL_SECONDS + size / SLOWEST_BYTES_PER_SECOND


# ------------------------------------------------------------------ server's side

Context = Any  # grpc.aio.ServicerContext; its stubs are generic and the class is not
UploadHandler = Callable[[AsyncIterator[bytes], Context], Any]
DownloadHandler = Callable[[bytes, Context], AsyncIterator[bytes]]
SessionHandler = Callable[[AsyncIterator[bytes], Context], Any]  # a coroutine that uses context.write


def bulk_handlers(upload: UploadHandler, download: DownloadHandler) -> Any:
    """The Bulk service. ``upload(stream, context) -> bytes`` (UploadReply) gets the raw messages,
    header first; ``download(request, context)`` yields DownloadHeader and then chunks.

    An upload may be answered before its bytes were read (a refusal): the reply is sent at once,
    and the call ends when the client has seen it and stops, or after ``STALL_SECONDS``.
    Ending the call at once would make gRPC report an internal error instead of the reply.
    """

    async def answered(stream: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        yield await upload(stream, context)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STALL_SECONDS):
                async for _ in stream:
                    pass  # what was on its way when the refusal was sent

    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "Upload": grpc.stream_stream_rpc_method_handler(answered),
            "Download": grpc.unary_stream_rpc_method_handler(download),
        },
    )


def session_handler(session: SessionHandler) -> Any:
    """The Sync service with unparsed messages, so that their sizes are checked first (``parse``)."""
    return grpc.method_handlers_generic_handler(
        SESSION_SERVICE, {"Session": grpc.stream_stream_rpc_method_handler(session)}
    )


async def receive_into(stream: AsyncIterator[bytes], target: memoryview) -> int:
    """Receive exactly ``target.nbytes`` of raw chunks into ``target``; returns their checksum.

    Raises ``WireError`` for a chunk too large, too many or too few bytes, and for a
    sender that stalls for ``STALL_SECONDS``.
    """
    digest = xxhash.xxh3_64()
    position = 0
    while True:
        try:
            async with asyncio.timeout(STALL_SECONDS):
                chunk = await anext(stream, None)
        except TimeoutError as error:
            raise WireError(
                f"no bytes for {STALL_SECONDS:.0f} s, {position} of {target.nbytes} received"
            ) from error
        if chunk is None:
            break
        if len(chunk) > MAX_CHUNK_BYTES:
            raise WireError(f"a chunk of {len(chunk)} bytes; at most {MAX_CHUNK_BYTES} are allowed")
        if position + len(chunk) > target.nbytes:
            raise WireError(f"more than the {target.nbytes} bytes that the header announced")
        target[position : position + len(chunk)] = chunk
        digest.update(chunk)
        position += len(chunk)
    if position != target.nbytes:
        raise WireError(f"{position} bytes came, {target.nbytes} were announced")
    return digest.intdigest()


# ------------------------------------------------------------------ client's side


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
    channels: list[aio.Channel],
    parts: list[tuple[int, int]],
    one: Callable[[aio.Channel, int, int], Any],
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
        await _cancelled(tasks)
        # What failed holds this frame: without this a cycle would keep the call, and its channel, alive.
        tasks.clear()


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def upload(
    channels: aio.Channel | Sequence[aio.Channel],
    header: sync_pb2.UploadHeader,
    payload: Any,
    *,
    metadata: Sequence[tuple[str, str]] = (),
    timeout: float | None = None,
    meter: Meter | None = None,
) -> sync_pb2.UploadReply:
    """Send ``payload`` (any contiguous buffer) in parts over the channels; returns the verdict.

    ``header``'s format, total_bytes, offset, bytes and checksum are filled in here.
    ``timeout`` (seconds, of each part; None: by its size) bounds the wait. ``meter`` hears of each
    part that was taken, until its answer. Raises ``TransferError`` if a part did not come through. A
    refusal is a reply, not an error.
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
        head.format, head.total_bytes = FORMAT, view.nbytes
        head.offset, head.bytes, head.checksum = offset, size, checksum(part)
        first = head.SerializeToString()
        if len(first) > MAX_HEADER_BYTES:
            raise WireError(
                f"the upload's header has {len(first)} bytes; at most {MAX_HEADER_BYTES} are allowed"
            )
        limit = transfer_seconds(size) if timeout is None else timeout
        method: Any = channel.stream_stream(UPLOAD, request_serializer=None, response_deserializer=None)
        call = method(metadata=tuple(metadata), timeout=limit)
        reading = asyncio.ensure_future(call.read())  # a refusal may come before we have sent everything
        taken: int | None = None
        meter.begin(time.monotonic())
        try:
            await call.write(first)
            for chunk in chunks(part):
                if reading.done():
                    break
                await call.write(chunk)
            else:
                await call.done_writing()
            answer = await reading
            if not isinstance(answer, bytes):
                raise TransferError("upload: the call ended without a reply", retry=True)
            reply = parse(sync_pb2.UploadReply, answer, MAX_HEADER_BYTES)
            taken = size if reply.accepted else None
        except (aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await _ended(call, error, "upload") from error
        finally:
            meter.end(time.monotonic(), taken)
            reading.cancel()
            call.cancel()
        if not reply.accepted or reply.reason != PARTIAL:
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
    limit: int = MAX_FRAGMENT_BYTES,
    into: Any = None,
    metadata: Sequence[tuple[str, str]] = (),
    timeout: float | None = None,
    meter: Meter | None = None,
) -> tuple[sync_pb2.DownloadHeader, np.ndarray[Any, np.dtype[np.uint8]]]:
    """Fetch what ``request`` names in parts over the channels, checksums verified.

    ``size``: the exact size in bytes where it is known (an announcement said it);
    another size is a ``WireError``. Else the first reply says it, up to ``limit``.
    ``into``: a writable buffer of that size to receive into. ``meter`` hears of each part, from its
    header to its last byte. Returns the first part's header and uint8[total]; the array is empty when
    ``header.found`` is false.
    Raises ``TransferError`` if a part did not come through, ``WireError`` if it is wrong.
    """
    made = _many(channels)
    meter = meter or Meter()
    target: memoryview | None = None
    first: sync_pb2.DownloadHeader | None = None

    def allocate(total: int) -> memoryview:
        nonlocal target
        if target is None:
            target = flat(np.empty(total, np.uint8) if into is None else into)
            if target.nbytes != total:
                raise WireError(f"{total} bytes do not fit a buffer of {target.nbytes}")
        return target

    class NotFound(Exception):
        pass

    async def one(channel: aio.Channel, offset: int, count: int) -> None:
        nonlocal first
        ask = sync_pb2.DownloadRequest()
        ask.CopyFrom(request)
        ask.format, ask.offset, ask.bytes = FORMAT, offset, count
        seconds = transfer_seconds(count) if timeout is None else timeout
        method: Any = channel.unary_stream(DOWNLOAD, request_serializer=None, response_deserializer=None)
        call = method(ask.SerializeToString(), metadata=tuple(metadata), timeout=seconds)
        try:
            stream = call.__aiter__()
            raw = await anext(stream, None)
            if raw is None:
                raise TransferError("download: the stream ended before its header", retry=True)
            header = parse(sync_pb2.DownloadHeader, raw, MAX_HEADER_BYTES)
            if not header.found:
                first = header
                raise NotFound
            if size is not None and header.total_bytes != size:
                raise WireError(f"{header.total_bytes} bytes are offered, {size} were announced")
            if header.total_bytes > limit:
                raise WireError(f"{header.total_bytes} bytes are offered; at most {limit} are allowed here")
            if first is not None and header.total_bytes != first.total_bytes:
                raise WireError("what is downloaded changed under way")
            want = count if size is not None or first is not None else min(header.total_bytes, MAX_PART_BYTES)
            if header.bytes != want:
                raise WireError(f"a part of {header.bytes} bytes is offered, {want} were asked for")
            first = first or header
            whole = allocate(header.total_bytes)
            received: int | None = None
            meter.begin(time.monotonic())
            try:
                digest = await receive_into(stream, whole[offset : offset + want])
                received = want
            finally:
                meter.end(time.monotonic(), received)
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
            allocate(size)
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
    if not first.found or target is None:
        return first, np.empty(0, np.uint8)
    return first, np.frombuffer(target, np.uint8)


async def send_part(data: Any, offset: int, count: int, **fields: Any) -> AsyncIterator[bytes]:
    """The server's side of ``download``: header and chunks of ``data[offset:offset+count]``.

    ``count`` 0: to the end; more than ``MAX_PART_BYTES`` is never sent in one part.
    Raises ``WireError`` if the range lies outside. ``fields`` go into the header.
    """
    view = flat(data)
    if offset > view.nbytes or offset + count > view.nbytes or count > MAX_PART_BYTES:
        raise WireError(
            f"bytes {offset} to {offset + count} of {view.nbytes} (a part has at most {MAX_PART_BYTES} bytes)"
        )
    count = count or min(view.nbytes - offset, MAX_PART_BYTES)
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
