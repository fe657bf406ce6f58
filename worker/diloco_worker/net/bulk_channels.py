"""The bulk connections of one session: whole payloads up and down, under this process's identity.

An upload is tried again under the same id while the syncer is busy, and where parts break or arrive damaged, so that it
counts once. A download that breaks goes on at the byte where it broke; what has come of a version outlives the session
(``KeptDownloads``). A transfer is given up after ``_TRIES`` tries in succession that brought nothing. Encoding,
decoding and checksums run in executor threads (``run``), where numba's kernels hold no interpreter lock.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from diloco_protocol.arrays.kernels import Bytes
from diloco_protocol.common.meter import Meter
from diloco_protocol.vocabulary import PushRefusal, TransferRefusal
from diloco_protocol.wire import bulk, limits, sync_pb2
from diloco_protocol.wire.progress import Progress
from diloco_worker.net.routes import Routes

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


class KeptDownloads:
    """What has come of the versions, frozen parameters and optimizer states whose downloads broke: of each fragment,
    and each kind of state, the newest. Other payloads may differ under the same name, and are kept by nobody."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], tuple[bytes, bulk.PartialDownload]] = {}

    def find(self, request: sync_pb2.DownloadRequest) -> bulk.PartialDownload:
        """What there is of this request, to be added to."""
        kinds = sync_pb2.DownloadRequest
        if request.what not in (kinds.FULL, kinds.DELTA, kinds.FROZEN, kinds.PEER_STATE, kinds.OPTIMIZER):
            return bulk.PartialDownload()
        place, named = (request.what, request.fragment), request.SerializeToString(deterministic=True)
        if self._kept.get(place, (b"", None))[0] != named:
            self._kept[place] = named, bulk.PartialDownload()
        return self._kept[place][1]

    def forget(self, request: sync_pb2.DownloadRequest) -> None:
        """It has come whole, or is not to be had, or is wrong."""
        self._kept.pop((request.what, request.fragment), None)


@dataclass
class BulkChannels:
    """A session's uploads and downloads over ``routes``: pushes and versions over that of their fragment. ``slot`` and
    ``incarnation`` go into every upload's header, where they fence a stale process; the client sets them when the
    syncer names others. ``up`` and ``down`` measure the throughput; ``arriving``: what has come."""

    routes: Routes
    job: str
    process: str
    executor: Executor
    counts: ByteCounts
    up: Meter | None = None
    down: Meter | None = None
    arriving: Progress = field(default_factory=Progress)
    kept: KeptDownloads = field(default_factory=KeptDownloads)
    slot: int = field(default=0, init=False)
    incarnation: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._leaving = Progress()

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run ``work`` in an executor thread."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, work, *arguments)

    async def upload(self, payload: Any, kept: bulk.SentParts | None = None, **kind: Any) -> sync_pb2.UploadReply:
        """Upload a contiguous buffer; ``kind`` is the header's field that says what it is. ``kept``: the parts that an
        earlier session has sent, which is kept up to date.

        Raises TransferError when no answer came, in which case the upload may have been accepted."""
        header = sync_pb2.UploadHeader(
            job=self.job, slot=self.slot, incarnation=self.incarnation, process=self.process, **kind
        )
        fragment = header.push.fragment if header.HasField("push") else -1
        lanes = None
        broken = busy = 0  # tries in succession
        while busy < _BUSY_TRIES:
            there = self.routes.states if header.HasField("peer_state") else self.routes.find(fragment).up
            if lanes is not there:  # which has nothing of it
                lanes, sent = there, kept or bulk.SentParts()
            before = sent.done
            try:
                reply = await bulk.upload(
                    lanes,
                    header,
                    payload,
                    meter=self.up,
                    note_chunk=self.counts.count_chunk,
                    progress=self._leaving,
                    sent=sent,
                )
            except bulk.TransferError as error:
                broken = 0 if sent.done > before else broken + 1
                if not error.retry or broken >= _TRIES:
                    raise
            except limits.WireError as error:
                raise bulk.TransferError(str(error), retry=False) from error
            else:
                if reply.accepted or reply.reason not in (TransferRefusal.BUSY, *_DAMAGED):
                    self.counts.up += len(bulk.flat(payload))
                    return reply
                damaged = reply.reason in _DAMAGED
                broken, busy = (broken + 1, 0) if damaged else (0, busy + 1)
                if broken >= _TRIES:
                    raise bulk.TransferError(f"it arrives damaged ({reply.reason}): {reply.message}", retry=True)
            await asyncio.sleep(pause(broken + busy))
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
        is_version = request.what in (sync_pb2.DownloadRequest.FULL, sync_pb2.DownloadRequest.DELTA)
        kept = self.kept.find(request)
        broken = 0  # tries in succession
        while True:
            before = kept.received
            try:
                header, data = await bulk.download(
                    self.routes.find(request.fragment if is_version else -1).down,
                    request,
                    size=size,
                    limit=limit,
                    allocate=allocate,
                    meter=self.down,
                    progress=self.arriving,
                    kept=kept,
                )
                break
            except bulk.TransferError as error:
                broken = 0 if kept.received > before else broken + 1
                if not error.retry or broken >= _TRIES:
                    raise
            except limits.WireError:
                self.kept.forget(request)
                raise
            await asyncio.sleep(pause(broken))
        self.kept.forget(request)
        if not header.found:
            return None
        self.counts.down += data.nbytes
        return header, data


def pause(attempt: int, first: float = 0.1, longest: float = 5.0) -> float:
    """Seconds to wait before try ``attempt`` + 1: exponential with full jitter above half."""
    return min(longest, first * 2.0**attempt) * random.uniform(0.5, 1.0)
