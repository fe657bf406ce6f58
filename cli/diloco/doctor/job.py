"""A job: whether its file is right, what it names is here, and what it needs fits into this machine."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

from diloco.checks.machine import find_absent_modules, find_absent_programs
from diloco.checks.memory import estimate_memory, free_memory
from diloco.data_files import doubtful_data, refused_data
from diloco.doctor.findings import Finding, Level
from diloco.doctor.machine import Torch
from diloco_protocol.common.cpu_quota import usable_cores
from diloco_protocol.common.format_units import size_text
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import JobError, Problem, job_warnings, load_job
from diloco_protocol.spec.warnings import spans_clusters

_finding = functools.partial(Finding, "job")
NEARLY_ALL = 0.8
LAUNCHERS = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch"})


def check_job(file: Path, overrides: Sequence[str], torch: Torch | None) -> Iterator[Finding]:
    """``torch``: as a learner would find it; None: it is not there."""
    notes: list[Problem] = []
    try:
        job = load_job(file, overrides, notes)
    except JobError as error:
        for problem in error.problems:
            yield _finding("file", "error", str(problem), fix=f"diloco validate {file}")
        return
    directory = file.resolve().parent
    yield _finding("file", "ok", f"{file}: {job.metadata.name}, {job.spec.slots} learners")
    for problem in (*notes, *job_warnings(job)):
        yield _finding("file", "warning", str(problem))
    elsewhere: Level = "warning" if spans_clusters(job.spec) else "error"
    yield from _data(job, directory, elsewhere)
    yield from _program(job, directory, elsewhere)
    yield from _devices(job, torch)
    if torch is not None or job.spec.training.model is None:
        yield from _model(job, directory, torch, elsewhere)


def _data(job: DiLoCoJob, directory: Path, bad: Level) -> Iterator[Finding]:
    data = job.spec.training.data
    if data is None:
        return
    missing = refused_data(job, directory)
    for problem in doubtful_data(job, directory):
        yield _finding("data", "warning", str(problem), fix="docs/data.md says which files are read how")
    for problem in missing:
        fix = "paths start at the job file's directory; docs/data.md says which files are read how"
        yield _finding("data", bad, str(problem), fix=fix)
    if not missing and data.source == "text":
        yield _finding("data", "ok", ", ".join(data.paths))
    for problem in find_absent_modules(job, directory):
        yield _finding("data", bad, str(problem))


def _program(job: DiLoCoJob, directory: Path, bad: Level) -> Iterator[Finding]:
    absent = {problem.path: problem for problem in find_absent_programs(job, directory)}
    for role, command in (("learners", job.spec.learners.command), ("evaluator", job.spec.evaluator.command)):
        problem = absent.get(f"spec.{role}.command")
        if problem is not None:
            yield _finding("program", bad, str(problem))
        elif command is not None:
            yield _finding("program", "ok", f"{role}: {' '.join(command)}")
        if command is not None and role == "learners" and (launcher := LAUNCHERS.intersection(command)):
            said = f"the ranks that {min(launcher)} starts are one learner, of which the job does not know their number"
            fix = "name the program itself as learners.command, and the ranks by learners.processes"
            yield _finding("program", "warning", said, fix=fix)


def _devices(job: DiLoCoJob, torch: Torch | None) -> Iterator[Finding]:
    training, learners = job.spec.training, job.spec.slots
    ranks = sum(region.learners * job.spec.group(region.name).ranks for region in job.spec.regions)
    what = f"{learners} learners" + (f" of {ranks} ranks in all" if ranks > learners else "")
    devices = torch.devices if torch is not None else ()
    if training.device == "cuda" and not devices:
        fix = "leave training.device out, or --set training.device=cpu"
        yield _finding("device", "error", "training.device is cuda, and torch sees no GPU here", fix=fix)
    elif devices and training.device != "cpu":
        level: Level = "ok" if ranks <= len(devices) else "warning"
        said = f"{what} on {len(devices)} GPU{'s' * (len(devices) > 1)}"
        yield _finding(
            "device", level, said, fix="" if level == "ok" else "those that share a GPU also share its memory"
        )
    elif ranks > (cores := usable_cores()):
        said = f"{what} on {cores} core{'s' * (cores > 1)}: they take turns"
        yield _finding("device", "warning", said, fix="--set regions.0.learners=N for fewer")


def _model(job: DiLoCoJob, directory: Path, torch: Torch | None, bad: Level) -> Iterator[Finding]:
    from diloco_worker.training.job_check import check_job as ask_worker

    if job.spec.training.model is None:
        said = "not known: the learners run a program of their own"
        yield _finding(
            "memory", "ok", said, fix="diloco plan JOB.yaml --params N --step-seconds S says what N parameters need"
        )
        return
    with contextlib.chdir(directory):  # as a learner: a tokenizer's directory may be relative
        found = ask_worker(job.spec, directory)
    for problem in found.wrong:
        yield _finding("model", "error", str(problem))
    for problem in found.here:
        if problem.path != "spec.training.device":  # which is told with the learners' number
            yield _finding("model", bad, str(problem))
    for problem in found.doubts:
        yield _finding("model", "warning", str(problem))
    for what in found.unchecked:
        yield _finding("model", "warning", f"not checked: {what}")
    if found.model is None:
        return
    yield _finding("model", "ok", f"{found.model.trained:,} trained parameters")
    device = "cuda" if torch is not None and torch.devices and job.spec.training.device != "cpu" else "cpu"
    need, free = estimate_memory(job, found.model, device), free_memory()
    said = f"at least about {size_text(need.whole)}: {need.parts_text()}; {size_text(free)} are free"
    level: Level = bad if need.whole > free else "warning" if need.whole > NEARLY_ALL * free else "ok"
    fix = "" if level == "ok" else "fewer learners (--set regions.0.learners=N), a smaller model, or a larger machine"
    yield _finding("memory", level, said, fix=fix)
    if found.device_bytes and need.device:
        said = f"each rank takes at least about {size_text(need.device)} of its GPU's {size_text(found.device_bytes)}"
        level, fix = "ok", ""
        if need.device > found.device_bytes:
            level, fix = bad, "divide the model among more processes (learners.processes), or take a smaller one"
        yield _finding("GPU memory", level, said, fix=fix)
