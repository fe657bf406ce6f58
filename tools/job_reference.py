"""The field reference, docs/job.md, written from the models (tools/generate.py)."""

from __future__ import annotations

import inspect
import json
from typing import Any

from pydantic.fields import FieldInfo

from diloco_protocol.spec.base import Spec, fields_by_alias, nested_model
from diloco_protocol.spec.explain import words
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.kubectl_yaml import MAX_BYTES
from diloco_protocol.spec.rules import RULES

_OPENING = f"""\
# The job file

<!-- Written by `make generate` from the models (tools/job_reference.py). Don't edit. -->

A job is one YAML (or JSON) file, the same for `diloco run` on one machine and for `kubectl apply`.
A first job sets `training.model`, `training.data`, `training.stop` and `regions`. Everything else has a default.

- `diloco init` writes a commented file, and [examples/](../examples) has whole jobs (the shortest: `minimal.yaml`).
- `diloco validate JOB.yaml` checks a file and lists every problem.
- `diloco explain FIELD` prints the entry of one field of this page.

Rules for all fields:

- Values are read as kubectl reads them: `1e-3` is a number, `2e6` is a whole number, `yes` and `on` are
  true. Text that looks like one of these needs quotes.
- A field set to null is the same as one left out, unless null is one of its values. When `kubectl apply`
  creates a job it drops null, unless it is called with `--server-side`. `clipNorm: 0` and
  `evaluation: {{fraction: 0}}` mean the same as null and stay.
- Unknown fields, keys given twice, several documents in one file and files above
  {MAX_BYTES // 1024} KiB are refused.
- Fields that the API server adds (`status`, `metadata.uid` and others in `kubectl get -o yaml`) are not
  used; `diloco validate` names them.
- Durations are in seconds and end in `Seconds`; sizes are Kubernetes quantities (`10Gi`); shares are
  from 0 to 1.
- Relative paths, modules and the program of `learners.command` start at the job file's own directory.
- `--set path=value` changes a field for one run: a path below `spec`, list items by index, the value in
  YAML, such as `--set sync.every=48 --set regions.0.learners=2 --set training.stop='{{steps: 100}}'`.
"""


def page() -> str:
    """The whole reference as Markdown."""
    parts = [_OPENING]
    _section(DiLoCoJob, (), parts)
    parts.append("## What must hold between fields\n")
    for rule in RULES:
        parts.append(f"- {' '.join((inspect.getdoc(rule) or '').split())}")
    return "\n".join(parts).rstrip("\n") + "\n"


def _section(model: type[Spec], path: tuple[str, ...], parts: list[str]) -> None:
    """Appends a model's heading and table, then those of the models inside it."""
    parts.append(f"## {'`' + '.'.join(path) + '`' if path else 'Top level'}\n")
    parts.append(f"{inspect.getdoc(model)}\n")
    parts.append("| field | takes | default | |\n| --- | --- | --- | --- |")
    fields = fields_by_alias(model)
    for alias, field in fields.items():
        parts.append(
            f"| `{alias}` | {_cell(words(field.annotation, field.metadata))} | {_default(field)} "
            f"| {_cell(field.description or '')} |"
        )
    parts.append("")
    for alias, field in fields.items():
        inner, many = nested_model(field.annotation)
        if inner is not None:
            _section(inner, (*path, alias + ("[]" if many else "")), parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value: Any = field.get_default(call_default_factory=True, validated_data={})
    inner, _ = nested_model(field.annotation)
    if isinstance(value, Spec):
        value = value.model_dump(mode="json", exclude_defaults=True)
        if not value:
            return "its fields' defaults"
    elif inner is not None and value is None:
        return "`null`"
    return f"`{json.dumps(value, ensure_ascii=False)}`"
