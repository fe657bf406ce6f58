"""Sessions: one control stream per learner or evaluator.

A stream begins with Join and gets Welcome or Refusal; then both sides say what the
core's events and actions carry. What goes down waits in a queue of the
connection's own, at most ``MAX_QUEUED`` messages; a reader that lets it fill, or
takes no message for ``wire.STALL_SECONDS``, is disconnected: it joins again and gets
everything new in its Welcome. Every message up is measured before it is parsed
and checked before it is believed (messages.py); garbage ends the session with a
refusal that names it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc

from diloco_protocol.security.identity import akin
from diloco_protocol.vocabulary import ConnectionRefusal, JobPhase, JoinRefusal
from diloco_protocol.wire import limits, sync_pb2
from diloco_protocol.wire.limits import WireError
from diloco_syncer import messages
from diloco_syncer.core import events as ev
from diloco_syncer.messages import lease_to, phase_to, refusal, seat_to
from diloco_syncer.runtime.global_model import Broadcast, announcement
from diloco_syncer.server.pages.links import LinkMeasures
from diloco_syncer.server.tls.access import CallAuthorizer, may_join_region
from diloco_syncer.server.tls.connection_limits import Peer

if TYPE_CHECKING:
    from diloco_syncer.runtime.driver import Engine

log = logging.getLogger(__name__)

MAX_QUEUED = 4 * limits.MAX_FRAGMENTS
MAX_LEASES = limits.MAX_CURSORS  # that one slot may hold
SPARE_SESSIONS = 64  # beyond four per slot
PLAIN = Peer()


class Connection:
    """One stream's far end."""

    def __init__(self, number: int, peer: Peer = PLAIN) -> None:
        self.number = number
        self.peer = peer
        self.process = self.place = ""  # place: where its bytes are counted
        self.queue: deque[bytes] = deque()
        self.wake = asyncio.Event()
        self.welcomed = False  # Welcome comes first; what is said to all before it is in it
        self.leases_wanted = 0  # asked for and not handed to the core yet
        self.link = LinkMeasures()
        self.closing = False  # end the stream when the queue is sent
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

    def end(self) -> None:
        """End the stream when what is queued is sent."""
        self.closing = True
        self.wake.set()


