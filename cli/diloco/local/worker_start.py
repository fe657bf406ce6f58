"""How a run on this machine starts one of its workers: its environment, its device, and the program that it is."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diloco.local.chaos.proxy import Proxy
from diloco.processes.launch import Child, ForkServerClient, Process, ranks_command
from diloco.processes.supervisor import Kind
from diloco.processes.workdir import Workdir
from diloco.processes.worker_specs import ServeOptions, WorkerSpec, gpus, gpus_of, worker_environment
from diloco_protocol.spec.job import DiLoCoJob


@dataclass(kw_only=True)
class WorkerStarter:
    """Starts workers of one run: forked from the fork server where they run the built-in program, else as children.

    ``proxies``: by worker's name, those through which a worker reaches the syncer; they may be filled later.
    ``process_ids`` is filled here: by worker's name, DILOCO_PROCESS of its newest process."""

    job: DiLoCoJob
    workdir: Workdir
    job_directory: Path
    workers: Sequence[WorkerSpec]
    forkserver: ForkServerClient
    environment: Mapping[str, str]
    proxies: Mapping[str, Proxy]
    process_ids: dict[str, str]
    serving: ServeOptions | None
    _gpus: list[str] = field(default_factory=lambda: gpus(os.environ, os.listdir("/dev")))

    async def start(self, worker: WorkerSpec) -> Process:
        """A new process of this worker, with an id of its own. Raises StartError, OSError."""
        process_id = uuid.uuid4().hex
        self.process_ids[worker.name] = process_id
        env = self._worker_environment(worker, process_id)
        log = self.workdir.log(worker.name)
        spec = self.job.spec
        command = spec.evaluator.command if worker.kind is Kind.EVALUATOR else spec.learners.command
        if command is None and worker.ranks == 1:
            return await self.forkserver.spawn(worker.name, env, log)
        program = ranks_command(command, worker.ranks)
        return await Child.start(
            worker.name, program, {**self.environment, **env}, log, cwd=self.job_directory, guard=True
        )

    def _worker_environment(self, worker: WorkerSpec, process_id: str) -> dict[str, str]:
        proxy = self.proxies.get(worker.name)
        gpu = None
        if len(self._gpus) > 1 and self.job.spec.training.device != "cpu":
            gpu = gpus_of(worker, self.workers, self._gpus)
        address = proxy.address if proxy else None
        env = worker_environment(worker, process_id, self.workdir, self.job_directory, syncer=address, gpu=gpu)
        if self.serving is None or self.serving.credentials is None:
            env["DILOCO_JOIN_TOKEN_FILE"] = str(self.workdir.join_token)
        elif self.serving.evaluator_credentials is not None:
            env["DILOCO_CREDENTIALS"] = str(self.serving.evaluator_credentials)
        return env
