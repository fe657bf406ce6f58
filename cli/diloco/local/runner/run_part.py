"""What every part of the runner has at hand."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from diloco.local.chaos.injector import Injector
from diloco.local.runner.syncer_health import SyncerHealth
from diloco.local.screen import Screen
from diloco.local.watch import StatusWatch
from diloco.processes.exit_errors import ExitErrors
from diloco.processes.launch import Process
from diloco.processes.supervisor import Supervisor
from diloco.processes.workdir import Workdir
from diloco.syncer_client import SyncerClient
from diloco_protocol.spec.job import DiLoCoJob


@dataclass(kw_only=True)
class RunPart:
    """One run of a job. ``running``: its processes by name, as they are at the moment; who keeps a process running
    fills it. ``spawn`` makes a task that lives as long as the run."""

    job: DiLoCoJob
    workdir: Workdir
    screen: Screen
    supervisor: Supervisor
    syncer: SyncerClient
    watch: StatusWatch
    injector: Injector
    errors: ExitErrors
    health: SyncerHealth
    running: dict[str, Process]
    spawn: Callable[[Coroutine[Any, Any, None]], None]
