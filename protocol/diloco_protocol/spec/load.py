"""Reading a job: a file, overrides, all problems at once; and the normal form.

The order: the file's bytes (bounded), YAML as kubectl reads it (``kubectl_yaml``), overrides, the models' own checks,
then the rules between fields. The rules also run when some field has been refused: that field is put back to its
default, and what a rule says about it is left out. So one run shows every problem and no consequence of another.
"""

from __future__ import annotations

import codecs
import copy
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from diloco_protocol.common.files import read_bounded
from diloco_protocol.spec.api_server import dropped_nulls, without_server_fields
from diloco_protocol.spec.base import Path, Spec, fields_by_alias, nested_model, unwrap
from diloco_protocol.spec.explain import dotted, explain_all, meant_field
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.kubectl_yaml import MAX_BYTES, YamlDocument, YamlProblem, parse
from diloco_protocol.spec.rules import violations
from diloco_protocol.spec.warnings import warnings

log = logging.getLogger(__name__)

NORMAL_FORM = "job (normal form)"  # what errors name in place of a file
MAX_JOB_BYTES = 4 * MAX_BYTES  # of the normal form, which has every default in it
_SKIP_RULES = {"skip_rules": True}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: the field's path (empty: the file), its value, what is wrong with the cure,
    and the line in the file (None: not in the file)."""

    path: str
    value: Any
    message: str
    line: int | None = None

    def __str__(self) -> str:
        where = f" (line {self.line})" if self.line is not None else ""
        if not self.path:
            return f"{self.message}{where}"
        shown = "" if self.value is None else f" = {show(self.value)}"
        return f"{self.path}{shown}: {self.message}{where}"


class JobError(ValueError):
    """The job is wrong; ``problems`` has all of it, ``source`` says which file (empty: not from a file)."""

    def __init__(self, problems: Sequence[Problem], source: str = "") -> None:
        super().__init__(problems, source)
        self.problems = list(problems)
        self.source = source

    def __str__(self) -> str:
        if not self.source:
            return "\n".join(map(str, self.problems))
        return "\n".join([f"{self.source}:", *(f"  {problem}" for problem in self.problems)])


def show(value: Any, limit: int = 80) -> str:
    """A value as a person would write it in the file, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def load_job(
    path: str | os.PathLike[str], overrides: Iterable[str] = (), notes: list[Problem] | None = None
) -> DiLoCoJob:
    """The job in the file at ``path``, with ``overrides`` (``path=value`` below spec, value in YAML) applied.

    What the API server writes into an object (``status``, ``metadata.uid`` ...) is left out. ``notes``, if given, is
    filled with what is taken and its author should know. Raises JobError with every problem that can be found.
    """
    return parse_job(_read(FilePath(path)), overrides, str(path), notes)


