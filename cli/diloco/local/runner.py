"""Runs a job's processes on this machine from the first start to the report.

One task per process keeps it running: start, wait, ask the supervisor what its end means, start again. One task reads
the syncer's status twice a second; phases, chaos, metrics and the screen follow from it. Whatever decides how the run
ends sets the outcome once; then all processes are ended, the report is completed and written.

Ends. *Complete* and *failed* come from the syncer's phase, failed also from the supervisor. Ctrl-C (and SIGTERM,
SIGHUP) asks the syncer to interrupt: learners offer their work and leave, the syncer makes its checkpoint, and the run
ends with 130; a second one, a second or more later, kills everything at once. If the runner itself is killed the kernel
kills its processes (launch.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from diloco.console import CommandError
from diloco.local.chaos.injector import Injector
from diloco.local.chaos.proxy import Proxy
from diloco.local.chaos.schedule import Fault, FaultSchedule
from diloco.local.metrics_log import MetricsLog
from diloco.local.outcome import OUTCOMES, REFUSED, RunOutcome, RunResult, ended_phase
from diloco.local.screen import RunView, Screen
from diloco.local.watch import StatusWatch
from diloco.local.worker_start import WorkerStarter
from diloco.processes.data_found import DataFound
from diloco.processes.exit_errors import ExitError, ExitErrors
from diloco.processes.launch import SAME_SIGNAL_SECONDS, Child, ForkServerClient, Process, StartError, end_all
from diloco.processes.memory_kills import memory_need_text
from diloco.processes.supervisor import Abandon, Exit, Fail, Finished, Kind, Restart, Supervisor, describe_end
from diloco.processes.syncer_ports import ANY, SyncerPorts
from diloco.processes.unjoined import UnjoinedLearners, unjoined_text
from diloco.processes.watchdog import Watchdog, peak_rss_bytes, progress
from diloco.processes.workdir import Workdir
from diloco.processes.worker_specs import (
    ServeOptions,
    WorkerSpec,
    base_environment,
    served_worker_specs,
    syncer_command,
    syncer_environment,
    threads_each,
    worker_specs,
)
from diloco.syncer_client import SyncerClient, SyncerError
from diloco_protocol.documents import Report
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.vocabulary import ENDED_PHASES, ControlMethod, JobPhase, SyncerExit

POLL_SECONDS = 0.5
POLL_CHAOS_SECONDS = 0.1  # while faults are still to come
METRICS_SECONDS = 1.0
DRAIN_SECONDS = 10.0  # after Ctrl-C, without any progress of learners that offer their work and a syncer that ends
MAX_DRAIN_SECONDS = 600.0
LEAVE_SECONDS = 10.0  # after the job's end, for processes to leave by themselves
TERM_SECONDS = 3.0  # between SIGTERM and SIGKILL
MAX_PAUSE_SECONDS = 3.0  # between two tries to tell the syncer of a process's end
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
        learners = job.spec.slots + sum(region.spares for region in job.spec.regions)
        threads = threads_each(len(os.sched_getaffinity(0)), learners)
        self._env = base_environment(os.environ, threads)
        self._forkserver = ForkServerClient(
            {**self._env, "OPENBLAS_NUM_THREADS": "1", "DILOCO_JOB_FILE": str(workdir.job)},
            job_directory,
            workdir.log("forkserver"),
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
        sync = ANY if serving is None else serving.listen
        self._ports = SyncerPorts(sync, http=http, sync_is_known=serving is not None)
        self.watch = StatusWatch(
            self.syncer,
            self.view,
            screen,
            self.supervisor,
            self._workers,
            workdir.store,
            lambda: self.injector.merged(),
        )
        self._starter = WorkerStarter(
            job,
            workdir,
            job_directory,
            self._workers,
            self._forkserver,
            self._env,
            self.proxies,
            self.watch.process_ids,
            serving,
        )
        self.injector = Injector(
            self.watch, self.running, self.proxies, self._workers, FaultSchedule(schedule), job.spec.seed
        )
        self._data_found = DataFound(workdir.path)
        self._watchdog = Watchdog()
        self._need = ""  # of memory, in words, where it is known before the start
        self._errors = ExitErrors(workdir.log, self._memory_need)
        self._log_begins: dict[str, int] = {}  # where in its log the process that was started last begins
        self._unjoined = UnjoinedLearners()
        self._killed_syncer = False  # this one, because it did not answer
        self._complete_already = False
        self._begun = time.monotonic()
        self._peak_rss = 0
        self._stopping = False
        self._interrupts = 0
        self._interrupted_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._outcome: asyncio.Future[RunOutcome] | None = None

    # -------------------------------------------------------------- the run

    async def run(self, starting: str, check: Check | None = None) -> RunResult:
        """From the first start to the last process's end. ``starting``: said once nothing keeps the job from it.
        ``check``: whether the job can run here, asked of the
        worker through the fork server; it raises CommandError before the syncer is started, and says what memory the
        job needs."""
        loop = asyncio.get_running_loop()
        self._outcome = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)
        metrics_log = MetricsLog(self.workdir.metrics_file, self.workdir.metrics, self.workdir.tensorboard)
        try:
            self._spawn(self._follow_job(metrics_log, starting, check))
            outcome = await self._outcome
            await self._wait_for_exits(outcome)
            for fault in self.injector.waiting:
                self.screen.event(f"chaos: {fault.text} was never reached: the job ended first", "yellow")
        finally:
            self._stopping = True
            await self._cancel_tasks()
            await self._end_processes()
            for proxy in self.proxies.values():
                await proxy.close()
            await self.syncer.close()
            with contextlib.suppress(OSError):  # a full disk must not hide how the run ended
                metrics_log.close()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)  # only the report is left to write
        return RunResult(
            outcome,
            self.watch.report or self._stored_report(),
            self.view.status,
            self.injector.done,
            self.watch.events,
            self.supervisor.restarts.get("syncer", 0),
            self._peak_rss,
            time.monotonic() - self._begun,
            self._complete_already,
        )

    async def _follow_job(self, metrics_log: MetricsLog, starting: str, check: Check | None) -> None:
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
        self.screen.event(starting, "bold")
        with contextlib.suppress(FileNotFoundError):
            self.workdir.address.unlink()  # an earlier run's
        self._spawn(self._keep_syncer())
        while not await self._poll():
            why = self._reason_to_kill_syncer()
            if why:
                self._decide(RunOutcome("failed", 1, why, "syncer"))
                return
            await asyncio.sleep(0.05)
        if (address := self.syncer.address()) is not None:
            self.screen.event(f"status page: http://{address['http']}/")
        if self.watch.ended:
            self._complete_already = self.watch.phase == JobPhase.COMPLETE
            self.screen.event(
                f"the job is {self.watch.phase} already; to train it further raise training.stop,"
                " to begin anew give another --workdir",
                "bold",
            )
            while not (await self._poll() and self.watch.is_settled):
                await asyncio.sleep(POLL_SECONDS)
            return
        for worker in self._workers:
            self._spawn(self._keep_worker(worker))
        next_metrics = 0.0
        while True:
            self.injector.step()
            for text, style in self._data_found.news():
                self.screen.event(text, style)
            if time.monotonic() >= next_metrics:
                next_metrics = time.monotonic() + METRICS_SECONDS
                try:
                    metrics_log.write(self.view.status if self.view.serving else None)
                    if self.view.serving:  # `diloco status` has figures of this run now: the report before is stale
                        self.workdir.report.unlink(missing_ok=True)
                except OSError as error:  # a full disk: the job's own state has its own handling
                    next_metrics = float("inf")
                    self.screen.event(f"no more metrics are written: {error}", "red")
            await asyncio.sleep(POLL_CHAOS_SECONDS if self.injector.waiting else POLL_SECONDS)
            if not await self._poll() and (why := self._reason_to_kill_syncer()):
                self.screen.event(f"{why}; it is killed", "red")
                self.running["syncer"].signal(signal.SIGKILL)
                self._killed_syncer = True
                self._watchdog.on_excused(time.monotonic())  # until it is gone

    async def _preload(self, check: Check | None = None) -> bool:
        """Load the libraries and check the job; False: the run is over."""
        try:
            await self._forkserver.load()
            if check is not None:
                self._need = await check(self._forkserver)
            return True
        except CommandError as error:
            self._decide(RunOutcome(REFUSED, error.code, str(error)))
        except (StartError, OSError) as error:
            self._decide(RunOutcome("failed", 1, str(error), "forkserver"))
        return False

    async def _poll(self, now: bool = False) -> bool:
        """Read the syncer's status, False if it does not answer; an ended phase ends the run. ``now``: one of before
        this call will not do."""
        answered = await self.watch.poll(now)
        if answered:
            self._watchdog.on_answered(time.monotonic())
        self._sample_rss()
        if answered:
            self._tell_unjoined()
        if answered and self.watch.is_settled:
            self._decide(self._end_outcome(self.watch.phase))
        return answered

    def _tell_unjoined(self) -> None:
        learners = [one.name for one in self._workers if one.kind is Kind.LEARNER and one.name in self.running]
        running = {name: self.watch.process_ids[name] for name in learners}
        for name in self._unjoined.find(time.monotonic(), running, self.view.status):
            self.screen.event(unjoined_text(name, self.workdir.log(name)), "yellow")

    def _end_outcome(self, phase: str) -> RunOutcome:
        """How the run ends with the syncer's last phase."""
        outcome, code = OUTCOMES.get(phase, ("failed", 1))
        output = self.watch.output
        if phase == JobPhase.COMPLETE and output is not None and output.state == "failed":
            return RunOutcome(outcome, 1, f"the merged model was not written to {output.uri}: {output.message}")
        note = self.supervisor.vain_replacements() if outcome != "complete" else ""
        return RunOutcome(outcome, code, self.watch.end_message if code else "", note=note)

    def _reason_to_kill_syncer(self) -> str:
        """Why the syncer that runs and does not answer is of no use any more; empty: it may be yet."""
        process = self.running.get("syncer")
        if process is None:
            return ""
        if self.injector.paused("syncer"):
            self._watchdog.on_excused(time.monotonic())
        return self._watchdog.check(time.monotonic(), progress(process.pid))

    def _sample_rss(self) -> None:
        """The syncer's peak resident memory, which the kernel forgets with the process."""
        if (process := self.running.get("syncer")) is not None:
            self._peak_rss = max(self._peak_rss, peak_rss_bytes(process.pid))

    def _sync_address(self) -> str | None:
        address = self.syncer.address()
        return None if address is None else str(address["sync"])

    # -------------------------------------------------------------- processes

    async def _keep_syncer(self) -> None:
        """Keep the syncer running; after a restart it listens where it did before."""
        while not self._stopping:
            self._ports.recall(self.syncer.address())
            ports = self._ports
            command = syncer_command(self.workdir, ports.sync, ports.control, ports.http, self._serving)
            self._killed_syncer = False
            self._begin_log("syncer")
            try:
                env = syncer_environment(self._env, os.environ)
                process: Process = await Child.start("syncer", command, env, self.workdir.log("syncer"))
            except StartError as error:
                self._decide(RunOutcome("failed", 1, str(error)))
                return
            self._watchdog.on_started(time.monotonic())
            self.running["syncer"] = process
            how = await process.wait()
            self.running.pop("syncer", None)
            on_purpose = self.injector.ended("syncer", time.time()) or self._killed_syncer
            if how.code in (SyncerExit.OK, SyncerExit.FAILED) and (phase := self._last_phase(how)) is not None:
                self._decide(self._end_outcome(phase))
                return
            if how.code == SyncerExit.CONFIGURATION and self._ports.forget():
                continue
            why = None if on_purpose else self._errors.find("syncer", Kind.SYNCER, how)
            if not await self._apply_restart_decision(WorkerSpec("syncer", Kind.SYNCER, "", 0), how, why):
                return

    def _begin_log(self, name: str) -> None:
        """A process is about to be started: what it writes comes after what those before it wrote."""
        self._errors.begin(name)
        try:
            self._log_begins[name] = self.workdir.log(name).stat().st_size
        except OSError:
            self._log_begins[name] = 0

    def _last_phase(self, how: Exit) -> str | None:
        """The phase in which a syncer that has ended by itself ended the job; None: it was only asked to stop, or its
        own end was not the job's."""
        if (report := self._stored_report()) is not None:
            self.watch.report = report  # its last word: what was heard before may be older
        failed = how.code == SyncerExit.FAILED
        last = self.watch.phase if report is None else ended_phase(report)
        if last in ENDED_PHASES and (last == JobPhase.FAILED) == failed:
            return last
        return JobPhase.SUSPENDED if self._interrupts and not failed else None

    def _stored_report(self) -> Report | None:
        """The report that the last syncer left if it ended the job: it may be gone before anyone could ask it."""
        address = self.syncer.address()
        return None if address is None else self.workdir.last_report(int(address["epoch"]))

    async def _keep_worker(self, worker: WorkerSpec) -> None:
        while not self._stopping:
            how: Exit
            error: ExitError | None
            self._begin_log(worker.name)
            self.view.notes.pop(worker.name, None)
            try:
                process = await self._starter.start(worker)
            except (StartError, OSError) as failed:
                self.screen.event(str(failed), "red")
                how, error = Exit(code=1), ExitError(str(failed))
            else:
                self.running[worker.name] = process
                how = await process.wait()
                self.running.pop(worker.name, None)
                on_purpose = self.injector.ended(worker.name, time.time())
                error = None
                if not on_purpose:
                    if how.code == 0:
                        await self._poll(now=True)  # it may have joined since the last look
                    joined = self.watch.has_joined(self.watch.process_ids[worker.name])
                    error = self._errors.find(worker.name, worker.kind, how, joined)
                if worker.kind is Kind.LEARNER and not self._stopping:
                    self._spawn(self._report_ended(worker, self.watch.process_ids[worker.name], how, error))
            if not await self._apply_restart_decision(worker, how, error):
                return

    async def _apply_restart_decision(self, worker: WorkerSpec, how: Exit, error: ExitError | None) -> bool:
        """Do what the supervisor says about an end; True: start it again now."""
        if (how.code == 0 or error is not None) and worker.kind is not Kind.SYNCER:
            # It may have left because the job ends, which we have not heard yet, or there may have been a merge.
            await self._poll(now=True)
        text = "" if error is None else error.text
        decision = self.supervisor.ended(
            worker.name,
            worker.kind,
            how,
            time.monotonic(),
            wanted=self._is_still_needed(worker, how),
            error=text,
            answered=self._watchdog.answers,
            dispensable=worker.kind is Kind.LEARNER and self._is_dispensable(worker),
        )
        if isinstance(decision, Restart):
            delay = max(0.0, decision.at - time.monotonic(), self.injector.away_seconds(worker.name))
            again = f"again in {delay:.1f} s" if delay > 0 else "again at once"
            said = self._describe_repeated(worker, error)
            self.screen.event(
                f"{worker.name} ended ({describe_end(worker.kind, how)}{said}), starting it {again}", "yellow"
            )
            self._errors.show(worker.name, error, self.screen)
            self.view.notes[worker.name] = "starting"
            await asyncio.sleep(delay)
            return not self._stopping
        if isinstance(decision, Abandon):
            self._errors.show(worker.name, error, self.screen)
            self.screen.event(f"{decision.message}; see {self.workdir.log(worker.name)}", "red")
        elif isinstance(decision, Fail):
            said = decision.message if text in decision.message else f"{decision.message}: {text}"
            self._decide(RunOutcome("failed", decision.exit_code, said, worker.name))
        elif isinstance(decision, Finished) and not self._stopping and (how.signal is not None or how.code):
            self.screen.event(f"{worker.name} ended ({describe_end(worker.kind, how)})", "yellow")
            self._errors.show(worker.name, error, self.screen)
        return False

    def _describe_repeated(self, worker: WorkerSpec, error: ExitError | None) -> str:
        """Of an error that was shown before: what it was, and how often its process was replaced by now."""
        if error is None or not self._errors.was_shown(error):
            return ""
        text = f": {error.brief}"
        times, most = self.supervisor.since_merge.get(worker.name, 0), self.supervisor.max_replacements
        return f"{text}; replacement {times} of at most {most} without a merge" if times else text

    def _memory_need(self) -> str:
        status = self.view.status
        return self._need or memory_need_text(self.job.spec, status.parameters if status is not None else 0)

    def _is_dispensable(self, worker: WorkerSpec) -> bool:
        """Whether a merge may come without this learner: enough others are in the quorum, or have not failed and may
        yet join."""
        status = self.view.status
        required = self.job.spec.quorum if status is None else status.quorum.required
        others = [one.name for one in self._workers if one.kind is Kind.LEARNER and one.name != worker.name]
        return sum(self._is_in_quorum(name) or not self.supervisor.has_failed(name) for name in others) >= required

    def _is_in_quorum(self, name: str) -> bool:
        slot = self.watch.slot_of(name) if name in self.running else None
        return slot is not None and slot.in_quorum

    def _is_still_needed(self, worker: WorkerSpec, how: Exit) -> bool:
        """Whether the job still needs a process that ended so."""
        if self._stopping or self._interrupts or self.watch.is_over:
            return False
        if worker.kind is Kind.LEARNER:
            # In deterministic mode a learner leaves by itself when its share is done.
            done = self.job.spec.sync.deterministic and how.code == 0
            return not self.watch.closing and not done
        return True

    async def _report_ended(self, worker: WorkerSpec, process_id: str, how: Exit, error: ExitError | None) -> None:
        """Tell the syncer at once; it would find out by silence, but later."""
        end = describe_end(worker.kind, how)
        body = {
            "region": worker.region,
            "ordinal": worker.ordinal,
            "process": process_id,
            "reason": end if error is None or error.brief == end else f"{end}: {error.brief}",
        }
        pause = 0.2
        while True:  # until the run ends: the syncer may be down, and its successor cannot know of this end
            try:
                await self.syncer.call(ControlMethod.PROCESS_ENDED, body, seconds=2.0)
                return
            except SyncerError:
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
                pause = min(2 * pause, MAX_PAUSE_SECONDS)

    # -------------------------------------------------------------- the end

    def _decide(self, outcome: RunOutcome) -> None:
        assert self._outcome is not None
        if not self._outcome.done():
            begin = self._log_begins.get(outcome.log_of, 0)
            self._outcome.set_result(dataclasses.replace(outcome, log_begin=begin))

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        if self._interrupts and now < self._interrupted_at + SAME_SIGNAL_SECONDS:
            return
        self._interrupts += 1
        self._interrupted_at = now
        if self._interrupts == 1:
            self.screen.event(
                "interrupted: learners offer their work, then a checkpoint"
                " (again after a second or more: stop at once)",
                "bold",
            )
            self._spawn(self._interrupt())
        else:
            self.screen.event("stopping at once", "bold red")
            self._stopping = True
            self._kill_all()
            self._decide(RunOutcome("interrupted", 130))

    async def _interrupt(self) -> None:
        await self.watch.poll(now=True)
        started = self.watch.phase not in ("", JobPhase.WAITING)
        try:
            if not started:
                raise SyncerError("nothing has been trained yet")
            await self.syncer.call(ControlMethod.ANNOUNCE, {"phase": "interrupted", "message": "stopped by the user"})
            await self._wait_for_drain()
            if self.watch.is_over:
                return  # it drained; a process that does not leave is waited for elsewhere
            self.screen.event(
                f"the job did not drain: nothing changed for {DRAIN_SECONDS:.0f} s; its last durable state is kept",
                "red",
            )
        except SyncerError:
            pass  # there is nobody to drain to; what is durable stays
        self._decide(RunOutcome("interrupted", 130, note=self.supervisor.vain_replacements()))

    async def _wait_for_drain(self) -> None:
        """Until the job is over, or its drain does not progress any more."""
        began = changed_at = time.monotonic()
        before = None
        while not self.watch.is_over and time.monotonic() < min(changed_at + DRAIN_SECONDS, began + MAX_DRAIN_SECONDS):
            if (seen := self.watch.drain_progress) != before:
                before, changed_at = seen, time.monotonic()
            await asyncio.sleep(0.1)

    async def _wait_for_exits(self, outcome: RunOutcome) -> None:
        """Let the processes go by themselves, where the syncer has told them to."""
        if outcome.outcome == "failed" and outcome.log_of and "syncer" in self.running and not self._stopping:
            with contextlib.suppress(SyncerError):
                await self.syncer.call(
                    ControlMethod.ANNOUNCE, {"phase": "failed", "message": outcome.message}, seconds=2.0
                )
        if self.watch.report is None and "syncer" in self.running and not self._stopping:
            await self.watch.fetch_report()
        deadline = time.monotonic() + (LEAVE_SECONDS if self.watch.is_over else 0.0)
        while self.running and time.monotonic() < deadline and not self._stopping:
            await asyncio.sleep(0.02)

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

    def _kill_all(self) -> None:
        for process in self.running.values():
            process.signal(signal.SIGKILL)
        self._forkserver.kill()

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._decide(RunOutcome("failed", 1, f"the runner failed: {type(error).__name__}: {error}"))
            asyncio.get_running_loop().call_exception_handler({"message": "runner task failed", "exception": error})
