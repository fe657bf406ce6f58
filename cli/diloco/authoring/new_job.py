"""What ``diloco init`` does: from options or answers to a job file that is valid."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from diloco.authoring.job_template import SIZES, JobChoices, data_below, job_text, name_for
from diloco.console import CommandError, unwritable_text
from diloco.data_files import absent_data
from diloco.validate import problems_text, warnings_text
from diloco_protocol.common.files import write_whole
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import JobError, parse_job


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for; None and empty: the default."""

    model: str | None = None
    command: str | None = None
    data: tuple[str, ...] = ()
    tokenizer: str | None = None
    learners: int | None = None
    steps: int | None = None
    name: str | None = None


def ask() -> Wanted:
    """The same, by questions on the terminal."""
    own = typer.prompt("Your own training program (empty: a built-in language model)", default="", show_default=False)
    model, data = None, ""
    if not own:
        model = typer.prompt(f"Model size ({', '.join(SIZES)})", default="tiny")
        data = typer.prompt(
            "Text to train on: file, directory or glob (empty: Python's own source)", "", show_default=False
        )
    learners = typer.prompt("Learners", default=2, type=int)
    steps = typer.prompt("Steps of each learner", default=300, type=int)
    return Wanted(model, own or None, (data,) if data else (), None, learners=learners, steps=steps)


def write_job(file: Path, wanted: Wanted, force: bool) -> tuple[str, dict[str, Any]]:
    """Write the job file, and return what to say of it to people and to programs; for ``-`` the former is the file
    itself. Raises CommandError."""
    printed = str(file) == "-"
    choices = _choices(file, wanted)
    try:
        text = job_text(choices, "job.yaml" if printed else str(file))
        job = parse_job(text, source="the new job")
    except JobError as error:
        raise CommandError(problems_text(error)) from error
    except ValueError as error:  # of shlex
        raise CommandError(f"--command {choices.command!r}: {error}") from error
    if printed:
        return text.rstrip("\n"), {}
    try:
        if force:
            write_whole(file, text.encode("utf-8"))
        else:
            with open(file, "x", encoding="utf-8") as new:
                new.write(text)
    except FileExistsError as error:
        raise CommandError(f"{file} is there already: --force overwrites it, or name another file") from error
    except OSError as error:
        raise CommandError(unwritable_text(file, error)) from error
    directory = file.resolve().parent
    warnings = [*warnings_text(absent_data(job, directory)), *_absent_program(job, directory)]
    learners = f"{choices.learners} learner{'s' * (choices.learners > 1)}"
    said = [
        f"{file}: a job for {learners}, {choices.steps:,} steps each",
        *warnings,
        f"Next: diloco run {file}   (on this machine; `diloco validate {file}` after a change)",
    ]
    facts = {"file": str(file), "job": job.metadata.name, "learners": choices.learners, "steps": choices.steps}
    return "\n".join(said), {**facts, "warnings": warnings}


def _choices(file: Path, wanted: Wanted) -> JobChoices:
    if wanted.command is not None and (wanted.model is not None or wanted.data or wanted.tokenizer is not None):
        raise CommandError("--command brings its own model and data: leave --model, --data and --tokenizer out")
    if wanted.command is not None and not wanted.command.strip():
        raise CommandError('--command is empty: write what starts your program, such as "python train.py"')
    if wanted.model is not None and wanted.model.lower() not in SIZES:
        raise CommandError(
            f"--model {wanted.model} is no size: write one of {', '.join(SIZES)}, or --command for your own"
        )
    printed = str(file) == "-"
    given = dataclasses.asdict(wanted) | {
        "name": wanted.name or ("my-job" if printed else name_for(file.name)),
        "data": tuple(data_below(Path() if printed else file.parent, wanted.data)),
        "size": wanted.model.lower() if wanted.model is not None else None,
    }
    given.pop("model")
    return JobChoices(**{name: value for name, value in given.items() if value})


def _absent_program(job: DiLoCoJob, directory: Path) -> list[str]:
    """A word on a Python program that is not there yet."""
    command = job.spec.learners.command or []
    absent = [word for word in command[1:2] if word.endswith(".py") and not os.path.exists(directory / word)]
    return [f"warning: there is no {word} in {directory} yet" for word in absent]
