"""Words for fields and mistakes: what a field takes, and what is wrong with a value.

One description serves the error messages and the field reference, so that they say the same.
"""

from __future__ import annotations

import difflib
import typing
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, TypeAdapter

from diloco_protocol.spec.base import (
    ADDRESS_PATTERN,
    BUCKET_PATTERN,
    CIDR_PATTERN,
    FUNCTION_PATTERN,
    NAME_PATTERN,
    NAMESPACE_PATTERN,
    OBJECT_PATTERN,
    OUTPUT_PATTERN,
    Path,
    Spec,
    fields_by_alias,
    nested_model,
    unwrap,
)

_PATTERNS = {
    NAME_PATTERN: "lower-case letters, digits and dashes, from a letter to a letter or digit",
    OBJECT_PATTERN: "lower-case letters, digits and dashes between letters or digits, parts joined by dots",
    NAMESPACE_PATTERN: "lower-case letters, digits and dashes between letters or digits",
    FUNCTION_PATTERN: "module:function",
    OUTPUT_PATTERN: "an absolute path, or a bucket by its URI (s3://, gs:// or az://)",
    BUCKET_PATTERN: "a bucket by its URI (s3://, gs:// or az://)",
    ADDRESS_PATTERN: "host or host:port (an IPv6 host in brackets)",
    CIDR_PATTERN: "an address and the length of its prefix, such as 10.0.0.0/8",
}


_BOUNDS = {
    "minimum": "ge",
    "exclusiveMinimum": "gt",
    "maximum": "le",
    "exclusiveMaximum": "lt",
    "minLength": "min_length",
    "maxLength": "max_length",
    "minItems": "min_length",
    "maxItems": "max_length",
    "pattern": "pattern",
}  # JSON Schema's words → pydantic's


def constraints(annotation: Any, metadata: typing.Iterable[Any]) -> dict[str, Any]:
    """Bounds of the annotation (also inside ``| None``) and of the field around it, by pydantic's names."""
    schema = TypeAdapter(Annotated[annotation, Field(), *metadata]).json_schema()
    kinds = [schema, *schema.get("anyOf", ())]
    return {name: kind[word] for kind in kinds for word, name in _BOUNDS.items() if word in kind}


def _number(value: float) -> str:
    return f"{value:,}".replace(",", " ") if isinstance(value, int) and value >= 10_000 else f"{value:g}"


def _range(bounds: dict[str, Any]) -> str:
    said = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "below"}
    return " and ".join(f"{words} {_number(bounds[name])}" for name, words in said.items() if name in bounds)


def words(annotation: Any, metadata: typing.Iterable[Any] = ()) -> str:
    """What a field takes: "a whole number, at least 1 and at most 4096"."""
    kind, nullable = unwrap(annotation)
    bounds = constraints(annotation, metadata)
    tail = ", or null" if nullable else ""
    origin = typing.get_origin(kind)
    if origin is Literal:
        choices = [str(choice) for choice in typing.get_args(kind)]
        return (choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)) + tail
    if kind is bool:
        return "true or false" + tail
    if kind in (int, float):
        said, span = ("a whole number" if kind is int else "a number"), _range(bounds)
        return (f"{said}, {span}" if span else said) + tail
    if kind is str:
        parts = ["text"]
        if pattern := bounds.get("pattern"):
            parts.append(_PATTERNS.get(pattern, f"matching {pattern}"))
        elif bounds.get("min_length"):
            parts.append("not empty")
        if "max_length" in bounds:
            parts.append(f"at most {bounds['max_length']} characters")
        return ", ".join(parts) + tail
    if origin is list:
        (item,) = typing.get_args(kind)
        low, high = bounds.get("min_length", 0), bounds.get("max_length")
        count = f"exactly {low}" if low == high else f"{low} to {high}" if high else f"{low} or more"
        inner, _ = nested_model(kind)
        if inner is not None:
            return f"a list of {count} mappings{tail}"
        return f"a list of {count} items, each {words(item)}{tail}"
    if origin is dict:
        _, value = typing.get_args(kind)
        return ("a mapping of text to text" if value is str else "a mapping") + tail
    if isinstance(kind, type) and issubclass(kind, Spec):
        return "a mapping" + tail
    raise TypeError(f"no words for {annotation!r}")


