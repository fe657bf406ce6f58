"""What the syncer says of the run, followed: its status, its events, its report.

One ``look`` reads the status document; what is new in it goes to the screen and to the
supervisor. The last document stands while the syncer does not answer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from diloco.local.chaos.fault_report import Event
from diloco.local.screen import RunView, Screen
from diloco.processes.supervisor import Kind, Supervisor
from diloco.processes.worker_specs import WorkerSpec
from diloco.syncer_client import SyncerClient, SyncerError
from diloco_protocol.vocabulary import ENDED_PHASES, FINISHING_PHASES, EventKind

QUIET_EVENTS = frozenset({EventKind.FIRST_STEP})
STARVED_SECONDS = 60.0  # between two words on the screen that one slot starves
EVENT_STYLES: dict[str, str] = {
    EventKind.LOST: "red",
    EventKind.PROCESS_ENDED: "red",
    EventKind.SUSPECT: "yellow",
    EventKind.JOINED: "green",
    EventKind.PHASE: "cyan",
}


class StatusWatch:
    """``process_ids`` (worker → DILOCO_PROCESS of its newest process) is the runner's to fill;
    ``on_merge`` is called when there have been more merges."""

    def __init__(
        self,
        syncer: SyncerClient,
        view: RunView,
        screen: Screen,
        supervisor: Supervisor,
        workers: Sequence[WorkerSpec],
        store: Path,
        on_merge: Callable[[], None],
    ) -> None:
        self.syncer = syncer
        self.view = view
        self.screen = screen
        self.supervisor = supervisor
        self.process_ids: dict[str, str] = {}
        self.report: dict[str, Any] | None = None
        self._workers = workers
        self._store = store
        self._on_merge = on_merge
        self._events: dict[tuple[int, float, str, int], Event] = {}
        self._begun = time.time()
        self._merges = -1
        self._seen_at = 0.0
        self._told_resumed = False
        self._problem = ""
        self._told_starved: dict[int, float] = {}  # slot -> the event's time

    @property
    def phase(self) -> str:
        """The job's phase as last heard; empty before the first word."""
        return str(self.view.status.get("phase") or "")

    @property
    def ended(self) -> bool:
        return self.phase in ENDED_PHASES

    @property
    def closing(self) -> bool:
        return self.phase in FINISHING_PHASES

    @property
    def elapsed(self) -> float:
        """The job's own clock, now: seconds since its first step."""
        since = time.monotonic() - self._seen_at if self._merges > 0 else 0.0
        return float(self.view.status.get("elapsed_seconds") or 0.0) + since

    @property
    def events(self) -> list[Event]:
        return list(self._events.values())

    def worker_of(self, slot: dict[str, Any]) -> WorkerSpec | None:
        """The worker whose newest process holds this slot."""
        for worker in self._workers:
            if worker.kind is Kind.LEARNER and self.process_ids.get(worker.name) == slot.get("process"):
                return worker
        return None

    def slot_of(self, name: str) -> dict[str, Any] | None:
        """The slot that this worker's newest process holds."""
        identity = self.process_ids.get(name)
        slots = self.view.status.get("slots") or []
        held = (slot for slot in slots if slot.get("process") == identity and slot.get("state") != "empty")
        return next(held, None) if identity else None

    async def poll(self) -> bool:
        """Read the status once; False if there was none."""
        try:
            status = await self.syncer.status()
        except SyncerError:
            self.view.serving = False
            self.screen.update(self.view)
            return False
        self.view.status, self.view.serving, self._seen_at = status, True, time.monotonic()
        self._tell_resumed(status)
        self._tell_problem(str(status.get("store_problem") or ""))
        self._follow_merges(status)
        self._follow_events(status)
        places = {(m.region, m.ordinal): m.name for m in self._workers if m.kind is Kind.LEARNER}
        for slot in status.get("slots") or []:
            if (worker := self.worker_of(slot)) is not None:  # a spare may sit in it
                places[str(slot.get("region")), int(slot.get("ordinal") or 0)] = worker.name
            elif slot.get("region"):  # another machine's
                place = str(slot.get("region")), int(slot.get("ordinal") or 0)
                places.setdefault(place, f"{place[0]}-{place[1]}")
        self.view.processes = places
        self.screen.update(self.view)
        if self.ended:  # not before: the syncer stays after the end until the report was fetched
            await self.fetch_report()
        return True

    async def fetch_report(self) -> None:
        with contextlib.suppress(SyncerError):  # the last one that was had stands
            self.report = await self.syncer.call("report", {})

    def _follow_merges(self, status: dict[str, Any]) -> None:
        merges = int(status.get("merges") or 0)
        if merges > self._merges >= 0:
            self.supervisor.merged()
            self.supervisor.healthy("syncer")
            self._on_merge()
        self._merges = merges
        if status.get("eval_loss"):
            self.supervisor.healthy("evaluator")

    def _tell_resumed(self, status: dict[str, Any]) -> None:
        if self._told_resumed:
            return
        self._told_resumed = True
        if status.get("merges"):
            step = max((slot.get("step") or 0 for slot in status.get("slots") or []), default=0)
            tokens = (status.get("tokens") or {}).get("trained") or 0
            self.screen.event(
                f"going on from the checkpoint in {self._store}: step {step}, {status['merges']:,} merges,"
                f" {tokens:,} tokens",
                "bold",
            )

    def _tell_problem(self, problem: str) -> None:
        """The syncer cannot write its store: nothing is merged until it can."""
        if bool(problem) != bool(self._problem):
            text = f"the syncer waits: {problem}" if problem else "the store can be written again"
            self.screen.event(text, "bold red" if problem else "green")
        self._problem = problem

    def _follow_events(self, status: dict[str, Any]) -> None:
        slots = {slot.get("slot"): slot for slot in status.get("slots") or []}
        for row in status.get("events") or []:
            try:
                event = Event.parse(row, int(status.get("epoch") or 0))
            except (KeyError, TypeError, ValueError):
                continue  # from a syncer of another release; its figures still count
            key = (event.n, event.time, event.kind, event.slot)
            if key in self._events or event.time < self._begun - 1.0:
                continue
            self._events[key] = event
            worker = self.worker_of(slots[event.slot]) if event.slot in slots else None
            if event.kind == "first-merge" and worker is not None:
                self.supervisor.healthy(worker.name)
            if event.kind == "starved":
                if event.time < self._told_starved.get(event.slot, 0.0) + STARVED_SECONDS:
                    continue
                self._told_starved[event.slot] = event.time
            if event.kind not in QUIET_EVENTS:
                prefix = "" if event.kind == "phase" else f"{event.kind}: "
                self.screen.event(prefix + event.message, EVENT_STYLES.get(event.kind, ""))
