"""A run on this machine whose processes, syncer and clock are scripted: the runner's own parts in virtual time.

A process ends when its script says so, or when it is killed. The syncer's answers are attributes. Everything between
them (supervisor, watch, injector, the runner's parts) is the product's.
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from diloco.local import watch
from diloco.local.chaos import injector, schedule
from diloco.local.outcome import RunOutcome
from diloco.local.runner import job_follower, process_ends, process_keepers, run_end, runner, syncer_health
from diloco.local.screen import RunView
from diloco.processes import syncer_ports
from diloco.processes.launch import StartError
from diloco.processes.supervisor import Exit, Kind
from diloco.processes.workdir import Workdir
from diloco.processes.worker_specs import WorkerSpec
from diloco.syncer_client import PAGE_SECONDS, SyncerClient, SyncerError
from diloco_protocol.documents import Report, StatusDocument
from diloco_protocol.spec.load import parse_job
from operator_simulation.virtual_time import Clock, VirtualLoop
from status_documents import slot_row

NO_PID = 1 << 22  # above the kernel's greatest
ADDRESS = {"sync": "127.0.0.1:41", "control": "127.0.0.1:42", "http": "127.0.0.1:43", "pid": NO_PID, "epoch": 1}
JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: scripted}
spec:
  learners: {command: [python, train.py]}
  training: {model: null, data: null, evaluation: null, device: cpu, stop: {steps: 20}}
  regions: [{name: east, learners: 2}]
"""
Step = Exit | StartError | tuple[float, Exit]


class ScriptedProcess:
    """Ends when ``exit`` is called, and at SIGKILL. ``signals``: those that it was sent."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.pid = NO_PID
        self.command = command
        self.signals = list[int]()
        self._ended = asyncio.get_running_loop().create_future()

    async def wait(self) -> Exit:
        how: Exit = await asyncio.shield(self._ended)
        return how

    def signal(self, number: int) -> None:
        self.signals.append(number)
        if number == signal.SIGKILL:
            self.exit(Exit(signal=number))

    def exit(self, how: Exit) -> None:
        if not self._ended.done():
            self._ended.set_result(how)


class ScriptedSyncer(SyncerClient):
    """Answers with ``page`` and ``last_report``, None: not at all. ``calls``: what was asked of it; the next
    ``unheard`` calls fail. ``takes``: the seconds until a page is there."""

    takes = 0.0
    place: dict[str, str | int] | None = None
    page: StatusDocument | None = None
    last_report: Report | None = None
    unheard = 0

    def __init__(self, *args: Path) -> None:
        super().__init__(*args)
        self.calls = list[tuple[str, dict[str, Any]]]()

    def address(self) -> dict[str, str | int] | None:
        return self.place

    async def status(self, seconds: float | None = None) -> StatusDocument:
        if self.page is None:
            raise SyncerError("it does not answer")
        await asyncio.sleep(min(self.takes, seconds or PAGE_SECONDS))
        if self.takes > (seconds or PAGE_SECONDS):
            raise SyncerError("no answer in time")
        return self.page

    async def status_now(self) -> StatusDocument:
        return await self.status()

    async def report(self) -> Report:
        if self.last_report is None:
            raise SyncerError("it does not answer")
        return self.last_report

    async def call(self, method: str, body: dict[str, Any], seconds: float = 5.0) -> dict[str, Any]:
        if self.unheard:
            self.unheard -= 1
            raise SyncerError("it does not answer")
        self.calls.append((method, body))
        return {}


class Texts:
    """A screen that keeps what was said."""

    def __init__(self) -> None:
        self.said = list[str]()

    def event(self, text: str, style: str = "") -> None:
        self.said.append(text)

    def show_text(self, text: str) -> None:
        self.said.append(text)

    def update(self, view: RunView) -> None:
        pass

    def close(self) -> None:
        pass


class ScriptedRun:
    """One run, which nothing has been started of. ``starts``: all processes, in the order of their starts."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, chaos: str = "", overrides: str = "") -> None:
        monkeypatch.setattr(runner, "SyncerClient", ScriptedSyncer)
        monkeypatch.setattr(process_keepers, "Child", self)
        monkeypatch.setattr(syncer_ports, "check_free", lambda address: None)
        self.starts = list[ScriptedProcess]()
        self.screen = Texts()
        self._scripts = dict[str, deque[Step]]()
        job = parse_job(JOB, overrides.split())
        workdir = Workdir(folder)
        workdir.logs.mkdir()
        faults = schedule.parse(chaos)
        self.runner = runner.Runner(job, workdir, folder, faults, screen=self.screen)
        assert isinstance(self.runner.syncer, ScriptedSyncer)
        self.syncer: ScriptedSyncer = self.runner.syncer
        self.runner.end.has_started = True
        monkeypatch.setattr(self.runner.worker_keeper, "_start", self.start_worker)
        for module in (watch, injector, job_follower, process_ends, process_keepers, run_end, syncer_health):
            monkeypatch.setattr(module, "time", Clock())

    def script(self, name: str, *steps: Step) -> None:
        """What happens at the next starts of a process: it cannot start, or how it ends (seconds later). A start
        without a step runs on."""
        self._scripts[name] = deque(steps)

    def worker(self, name: str) -> WorkerSpec:
        return next(one for one in self.runner.watch.workers if one.name == name)

    def sit(self, *names: str) -> list[dict[str, Any]]:
        """Rows of slots in which the newest processes of these learners sit, part of the quorum."""
        ids = self.runner.watch.process_ids
        return [
            slot_row(index, process=ids[name], state="active", ready=True, region="east").model_dump()
            for index, name in enumerate(names)
        ]

    def started(self, name: str) -> list[ScriptedProcess]:
        return [process for process in self.starts if process.name == name]

    def outcome(self) -> RunOutcome | None:
        """How the run ends; None: it goes on."""
        return self.runner.end._outcome

    def run(self, *parts: Coroutine[Any, Any, Any], seconds: float = 60.0) -> None:
        """Run these until they end, or for so many seconds of virtual time; then all that they began is cancelled."""

        async def main() -> None:
            tasks = [asyncio.ensure_future(part) for part in parts]
            await asyncio.wait(tasks, timeout=seconds)
            for task in tasks:
                if task.done():
                    task.result()
                task.cancel()
            await self.runner._cancel_tasks()

        with asyncio.Runner(loop_factory=VirtualLoop) as loop:
            loop.run(main())

    async def start(
        self, name: str, command: Sequence[str], env: object, log: object, **options: object
    ) -> ScriptedProcess:
        """In the place of ``Child.start``."""
        steps = self._scripts.get(name)
        step = steps.popleft() if steps else None
        if isinstance(step, StartError):
            raise step
        process = ScriptedProcess(name, command)
        self.starts.append(process)
        if step is not None:
            seconds, how = step if isinstance(step, tuple) else (0.0, step)
            asyncio.get_running_loop().call_later(seconds, process.exit, how)
        return process

    async def start_worker(self, worker: WorkerSpec) -> ScriptedProcess:
        """In the place of ``WorkerKeeper._start``."""
        assert worker.kind is not Kind.SYNCER
        count = len(self.started(worker.name))
        self.runner.watch.process_ids[worker.name] = f"{worker.name}.{count}"
        return await self.start(worker.name, [], {}, None)
