"""The background exchange: one thread with an asyncio loop between training and syncer.

Theory of operation
-------------------
The training thread talks to this thread by calls that return at once, and hears
from it through its ``Inbox``, which it empties at step boundaries. It never
waits for the network.

The loop connects, joins, and pumps the session (``session``) until it breaks; then
it waits with jittered exponential backoff, reads the syncer's address again, and
joins again, saying which versions it holds and which slot it had. While connected:

- a pull becomes ``PushRequested``; the training thread answers with a snapshot
  (``push``), which is encoded and uploaded;
- an announcement becomes ``Announced`` at once and, when its bytes were
  downloaded and decoded, ``Downloaded``. An observer is not ``eager``:
  it hears of everything and downloads what it asks for (``fetch_announced``);
- what the training thread wants to say (reports, lease requests, drain) is state
  in the ``Outbox``, so that what a broken session lost is said in the next one.

What goes up and down in bulk is deliveries.py's, in tasks beside the session.

A push that got no answer before the connection broke has an open fate
(``PushAnswered.accepted`` None); the work stays above the base, and the next broadcast
tells. Everything that came from the network is checked here, before the training
thread sees it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from diloco_protocol.arrays.layout import Layout
from diloco_protocol.security.credentials import Credentials, CredentialsError
from diloco_protocol.security.identity import NOBODY, IdentityError, Names, own_learner
from diloco_protocol.spec.job import immutable_digests
from diloco_protocol.wire import channels, limits, sync_pb2
from diloco_protocol.wire.verify_server import UNUSABLE, VouchError, vouched
from diloco_worker.core.connection_status import ConnectionStatus
from diloco_worker.core.leases import LeaseGrant
from diloco_worker.core.syncer_settings import SyncerSettings
from diloco_worker.fragments import Floats, Vector
from diloco_worker.net.deliveries import Deliveries
from diloco_worker.net.inbox import (
    Disconnected,
    Failed,
    Inbox,
    InitialRequested,
    LeaseGranted,
    PhaseChanged,
    PushRequested,
    Seated,
    StateDownloaded,
    StateRequested,
    Unseated,
    Welcomed,
)
from diloco_worker.net.link_probe import LinkProbe
from diloco_worker.net.session import LEASE, Outbox, Session, SessionEnded
from diloco_worker.net.transfers import ErrorFeedback, Identity, Push, Transfers, pause
from diloco_worker.settings import ConfigurationError, RefusedError, WorkerError, WorkerSettings

log = logging.getLogger(__name__)

_BULK_CHANNELS = 4  # connections are made when a payload is large enough to be split
_GOODBYE_SECONDS = 2.0
_SOON_SECONDS = 60.0  # after losing the syncer it is tried about once a second, then less often
_STEADY_SECONDS = 10.0  # a session that lived so long starts the backoff anew


class SyncerClient:
    """The background of one worker process (learner or evaluator)."""

    def __init__(
        self,
        settings: WorkerSettings,
        layout: Layout,
        inbox: Inbox,
        sequences: int,
        pinned: Callable[[Floats], Vector] = Vector.from_array,
        eager: bool = True,
        idle: bool = False,
    ) -> None:
        """``idle``: take no slot and no broadcasts; only ``connection`` is of use then."""
        self._settings = settings
        self._credentials: Credentials | None = None  # None: there were none yet that could be used
        self._names = NOBODY
        problem = self._read_credentials()
        if problem and not settings.pod:
            raise ConfigurationError(problem)
        self._attempt = 0
        self._idle = idle
        self.connection = ConnectionStatus()
        sync = settings.job.spec.sync
        self._syncer_settings = SyncerSettings.of(settings.job.spec)  # in use
        self._layout = layout
        self._inbox = inbox
        self._sequences = sequences
        self._heartbeat = sync.heartbeat.interval_seconds
        self._digests = immutable_digests(settings.job)
        self.feedback = ErrorFeedback(len(layout), sync.compression.error_feedback)
        self.report_wanted = True  # false: the newest report is younger than a report's interval
        self.connected = False
        self._tenure = 0  # the incarnation under which the newest one began, over or not
        self._loop = asyncio.new_event_loop()
        self._executor = ThreadPoolExecutor(2, thread_name_prefix="diloco-codec")
        self._thread = threading.Thread(target=self._run, name="diloco-exchange", daemon=True)
        # Bounded by what a step boundary may leave: a push per fragment, a report, some requests.
        self._calls: SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]] | None] = SimpleQueue()
        self._waker = threading.Thread(target=self._forward_calls, name="diloco-bell", daemon=True)
        self._outbox = Outbox()
        self._deliveries = Deliveries(
            layout,
            inbox,
            self._outbox,
            self.feedback,
            Identity(settings.job.metadata.name, settings.process, 0, 0),
            sync.compression.up,
            self._spawn_with,
            pinned,
            eager,
        )
        self._lease_numbers = itertools.count()
        self._closing = False
        self._parted = False  # Drained was read by the syncer
        self._task: asyncio.Task[None] | None = None
        self._session: Session | None = None
        self._work: set[asyncio.Task[None]] = set()
        self._versions: dict[int, int] = {}  # announced last, of this session or one before
        self._bytes = [0, 0]  # up, down, of earlier connections
        self._probe = LinkProbe()

    # ------------------------------------------------------- from the training thread

    def start(self) -> None:
        self._thread.start()
        self._waker.start()

    def report(self, report: sync_pb2.Report) -> None:
        """The newest report; older ones that were not sent are superseded."""
        self.report_wanted = False
        self._call(self._post_report, report)

    def say(self, key: str, message: sync_pb2.LearnerMessage, lasting: bool = False) -> None:
        """Say something once, or (``lasting``) in every session; see Outbox."""
        self._call(self._outbox.say, key, message, lasting)

    def request_leases(self, count: int) -> None:
        """Ask for ``count`` more blocks."""
        for _ in range(count):
            key = f"{LEASE}{next(self._lease_numbers)}"
            self.say(key, sync_pb2.LearnerMessage(lease_request=sync_pb2.LeaseRequest()))

    def push(self, push: Push) -> None:
        """Encode and send a push; its PushAnswered comes by inbox."""
        self._call(self._deliveries.push, push)

    def resolve_pushes(self, fragment: int, merged: int, forget: Sequence[int]) -> None:
        """The fate of pushes is known: error feedback follows."""
        if self.feedback.enabled:
            self._call(self.feedback.resolve_pushes, fragment, merged, forget)

    def begin_tenure(self) -> None:
        """Pushes of the tenure before are nobody's: what error feedback keeps for them goes."""
        if self.feedback.enabled:
            self._call(self.feedback.forget_open_pushes)

    def upload_initial(self, vectors: Sequence[Vector], frozen: bytes) -> None:
        """Upload version 0; broadcasts of it follow."""
        self._call(self._spawn_with, self._deliveries.upload_initial, vectors, frozen)

    def fetch_frozen(self, limit: int) -> None:
        """Download the frozen parameters: FrozenDownloaded comes by inbox."""
        self._call(self._spawn_with, self._deliveries.fetch_frozen, limit)

    def fetch_announced(self) -> None:
        """Without ``eager``: download the newest version of every fragment that is not here yet."""
        self._call(self._deliveries.fetch_announced)

    def fetch_optimizer(self, limit: int) -> None:
        """Download the optimizer state of the job's checkpoint: StateDownloaded comes by inbox."""
        self._call(self._spawn_with, self._deliveries.fetch_state, sync_pb2.DownloadRequest.OPTIMIZER, limit, 0)

    def want_peer_state(self, limit: int) -> None:
        """Ask for a healthy peer's inner optimizer state: StateDownloaded comes by inbox."""
        self._state_limit = limit
        self.say("peer", sync_pb2.LearnerMessage(peer_state_wanted=sync_pb2.PeerStateWanted()))

    def send_state(self, transfer: int, encode: Callable[[], bytes], versions: Sequence[tuple[int, int]]) -> None:
        """Upload this learner's inner optimizer state; ``encode`` runs beside the loop."""
        self._call(self._spawn_with, self._deliveries.send_state, transfer, encode, versions)

    def no_state(self, transfer: int) -> None:
        """This learner has no inner optimizer state to give."""
        message = sync_pb2.LearnerMessage(peer_state_unavailable=sync_pb2.PeerStateUnavailable(transfer=transfer))
        self.say(f"no-state-{transfer}", message)

    @property
    def transferred(self) -> tuple[int, int]:
        """Bulk bytes (up, down) of this process."""
        now = self._deliveries.transfers
        return self._bytes[0] + (now.bytes_up if now else 0), self._bytes[1] + (now.bytes_down if now else 0)

    @property
    def link(self) -> dict[str, float | None]:
        """What is measured of the link to the syncer: bytes per second and seconds, None where not."""
        return self._probe.figures()

    def flushed(self, timeout: float) -> bool:
        """Wait until everything that was to be said went out; False: it did not in time."""
        end = time.monotonic() + timeout
        while (left := end - time.monotonic()) > 0:
            answer: Future[bool] = Future()
            self._call(lambda into=answer: into.set_result(self.connected and self._outbox.empty))
            try:
                if answer.result(left):
                    return True
            except TimeoutError:
                return False  # the loop has ended
            time.sleep(0.02)
        return False

    def leave(self, timeout: float) -> bool:
        """Say Drained, hang up, and wait until the syncer has read it; said again if the session
        breaks first. False: it did not come through in time."""
        self.say("drained", sync_pb2.LearnerMessage(drained=sync_pb2.Drained()), lasting=True)
        end = time.monotonic() + timeout
        while not self._parted and time.monotonic() < end and self._thread.is_alive():
            self._call(self._half_close)
            time.sleep(0.02)
        return self._parted

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread. Says nothing more than what was flushed."""
        if self._thread.is_alive():
            self._call(self._close)
            self._thread.join(timeout)
            self._calls.put(None)
            self._waker.join(1.0)
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _call(self, function: Callable[..., object], *arguments: Any) -> None:
        self._calls.put((function, arguments))

    def _forward_calls(self) -> None:
        """Hand calls on to the loop, from a thread of its own. Waking the loop is a system call
        that gives up the interpreter lock, and whoever makes it gets the lock back only after
        the loop has done its work: measured, 0.9 ms of the training thread's time a push. A
        SimpleQueue wakes this thread without giving up the lock."""
        while (call := self._calls.get()) is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(call[0], *call[1])

    # ------------------------------------------------------- the loop

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._task = self._loop.create_task(self._serve())
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass  # closed
        except Exception as error:
            log.error("the exchange ended: %s", error)
            self._fail(error)
        finally:
            self._loop.run_until_complete(self._cancel_work())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _half_close(self) -> None:
        """Hang up once Drained was handed over: that the syncer then ends the session in good
        order says that it has read it."""
        session = self._session
        if session is not None and self._outbox.empty and not session.hung_up:
            self._spawn_with(session.hang_up)

    def _close(self) -> None:
        """Hang up, so that what was said last arrives; a syncer that does not answer is left."""
        self._closing = True
        if self._task is None:
            return
        if self._session is None:
            self._task.cancel()
        else:
            self._spawn_with(self._session.hang_up)
            self._loop.call_later(_GOODBYE_SECONDS, self._task.cancel)

    async def _serve(self) -> None:
        attempt, said = 0, ""
        lost = time.monotonic()  # since when there is no session
        while True:
            address = self._settings.address()
            started = time.monotonic()
            if address is None:
                reason = "its address file is not there"
            else:
                reason = await self._connect(address)
            if time.monotonic() - started > _STEADY_SECONDS:
                attempt, lost = 0, time.monotonic()
            self.connection = replace(self.connection, reason=reason)
            if self._closing or self._parted:
                return
            if reason != said or attempt % 20 == 19:
                log.warning("no session with the syncer: %s", reason)
            said = reason
            # A syncer that is replaced is back within seconds, and nobody should miss it for long.
            soon = address is None or time.monotonic() - lost < _SOON_SECONDS
            await asyncio.sleep(pause(attempt, first=0.1, longest=1.0 if soon else 5.0))
            attempt += 1

    async def _connect(self, address: str) -> str:
        """One connection, from its beginning to its end; why it ended. Raises RefusedError."""
        problem = self._read_credentials()
        if self._credentials is None:  # a pod's Secret may be put right while it waits
            self.connection = replace(self.connection, refused=(UNUSABLE, problem))
            return problem
        try:
            credentials = await vouched(self._credentials, address, self._names)
        except VouchError as error:
            if error.reason:  # not for good: a Secret may be put right, on either side
                self.connection = replace(self.connection, refused=(error.reason, str(error)))
            return str(error)
        metadata = credentials.metadata()
        control = credentials.aio_channel(address, channels.channel_options())
        bulk: list[Any] = []
        session = Session(control, metadata)
        reason = "the session ended"
        try:
            first = await session.open(self._join())
            if first.HasField("refusal"):
                self._refused(first.refusal)
                raise SessionEnded(f"refused ({first.refusal.reason}): {first.refusal.message}")
            if not first.HasField("welcome"):
                raise limits.WireError("the first message was neither Welcome nor Refusal")
            options = channels.channel_options(bulk=True)
            bulk += [credentials.aio_channel(address, options) for _ in range(_BULK_CHANNELS)]
            self._probe.begin()
            transfers = Transfers(bulk, metadata, self._executor, self._probe.up, self._probe.down)
            # Vouched for, its channels believe one certificate only.
            self._deliveries.begin(transfers, session.break_off, credentials is not self._credentials)
            self._outbox.begin_session()
            self._session = session
            self.connected = True
            self.connection = replace(
                self.connection, connected=True, joined=True, refused=None, sessions=self.connection.sessions + 1
            )
            self._handle(first)
            await session.run(self._outbox, self._heartbeat, self._handle, self._probe.stamp)
        except* SessionEnded as group:
            ending = _first(group)
            assert isinstance(ending, SessionEnded)
            reason = str(ending)
            if ending.unauthenticated:  # not for good: a syncer with another token may follow
                self.connection = replace(self.connection, refused=("unauthenticated", reason))
            self._parted = session.hung_up and ending.clean and self._outbox.empty
        except* limits.WireError as group:
            reason = f"the syncer broke the protocol: {_first(group)}"
        except* RefusedError as group:
            raise _first(group) from None
        finally:
            lost = self.connected
            self._session = None
            self.connected = False
            self._deliveries.close()
            self.connection = replace(self.connection, connected=False)
            session.cancel()
            await self._cancel_work()
            self._bytes = list(self.transferred)
            self._deliveries.end()
            for channel in [control, *bulk]:
                await channel.close(None)
            if lost:
                self._inbox.put(Disconnected())
        return reason

    def _read_credentials(self) -> str:
        """Anew for each connection: a cluster replaces certificates before they expire. What is wrong with
        them; then those read before, if there are any, are used on."""
        try:
            fresh = Credentials.from_directory(self._settings.credentials)
            self._names = _own_names(fresh, self._settings)
            self._credentials = fresh
        except CredentialsError as error:
            if self._credentials is not None:
                log.warning("the credentials read before are used on: %s", error)
            return str(error)
        return ""

    def _join(self) -> sync_pb2.Join:
        settings = self._settings
        self._attempt = max(self._attempt + 1, time.time_ns() // 1000)
        role = sync_pb2.ROLE_LEARNER if settings.role == "learner" else sync_pb2.ROLE_EVALUATOR
        return sync_pb2.Join(
            format=limits.FORMAT,
            job=settings.job.metadata.name,
            process=settings.process,
            role=role,
            region=settings.region,
            ordinal=settings.ordinal,
            layout_digest=self._layout.digest,
            digests=self._digests,
            sequences=self._sequences,
            held=self._deliveries.holdings.versions(),
            previous_incarnation=self._deliveries.identity.incarnation,
            tenure=self._tenure,
            idle=self._idle,
            pod=settings.pod,
            attempt=self._attempt,
        )

    def _refused(self, refusal: sync_pb2.Refusal) -> None:
        log.warning("refused by the syncer (%s): %s", refusal.reason, refusal.message)
        self.connection = replace(self.connection, refused=(refusal.reason, refusal.message))
        if refusal.fatal:
            raise RefusedError(refusal.reason, refusal.message)

    # ------------------------------------------------------- messages from the syncer

    def _handle(self, message: sync_pb2.SyncerMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "welcome":
            self._welcome(message.welcome)
        elif kind == "refusal":
            self._refused(message.refusal)
            raise SessionEnded(f"refused ({message.refusal.reason}): {message.refusal.message}")
        elif kind == "pull":
            pull = message.pull
            self._known(pull.fragment)
            self._inbox.put(PushRequested(pull.fragment, pull.round, pull.epoch, pull.version))
        elif kind == "announcement":
            self._announced(message.announcement)
        elif kind == "lease":
            self._inbox.put(LeaseGranted(_lease_grant(message.lease)))
        elif kind == "phase":
            self._phase(message.phase)
        elif kind == "peer_state_request":
            self._inbox.put(StateRequested(message.peer_state_request.transfer))
        elif kind == "peer_state_ready":
            transfer = message.peer_state_ready.transfer
            if transfer:
                what = sync_pb2.DownloadRequest.PEER_STATE
                self._spawn_with(self._deliveries.fetch_state, what, self._state_limit, transfer)
            else:
                self._inbox.put(StateDownloaded(True, None))
        elif kind == "base_request":
            self._known(message.base_request.fragment)
            self._spawn_with(self._deliveries.give_base, message.base_request)
        elif kind == "promotion":
            self._seated(message.promotion.seat)
        elif kind == "echo":
            self._probe.heard(message.echo.number, self._loop.time())

    def _welcome(self, welcome: sync_pb2.Welcome) -> None:
        standby = welcome.standby and not self._idle
        self.connection = replace(self.connection, epoch=welcome.epoch, standby=standby, slot=-1)
        if self._idle:
            self._phase(welcome.phase)
            return
        trained = any(announcement.version > 0 for announcement in welcome.fragments)
        self._apply_settings(welcome.settings)
        self._inbox.put(Welcomed(trained, welcome.optimizer_bytes, self._syncer_settings))
        if welcome.HasField("seat"):
            self._seated(welcome.seat)
        elif not welcome.observer:
            self._take_place(0, 0)
            self._outbox.report(None)
            self._inbox.put(Unseated())
        for announcement in welcome.fragments:
            self._announced(announcement)
        self._phase(welcome.phase)
        if welcome.initialise:
            self._inbox.put(InitialRequested())

    def _apply_settings(self, document: str) -> None:
        """Use the syncer's settings instead of the job file's."""
        settings = SyncerSettings.read(document)
        self.connection = replace(self.connection, settings=settings)
        if settings is None or settings == self._syncer_settings:
            return
        log.info("the syncer's settings differ from this process's, and are used from now on")
        self._syncer_settings = settings
        self._deliveries.encoding = settings.sync.compression.up
        self._heartbeat = settings.sync.heartbeat.interval_seconds
        self.feedback.enabled = settings.sync.compression.error_feedback

    def _seated(self, seat: sync_pb2.Seat) -> None:
        self._take_place(seat.slot, seat.incarnation)
        self.connection = replace(self.connection, standby=False, slot=seat.slot)
        if not seat.continuing:
            self._tenure = seat.incarnation
            self._outbox.report(None)
        leases = tuple(_lease_grant(lease) for lease in seat.leases)
        self._inbox.put(Seated(seat.slot, seat.incarnation, seat.continuing, seat.slot_step, seat.slot_tokens, leases))

    def _phase(self, phase: sync_pb2.Phase) -> None:
        if phase.name != sync_pb2.PHASE_UNSPECIFIED:
            name = sync_pb2.PhaseName.Name(phase.name).removeprefix("PHASE_").lower()
            self.connection = replace(self.connection, phase=name, message=phase.message)
            self._inbox.put(PhaseChanged(name, phase.message))

    def _take_place(self, slot: int, incarnation: int) -> None:
        old = self._deliveries.identity
        self._deliveries.identity = Identity(old.job, old.process, slot, incarnation)

    def _announced(self, news: sync_pb2.Announcement) -> None:
        if self._idle:
            return
        self._known(news.fragment)
        self._deliveries.announced(news)
        self._versions[news.fragment] = news.version
        if len(self._versions) == len(self._layout):
            self.connection = replace(self.connection, merges=sum(self._versions.values()))

    def _known(self, fragment: int) -> None:
        if fragment >= len(self._layout):
            raise limits.WireError(f"fragment {fragment} is named, and there are {len(self._layout)}")

    # ------------------------------------------------------- work beside the session

    def _spawn_with(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        task = self._loop.create_task(work(*arguments))
        self._work.add(task)
        task.add_done_callback(self._worked)

    def _worked(self, task: asyncio.Task[None]) -> None:
        self._work.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the exchange failed", exc_info=error)
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        failure = error if isinstance(error, WorkerError) else WorkerError(f"{type(error).__name__}: {error}")
        self._inbox.put(Failed(failure))

    async def _cancel_work(self) -> None:
        for task in list(self._work):
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)

    def _post_report(self, report: sync_pb2.Report) -> None:
        self._outbox.report(report)
        self._outbox.wake.set()
        self._loop.call_later(0.02, self._want_report)

    def _want_report(self) -> None:
        self.report_wanted = True


def _own_names(credentials: Credentials, settings: WorkerSettings) -> Names:
    """What the own certificate says of this learner. Raises ``CredentialsError`` if it is another's."""
    try:
        region = settings.region if settings.role == "learner" else None
        return own_learner(credentials.names(), settings.job.metadata.name, region)
    except IdentityError as error:
        raise CredentialsError(f"{credentials.directory}/tls.crt: {error}") from error


def _lease_grant(lease: sync_pb2.Lease) -> LeaseGrant:
    return LeaseGrant(lease.lease, lease.data_epoch, lease.block, lease.start, lease.end, lease.block_size)


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    """The first error of a group, groups within groups included."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
