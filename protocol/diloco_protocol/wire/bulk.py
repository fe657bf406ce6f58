"""Bulk transfers: pushes, broadcasts, version 0 and optimizer state, as raw bytes beside protobuf.

A payload is split into **parts**: contiguous ranges of bytes, each sent by a call of its own (bulk_calls.py), over one
of several connections, because one TCP stream does not fill a wide-area link. A part's header says how long the whole
is, which range this is, and the xxh3-64 checksum of the range. The receiver knows the exact size before the first byte
(from layout and encoding, or from an announcement), allocates it once, and receives into it. Every upload call gets a
reply: ``partial`` for a part that does not complete the payload, and the verdict for the one that does.

What has come is kept. ``download`` goes on from a ``PartialDownload`` that a broken one has left, byte by byte.
``upload`` leaves out the parts that its ``SentParts`` name. A transfer has no deadline: it lives while bytes of its
session move (``progress``). Its connections are ``Lanes``: each carries one part at a time, and rests after a break.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import xxhash

from diloco_protocol.common.meter import Meter
from diloco_protocol.common.tasks import cancel_tasks
from diloco_protocol.vocabulary import TransferRefusal
from diloco_protocol.wire import limits, sync_pb2
from diloco_protocol.wire.bulk_calls import BulkCall, CallFailed
from diloco_protocol.wire.byte_stream import StreamBroken
from diloco_protocol.wire.limits import WireError, transfer_seconds
from diloco_protocol.wire.progress import Progress, Stalled, await_progress

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Allocate = Callable[[int], Bytes]
"""Makes a writable uint8 array of so many bytes. May raise OSError."""
FIRST_REST_SECONDS = 2.0  # of a channel on which a part broke; twice as long after each further break in succession
LONGEST_REST_SECONDS = 15.0


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


def checksum_text(data: Any) -> str:
    """``checksum`` as the digest of a fragment of version 0."""
    return f"{checksum(data):016x}"


def split(total: int, channels: int = 1, most: int | None = None) -> list[tuple[int, int]]:
    """Cut ``total`` bytes into parts ``(offset, bytes)``: as many as channels if they are worth it,
    as many more as ``most`` (``MAX_PART_BYTES``) asks for; an empty payload is one empty part."""
    if total == 0:
        return [(0, 0)]
    wanted = min(max(channels, 1), max(total // limits.MIN_PART_BYTES, 1))
    count = max(wanted, -(-total // (most or limits.MAX_PART_BYTES)))
    edges = [total * i // count for i in range(count + 1)]
    return [(start, end - start) for start, end in itertools.pairwise(edges)]


class Source(Protocol):
    """Where the bytes of a part come from: a call, at either end."""

    async def read_into(self, view: memoryview, check: Callable[[], None] = lambda: None) -> int: ...


class Channel(Protocol):
    """A connection of the client, as ``bulk_calls.BulkConnection``."""

    async def begin(self, **what: Any) -> BulkCall: ...

    def drop(self) -> None: ...


async def receive_into(
    source: Source,
    target: memoryview,
    check: Callable[[], None] = lambda: None,
    note: Callable[[int], None] = lambda count: None,
    progress: Progress | None = None,
    digest: xxhash.xxh3_64 | None = None,
) -> int:
    """Receive exactly ``target.nbytes`` into ``target``; returns their checksum, or that of ``digest``, which goes on
    with them. ``check`` is called before bytes are written, and may raise; ``note`` hears how many were. ``progress``:
    of the session. Raises ``WireError`` for too few bytes, ``Stalled``, and what ``source`` raises.
    """
    digest = xxhash.xxh3_64() if digest is None else digest
    progress = progress or Progress()
    loop = asyncio.get_running_loop()
    position = 0
    while position < target.nbytes:
        view = target[position : position + limits.CHUNK_BYTES]
        try:
            count = await await_progress(source.read_into(view, check), progress)
        except Stalled as error:
            raise Stalled(f"{error}, {position} of {target.nbytes} received") from error
        if not count:
            raise WireError(f"{position} bytes came, {target.nbytes} were announced")
        digest.update(view[:count])
        position += count
        progress.record_bytes(count, loop.time())
        note(count)
    return digest.intdigest()


class Lanes:
    """Connections that carry one part at a time each, whichever transfers they belong to; the first to ask is the first
    served. A connection on which a part broke rests while the others carry on."""

    def __init__(self, channels: Channel | Sequence[Channel]) -> None:
        self._channels = [*channels] if isinstance(channels, Sequence) else [channels]
        self._breaks = [0] * len(self._channels)  # in succession
        self._in_use: set[int] = set()
        self._is_retired = False
        self._free: asyncio.LifoQueue[int] = asyncio.LifoQueue()  # what was used last is there, and warm
        for index in reversed(range(len(self._channels))):
            self._free.put_nowait(index)

    def __len__(self) -> int:
        return len(self._channels)

    @contextlib.asynccontextmanager
    async def borrow_channel(self) -> AsyncIterator[Channel]:
        """Wait for a connection, and have it to oneself. Raises TransferError where they are retired."""
        index = await self._free.get()
        if self._is_retired:
            self._free.put_nowait(index)  # for who waits too
            raise TransferError("nothing goes there any more", retry=True)
        rest = 0.0
        self._in_use.add(index)
        try:
            yield self._channels[index]
            self._breaks[index] = 0
        except TransferError as error:
            if error.retry:
                rest = min(FIRST_REST_SECONDS * 2.0 ** min(self._breaks[index], 8), LONGEST_REST_SECONDS)
                self._breaks[index] += 1
            raise
        finally:
            self._return_channel(index, rest)

    def _return_channel(self, index: int, rest: float) -> None:
        self._in_use.discard(index)
        if self._is_retired:
            self._channels[index].drop()
        if rest:
            asyncio.get_running_loop().call_later(rest, self._free.put_nowait, index)
        else:
            self._free.put_nowait(index)

    def retire(self) -> None:
        """Begin no more parts. Connections that carry none are dropped, the others as soon as they carry none."""
        self._is_retired = True
        for index, channel in enumerate(self._channels):
            if index not in self._in_use:
                channel.drop()
        self._free.put_nowait(0)  # who waits finds out


Channels = Lanes | Channel | Sequence[Channel]


def _lanes(channels: Channels) -> Lanes:
    lanes = channels if isinstance(channels, Lanes) else Lanes(channels)
    if not len(lanes):
        raise ValueError("at least one connection is needed")
    return lanes


@dataclass(slots=True)
class Part:
    """A range of a payload. ``received``: how much of a download's has come."""

    offset: int
    size: int
    done: bool = False
    received: int = 0
    checksum: int = 0  # of the whole range, as the first header said it
    digest: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)  # of what has come

    def begin_anew(self) -> None:
        self.received, self.digest = 0, xxhash.xxh3_64()


