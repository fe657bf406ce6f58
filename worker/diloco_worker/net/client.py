"""The syncer's client: a thread with an event loop between the training thread and the syncer.

Theory of operation
-------------------
The training thread calls ``SyncerClient``'s methods, which return at once, and reads what came from the
syncer from the ``Inbox`` at its step boundaries. It never waits for the network.

What the training thread wants to tell (reports, lease requests, drain) is state in the ``Outbox``, so that
what a broken session lost is sent in the next one. What it asks for comes as a message in the inbox; where
a session breaks before the answer, ``Welcomed`` says that another has begun, and it asks again.

Example of a push: the syncer sends Pull(fragment 3). The training thread finds it at its next
boundary and calls ``push`` with a snapshot, which is encoded and uploaded in tasks beside the session. The
syncer's answer becomes ``PushAnswered``. After the merge an announcement of fragment 3 names that push.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from diloco_protocol.arrays.kernels import Bytes
from diloco_protocol.arrays.layout import Layout
from diloco_protocol.wire import sync_pb2
from diloco_protocol.wire.records import DataSample, StepReport
from diloco_worker.core.connection_status import ConnectionStatus
from diloco_worker.fragments import Floats, Vector
from diloco_worker.net.connection import SyncerConnection
from diloco_worker.net.inbox import Inbox
from diloco_worker.net.session import LEASE_KEY
from diloco_worker.net.transfers import Push, Transfers, decline_state
from diloco_worker.settings import WorkerSettings

log = logging.getLogger(__name__)


class SyncerClient:
    """One worker process's side of the syncer (learner or evaluator). Its methods belong to the training thread;
    its properties may be read by any."""

    def __init__(
        self,
        settings: WorkerSettings,
        layout: Layout,
        inbox: Inbox,
        to_vector: Callable[[Floats], Vector] = Vector.from_array,
        begin_thread: Callable[[], None] = lambda: None,
        eager: bool = True,
        idle: bool = False,
        status: ConnectionStatus | None = None,
    ) -> None:
        """``to_vector`` makes a vector of decoded values, float32[elements]. ``begin_thread`` is called in each thread
        that handles vectors, when it begins. ``eager``: download every announced
        version; otherwise the first of each fragment, and later ones when ``fetch_announced`` asks for them. ``idle``:
        take no slot and no broadcasts; only ``connection`` is of use. ``status``: what ``connection`` says at first.

        Raises ConfigurationError for credentials that cannot be used, outside of pods.
        """
        self._begin_thread = begin_thread
        self._executor = ThreadPoolExecutor(2, thread_name_prefix="diloco-codec", initializer=begin_thread)
        self._connection = SyncerConnection(
            settings,
            layout,
            inbox,
            self._executor,
            to_vector=to_vector,
            eager=eager,
            idle=idle,
            status=status or ConnectionStatus(),
        )
        self._lease_numbers = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._serving: asyncio.Task[None] | None = None
        self._sequences = 0
        self._samples: Sequence[DataSample] = ()
        self._thread = threading.Thread(target=self._run, name="diloco-client", daemon=True)
        # Bounded by what a step boundary may leave: a push per fragment, a report, some requests.
        self._calls: SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]] | None] = SimpleQueue()
        self._waker = threading.Thread(target=self._forward_calls, name="diloco-waker", daemon=True)

    @property
    def connection(self) -> ConnectionStatus:
        """The state of the connection, as the syncer last told."""
        return self._connection.status

    @property
    def connected(self) -> bool:
        """Whether there is a session."""
        return self._connection.status.connected

    @property
    def bytes_arrived(self) -> int:
        """Bulk bytes that have come in the present session, of transfers that are under way too."""
        return self._connection.probe.arriving.moved

    @property
    def report_wanted(self) -> bool:
        """Whether the newest report is old enough to be replaced."""
        return self._connection.report_wanted

    @property
    def chunks_up(self) -> int:
        """How many chunks of uploads were sent so far, of finished ones or not."""
        return self._connection.counts.chunks_up

    # ------------------------------------------------------- called by the training thread

    def complete_reports(self, complete: Callable[[StepReport], StepReport]) -> None:
        """Have reports say what ``complete`` adds to them; it is called by another thread."""
        self._connection.complete_report = complete

    def start(self, sequences: int = 0, samples: Sequence[DataSample] = ()) -> None:
        """Start connecting. ``sequences``: how many the data set has; 0: nothing is leased. ``samples``: of its
        content; empty: it is not compared with other learners'."""
        self._sequences, self._samples = sequences, samples
        self._thread.start()
        self._waker.start()

    def send_report(self, report: StepReport) -> None:
        """Send the newest report; older ones that were not sent are superseded."""
        self._connection.report_wanted = False
        self._call(self._connection.put_report, report)

    def send(self, key: str, message: sync_pb2.LearnerMessage, lasting: bool = False) -> None:
        """Send a message once, or (``lasting``) in every session; see ``Outbox``."""
        self._call(self._connection.outbox.put, key, message, lasting)

    def request_leases(self, count: int) -> None:
        """Ask for ``count`` more blocks; a ``Lease`` follows for each."""
        for _ in range(count):
            key = f"{LEASE_KEY}{next(self._lease_numbers)}"
            self.send(key, sync_pb2.LearnerMessage(lease_request=sync_pb2.LeaseRequest()))

    def push(self, push: Push) -> None:
        """Encode and upload a push; ``PushAnswered`` follows."""
        self._call(self._connection.push, push)

    def resolve_pushes(self, fragment: int, merged: int, forget: Sequence[int]) -> None:
        """Tell error feedback the fate of pushes: ``merged`` (0: none) was merged, ``forget`` were not."""
        self._call(self._connection.feedback.resolve_pushes, fragment, merged, forget)

    def begin_tenure(self) -> None:
        """Forget what error feedback keeps for pushes of the tenure before: they will not be merged."""
        self._call(self._connection.feedback.forget_open_pushes)

    def upload_initial(self, vectors: Sequence[Vector], frozen: Bytes | bytes, digest: str = "") -> None:
        """Upload version 0, float32[elements] per fragment, and the frozen parameters with their digest; broadcasts of
        it follow."""
        self._call(self._connection.start_transfer, Transfers.upload_initial, vectors, frozen, digest)

    def fetch_frozen(self, limit: int, own_digest: Callable[[], str]) -> None:
        """Download the frozen parameters, at most ``limit`` bytes, if their digest is not ``own_digest()``;
        ``FrozenDownloaded`` follows."""
        self._call(self._connection.start_transfer, Transfers.fetch_frozen, limit, own_digest)

    def fetch_announced(self) -> None:
        """Without ``eager``: download the newest version of every fragment that is not here yet."""
        self._call(self._connection.start_transfer, Transfers.fetch_announced)

    def fetch_optimizer(self, limit: int) -> None:
        """Download the job checkpoint's inner optimizer state, at most ``limit`` bytes; ``StateDownloaded`` follows."""
        epoch = self.connection.epoch
        self._call(self._connection.start_transfer, Transfers.fetch_optimizer, limit, epoch)

    def request_peer_state(self, limit: int, patient: bool = False) -> None:
        """Ask for a healthy peer's inner optimizer state, at most ``limit`` bytes; ``StateDownloaded`` follows.
        ``patient``: also for that of one that is about to train."""
        self._call(self._connection.request_peer_state, limit, patient)

    def send_state(self, transfer: int, encode: Callable[[], Bytes], versions: Sequence[tuple[int, int]]) -> None:
        """Upload this learner's inner optimizer state; ``encode`` runs in another thread."""
        epoch = self.connection.epoch
        self._call(self._connection.start_transfer, Transfers.send_state, transfer, encode, versions, epoch)

    def decline_state(self, transfer: int) -> None:
        """Answer that this learner has no inner optimizer state to give."""
        self.send(f"no-state-{transfer}", decline_state(transfer))

    @property
    def bytes_transferred(self) -> tuple[int, int]:
        """Bulk bytes (up, down) of this process; for any thread."""
        counts = self._connection.counts
        return counts.up, counts.down

    @property
    def link(self) -> dict[str, float | None]:
        """What is measured of the link to the syncer: bytes per second and seconds, None where not; for any thread."""
        return self._connection.probe.measurements()

    def wait_sent(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds until everything in the outbox went out; whether it did."""
        end = time.monotonic() + timeout
        while (left := end - time.monotonic()) > 0:
            answer: Future[bool] = Future()
            self._call(lambda into=answer: into.set_result(self.connected and self._connection.outbox.is_empty))
            try:
                if answer.result(left):
                    return True
            except TimeoutError:
                return False  # the loop has ended
            time.sleep(0.02)
        return False

    def leave(self, timeout: float) -> bool:
        """Send Drained, half-close the session, and wait until the syncer has read it; again in the next session
        if this one breaks first. False: it did not come through within ``timeout`` seconds."""
        self.send("drained", sync_pb2.LearnerMessage(drained=sync_pb2.Drained()), lasting=True)
        end = time.monotonic() + timeout
        while not self._connection.drain_confirmed and time.monotonic() < end and self._thread.is_alive():
            self._call(self._connection.half_close)
            time.sleep(0.02)
        return self._connection.drain_confirmed

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread. Nothing more is sent than what went out already."""
        if self._thread.is_alive():
            self._call(self._close)
            self._thread.join(timeout)
            self._calls.put(None)
            self._waker.join(1.0)
        elif self._thread.ident is None:  # it was never started
            self._loop.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _call(self, function: Callable[..., object], *arguments: Any) -> None:
        self._calls.put((function, arguments))

    def _forward_calls(self) -> None:
        """Pass calls on to the loop, in a thread of its own (``_waker``).

        Waking the loop is a system call that releases the interpreter lock, and the loop's thread may take it
        for as long as its callback runs. A SimpleQueue wakes this thread without releasing the lock. Measured
        on two cores, four calls of one step boundary with 0.8 ms of callbacks each: the training thread loses
        0.4 ms a boundary on average, and 1 ms in one of ten, when it wakes the loop itself."""
        while (call := self._calls.get()) is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(call[0], *call[1])

    # ------------------------------------------------------- the client's thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._begin_thread()
            self._serving = self._loop.create_task(self._connection.serve(self._sequences, self._samples))
            self._loop.run_until_complete(self._serving)
        except asyncio.CancelledError:
            pass  # closed
        except Exception as error:
            log.error("the connection to the syncer ended: %s", error)
            self._connection.fail(error)
        finally:
            self._loop.run_until_complete(self._connection.cancel_tasks())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _close(self) -> None:
        if self._serving is not None:
            self._connection.close(self._serving)
