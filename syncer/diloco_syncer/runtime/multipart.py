"""Uploads put together from their parts.

An assembly is made by the first part of a payload whose header was admitted: its
exact size is known then, its buffer is allocated once, and every part is received
straight into its range. Parts come over several connections at once, in any
order, and never overlap. When the last range is filled the payload is complete,
and the part that filled it gets the verdict; the others have been told ``partial``.

Bounds: ``MAX_PER_PROCESS`` assemblies of one process at a time (more are told
``busy``), one payload's size at most what its admission said, and an assembly in which
nothing has come for ``IDLE_SECONDS`` is dropped. A part that fails takes its assembly
with it: the sender starts over, and its first part replaces what is left.
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


class Busy(Exception):
    """Too many uploads at once; the sender shall try again after a pause."""


@dataclass(slots=True)
class Assembly(Generic[B]):
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

    def claim(self, start: int, size: int) -> bool:
        """Take the range for a part; False if it overlaps one that was taken."""
        if any(start < end and begin < start + size for begin, end in self.claimed):
            return False
        self.claimed.append((start, start + size))
        self.touched = time.monotonic()
        return True


class Assemblies:
    """All assemblies of a syncer."""

    def __init__(self) -> None:
        self._open: dict[Hashable, Assembly[object]] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def receive(
        self,
        key: Hashable,
        header: sync_pb2.UploadHeader,
        stream: AsyncIterator[bytes],
        size: int,
        make: Callable[[], tuple[B, memoryview]],
    ) -> B | None:
        """Receive one part. ``size``: the payload's exact bytes; ``make``: its owner and buffer,
        called for the first part. Returns the owner when this part completed it, else None.

        Raises ``WireError`` (the assembly is gone then) and ``Busy``.
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
        assembly = self._open.get(key)
        if assembly is None or not assembly.claim(header.offset, header.bytes):
            if assembly is not None:  # the sender started over
                self._drop(assembly)
            assembly = self._make(key, header.process, size, make)
            assembly.claim(header.offset, header.bytes)
        view = assembly.target[header.offset : header.offset + header.bytes]
        try:
            digest = await bulk.receive_into(stream, view)
            if digest != header.checksum:
                raise bulk.ChecksumError("the part's checksum is wrong")
            if assembly.broken:
                raise WireError("another part of this payload failed, or it was started over")
        except BaseException:
            self._drop(assembly)
            raise
        assembly.received += header.bytes
        assembly.touched = time.monotonic()
        if assembly.received < size:
            return None
        del self._open[key]
        return assembly.owner  # type: ignore[return-value]

    def _make(
        self, key: Hashable, process: str, size: int, make: Callable[[], tuple[B, memoryview]]
    ) -> Assembly[object]:
        own = sum(a.process == process for a in self._open.values())
        if own >= MAX_PER_PROCESS or len(self._open) >= MAX_ALL:
            raise Busy
        owner, target = make()
        if target.nbytes != size:
            raise ValueError(f"a buffer of {target.nbytes} bytes for a payload of {size}")
        assembly: Assembly[object] = Assembly(key, process, size, owner, target)
        self._open[key] = assembly
        return assembly

    def _drop(self, assembly: Assembly[object]) -> None:
        assembly.broken = True
        if self._open.get(assembly.key) is assembly:
            del self._open[assembly.key]

    def sweep(self, now: float) -> int:
        """Drop assemblies in which nothing happened for long; returns how many. ``now``: time.monotonic()."""
        idle = [a for a in self._open.values() if now - a.touched > IDLE_SECONDS]
        for assembly in idle:
            self._drop(assembly)
        return len(idle)
