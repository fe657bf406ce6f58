"""Downloads: broadcasts, the layout, frozen parameters, optimizer states, and the job itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import job_to_json
from diloco_protocol.vocabulary import PushRefusal, TransferRefusal
from diloco_protocol.wire import bulk as wire_bulk
from diloco_protocol.wire import convert, limits, sync_pb2
from diloco_protocol.wire.bulk_calls import CallFailed, ServedCall
from diloco_protocol.wire.byte_stream import StreamBroken
from diloco_protocol.wire.limits import WireError
from diloco_protocol.wire.link_share import LinkPart, SharedLink
from diloco_protocol.wire.progress import Stalled, await_progress
from diloco_protocol.wire.records import Held
from diloco_syncer.output.model_output import without_templates
from diloco_syncer.runtime.durability import Durability
from diloco_syncer.runtime.global_model import GlobalModel
from diloco_syncer.runtime.optimizer_relay import OptimizerRelay
from diloco_syncer.server.callers import FRAGMENTS, Caller, Callers, find_version
from diloco_syncer.server.download_queue import DownloadQueue
from diloco_syncer.server.sessions import CallerRefused
from diloco_syncer.server.tls.connection_limits import Peer
from diloco_syncer.store.records import Array

MOST_CHECKSUMS = 256  # of parts of a version: who asks for others has them made anew
PIECE_BYTES = 1 << 20  # handed to a connection at a time
NEWCOMERS_PIECE_BYTES = 256 << 10  # smaller: a round that begins waits for those that are on their way
STATES = (sync_pb2.DownloadRequest.FROZEN, sync_pb2.DownloadRequest.PEER_STATE, sync_pb2.DownloadRequest.OPTIMIZER)

Found = tuple[Array | None, tuple[Held, ...], str]
"""The bytes that are requested (None: not to be had), the versions they go with, and the word why not."""


def job_for_learners(job: DiLoCoJob) -> bytes:
    """The normal form, JSON in UTF-8, of the job of those that join with credentials and without a job file.

    It lacks what only pods need: pod templates and annotations may hold what is not for learners elsewhere.
    """
    metadata = job.metadata.model_copy(update={"annotations": {}})
    return job_to_json(without_templates(job).model_copy(update={"metadata": metadata})).encode()


@dataclass
class Downloads:
    """The downloads of all bulk connections. ``find_other`` returns what is requested besides fragments, as ``_find``
    does; ``epoch``: the syncer's."""

    callers: Callers
    model: GlobalModel
    epoch: int
    find_other: Callable[[sync_pb2.DownloadRequest], Awaitable[Found]]
    queue: DownloadQueue = field(default_factory=DownloadQueue)
    link: SharedLink = field(default_factory=SharedLink)

    async def serve(self, request: sync_pb2.DownloadRequest, sink: ServedCall, peer: Peer, called: str = "") -> None:
        """Send one part of what is requested, or the word why it cannot be had. ``called``: the listener's name for the
        connection. Raises CallFailed before a byte was sent, and StreamBroken."""
        try:
            limits.check_format(request.format)
            caller = await self.callers.find_reader(request, peer, called)
            is_newcomers = request.catching_up or request.what in STATES
            async with self.queue.await_turn(request.process or called):
                with self.link.carry_part(caller.connection if is_newcomers else -1) as part:
                    await self._send(request, sink, caller, part)
        except CallerRefused as error:
            # Who has no session any more joins again, and then asks again.
            raise CallFailed(str(error), final=error.reason != TransferRefusal.NOT_JOINED) from error
        except Stalled as error:
            raise StreamBroken(f"the download is not read: {error}") from error
        except WireError as error:
            raise CallFailed(str(error), final=True) from error

    async def _send(self, request: sync_pb2.DownloadRequest, sink: ServedCall, caller: Caller, turns: LinkPart) -> None:
        """Answer a request."""
        progress = caller.sent
        data, versions, word = await self._find(request)
        if data is None:
            header = sync_pb2.DownloadHeader(found=False, reason=word)
            await await_progress(sink.reply(sync_pb2.BulkReply(download=header)), progress)
            return
        held = map(convert.to_wire, versions)
        # All learners take the same parts of a version, whose checksums are taken once.
        version = find_version(self.model, request, self.epoch)
        checksums = {} if version is None else version.checksums
        asked = request.what, request.offset, request.bytes
        known = checksums.get(asked)
        cut = partial(wire_bulk.cut_part, data, request.offset, request.bytes, known, receipt=caller.receipt)
        # What is no version may lie on a disk, which is read for the checksum, and then is in memory.
        header, part = cut() if request.what in FRAGMENTS else await asyncio.to_thread(cut)
        header.versions.extend(held)
        if len(checksums) < MOST_CHECKSUMS:
            checksums[asked] = header.checksum
        sent, whole = 0, wire_bulk.flat(data).nbytes
        # A fragment's version is kept for its reader.
        downloads = self.model.downloads if request.what in FRAGMENTS else None
        key = request.fragment, request.version, (request.process[: limits.MAX_NAME_CHARS], request.what)
        if downloads is not None:
            downloads.begin_part(*key, whole, time.monotonic())
        loop = asyncio.get_running_loop()
        most = PIECE_BYTES if turns.age < 0 else NEWCOMERS_PIECE_BYTES
        note: Callable[[int], None] = lambda count: progress.record_bytes(count, loop.time())  # noqa: E731
        try:
            await await_progress(sink.reply(sync_pb2.BulkReply(download=header)), progress)
            while sent < part.nbytes:
                count = await self.link.await_turn(turns, min(most, part.nbytes - sent))
                piece = part[sent : sent + count]
                await await_progress(sink.write(piece, note), progress)
                sent += count
        finally:
            reached = request.offset, request.offset + sent
            whole_sent = downloads is not None and downloads.end_part(*key, reached, now=time.monotonic())
        self.callers.count_sent(caller, sent)
        if whole_sent:
            self.callers.note_sent(request)

    async def _find(self, request: sync_pb2.DownloadRequest) -> Found:
        if request.what not in FRAGMENTS:
            return await self.find_other(request)
        found = find_version(self.model, request, self.epoch)
        if found is None:
            return None, (), "superseded"
        if request.what == sync_pb2.DownloadRequest.FULL:
            return found.full, (), "superseded"
        return found.delta, (), "no-delta"


