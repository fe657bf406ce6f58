"""Carry out the faults of a ``--chaos`` schedule on processes, and list what was done.

A fault whose target is not running when it is due (it is being restarted, or away) waits until it is; what never came
about is said at the end. A fault on ``learner`` takes one that holds a slot, as long as any does.

``slow`` stops a process for a share of each ``SLOW_PERIOD`` and lets it go on for the rest. A pause or a cut that falls
into it holds: the process does not go on before it is over.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from diloco.local.chaos.fault_report import Injected
from diloco.local.chaos.schedule import Fault, FaultSchedule, choose
from diloco.processes.worker_specs import WorkerSpec
from diloco_protocol.documents import SlotRow

SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "pause": signal.SIGSTOP}
SLOW_PERIOD = 0.5  # seconds


class Signalled(Protocol):
    """A process that takes signals."""

    def signal(self, number: int) -> None: ...


class Link(Protocol):
    """What a learner's connections pass through."""

    def cut(self, seconds: float) -> None: ...


class JobView(Protocol):
    """What is known of the job that the faults hit."""

    @property
    def elapsed(self) -> float:
        """Seconds since the job's first step."""

    @property
    def greatest_step(self) -> int:
        """The greatest slot step; 0: none yet."""

    def slot_of(self, name: str) -> SlotRow | None:
        """The slot that this process holds."""

    def show_event(self, text: str, style: str) -> None:
        """Say to the user what was done."""


@dataclass
class Injector:
    """Carries out faults: call ``step`` at each poll, ``merged`` and ``ended`` when that happens.

    ``running``, ``links``: by a process's name, as they are at the moment. ``done`` lists the faults that were
    carried out.
    """

    view: JobView
    running: Mapping[str, Signalled]
    links: Mapping[str, Link]
    workers: Sequence[WorkerSpec]
    schedule: FaultSchedule
    seed: int
    done: list[Injected] = field(default_factory=list)
    _first_merge: float | None = None
    _held: list[tuple[int, Fault]] = field(default_factory=list)  # due, their target is not running
    _paused: dict[str, float] = field(default_factory=dict)  # process -> until (monotonic)
    _away: dict[str, float] = field(default_factory=dict)  # process -> until (monotonic)
    _open: dict[str, int] = field(default_factory=dict)  # process -> its newest fault in `done`
    _slowing: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def waiting(self) -> tuple[Fault, ...]:
        return (*(fault for _, fault in self._held), *self.schedule.waiting)

    def paused(self, name: str) -> bool:
        """Whether this process is stopped on purpose."""
        return time.monotonic() < self._paused.get(name, 0.0)

    def away_seconds(self, name: str) -> float:
        """How long this process must not be started yet, because its kill said so."""
        return max(0.0, self._away.get(name, 0.0) - time.monotonic())

    def merged(self) -> None:
        """There has been a merge in this run: times count from the first."""
        if self._first_merge is None:
            self._first_merge = time.monotonic()

    def ended(self, name: str, at: float) -> bool:
        """A process ended at ``at`` (wall clock). Returns whether a fault of the schedule ended it."""
        index = self._open.pop(name, None)
        if index is not None and self.done[index].noticed is None:
            self.done[index] = replace(self.done[index], noticed=at)
        return index is not None

    def step(self) -> None:
        since = None if self._first_merge is None else time.monotonic() - self._first_merge
        due = self._held + self.schedule.due(since, self.view.greatest_step)
        self._held = [(index, fault) for index, fault in due if not self._inject(index, fault)]

    def _inject(self, index: int, fault: Fault) -> bool:
        """False: the target is not there at the moment."""
        if fault.syncer:
            if "syncer" not in self.running:
                return False
            self._hit(fault, "syncer", None)
            return True
        by_index = {m.learner: m for m in self.workers if m.learner is not None and m.name in self.running}
        seated = [i for i, worker in by_index.items() if self.view.slot_of(worker.name) is not None]
        candidates = seated if fault.learner is None and seated else list(by_index)
        chosen = choose(fault, index, candidates, self.seed)
        if chosen is None:
            return False
        name = by_index[chosen].name
        self._hit(fault, name, self.view.slot_of(name))
        return True

    def _hit(self, fault: Fault, name: str, slot: SlotRow | None) -> None:
        process, lasting = self.running[name], f" for {fault.duration:g} s" if fault.duration else ""
        self.view.show_event(f"chaos: {fault.action} {name}{lasting}", "bold red")
        injected = Injected(
            time.time(),
            self.view.elapsed,
            fault.action,
            name,
            slot=None if slot is None else slot.slot,
            incarnation=0 if slot is None else slot.incarnation,
            duration=fault.duration,
        )
        if fault.action == "cut":
            for link in self.links.values() if name == "syncer" else [self.links[name]]:
                link.cut(fault.duration)
        elif fault.action == "slow":
            task = asyncio.get_running_loop().create_task(self._slow(process, name, fault))
            self._slowing.add(task)
            task.add_done_callback(self._slowing.discard)
        else:
            process.signal(SIGNALS[fault.action])
            if fault.action == "pause":
                self._paused[name] = time.monotonic() + fault.duration
                asyncio.get_running_loop().call_later(fault.duration, process.signal, signal.SIGCONT)
            else:
                self._away[name] = time.monotonic() + fault.duration
                self._open[name] = len(self.done)
        self.done.append(injected)

    def close(self) -> None:
        """Slow nobody down any more."""
        for task in self._slowing:
            task.cancel()

    async def _slow(self, process: Signalled, name: str, fault: Fault) -> None:
        """Stop and go, until the fault's duration is over or another process has its name."""
        end = time.monotonic() + fault.duration
        try:
            while time.monotonic() < end and self.running.get(name) is process:
                process.signal(signal.SIGSTOP)
                await asyncio.sleep(SLOW_PERIOD * (1 - fault.speed))
                if not self.paused(name):
                    process.signal(signal.SIGCONT)
                await asyncio.sleep(SLOW_PERIOD * fault.speed)
        finally:
            if not self.paused(name):
                process.signal(signal.SIGCONT)
