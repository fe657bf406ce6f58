"""Uploads put together from their parts.

The first part of a payload whose header was admitted begins an upload: its buffer is allocated once, and every part is
received straight into its range; into that of a file by the spool's thread, a chunk at a time. Parts come over several
connections at once, in any order, and never overlap. The part that fills the last range is answered with the verdict,
the others with ``partial``.

Bounds: ``MAX_PER_PROCESS`` uploads of one process at a time and ``MAX_ALL`` in all (more are refused as ``busy``); an
upload in which nothing has come for ``IDLE_SECONDS`` is dropped. A part that fails is forgotten, and the others are
kept: the sender sends that range again. A range that is sent again replaces what was there, or is still under way over
a connection that is dead. One that overlaps others starts the upload over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field

import numpy as np

from diloco_protocol.wire import bulk, limits, sync_pb2
from diloco_protocol.wire.limits import WireError
from diloco_protocol.wire.progress import Progress
from diloco_syncer.store.records import Array
from diloco_syncer.store.spool import Spool

MAX_PER_PROCESS = 8
MAX_ALL = 512
SPARE_PARTS = 64  # of one upload, beyond one for each MIN_PART_BYTES
IDLE_SECONDS = 2 * limits.STALL_SECONDS

Allocate = Callable[[], Array | asyncio.Future[Array]]
ReadPayload = Callable[[Hashable, Allocate], Awaitable[Array | None]]
"""Receives one part of the payload that a key names into the array that ``allocate()`` makes for the first part, at
once or in a thread. Returns the whole payload (uint8), or None while parts are missing."""


def upload_reply(accepted: bool, reason: str = "", message: str = "") -> sync_pb2.UploadReply:
    """An upload's answer."""
    return sync_pb2.UploadReply(accepted=accepted, reason=reason, message=message[: limits.MAX_TEXT])


class UploadRefused(Exception):
    """An upload is refused: ``reason`` is a fixed word, the message is for people."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class TooManyUploads(Exception):
    """Too many uploads at once; the sender shall try again after a pause."""


@dataclass(slots=True, eq=False)
class Claim:
    """One part's range. ``done``: all of it is there."""

    done: bool = False


@dataclass(slots=True)
class SpooledSource:
    """What ``source`` gives, for a range of a file: it comes into memory, and the spool writes it."""

    source: bulk.Source
    spool: Spool
    _chunk: memoryview = field(default_factory=lambda: memoryview(bytearray(limits.CHUNK_BYTES)))

    async def read_into(self, view: memoryview, check: Callable[[], None] = lambda: None) -> int:
        count = await self.source.read_into(self._chunk[: view.nbytes], check)
        await self.spool.write(view[:count], self._chunk[:count])
        return count


@dataclass(slots=True)
class PartialUpload:
    """One payload of ``size`` bytes being received into ``array``."""

    key: Hashable
    process: str
    size: int
    array: Array | asyncio.Future[Array]
    claimed: dict[tuple[int, int], Claim] = field(default_factory=dict)  # by where it starts and ends
    touched: float = field(default_factory=time.monotonic)

    @property
    def is_whole(self) -> bool:
        """Whether every byte is there: claims never overlap."""
        return sum(end - start for (start, end), claim in self.claimed.items() if claim.done) == self.size

    def claim_range(self, start: int, size: int) -> Claim | None:
        """Reserve a range for a part; None if it overlaps another one that is reserved. Raises ``WireError`` for more
        parts than any sender makes."""
        end = start + size
        self.claimed.pop((start, end), None)
        if len(self.claimed) >= SPARE_PARTS + self.size // limits.MIN_PART_BYTES:
            raise WireError(f"{len(self.claimed)} parts of {self.size} bytes: send fewer, larger ones")
        if any(start < other and begin < end for begin, other in self.claimed):
            return None
        claim = self.claimed[start, end] = Claim()
        self.touched = time.monotonic()
        return claim


