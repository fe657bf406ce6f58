"""What all parts of the job spec share: the strict base model and the field kinds.

Every model is frozen, refuses unknown fields, and takes no value of another type ("3" is not 3), because the Kubernetes
API server would not either. Text and lists are bounded, so that rules over them stay cheap in a custom resource
definition.
"""

from __future__ import annotations

import re
import types
import typing
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo

NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
"""Kubernetes DNS label (RFC 1035)."""

ADDRESS_PATTERN = r"^([A-Za-z0-9]([-.A-Za-z0-9]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?$"
"""host or host:port; an IPv6 host in brackets."""
CIDR_PATTERN = (
    r"^((25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])(\.(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])){3}/(3[0-2]|[12]?[0-9])"
    r"|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))$"
)
"""An IPv4 or IPv6 address and the length of its prefix, as the API server takes it of a Service."""


Path = tuple[str | int, ...]
"""Where something lies in a job: fields by the names of the file, items by their index."""


class Spec(BaseModel):
    """Base of every part of a job: camelCase in YAML, snake_case in Python."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


Text = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
"""A path, URI or name: not empty."""

OBJECT_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
"""Kubernetes DNS subdomain (RFC 1123)."""

NAMESPACE_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
"""Kubernetes DNS label (RFC 1123)."""

FUNCTION_PATTERN = r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$"
"""module:function. No class such as \\w here: regular expressions in Go know them for ASCII only."""

BUCKET_PATTERN = r"^(s3|gs|az)://.+$"
"""What obstore speaks, the client of buckets."""

BucketUri = Annotated[str, StringConstraints(pattern=BUCKET_PATTERN, max_length=1024)]
"""A bucket, and a folder in it."""

OUTPUT_PATTERN = r"^(/.*|(s3|gs|az)://.+)$"

OutputUri = Annotated[str, StringConstraints(pattern=OUTPUT_PATTERN, max_length=1024)]
"""A directory by its absolute path, or a bucket and a folder in it."""

Name = Annotated[str, StringConstraints(pattern=OBJECT_PATTERN, max_length=253)]
"""The name of a Kubernetes object."""

_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)")


def _qualified(key: str) -> bool:
    """Whether Kubernetes takes ``key`` for a label: a name, or a DNS subdomain, a slash and a name."""
    prefix, slash, name = key.rpartition("/")
    return (
        len(name) <= 63
        and _LABEL.fullmatch(name) is not None
        and (not slash or (len(prefix) <= 253 and re.fullmatch(OBJECT_PATTERN, prefix) is not None))
    )


def _labels(labels: dict[str, str]) -> dict[str, str]:
    for key, value in labels.items():
        if not _qualified(key):
            raise ValueError(f"must have keys such as team or example.org/team, and {key!r} is none")
        if value and (len(value) > 63 or _LABEL.fullmatch(value) is None):
            raise ValueError(
                "must have values of at most 63 letters, digits, dashes, dots and underscores, from a "
                f"letter or digit to another; that of {key} is none"
            )
    return labels


def _annotations(annotations: dict[str, str]) -> dict[str, str]:
    for key in annotations:
        if not _qualified(key.lower()):
            raise ValueError(f"must have keys such as note or example.org/note, and {key!r} is none")
    if sum(len(word.encode()) for pair in annotations.items() for word in pair) > 256 * 1024:
        raise ValueError("must be at most 256 KiB, keys and values together")
    return annotations


Labels = Annotated[dict[str, str], AfterValidator(_labels)]
"""Kubernetes labels."""

Annotations = Annotated[dict[str, str], AfterValidator(_annotations)]
"""Kubernetes annotations."""

Pattern = Annotated[str, StringConstraints(min_length=1, max_length=256)]
"""A shell pattern (fnmatch) over parameter names."""

Seconds = Annotated[float, Field(gt=0, le=31_536_000)]
"""A duration in seconds, up to one year."""

Free = dict[str, Any]
"""A mapping that others define (pod templates, model configurations)."""


def unwrap(annotation: Any) -> tuple[Any, bool]:
    """The annotation without ``Annotated`` and without ``| None``; whether None was allowed."""
    nullable = False
    while True:
        origin = typing.get_origin(annotation)
        if origin is Annotated:
            annotation = typing.get_args(annotation)[0]
        elif origin in (types.UnionType, typing.Union):
            kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
            nullable = nullable or len(kinds) < len(typing.get_args(annotation))
            if len(kinds) != 1:
                return annotation, nullable
            annotation = kinds[0]
        else:
            return annotation, nullable


def nested_model(annotation: Any) -> tuple[type[Spec] | None, bool]:
    """The model that a field holds, and whether it holds a list of them; (None, ...) for plain fields."""
    kind, _ = unwrap(annotation)
    if typing.get_origin(kind) is list:
        item, _ = unwrap(typing.get_args(kind)[0])
        return (item if isinstance(item, type) and issubclass(item, Spec) else None), True
    return (kind if isinstance(kind, type) and issubclass(kind, Spec) else None), False


def fields_by_alias(model: type[Spec]) -> dict[str, FieldInfo]:
    """The fields of a model under the names that YAML uses."""
    return {field.alias or name: field for name, field in model.model_fields.items()}
