"""A program of one's own: what a job would refuse of it, or train wrongly without a word, found by running it alone."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from diloco.console import CommandError, print_text
from diloco.doctor.findings import Finding
from diloco.packages import require_packages

_finding = functools.partial(Finding, "program")
PROGRAM_SECONDS = 1800.0


def check_program(program: Path, arguments: Sequence[str], job: Path | None) -> Iterator[Finding]:
    """Run ``program`` for some steps against a stand-in syncer (diloco_worker.standalone.rehearsal). ``job``: whose
    batch and settings hold. Raises CommandError if it cannot be started."""
    if not program.is_file():
        raise CommandError(f"{program}: there is no such file")
    require_packages("diloco doctor", ["worker"])
    from diloco_worker.standalone.rehearsal import STEPS, VARIABLE

    print_text(f"running {program} alone for {STEPS} steps", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="diloco-doctor-") as folder:
        told = Path(folder, "told")
        told.touch()
        kept = {name: value for name, value in os.environ.items() if not _tells_of_a_job(name)}
        named = {"DILOCO_ALONE_JOB": str(job.absolute())} if job is not None else {}
        command, environment = [sys.executable, str(program), *arguments], {**kept, **named, VARIABLE: str(told)}
        try:
            code = subprocess.run(command, env=environment, stdout=2, timeout=PROGRAM_SECONDS).returncode
            end = f"it ended with exit code {code}; its own error stands above" if code else ""
        except subprocess.TimeoutExpired:
            end = f"it has not ended within {PROGRAM_SECONDS:.0f} s"
        rows = [json.loads(line) for line in told.read_text(encoding="utf-8").splitlines()]
    findings = [row for row in rows if "said" in row]
    for row in findings:
        yield _finding("loop", row["level"], row["said"])
    steps, moved = next(((row["steps"], row["moved"]) for row in reversed(rows) if "steps" in row), (0, 0))
    if not rows and not end:
        fix = "make a Learner by Learner.from_environment(model, optimizer): docs/your-own-loop.md"
        yield _finding("loop", "error", "it ended and made no Learner: a job could not use it", fix=fix)
    elif end and not any(row["level"] == "error" for row in findings):
        yield _finding("loop", "error", end)
    moves = f"{moved} fragment{'s' * (moved != 1)}"
    yield _finding(
        "steps", "ok" if steps else "warning", f"{steps} steps made; {moves} of the model moved as merges do"
    )


def _tells_of_a_job(name: str) -> bool:
    """Whether a variable would tell a program of a job."""
    return name.startswith("DILOCO_") and not name.startswith("DILOCO_LOG_")