class MultipartUploads:
    """All uploads whose parts are coming."""

    def __init__(
        self, note_chunk: Callable[[Hashable, str, int], None] = lambda *_: None, spool: Spool | None = None
    ) -> None:
        """``note_chunk``: called with an upload's key and process, and how many bytes of it have come. ``spool``: has
        made the arrays that are files."""
        self._open: dict[Hashable, PartialUpload] = {}
        self._note_chunk = note_chunk
        self._spool = spool

    async def receive_part(
        self,
        key: Hashable,
        header: sync_pb2.UploadHeader,
        source: bulk.Source,
        allocate: Allocate,
        progress: Progress | None = None,
    ) -> Array | None:
        """Receive one part; see ``ReadPayload``. ``progress``: of the sender's session. Raises ``WireError`` (the part
        is gone then), ``TooManyUploads``, and what ``allocate`` raises."""
        size = header.total_bytes
        if header.bytes > limits.MAX_PART_BYTES or header.offset + header.bytes > size:
            raise WireError(
                f"a part of bytes {header.offset} to {header.offset + header.bytes} of {size} "
                f"(at most {limits.MAX_PART_BYTES} bytes a part)"
            )
        if size and not header.bytes:
            raise WireError("an empty part")
        upload = self._open.get(key)
        if upload is not None and upload.size != size:
            del self._open[key]
            raise WireError(f"total_bytes is {size}; this payload has {upload.size}")
        claim = None if upload is None else upload.claim_range(header.offset, header.bytes)
        if upload is None or claim is None:
            upload = self._open_upload(key, header.process, size, allocate)  # in place of one that is started over
            claim = upload.claim_range(header.offset, header.bytes)
        place = header.offset, header.offset + header.bytes

        def check_claim() -> None:
            if self._open.get(key) is not upload or upload.claimed.get(place) is not claim:
                raise WireError("this part was sent again, or its payload was started over")

        try:
            array = await self._find_array(upload)
            assert array.nbytes == size
            view = bulk.flat(array)[header.offset : header.offset + header.bytes]
            if isinstance(array, np.memmap) and self._spool is not None:
                source = SpooledSource(source, self._spool)
            # Before bytes are written: the array may be another payload's by then.
            note: Callable[[int], None] = lambda count: self._touch(upload, count)  # noqa: E731
            digest = await bulk.receive_into(source, view, check_claim, note, progress=progress)
            if digest != header.checksum:
                raise bulk.ChecksumError("the part's checksum is wrong")
            check_claim()
        except BaseException:
            if upload.claimed.get(place) is claim:
                del upload.claimed[place]
            raise
        assert claim is not None
        claim.done = True
        if not upload.is_whole:
            return None
        del self._open[key]
        return array

    async def _find_array(self, upload: PartialUpload) -> Array:
        """An upload's array, once it is made; without one the upload is over."""
        if not isinstance(upload.array, asyncio.Future):
            return upload.array
        try:
            return await asyncio.shield(upload.array)
        except OSError:
            if self._open.get(upload.key) is upload:
                del self._open[upload.key]
            raise

    def _open_upload(self, key: Hashable, process: str, size: int, allocate: Allocate) -> PartialUpload:
        self._open.pop(key, None)
        own = sum(a.process == process for a in self._open.values())
        if own >= MAX_PER_PROCESS or len(self._open) >= MAX_ALL:
            raise TooManyUploads
        upload = self._open[key] = PartialUpload(key, process, size, allocate())
        return upload

    def _touch(self, upload: PartialUpload, count: int) -> None:
        upload.touched = time.monotonic()
        self._note_chunk(upload.key, upload.process, count)

    def sweep(self, now: float) -> None:
        """Drop uploads in which nothing happened for long. ``now``: time.monotonic()."""
        self._open = {key: upload for key, upload in self._open.items() if now - upload.touched <= IDLE_SECONDS}
