"""Downloads: broadcasts, the layout, frozen parameters, optimizer states, and the job itself."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import job_to_json
from diloco_protocol.vocabulary import PushRefusal, TransferRefusal
from diloco_protocol.wire import bulk as wire_bulk
from diloco_protocol.wire import convert, limits, services, sync_pb2
from diloco_protocol.wire.limits import WireError
from diloco_protocol.wire.records import Held
from diloco_syncer.core import events as ev
from diloco_syncer.core.core import Core
from diloco_syncer.runtime.durability import Durability
from diloco_syncer.runtime.global_model import GlobalModel
from diloco_syncer.runtime.optimizer_relay import OptimizerRelay
from diloco_syncer.runtime.traffic import Traffic
from diloco_syncer.server.download_queue import DownloadQueue, TooManyDownloads
from diloco_syncer.server.sessions import CallerRefused, Sessions
from diloco_syncer.server.tls.access import CallAuthorizer
from diloco_syncer.store.records import Array

FRAGMENTS = (sync_pb2.DownloadRequest.FULL, sync_pb2.DownloadRequest.DELTA)


def job_for_learners(job: DiLoCoJob) -> bytes:
    """The normal form, JSON in UTF-8, of the job of those that join with credentials and without a job file.

    It lacks what only pods need: pod templates and annotations may hold what is not for learners elsewhere.
    """
    document = json.loads(job_to_json(job))
    document["metadata"]["annotations"] = {}
    spec = document["spec"]
    for part in (spec["syncer"], spec["learners"], *spec["regions"]):
        part["podTemplate"] = {}
    return json.dumps(document, ensure_ascii=False).encode()


@dataclass
class Downloads:
    """The download call of the Bulk service."""

    job: DiLoCoJob
    core: Core
    model: GlobalModel
    durability: Durability
    authorizer: CallAuthorizer
    sessions: Sessions
    relay: OptimizerRelay
    traffic: Traffic
    emit: Callable[[ev.Event], None]
    queue: DownloadQueue = field(default_factory=DownloadQueue)

    async def serve(self, raw: bytes, context: Any) -> None:
        """Send one part of what is requested, or the word why it cannot be had."""
        peer = await self.authorizer.authorize(context)
        try:
            request = convert.parse(sync_pb2.DownloadRequest, raw, limits.MAX_HEADER_BYTES)
            limits.check_format(request.format)
            # Who has not joined may ask for the job, to learn what to join. It is small, and nobody knows who they are.
            if request.what == sync_pb2.DownloadRequest.JOB:
                await services.write_download(self._send(request, self.authorizer.find_place(context)), context)
                return
            caller = self.sessions.find_caller(request.process, peer, context)
            # Looked up now: a learner that takes the last version may leave before the whole of it was sent.
            place, slot = self.sessions.find_place_and_slot(caller)
            async with self.queue.await_turn(request.process):
                await services.write_download(self._send(request, place, slot), context, caller.sent)
        except CallerRefused as error:
            # Who has no session any more joins again, and then asks again.
            joined = error.reason != TransferRefusal.NOT_JOINED
            code = grpc.StatusCode.PERMISSION_DENIED if joined else grpc.StatusCode.FAILED_PRECONDITION
            await context.abort(code, str(error))
        except TooManyDownloads:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many downloads at once: try again later")
        except WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def _send(
        self, request: sync_pb2.DownloadRequest, place: str, slot: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The messages that answer a request, counted for ``place`` and ``slot`` (traffic.py)."""
        receipt = self._find_receipt(request)
        data, versions, word = await self._find(request)
        if data is None:
            async for part in wire_bulk.not_found(word):
                yield part
            return
        parts = wire_bulk.send_part(
            data, request.offset, request.bytes, versions=map(convert.to_wire, versions), receipt=receipt
        )
        sent, whole = 0, wire_bulk.flat(data).nbytes
        # A fragment's version is kept for its reader.
        downloads = self.model.downloads if request.what in FRAGMENTS else None
        key = request.fragment, request.version, (request.process[: limits.MAX_NAME_CHARS], request.what)
        if downloads is not None:
            downloads.begin_part(*key, whole, time.monotonic())
        try:
            yield await anext(parts)
            async for part in parts:
                yield part
                sent += len(part)
        finally:
            reached = request.offset, request.offset + sent
            whole_sent = downloads is not None and downloads.end_part(*key, reached, now=time.monotonic())
        self.traffic.count_sent(place, slot, sent)
        connection = self.sessions.find_process(request.process)
        if whole_sent and connection is not None and request.epoch == self.core.epoch:
            self.emit(ev.VersionSent(connection.number, request.fragment, request.version))

    def _find_receipt(self, request: sync_pb2.DownloadRequest) -> bytes:
        """The receipt that goes with a version's bytes; empty where it would be too large, or is not known."""
        if request.what not in FRAGMENTS or request.epoch != self.core.epoch:
            return b""
        found = self.model.find_broadcast(request.fragment, request.version)
        if found is None:
            return b""
        if found.version == self.core.versions[found.fragment]:
            return self.model.make_receipt(found, self.core.receipt(found.fragment))
        return found.receipt

    async def _find(self, request: sync_pb2.DownloadRequest) -> tuple[Array | None, tuple[Held, ...], str]:
        """The bytes that are requested (None: not to be had), the versions they go with, and the word why not."""
        kinds = sync_pb2.DownloadRequest
        if request.what == kinds.JOB and not request.job:  # the caller may not know the job's name
            return np.frombuffer(job_for_learners(self.job), np.uint8), (), ""
        if request.job != self.job.metadata.name:
            return None, (), PushRefusal.OTHER_JOB.value
        if request.what in FRAGMENTS:
            found = None
            if request.epoch == self.core.epoch:
                found = self.model.find_broadcast(request.fragment, request.version)
            if found is None:
                return None, (), "superseded"
            if request.what == kinds.FULL:
                return found.full, (), "superseded"
            return found.delta, (), "no-delta"
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