@dataclass(slots=True)
class SentParts:
    """The parts of one upload, which outlive a try: those that are ``done`` are not sent again."""

    parts: list[Part] = field(default_factory=list)

    @property
    def done(self) -> int:
        return sum(part.done for part in self.parts)


@dataclass(slots=True)
class PartialDownload:
    """What has come of one payload: its first header, its bytes, and how far each part is."""

    header: sync_pb2.DownloadHeader | None = None
    data: Bytes = field(default_factory=lambda: np.empty(0, np.uint8))
    parts: list[Part] = field(default_factory=list)

    @property
    def received(self) -> int:
        """Bytes."""
        return sum(part.received for part in self.parts)

    def check_header(self, header: sync_pb2.DownloadHeader, part: Part, wanted: int, total: int) -> None:
        """Take the header of what is left of a part. Raises WireError unless ``wanted`` bytes of ``total`` follow."""
        if self.header is not None and header.total_bytes != self.header.total_bytes:
            raise WireError("what is downloaded changed under way")
        if header.total_bytes != total:
            raise WireError(f"{header.total_bytes} bytes are offered, {total} were announced")
        if header.bytes != wanted:
            raise WireError(f"a part of {header.bytes} bytes is offered, {wanted} were asked for")
        self.header = self.header or header
        if not part.received:
            part.checksum = header.checksum