@dataclass
class JobPayloads:
    """What learners download besides fragments."""

    job: DiLoCoJob
    model: GlobalModel
    durability: Durability
    relay: OptimizerRelay

    async def find(self, request: sync_pb2.DownloadRequest) -> Found:
        kinds = sync_pb2.DownloadRequest
        if request.what == kinds.JOB and not request.job:  # the caller may not know the job's name
            return np.frombuffer(job_for_learners(self.job), np.uint8), (), ""
        if request.job != self.job.metadata.name:
            return None, (), PushRefusal.OTHER_JOB.value
        if request.what == kinds.LAYOUT and self.model.layout is not None:
            return np.frombuffer(self.model.layout.to_json().encode(), np.uint8), (), ""
        if request.what == kinds.FROZEN_DIGEST and self.model.frozen_digest:
            return np.frombuffer(self.model.frozen_digest.encode(), np.uint8), (), ""
        if request.what == kinds.PEER_STATE:
            relayed = self.relay.find_offered(request.transfer, request.process)
            return (None, (), "unknown-transfer") if relayed is None else (relayed.data, relayed.versions, "")
        blobs = {kinds.FROZEN: self.model.frozen, kinds.OPTIMIZER: self.durability.optimizer}
        name = blobs.get(request.what, "")
        if not name:
            return None, (), "none"
        return await self.durability.read_blob(name), (), ""
