"""A job: whether its file is right, what it names is here, and what it needs fits into this machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from diloco.console import CommandError
from diloco.doctor.findings import Finding, Level
from diloco.doctor.machine import Torch, free_memory
from diloco.validate import absent_data
from diloco_protocol.common.cpu_quota import usable_cores
from diloco_protocol.common.format_units import size_text
from diloco_protocol.resources import needs
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import JobError, Problem, job_warnings, load_job
from diloco_protocol.spec.warnings import spans_clusters

PROCESS_BYTES = 400 << 20
"""Of a learner before its model: the interpreter, torch, transformers."""
NEARLY_ALL = 0.8
_OPTIMIZER_BYTES = 16  # a parameter's: itself, its gradient, two moments


def check_job(
    file: Path, overrides: Sequence[str], torch: Torch | None, absent: Mapping[str, list[str]]
) -> Iterator[Finding]:
    """``absent``: packages of each extra that are not installed."""
    notes: list[Problem] = []
    try:
        job = load_job(file, overrides, notes)
    except JobError as error:
        for problem in error.problems:
            yield Finding("job", "file", "error", str(problem), f"diloco validate {file}")
        return
    directory = file.resolve().parent
    yield Finding("job", "file", "ok", f"{file}: {job.metadata.name}, {job.spec.slots} learners")
    for problem in (*notes, *job_warnings(job)):
        yield Finding("job", "file", "warning", str(problem))
    elsewhere: Level = "warning" if spans_clusters(job.spec) else "error"
    yield from _data(job, directory, absent, elsewhere)
    yield from _program(job, directory, elsewhere)
    yield from _devices(job, torch)
    if torch is not None or job.spec.training.model is None:
        yield from _memory(job, directory, torch, elsewhere)


def _data(job: DiLoCoJob, directory: Path, absent: Mapping[str, list[str]], bad: Level) -> Iterator[Finding]:
    data = job.spec.training.data
    if data is None:
        return
    missing = absent_data(job, directory)
    for problem in missing:
        fix = "paths start at the job file's directory; diloco explain training.data.paths"
        yield Finding("job", "data", bad, str(problem), fix)
    if not missing and data.source == "text":
        yield Finding("job", "data", "ok", ", ".join(data.paths))
    if data.source == "datasets" and absent.get("datasets"):
        fix = "pip install 'decoupled-diloco[datasets]'"
        yield Finding("job", "data", bad, "source datasets needs the package datasets, which is not installed", fix)
    if data.source == "python" and data.function is not None:
        module = data.function.partition(":")[0].partition(".")[0]
        if not _is_module(module, directory):
            said = f"training.data.function: there is no module {module}"
            yield Finding("job", "data", bad, said, f"put {module}.py into {directory}, or install it")


def _is_module(name: str, directory: Path) -> bool:
    if (directory / f"{name}.py").is_file() or (directory / name).is_dir():
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _program(job: DiLoCoJob, directory: Path, bad: Level) -> Iterator[Finding]:
    commands = {"learners": job.spec.learners.command, "evaluator": job.spec.evaluator.command}
    for role, command in commands.items():
        if command is None:
            continue
        program, script = command[0], command[1] if len(command) > 1 else ""
        there = program == "python" or shutil.which(program) or os.access(directory / program, os.X_OK)
        if not there:
            said = f"{role}.command: there is no program {program}"
            yield Finding("job", "program", bad, said, f"it is looked for on PATH and in {directory}")
            continue
        if script.endswith(".py") and not (directory / script).is_file():
            said = f"{role}.command: there is no {script} in {directory}"
            yield Finding("job", "program", bad, said, "its path starts at the job file's directory")
            continue
        yield Finding("job", "program", "ok", f"{role}: {' '.join(command)}")


def _devices(job: DiLoCoJob, torch: Torch | None) -> Iterator[Finding]:
    training, learners = job.spec.training, job.spec.slots
    devices = torch.devices if torch is not None else ()
    if training.device == "cuda" and not devices:
        fix = "leave training.device out, or --set training.device=cpu"
        yield Finding("job", "device", "error", "training.device is cuda, and torch sees no GPU here", fix)
    elif devices and training.device != "cpu":
        level: Level = "ok" if learners <= len(devices) else "warning"
        said = f"{learners} learners on {len(devices)} GPU{'s' * (len(devices) > 1)}"
        yield Finding(
            "job", "device", level, said, "" if level == "ok" else "learners that share a GPU also share its memory"
        )
    elif learners > (cores := usable_cores()):
        said = f"{learners} learners on {cores} core{'s' * (cores > 1)}: they take turns"
        yield Finding("job", "device", "warning", said, "--set regions.0.learners=N for fewer")


def _memory(job: DiLoCoJob, directory: Path, torch: Torch | None, bad: Level) -> Iterator[Finding]:
    from diloco.bandwidth_plan import fragment_sizes

    if job.spec.training.model is None:
        said = "not known: the learners run a program of their own"
        yield Finding(
            "job", "memory", "ok", said, "diloco plan JOB.yaml --params N --step-seconds S says what N parameters need"
        )
        return
    try:
        sizes, _ = fragment_sizes(job, None, directory)
    except CommandError as error:
        yield Finding("job", "model", "error", str(error))
        return
    parameters = sum(sizes)
    yield Finding("job", "model", "ok", f"{parameters:,} trained parameters")
    needed = needs(job.spec, sizes)
    learner = needed.learner_memory + PROCESS_BYTES
    on_cpu = job.spec.training.device == "cpu" or torch is None or not torch.devices
    if on_cpu and job.spec.training.device != "cpu":  # of `auto`, which the figure leaves out
        learner += _OPTIMIZER_BYTES * parameters
    count = job.spec.most_slots + sum(region.spares for region in job.spec.regions)
    whole, free = needed.syncer_memory + count * learner, free_memory()
    parts = f"{size_text(needed.syncer_memory)} for the syncer, {size_text(learner)} for each of {count} learners"
    said = f"about {size_text(whole)} at the least: {parts}, without activations; {size_text(free)} are free"
    level: Level = bad if whole > free else "warning" if whole > NEARLY_ALL * free else "ok"
    fix = "" if level == "ok" else "fewer learners (--set regions.0.learners=N), a smaller model, or a larger machine"
    yield Finding("job", "memory", level, said, fix)
