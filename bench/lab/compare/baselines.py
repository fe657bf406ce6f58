"""The baselines' arms: machines with ranks of torch DDP, kept as each kind of training keeps them.

*Rigid*: all machines start their ranks together. When one rank ends, all are ended, and start again from the checkpoint
in memory once every machine is back.
*Elastic*: each machine keeps an agent of torchrun's, which meet at a store and start a rank for each group they form.
*torchft*: each machine keeps a replica, which meet by a lighthouse.

The faults are those of our arm, carried out by the same injector, and hit machines: one that fails while the others
wait for another is away from then on. Processes come from the same fork server as ours, so that starting again costs
the same. The scores are made when the training is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco.local.chaos.injector import Injector
from diloco.local.chaos.schedule import FaultSchedule
from diloco.processes.exit_errors import tail
from diloco.processes.launch import Forked, ForkServerClient, StartError
from diloco.processes.worker_specs import base_environment, threads_each, worker_specs
from diloco_protocol.common.files import write_whole
from diloco_protocol.documents import SlotRow
from diloco_protocol.spec.job import DiLoCoJob
from lab.baselines.settings import BaselineSettings
from lab.compare.arm import ArmError, Record, Tell, hits_of, read_rows, write_job
from lab.compare.cpu import CpuMeter, descendants, read_processes
from lab.compare.measures import StepEnd
from lab.compare.plan import Comparison
from lab.pace import VARIABLE

POLL_SECONDS = 0.05
SAMPLE_SECONDS = 1.0
START_SECONDS = 180.0  # until the first step, the loading of libraries and data included
PROGRAM_SECONDS = 600.0  # for calibration and for the scores
MOST_VAIN_STARTS = 8  # in a row, without a step in between; of each machine
MEMORY = Path("/dev/shm")
# Beside the package ``lab``, which its children import.
FORK_SERVER = Path(__file__).parents[2] / "baseline_forkserver.py"
# Baselines whose machines meet at a server: its program, and theirs.
SERVED = {"ddp-elastic": ("store", "agent"), "torchft": ("lighthouse", "replica")}


class Machine:
    """One learner's machine: a process or none, and a link."""

    def __init__(self, index: int, settings: BaselineSettings) -> None:
        self.index = index
        self.process: Forked | None = None
        self._cut_file = settings.cut(index)
        self._cut_until = 0.0

    def signal(self, number: int) -> None:
        """To the process and all that descend from it."""
        if self.process is None or self.process.ended.done():
            return
        for pid in descendants(self.process.pid, read_processes()) - {self.process.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        self.process.signal(number)

    def cut(self, seconds: float) -> None:
        self._cut_until = time.time() + seconds
        write_whole(self._cut_file, json.dumps(self._cut_until).encode())

    @property
    def linked(self) -> bool:
        return time.time() >= self._cut_until


class BaselineView:
    """What the injector sees of the job, and where it says what it does."""

    def __init__(self, log: Path) -> None:
        self.started: float | None = None
        self.greatest_step = 0
        self._log = log

    @property
    def elapsed(self) -> float:
        return 0.0 if self.started is None else time.time() - self.started

    def slot_of(self, name: str) -> SlotRow | None:
        return None

    def show_event(self, text: str, style: str = "") -> None:
        with self._log.open("a", encoding="utf-8") as out:
            out.write(f"{self.elapsed:8.2f} {text}\n")


class Programs:
    """Starts programs of ``lab.baselines`` for one job, from one fork server, with logs in ``folder``."""

    def __init__(self, job: DiLoCoJob, job_directory: Path, folder: Path, step_seconds: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        job_file = folder / "job.json"
        write_job(job, job_file)
        threads = threads_each(len(os.sched_getaffinity(0)), job.spec.slots)
        env = {
            **base_environment(os.environ, threads),
            "DILOCO_JOB_FILE": str(job_file),
            "DILOCO_JOB_DIRECTORY": str(job_directory),
            "DILOCO_WORKDIR": str(folder),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        if step_seconds:
            env[VARIABLE] = f"{step_seconds:g}"
        self._server = ForkServerClient(env, job_directory, folder / "forkserver.log", [str(FORK_SERVER)])

    async def start(self, settings: BaselineSettings, env: dict[str, str] | None = None) -> Forked:
        """Raises ArmError."""
        name = f"{settings.program}-{settings.learner}"
        try:
            return await self._server.spawn(name, {**(env or {}), **settings.to_environment()}, self.log(name))
        except StartError as error:
            raise ArmError(str(error)) from error

    async def run(self, settings: BaselineSettings) -> None:
        """Run one to its end. Raises ArmError unless it ends with 0."""
        process = await self.start(settings)
        try:
            how = await asyncio.wait_for(process.wait(), PROGRAM_SECONDS)
        except TimeoutError as error:
            raise ArmError(f"{settings.program} did not end in {PROGRAM_SECONDS:g} s") from error
        if how.code != 0:
            log = self.log(process.name)
            end = "\n".join(tail(log, 8))
            raise ArmError(f"{settings.program} ended with {how}; the end of {log}:\n{end}")

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    async def close(self) -> None:
        """End all that is left."""
        self._server.kill()
        await self._server.close()


async def calibrate(job: DiLoCoJob, job_directory: Path, folder: Path) -> dict[str, Any]:
    """``cpu_seconds`` and ``tokens`` of one learner's step on this machine. Raises ArmError."""
    programs = Programs(job, job_directory, folder, 0.0)
    settings = BaselineSettings("calibrate", str(folder))
    try:
        await programs.run(settings)
    finally:
        await programs.close()
    found: dict[str, Any] = json.loads(settings.calibration.read_text(encoding="utf-8"))
    return found


async def run_baseline(name: str, plan: Comparison, folder: Path, tell: Tell) -> Record:
    """Train by the baseline ``name`` (``plan.BASELINES``) for the comparison's time, in ``folder``, which is emptied
    first. Raises ArmError."""
    shutil.rmtree(folder, ignore_errors=True)
    programs = Programs(plan.job, plan.job_file.absolute().parent, folder, plan.pace.step_seconds)
    memory = Path(tempfile.mkdtemp(prefix="diloco-ddp-", dir=MEMORY if MEMORY.is_dir() else None))
    try:
        run = _BaselineRun(plan, programs, memory, tell)
        served = SERVED.get(name)
        await run.train(run.keep_rigid() if served is None else run.keep_served(*served))
        await programs.run(replace(run.settings, program="score"))
        return run.record()
    finally:
        await programs.close()
        shutil.rmtree(memory, ignore_errors=True)


class _BaselineRun:
    def __init__(self, plan: Comparison, programs: Programs, memory: Path, tell: Tell) -> None:
        self.settings = BaselineSettings(
            "rank",
            str(programs.folder),
            str(memory),
            learners=plan.learners,
            stop_seconds=plan.seconds,
            score_tokens=plan.score_tokens,
            mtbf_seconds=plan.mtbf_seconds,
        )
        self._plan = plan
        self._programs = programs
        self._tell = tell
        self._workers = [worker for worker in worker_specs(plan.job) if worker.learner is not None]
        self._machines = {
            worker.name: Machine(worker.learner, self.settings)
            for worker in self._workers
            if worker.learner is not None
        }
        self._view = BaselineView(programs.folder / "events.log")
        self._injector = Injector(
            self._view,
            self._machines,
            self._machines,
            self._workers,
            schedule=FaultSchedule(plan.schedule),
            seed=plan.job.spec.seed,
        )
        self._meter = CpuMeter(os.getpid())
        self._starts = 0

    # -------------------------------------------------------------- the run

    async def train(self, keep: Coroutine[Any, Any, None]) -> None:
        """Start and restart by ``keep`` until the job has had its time. Raises ArmError."""
        keeping = asyncio.ensure_future(keep)
        try:
            await self._follow(keeping)
        finally:
            keeping.cancel()
            await asyncio.wait([keeping], timeout=5.0)
            self._injector.close()
            for machine in self._machines.values():
                machine.signal(signal.SIGKILL)

    async def _follow(self, keeping: asyncio.Future[None]) -> None:
        loop = asyncio.get_running_loop()
        begun, next_sample = loop.time(), 0.0
        while not self.settings.ended.exists():
            if keeping.done():
                keeping.result()
                raise ArmError(f"the ranks ended before their time; see the logs in {self._programs.folder}")
            if self._view.started is None:
                if self.settings.started.exists():
                    self._view.started = float(json.loads(self.settings.started.read_text(encoding="utf-8")))
                    self._injector.merged()
                elif loop.time() > begun + START_SECONDS:
                    raise ArmError(f"no step within {START_SECONDS:g} s; see the logs in {self._programs.folder}")
            elif self._view.elapsed > self._plan.seconds + 2 * self._plan.pace.step_seconds:
                return  # nobody trained when its time was over
            self._injector.step()
            if loop.time() >= next_sample:
                next_sample = loop.time() + SAMPLE_SECONDS
                self._meter.sample()
                self._tell(self._view.elapsed)
            await asyncio.sleep(POLL_SECONDS)

    def _fit(self, name: str) -> bool:
        """Whether a machine can start its process: it is there, goes, and has a link."""
        return self._machines[name].linked and not self._injector.away_seconds(name) and not self._injector.paused(name)

    def _count_start(self, machines: int = 1) -> None:
        """A start of all machines, or of one of so many. Raises ArmError where starts are of no use."""
        made = sum(len(read_rows(self.settings.steps(machine.index))) for machine in self._machines.values())
        self._starts = 1 if made > self._view.greatest_step else self._starts + 1
        self._view.greatest_step = made
        if self._starts > MOST_VAIN_STARTS * machines:
            raise ArmError(f"{self._starts} starts made no step; see the logs in {self._programs.folder}")

    # -------------------------------------------------------------- rigid

    async def keep_rigid(self) -> None:
        """All ranks or none. Raises ArmError."""
        while True:
            while not all(map(self._fit, self._machines)):
                await asyncio.sleep(POLL_SECONDS)
            self._count_start()
            port = _free_port()
            for machine in self._machines.values():
                env = {"RANK": machine.index, "WORLD_SIZE": len(self._machines), "MASTER_ADDR": "127.0.0.1"}
                told = replace(self.settings, learner=machine.index)
                machine.process = await self._programs.start(
                    told, {key: str(value) for key, value in {**env, "MASTER_PORT": port}.items()}
                )
            waits = [asyncio.ensure_future(m.process.wait()) for m in self._machines.values() if m.process]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self.settings.ended.exists():
                await asyncio.sleep(60.0)  # who follows sees it and ends this
            self._view.show_event("a rank ended: all start again")
            for machine in self._machines.values():
                machine.signal(signal.SIGKILL)
            await asyncio.wait(waits, timeout=10.0)

    # -------------------------------------------------------------- elastic, torchft

    async def keep_served(self, server: str, program: str) -> None:
        """``program`` on each machine that is there, and ``server``, where they meet. Raises ArmError."""
        serving = await self._programs.start(replace(self.settings, program=server))
        while not self.settings.store_address.exists():
            if serving.ended.done():
                raise ArmError(f"the {server} ended; see {self._programs.log(serving.name)}")
            await asyncio.sleep(POLL_SECONDS)
        address = json.loads(self.settings.store_address.read_text(encoding="utf-8"))
        await asyncio.gather(*(self._keep_program(name, program, address) for name in self._machines))

    async def _keep_program(self, name: str, program: str, store: str) -> None:
        machine = self._machines[name]
        while True:
            while not self._fit(name):
                await asyncio.sleep(POLL_SECONDS)
            self._count_start(len(self._machines))
            told = replace(self.settings, program=program, learner=machine.index, store=store)
            machine.process = await self._programs.start(told)
            await machine.process.wait()
            self._view.show_event(f"the {program} of {name} ended")

    # -------------------------------------------------------------- the record

    def record(self) -> Record:
        """Raises ArmError if there is nothing."""
        rows = {machine.index: read_rows(self.settings.steps(machine.index)) for machine in self._machines.values()}
        scores = json.loads(self.settings.scores.read_text(encoding="utf-8"))
        if not scores or self._view.started is None:
            raise ArmError(f"it came to no step; see the logs in {self._programs.folder}")
        told = [(hit.action, hit.target, hit.time, hit.duration) for hit in self._injector.done]
        cores = len(os.sched_getaffinity(0))
        return Record(
            [StepEnd(learner, row["time"]) for learner, own in rows.items() for row in own],
            hits_of(told, list(self._machines)),
            self._view.started,
            int(scores[-1][0]),
            trained_tokens=sum(int(row["tokens"]) for own in rows.values() for row in own),
            bytes=sum(int(row["bytes"]) for own in rows.values() for row in own),
            scores=[(int(tokens), float(at), float(loss)) for tokens, at, loss in scores if loss is not None],
            own={},
            cpu=lambda start, end: self._meter.share(start, end, cores),
        )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
