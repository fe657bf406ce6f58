"""``diloco run --debug``: the job's own program alone, in this terminal, so that breakpoints work.

The program is a learner without its job (``diloco_worker.standalone``): it has the job's batch, seed and stop, and
there is no syncer. It keeps the terminal's input and output, and Ctrl-C reaches it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from diloco.checks.machine import find_absent_programs
from diloco.console import CommandError, print_text
from diloco.packages import require_packages
from diloco.processes.launch import resolve_program
from diloco.validate import problems_text
from diloco_protocol.spec.load import JobError, load_manifest

_KEPT = "DILOCO_LOG_"  # of the environment's own variables: any other one would tell of a job


def debug_program(path: Path, overrides: Sequence[str], seed: int | None) -> int:
    """Run ``learners.command`` of the job in ``path``; returns its exit code, as a shell gives it. Raises
    CommandError."""
    try:
        job, document = load_manifest(path, [*overrides, *([] if seed is None else [f"seed={seed}"])])
    except JobError as error:
        raise CommandError(problems_text(error)) from error
    command = job.spec.learners.command
    if command is None:
        raise CommandError(
            f"{path}: --debug is for a program of your own (learners.command), and this job has the built-in trainer;"
            f" to run it with one learner: diloco run {path} --set regions.0.learners=1"
        )
    directory = path.absolute().parent
    absent = [each for each in find_absent_programs(job, directory) if each.path == "spec.learners.command"]
    if absent:
        raise CommandError(problems_text(JobError(absent, str(path))))
    if command[0] == "python":
        require_packages("diloco run --debug", ["worker"])
    print_text(f"running `{' '.join(command)}` alone in {directory}: breakpoints work", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="diloco-debug-") as folder:
        settled = Path(folder, path.name)
        settled.write_text(json.dumps(document), encoding="utf-8")
        kept = {name: value for name, value in os.environ.items() if not tells_of_a_job(name)}
        return _run_in_terminal(resolve_program(command), directory, {**kept, "DILOCO_ALONE_JOB": str(settled)})


def tells_of_a_job(name: str) -> bool:
    """Whether a variable would tell a program of a job."""
    return name.startswith("DILOCO_") and not name.startswith(_KEPT)


def _run_in_terminal(command: Sequence[str], directory: Path, environment: dict[str, str]) -> int:
    try:
        process = subprocess.Popen(command, cwd=directory, env=environment)
    except OSError as error:
        raise CommandError(f"{command[0]} cannot be started: {error.strerror or error}") from error
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt:
                continue  # the terminal has sent it to the program too, which may handle it
    finally:
        signal.signal(signal.SIGTERM, before)
    return code if code >= 0 else 128 - code
