"""The custom resource definition of DiLoCoJob; ``tools/generate.py`` writes it to files.

Theory of operation. The schema is made from the models that the loader validates with (``diloco_protocol.spec.job``,
``status.py``), field by field: type, range, choices, pattern, lengths, whether null is allowed, default, description.
What holds between fields is in ``crd_rules.py``. So the API server refuses what ``diloco validate`` refuses, fills in
the same defaults, and stores what the models read back to the same job.

Mappings that others define (pod templates, report) are kept as they are written. A model's configuration is a mapping
of anything: unlike a wholly unknown object, it is compared key by key (``crd_rules.py`` says why that matters).
"""

from __future__ import annotations

import typing
from enum import StrEnum
from typing import Any, Literal

import yaml
from crd_rules import Rule, rules
from pydantic.fields import FieldInfo

from diloco_operator.kube.kinds import JOB
from diloco_operator.status_models import JobStatus
from diloco_protocol.spec.base import Spec, fields_by_alias, nested_model, unwrap
from diloco_protocol.spec.explain import constraints
from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.vocabulary import DOMAIN, VERSION

MAX_BYTES = 128 * 1024
"""Half of what `kubectl apply` takes: it keeps a second copy in an annotation of at most 256 KiB."""

Schema = dict[str, Any]

# Lists whose items have a key: model and field → the key. Apply merges them item by item.
_LIST_KEYS = {("JobSpec", "regions"): "name", ("JobStatus", "conditions"): "type", ("JobStatus", "regions"): "name"}

COLUMNS: tuple[tuple[str, str, str, int], ...] = (
    # name, type, JSON path, priority (above 0: with -o wide)
    ("Phase", "string", ".status.phase", 0),
    ("Learners", "string", ".status.learners", 0),
    ("Quorum", "string", ".status.quorum", 0),
    ("Step", "integer", ".status.progress.step", 0),
    ("Tokens", "integer", ".status.progress.tokens", 0),
    ("Percent", "integer", ".status.progress.percent", 0),
    ("SecondsLeft", "integer", ".status.progress.secondsLeft", 1),
    ("Loss", "number", ".status.progress.loss", 0),
    ("Goodput", "number", ".status.progress.goodput", 0),
    ("Merges", "integer", ".status.progress.merges", 1),
    ("Epoch", "integer", ".status.syncer.epoch", 1),
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].reason', 1),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)


def definition() -> dict[str, Any]:
    """The CustomResourceDefinition."""
    names = {
        "kind": JOB.name,
        "listKind": f"{JOB.name}List",
        "plural": JOB.plural,
        "singular": JOB.name.lower(),
        "shortNames": ["dj"],
        "categories": ["all"],
    }
    columns = [
        {"name": name, "type": kind, "jsonPath": path} | ({"priority": priority} if priority else {})
        for name, kind, path, priority in COLUMNS
    ]
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": columns,
        "schema": {"openAPIV3Schema": schema()},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{JOB.plural}.{DOMAIN}"},
        "spec": {"group": DOMAIN, "names": names, "scope": "Namespaced", "versions": [version]},
    }


def schema() -> Schema:
    """The structural schema, rules included."""
    root: Schema = {
        "description": "A training job by Decoupled DiLoCo. docs/job.md describes every field.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 253}}},
            "spec": model_schema(JobSpec) | {"description": "The job itself."},
            "status": model_schema(JobStatus) | {"description": "How it is; written by the operator."},
        },
    }
    for rule in rules():
        _node(root, rule.home).setdefault("x-kubernetes-validations", []).append(_validation(rule))
    return root


def _node(root: Schema, path: tuple[str, ...]) -> Schema:
    for step in path:
        root = root["items"] if step == "[]" else root["properties"][step]
    return root


def _validation(rule: Rule) -> dict[str, Any]:
    found: dict[str, Any] = {"rule": rule.cel, "message": rule.message}
    if rule.field:
        found["fieldPath"] = rule.field
    if rule.reason != "FieldValueInvalid":
        found["reason"] = rule.reason
    return found


