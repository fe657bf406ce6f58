"""Sessions: one control stream per learner or evaluator.

A stream begins with Join and is answered with Welcome or Refusal. Then learners' messages become the
core's events, and the core's actions become messages. What goes down waits in a queue of the
connection's own, at most ``MAX_QUEUED`` messages. A reader that lets it fill, or takes no message for
``limits.STALL_SECONDS``, is disconnected: it joins again and gets everything new in its Welcome.

Every message up is measured before it is parsed, and checked before it is used (``messages.py``, which also makes the
messages down). One that makes no sense ends the session with a refusal that names the mistake.

What is still wrong with it: a process is found by a scan of all sessions, at each Join and at each part of a transfer.
Some questions to the core bypass its events: how many slots there are, and how many leases one of them holds. Only a
Welcome can ask for version 0, so a session is ended to ask for it. A reader that lets its queue fill loses the session,
and gets all of Welcome again, where the newest announcement of each fragment would do.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from diloco_protocol.security.identity import covers, same_party
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.vocabulary import (
    MAX_FRAGMENTS,
    SYNC_PORT,
    ConnectionRefusal,
    JobPhase,
    JoinRefusal,
    TransferRefusal,
)
from diloco_protocol.wire import convert, limits, sync_pb2
from diloco_protocol.wire.limits import WireError
from diloco_protocol.wire.progress import Progress
from diloco_protocol.wire.records import StepReport
from diloco_syncer.core import events as ev
from diloco_syncer.core.core import Core
from diloco_syncer.runtime.durability import Durability
from diloco_syncer.runtime.global_model import Broadcast
from diloco_syncer.runtime.optimizer_relay import OptimizerRelay
from diloco_syncer.runtime.traffic import NOBODY, Traffic
from diloco_syncer.server import messages
from diloco_syncer.server.links import LinkMeasures
from diloco_syncer.server.messages import Addressed, NewsForLearners, OtherJob, phase_to, refusal
from diloco_syncer.server.tls.access import CallAuthorizer
from diloco_syncer.server.tls.connection_limits import MessagePace, Peer, TooManyCalls

log = logging.getLogger(__name__)

MAX_QUEUED = 4 * MAX_FRAGMENTS
MAX_LEASES = limits.MAX_CURSORS  # that one slot may hold
SPARE_SESSIONS = 64  # beyond four per slot
PLAIN = Peer()


class CallerRefused(Exception):
    """A call's peer may not act for the process that it names: ``reason`` is a fixed word, the message for people."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Connection:
    """The far end of one session's stream."""

    def __init__(self, number: int, peer: Peer = PLAIN) -> None:
        self.number = number
        self.peer = peer
        self.process = self.region = ""
        self.place = NOBODY  # where its bytes are counted
        self.queue: deque[bytes] = deque()
        self.wake = asyncio.Event()
        self.welcomed = False  # Welcome comes first, and contains what was announced before it
        self.leases_wanted = 0  # requested by the learner, and not by the core's event yet
        self.link = LinkMeasures()
        self.sent, self.received = Progress(), Progress()  # bulk bytes, which keep its transfers alive
        self.messages, self.uploads = MessagePace(), MessagePace()
        self.closing = False  # end the stream when the queue is sent
        self.cut = False  # the syncer ends
        self.read_whole = False  # all that the far end sent until it half-closed the stream
        self.overflowed = False

    def send(self, message: sync_pb2.SyncerMessage) -> None:
        """Queue a message; too many of them end the session."""
        if self.closing:
            return
        if len(self.queue) >= MAX_QUEUED:
            self.overflowed = self.closing = True
            self.queue.clear()
        else:
            self.queue.append(message.SerializeToString())
        self.wake.set()

    def refuse(self, reason: str, message: str, fatal: bool, tensors: bytes = b"") -> None:
        self.send(refusal(reason, message, fatal, tensors))
        self.end()

    async def pace_upload(self) -> bool:
        """Wait until an upload of this process may begin; whether that took a while."""
        seconds = self.uploads.count_message(time.monotonic())
        await asyncio.sleep(seconds)
        return seconds > 0

    def end(self) -> None:
        """End the stream when what is queued is sent."""
        self.closing = True
        self.wake.set()


