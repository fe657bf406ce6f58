"""A shard: the bytes of its fragments, from an upload to a durable version and its downloads.

What a call may do is asked of the syncer, which knows the sessions (``AskingCallers``). A push that is whole is told to
it, and it answers with the core's verdict. A version that is durable is told, and put in force when the syncer has
said so: by then it is on the tape.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from diloco_protocol.arrays import codec
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.vocabulary import PushRefusal
from diloco_protocol.wire import convert, sync_pb2
from diloco_protocol.wire.records import Payload, PushHeader
from diloco_syncer.core import events as ev
from diloco_syncer.core.config import CoreConfig
from diloco_syncer.runtime.durability import StoreWriter
from diloco_syncer.runtime.global_model import Broadcast, GlobalModel
from diloco_syncer.runtime.merger import Merged, MergeMaker
from diloco_syncer.runtime.multipart import MultipartUploads, TooManyUploads, UploadRefused
from diloco_syncer.runtime.pushes import ReceivedPushes
from diloco_syncer.server.bulk import BulkServer
from diloco_syncer.server.callers import Caller
from diloco_syncer.server.downloads import Downloads, Found
from diloco_syncer.server.sessions import CallerRefused
from diloco_syncer.server.tls.access import CallAuthorizer
from diloco_syncer.server.tls.connection_limits import Peer
from diloco_syncer.server.uploads import Uploads
from diloco_syncer.shards import messages as ms
from diloco_syncer.store.base import ObjectNotFound, Store
from diloco_syncer.store.checkpoint import Checkpoints, SpooledOffer
from diloco_syncer.store.epochs import Epoch
from diloco_syncer.store.records import Damaged, MergeRecord
from diloco_syncer.store.restore import StoreUnusable

log = logging.getLogger(__name__)

MAX_SESSIONS = 4096  # whose measures are kept
NOT_HERE = Payload("", 0, 0)
Send = Callable[[ms.FromShard], None]


@dataclass
class AskingCallers:
    """Callers, as the syncer finds them. ``wait_offer_spooled``: of an offer that was sent before."""

    send: Send
    authorizer: CallAuthorizer
    wait_offer_spooled: Callable[[PushHeader], Coroutine[Any, Any, None]]
    _calls: int = 0
    _asked: dict[int, asyncio.Future[ms.CallerFound]] = field(default_factory=dict)
    _sessions: OrderedDict[int, Caller] = field(default_factory=OrderedDict)  # by connection: its measures

    async def find_sender(self, header: sync_pb2.UploadHeader, peer: Peer, called: str) -> Caller:
        try:
            return await self._ask(header.SerializeToString(), True, peer, called)
        except UploadRefused as error:
            if error.reason == PushRefusal.REPEATED:
                await self.wait_offer_spooled(convert.push_header(header))
            raise

    async def find_reader(self, request: sync_pb2.DownloadRequest, peer: Peer, called: str) -> Caller:
        return await self._ask(request.SerializeToString(), False, peer, called)

    async def _ask(self, request: bytes, sends: bool, peer: Peer, called: str) -> Caller:
        self._calls += 1
        call = self._calls
        answer = self._asked[call] = asyncio.get_running_loop().create_future()
        try:
            self.send(ms.FindCaller(call, sends, request.hex(), names=peer.names, address=peer.address))
            found = await answer
        finally:
            del self._asked[call]
        self.authorizer.assign_place(called, found.place)
        known = self._sessions.pop(found.connection, None) or Caller(found.connection, found.place)
        self._sessions[found.connection] = known
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return replace(known, place=found.place, slot=found.slot, receipt=bytes.fromhex(found.receipt))

    def take_answer(self, answer: ms.CallerFound | ms.CallRefused) -> None:
        """The syncer has answered."""
        asked = self._asked.get(answer.call)
        if asked is None or asked.done():  # the call has ended
            return
        if isinstance(answer, ms.CallerFound):
            asked.set_result(answer)
        elif answer.kind == "busy":
            asked.set_exception(TooManyUploads())
        else:
            kind = UploadRefused if answer.kind == "upload" else CallerRefused
            asked.set_exception(kind(answer.reason, answer.message))

    def begin_upload(self, caller: Caller) -> None:
        self.send(ms.UploadBegan(caller.connection))

    def end_upload(self, caller: Caller, count: int | None) -> None:
        self.send(ms.UploadEnded(caller.connection, caller.place, caller.slot, count))

    def count_sent(self, caller: Caller, count: int) -> None:
        self.send(ms.PartSent(caller.place, caller.slot, count))

    def note_sent(self, request: sync_pb2.DownloadRequest) -> None:
        self.send(ms.WholeSent(request.process, request.epoch, request.fragment, request.version))


class Shard:
    """One shard, without its process. ``send`` tells the syncer; ``stop_by`` is called with what ends the process."""

    def __init__(
        self,
        job: DiLoCoJob,
        store: Store,
        authorizer: CallAuthorizer,
        threads: int,
        send: Send,
        stop_by: Callable[[BaseException], None],
    ) -> None:
        self.job, self.store, self.send, self.stop_by = job, store, send, stop_by
        self.authorizer = authorizer
        self.config = CoreConfig.from_job(job)
        self.model = GlobalModel(job, threads)
        self.refused = Counter[str]()
        self.begun = False
        self._owned: list[int] = []
        self._merges: asyncio.Queue[ms.MakeVersion] = asyncio.Queue(1024)
        self._made: dict[int, tuple[MergeRecord, Broadcast]] = {}  # by fragment: durable, and not in force yet
        self._tasks: set[asyncio.Task[Any]] = set()
        self._decode_threads = ThreadPoolExecutor(threads, "decode")
        self._multipart = MultipartUploads(lambda key, process, count: self.pushes.note_chunk(key))

    def _begin_parts(self, checkpoints: Checkpoints, handles: int) -> None:
        """Make what serves the fragments, which are in memory now."""
        self.writer = StoreWriter(
            checkpoints=checkpoints, on_problem=lambda problem: self.send(ms.StoreProblem(problem))
        )
        self.pushes = ReceivedPushes(
            check=lambda header, process: None,  # the syncer has, in ``find_sender``
            is_recovering=lambda: False,  # and says so in its answer
            model=self.model,
            writer=self.writer,
            decode_threads=self._decode_threads,
            emit=self._tell,
            run_task=self.run_task,
            refused=self.refused,
            on_spooled=lambda handle: self.send(ms.OfferSpooled(handle)),
            first_handle=handles + 1,
        )
        self.maker = MergeMaker(self.config, checkpoints.epoch.number, self.model, self.pushes, writer=self.writer)
        self.callers = AskingCallers(self.send, self.authorizer, self.pushes.wait_offer_spooled)
        receivers = {"push": self.pushes.receive}
        uploads = Uploads(self.callers, self._multipart, receivers, self.refused)
        self.bulk = BulkServer(
            self.authorizer, uploads, Downloads(self.callers, self.model, checkpoints.epoch.number, find_nothing)
        )
        self.begun = True
        self.run_task(self._make_versions())
        self.run_task(self._sweep_often())
        self.run_task(self._scrub_often())

    def run_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a piece of work; its failure ends the process."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.stop_by(error)

    # ------------------------------------------------------------- what the syncer says

    async def take_message(self, message: ms.ToShard) -> None:
        """Carry out what the syncer says, one message after the other."""
        match message:
            case ms.Begin():
                await self._begin(message)
            case ms.RestoreOffer():
                squares = np.array(message.squares)
                offer = SpooledOffer(message.header, message.norm, squares, message.encoded_bytes)
                self.pushes.restore_offer(offer, message.handle)
            case ms.CallerFound() | ms.CallRefused():
                self.callers.take_answer(message)
            case ms.MakeVersion():
                self._merges.put_nowait(message)
            case ms.PublishVersion():
                record, broadcast = self._made.pop(message.fragment)
                self.model.publish(record, broadcast, time.monotonic(), bytes.fromhex(message.receipt))
            case ms.ForgetPush():
                self.pushes.refuse_for_now(message.handle)
            case ev.AnswerPush():
                self.pushes.reply(message)
            case ev.ReleasePush():
                self.pushes.release(message)

    async def _begin(self, message: ms.Begin) -> None:
        checkpoints = Checkpoints(self.store, Epoch(self.store, message.epoch), self.job.metadata.name, 1)
        try:
            offers = await asyncio.to_thread(self._load, checkpoints, message.fragments)
        except (Damaged, ObjectNotFound, StoreUnusable) as error:
            self.send(ms.Begun(failure=f"{error or type(error).__name__}"))
            return
        self._begin_parts(checkpoints, message.handles)
        rows = [self._row(self.model.newest[p], self.model.broadcasts[p]) for p in self._owned]
        self.send(ms.Begun(tuple(rows), offers, self.model.outer_state_reset))

    def _load(self, checkpoints: Checkpoints, fragments: dict[int, int]) -> tuple[str, ...]:
        """Read the records of these fragments; blocks. Returns the names of all spooled offers."""
        reader = checkpoints.reader
        layout = reader.layout()
        if layout is None:
            raise StoreUnusable("there is no version 0")
        records = []
        for fragment, version in sorted(fragments.items()):
            record = reader.record(fragment, version)
            try:  # what a shard before this one made durable, and did not come to say
                later = reader.record(fragment, version + 1)
                record = later if later.epoch == checkpoints.epoch.number else record
            except (Damaged, ObjectNotFound):
                pass
            records.append(record)
        self.model.begin(layout, records)
        for record in records:
            self.model.theta_squares(record)
        # What is another shard's is not to be had here.
        self._owned = sorted(fragments)
        owned = dict(zip(self._owned, zip(self.model.newest, self.model.broadcasts, strict=True), strict=True))
        nothing = np.empty(0, np.float32)
        others = [MergeRecord(self.job.metadata.name, 0, p, -1, theta=nothing) for p in range(len(layout))]
        absent = [Broadcast(p, -1, None, NOT_HERE) for p in range(len(layout))]
        self.model.newest = [owned[p][0] if p in owned else others[p] for p in range(len(layout))]
        self.model.broadcasts = [owned[p][1] if p in owned else absent[p] for p in range(len(layout))]
        self.model.previous = [None] * len(layout)
        self.model.superseded = [[] for _ in range(len(layout))]
        return tuple(self.store.list("offers"))

    def _row(self, record: MergeRecord, broadcast: Broadcast) -> ms.VersionRow:
        squares = self.model.theta_squares(record)  # which were taken in a thread, as the version was loaded or made
        return ms.VersionRow(
            record.body(),
            record.norm,
            broadcast.full_payload,
            broadcast.delta_payload,
            squares=tuple(map(float, squares)),
        )

    # ------------------------------------------------------------- what it says

    def _tell(self, event: ev.Event) -> None:
        assert self.model.layout is not None
        match event:
            case ev.PushReceived():
                squares = tuple(map(float, self.pushes.squares(event.handle)))
                size = codec.encoded_bytes(event.header.encoding, self.model.layout.elements(event.header.fragment))
                self.send(ms.PushHere(event.header, event.handle, event.norm, squares, bytes=size))
            case ev.PushAdvanced():
                self.send(event)

    async def _make_versions(self) -> None:
        while True:
            asked = await self._merges.get()
            made = await self.maker.make_version(asked.action, asked.number)
            self.send(self._report_made(made))

    def _report_made(self, made: Merged) -> ms.VersionMade:
        fragment, row = made.action.fragment, None
        if made.record is not None and made.broadcast is not None:
            self._made[fragment] = made.record, made.broadcast
            row = self._row(made.record, made.broadcast)
        return ms.VersionMade(
            fragment, row, made.seconds, left_out=made.left_out, failure=made.failure, largest=made.largest
        )

    async def _sweep_often(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            self._multipart.sweep(now)
            self.model.buffers.sweep(now)
            self.model.drop_superseded(now)
            self.send(self._measure())

    async def _scrub_often(self) -> None:
        while True:
            await asyncio.sleep(self.job.spec.syncer.checkpoint.every_seconds)
            await self.writer.scrub(lambda: [self.model.newest[p] for p in self._owned])

    def _measure(self) -> ms.ShardFigures:
        used = resource.getrusage(resource.RUSAGE_SELF)
        listener = self.authorizer.listener
        wire = listener.bytes_by_place() if listener is not None and listener.secure else {}
        return ms.ShardFigures(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, dict(self.refused), wire)

    async def close(self) -> None:
        """End all work; what is not durable is lost."""
        if self.begun:
            await self.bulk.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.begun:
            await self.maker.close()
            self.pushes.close()
        self._decode_threads.shutdown(True, cancel_futures=True)


async def find_nothing(request: sync_pb2.DownloadRequest) -> Found:
    """Only fragments are to be had of a shard."""
    return None, (), "none"
