"""The syncer's side of its shards: what the core decides goes to the shard of the fragment, and what that says becomes
the core's events.

A shard that is lost comes back from the store. The core is told of both, and in between nothing is asked of it. What it
had made durable and did not come to say is taken into the job first. Of the pushes that it held, accepted offers that
are durable are known here, and given back to it under their handles; every other one is lost with it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from diloco_protocol.arrays.layout import Layout
from diloco_protocol.documents import ShardRow
from diloco_protocol.vocabulary import SHARD_FAILING, EventKind, SyncerExit, TransferRefusal
from diloco_protocol.wire import convert, sync_pb2
from diloco_protocol.wire.limits import WireError
from diloco_protocol.wire.records import PushHeader
from diloco_syncer.core import events as ev
from diloco_syncer.core.core import Core
from diloco_syncer.core.shards import deal_fragments
from diloco_syncer.runtime.driver import RESTART
from diloco_syncer.runtime.global_model import Broadcast, GlobalModel
from diloco_syncer.runtime.merger import Merged, Merger
from diloco_syncer.runtime.multipart import TooManyUploads, UploadRefused
from diloco_syncer.runtime.traffic import add_bytes
from diloco_syncer.server.callers import Caller, SessionCallers
from diloco_syncer.server.sessions import CallerRefused
from diloco_syncer.server.tls.connection_limits import Peer
from diloco_syncer.shards import messages as ms
from diloco_syncer.store.checkpoint import SpooledOffer, offer_name
from diloco_syncer.store.records import MergeRecord

log = logging.getLogger(__name__)

NO_FIGURES = ms.ShardFigures(0.0, 0, {}, {})
HANDLES = 1 << 32  # that one life of a shard may give out
STEADY_SECONDS = 60.0  # a life that lasted so long begins the counts of failures anew


class Stream(Protocol):
    """Where messages to a shard go."""

    def send(self, message: ms.ToShard) -> None: ...


@dataclass
class ShardState:
    """One shard as the syncer sees it. ``stream`` None: it is away. ``serving``: it has begun, and the core knows."""

    index: int
    stream: Stream | None = None
    serving: bool = False
    returns: int = 0  # how often it came back
    fragments: tuple[int, ...] = ()
    merging: dict[int, ms.MakeVersion] = field(default_factory=dict)  # by fragment: what it was asked for
    figures: ms.ShardFigures = NO_FIGURES
    problem: str = ""  # of its store
    since: float = math.inf  # its stream is there, monotonic seconds
    failures: int = 0  # ends in a row, each soon after its start
    why: str = ""  # it ended last
    said: str = ""  # its process, of its own end
    code: int = SyncerExit.FAILED  # of that end

    def is_steady(self) -> bool:
        """Whether its present or last life has lasted."""
        return time.monotonic() - self.since >= STEADY_SECONDS


@dataclass
class Coordinator:
    """All shards of a syncer. ``check_push`` as in ``ReceivedPushes``, ``stop`` as in ``Driver``."""

    core: Core
    model: GlobalModel
    merger: Merger
    callers: SessionCallers
    check_push: Callable[[PushHeader, str], None]
    emit: Callable[[ev.Event], None]
    run_task: Callable[[Coroutine[Any, Any, None]], object]
    stop: Callable[[int, str], None]
    on_change: Callable[[], None]  # what shards have has changed
    shards: list[ShardState]
    refused: Counter[str] = field(default_factory=Counter)  # uploads that ended lives of shards refused
    _ended_bytes: dict[str, tuple[int, int]] = field(default_factory=dict)
    _lives: int = 0  # of shards
    _dealt: tuple[int, ...] = ()  # the shard of each fragment
    _begun: asyncio.Event = field(default_factory=asyncio.Event)
    _wanted: dict[int, int] = field(default_factory=dict)  # by fragment: the version that it is to begin at
    _rows: dict[int, ms.VersionRow] = field(default_factory=dict)  # by fragment, until all shards have begun
    _shard_of: dict[int, ShardState] = field(default_factory=dict)  # by handle
    _received: dict[int, ms.RestoreOffer] = field(default_factory=dict)  # offers that are not durable yet, by handle
    _offers: dict[int, ms.RestoreOffer] = field(default_factory=dict)  # and those that are

    # ------------------------------------------------------------- beginning

    async def begin(self, layout: Layout, newest: Sequence[MergeRecord], frozen: str, frozen_digest: str) -> None:
        """Have all fragments begin at these records, in the shards that have them, and put those in force. A stand-in,
        which the store does not have, is nobody's."""
        self._dealt = deal_fragments([layout.elements(p) for p in range(len(layout))], len(self.shards))
        self._begun.clear()
        self._wanted = {record.fragment: record.version for record in newest if record.epoch}
        for shard in self.shards:
            shard.fragments = tuple(p for p in self._wanted if self._dealt[p] == shard.index)
            if shard.stream is not None:
                self._send_begin(shard, {p: self._wanted[p] for p in shard.fragments})
        await self._begun.wait()
        rows, self._rows = self._rows, {}
        records = [to_record(rows[r.fragment]) if r.fragment in rows else r for r in newest]
        made = {p: to_broadcast(row) for p, row in rows.items()}
        broadcasts = [made.get(r.fragment) or self.model.encode(r, None) for r in records]
        self.model.begin(layout, records, frozen, frozen_digest, broadcasts)
        for row in rows.values():
            self._know_squares(row)

    def _send_begin(self, shard: ShardState, versions: dict[int, int]) -> None:
        assert shard.stream is not None
        self._lives += 1
        shard.stream.send(ms.Begin(self.core.epoch, versions, self._lives * HANDLES))

    def _know_squares(self, row: ms.VersionRow) -> None:
        self.model.know_squares(row.body["fragment"], row.body["version"], np.array(row.squares))

    def restore_offer(self, offer: SpooledOffer) -> int:
        """Give a spooled offer, found at the start, to its shard; returns its handle."""
        handle = len(self._offers) + 1
        given = ms.RestoreOffer(
            handle, offer.header, offer.norm, tuple(map(float, offer.squares)), encoded_bytes=offer.encoded_bytes
        )
        self._offers[handle] = given
        shard = self._shard_of[handle] = self.shards[self._dealt[offer.header.fragment]]
        self._tell(shard, given)
        return handle

    # ------------------------------------------------------------- what the core decides

    def count_returns(self) -> tuple[int, ...]:
        """How often each shard has come back."""
        return tuple(shard.returns for shard in self.shards)

    def merge(self, action: ev.Merge, returns: tuple[int, ...]) -> None:
        """Have the shard of the fragment make a version. ``returns``: as ``count_returns`` was when the core decided.
        What it decided before a shard came back is void: then the round began anew."""
        shard = self.shards[self._dealt[action.fragment]]
        if shard.returns != returns[shard.index]:
            return
        asked = shard.merging[action.fragment] = ms.MakeVersion(action, self.merger.next_number())
        self._tell(shard, asked)

    def answer(self, verdict: ev.AnswerPush) -> None:
        """Send the verdict on a push to the shard that has it."""
        shard = self._shard_of.get(verdict.handle)
        if verdict.reason is not None or not verdict.offer:
            self._received.pop(verdict.handle, None)
        if verdict.reason is not None:
            self._shard_of.pop(verdict.handle, None)
        if shard is not None:
            self._tell(shard, verdict)

    def release(self, action: ev.ReleasePush) -> None:
        """Tell the shard that has a push that its bytes are not needed any more."""
        self._received.pop(action.handle, None)
        self._offers.pop(action.handle, None)
        if (shard := self._shard_of.pop(action.handle, None)) is not None:
            self._tell(shard, action)

    @staticmethod
    def _tell(shard: ShardState, message: ms.ToShard) -> None:
        """Nothing is said to a shard that has not begun: what the core decided before is of its life before."""
        if shard.stream is not None and shard.serving:
            shard.stream.send(message)

    # ------------------------------------------------------------- a shard comes and goes

    def connect_shard(self, index: int, stream: Stream) -> None:
        """A shard's process is there. While there is no model it has nothing to do."""
        shard = self.shards[index]
        if shard.stream is not None:  # the end of the one before is not heard yet
            self.lose_shard(index, shard.stream, "another process has taken its place")
        shard.stream, shard.since, shard.said, shard.code = stream, time.monotonic(), "", SyncerExit.FAILED
        shard.why = shard.why if shard.failures else ""
        if self.model.layout is not None:
            self._send_begin(shard, {p: self.model.newest[p].version for p in shard.fragments})
        elif self._dealt:
            self._send_begin(shard, {p: self._wanted[p] for p in shard.fragments})

    def lose_shard(self, index: int, stream: Stream, why: str) -> bool:
        """The process of a shard at this stream has ended. False: another has taken its place, and nothing changes."""
        shard = self.shards[index]
        if shard.stream is not stream:
            return False
        was_serving, shard.serving, shard.stream = shard.serving, False, None
        shard.problem = ""
        add_bytes(self._ended_bytes, shard.figures.wire_bytes)
        self.refused.update(shard.figures.refused)
        shard.figures = NO_FIGURES
        shard.why = shard.said or why
        log.error("shard %d is away: %s", index, shard.why)
        if was_serving and self.model.layout is not None:  # else nothing was asked of it yet
            self.emit(ev.ShardLost(index, shard.why))
        return True

    def await_pods(self) -> None:
        """Shards are pods, which may be pending for long."""
        for shard in self.shards:
            shard.why = "its pod has not connected yet"

    def tell_awaited(self) -> None:
        """Tell of the shards that have not come yet."""
        if awaited := ", ".join(str(shard.index) for shard in self.shards if shard.since == math.inf):
            log.warning("waiting for shard pods %s", awaited)  # at a start nobody hears of events yet
            self.core.record_event(EventKind.SHARD_LOST, f"waiting for shard pods {awaited}")

    def count_failure(self, index: int, why: str, code: int) -> int:
        """A shard's process has ended, or could not be started. Returns how often that was in a row. While the job
        begins with its shards nobody is told of them: one that fails again and again ends the syncer, as a fault at its
        start does without shards."""
        shard = self.shards[index]
        shard.failures += 1
        shard.why, shard.said = shard.said or why, ""
        words = f"shard {index} of the syncer has failed {shard.failures} times in a row: {shard.why}"
        if self._dealt and self.model.layout is None and shard.failures >= SHARD_FAILING:
            self.stop(SyncerExit.STORE if code == SyncerExit.STORE else SyncerExit.FAILED, words)
        elif shard.failures == SHARD_FAILING:
            self.core.record_event(EventKind.SHARD_LOST, f"{words}; it is tried again")
        return shard.failures

    async def take_message(self, index: int, stream: Stream, message: Any) -> None:
        """What a shard says becomes the core's events, unless another process has taken its place. Raises ``WireError``
        for what no shard says."""
        shard = self.shards[index]
        if shard.stream is not stream:
            return
        match message:
            case ms.Begun():
                await self._begin_serving(shard, message)
            case ms.ShardEnded(code, why):
                shard.said, shard.code = why, code
                if code in (SyncerExit.CONFIGURATION, SyncerExit.SUPERSEDED):  # it would end so again
                    self.stop(code, why)
            case ms.FindCaller():
                self.run_task(self._find_caller(stream, message))
            case ms.UploadBegan():
                self.callers.begin_upload(Caller(message.connection, ""))
            case ms.UploadEnded():
                self.callers.end_upload(Caller(message.connection, message.place, message.slot), message.count)
            case ms.PartSent():
                self.callers.count_sent(Caller(0, message.place, message.slot), message.count)
            case ms.WholeSent(process, epoch, fragment, version):
                self.callers.note_sent(
                    sync_pb2.DownloadRequest(process=process, epoch=epoch, fragment=fragment, version=version)
                )
            case ev.PushAdvanced():
                self.emit(message)
            case ms.PushHere():
                self._take_push(shard, message)
            case ms.OfferSpooled():
                if (offer := self._received.pop(message.handle, None)) is not None:
                    self._offers[message.handle] = offer
            case ms.VersionMade():
                await self._take_version(shard, stream, message)
            case ms.StoreProblem():
                shard.problem = message.problem
                self.on_change()
            case ms.ShardFigures():
                shard.figures = message  # each second
                shard.failures = 0 if shard.is_steady() else shard.failures
            case _:
                raise WireError(f"{type(message).__name__} from a shard")

    async def _begin_serving(self, shard: ShardState, begun: ms.Begun) -> None:
        if begun.failure:
            self.stop(RESTART, f"shard {shard.index} cannot go on: {begun.failure}")
            return
        self.model.outer_state_reset |= begun.outer_state_reset
        if self.model.layout is None:
            self._rows |= {row.body["fragment"]: row for row in begun.versions}
            shard.serving = True
            if all(each.serving for each in self.shards):
                self._begun.set()
                self.on_change()
            return
        for row in begun.versions:
            fragment, version = row.body["fragment"], row.body["version"]
            asked = shard.merging.pop(fragment, None)
            if asked is not None and version == asked.action.version:
                record = to_record(row)
                merged = {push.header.id for push in record.responders}
                left = tuple(r.handle for r in asked.action.responders if r.header.id not in merged)
                broadcast = to_broadcast(row)
                await self.merger.take_version(
                    Merged(asked.action, record, broadcast, record.merge_seconds, left_out=left)
                )
            self._know_squares(row)
        there = set(begun.offers)
        for handle, offer in list(self._received.items()):  # durable, and it did not come to say so
            if self._shard_of.get(handle) is shard and offer_name(offer.header) in there:
                self._offers[handle] = self._received.pop(handle)
        shard.serving = True
        kept = {handle: handle for handle in self._offers if self._shard_of.get(handle) is shard}
        for handle in kept:
            self._tell(shard, self._offers[handle])
        for handle in [h for h, of in self._shard_of.items() if of is shard and h not in kept]:
            del self._shard_of[handle]
            self._received.pop(handle, None)
        shard.returns += 1
        self.on_change()
        self.emit(ev.ShardReady(shard.index, kept))

    async def _find_caller(self, stream: Stream, asked: ms.FindCaller) -> None:
        peer = Peer(names=asked.names, address=asked.address)
        try:
            request = bytes.fromhex(asked.request)
            if asked.sends:
                header = convert.parse(sync_pb2.UploadHeader, request)
                caller = await self.callers.find_sender(header, peer, "")
                self.check_push(convert.push_header(header), header.process)
            else:
                caller = await self.callers.find_reader(convert.parse(sync_pb2.DownloadRequest, request), peer, "")
            answer: ms.ToShard = ms.CallerFound(
                asked.call, caller.connection, caller.place, caller.slot, receipt=caller.receipt.hex()
            )
        except (CallerRefused, UploadRefused) as error:
            kind = "caller" if isinstance(error, CallerRefused) else "upload"
            answer = ms.CallRefused(asked.call, kind, error.reason, str(error))
        except TooManyUploads:
            answer = ms.CallRefused(asked.call, "busy", "", "")
        except WireError as error:
            answer = ms.CallRefused(asked.call, "upload", TransferRefusal.BAD_TRANSFER, str(error))
        stream.send(answer)

    def _take_push(self, shard: ShardState, push: ms.PushHere) -> None:
        header, handle = push.header, push.handle
        if self.core.is_recovering:  # since its bytes began to come: a version with a part of its steps may be found
            self._tell(shard, ms.ForgetPush(handle))
            return
        self._shard_of[handle] = shard
        if not header.round:
            self._received[handle] = ms.RestoreOffer(handle, header, push.norm, push.squares, encoded_bytes=push.bytes)
        growth = self.model.growth(header.fragment, np.array(push.squares))
        self.emit(ev.PushReceived(header, push.norm, bool(np.isfinite(push.norm)), handle, growth=growth))

    async def _take_version(self, shard: ShardState, stream: Stream, made: ms.VersionMade) -> None:
        asked = shard.merging.pop(made.fragment, None)
        if asked is None:
            raise WireError(f"shard {shard.index} made a version of fragment {made.fragment} that nobody asked for")
        record = broadcast = None
        if made.version is not None:
            record, broadcast = to_record(made.version), to_broadcast(made.version)
        await self.merger.take_version(
            Merged(
                asked.action,
                record,
                broadcast,
                made.seconds,
                left_out=made.left_out,
                failure=made.failure,
                largest=made.largest,
                publish=lambda receipt: self._publish(stream, made, receipt),
            )
        )

    def _publish(self, stream: Stream, made: ms.VersionMade, receipt: bytes) -> None:
        assert made.version is not None
        self._know_squares(made.version)
        stream.send(ms.PublishVersion(made.fragment, made.version.body["version"], receipt.hex()))

    # ------------------------------------------------------------- what is told of them

    def where(self) -> list[tuple[int, ...]]:
        """The fragments of each shard."""
        return [shard.fragments for shard in self.shards]

    def rows(self) -> list[ShardRow]:
        """The status document's ``shards``."""
        return [
            ShardRow(
                shard=shard.index,
                fragments=list(shard.fragments),
                serving=shard.serving,
                cpu_seconds=shard.figures.cpu_seconds,
                resident_bytes=shard.figures.resident_bytes,
                store_problem=shard.problem,
                failures=shard.failures,
                message="" if shard.serving and not shard.failures else shard.why,
            )
            for shard in self.shards
        ]

    def wire_bytes(self) -> dict[str, tuple[int, int]]:
        """By place, (bytes received, bytes sent) on the sockets of all shards, of all their lives."""
        sums = dict(self._ended_bytes)
        for shard in self.shards:
            add_bytes(sums, shard.figures.wire_bytes)
        return sums

    async def wait_spooled(self, seconds: float) -> None:
        """Wait until all offers that were accepted are durable, at most ``seconds``."""
        until = time.monotonic() + seconds
        while self._received and time.monotonic() < until:
            await asyncio.sleep(0.02)


def to_record(row: ms.VersionRow) -> MergeRecord:
    """A version's record without its arrays."""
    record = MergeRecord.from_body(dict(row.body), np.empty(0, np.float32))
    record.norm = row.norm
    return record


def to_broadcast(row: ms.VersionRow) -> Broadcast:
    """What is sent of a version, without its bytes."""
    digest = bytes.fromhex(str(row.body["sent"]).partition(":")[2])
    return Broadcast(row.body["fragment"], row.body["version"], None, row.full, delta_payload=row.delta, digest=digest)
