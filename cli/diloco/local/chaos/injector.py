"""Carry out the faults of a ``--chaos`` schedule on a run's processes, and list what was done.

A fault whose target is not running when it is due (it is being restarted) waits until it is; what never came about is
said at the end. A fault on ``learner`` takes one that holds a slot, as long as any does.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from diloco.local.chaos.fault_report import Injected
from diloco.local.chaos.proxy import Proxy
from diloco.local.chaos.schedule import Fault, FaultSchedule, choose
from diloco.local.watch import StatusWatch
from diloco.processes.launch import Process
from diloco.processes.worker_specs import WorkerSpec
from diloco_protocol.documents import SlotRow

SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "pause": signal.SIGSTOP}


@dataclass
class Injector:
    """Carries out faults: call ``step`` at each poll, ``merged`` and ``ended`` when that happens.

    ``running``, ``proxies``: by a process's name, as they are at the moment. ``done`` lists the faults that were
    carried out.
    """

    watch: StatusWatch
    running: Mapping[str, Process]
    proxies: Mapping[str, Proxy]
    workers: Sequence[WorkerSpec]
    schedule: FaultSchedule
    seed: int
    done: list[Injected] = field(default_factory=list)
    _first_merge: float | None = None
    _held: list[tuple[int, Fault]] = field(default_factory=list)  # due, their target is not running
    _paused: dict[str, float] = field(default_factory=dict)  # process -> until (monotonic)
    _open: dict[str, int] = field(default_factory=dict)  # process -> its newest fault in `done`

    @property
    def waiting(self) -> tuple[Fault, ...]:
        return (*(fault for _, fault in self._held), *self.schedule.waiting)

    def paused(self, name: str) -> bool:
        """Whether this process is stopped on purpose."""
        return time.monotonic() < self._paused.get(name, 0.0)

    def merged(self) -> None:
        """There has been a merge in this run: times count from the first."""
        if self._first_merge is None:
            self._first_merge = time.monotonic()

    def ended(self, name: str, at: float) -> None:
        """A process ended at ``at`` (wall clock)."""
        index = self._open.pop(name, None)
        if index is not None and self.done[index].noticed is None:
            self.done[index] = replace(self.done[index], noticed=at)

    def step(self) -> None:
        since = None if self._first_merge is None else time.monotonic() - self._first_merge
        status = self.watch.view.status
        greatest = 0 if status is None else status.step
        due = self._held + self.schedule.due(since, greatest)
        self._held = [(index, fault) for index, fault in due if not self._inject(index, fault)]

    def _inject(self, index: int, fault: Fault) -> bool:
        """False: the target is not there at the moment."""
        if fault.syncer:
            if "syncer" not in self.running:
                return False
            self._hit(fault, "syncer", None)
            return True
        by_index = {m.learner: m for m in self.workers if m.learner is not None and m.name in self.running}
        seated = [i for i, worker in by_index.items() if self.watch.slot_of(worker.name) is not None]
        candidates = seated if fault.learner is None and seated else list(by_index)
        chosen = choose(fault, index, candidates, self.seed)
        if chosen is None:
            return False
        name = by_index[chosen].name
        self._hit(fault, name, self.watch.slot_of(name))
        return True

    def _hit(self, fault: Fault, name: str, slot: SlotRow | None) -> None:
        process, lasting = self.running[name], f" for {fault.duration:g} s" if fault.duration else ""
        self.watch.screen.event(f"chaos: {fault.action} {name}{lasting}", "bold red")
        injected = Injected(
            time.time(),
            self.watch.elapsed,
            fault.action,
            name,
            None if slot is None else slot.slot,
            0 if slot is None else slot.incarnation,
            fault.duration,
        )
        if fault.action == "cut":
            for proxy in self.proxies.values() if name == "syncer" else [self.proxies[name]]:
                proxy.cut(fault.duration)
        else:
            process.signal(SIGNALS[fault.action])
            if fault.action == "pause":
                self._paused[name] = time.monotonic() + fault.duration
                asyncio.get_running_loop().call_later(fault.duration, process.signal, signal.SIGCONT)
            else:
                self._open[name] = len(self.done)
        self.done.append(injected)
