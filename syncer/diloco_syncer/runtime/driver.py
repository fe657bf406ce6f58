"""The engine: drives the core, and carries out what it decides.

Theory of operation. One event loop owns the core. Whatever happens becomes an event
and is handled at once (``handle``); the actions that come back go into one queue
and are carried out strictly in order by one task, for an action may rely on those
before it (a ``Welcome`` must not be sent before the ``Persist`` that makes the seat
durable). Three things run beside that queue, each in a thread of its own and
each one at a time: merges, in the order of their actions; writes of
state documents; and decoding. The core hears of a merge only when its record is
durable.

The store may be full or away for a while. Then the write is tried again with
growing pauses; the core goes on hearing members, pushes are taken, status says
what is wrong, and merges (or the action that needs the state) wait. Nothing is
lost by it. A medium that fails otherwise for ``PATIENCE`` seconds ends the process
(exit code 4), a higher epoch ends it at once (3).

Time. Heartbeats are judged by ``SteadyClock``: it does not count a gap in which
this process itself stood still (stopped, starved, swapped), or every learner would
be found silent when it goes on.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from diloco_protocol.arrays.layout import Layout
from diloco_protocol.common.files import DiskFull
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.vocabulary import ENDED_PHASES, EventKind, JobPhase, SyncerExit
from diloco_syncer.core import events as ev
from diloco_syncer.core.core import Core
from diloco_syncer.messages import receipt_to
from diloco_syncer.runtime.global_model import Broadcast, Diverged, Parameters
from diloco_syncer.runtime.initial_model import InitialUpload
from diloco_syncer.runtime.optimizer_relay import Relay
from diloco_syncer.runtime.pushes import Payloads
from diloco_syncer.runtime.traffic import Traffic
from diloco_syncer.runtime.version_recovery import Bases
from diloco_syncer.server.pages.status import present_report
from diloco_syncer.server.sessions import Sessions
from diloco_syncer.store.base import HigherEpoch, NotThere
from diloco_syncer.store.checkpoint import Checkpoints, Restored, TakeOver
from diloco_syncer.store.records import Array
from diloco_syncer.store.restore import StoreUnusable
from diloco_syncer.store.tape import Tape, TapeError

log = logging.getLogger(__name__)
T = TypeVar("T")

PATIENCE = 60.0  # seconds of errors other than a full disk, before the process gives up
MAX_ACTIONS = 200_000  # waiting for a store that cannot be written
EVENTS_KEPT = 500
LINGER_SECONDS = 10.0  # the longest stay after the end
REPORT_SECONDS = 3.0  # how long somebody may take to fetch the report after the end
MAX_REPORT = 64 << 20
_WARNINGS = frozenset({EventKind.LOST, EventKind.GONE, EventKind.HOLD, EventKind.STARVED, EventKind.DROPPED})
FORGET_SECONDS = 5.0  # between looks for overtaken broadcasts that nobody downloads any more
RESTART = -1  # outcome: begin again from the store
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class SteadyClock:
    """Monotonic seconds that skip gaps longer than ``limit`` in which nobody asked."""

    def __init__(self, limit: float = 3.0, raw: Callable[[], float] = time.monotonic) -> None:
        self._raw = raw
        self._limit = limit
        self._last = raw()
        self._skipped = 0.0

    def __call__(self) -> float:
        now = self._raw()
        if now - self._last > self._limit:
            self._skipped += now - self._last - self._limit
        self._last = now
        return now - self._skipped


class Engine:
    """One job's running syncer, without its servers."""

    def __init__(
        self,
        job: DiLoCoJob,
        core: Core,
        restored: Restored,
        checkpoints: Checkpoints,
        tape: Tape,
        threads: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.job = job
        self.core = core
        self.checkpoints = checkpoints
        self.tape = tape
        self.restored = restored
        self._loop = loop
        self.epoch = checkpoints.epoch.number
        self.threads = threads
        self.layout = restored.layout
        self.parameters: Parameters | None = None
        self.frozen = restored.frozen
        self.optimizer = restored.optimizer  # names in the store
        self.optimizer_bytes = 0
        self._blobs: dict[str, Array] = {}
        self.clock = SteadyClock()
        self.sessions = Sessions(self)
        self.payloads = Payloads(self)
        self.relay = Relay()
        self.initial = InitialUpload(self)
        self.bases = Bases(self)
        self.above = 0  # after RESTART: claim a higher epoch than this
        self.problem = ""  # what is wrong with the store, for people
        self.events: deque[dict[str, Any]] = deque(maxlen=EVENTS_KEPT)
        self.refused: Counter[str] = Counter()
        self.bytes_up = self.bytes_down = 0
        self.traffic = Traffic(region.name for region in job.spec.regions)
        self.seconds = {"merge": 0.0, "quorum": 0.0, "waited": 0.0}  # summed over merges
        self.outcome: asyncio.Future[int] = loop.create_future()
        self.why = ""  # of the outcome, for people
        self.stay = False  # serve on after the job's end, until told to stop
        self.report_fetched = False
        self.final_report: dict[str, Any] | None = None  # once the job has ended
        self._numbers = 0  # of events
        self._merge_number = restored.number
        self._actions: deque[tuple[int, tuple[Broadcast, ...], ev.Action]] = deque()
        self._generation = 0  # events handled
        self._persisted = -1  # the newest generation whose state is durable
        self._work = asyncio.Event()
        self._rearm = asyncio.Event()
        self._merges: asyncio.Queue[ev.Merge] = asyncio.Queue(4096)
        self._merges_since_state = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._merge_thread = ThreadPoolExecutor(1, "merge")
        self._store_thread = ThreadPoolExecutor(1, "store")
        self.decode_thread = ThreadPoolExecutor(1, "decode")
        if restored.core is not None:
            self._load(restored.core["walls"])

    # ------------------------------------------------------------- events in

    def handle(self, event: ev.Event) -> None:
        """Let the core decide, and queue what it decides."""
        self._generation += 1
        self.queue(self.core.handle(event, self.clock()))

    def queue(self, actions: list[ev.Action]) -> None:
        if len(self._actions) > MAX_ACTIONS:
            self.stop(SyncerExit.STORE, f"{len(self._actions)} actions wait for the store: {self.problem}")
            return
        # A Welcome or an announcement tells of the versions that the core knew when it decided.
        known = tuple(self.parameters.broadcasts) if self.parameters is not None else ()
        self._actions.extend((self._generation, known, action) for action in actions)
        self._work.set()
        self._rearm.set()

    def next_number(self) -> int:
        """The number of the job's next record."""
        self._merge_number += 1
        return self._merge_number

    def run_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a piece of work beside the queue; its failure ends the process."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, HigherEpoch):
            self.stop(SyncerExit.SUPERSEDED, str(error))
        elif isinstance(error, TakeOver):
            self.stop(RESTART, str(error))
        elif isinstance(error, OSError | StoreUnusable | TapeError):
            self.stop(SyncerExit.STORE, f"the store cannot be used: {error}")
        else:
            log.error("a fault of this program", exc_info=error)
            self.stop(SyncerExit.FAILED, f"a fault of this program: {error!r}")

    def stop(self, outcome: int, why: str) -> None:
        """End the process with this exit code (or ``RESTART``); the first call counts."""
        if not self.outcome.done():
            self.why = why
            log.log(logging.INFO if outcome == 0 else logging.ERROR, "stopping: %s", why)
            self.outcome.set_result(outcome)

    # ------------------------------------------------------------- life

    def start(self) -> None:
        """Begin: the tasks, and the core's first actions."""
        made = [record.made_in for record in self.parameters.newest] if self.parameters else []
        behind = self.restored.behind
        self.restored = Restored()  # taken over; its arrays live on in parameters
        ended = self.core.phase in ENDED_PHASES  # else a SetPhase will say so
        self.queue(self.core.start(self.clock(), made, behind))
        for work in (self._carry_out(), self._tick(), self._merge_all(), self._checkpoint_regularly()):
            self.run_task(work)
        for upkeep in (self.payloads.sweep(), self.initial.watch(), self._forget_broadcasts()):
            self.run_task(upkeep)
        if ended:
            log.info("the job is %s already: %s", self.core.phase.value, self.core.phase_message)
            self.run_task(self._end(self.core.phase, again=True))

    async def close(self, checkpoint: bool) -> None:
        """Stop all work; with ``checkpoint``, make everything durable before (not after a higher epoch)."""
        if checkpoint:
            await self.payloads.settle(5.0)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._merge_thread.shutdown, True, cancel_futures=True)
        if checkpoint:
            try:
                async with asyncio.timeout(30):
                    await self.checkpoint()
            except (TimeoutError, OSError, HigherEpoch) as error:
                log.error("no last checkpoint: %s", error)
        self._store_thread.shutdown(True, cancel_futures=True)
        self.decode_thread.shutdown(True, cancel_futures=True)
        self.payloads.close()
        self.relay.close()

    async def _tick(self) -> None:
        while True:
            self._rearm.clear()
            try:
                async with asyncio.timeout(min(1.0, max(0.0, self.core.wake_at - self.clock()))):
                    await self._rearm.wait()
            except TimeoutError:
                self.handle(ev.Tick())

    # ------------------------------------------------------------- version 0, blobs

    def begin(self, layout: Layout, parameters: Parameters, frozen: str) -> None:
        """Version 0 is durable and in force from now on."""
        self.layout = layout
        self.parameters = parameters
        self.frozen = frozen

    async def blob(self, name: str) -> Array:
        """A stored blob's bytes, verified when it is first asked for."""
        if name not in self._blobs:
            self._blobs[name] = await asyncio.to_thread(self.checkpoints.read_blob, name)
        return self._blobs[name]

    async def keep_optimizer(self, state: Array) -> None:
        """Make a learner's inner optimizer state part of the job's checkpoint."""

        def write() -> None:
            # Named in the store's own thread: a checkpoint that waits there removes what is not named.
            self.optimizer = self.checkpoints.write_blob("optimizer", state)

        await self.durably(write)
        self.optimizer_bytes = state.nbytes

    # ------------------------------------------------------------- durability

    async def durably(self, work: Callable[..., T], *arguments: Any, thread: str = "store") -> T:
        """Run ``work`` in the store's (or merge's) thread until the store takes it."""
        loop = asyncio.get_running_loop()
        pool = self._merge_thread if thread == "merge" else self._store_thread
        first_failure, pause, told = 0.0, 0.25, ""
        while True:
            try:
                result = await loop.run_in_executor(pool, work, *arguments)
            except OSError as error:
                # A try alone may take longer than PATIENCE, and there is always a second one.
                first_failure = first_failure or time.monotonic()
                waited = time.monotonic() - first_failure
                if not isinstance(error, DiskFull) and error.errno not in _FULL and waited > PATIENCE:
                    raise
                told = f"the store cannot be written, merges wait: {error.strerror or error}"
                log.log(logging.DEBUG if self.problem == told else logging.ERROR, "%s", told)
                self._tell_problem(told)
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 2, 10.0)
                continue
            if told and self.problem == told:
                log.warning("the store takes writes again")
                self._tell_problem("")
            return result

    def _tell_problem(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            self.sessions.tell_phase(self.core.phase, self.message)

    @property
    def message(self) -> str:
        """The phase's message; a store that cannot be written comes first."""
        return self.problem or self.core.phase_message

    def _document(self) -> dict[str, Any]:
        walls: dict[str, Any] = {"bytes_up": self.bytes_up, "bytes_down": self.bytes_down, "events": self._numbers}
        walls["traffic"] = self.traffic.state(self.sessions.doors.listener)
        walls |= {"refused": dict(self.refused), "seconds": self.seconds}
        return {"core": self.core.state(self.clock(), time.time()), "walls": walls}

    def _load(self, walls: dict[str, Any]) -> None:
        self.bytes_up = walls["bytes_up"]
        self.bytes_down = walls["bytes_down"]
        self.traffic.load(walls.get("traffic", {}))
        self._numbers = walls["events"]
        self.refused.update(walls["refused"])
        self.seconds.update(walls["seconds"])

    async def _persist(self, generation: int) -> None:
        if generation <= self._persisted:
            return  # a later state is durable already
        newest, document = self._generation, self._document()
        versions = list(self.core.versions)
        await self.durably(self.checkpoints.write_state, document, versions)
        self._persisted = newest

    async def checkpoint(self) -> None:
        """A whole checkpoint now: tape, manifest, and what is not needed any more."""
        document, versions = self._document(), list(self.core.versions)

        def write() -> None:
            self.tape.flush()
            self.checkpoints.write_manifest(document, versions, self.optimizer)
            self.checkpoints.collect(self.optimizer)

        await self.durably(write)

    async def _checkpoint_regularly(self) -> None:
        while True:
            await asyncio.sleep(self.job.spec.syncer.checkpoint.every_seconds)
            if self.core.phase in ENDED_PHASES:  # there is nothing new; but another syncer may have the store
                await self.durably(self.checkpoints.epoch.check)
            else:
                await self.checkpoint()

    async def _tidy(self) -> None:
        """After many merges: a state, so that the records before it may go."""
        document, versions = self._document(), list(self.core.versions)

        def write() -> None:
            self.tape.flush()
            self.checkpoints.write_state(document, versions)
            self.checkpoints.collect(self.optimizer)

        await self.durably(write)

    # ------------------------------------------------------------- actions out

    async def _carry_out(self) -> None:
        while True:
            while self._actions:
                await self._do(*self._actions.popleft())
            self._work.clear()
            if not self._actions:
                await self._work.wait()

    async def _do(self, generation: int, known: tuple[Broadcast, ...], action: ev.Action) -> None:
        match action:
            case ev.Persist():
                await self._persist(generation)
            case ev.Merge():
                self._merges.put_nowait(action)
            case ev.AnswerPush():
                self.payloads.answer(action)
            case ev.ReleasePush():
                self.payloads.drop(action.handle)
            case ev.RecordEvent():
                self._note(action)
            case ev.RestartFromStore():
                self.above = action.above
                self.stop(RESTART, action.reason)
            case ev.SetPhase():
                self.sessions.tell_phase(action.phase, self.problem or action.message)
                if action.phase in ENDED_PHASES:
                    self.run_task(self._end(action.phase))
            case _:
                self.sessions.carry_out(action, known)

    def _note(self, note: ev.RecordEvent) -> None:
        self._numbers += 1
        self.events.append(
            {
                "n": self._numbers,
                "time": time.time(),
                "kind": note.kind,
                "slot": note.slot,
                "incarnation": note.incarnation,
                "message": note.message,
                **({"details": note.details} if note.details else {}),
            }
        )
        level = logging.WARNING if note.kind in _WARNINGS else logging.INFO
        log.log(level, "%s: %s", note.kind, note.message, extra={"slot": note.slot})

    async def _end(self, phase: JobPhase, again: bool = False) -> None:
        """The job has ended: checkpoint, let everybody hear of it, stop (or serve on). ``again``: it
        had ended before this process began, whose report stays if it was written."""
        document = present_report(self)
        earlier = await asyncio.to_thread(self._reported, document["outcome"]) if again else None
        self.final_report = earlier or document
        if earlier is None:
            await self.checkpoint()
            text = json.dumps(document, indent=1).encode()
            await self.durably(self.checkpoints.store.replace, "report.json", text)
        if self.stay:
            log.info("the job is %s; status, report and export are served on", phase.value)
            return
        began = time.monotonic()
        while (waited := time.monotonic() - began) < LINGER_SECONDS:
            if not self.sessions.count and (self.report_fetched or waited > REPORT_SECONDS):
                break
            await asyncio.sleep(0.05)
        self.stop(
            SyncerExit.FAILED if phase is JobPhase.FAILED else SyncerExit.OK,
            f"{phase.value}: {self.core.phase_message}",
        )

    def _reported(self, outcome: str) -> dict[str, Any] | None:
        """The store's report of this end; None: it has none."""
        try:
            found = json.loads(self.checkpoints.store.read("report.json", MAX_REPORT))
        except (NotThere, OSError, ValueError):
            return None  # it is written anew, and a store that fails says so then
        return found if isinstance(found, dict) and found.get("outcome") == outcome else None

    # ------------------------------------------------------------- merges

    async def _forget_broadcasts(self) -> None:
        while True:
            await asyncio.sleep(FORGET_SECONDS)
            if self.parameters is not None:
                self.parameters.forget(time.monotonic())

    async def _merge_all(self) -> None:
        while True:
            await self._merge(await self._merges.get())

    async def _merge(self, action: ev.Merge) -> None:
        assert self.parameters is not None
        deltas = [self.payloads.delta(r.handle) for r in action.responders]
        squares = [self.payloads.squares(r.handle) for r in action.responders]
        loop = asyncio.get_running_loop()
        began = time.monotonic()
        try:
            record, broadcast = await loop.run_in_executor(
                self._merge_thread, self.parameters.merge, action, deltas, self.epoch, self._merge_number + 1, squares
            )
        except Diverged as error:
            self.handle(ev.EndRequested(JobPhase.FAILED, str(error)))
            return
        await self.durably(self.checkpoints.write_record, record, thread="merge")
        self._merge_number += 1
        await self.durably(self.tape.append, record)
        took = time.monotonic() - began
        spent = {"merge": took, "quorum": action.quorum_seconds, "waited": action.waited_seconds}
        self.seconds = {name: self.seconds[name] + seconds for name, seconds in spent.items()}
        norms = tuple(r.norm for r in record.responders)
        receipt = receipt_to(self.core.receipt(action.fragment))  # of the version that it follows
        self.parameters.adopt(record, broadcast, time.monotonic(), receipt)  # and at once:
        self.handle(ev.MergeDurable(action.fragment, action.version, took, norms))
        self._merges_since_state += 1
        if self._merges_since_state >= max(16, len(self.parameters.newest)):
            self._merges_since_state = 0
            await self._tidy()
