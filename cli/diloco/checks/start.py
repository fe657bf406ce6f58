"""The checks of ``diloco run`` before its syncer starts: the fork server, which has torch loaded, asks the worker."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from diloco.checks.memory import estimate_memory, free_memory, memory_shortage, size_line
from diloco.checks.model import NO_PROGRESS, check_environment, read_findings
from diloco.checks.verdict import steps_to_come
from diloco.console import CommandError
from diloco.processes.launch import ForkServerClient
from diloco.processes.loading import LOOK_SECONDS, LoadWatch, is_loading
from diloco.processes.workdir import Workdir
from diloco.validate import problems_text
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import JobError
from diloco_worker.training.findings import JobFindings


@dataclass(frozen=True, slots=True)
class StartCheck:
    """``file``: the job's, as its author named it. ``force``: memory is not looked at. ``tell``: says one line."""

    job: DiLoCoJob
    file: Path
    workdir: Workdir
    force: bool
    tell: Callable[[str], None]

    async def check(self, forkserver: ForkServerClient) -> str:
        """What memory the job needs, in words; empty: it is not known. Raises CommandError if the job cannot run here,
        StartError if the fork server cannot be started. What cannot be checked does not keep a job from being tried."""
        found = await self._ask(forkserver)
        if problems := [*found.wrong, *found.here]:
            raise CommandError(problems_text(JobError(problems, str(self.file))))
        for doubt in found.doubts:
            self.tell(f"warning: {doubt.path}: {doubt.message}")
        for what in found.unchecked:
            self.tell(f"not checked: {what}")
        if found.data_in_part:  # of all else a learner tells it as soon
            self.tell(f"data: {found.data}")
        if found.model is None:
            return ""
        need = estimate_memory(self.job, found.model, found.device)
        self.tell(size_line(found.model, need))
        if found.step_tokens is not None:
            when = "in all" if self.workdir.has_begun() else "to come"
            self.tell(f"{when}: {steps_to_come(self.job, found.steps, found.step_tokens)}")
        shortage = "" if self.force else memory_shortage(need, free_memory(), found.device_bytes)
        if shortage:
            raise CommandError(f"{shortage}; --force starts it anyway")
        return need.text()

    async def _ask(self, forkserver: ForkServerClient) -> JobFindings:
        with tempfile.TemporaryDirectory(prefix="diloco-check-") as folder:
            written, log = Path(folder) / "findings.json", Path(folder) / "log"
            env = check_environment(self.workdir.job, self.file.absolute().parent, written)
            process = await forkserver.spawn("check", {**env, "DILOCO_WORKDIR": str(self.workdir.path)}, log)
            ended = asyncio.ensure_future(process.wait())
            watch = LoadWatch("checking the model and its data", time.monotonic())
            try:
                while not (await asyncio.wait([ended], timeout=LOOK_SECONDS))[0]:
                    if not is_loading(watch, process.pid, self.tell):
                        return JobFindings(unchecked=(NO_PROGRESS,))
            finally:
                process.signal(9)
                ended.cancel()
            return read_findings(written, log)
