"""What the syncer says of the run, followed: its status, its events, its report.

One ``look`` reads the status document; what is new in it goes to the screen and to the
supervisor. The last document stands while the syncer does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diloco.local.chaos.fault_report import Event
from diloco.local.outcome import ended_phase, last_output
from diloco.local.screen import RunView, Screen, is_late
from diloco.processes.supervisor import Kind, Supervisor
from diloco.processes.worker_specs import WorkerSpec
from diloco.syncer_client import SyncerClient, SyncerError
from diloco_protocol.documents import DocumentError, EventRow, OutputRow, Report, SlotRow, StatusDocument
from diloco_protocol.vocabulary import ENDED_PHASES, FINISHING_PHASES, EventKind, JobPhase, SlotState

# Not for the screen: a hold and its end are told by the phase, and that a slot is late is told once it has lasted.
QUIET_EVENTS = frozenset({EventKind.FIRST_STEP, EventKind.HOLD, EventKind.RESUME, EventKind.STARVED})
KEPT_SECONDS = 2.0  # the oldest that a page can be when it is here: it is kept for half a second, and on its way
LATE_SECONDS = 30.0  # of a learner whose updates keep arriving too late, before that is said
EVENT_STYLES: dict[str, str] = {
    EventKind.LOST: "red",
    EventKind.PROCESS_ENDED: "red",
    EventKind.SHARD_LOST: "red",
    EventKind.SHARD_READY: "green",
    EventKind.SYNCER_RESTART: "yellow",
    EventKind.SUSPECT: "yellow",
    EventKind.JOINED: "green",
    EventKind.PHASE: "cyan",
}


@dataclass
class StatusWatch:
    """``process_ids`` (worker → DILOCO_PROCESS of its newest process) is the runner's to fill;
    ``on_merge`` is called when there have been more merges."""

    syncer: SyncerClient
    view: RunView
    screen: Screen
    supervisor: Supervisor
    workers: Sequence[WorkerSpec]
    store: Path
    on_merge: Callable[[], None]
    process_ids: dict[str, str] = field(default_factory=dict)
    report: Report | None = None
    _joined: set[str] = field(default_factory=set)  # ids of processes that have held a slot, or stood by
    _events: dict[tuple[int, float, str, int], Event] = field(default_factory=dict)
    _begun: float = field(default_factory=time.time)
    _begun_at: float = field(default_factory=time.monotonic)
    _merges: int = -1
    _seen_at: float = 0.0
    _told_resumed: bool = False
    _problem: str = ""
    _unreadable: str = ""
    _late_since: dict[int, float] = field(default_factory=dict)  # slot -> when it began; inf: that was said
    _looking: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def phase(self) -> str:
        """The job's phase as last heard; empty before the first word."""
        return "" if self.view.status is None else self.view.status.phase

    @property
    def ended(self) -> bool:
        return self.phase in ENDED_PHASES

    @property
    def output(self) -> OutputRow | None:
        """What became of the job's ``output.uri``; None: it has none, or nothing was heard."""
        return last_output(self.view.status, self.report)

    @property
    def is_writing_output(self) -> bool:
        """Whether the job is complete and its model is still being written to ``output.uri``."""
        return self.phase == JobPhase.COMPLETE and self.output is not None and self.output.open

    @property
    def is_over(self) -> bool:
        """Whether a syncer has ended the job, by its status or by the report that it left."""
        told = self.report is not None and ended_phase(self.report) in ENDED_PHASES
        return self.ended or told

    @property
    def end_message(self) -> str:
        """Why the job ended, by its status or by the report that it left."""
        told = self.view.status if self.ended or self.report is None else self.report
        return "" if told is None else told.message

    @property
    def drain_progress(self) -> object:
        """What changes while a job drains."""
        if (status := self.view.status) is None:
            return None
        slots = [(slot.state, slot.step, slot.merged_pushes) for slot in status.slots]
        return status.phase, status.merges, status.tokens, slots, status.sessions, len(status.eval_loss)

    @property
    def is_settled(self) -> bool:
        """Whether the job has ended, and nothing more comes of it: its end is durable, for the report of it is here,
        and its output is written or cannot be."""
        told = self.report is not None and ended_phase(self.report) == self.phase
        return self.ended and told and not self.is_writing_output

    @property
    def closing(self) -> bool:
        return self.phase in FINISHING_PHASES

    @property
    def elapsed(self) -> float:
        """The job's own clock, now: seconds since its first step."""
        since = time.monotonic() - self._seen_at if self._merges > 0 else 0.0
        return since + (0.0 if self.view.status is None else self.view.status.elapsed_seconds)

    @property
    def greatest_step(self) -> int:
        """The greatest slot step, as last heard."""
        return 0 if self.view.status is None else self.view.status.step

    def show_event(self, text: str, style: str) -> None:
        self.screen.event(text, style)

    @property
    def events(self) -> list[Event]:
        return list(self._events.values())

    def worker_of(self, slot: SlotRow) -> WorkerSpec | None:
        """The worker whose newest process holds this slot."""
        learners = (worker for worker in self.workers if worker.kind is Kind.LEARNER)
        return next((one for one in learners if self.process_ids.get(one.name) == slot.process), None)

    def slot_of(self, name: str) -> SlotRow | None:
        """The slot that this worker's newest process holds."""
        identity = self.process_ids.get(name)
        slots = [] if self.view.status is None else self.view.status.slots
        held = (slot for slot in slots if slot.process == identity and slot.state is not SlotState.EMPTY)
        return next(held, None) if identity else None

    def has_joined(self, process_id: str) -> bool:
        """Whether this process was ever seen in the job."""
        return process_id in self._joined

    async def poll(self, now: bool = False, seconds: float | None = None) -> bool:
        """Read the status once; False if there was none, in ``seconds`` where they are given. ``now``: one of
        before this call will not do."""
        async with self._looking:  # what one look has seen is not overwritten by another that began before it
            return await self._look(now, seconds)

    async def _look(self, now: bool, seconds: float | None) -> bool:
        self.view.run_seconds = time.monotonic() - self._begun_at
        try:
            status = await (self.syncer.status_now() if now else self.syncer.status(seconds))
        except SyncerError as error:
            self._tell_unreadable(error)
            self.view.serving = False
            self.screen.update(self.view)
            return False
        if self._is_older(status):
            return True
        self.view.status, self.view.serving, self._seen_at = status, True, time.monotonic()
        self._joined.update(status.standbys, (slot.process for slot in status.slots))
        self._tell_resumed(status)
        self._tell_problem(status.store_problem)
        self._follow_merges(status)
        self._follow_events(status)
        self._tell_late(status)
        places = {(m.region, m.ordinal): m.name for m in self.workers if m.kind is Kind.LEARNER}
        for slot in status.slots:
            if (worker := self.worker_of(slot)) is not None:  # a spare may sit in it
                places[slot.region, slot.ordinal] = worker.name
            elif slot.region:  # another machine's
                places.setdefault((slot.region, slot.ordinal), f"{slot.region}-{slot.ordinal}")
        self.view.processes = places
        self.screen.update(self.view)
        if self.ended:  # not before: the syncer stays after the end until the report was fetched
            await self.fetch_report()
        return True

    def _is_older(self, status: StatusDocument) -> bool:
        """Whether this document was made before the last one: a page is kept for a while."""
        last, passed = self.view.status, time.monotonic() - self._seen_at
        return last is not None and self.view.serving and passed < KEPT_SECONDS and _age(status) < _age(last)

    async def fetch_report(self) -> None:
        with contextlib.suppress(SyncerError):  # the last one that was had stands
            self.report = await self.syncer.report()

    def _follow_merges(self, status: StatusDocument) -> None:
        self.supervisor.any_merge |= status.merges > 0  # in an earlier run, too
        if status.merges > self._merges >= 0:
            self.supervisor.merged()
            self.supervisor.healthy("syncer")
            self.on_merge()
        self._merges = status.merges
        if status.eval_loss:
            self.supervisor.healthy("evaluator")

    def _tell_resumed(self, status: StatusDocument) -> None:
        if self._told_resumed:
            return
        self._told_resumed = True
        if status.merges:
            self.view.earlier_seconds = status.elapsed_seconds
            self.screen.event(
                f"continuing from the checkpoint in {self.store}: step {status.step}, {status.merges:,} merges,"
                f" {status.tokens.trained:,} tokens",
                "bold",
            )

    def _tell_unreadable(self, error: SyncerError) -> None:
        """The syncer answers, with a status that this program does not understand."""
        said = str(error) if isinstance(error.__cause__, DocumentError) else ""
        if said and said != self._unreadable:
            self.screen.event(said, "red")
        self._unreadable = said

    def _tell_problem(self, problem: str) -> None:
        """The syncer cannot write its store: nothing is merged until it can."""
        if bool(problem) != bool(self._problem):
            text = f"the syncer waits: {problem}" if problem else "the store can be written again"
            self.screen.event(text, "bold red" if problem else "green")
        self._problem = problem

    def _tell_late(self, status: StatusDocument) -> None:
        """Say of whom the updates have arrived too late for a while, what that means, and what helps."""
        now = time.monotonic()
        for slot in status.slots:
            if not is_late(slot):
                self._late_since.pop(slot.slot, None)
                continue
            if now < self._late_since.setdefault(slot.slot, now) + LATE_SECONDS:
                continue
            self._late_since[slot.slot] = float("inf")
            self.screen.event(
                f"late: {slot.region}-{slot.ordinal}'s updates have arrived after the merge for {LATE_SECONDS:.0f} s; "
                "they count in a later one. If this continues, raise sync.every or sync.grace.capSeconds",
                "yellow",
            )

    def _follow_events(self, status: StatusDocument) -> None:
        slots = {slot.slot: slot for slot in status.slots}
        for row in status.events:
            event = Event(epoch=status.epoch, **dict(row))
            key = (event.n, event.time, event.kind, event.slot)
            if key in self._events or event.time < self._begun - 1.0:
                continue
            self._events[key] = event
            if event.kind is EventKind.JOINED:  # it may have left the slot since
                self._joined.add(str(event.details.get("process", "")))
            worker = self.worker_of(slots[event.slot]) if event.slot in slots else None
            if event.kind is EventKind.FIRST_MERGE and worker is not None:
                self.supervisor.healthy(worker.name)
            show_event(self.screen, row)


def show_event(screen: Screen, event: EventRow) -> None:
    """Say what happened to the job, unless the figures say it better."""
    if event.kind not in QUIET_EVENTS:
        prefix = "" if event.kind is EventKind.PHASE else f"{event.kind}: "
        screen.event(prefix + event.message, EVENT_STYLES.get(event.kind, ""))


def _age(status: StatusDocument) -> tuple[int, float, int, int]:
    """Which of two documents of a job was made later: the one for which this is greater."""
    newest = max((row.n for row in status.events), default=0)
    return status.epoch, status.elapsed_seconds, status.merges, newest