async def _run_parts(lanes: Lanes, parts: list[Part], one: Callable[[Channel, Part], Any]) -> None:
    """Run ``one(channel, part)`` for every part that is not done; the first failure cancels the rest."""
    waiting = [part for part in reversed(parts) if not part.done]

    async def work() -> None:
        while waiting:
            async with lanes.borrow_channel() as channel:
                if waiting:
                    await one(channel, waiting.pop())

    tasks = [asyncio.create_task(work()) for _ in range(min(len(lanes), len(waiting)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        await cancel_tasks(tasks)
        # What failed holds this frame: without this a cycle would keep the call, and its channel, alive.
        tasks.clear()


async def upload(
    channels: Channels,
    header: sync_pb2.UploadHeader,
    payload: Any,
    *,
    meter: Meter | None = None,
    note_chunk: Callable[[], None] = lambda: None,
    progress: Progress | None = None,
    sent: SentParts | None = None,
) -> sync_pb2.UploadReply:
    """Send ``payload`` (any contiguous buffer) in parts over the connections; returns the verdict.

    ``header``'s format, total_bytes, offset, bytes and checksum are filled in here. ``meter`` hears of each part that
    was taken, until its answer. ``note_chunk`` is called after each chunk that was sent. ``progress``: of the session.
    ``sent`` names the parts that earlier tries of the same payload have sent, and is kept up to date. Raises
    ``TransferError`` if a part did not come through. A refusal is a reply, not an error.
    """
    view = flat(payload)
    lanes = _lanes(channels)
    meter, progress = meter or Meter(), progress or Progress()
    sent = sent or SentParts()
    sent.parts = sent.parts or [Part(*at) for at in split(view.nbytes, len(lanes), most=limits.MAX_UPLOAD_PART_BYTES)]
    verdict: sync_pb2.UploadReply | None = None

    class Refused(Exception):
        pass

    async def one(channel: Channel, part: Part) -> None:
        nonlocal verdict
        if verdict is not None:  # the receiver has the payload already
            return
        head = sync_pb2.UploadHeader()
        head.CopyFrom(header)
        head.format, head.total_bytes = limits.FORMAT, view.nbytes
        head.offset, head.bytes = part.offset, part.size
        reply = await _upload_part(
            channel,
            head,
            view[part.offset : part.offset + part.size],
            meter=meter,
            note_chunk=note_chunk,
            progress=progress,
        )
        part.done = reply.accepted
        if not reply.accepted or reply.reason != TransferRefusal.PARTIAL:
            verdict = reply
        if not reply.accepted:
            raise Refused

    with contextlib.suppress(Refused):  # then the reply says why, and the other parts are of no use
        await _run_parts(lanes, sent.parts, one)
    if verdict is None:
        sent.parts.clear()  # the receiver lacks one of them, or its verdict was lost
        raise TransferError("upload: every part was received, and no verdict came", retry=True)
    return verdict


async def _upload_part(
    channel: Channel,
    head: sync_pb2.UploadHeader,
    part: memoryview,
    *,
    meter: Meter,
    note_chunk: Callable[[], None],
    progress: Progress,
) -> sync_pb2.UploadReply:
    """Send one part; its reply."""
    head.checksum = checksum(part)
    if (size := head.ByteSize()) > limits.MAX_HEADER_BYTES:
        raise WireError(f"the upload's header has {size} bytes; at most {limits.MAX_HEADER_BYTES} are allowed")
    loop = asyncio.get_running_loop()
    taken: int | None = None
    sent = 0
    meter.begin(time.monotonic())
    try:
        async with _call(channel, progress, "upload", upload=head) as call:
            reading = asyncio.ensure_future(call.read_reply())  # a refusal may come before we have sent everything
            try:
                # A refusal may end the connection while we still send, and has come all the same.
                age = 0 if head.HasField("peer_state") else -1
                with contextlib.suppress(StreamBroken), progress.link.carry_part(age) as turns:
                    while sent < part.nbytes and not reading.done():
                        count = await progress.link.await_turn(turns, min(limits.CHUNK_BYTES, part.nbytes - sent))
                        note = lambda count: progress.record_bytes(count, loop.time())  # noqa: E731
                        chunk = part[sent : sent + count]
                        await await_progress(call.write(chunk, note), progress)
                        sent += count
                        note_chunk()
                reply = await await_progress(asyncio.shield(reading), progress, transfer_seconds(part.nbytes))
                with contextlib.suppress(StreamBroken, Stalled):  # the answer is here all the same
                    await await_progress(call.give_up_upload(), progress)
            finally:
                await cancel_tasks([reading])
            if not reply.HasField("upload"):
                raise WireError("an upload was answered as a download")
            taken = part.nbytes if reply.upload.accepted else None
            return reply.upload
    finally:
        meter.end(time.monotonic(), taken)


@contextlib.asynccontextmanager
async def _call(channel: Channel, progress: Progress, name: str, **what: Any) -> AsyncIterator[BulkCall]:
    """A call, whose failures are TransferErrors."""
    call = None
    try:
        call = await await_progress(channel.begin(**what), progress)
        yield call
    except (CallFailed, StreamBroken, Stalled) as error:
        retry = not (isinstance(error, CallFailed) and error.final)
        raise TransferError(f"{name}: {error}", retry) from error
    finally:
        if call is not None:
            call.end()


async def download(
    channels: Channels,
    request: sync_pb2.DownloadRequest,
    *,
    size: int | None = None,
    limit: int = limits.MAX_FRAGMENT_BYTES,
    allocate: Allocate = allocate,
    meter: Meter | None = None,
    progress: Progress | None = None,
    kept: PartialDownload | None = None,
) -> tuple[sync_pb2.DownloadHeader, Bytes]:
    """Fetch what ``request`` names in parts over the connections, checksums verified.

    ``size``: the exact size in bytes where it is known (an announcement said it); another size is a ``WireError``. Else
    the first reply says it, up to ``limit``. ``allocate`` makes the array to receive into. ``meter`` hears of each
    part, from its header to its last byte. ``progress``: of the session. ``kept``: what an earlier try of the same
    request has left; this one goes on from there. Returns the first part's header and uint8[total]; the array is empty
    when ``header.found`` is false. Raises ``TransferError`` if a part did not come through as it was sent,
    ``WireError`` if a header is wrong.
    """
    if size is not None and size > limit:
        raise WireError(f"{size} bytes were announced; at most {limit} are allowed here")
    lanes = _lanes(channels)
    meter, progress = meter or Meter(), progress or Progress()
    kept = PartialDownload() if kept is None else kept

    def begin(total: int, parts: list[tuple[int, int]]) -> None:
        kept.data = allocate(total)
        kept.parts += [Part(*at) for at in parts]

    async def one(channel: Channel, part: Part) -> None:
        if part.received == 0 or part.received < part.size:
            await ask(channel, part)
        if part.digest.intdigest() != part.checksum:
            part.begin_anew()
            raise TransferError("download: a part's checksum is wrong", retry=True)
        part.done = True

    async def ask(channel: Channel, part: Part) -> None:
        asked = sync_pb2.DownloadRequest()
        asked.CopyFrom(request)
        asked.format, asked.offset, asked.bytes = limits.FORMAT, part.offset + part.received, part.size - part.received
        progress.begin(asyncio.get_running_loop().time())
        async with _call(channel, progress, "download", download=asked) as call:
            reply = await await_progress(call.read_reply(), progress)
            if not reply.HasField("download"):
                raise WireError("a download was answered as an upload")
            header = reply.download
            if not header.found:
                raise _NotFound(header)
            if size is None and kept.header is None:
                if (total := header.total_bytes) > limit:
                    raise WireError(f"{total} bytes are offered; at most {limit} are allowed here")
                asked.bytes = part.size = min(total, limits.MAX_PART_BYTES)
                left = total - part.size
                begin(total, [(part.size + at, count) for at, count in split(left, len(lanes))] if left else [])
            kept.check_header(header, part, asked.bytes, kept.data.nbytes)
            await _receive_part(call, part, kept, meter, progress=progress)

    try:
        if size is not None and not kept.parts:
            begin(size, split(size, len(lanes)))
        elif kept.header is None and size is None:
            kept.parts[:] = [Part(0, 0)]
            await _run_parts(lanes, kept.parts[:], one)
        await _run_parts(lanes, kept.parts, one)
    except _NotFound as missing:
        return missing.header, np.empty(0, np.uint8)  # the header says why
    assert kept.header is not None
    return kept.header, kept.data


class _NotFound(Exception):
    """There is no such thing to download: the header says why."""

    def __init__(self, header: sync_pb2.DownloadHeader) -> None:
        super().__init__(header.reason)
        self.header = header


async def _receive_part(call: BulkCall, part: Part, kept: PartialDownload, meter: Meter, *, progress: Progress) -> None:
    """Receive what is left of a part."""
    start, rest = part.offset + part.received, part.size - part.received

    def count_received(count: int) -> None:
        part.received += count

    taken: int | None = None
    meter.begin(time.monotonic())
    try:
        target = flat(kept.data)[start : start + rest]
        await receive_into(call, target, note=count_received, progress=progress, digest=part.digest)
        taken = rest
    finally:
        meter.end(time.monotonic(), taken)


def cut_part(
    data: Any, offset: int, count: int, known: int | None = None, **fields: Any
) -> tuple[sync_pb2.DownloadHeader, memoryview]:
    """The server's side of ``download``: header and bytes of ``data[offset:offset+count]``.

    ``count`` 0: to the end; more than ``MAX_PART_BYTES`` is never sent in one part. ``known``: its checksum, if it was
    taken before. Raises ``WireError`` if the range lies outside. ``fields`` go into the header.
    """
    view = flat(data)
    if offset > view.nbytes or offset + count > view.nbytes or count > limits.MAX_PART_BYTES:
        raise WireError(
            f"bytes {offset} to {offset + count} of {view.nbytes} (a part has at most {limits.MAX_PART_BYTES} bytes)"
        )
    count = count or min(view.nbytes - offset, limits.MAX_PART_BYTES)
    part = view[offset : offset + count]
    known = checksum(part) if known is None else known
    header = sync_pb2.DownloadHeader(found=True, total_bytes=view.nbytes, bytes=count, checksum=known, **fields)
    return header, part
