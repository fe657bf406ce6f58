"""The bulk connections of one session: whole payloads up and down, under this process's identity.

An upload is tried again under the same id while the syncer is busy, and a few times where parts break or arrive
damaged, so that it counts once. Encoding,
decoding and checksums run in executor threads (``run``), where numba's kernels hold no interpreter lock.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from grpc import aio

from diloco_protocol.arrays.kernels import Bytes
from diloco_protocol.common.meter import Meter
from diloco_protocol.vocabulary import PushRefusal, TransferRefusal
from diloco_protocol.wire import bulk, limits, sync_pb2

T = TypeVar("T")
_BUSY_TRIES = 20
_TRIES = 4
_DAMAGED = frozenset({PushRefusal.BAD_CHECKSUM.value, TransferRefusal.BAD_TRANSFER.value})


@dataclass(slots=True)
class ByteCounts:
    """Bulk bytes of a process, over all its sessions. ``chunks_up``: of uploads, whole or not."""

    up: int = 0
    down: int = 0
    chunks_up: int = 0

    def count_chunk(self) -> None:
        self.chunks_up += 1


@dataclass
class BulkChannels:
    """``slot`` and ``incarnation`` go into every upload's header, where they fence a stale process; the client
    sets them when the syncer names others. ``up`` and ``down`` measure the throughput."""

    channels: Sequence[aio.Channel]
    metadata: Sequence[tuple[str, str]]
    job: str
    process: str
    executor: Executor
    counts: ByteCounts
    up: Meter | None = None
    down: Meter | None = None
    slot: int = field(default=0, init=False)
    incarnation: int = field(default=0, init=False)

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run ``work`` in an executor thread."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, work, *arguments)

    async def upload(self, payload: Any, **kind: Any) -> sync_pb2.UploadReply:
        """Upload a contiguous buffer; ``kind`` is the header's field that says what it is.

        Raises TransferError when no answer came, in which case the upload may have been accepted."""
        header = sync_pb2.UploadHeader(
            job=self.job, slot=self.slot, incarnation=self.incarnation, process=self.process, **kind
        )
        broken = 0
        for attempt in range(_BUSY_TRIES):
            try:
                reply = await bulk.upload(
                    self.channels,
                    header,
                    payload,
                    metadata=self.metadata,
                    meter=self.up,
                    note_chunk=self.counts.count_chunk,
                )
            except bulk.TransferError as error:
                broken += 1
                if not error.retry or broken >= _TRIES:
                    raise
            except limits.WireError as error:
                raise bulk.TransferError(str(error), retry=False) from error
            else:
                if reply.accepted or reply.reason not in (TransferRefusal.BUSY, *_DAMAGED):
                    self.counts.up += len(bulk.flat(payload))
                    return reply
                broken += reply.reason in _DAMAGED
                if broken >= _TRIES:
                    raise bulk.TransferError(f"it arrives damaged ({reply.reason}): {reply.message}", retry=True)
            await asyncio.sleep(pause(attempt))
        raise bulk.TransferError("the syncer was busy for too long", retry=True)

    async def download(
        self,
        *,
        size: int | None = None,
        limit: int = limits.MAX_FRAGMENT_BYTES,
        allocate: bulk.Allocate = bulk.allocate,
        **what: Any,
    ) -> tuple[sync_pb2.DownloadHeader, Bytes] | None:
        """Download what the request's fields ``what`` name: header and bytes, uint8; None: the syncer has none.

        ``size``: exactly so many bytes; otherwise at most ``limit``. ``allocate`` makes the array. Raises TransferError
        and, for another size, WireError."""
        request = sync_pb2.DownloadRequest(job=self.job, process=self.process, **what)
        header, data = await bulk.download(
            self.channels, request, size=size, limit=limit, allocate=allocate, metadata=self.metadata, meter=self.down
        )
        if not header.found:
            return None
        self.counts.down += data.nbytes
        return header, data


def pause(attempt: int, first: float = 0.1, longest: float = 5.0) -> float:
    """Seconds to wait before try ``attempt`` + 1: exponential with full jitter above half."""
    return min(longest, first * 2.0**attempt) * random.uniform(0.5, 1.0)
