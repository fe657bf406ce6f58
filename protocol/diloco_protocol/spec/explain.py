"""Words for fields and mistakes: what a field takes, and what is wrong with a value.

One description serves the error messages and the field reference, so that they say the same.
"""

from __future__ import annotations

import difflib
import re
import shlex
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, TypeAdapter, ValidationError

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
from diloco_protocol.spec.other_names import (
    CONTAINERS,
    SAMPLES,
    meant_by,
    not_here,
    others_by,
    plain_name,
    pod_part,
    translated,
    unit_note,
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
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else f"{value:g}"


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


def dotted(path: Path) -> str:
    """A path as people write it."""
    return ".".join(map(str, path))


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


def _nearest_field(container: type[Spec], name: str) -> str | None:
    """The known field of the model whose name is nearest to an unknown one's."""
    plain = {plain_name(known): known for known in fields_by_alias(container)}
    near = difflib.get_close_matches(plain_name(name), plain, n=1, cutoff=0.6)
    return plain[near[0]] if near else None


def meant_field(model: type[Spec], path: Path) -> Path | None:
    """Where the field lies that was probably meant by the unknown one at ``path``: another spelling at its level, what
    other programs or the paper call it (in the same section, if a field there has that name), a name near to it, the
    only field of its name elsewhere. Of a field in a list's items that was written outside of the list, it is the
    list."""
    container, name = _container(model, path[:-1]), str(path[-1])
    if container is None:
        return None
    near = _nearest_field(container, name)
    if near is not None and plain_name(near) == plain_name(name):
        return (*path[:-1], near)
    above = _without_indices(path[:-1])
    if not_here(name, above):
        return None
    if "podTemplate" in fields_by_alias(container) and pod_part(name, None, "") is not None:
        return (*path[:-1], "podTemplate")
    other = meant_by(name, above)
    if other is not None:
        other = _in_section(model, container, other, above)
        if other[:-1] == above:
            return (*path[:-1], other[-1])
        return next((other[:n] for n in range(1, len(other)) if nested_model(locate(model, other[:n])[0])[1]), other)
    if near is not None:
        return (*path[:-1], near)
    places = _candidates(model, name, above)
    return places[0] if len(places) == 1 else None


def _without_indices(path: Path) -> tuple[str, ...]:
    return tuple(step for step in path if isinstance(step, str))


def _in_section(
    model: type[Spec], container: type[Spec], meant: tuple[str, ...], above: tuple[str, ...]
) -> tuple[str, ...]:
    """The field of the same name as ``meant`` in the section at ``above``, or the only one below it; else ``meant``."""
    if meant[: len(above)] == above:
        return meant
    if meant[-1] in fields_by_alias(container):
        return (*above, meant[-1])
    below = [place for place in _elsewhere(model, meant[-1]) if place[: len(above)] == above]
    return below[0] if len(below) == 1 else meant


def _candidates(model: type[Spec], name: str, above: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The fields that others call so, or else those of that name: below the section at ``above``; those of the whole
    job, if there are none."""
    places = others_by(name, above) or _elsewhere(model, name)
    return [place for place in places if place[: len(above)] == above] or places


def _elsewhere(model: type[Spec], name: str, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of the fields of that name, however it is spelled, anywhere below the model (not inside lists)."""
    found = []
    for alias, field in fields_by_alias(model).items():
        here = (*path, alias)
        if plain_name(alias) == plain_name(name):
            found.append(here)
        inner, many = nested_model(field.annotation)
        if inner is not None and not many:
            found += _elsewhere(inner, name, here)
    return found


_MODEL = ("spec", "training", "model")


def explain_all(model: type[Spec], errors: Sequence[Any]) -> list[tuple[Any, str]]:
    """Each error of ValidationError.errors() with its sentence. Several fields of a transformers configuration that
    were written beside ``config`` are one mistake with one sentence, which has all of them in its example."""
    unknown = [e for e in errors if e["type"] == "extra_forbidden" and tuple(e["loc"])[:-1] == _MODEL]
    meant = [meant_field(model, tuple(e["loc"])) for e in unknown]
    config = (*_MODEL, "config")
    beside = [e for e, field in zip(unknown, meant, strict=True) if field in (None, config)]
    if len(beside) < 2 or config not in meant:
        return [(error, explain(model, error)) for error in errors]
    first, *others = beside
    example = _configuration({str(e["loc"][-1]): e["input"] for e in beside})
    names = ", ".join(str(e["loc"][-1]) for e in others)
    said = (
        f"is not a known field, and neither {'is' if len(others) == 1 else 'are'} {names}: did you mean config? "
        f"Such as {_flow({'config': example})[1:-1]}"
    )
    return [(e, said if e is first else explain(model, e)) for e in errors if e not in others]


def _configuration(fields: dict[str, Any]) -> dict[str, Any]:
    """A transformers configuration with these fields of one."""
    kind = next((fields.pop(name) for name in list(fields) if name in ("model_type", "architecture", "arch")), "llama")
    return {"model_type": kind if isinstance(kind, str) else "llama", **fields}


def explain(model: type[Spec], error: Any) -> str:
    """A pydantic error as a sentence with the cure. ``error`` is an item of ValidationError.errors()."""
    path, kind = tuple(error["loc"]), error["type"]
    if kind == "extra_forbidden":
        meant, above = meant_field(model, path), _without_indices(path[:-1])
        if meant is not None:
            return _unknown(model, path, meant, error["input"])
        if said := not_here(str(path[-1]), above):
            return said
        places = _candidates(model, str(path[-1]), above)
        if 1 < len(places) <= 3:
            return f"is not a known field here: did you mean {' or '.join('.'.join(place) for place in places)}?"
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
    said = f"must be {words(annotation, metadata)}{_sample(model, path, annotation, error['input'])}"
    said += _scalar_cure(annotation, metadata, str(path[-1]), error["input"])
    split = _split(error["input"]) if typing.get_origin(unwrap(annotation)[0]) is list else None
    if split is not None and _takes(annotation, metadata, split):
        said += f". Such as {path[-1]}: {_flow(split)}"
    choices = typing.get_args(unwrap(annotation)[0]) if kind == "literal_error" else ()
    if isinstance(error["input"], str):
        theirs, remark = translated(dotted(path), str(path[-1]), error["input"])
        said += f"; {remark}" if remark else ""
        near = difflib.get_close_matches(str(theirs).lower(), [str(choice) for choice in choices], n=1)
        near = near or [str(c) for c in choices if str(c).lower() == error["input"].lower()]
        if near and len(choices) > 1:
            said += f" (did you mean {near[0]}?)"
    return said


_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def _scalar_cure(annotation: Any, metadata: list[Any], name: str, written: Any) -> str:
    """How to write a number with a unit behind it or in quotes, and a text that YAML reads as something else; empty:
    the field would not take that either."""
    kind = unwrap(annotation)[0]
    if kind is str and isinstance(written, bool | int | float):
        return ": put it into quotes" * _takes(annotation, metadata, str(written).lower())
    if kind not in (int, float) or not isinstance(written, str):
        return ""
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*([a-z]*)", written.strip().lower())
    units = _SECONDS if "seconds" in name.lower() else _UNITS
    if found is None or (found[2] and found[2] not in units):
        return ""
    number = float(found[1]) * units.get(found[2], 1)
    meant = int(number) if kind is int and number.is_integer() else number
    said = f": write {number:.15g}{'' if found[2] else ', without quotes'}"
    return said * _takes(annotation, metadata, meant)


def _split(written: Any) -> list[str] | None:
    """The words of a text that stands where a list belongs, as a shell cuts them; None: it is none."""
    try:
        return shlex.split(written) if isinstance(written, str) else None
    except ValueError:  # a quotation mark without its other
        return None


def _unknown(model: type[Spec], path: Path, meant: Path, value: Any) -> str:
    """What to say of the unknown field at ``path``. One by another's name gets an example, with its own value if
    that field takes it."""
    if meant[:-1] == path[:-1]:
        said = f"is not a known field: did you mean {meant[-1]}?"
    else:
        said = f"is not a known field here: did you mean {dotted(meant)}?"
    name = str(path[-1])
    if plain_name(str(meant[-1])) == plain_name(name):
        return said
    if note := unit_note(name):
        return f"{said} {note}"
    if meant[-1] != "podTemplate" and not others_by(name, _without_indices(path[:-1])):
        return said
    value, remark = translated(dotted(meant), name, value)
    first = 0 if meant[:-1] == path[:-1] else 1
    example = _example(model, meant, value, name)
    for step in reversed(meant[first:] if first else meant[-1:]):
        example = {str(step): example}
    said += f" {remark[:1].upper()}{remark[1:]}." if remark else ""
    return f"{said} Such as {'below spec: ' if first else ''}{_flow(example)[1:-1]}"


def _example(model: type[Spec], path: Path, written: Any, name: str = "") -> Any:
    """A value for the field at ``path``: what was written if it takes it, else its example or default. ``name``: the
    field's in the file."""
    if path == ("spec", "regions"):
        counted = isinstance(written, int) and not isinstance(written, bool) and written > 0
        return [{"learners": written if counted else 4}]
    if path == (*_MODEL, "config"):
        return _configuration({name: written})
    if path[-1] == "podTemplate" and len(path) > 1:
        return pod_part(name, written, CONTAINERS[str(path[1])])
    annotation, metadata = locate(model, path)
    for value in (written, [written], written.split() if isinstance(written, str) else written):
        if _takes(annotation, metadata, value):
            return value
    field = fields_by_alias(_container(model, path[:-1]) or model)[str(path[-1])]
    if field.examples:
        return field.examples[0]
    sample = SAMPLES.get(".".join(str(step) for step in path[:-1]), {})
    default = field.get_default(call_default_factory=True, validated_data={})
    return sample.get(str(path[-1]), default) if default in (None, []) else default


def _takes(annotation: Any, metadata: typing.Iterable[Any], value: Any) -> bool:
    """Whether a field of that annotation takes the value."""
    try:
        TypeAdapter(Annotated[annotation, Field(), *metadata]).validate_python(value, strict=True)
    except ValidationError:
        return False
    return value is not None


def _sample(model: type[Spec], path: Path, annotation: Any, written: Any) -> str:
    """An example for a section that was given a single value."""
    inner, many = nested_model(annotation)
    if inner is None or isinstance(written, (dict, list)):
        return ""
    if path == ("spec", "learners"):
        counted = _flow(_example(model, ("spec", "regions"), written))
        return f"; the number of learners is set for each region, such as regions: {counted}"
    if many:
        field = fields_by_alias(_container(model, path[:-1]) or model)[str(path[-1])]
        return f", such as {_flow(_example(model, path, written))}" if field.examples else ""
    sample = SAMPLES.get(".".join(step for step in path if isinstance(step, str)))
    if sample is None:
        return ""
    fields = fields_by_alias(inner)
    taken = (
        (name, value)
        for name in sample
        for value in (written, [written])
        if _takes(fields[name].annotation, fields[name].metadata, value)
    )
    name, value = next(taken, next(iter(sample.items())))
    return f", such as {_flow({name: value})}"


def _flow(value: Any) -> str:
    return yaml.safe_dump([value], default_flow_style=True, sort_keys=False, width=1000).strip()[1:-1]
