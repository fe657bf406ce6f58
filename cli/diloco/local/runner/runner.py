"""Runs a job's processes on this machine from the first start to the report.

Theory of operation. One task starts the job: it checks that the job can run here, starts the syncer, waits for its
first answer, starts the workers, and then follows the status (``job_follower``). One task for each process keeps it
running (``process_keepers``). Whatever decides how the run ends (``run_end``) does so once. Then processes may leave by
themselves, all tasks are cancelled, what still runs is ended, workers before the syncer, and the result is returned. An
error of a task is the runner's own, and ends the run too. If the runner itself is killed the kernel kills its processes
(``diloco.processes.launch``).

What is still wrong here: the parts share ``running``, which the keepers fill and the others read, and ``view``, which
three write. ``__init__`` makes them in the only order that works, and no type says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from diloco.console import CommandError
from diloco.local.chaos.injector import Injector
from diloco.local.chaos.proxy import Proxy
from diloco.local.chaos.schedule import Fault, FaultSchedule
from diloco.local.metrics_log import MetricsLog
from diloco.local.outcome import REFUSED, RunOutcome, RunResult
from diloco.local.runner.job_follower import POLL_SECONDS, JobFollower
from diloco.local.runner.process_ends import ProcessEnds
from diloco.local.runner.process_keepers import SyncerKeeper, WorkerKeeper
from diloco.local.runner.run_end import RunEnd
from diloco.local.runner.run_part import RunPart
from diloco.local.runner.syncer_health import SyncerHealth
from diloco.local.screen import RunView, Screen
from diloco.local.watch import StatusWatch
from diloco.processes.data_found import DataFound
from diloco.processes.exit_errors import ExitErrors
from diloco.processes.launch import ForkServerClient, Process, StartError, end_all
from diloco.processes.memory_kills import memory_need_text
from diloco.processes.stop_signals import heeded_signals
from diloco.processes.supervisor import Kind, Supervisor
from diloco.processes.syncer_ports import ANY, SyncerPorts
from diloco.processes.workdir import Workdir
from diloco.processes.worker_specs import (
    ServeOptions,
    base_environment,
    served_worker_specs,
    threads_each,
    worker_specs,
)
from diloco.syncer_client import SyncerClient
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.vocabulary import JobPhase

TERM_SECONDS = 3.0  # between SIGTERM and SIGKILL
Check = Callable[[ForkServerClient], Awaitable[str]]


class Runner:
    """One run of a job on this machine; ``run()`` returns how it ended."""

    def __init__(
        self,
        job: DiLoCoJob,
        workdir: Workdir,
        job_directory: Path,
        schedule: Sequence[Fault],
        screen: Screen,
        http: str = ANY,
        serving: ServeOptions | None = None,
    ) -> None:
        """``serving``: learners are other machines' (`diloco syncer serve`)."""
        self.job = job
        self.workdir = workdir
        self.screen = screen
        self._serving = serving
        self._workers = worker_specs(job) if serving is None else served_worker_specs(job, serving)
        ranks = sum(worker.ranks for worker in worker_specs(job) if worker.kind is Kind.LEARNER)
        env = base_environment(os.environ, threads_each(len(os.sched_getaffinity(0)), ranks))
        self._forkserver = ForkServerClient(
            {**env, "OPENBLAS_NUM_THREADS": "1", "DILOCO_JOB_FILE": str(workdir.job)},
            job_directory,
            workdir.log("forkserver"),
            tell=screen.event,
        )
        policy = job.spec.failure_policy
        self.supervisor = Supervisor(
            policy.max_replacements, random.Random(), [(frozenset(r.exit_codes), r.action) for r in policy.rules]
        )
        self.syncer = SyncerClient(workdir.address, workdir.control_key)
        stop = job.spec.training.stop
        self.view = RunView(job.metadata.name, (stop.kind, stop.limit))
        self.running: dict[str, Process] = {}
        self.proxies: dict[str, Proxy] = {}
        self._need = ""  # of memory, in words, where it is known before the start
        self._complete_already = False
        self._begun = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()
        errors = ExitErrors(workdir.log, self._memory_need)
        # Each part is made of those above it.
        self.watch = StatusWatch(
            self.syncer,
            self.view,
            screen,
            self.supervisor,
            workers=self._workers,
            store=workdir.store,
            on_merge=lambda: self.injector.merged(),
        )
        self.injector = Injector(
            self.watch, self.running, self.proxies, self._workers, schedule=FaultSchedule(schedule), seed=job.spec.seed
        )
        self.health = SyncerHealth(running=self.running, paused=self.injector.paused)
        shared = vars(
            RunPart(
                job=job,
                workdir=workdir,
                screen=screen,
                supervisor=self.supervisor,
                syncer=self.syncer,
                watch=self.watch,
                injector=self.injector,
                errors=errors,
                health=self.health,
                running=self.running,
                spawn=self._spawn,
            )
        )
        self.end = RunEnd(**shared, forkserver=self._forkserver)
        self.follower = JobFollower(**shared, data_found=DataFound(workdir.path), end=self.end)
        poll_now = partial(self.follower.poll, now=True)
        ends = ProcessEnds(**shared, end=self.end, poll_now=poll_now)
        ports = SyncerPorts(ANY if serving is None else serving.listen, http=http, sync_is_known=serving is not None)
        self.syncer_keeper = SyncerKeeper(
            **shared, serving=serving, environment=env, ports=ports, ends=ends, end=self.end
        )
        self.worker_keeper = WorkerKeeper(
            **shared,
            serving=serving,
            environment=env,
            job_directory=job_directory,
            forkserver=self._forkserver,
            proxies=self.proxies,
            ends=ends,
            end=self.end,
            poll_now=poll_now,
        )

    async def run(self, starting: str, check: Check | None = None) -> RunResult:
        """From the first start to the last process's end. ``starting``: said once nothing keeps the job from it.
        ``check``: whether the job can run here, asked of the
        worker through the fork server; it raises CommandError before the syncer is started, and says what memory the
        job needs."""
        loop = asyncio.get_running_loop()
        heeded = heeded_signals()
        for number in heeded:
            loop.add_signal_handler(number, self.end.on_signal, number)
        metrics_log = MetricsLog(self.workdir.metrics_file, self.workdir.metrics, self.workdir.tensorboard)
        try:
            self._spawn(self._carry_out(metrics_log, starting, check))
            outcome = await self.end.wait_for_outcome()
            await self.end.wait_for_exits()
            for fault in self.injector.waiting:
                self.screen.event(f"chaos: {fault.text} was never reached: the job ended first", "yellow")
        finally:
            self.end.stopping = True
            await self._cancel_tasks()
            await self._end_processes()
            for proxy in self.proxies.values():
                await proxy.close()
            await self.syncer.close()
            with contextlib.suppress(OSError):  # a full disk must not hide how the run ended
                metrics_log.close()
            for number in heeded:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)  # only the report is left to write
        return RunResult(
            outcome,
            self.watch.report or self.end.stored_report(),
            self.view.status,
            self.injector.done,
            events=self.watch.events,
            syncer_restarts=self.supervisor.restarts.get("syncer", 0),
            syncer_peak_rss_bytes=self.health.peak_rss,
            wall_seconds=time.monotonic() - self._begun,
            complete_already=self._complete_already,
        )

    async def _carry_out(self, metrics_log: MetricsLog, starting: str, check: Check | None) -> None:
        """Start everything, then follow the syncer's status until the end."""
        if any(fault.action == "cut" for fault in self.injector.waiting):
            for worker in self._workers:
                self.proxies[worker.name] = Proxy(self._sync_address)
                await self.proxies[worker.name].start()
        own = self.job.spec.learners.command is None and self._serving is None
        if own or any(m.kind is Kind.EVALUATOR for m in self._workers):
            if check is None:
                self._spawn(self._preload())
            else:
                self.screen.event(f"checking {self.job.metadata.name}")
                if not await self._preload(check):
                    return
        self.end.has_started = True
        self.screen.event(starting, "bold")
        with contextlib.suppress(FileNotFoundError):
            self.workdir.address.unlink()  # an earlier run's
        self._spawn(self.syncer_keeper.keep())
        while not await self.follower.poll():
            why = self.health.reason_to_kill()
            if why:
                self.end.decide(RunOutcome("failed", 1, why, "syncer"))
                return
            await asyncio.sleep(0.05)
        if (address := self.syncer.address()) is not None:
            self.screen.event(f"status page: http://{address['http']}/")
        if self.watch.ended:
            await self._wait_for_ended_job()
            return
        for worker in self._workers:
            self._spawn(self.worker_keeper.keep(worker))
        await self.follower.follow(metrics_log)

    async def _wait_for_ended_job(self) -> None:
        """The job had ended before this run: say so, and wait for what may still come of it."""
        self._complete_already = self.watch.phase == JobPhase.COMPLETE
        self.screen.event(
            f"the job is {self.watch.phase} already; to train it further raise training.stop,"
            " to begin anew give another --workdir",
            "bold",
        )
        while not (await self.follower.poll() and self.watch.is_settled):
            await asyncio.sleep(POLL_SECONDS)

    async def _preload(self, check: Check | None = None) -> bool:
        """Load the libraries and check the job; False: the run is over."""
        try:
            await self._forkserver.load()
            if check is not None:
                self._need = await check(self._forkserver)
            return True
        except CommandError as error:
            self.end.decide(RunOutcome(REFUSED, error.code, str(error)))
        except (StartError, OSError) as error:
            self.end.decide(RunOutcome("failed", 1, str(error), "forkserver"))
        return False

    def _sync_address(self) -> str | None:
        address = self.syncer.address()
        return None if address is None else str(address["sync"])

    def _memory_need(self) -> str:
        status = self.view.status
        return self._need or memory_need_text(self.job.spec, status.parameters if status is not None else 0)

    # -------------------------------------------------------------- tasks and processes

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.end.decide(RunOutcome("failed", 1, f"the runner failed: {type(error).__name__}: {error}"))
            asyncio.get_running_loop().call_exception_handler({"message": "runner task failed", "exception": error})

    async def _cancel_tasks(self) -> None:
        self.injector.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)

    async def _end_processes(self) -> None:
        """SIGTERM, then SIGKILL; workers before the syncer."""
        for names in ([name for name in self.running if name != "syncer"], ["syncer"]):
            await end_all([self.running[name] for name in names if name in self.running], TERM_SECONDS)
        await self._forkserver.close()
