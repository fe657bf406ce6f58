"""``diloco validate``: the file, and what of the job would fail on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from diloco.checks.machine import find_absent_modules, find_absent_programs, find_shadowing_modules, is_for_cluster
from diloco.checks.memory import estimate_memory, free_memory, memory_shortage, size_line
from diloco.checks.model import check_model
from diloco.validate import Verdict, validate_file
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import Problem
from diloco_worker.training.findings import JobFindings


def judge_file(
    path: str | os.PathLike[str],
    overrides: Iterable[str] = (),
    ask: Callable[[DiLoCoJob, Path], JobFindings] = check_model,
) -> Verdict:
    """The verdict on the job file at ``path`` and on whether the job can run here. ``ask``: asks the worker.

    What this machine lacks is wrong too, unless the job is for a cluster. Data may be where the job runs: that they
    are not here is a warning in any case, and the verdict says that `diloco run` would refuse the job here."""
    read = validate_file(path, overrides)
    job = read.job
    if job is None:
        return read
    directory = Path(path).resolve().parent
    found = ask(job, directory)
    warnings = [*read.warnings, *found.doubts, *find_shadowing_modules(job, directory)]
    here = [*find_absent_programs(job, directory), *find_absent_modules(job, directory), *found.here]
    elsewhere = is_for_cluster(job)
    refused = read.refused_here or (elsewhere and bool(here))
    wrong, excused = ([*found.wrong], here) if elsewhere else ([*found.wrong, *here], list[Problem]())
    if not wrong and found.model is not None and not elsewhere:
        shortage = memory_shortage(estimate_memory(job, found.model, found.device), free_memory(), found.device_bytes)
        unstarted = f"{shortage}; `diloco run` does not start it here without --force"
        warnings += [Problem("", None, unstarted)] if shortage else []
        refused = refused or bool(shortage)
    figures, lines = figures_document(job, found), figures_text(job, found)
    return Verdict(
        str(path), job, wrong, [*warnings, *excused], refused_here=refused, figures=figures, figure_lines=lines
    )


def figures_document(job: DiLoCoJob, found: JobFindings) -> dict[str, Any]:
    """The model's size, bytes of its processes, and what is to come; what is not known is null."""
    model = found.model
    need = None if model is None else estimate_memory(job, model, found.device)
    return {
        "parameters": model and model.parameters,
        "trained_parameters": model and model.trained,
        "learner_bytes": need and need.learner,
        "syncer_bytes": need and need.syncer,
        "step_tokens": found.step_tokens,
        "steps": found.steps,
        "data": found.data or None,
        "unchecked": list(found.unchecked),
    }


def figures_text(job: DiLoCoJob, found: JobFindings) -> list[str]:
    """The model's size, what its processes take, and what is to come; and what was not looked at."""
    lines = []
    if found.model is not None:
        need = estimate_memory(job, found.model, found.device)
        lines.append(f"  {size_line(found.model, need)}")
    if found.data:
        lines.append(f"  data      {found.data}")
    if found.step_tokens is not None:
        lines.append(f"  to come   {steps_to_come(job, found.steps, found.step_tokens)}")
    return [*lines, *(f"  unchecked {what}" for what in found.unchecked)]


def steps_to_come(job: DiLoCoJob, steps: int | None, step_tokens: int) -> str:
    """How many steps and tokens the whole job has, in words. ``steps``: of each learner; None: not known."""
    learners = job.spec.slots
    each = f"{step_tokens:,} tokens in a step of {'every learner' if learners > 1 else 'the learner'}"
    if steps is None:
        return f"{each}; how many steps {job.spec.training.stop.limit:g} seconds hold is not known"
    shared = ", if they are equally fast" if learners > 1 and job.spec.training.stop.kind == "tokens" else ""
    who = "each learner" if learners > 1 else "the learner"
    whole = f"{steps:,} steps of {who}{shared}, {steps * step_tokens:,} tokens"
    return f"{whole}; {each}"