def locate(model: type[Spec], path: Path) -> tuple[Any, list[Any]]:
    """The annotation of what lies at ``path``, and its metadata; (None, []) where the path leaves the models:
    at an unknown field, or inside a free mapping."""
    annotation: Any = model
    metadata: list[Any] = []
    for step in path:
        kind, _ = unwrap(annotation)
        inside = typing.get_args(kind)
        if isinstance(kind, type) and issubclass(kind, Spec):
            field = fields_by_alias(kind).get(str(step))
            if field is None:
                return None, []
            annotation, metadata = field.annotation, list(field.metadata)
        elif typing.get_origin(kind) in (list, dict) and inside[-1] is not Any:
            annotation, metadata = inside[-1], []
        else:
            return None, []
    return annotation, metadata


def _container(model: type[Spec], path: Path) -> type[Spec] | None:
    """The model that a mapping at ``path`` is read as."""
    return nested_model(locate(model, path)[0])[0]


def suggestion(model: type[Spec], path: Path) -> str | None:
    """The known field nearest to the unknown one at ``path``, at its level."""
    container = _container(model, path[:-1])
    if container is None:
        return None
    known = list(fields_by_alias(container))
    plain = {name.lower().replace("_", "").replace("-", ""): name for name in known}
    written = str(path[-1]).lower().replace("_", "").replace("-", "")
    if written in plain:
        return plain[written]
    near = difflib.get_close_matches(written, plain, n=1, cutoff=0.6)
    return plain[near[0]] if near else None


def _elsewhere(model: type[Spec], name: str, path: tuple[str, ...] = ()) -> list[str]:
    """Paths of the fields of that name, anywhere below the model (not inside lists)."""
    found = []
    for alias, field in fields_by_alias(model).items():
        here = (*path, alias)
        if alias == name:
            found.append(".".join(here))
        inner, many = nested_model(field.annotation)
        if inner is not None and not many:
            found += _elsewhere(inner, name, here)
    return found


def explain(model: type[Spec], error: Any) -> str:
    """A pydantic error as a sentence with the cure. ``error`` is an item of ValidationError.errors()."""
    path, kind = tuple(error["loc"]), error["type"]
    if kind == "extra_forbidden":
        meant = suggestion(model, path)
        if meant is not None:
            return f"is not a known field: did you mean {meant}?"
        places = _elsewhere(model, str(path[-1]))
        if len(places) == 1:
            return f"is not a known field here: did you mean {places[0]}?"
        container = _container(model, path[:-1])
        return f"is not a known field: known are {', '.join(fields_by_alias(container or model))}"
    annotation, metadata = locate(model, path)
    if annotation is None:
        return str(error["msg"])
    if kind == "missing":
        field = fields_by_alias(_container(model, path[:-1]) or model)[str(path[-1])]
        example = f", such as {_flow(field.examples[0])}" if field.examples else ""
        return f"is required: {words(annotation, metadata)}{example}"
    if kind == "value_error":
        return str(error["ctx"]["error"])
    said = f"must be {words(annotation, metadata)}"
    choices = typing.get_args(unwrap(annotation)[0]) if kind == "literal_error" else ()
    if isinstance(error["input"], str):
        near = difflib.get_close_matches(error["input"].lower(), [str(choice) for choice in choices], n=1)
        near = near or [str(c) for c in choices if str(c).lower() == error["input"].lower()]
        if near and len(choices) > 1:
            said += f" (did you mean {near[0]}?)"
    return said


def _flow(value: Any) -> str:
    return yaml.safe_dump([value], default_flow_style=True, sort_keys=False, width=1000).strip()[1:-1]
