"""Uploads put together from their parts.

The first part of a payload whose header was admitted begins an upload: its exact size is known then,
its buffer is allocated once, and every part is received straight into its range. Parts come over
several connections at once, in any order, and never overlap. When the last range is filled the
payload is complete; the part that filled it is answered with the verdict, the others with ``partial``.

Bounds: ``MAX_PER_PROCESS`` uploads of one process at a time and ``MAX_ALL`` in all (more are refused
as ``busy``), one payload's size at most what its admission said, and an upload in which nothing has
come for ``IDLE_SECONDS`` is dropped. A part that fails ends its upload: the sender starts over, and
its first part replaces what is left.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from diloco_protocol.wire import bulk, limits, sync_pb2
from diloco_protocol.wire.limits import WireError

MAX_PER_PROCESS = 8
MAX_ALL = 512
IDLE_SECONDS = 2 * limits.STALL_SECONDS

B = TypeVar("B")


class TooManyUploads(Exception):
    """Too many uploads at once; the sender shall try again after a pause."""


@dataclass(slots=True)
class PartialUpload(Generic[B]):
    """One payload being received. ``target``: what the parts are received into."""

    key: Hashable
    process: str
    total: int
    owner: B  # what the payload is for: holds the buffer
    target: memoryview
    claimed: list[tuple[int, int]] = field(default_factory=list)
    received: int = 0
    broken: bool = False
    touched: float = field(default_factory=time.monotonic)

    def claim_range(self, start: int, size: int) -> bool:
        """Reserve a range for a part; False if it overlaps one that is reserved."""
        if any(start < end and begin < start + size for begin, end in self.claimed):
            return False
        self.claimed.append((start, start + size))
        self.touched = time.monotonic()
        return True


class MultipartUploads:
    """All uploads whose parts are coming."""

    def __init__(self) -> None:
        self._open: dict[Hashable, PartialUpload[object]] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def receive_part(
        self,
        key: Hashable,
        header: sync_pb2.UploadHeader,
        stream: AsyncIterator[bytes],
        size: int,
        make: Callable[[], tuple[B, memoryview]],
    ) -> B | None:
        """Receive one part. ``size``: the payload's exact bytes; ``make``: its owner and buffer,
        called for the first part. Returns the owner when this part completed it, else None.

        Raises ``WireError`` (the upload is gone then) and ``TooManyUploads``.
        """
        if header.total_bytes != size:
            raise WireError(f"total_bytes is {header.total_bytes}; this payload has {size}")
        if header.bytes > limits.MAX_PART_BYTES or header.offset + header.bytes > size:
            raise WireError(
                f"a part of bytes {header.offset} to {header.offset + header.bytes} of {size} "
                f"(at most {limits.MAX_PART_BYTES} bytes a part)"
            )
        if size and not header.bytes:
            raise WireError("an empty part")
        upload = self._open.get(key)
        if upload is None or not upload.claim_range(header.offset, header.bytes):
            if upload is not None:  # the sender started over
                self._drop(upload)
            upload = self._make(key, header.process, size, make)
            upload.claim_range(header.offset, header.bytes)
        view = upload.target[header.offset : header.offset + header.bytes]
        try:
            digest = await bulk.receive_into(stream, view)
            if digest != header.checksum:
                raise bulk.ChecksumError("the part's checksum is wrong")
            if upload.broken:
                raise WireError("another part of this payload failed, or it was started over")
        except BaseException:
            self._drop(upload)
            raise
        upload.received += header.bytes
        upload.touched = time.monotonic()
        if upload.received < size:
            return None
        del self._open[key]
        return upload.owner  # type: ignore[return-value]

    def _make(
        self, key: Hashable, process: str, size: int, make: Callable[[], tuple[B, memoryview]]
    ) -> PartialUpload[object]:
        own = sum(a.process == process for a in self._open.values())
        if own >= MAX_PER_PROCESS or len(self._open) >= MAX_ALL:
            raise TooManyUploads
        owner, target = make()
        if target.nbytes != size:
            raise ValueError(f"a buffer of {target.nbytes} bytes for a payload of {size}")
        upload: PartialUpload[object] = PartialUpload(key, process, size, owner, target)
        self._open[key] = upload
        return upload

    def _drop(self, upload: PartialUpload[object]) -> None:
        upload.broken = True
        if self._open.get(upload.key) is upload:
            del self._open[upload.key]

    def sweep(self, now: float) -> int:
        """Drop uploads in which nothing happened for long; returns how many. ``now``: time.monotonic()."""
        idle = [a for a in self._open.values() if now - a.touched > IDLE_SECONDS]
        for upload in idle:
            self._drop(upload)
        return len(idle)
