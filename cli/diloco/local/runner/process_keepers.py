"""Keeps processes running, one task for each: start, wait, find the error, ask what its end means, start again.

Theory of operation. A keeper ends when its process is not to be started again, or when the run ends. Every end of
a process passes through the same steps. It leaves ``running``. If a fault of ``--chaos`` ended it, that is noted,
and it is no error. Else the error is found, by how the process ended and by its log. Then ``process_ends`` decides.

*The syncer.* It listens where it did before, because learners come back to the port that they know. If another program
has taken the port meanwhile it exits with 2, as for a wrong job; then it gets any free ports, once, and nobody counts
that as a replacement. Exit codes 0 and 1 are the job's end only where a report or the last status says the same.

*A worker.* One that left with 0 may have joined since the last look, and whether it ever did makes the difference
between a learner that is done and a program that never asked for batches: so the status is read before that is judged.
The syncer is told of a learner's end at once, with retries until the run ends: it would find out by silence, but later.
A worker is forked from the fork server where it runs the built-in program, else it is a child.

What is still wrong here: a program that exits with 2 for a reason of its own, on ports that were recalled, is started
once more before that is said, because the exit code does not tell the two apart.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from diloco.local.chaos.proxy import Proxy
from diloco.local.outcome import RunOutcome
from diloco.local.runner.process_ends import ProcessEnds
from diloco.local.runner.run_end import RunEnd
from diloco.local.runner.run_part import RunPart
from diloco.processes.exit_errors import ExitError
from diloco.processes.launch import Child, ForkServerClient, Process, StartError, ranks_command
from diloco.processes.supervisor import Exit, Kind, describe_end
from diloco.processes.syncer_ports import SyncerPorts
from diloco.processes.worker_specs import (
    ServeOptions,
    WorkerSpec,
    gpus,
    gpus_of,
    syncer_command,
    syncer_environment,
    worker_environment,
)
from diloco.syncer_client import SyncerError
from diloco_protocol.vocabulary import ControlMethod, SyncerExit

MAX_PAUSE_SECONDS = 3.0  # between two tries to tell the syncer of a process's end


@dataclass(kw_only=True)
class SyncerKeeper(RunPart):
    """``environment`` is that of all processes of the run."""

    serving: ServeOptions | None
    environment: Mapping[str, str]
    ports: SyncerPorts
    ends: ProcessEnds
    end: RunEnd

    async def keep(self) -> None:
        """Keep the syncer running; after a restart it listens where it did before."""
        while not self.end.stopping:
            self.ports.recall(self.syncer.address())
            try:
                process = await self._start()
            except StartError as failed:
                self.end.decide(RunOutcome("failed", 1, str(failed)))
                return
            self.health.on_started()
            self.running["syncer"] = process
            how = await process.wait()
            self.running.pop("syncer", None)
            on_purpose = self.injector.ended("syncer", time.time()) or self.health.was_killed
            if (phase := self.end.last_phase(how)) is not None:
                self.end.decide_by_phase(phase)
                return
            if how.code == SyncerExit.CONFIGURATION and self.ports.forget():
                continue
            error = None if on_purpose else self.errors.find("syncer", Kind.SYNCER, how)
            if not await self.ends.wait_to_restart(WorkerSpec("syncer", Kind.SYNCER, "", 0), how, error):
                self.end.decide_if_over()
                return

    async def _start(self) -> Process:
        ports = self.ports
        command = syncer_command(self.workdir, ports.sync, ports.control, ports.http, serving=self.serving)
        env = syncer_environment(self.environment, os.environ)
        self.errors.begin("syncer")
        return await Child.start("syncer", command, env, self.workdir.log("syncer"))


@dataclass(kw_only=True)
class WorkerKeeper(RunPart):
    """``environment`` is that of all processes of the run. ``proxies``: by worker's name, those through which a worker
    reaches the syncer; they may be filled later. ``poll_now`` reads the syncer's status."""

    serving: ServeOptions | None
    environment: Mapping[str, str]
    job_directory: Path
    forkserver: ForkServerClient
    proxies: Mapping[str, Proxy]
    ends: ProcessEnds
    end: RunEnd
    poll_now: Callable[[], Awaitable[bool]]
    _gpus: list[str] = field(default_factory=lambda: gpus(os.environ, os.listdir("/dev")))

    async def keep(self, worker: WorkerSpec) -> None:
        """Keep this worker running for as long as the job needs it."""
        while not self.end.stopping:
            self.errors.begin(worker.name)
            self.watch.view.notes.pop(worker.name, None)
            how: Exit
            error: ExitError | None
            try:
                process = await self._start(worker)
            except (StartError, OSError) as failed:
                self.screen.event(str(failed), "red")
                how, error = Exit(code=1), ExitError(str(failed))
            else:
                self.running[worker.name] = process
                how = await process.wait()
                self.running.pop(worker.name, None)
                error = await self._find_error(worker, how)
                if worker.kind is Kind.LEARNER and not self.end.stopping:
                    self.spawn(self._report_ended(worker, self.watch.process_ids[worker.name], how, error))
            if not await self.ends.wait_to_restart(worker, how, error):
                return

    async def _start(self, worker: WorkerSpec) -> Process:
        """A new process of this worker, with an id of its own. Raises StartError, OSError."""
        self.watch.process_ids[worker.name] = uuid.uuid4().hex
        env, log = self._environment_of(worker), self.workdir.log(worker.name)
        spec = self.job.spec
        command = spec.evaluator.command if worker.kind is Kind.EVALUATOR else spec.learners.command
        if command is None and worker.ranks == 1:
            return await self.forkserver.spawn(worker.name, env, log)
        program, env = ranks_command(command, worker.ranks), {**self.environment, **env}
        return await Child.start(worker.name, program, env, log, cwd=self.job_directory, guard=True)

    def _environment_of(self, worker: WorkerSpec) -> dict[str, str]:
        process_id, proxy = self.watch.process_ids[worker.name], self.proxies.get(worker.name)
        gpu = None
        if len(self._gpus) > 1 and self.job.spec.training.device != "cpu":
            gpu = gpus_of(worker, self.watch.workers, self._gpus)
        address = proxy.address if proxy else None
        env = worker_environment(worker, process_id, self.workdir, self.job_directory, syncer=address, gpu=gpu)
        if self.serving is None or self.serving.credentials is None:
            env["DILOCO_JOIN_TOKEN_FILE"] = str(self.workdir.join_token)
        elif self.serving.evaluator_credentials is not None:
            env["DILOCO_CREDENTIALS"] = str(self.serving.evaluator_credentials)
        return env

    async def _find_error(self, worker: WorkerSpec, how: Exit) -> ExitError | None:
        """The error that ended a worker; None: none, or a fault of ``--chaos`` did."""
        if self.injector.ended(worker.name, time.time()):
            return None
        if how.code == 0:
            await self.poll_now()  # it may have joined since the last look
        joined = self.watch.has_joined(self.watch.process_ids[worker.name])
        return self.errors.find(worker.name, worker.kind, how, joined)

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