def load_manifest(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> tuple[DiLoCoJob, dict[str, Any]]:
    """As load_job, with the document as it is written: overrides applied, no defaults filled in, nothing of
    the API server's. It is what a client of the API server applies, and so owns those fields alone."""
    return _parse(_read(FilePath(path)), overrides, str(path))


def parse_job(
    text: str, overrides: Iterable[str] = (), source: str = "job", notes: list[Problem] | None = None
) -> DiLoCoJob:
    """As load_job, from text."""
    return _parse(text, overrides, source, notes)[0]


def _parse(
    text: str, overrides: Iterable[str], source: str, notes: list[Problem] | None = None
) -> tuple[DiLoCoJob, dict[str, Any]]:
    try:
        document = parse(text)
    except YamlProblem as problem:
        raise JobError([Problem(dotted(problem.path), None, problem.message, problem.line)], source) from None
    if document.value is None:
        raise JobError([Problem("", None, "it is empty: a job has apiVersion, kind, metadata and spec")], source)
    if not isinstance(document.value, dict):
        kind = "a list" if isinstance(document.value, list) else "a single value"
        message = f"it holds {kind}: a job is a mapping with apiVersion, kind, metadata and spec"
        raise JobError([Problem("", None, message)], source)
    document.value, server = without_server_fields(document.value)
    overridden: list[Path] = []
    problems: list[Problem] = []
    for override in overrides:
        try:
            overridden.append(_set(document.value, override))
        except ValueError as error:
            problems.append(Problem(f"--set {override}", None, str(error)))
    job, wrong = _validate(document, overridden)
    problems += wrong
    if problems or job is None:
        raise JobError(problems, source)
    if notes is not None:
        found = [*server, *dropped_nulls(document.value)]
        notes += [Problem(dotted(at), None, said, document.lines.get(at)) for at, said in found]
    return job, document.value


def job_warnings(job: DiLoCoJob) -> list[Problem]:
    """What the job allows and its author probably did not mean."""
    return [Problem(dotted(w.path), w.value, w.message) for w in warnings(job.spec)]


def job_to_json(job: DiLoCoJob) -> str:
    """The normal form: every field, defaults filled in, in the models' order. Inverse of job_from_json."""
    return json.dumps(job.model_dump(mode="json"), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def job_from_json(text: str | bytes) -> DiLoCoJob:
    """The job whose normal form is ``text``. Raises JobError."""
    return _normal_job(_normal_form(text))


def read_job(path: str | os.PathLike[str]) -> DiLoCoJob:
    """The job whose normal form is in the file, as runner and operator hand it to processes.

    A job keeps the images with which it started, and an operator that was upgraded meanwhile writes every
    field that it knows itself: what this version does not know is left out, and said in the log.
    Raises JobError; OSError where the file is not to be read, ``files.TooLarge`` among them."""
    unknown: list[str] = []

    def known(path: Path, field: FieldInfo | None, value: Any) -> bool:
        if field is None:
            unknown.append(dotted(path))
        return field is not None

    job = _normal_job(_pick_fields(DiLoCoJob, _normal_form(read_bounded(path, MAX_JOB_BYTES)), known))
    if unknown:
        log.warning("%s: this version does not know %s, which a newer one wrote: left out", path, ", ".join(unknown))
    return job


def _normal_form(text: str | bytes) -> dict[str, Any]:
    try:
        if len(text) > MAX_JOB_BYTES:
            raise ValueError(f"more than {MAX_JOB_BYTES} bytes")
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise JobError([Problem("", None, f"not JSON: {error}")], NORMAL_FORM) from None
    if not isinstance(data, dict):
        raise JobError([Problem("", None, "not a JSON object")], NORMAL_FORM)
    return data


def _normal_job(data: dict[str, Any]) -> DiLoCoJob:
    job, problems = _validate(YamlDocument(data))
    if job is None:
        raise JobError(problems, NORMAL_FORM)
    return job


def _pick_fields(
    model: type[Spec], data: Any, wanted: Callable[[Path, FieldInfo | None, Any], bool], path: Path = ()
) -> Any:
    """``data`` without what is not ``wanted``, which is asked of each field of each model: its path, the model's
    field (None: it has no such) and the value."""
    if not isinstance(data, dict):
        return data
    fields, picked = fields_by_alias(model), {}
    for key, value in data.items():
        field, here = fields.get(key), (*path, key)
        if not wanted(here, field, value):
            continue
        inner, many = nested_model(field.annotation) if field is not None else (None, False)
        if inner is not None and many and isinstance(value, list):
            value = [_pick_fields(inner, item, wanted, (*here, index)) for index, item in enumerate(value)]
        elif inner is not None and not many:
            value = _pick_fields(inner, value, wanted, here)
        picked[key] = value
    return picked


def _read(path: FilePath) -> str:
    """The file's text, at most MAX_BYTES: a large file is refused by its size, unread."""

    def refuse(message: str) -> JobError:
        return JobError([Problem("", None, message)], str(path))

    def open_at_once(name: str, flags: int) -> int:
        """Without blocking, so that a pipe that nobody writes to is refused rather than waited for."""
        return os.open(name, flags | os.O_NONBLOCK)

    try:
        with open(path, "rb", opener=open_at_once) as file:
            status = os.fstat(file.fileno())
            regular, size = stat.S_ISREG(status.st_mode), status.st_size
            data = file.read(MAX_BYTES + 1) if regular and size <= MAX_BYTES else b""
    except FileNotFoundError:
        if re.match(r"[a-z0-9]+:/", str(path)):  # a Path has lost the second slash
            raise refuse("a job is read from a file: download it first") from None
        raise refuse("there is no such file") from None
    except IsADirectoryError:
        raise refuse("it is a directory: name the job file in it") from None
    except (OSError, ValueError) as error:
        raise refuse(f"it cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not regular:
        raise refuse("it is not a regular file")
    if max(size, len(data)) > MAX_BYTES:
        raise refuse(f"it is too large for a job file ({size / 1e6:.1f} MB; at most {MAX_BYTES // 1024} KiB)")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        other = data.count(b"\0") and data[:2] not in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        cure = "it is no text: name the job file" if other else "save it as UTF-8"
        raise refuse(f"it is not UTF-8 text (byte {error.start}): {cure}") from None


# ------------------------------------------------------------------ overrides


def _set(document: dict[str, Any], text: str) -> Path:
    """Applies an override to the document in place; returns the path set. Raises ValueError."""
    left, equals, right = text.partition("=")
    parts = left.strip().split(".")
    if not equals or not all(parts):
        raise ValueError("must read path=value, such as sync.every=12 or regions.0.learners=2")
    if parts[0] in ("apiVersion", "kind", "metadata", "spec"):
        cure = f"write {'.'.join(parts[1:])}={right}" if parts[0] == "spec" and parts[1:] else "edit the file"
        raise ValueError(f"{parts[0]} is not a known field below spec, where these paths start: {cure}")
    try:
        value = parse(right).value
    except YamlProblem as problem:
        raise ValueError(f"the value cannot be read: {problem.message}") from None
    path: Path = ("spec",)
    holder: Any = document
    key: str | int = "spec"
    place = document.get("spec")
    for number, part in enumerate(parts):
        if place is None:
            place = [] if part.isdigit() else {}
            holder[key] = place
        if isinstance(place, list):
            if not part.isdigit() or int(part) > len(place):
                raise ValueError(f"{dotted(path)} is a list of {len(place)}: name an item by its index, from 0")
            step: Any = int(part)
            if step == len(place):
                if place and isinstance(place[0], dict) and parts[number + 1 : number + 2] not in ([], ["name"]):
                    added = f"{'.'.join(parts[: number + 1])}={{name: ..., {parts[number + 1]}: ...}}"
                    raise ValueError(
                        f"{dotted(path)} has {len(place)}, and indices begin with 0, so there is no {step}: "
                        f"change {step - 1}, or add one as a whole ({added})"
                    )
                place.append(None)
        elif isinstance(place, dict):
            step = part
            place.setdefault(step, None)
        else:
            raise ValueError(f"{dotted(path)} is {show(place)}, which has no fields")
        path = (*path, step)
        holder, key, place = place, step, place[step]
    holder[key] = value
    return path


# ------------------------------------------------------------------ validation


def _validate(document: YamlDocument, overridden: Sequence[Path] = ()) -> tuple[DiLoCoJob | None, list[Problem]]:
    """The job, or (None, all problems). What ``overridden`` paths have set has no line in the file."""
    data = _pick_fields(DiLoCoJob, document.value, _not_absent)
    problems: list[Problem] = []
    refused: list[Path] = []

    def report(path: Path, value: Any, message: str) -> None:
        line = None
        written = path in document.lines
        if not any(path[: len(one)] == one or (not written and one[: len(path)] == path) for one in overridden):
            heads = (path[:n] for n in range(len(path), 0, -1))
            line = next((document.lines[head] for head in heads if head in document.lines), None)
        problems.append(Problem(dotted(path), value, message, line))

    job, errors = _attempt(data)
    for error, said in explain_all(DiLoCoJob, errors):
        report(tuple(error["loc"]), None if error["type"] == "missing" else error["input"], said)
    for error in errors:
        path: Path = tuple(error["loc"])
        refused.append(path)
        if error["type"] == "extra_forbidden" and (meant := meant_field(DiLoCoJob, path)) is not None:
            refused.append(meant)
    if job is None:
        job = _repaired(data, errors)
    if job is not None:
        for broken in violations(job.spec):
            if not any(_overlap(read, path) for read in broken.reads for path in refused):
                report(broken.path, broken.value, broken.message)
    problems.sort(key=lambda problem: problem.line if problem.line is not None else 1 << 31)
    return (None if problems else job), problems


def _attempt(data: Any) -> tuple[DiLoCoJob | None, list[Any]]:
    """The job without the rules between fields, or (None, the fields' errors)."""
    try:
        return DiLoCoJob.model_validate(data, by_alias=True, by_name=False, context=_SKIP_RULES), []
    except ValidationError as error:
        return None, error.errors(include_url=False)


def _repaired(data: Any, errors: list[Any]) -> DiLoCoJob | None:
    """The job with each refused field at its default (or its example, where it has no default)."""
    data = copy.deepcopy(data)
    for _ in range(100):
        for error in errors:
            _repair(data, tuple(error["loc"]))
        job, errors = _attempt(data)
        if job is not None:
            return job
    return None


def _repair(data: Any, loc: Path) -> None:
    """Takes the innermost field on the way to ``loc`` out of ``data``; a required one gets its example."""
    model: type[Spec] | None = DiLoCoJob
    place: Any = data
    holder: dict[str, Any] = {}
    key, field = "", None
    steps = iter(loc)
    for step in steps:
        if model is None or not isinstance(place, dict):
            break
        holder, key = place, str(step)
        field = fields_by_alias(model).get(key)
        if field is None or key not in place:
            break
        model, many = nested_model(field.annotation)
        place = place[key]
        if model is not None and many:
            index = next(steps, None)
            if not isinstance(index, int) or not isinstance(place, list):
                break
            if not isinstance(place[index], dict):
                place[index] = {}
                return
            place = place[index]
    holder.pop(key, None)
    if field is not None and field.is_required():
        holder[key] = copy.deepcopy((field.examples or [None])[0])


def _not_absent(_: Path, field: FieldInfo | None, value: Any) -> bool:
    """Whether a value is one: null stands for absent where a field has a default and cannot be null. The API
    server takes it so before it fills in defaults."""
    return field is None or value is not None or field.is_required() or unwrap(field.annotation)[1]


def _overlap(one: Path, other: Path) -> bool:
    """Whether one path is the other or lies above it."""
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]