def model_schema(model: type[Spec]) -> Schema:
    """The schema of a mapping that ``model`` reads."""
    fields = fields_by_alias(model)
    found: Schema = {"type": "object"}
    if required := [alias for alias, field in fields.items() if field.is_required()]:
        found["required"] = required
    found["properties"] = {
        alias: _field_schema(field, _LIST_KEYS.get((model.__name__, alias)), free_keys=alias == "config")
        for alias, field in fields.items()
    }
    return found


def _field_schema(field: FieldInfo, list_key: str | None, free_keys: bool) -> Schema:
    found: Schema = {"description": field.description} if field.description else {}
    found |= value_schema(field.annotation, field.metadata)
    if isinstance(field.json_schema_extra, dict):
        found |= field.json_schema_extra
    if free_keys:
        found["additionalProperties"] = {"x-kubernetes-preserve-unknown-fields": True, "nullable": True}
        del found["x-kubernetes-preserve-unknown-fields"]
    if list_key is not None:
        found["x-kubernetes-list-type"] = "map"
        found["x-kubernetes-list-map-keys"] = [list_key]
    if not field.is_required():
        default: Any = field.get_default(call_default_factory=True, validated_data={})
        if isinstance(default, Spec):
            # Whole, though the fields in it have their defaults: the API server tries the rules on it.
            default = default.model_dump(mode="json", exclude_none=True)
        # Null is what a field without default reads as: nothing to fill in.
        if default is not None:
            found["default"] = default
    return found


def value_schema(annotation: Any, metadata: typing.Iterable[Any] = ()) -> Schema:
    """The schema of one value, without default and description."""
    kind, nullable = unwrap(annotation)
    bounds = constraints(annotation, metadata)
    origin = typing.get_origin(kind)
    found: Schema
    if origin is Literal or (isinstance(kind, type) and issubclass(kind, StrEnum)):
        # Among choices the API server takes no null, listed or not: a writer leaves the field out.
        choices = typing.get_args(kind) if origin is Literal else [str(one) for one in kind]
        found, nullable = {"type": "string", "enum": list(choices)}, False
    elif kind is bool:
        found = {"type": "boolean"}
    elif kind in (int, float):
        found = {"type": "integer", "format": "int64"} if kind is int else {"type": "number"}
        for low, high in (("ge", "le"), ("gt", "lt")):
            if low in bounds:
                found["minimum"] = bounds[low]
            if high in bounds:
                found["maximum"] = bounds[high]
        found |= {"exclusiveMinimum": True} if "gt" in bounds else {}
        found |= {"exclusiveMaximum": True} if "lt" in bounds else {}
    elif kind is str:
        found = (
            {"type": "string"}
            | _renamed(bounds, "Length")
            | ({"pattern": bounds["pattern"]} if "pattern" in bounds else {})
        )
    elif origin is list:
        (item,) = typing.get_args(kind)
        found = {"type": "array"} | _renamed(bounds, "Items") | {"items": value_schema(item)}
    elif origin is dict:
        found = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        if typing.get_args(kind)[1] is str:
            found = {
                "type": "object",
                "maxProperties": 64,
                "additionalProperties": {"type": "string", "maxLength": 4096},
            }
    else:
        inner, _ = nested_model(kind)
        if inner is None:
            raise TypeError(f"no schema for {annotation!r}")
        found = model_schema(inner)
    return found | ({"nullable": True} if nullable else {})


def _renamed(bounds: dict[str, Any], what: str) -> Schema:
    names = {"min_length": f"min{what}", "max_length": f"max{what}"}
    return {names[name]: value for name, value in bounds.items() if name in names}


def text() -> str:
    """The definition as YAML."""
    head = "# Written by `make generate` from the job's models (tools/crd_schema.py). Don't edit.\n"
    return head + yaml.safe_dump(definition(), sort_keys=False, width=110, allow_unicode=True)
