"""What a job file says, or all that is wrong with it, as every command shows it.

Pure text: nothing is started and no torch is loaded. What the file does not show is looked at in ``checks``.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco.console import COMPLETE, WRONG, CommandError, wrapped
from diloco.data_files import doubtful_data, refused_data
from diloco_protocol.merging import ISOTROPIC_BELOW, UNMEASURED, choose_merge, is_unmeasured, merge_text
from diloco_protocol.spec.job import DiLoCoJob, spec_digest
from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.spec.load import JobError, Problem, job_warnings, load_job, show


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found in the job file ``source``. ``job``: None where the file is none. ``problems``: empty, or the job
    is refused. ``refused_here``: the job is valid, and `diloco run` would not start it on this machine as things are.
    ``figures``: what was measured of the job, for programs; ``figure_lines``: the same for people."""

    source: str
    job: DiLoCoJob | None
    problems: Sequence[Problem] = ()
    warnings: Sequence[Problem] = ()
    refused_here: bool = False
    figures: Mapping[str, Any] = field(default_factory=dict)
    figure_lines: Sequence[str] = ()

    @property
    def exit_code(self) -> int:
        return WRONG if self.problems else COMPLETE

    @property
    def text(self) -> str:
        """For people: all problems, or the job in a few lines; and the warnings."""
        if self.problems or self.job is None:
            head = problems_text(JobError(self.problems, self.source))
        else:
            size = self.figures.get("trained_parameters")
            head = "\n".join([summary_text(self.job, self.source, self.refused_here, size), *self.figure_lines])
        return "\n".join([head, *warnings_text(self.warnings)])

    @property
    def document(self) -> dict[str, Any]:
        """For programs, as JSON takes it."""
        job = self.job
        return {
            "valid": not self.problems,
            "refused_here": self.refused_here,
            "source": self.source,
            "job": None if job is None else job.metadata.name,
            "digest": None if job is None else spec_digest(job),
            **{kind: [_problem_document(each) for each in getattr(self, kind)] for kind in ("problems", "warnings")},
            **self.figures,
        }


def _problem_document(problem: Problem) -> dict[str, Any]:
    value = json.loads(json.dumps(problem.value, default=str))
    return {"field": problem.path, "value": value, "line": problem.line, "message": problem.message}


def validate_file(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Verdict:
    """The verdict on the job file at ``path``. The file alone is looked at."""
    notes: list[Problem] = []
    try:
        job = load_job(path, overrides, notes)
    except JobError as error:
        return Verdict(error.source or str(path), None, error.problems)
    directory = Path(path).resolve().parent
    refused = refused_data(job, directory)
    warnings = [*notes, *job_warnings(job), *refused, *doubtful_data(job, directory)]
    return Verdict(str(path), job, warnings=warnings, refused_here=bool(refused))


def read_job_file(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> DiLoCoJob:
    """The job in a file. Raises CommandError, with all that is wrong with it."""
    try:
        return load_job(path, overrides)
    except JobError as error:
        raise CommandError(problems_text(error)) from error


def problems_text(error: JobError) -> str:
    """All problems of a job, for people: field, value and line, and under it what is wrong with the cure."""
    count = len(error.problems)
    head = f"{error.source or 'the job'}: {count} problem{'s' if count != 1 else ''}"
    return "\n".join([head, *map(_problem_text, error.problems)])


def _problem_text(problem: Problem) -> str:
    where = f"   (line {problem.line})" if problem.line is not None else ""
    if not problem.path:
        return "\n".join(wrapped(problem.message + where, "  "))
    value = "" if problem.value is None else f" = {show(problem.value)}"
    return "\n".join([f"  {problem.path}{value}{where}", *wrapped(problem.message, "      ")])


def summary_text(job: DiLoCoJob, source: str = "", refused_here: bool = False, parameters: int | None = None) -> str:
    """A valid job in a few lines. ``refused_here``: see ``Verdict``. ``parameters``: the model's, None: not known."""
    here = ", which `diloco run` would not start on this machine (see the warnings)" if refused_here else ""
    spec = job.spec
    training, sync = spec.training, spec.sync
    unit, limit = training.stop.kind, training.stop.limit
    stop = f"{_count(limit)} {unit}" + (" per learner" if unit == "steps" else "")
    regions = ", ".join(
        f"{region.name} {region.learners}"
        + (f" to {region.most_learners}" if region.most_learners > region.learners else "")
        + (f" + {region.spares} spare" if region.spares else "")
        for region in spec.regions
    )
    evaluated = "no"
    if spec.evaluated and training.evaluation is not None:
        tokens = training.evaluation.every_tokens
        evaluated = f"every {_count(tokens)} tokens" if tokens is not None else "50 times until the stop"
        if spec.evaluator.command is not None:
            evaluated = f"by a program of its own ({spec.evaluator.command[0]})"
    lines = [
        f"{source + ': ' if source else ''}a valid job{here}",
        f"  name      {job.metadata.name}",
        f"  trains    {_trained(job)} until {stop}",
        f"  learners  {spec.slots} ({regions}), quorum {spec.quorum}",
        f"  sync      {sync.fragments} fragment{'s, each' * (sync.fragments > 1)} every {sync.every} steps, "
        f"overlap {sync.overlap}, {sync.compression.up} up, {sync.compression.down} down"
        + (", deterministic" if sync.deterministic else ""),
        f"  merges    {_merges(spec, parameters)}",
        f"  evaluated {evaluated}",
        f"  digest    {spec_digest(job)[:16]}",
    ]
    return "\n".join(lines)


def warnings_text(warnings: Iterable[Problem]) -> list[str]:
    return [f"warning:\n{_problem_text(warning)}" for warning in warnings]


def _count(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def _merges(spec: JobSpec, parameters: int | None) -> str:
    """What the job's merges are, and what is to be known of that. ``parameters`` None: the model's size, which may
    decide it, is not known."""
    sizes = (0, ISOTROPIC_BELOW) if parameters is None else (parameters,)
    chosen = {merge_text(*choose_merge(spec, size)): size for size in reversed(sizes)}
    first, *others = reversed(chosen)
    lines = [first, *(f"with 10^8 parameters or more: {large}" for large in others)]
    if first.startswith("isotropic"):
        lines.append("isotropic takes of a matrix what lies in one fragment: most matrices are cut")
    if is_unmeasured(spec, sizes[-1]):
        lines += textwrap.wrap(UNMEASURED, 88)
    return "\n            ".join(lines)


def _trained(job: DiLoCoJob) -> str:
    training, command = job.spec.training, job.spec.learners.command
    if command is not None:
        return f"with `{' '.join(command)}`"
    model, data = training.model, training.data
    assert model is not None and data is not None  # a rule of the spec, without a command
    kind = (model.config or {}).get("model_type", "model")
    named = f"{kind} from {model.from_}" if model.from_ is not None else str(kind)
    sources = {"text": ", ".join(data.paths), "datasets": str(data.name), "python": str(data.function)}
    source = sources[data.source]
    return f"{named} on {source if len(source) <= 60 else source[:59] + '…'}"