class Sessions:
    """All sessions of a syncer."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = itertools.count(1)
        self._connections: dict[int, Connection] = {}
        self.doors = CallAuthorizer()

    @property
    def count(self) -> int:
        return len(self._connections)

    def connection(self, number: int) -> Connection | None:
        return self._connections.get(number)

    def of_process(self, process: str) -> Connection | None:
        """The newest connection of a process."""
        return next((c for c in reversed(self._connections.values()) if c.process == process), None)

    # ------------------------------------------------------------- the service

    async def serve(self, stream: AsyncIterator[bytes], context: Any) -> None:
        """One call of Sync.Session."""
        peer = await self.doors.authorize(context)
        await self._within_limits(peer, context)
        if self.count >= 4 * len(self._engine.core.slots) + SPARE_SESSIONS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many sessions: try again later")
        connection = Connection(next(self._numbers), peer)
        try:
            join, attempt = await self._first(stream, connection)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no Join within {limits.JOIN_SECONDS:.0f} s")
        except WireError as error:
            other = isinstance(error, messages.OtherJob)
            self.doors.record_refusal(
                peer, ConnectionRefusal.WRONG_JOB if other else ConnectionRefusal.BAD_JOIN, str(error)
            )
            await context.write(refusal(JoinRefusal.BAD_JOIN, str(error), True).SerializeToString())
            return
        if not await self._believed(join, attempt, peer, context):
            return
        connection.process = join.process
        connection.place = self._engine.traffic.place(join.region, join.evaluator)
        self.doors.assign_place(context, connection.place)
        self._connections[connection.number] = connection
        log.info("session %d: %s %s-%d joins", connection.number, join.process, join.region, join.ordinal)
        self.doors.limits.session_opened(peer)
        try:
            self._engine.handle(join)
            await self._pump(stream, context, connection)
        finally:
            self.doors.limits.session_closed(peer)

    async def _within_limits(self, peer: Peer, context: Any) -> None:
        if not self.doors.secure:
            return
        over = self.doors.limits.admit_join(peer, time.monotonic())
        if over is not None:
            what = "sessions" if over == ConnectionRefusal.TOO_MANY_SESSIONS else "joins in a minute"
            await self.doors.refuse(
                context,
                peer,
                over,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"too many {what} with one certificate: try again later",
            )

    async def _believed(self, join: ev.Join, attempt: int, peer: Peer, context: Any) -> bool:
        """Whether the certificate may say this Join, now; if not, the refusal is told."""
        doors, said = self.doors, None
        newest = self.of_process(join.process)
        if not join.evaluator and not may_join_region(peer, join.region):
            said = ConnectionRefusal.WRONG_REGION, f"region {join.region!r} is not of this certificate", True
        elif newest is not None and not akin(newest.peer.names, peer.names):
            said = ConnectionRefusal.WRONG_PROCESS, "a process with another certificate has this id", False
        elif not doors.limits.is_new_attempt(join.process, attempt):
            said = ConnectionRefusal.REPLAYED, "this Join was said before: join anew", False
        if said is not None:
            doors.record_refusal(peer, said[0], said[1])
            await context.write(refusal(*said).SerializeToString())
        return said is None

    async def _first(self, stream: AsyncIterator[bytes], connection: Connection) -> tuple[ev.Join, int]:
        async with asyncio.timeout(limits.JOIN_SECONDS):
            raw = await anext(stream, None)
        if raw is None:
            raise WireError("the stream ended before Join")
        first = limits.parse(sync_pb2.LearnerMessage, raw)
        if first.WhichOneof("kind") != "join":
            raise WireError("the first message must be Join")
        limits.check_format(first.join.format)
        join = messages.join_from(first.join, connection.number, self._engine.job.metadata.name)
        return join, messages.attempt_from(first.join)

    async def _pump(self, stream: AsyncIterator[bytes], context: Any, connection: Connection) -> None:
        reading = asyncio.create_task(self._read(stream, connection))
        writing = asyncio.create_task(self._write(context, connection))
        try:
            await asyncio.wait((reading, writing), return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and not writing.done():
                # The peer has said its last; what we still have for it (a refusal) may be of use.
                connection.end()
                await asyncio.wait((writing,), timeout=5.0)
        finally:
            for task in (reading, writing):
                task.cancel()
            results = await asyncio.gather(reading, writing, return_exceptions=True)
            self._connections.pop(connection.number, None)
            self._engine.handle(ev.ConnectionLost(connection.number))
        for result in results:
            if isinstance(result, Exception):
                log.info("session %d ended: %s", connection.number, result)
        if connection.overflowed:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "you do not read fast enough: join again")

    async def _read(self, stream: AsyncIterator[bytes], connection: Connection) -> None:
        try:
            async for raw in stream:
                if connection.closing:
                    return
                self._heard(connection, limits.parse(sync_pb2.LearnerMessage, raw))
        except WireError as error:
            log.warning("session %d: %s", connection.number, error)
            connection.send(refusal(JoinRefusal.BAD_MESSAGE, str(error), False))
            connection.end()

    async def _write(self, context: Any, connection: Connection) -> None:
        while True:
            while connection.queue:
                async with asyncio.timeout(limits.STALL_SECONDS):
                    await context.write(connection.queue.popleft())
            if connection.closing:
                return
            connection.wake.clear()
            await connection.wake.wait()

    def _heard(self, connection: Connection, message: sync_pb2.LearnerMessage) -> None:
        number = connection.number
        event: ev.Event
        match message.WhichOneof("kind"):
            case "report":
                if message.report.echo:
                    echo = sync_pb2.Echo(number=message.report.echo)
                    connection.send(sync_pb2.SyncerMessage(echo=echo))
                connection.link.heard(message.report)
                self._engine.handle(ev.Reported(number, messages.report_from(message.report)))
                self._lease(connection)
                return
            case "lease_request":
                connection.leases_wanted = min(connection.leases_wanted + 1, limits.MAX_CURSORS)
                self._lease(connection)
                return
            case "evaluation":
                event = messages.evaluation_from(message.evaluation, number)
            case "drain_request":
                event = ev.DrainRequested(number)
            case "drained":
                event = ev.Drained(number)
            case "peer_state_wanted":
                event = ev.PeerStateRequested(number)
            case "peer_state_unavailable":
                event = ev.PeerStateFailed(message.peer_state_unavailable.transfer)
            case "base_unavailable":
                event = ev.LostVersionFailed(number, message.base_unavailable.fragment)
            case "join":
                raise WireError("Join is said once, first")
            case _:
                raise WireError("a message of an unknown kind: run the same release on both sides")
        self._engine.handle(event)

    def _lease(self, connection: Connection) -> None:
        """Ask for what the learner wants, as far as its slot may hold more: a Welcome tells all
        leases of a slot, and a report all cursors. The rest waits until cursors have moved."""
        core = self._engine.core
        while connection.leases_wanted:
            if core.leased_blocks(connection.number) >= MAX_LEASES:
                return
            connection.leases_wanted -= 1
            self._engine.handle(ev.LeaseRequested(connection.number))

    # ------------------------------------------------------------- actions

    def carry_out(self, action: ev.Action, broadcasts: tuple[Broadcast, ...]) -> None:
        """Say what the core decided. ``broadcasts``: the versions in force when it decided."""
        match action:
            case ev.Announce():
                self._announce(action, broadcasts[action.fragment])
                return
            case ev.Admit():
                message = sync_pb2.SyncerMessage(welcome=self._welcome(action, broadcasts))
            case ev.Refuse():
                message = refusal(action.reason, action.message, action.fatal)
            case ev.Promote():
                message = sync_pb2.SyncerMessage(promotion=sync_pb2.Promotion(seat=seat_to(action.seat)))
            case ev.RequestInitialModel():
                # Only a Welcome can ask for version 0: let this learner join again.
                message = refusal(JoinRefusal.INITIALISE, "join again to upload version 0", False)
            case ev.Pull():
                pull = sync_pb2.Pull(
                    round=action.round, fragment=action.fragment, epoch=self._engine.epoch, version=action.version
                )
                message = sync_pb2.SyncerMessage(pull=pull)
            case ev.GrantLease():
                message = sync_pb2.SyncerMessage(lease=lease_to(action.lease))
            case ev.RequestPeerState():
                self._engine.relay.ask(action.transfer, action.connection, action.checkpoint)
                message = sync_pb2.SyncerMessage(peer_state_request=sync_pb2.PeerStateRequest(transfer=action.transfer))
            case ev.RequestVersion():
                request = sync_pb2.BaseRequest(fragment=action.fragment, epoch=action.epoch, version=action.version)
                message = sync_pb2.SyncerMessage(base_request=request)
            case ev.OfferPeerState():
                message = sync_pb2.SyncerMessage(peer_state_ready=sync_pb2.PeerStateReady(transfer=action.transfer))
            case _:
                raise TypeError(f"not an action of the sessions: {action!r}")
        connection = self._connections.get(action.connection)
        if connection is not None:
            if isinstance(action, ev.Refuse) and not connection.welcomed:
                self.doors.record_refusal(connection.peer, action.reason, action.message)
            connection.send(message)
            connection.welcomed |= isinstance(action, ev.Admit)
            if isinstance(action, ev.Refuse | ev.RequestInitialModel):
                connection.end()

    def tell_phase(self, phase: JobPhase, message: str) -> None:
        """Tell every connection the phase."""
        told = sync_pb2.SyncerMessage(phase=phase_to(phase, message))
        for connection in self._connections.values():
            if connection.welcomed:
                connection.send(told)

    def _announce(self, action: ev.Announce, broadcast: Broadcast) -> None:
        nobody = ev.MergedPush()
        for number, connection in self._connections.items():
            if not connection.welcomed:
                continue
            merged = action.merged.get(number, nobody)
            core = self._engine.core
            told = announcement(broadcast, core.epoch, merged, action.job_tokens, settled=core.newest_settled_epoch)
            connection.send(sync_pb2.SyncerMessage(announcement=told))

    def _welcome(self, admit: ev.Admit, broadcasts: tuple[Broadcast, ...]) -> sync_pb2.Welcome:
        engine = self._engine
        spec = engine.job.spec
        settings = {
            "sync": spec.sync.model_dump(mode="json", by_alias=True),
            "learners": spec.slots,
            "stop": spec.training.stop.model_dump(mode="json", by_alias=True),
        }
        tokens = engine.core.trained_tokens
        merged = admit.merged or (ev.MergedPush(),) * len(broadcasts)
        welcome = sync_pb2.Welcome(
            epoch=engine.epoch,
            standby=admit.seat is None and not admit.observer,
            observer=admit.observer,
            settings=json.dumps(settings),
            phase=phase_to(admit.phase, engine.problem or admit.message),
            fragments=[
                announcement(broadcast, engine.epoch, push, tokens, settled=engine.core.newest_settled_epoch)
                for broadcast, push in zip(broadcasts, merged, strict=True)
                if broadcast.fragment not in admit.withheld
            ],
            initialise=admit.initialise,
            optimizer_bytes=engine.optimizer_bytes,
        )
        if admit.seat is not None:
            welcome.seat.CopyFrom(seat_to(admit.seat))
        return welcome

    def end_all(self) -> None:
        """End every session when what is queued is sent."""
        for connection in self._connections.values():
            connection.end()