@dataclass
class Sessions:
    """All sessions of a syncer. ``shard_host``: of a shard in a pod of its own, for who is in the syncer's cluster; its
    number stands for {}. Empty: shards are behind the syncer's port."""

    job: DiLoCoJob
    core: Core
    durability: Durability
    authorizer: CallAuthorizer
    relay: OptimizerRelay
    traffic: Traffic
    emit: Callable[[ev.Event], None]
    stop_progress: Callable[[], float]  # how much of the job's stop is reached now, 0 to 1
    tensors: Callable[[], bytes]  # the job's, as tensors_to_json has them; empty: not known yet, or too many to say
    shard_host: str = ""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _connections: dict[int, Connection] = field(default_factory=dict)
    _shards: Sequence[Sequence[int]] = ()  # the fragments of each

    def __post_init__(self) -> None:
        self._news = NewsForLearners(self.job, self.core)

    @property
    def count(self) -> int:
        return len(self._connections)

    def find_connection(self, number: int | None) -> Connection | None:
        return None if number is None else self._connections.get(number)

    def find_process(self, process: str) -> Connection | None:
        """The newest connection of a process, if one is open."""
        return next((c for c in reversed(self._connections.values()) if c.process == process), None)

    @property
    def processes(self) -> set[str]:
        """Those that have a session and were told of the phase."""
        return {connection.process for connection in self._connections.values() if connection.welcomed}

    def find_caller(self, process: str, peer: Peer, called: str) -> Connection:
        """The connection of the process for which a call's peer acts. Raises ``CallerRefused`` if it has no session, or
        one under a certificate of another party. ``called``: the listener's name for the call's connection."""
        connection = self.find_process(process)
        if connection is None or not connection.welcomed:
            raise CallerRefused(TransferRefusal.NOT_JOINED, f"process {process[:80]!r} has no session: join first")
        if not self.authorizer.secure:
            return connection
        if not same_party(connection.peer.names, peer.names):
            refused = CallerRefused(ConnectionRefusal.WRONG_PROCESS, "a process with another certificate has this id")
            self.authorizer.record_refusal(peer, refused.reason, str(refused))
            raise refused
        self.authorizer.assign_place(called, connection.place)
        return connection

    # ------------------------------------------------------------- the service

    async def serve(self, stream: AsyncIterator[bytes], context: Any) -> None:
        peer = await self.authorizer.authorize(context, stream)
        await self._check_limits(stream, peer, context)
        if self.count >= 4 * max(len(self.core.slots), self.job.spec.most_slots) + SPARE_SESSIONS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many sessions: try again later")
        connection = Connection(next(self._numbers), peer)
        try:
            with self.authorizer.limits.silent_call(peer):
                join, attempt = await self._read_join(stream, connection)
        except TooManyCalls as error:
            over, code = ConnectionRefusal.TOO_MANY_CALLS, grpc.StatusCode.RESOURCE_EXHAUSTED
            await self.authorizer.refuse(context, peer, over, code, str(error))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no Join within {limits.JOIN_SECONDS:.0f} s")
        except WireError as error:
            other = isinstance(error, OtherJob)
            self.authorizer.record_refusal(
                peer, ConnectionRefusal.WRONG_JOB if other else ConnectionRefusal.BAD_JOIN, str(error)
            )
            await context.write(refusal(JoinRefusal.BAD_JOIN, str(error), True).SerializeToString())
            return
        if not await self._check_join(join, attempt, peer, context):
            return
        connection.process, connection.region = join.process, join.region
        connection.place = self.traffic.place_of(join.region, join.evaluator)
        self.authorizer.assign_place(self.authorizer.find_name(context), connection.place)
        self._connections[connection.number] = connection
        log.info("session %d: %s %s-%d joins", connection.number, join.process, join.region, join.ordinal)
        self.authorizer.limits.session_opened(peer)
        try:
            try:
                self.emit(join)
            except Exception as error:  # the core cannot decide on it, and the refusal is queued
                self.end_by_fault(connection.number, error)
                await context.write(connection.queue.popleft())
            else:
                await self._pump(stream, context, connection)
        finally:
            self.authorizer.limits.session_closed(peer)
            self._connections.pop(connection.number, None)
            self.emit(ev.ConnectionLost(connection.number))

    async def _check_limits(self, stream: AsyncIterator[bytes], peer: Peer, context: Any) -> None:
        if not self.authorizer.secure:
            return
        over = self.authorizer.limits.admit_join(peer, time.monotonic())
        if over is not None:
            what = "sessions" if over == ConnectionRefusal.TOO_MANY_SESSIONS else "joins in a minute"
            await self.authorizer.refuse(
                context,
                peer,
                over,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"too many {what} with one certificate: try again later",
                stream,
            )

    async def _check_join(self, join: ev.Join, attempt: int, peer: Peer, context: Any) -> bool:
        """Check region, process id and replay of a Join; on failure send the refusal and return False."""
        said = None
        newest = self.find_process(join.process)
        if not join.evaluator and not covers(peer.names, join.region):
            said = ConnectionRefusal.WRONG_REGION, f"region {join.region!r} is not of this certificate", True
        elif join.evaluator and not any(covers(peer.names, region.name) for region in self.job.spec.regions):
            said = ConnectionRefusal.WRONG_REGION, "this certificate is of no region of the job", True
        elif newest is not None and not same_party(newest.peer.names, peer.names):
            said = ConnectionRefusal.WRONG_PROCESS, "a process with another certificate has this id", False
        # By region, which is the certificate's: nobody else can use up the numbers of a process that is away.
        elif not self.authorizer.limits.is_new_attempt(
            f"{'' if join.evaluator else join.region}/{join.process}", attempt
        ):
            said = ConnectionRefusal.REPLAYED, "this Join was sent before: join anew", False
        if said is not None:
            self.authorizer.record_refusal(peer, said[0], said[1])
            await context.write(refusal(*said).SerializeToString())
        return said is None

    async def _read_join(self, stream: AsyncIterator[bytes], connection: Connection) -> tuple[ev.Join, int]:
        async with asyncio.timeout(limits.JOIN_SECONDS):
            raw = await anext(stream, None)
        if raw is None:
            raise WireError("the stream ended before Join")
        first = convert.parse(sync_pb2.LearnerMessage, raw)
        return messages.read_join(first, self.job.metadata.name, connection.number), first.join.attempt

    async def _pump(self, stream: AsyncIterator[bytes], context: Any, connection: Connection) -> None:
        reading = asyncio.create_task(self._read(stream, connection))
        writing = asyncio.create_task(self._write(context, connection))
        try:
            await asyncio.wait((reading, writing), return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and not writing.done():
                # The peer sends no more; what is queued for it (a refusal) may still be of use.
                connection.end()
                await asyncio.wait((writing,), timeout=5.0)
        finally:
            for task in (reading, writing):
                task.cancel()
            results = await asyncio.gather(reading, writing, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                log.info("session %d ended: %s", connection.number, result)
        if connection.overflowed:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "you do not read fast enough: join again")
        if connection.cut and not connection.read_whole:
            # OK would tell a learner that has half-closed the stream that its Drained was read.
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the syncer ends: join the next one")

    async def _read(self, stream: AsyncIterator[bytes], connection: Connection) -> None:
        try:
            async for raw in stream:
                if connection.closing:
                    return
                self._handle_message(connection, convert.parse(sync_pb2.LearnerMessage, raw))
                await asyncio.sleep(connection.messages.count_message(time.monotonic()))
            connection.read_whole = True
        except WireError as error:
            log.warning("session %d: %s", connection.number, error)
            connection.refuse(JoinRefusal.BAD_MESSAGE, str(error), False)
        except Exception as error:
            self.end_by_fault(connection.number, error)

    def end_by_fault(self, number: int, error: Exception) -> None:
        """The syncer failed at what a session said, or at answering it: that session ends, and nobody else's."""
        log.error("session %d ends by a fault of this program", number, exc_info=error)
        if (connection := self.find_connection(number)) is not None:
            connection.refuse(JoinRefusal.FAULT, f"the syncer failed at it: {error!r}", False)

    async def _write(self, context: Any, connection: Connection) -> None:
        while True:
            while connection.queue:
                async with asyncio.timeout(limits.STALL_SECONDS):
                    await context.write(connection.queue.popleft())
            if connection.closing:
                return
            connection.wake.clear()
            await connection.wake.wait()

    def _handle_message(self, connection: Connection, message: sync_pb2.LearnerMessage) -> None:
        match message.WhichOneof("kind"):
            case "report":
                report = convert.from_wire(StepReport, message.report)
                if report.echo:
                    connection.send(sync_pb2.SyncerMessage(echo=sync_pb2.Echo(number=report.echo)))
                connection.link.apply_report(report)
                self.emit(ev.Reported(connection.number, report))
                self._request_leases(connection)
            case "lease_request":
                connection.leases_wanted = min(connection.leases_wanted + 1, limits.MAX_CURSORS)
                self._request_leases(connection)
            case _:
                self.emit(messages.read_event(message, connection.number))

    def _request_leases(self, connection: Connection) -> None:
        """Request the leases that the learner wants, as far as its slot may hold more.

        The bound keeps Welcome (which names all leases of a slot) and reports (which name all cursors)
        small. The other requests wait until cursors have moved.
        """
        core = self.core
        while connection.leases_wanted:
            if core.leased_blocks(connection.number) >= MAX_LEASES:
                return
            connection.leases_wanted -= 1
            self.emit(ev.LeaseRequested(connection.number))

    # ------------------------------------------------------------- actions

    def admit(self, action: ev.Admit, broadcasts: tuple[Broadcast, ...]) -> None:
        """Answer a Join with Welcome. ``broadcasts``: the versions in force when the core decided."""
        if (connection := self.find_connection(action.connection)) is not None:
            store = self.durability
            welcome = self._news.welcome(
                action, broadcasts, store.problem, store.optimizer_bytes, progress=self.stop_progress()
            )
            welcome.shards.extend(self._find_shards(connection.region))
            connection.send(sync_pb2.SyncerMessage(welcome=welcome))
            connection.welcomed = True

    def announce(self, action: ev.Announce, broadcasts: tuple[Broadcast, ...]) -> None:
        """Tell every learner of a version. ``broadcasts``: the versions in force when the core decided."""
        nobody, broadcast = ev.MergedPush(), broadcasts[action.fragment]
        for number, connection in self._connections.items():
            if connection.welcomed:
                merged = action.merged.get(number, nobody)
                told = self._news.announcement(broadcast, merged, action.job_tokens, self.stop_progress())
                connection.send(sync_pb2.SyncerMessage(announcement=told))

    def refuse(self, action: ev.Refuse) -> None:
        """Answer a Join with Refusal, or end a session with one."""
        if (connection := self.find_connection(action.connection)) is not None:
            if not connection.welcomed:
                self.authorizer.record_refusal(connection.peer, action.reason, action.message)
            # The learner has both models' tensors then, and can say which one differs.
            tensors = self.tensors() if action.reason == JoinRefusal.OTHER_LAYOUT else b""
            connection.refuse(action.reason, action.message, action.fatal, tensors)

    def request_initial_model(self, action: ev.RequestInitialModel) -> None:
        """End the session of a learner that shall upload version 0: only a Welcome can ask for it."""
        self.refuse(ev.Refuse(action.connection, JoinRefusal.INITIALISE, "join again to upload version 0", False))

    def send_action(self, action: Addressed) -> None:
        """Send an action that is one message for one learner."""
        connection = self.find_connection(action.connection)
        match action:
            case ev.OfferPeerState() if connection is not None:
                self.relay.offer(action.transfer, connection.process)
            case ev.RequestPeerState() if connection is not None:
                self.relay.expect_upload(
                    action.transfer, connection.number, connection.process, checkpoint=action.checkpoint
                )
        if connection is not None:
            connection.send(messages.addressed_message(action, self.core.epoch))

    def send_phase(self, phase: JobPhase, message: str) -> None:
        told = sync_pb2.SyncerMessage(phase=phase_to(phase, message))
        for connection in self._connections.values():
            if connection.welcomed:
                connection.send(told)

    def set_shards(self, shards: Sequence[Sequence[int]]) -> None:
        """Tell which shard has which fragments. A shard's number is its place, so all are told."""
        told = shards if any(shards) else ()
        if told == self._shards:
            return
        self._shards = told
        for connection in self._connections.values():
            if connection.welcomed:
                shards_there = sync_pb2.Shards(shards=self._find_shards(connection.region))
                connection.send(sync_pb2.SyncerMessage(shards=shards_there))

    def _find_shards(self, region: str) -> Iterator[sync_pb2.Shard]:
        """The shards, as a learner of the region reaches them. An evaluator is in the syncer's cluster."""
        syncer, host, port = self.job.spec.syncer, "", 0
        is_far = any(one.name == region and one.cluster != syncer.cluster for one in self.job.spec.regions)
        for number, fragments in enumerate(self._shards):
            if self.shard_host:
                near = self.shard_host.replace("{}", str(number)), SYNC_PORT
                host, port = syncer.shard_address(number) if is_far else near
            yield sync_pb2.Shard(port=port, host=host, fragments=fragments)

    def end_all(self) -> None:
        """End every session, because the syncer ends. One of which something may be unread ends as unavailable."""
        for connection in self._connections.values():
            connection.cut = True
            connection.end()
