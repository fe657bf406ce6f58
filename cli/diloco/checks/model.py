"""Asks the worker's own code about a job's model, tokenizer and device, in a process that loads torch for it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from diloco.console import print_text
from diloco.packages import absent_packages, absent_text
from diloco.processes.loading import CURE, LOOK_SECONDS, SILENT_SECONDS, LoadWatch, is_loading
from diloco.processes.worker_specs import base_environment
from diloco_protocol.common.files import read_bounded, write_whole
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import job_to_json
from diloco_worker.training.findings import VARIABLE, JobFindings

MAX_BYTES = 16 << 20
NO_PROGRESS = f"model and tokenizer: nothing was done for {SILENT_SECONDS:.0f} s; {CURE}"


def check_model(
    job: DiLoCoJob, directory: Path, tell: Callable[[str], None] = lambda line: print_text(line, file=sys.stderr)
) -> JobFindings:
    """What the worker finds; ``directory`` is the job file's. Where it cannot be asked, what is unchecked says why.
    ``tell`` says a line while that takes long."""
    if job.spec.training.model is None:
        return JobFindings(unchecked=("the model, which the job's own program builds",))
    if absent := absent_packages(["worker"]):
        return JobFindings(unchecked=(f"model, tokenizer and device: {absent_text(absent)}",))
    with tempfile.TemporaryDirectory(prefix="diloco-check-") as folder:
        written, log = Path(folder) / "findings.json", Path(folder) / "log"
        file = Path(folder) / "job.json"
        write_whole(file, job_to_json(job).encode())
        env = {**base_environment(os.environ, 1), **check_environment(file, directory, written)}
        try:
            with (
                log.open("wb") as output,
                subprocess.Popen(
                    [sys.executable, "-m", "diloco_worker"],
                    env=env,
                    cwd=directory,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                ) as process,
            ):
                if not _wait_with_lines(process, tell):
                    return JobFindings(unchecked=(NO_PROGRESS,))
        except OSError as error:
            return JobFindings(unchecked=(f"model, tokenizer and device: {error.strerror or error}",))
        return read_findings(written, log)


def _wait_with_lines(process: subprocess.Popen[bytes], tell: Callable[[str], None]) -> bool:
    """Wait for a process that loads and checks; False: it did nothing for long, and was killed."""
    watch = LoadWatch("checking, which loads torch", time.monotonic())
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_SECONDS)
                return True
            if not is_loading(watch, process.pid, tell):
                return False
    finally:
        process.kill()


def check_environment(job_file: Path, directory: Path, written: Path) -> dict[str, str]:
    """The environment of a worker process that checks the job instead of training."""
    return {"DILOCO_JOB_FILE": str(job_file), "DILOCO_JOB_DIRECTORY": str(directory), VARIABLE: str(written)}


def read_findings(written: Path, log: Path) -> JobFindings:
    """What the process wrote; if it did not, the end of its log is why."""
    try:
        return JobFindings.from_json(read_bounded(written, MAX_BYTES).decode())
    except (OSError, ValueError, KeyError, TypeError):
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        why = lines[-1] if lines else "the worker said nothing"
        return JobFindings(unchecked=(f"model, tokenizer and device: {why}",))
