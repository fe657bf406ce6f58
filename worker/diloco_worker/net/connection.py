"""The connection to the syncer: join, the session's messages, and joining again when it breaks.

Theory of operation
-------------------
``serve`` connects, joins, and runs the session (``session``) until it breaks. Then it waits with jittered
exponential backoff, reads the syncer's address again and joins again, naming the versions that this
process holds and the slot that it had.

While a session lasts, each kind of message has its way. A ``Pull`` goes to the inbox. An
announcement goes there at once, and becomes ``Downloaded`` when its bytes were downloaded and decoded
(``transfers``). Everything that came from the network is checked here, before the training thread sees it.

All of it runs in the client's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import InitVar, dataclass, replace
from functools import partial
from typing import Any

from diloco_protocol.arrays.layout import Layout, LayoutError, describe_difference, tensors_from_json
from diloco_protocol.common.reach import first_answering
from diloco_protocol.common.tasks import cancel_tasks
from diloco_protocol.spec.job import SyncerSettings, immutable_digests
from diloco_protocol.vocabulary import JoinRefusal, TrustFailure
from diloco_protocol.wire import channels, convert, limits, sync_pb2
from diloco_protocol.wire.bulk_calls import bulk_connection
from diloco_protocol.wire.records import Announcement, DataSample, Lease, Pull, Seat, StepReport
from diloco_protocol.wire.verify_server import ServerNotTrusted
from diloco_worker.core.connection_status import ConnectionStatus
from diloco_worker.core.syncer_settings import read_settings
from diloco_worker.fragments import Floats, Vector
from diloco_worker.net.authentication import WorkerCredentials
from diloco_worker.net.bulk_channels import BulkChannels, ByteCounts, KeptDownloads, pause
from diloco_worker.net.error_feedback import ErrorFeedback
from diloco_worker.net.fragment_cache import FragmentCache
from diloco_worker.net.inbox import (
    Disconnected,
    Failed,
    Inbox,
    InitialRequested,
    PhaseChanged,
    StateDownloaded,
    StateRequested,
    Unseated,
    Welcomed,
)
from diloco_worker.net.link_probe import LinkProbe
from diloco_worker.net.routes import Routes
from diloco_worker.net.session import Outbox, Session, SessionEnded
from diloco_worker.net.transfers import Push, TransferContext, Transfers
from diloco_worker.settings import RefusedError, WorkerError, WorkerSettings

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 2.0  # for the syncer to end the session, once it is half-closed
_SOON_SECONDS = 60.0  # after losing the syncer it is tried about once a second, then less often
_STEADY_SECONDS = 10.0  # a session that lasted so long starts the backoff anew
_STATE_REQUESTS = 4  # in which no state came whole; then no peer has one
_REPORT_SECONDS = 0.02  # a report that is younger than this is not replaced without need


@dataclass
class SyncerConnection:
    """The connection of one worker process. Any thread may read ``status``, ``report_wanted`` and
    ``drain_confirmed``; the methods belong to the loop's thread. The arguments are those of ``SyncerClient``;
    ``executor`` runs codec and checksums."""

    settings: WorkerSettings
    layout: Layout
    inbox: Inbox
    executor: Executor
    to_vector: InitVar[Callable[[Floats], Vector]]
    eager: InitVar[bool]
    idle: bool
    status: ConnectionStatus

    def __post_init__(self, to_vector: Callable[[Floats], Vector], eager: bool) -> None:
        sync = self.settings.job.spec.sync
        self.report_wanted = True  # false: the newest report is younger than a report's interval
        self.drain_confirmed = False  # the syncer has read Drained
        self.feedback = ErrorFeedback(len(self.layout), sync.compression.error_feedback)
        self.outbox = Outbox()
        self.counts = ByteCounts()
        self.probe = LinkProbe()
        self.complete_report: Callable[[StepReport], StepReport] = lambda report: report
        self._credentials = WorkerCredentials(self.settings)
        self._syncer_settings = SyncerSettings.of(self.settings.job.spec)  # in use
        self._heartbeat = sync.heartbeat.interval_seconds
        self._sequences = 0
        self._samples: list[sync_pb2.DataSample] = []
        self._digests = immutable_digests(self.settings.job)
        self._cache = FragmentCache(len(self.layout))
        self._kept = KeptDownloads()
        self._state_limit = 0  # bytes of a peer's optimizer state
        self._state_wanted = sync_pb2.LearnerMessage()
        self._state_requests = 0  # since one came, or none was to be had
        self._state_offered: tuple[int, int] | None = None  # epoch and transfer of one whose download has begun
        self._state_comes = False
        self._context = TransferContext(
            self.layout,
            self.inbox,
            self.outbox,
            self._cache,
            feedback=self.feedback,
            to_vector=to_vector,
            eager=eager,
            pushes_again=sync.deterministic,
        )
        # What the syncer has said of this process; it outlives sessions.
        self._incarnation = 0
        self._tenure = 0  # the incarnation under which the newest tenure began, over or not
        self._tenure_slot = 0  # and the slot in which it ran
        self._versions: dict[int, int] = {}  # announced last, of this session or one before
        self._attempt = 0
        self._session: Session | None = None
        self._transfers: Transfers | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # beside the session
        self._closing = False

    def half_close(self) -> None:
        """Half-close the session once Drained was handed over. If the syncer then ends it in good order, it has
        read Drained."""
        session = self._session
        if session is not None and self.outbox.is_empty and not session.half_closed:
            self._spawn(session.half_close)

    def close(self, serving: asyncio.Task[None]) -> None:
        """End ``serving``, the task of ``serve``: half-close the session, so that what was sent last arrives, and
        do not wait long for the syncer's answer."""
        self._closing = True
        if self._session is None:
            serving.cancel()
        else:
            self._spawn(self._session.half_close)
            asyncio.get_running_loop().call_later(_CLOSE_SECONDS, serving.cancel)

    async def serve(self, sequences: int, samples: Sequence[DataSample] = ()) -> None:
        """Connect, again and again, until ``close`` or until the drain is confirmed. Raises RefusedError.

        ``sequences``: how many the data set has; 0: nothing is leased. ``samples``: of its content."""
        self._sequences = sequences
        self._samples = [convert.to_wire(sample) for sample in samples]
        attempt = 0
        logged = ""
        lost = time.monotonic()  # since when there is no session
        while True:
            address = self.settings.address()
            started = time.monotonic()
            if address is None:
                reason = "its address file is not there"
            else:
                reason = await self._connect(address)
            if time.monotonic() - started > _STEADY_SECONDS:
                attempt = 0
                lost = time.monotonic()
            self.status = replace(self.status, reason=reason)
            if self._closing or self.drain_confirmed:
                return
            if reason != logged or attempt % 20 == 19:
                log.warning("no session with the syncer: %s", reason)
            logged = reason
            # A syncer that is replaced is back within seconds, and should not be missed for long.
            soon = address is None or time.monotonic() - lost < _SOON_SECONDS
            await asyncio.sleep(pause(attempt, first=0.1, longest=1.0 if soon else 5.0))
            attempt += 1

    async def _connect(self, address: str) -> str:
        """One connection, from its beginning to its end; returns why it ended. Raises RefusedError."""
        try:
            credentials, pinned = await self._credentials.for_syncer(address)
        except ServerNotTrusted as error:
            if error.reason:  # not for good: a Secret may be put right, on either side
                self.status = replace(self.status, refused=(error.reason, str(error)))
            return str(error)
        address = await first_answering(address, limits.CONNECT_SECONDS)
        control = credentials.aio_channel(address, channels.channel_options())
        routes = Routes(partial(bulk_connection, credentials), address)
        session = Session(control, credentials.metadata())
        reason = "the session ended"
        try:
            first = await session.open(self._join())
            if first.HasField("refusal"):
                self._on_refusal(first.refusal)
            if not first.HasField("welcome"):
                raise limits.WireError("the first message was neither Welcome nor Refusal")
            self._begin_session(session, routes, pinned)
            self._handle(first)
            await session.run(self.outbox, self._heartbeat, self._handle, self._stamp)
        except* SessionEnded as group:
            ending = _first(group)
            assert isinstance(ending, SessionEnded)
            reason = str(ending)
            if ending.unauthenticated:  # not for good: a syncer with another token may follow
                self.status = replace(self.status, refused=(TrustFailure.UNAUTHENTICATED, reason))
            self.drain_confirmed = session.half_closed and ending.clean and self.outbox.is_empty
        except* limits.WireError as group:
            reason = f"the syncer broke the protocol: {_first(group)}"
        except* RefusedError as group:
            raise _first(group) from None
        finally:
            session.cancel()
            await self._end_session()
            await control.close(None)
            routes.close()
        return reason

    def _begin_session(self, session: Session, routes: Routes, pinned: bool) -> None:
        settings = self.settings
        self.probe.reset()
        bulk_channels = BulkChannels(
            routes,
            settings.job.metadata.name,
            settings.process,
            executor=self.executor,
            counts=self.counts,
            up=self.probe.up,
            down=self.probe.down,
            arriving=self.probe.arriving,
            kept=self._kept,
        )
        encoding = self._syncer_settings.sync.compression.up
        self._transfers = Transfers(
            self._context, bulk_channels, encoding, self._spawn, end_session=session.end, pinned_server=pinned
        )
        self.outbox.begin_session()
        self._session = session
        sessions = self.status.sessions + 1
        self.status = replace(self.status, connected=True, joined=True, refused=None, sessions=sessions)

    async def _end_session(self) -> None:
        transfers = self._transfers
        self._session = None
        self._transfers = None
        self.status = replace(self.status, connected=False)
        await self.cancel_tasks()
        if transfers is not None:
            transfers.close()
            self.inbox.put(Disconnected())

    def _join(self) -> sync_pb2.Join:
        settings = self.settings
        self._attempt = max(self._attempt + 1, time.time_ns() // 1000)
        role = sync_pb2.ROLE_LEARNER if settings.role == "learner" else sync_pb2.ROLE_EVALUATOR
        return sync_pb2.Join(
            format=limits.FORMAT,
            job=settings.job.metadata.name,
            process=settings.process,
            role=role,
            region=settings.region,
            ordinal=settings.ordinal,
            layout_digest=self.layout.digest,
            digests=self._digests,
            sequences=self._sequences,
            data_samples=self._samples,
            held=self._cache.held_versions(),
            previous_incarnation=self._incarnation,
            tenure=self._tenure,
            slot=self._tenure_slot,
            idle=self.idle,
            pod=settings.pod,
            attempt=self._attempt,
        )

    def _stamp(self, report: StepReport, now: float, every: float) -> StepReport:
        """Complete a report that is about to be sent. A heartbeat counts batches too: a loop that never ends a step
        makes no report."""
        missing = 0 if self._transfers is None else self._transfers.missing_fragments
        return self.complete_report(self.probe.stamp(report, now, every, missing))

    # ------------------------------------------------------- messages from the syncer

    def _handle(self, message: sync_pb2.SyncerMessage) -> None:
        """Raises SessionEnded for a refusal, RefusedError for one that is for good, WireError for nonsense."""
        assert self._transfers is not None
        kind = message.WhichOneof("kind")
        if kind == "welcome":
            self._on_welcome(message.welcome)
        elif kind == "refusal":
            self._on_refusal(message.refusal)
        elif kind == "pull":
            pull = convert.from_wire(Pull, message.pull)
            self._check_fragment(pull.fragment)
            self.inbox.put(pull)
        elif kind == "announcement":
            self._on_announcement(convert.from_wire(Announcement, message.announcement))
        elif kind == "lease":
            self.inbox.put(convert.from_wire(Lease, message.lease))
        elif kind == "phase":
            self._on_phase(message.phase)
        elif kind == "peer_state_request":
            transfer, epoch = message.peer_state_request.transfer, self.status.epoch
            if (epoch, transfer) in self._context.states:
                self._spawn(self._transfers.resume_state, transfer, epoch)
            else:
                self.inbox.put(StateRequested(transfer))
        elif kind == "peer_state_ready":
            if transfer := message.peer_state_ready.transfer:
                self._state_offered = self.status.epoch, transfer
                self._spawn(self._fetch_peer_state)
            else:
                self._answer_peer_state(StateDownloaded(True, None))
        elif kind == "base_request":
            self._check_fragment(message.base_request.fragment)
            self._spawn(self._transfers.return_version, message.base_request)
        elif kind == "promotion":
            self._on_seat(convert.from_wire(Seat, message.promotion.seat))
        elif kind == "shards":
            self._set_shards(message.shards.shards)
        elif kind == "echo":
            self.probe.record_echo(message.echo.number, asyncio.get_running_loop().time())

    def _set_shards(self, messages: Sequence[sync_pb2.Shard]) -> None:
        shards = convert.read_shards(messages)
        for shard in shards:
            for fragment in shard.fragments:
                self._check_fragment(fragment)
        if self._transfers is not None:
            self._transfers.set_shards(shards)

    def _on_refusal(self, refusal: sync_pb2.Refusal) -> None:
        message = self._describe_refusal(refusal)
        self.status = replace(self.status, refused=(refusal.reason, message))
        if refusal.fatal:  # which is logged where it ends the process's work
            raise RefusedError(refusal.reason, message)
        log.warning("refused by the syncer (%s): %s", refusal.reason, message)
        raise SessionEnded(f"refused ({refusal.reason}): {message}")

    def _describe_refusal(self, refusal: sync_pb2.Refusal) -> str:
        """Its message; of another model the first tensor that differs, which only this side can name."""
        if refusal.reason != JoinRefusal.OTHER_LAYOUT or not refusal.tensors:
            return refusal.message
        try:
            job = tensors_from_json(refusal.tensors)
        except LayoutError as error:
            log.debug("the job's tensors cannot be read: %s", error)
            return refusal.message
        differs = describe_difference(self.layout.tensors, job) or "the same tensors are cut into other fragments"
        return f"this learner's model is not the job's: {differs}. Give every learner the same model and sync.fragments"

    def _on_welcome(self, welcome: sync_pb2.Welcome) -> None:
        standby = welcome.standby and not self.idle
        self.status = replace(self.status, epoch=welcome.epoch, standby=standby, slot=-1)
        if self.idle:
            self._on_phase(welcome.phase)
            return
        self._set_shards(welcome.shards)
        announcements = [convert.from_wire(Announcement, announcement) for announcement in welcome.fragments]
        trained = any(announcement.version > 0 for announcement in announcements)
        self._apply_settings(welcome.settings)
        self.inbox.put(Welcomed(trained, welcome.optimizer_bytes, self._syncer_settings))
        if welcome.HasField("seat"):
            self._on_seat(convert.from_wire(Seat, welcome.seat))
        elif not welcome.observer:
            self._set_identity(0, 0)
            self.outbox.put_report(None)
            self.inbox.put(Unseated())
        for announcement in announcements:
            self._on_announcement(announcement)
        self._on_phase(welcome.phase)
        if welcome.initialise:
            self.inbox.put(InitialRequested())

    def _apply_settings(self, document: str) -> None:
        """Use the syncer's settings instead of the job file's."""
        settings = read_settings(document)
        self.status = replace(self.status, settings=settings)
        if settings is None or settings == self._syncer_settings:
            return
        log.info("the syncer's settings differ from this process's, and are used from now on")
        self._syncer_settings = settings
        self._heartbeat = settings.sync.heartbeat.interval_seconds
        self.feedback.enabled = settings.sync.compression.error_feedback
        if self._transfers is not None:
            self._transfers.encoding = settings.sync.compression.up

    def _on_seat(self, seat: Seat) -> None:
        self._set_identity(seat.slot, seat.incarnation)
        self.status = replace(self.status, standby=False, slot=seat.slot)
        if not seat.continuing:
            self._tenure = seat.tenure
            self._tenure_slot = seat.slot
            self.outbox.put_report(None)
        self.inbox.put(seat)

    def _set_identity(self, slot: int, incarnation: int) -> None:
        self._incarnation = incarnation
        if self._transfers is not None:
            self._transfers.channels.slot, self._transfers.channels.incarnation = slot, incarnation

    def _on_phase(self, phase: sync_pb2.Phase) -> None:
        if phase.name != sync_pb2.PHASE_UNSPECIFIED:
            name = sync_pb2.PhaseName.Name(phase.name).removeprefix("PHASE_").lower()
            self.status = replace(self.status, phase=name, message=phase.message)
            self.inbox.put(PhaseChanged(name, phase.message))

    def _on_announcement(self, announcement: Announcement) -> None:
        if self.idle or self._transfers is None:
            return
        self._check_fragment(announcement.fragment)
        self._transfers.on_announcement(announcement)
        self._versions[announcement.fragment] = announcement.version
        if len(self._versions) == len(self.layout):
            self.status = replace(self.status, merges=sum(self._versions.values()))

    def _check_fragment(self, fragment: int) -> None:
        if fragment >= len(self.layout):
            raise limits.WireError(f"fragment {fragment} is named, and there are {len(self.layout)}")

    # ------------------------------------------------------- a peer's optimizer state

    def request_peer_state(self, limit: int, patient: bool) -> None:
        """Ask for a state of at most ``limit`` bytes. Of one whose download broke with its session, the rest."""
        wanted = sync_pb2.PeerStateWanted(patient=patient)
        self._state_limit, self._state_wanted = limit, sync_pb2.LearnerMessage(peer_state_wanted=wanted)
        if self._state_offered is None:
            self._ask_for_state()
        else:
            self._spawn(self._fetch_peer_state)

    def _ask_for_state(self) -> None:
        self._state_requests += 1
        if self._state_requests > _STATE_REQUESTS:
            self._answer_peer_state(StateDownloaded(True, None))
        else:
            self.outbox.put("peer", self._state_wanted)

    async def _fetch_peer_state(self) -> None:
        if self._state_comes or self._transfers is None or self._state_offered is None:
            return
        epoch, transfer = self._state_offered
        self._state_comes = True
        try:
            what = sync_pb2.DownloadRequest.PEER_STATE
            found = await self._transfers.download_state(what, self._state_limit, transfer, epoch)
        finally:
            self._state_comes = False
        if found.data is None:  # the syncer has it no more, or it does not come
            self._state_offered = None
            self._ask_for_state()
        else:
            self._answer_peer_state(found)

    def _answer_peer_state(self, answer: StateDownloaded) -> None:
        self._state_requests, self._state_offered = 0, None
        self._kept.forget(sync_pb2.DownloadRequest(what=sync_pb2.DownloadRequest.PEER_STATE))  # it may be large
        self.inbox.put(answer)

    # ------------------------------------------------------- work beside the session

    def put_report(self, report: StepReport) -> None:
        """Send the newest report, and want another a little later. One that the training thread made before it read
        that a new tenure began is not sent."""
        if report.tenure == self._tenure:
            self.outbox.put_report(report)
        asyncio.get_running_loop().call_later(_REPORT_SECONDS, self._want_report)

    def _want_report(self) -> None:
        self.report_wanted = True

    def push(self, push: Push) -> None:
        """Encode and upload a push; without a session its fate is open. One of a tenure that is over is not sent: it
        would count as work of the new one."""
        if self._transfers is None:
            self.inbox.put(push.answered(None, "", "there is no connection"))
        elif push.report.tenure != self._tenure:
            self.inbox.put(push.answered(None, "", "its tenure is over"))
        else:
            self._transfers.push(push)

    def start_transfer(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        """Run a method of ``Transfers`` as a task. Without a session nothing happens: who needs it asks again when
        the next one has begun (``Welcomed``)."""
        if self._transfers is not None:
            self._spawn(work, self._transfers, *arguments)

    def _spawn(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        task = asyncio.get_running_loop().create_task(work(*arguments))
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, WorkerError):  # which says all in its message
                log.error("work for the syncer failed", exc_info=error)
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Have the training thread raise ``error``."""
        failure = error if isinstance(error, WorkerError) else WorkerError(f"{type(error).__name__}: {error}")
        self.inbox.put(Failed(failure))

    async def cancel_tasks(self) -> None:
        """End what runs beside the session."""
        await cancel_tasks(self._tasks)


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    """The first error of a group, groups within groups included."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
