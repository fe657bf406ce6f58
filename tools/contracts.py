"""The generated parts of docs/contracts.md, from the models of diloco_protocol/documents.py (tools/generate.py)."""

from __future__ import annotations

import types
import typing
from typing import Annotated, Any, Literal

from diloco_protocol.documents import Document, LearnerPage, Report, StatusDocument

DOCUMENTS: dict[str, type[Document]] = {"status": StatusDocument, "learner": LearnerPage, "report": Report}


def table(model: type[Document]) -> str:
    """The Markdown table of a document's fields, those of inner objects under their paths."""
    return "\n".join(["| field | type | |", "|---|---|---|", *_rows(model, "")])


def _rows(model: type[Document], path: str) -> list[str]:
    rows = []
    for name, field in model.model_fields.items():
        where, inner = path + (field.alias or name), _model_of(field.annotation)
        many = "list" in str(field.annotation) and inner is not None
        rows.append(f"| `{where}{'[]' if many else ''}` | {_type_words(field.annotation)} | {field.description} |")
        if inner is not None:
            rows += _rows(inner, f"{where}{'[]' if many else ''}.")
    return rows


def _parts(annotation: Any) -> tuple[Any, ...]:
    """The annotation's alternatives, without bounds."""
    if typing.get_origin(annotation) is Annotated:
        return _parts(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return tuple(part for one in typing.get_args(annotation) for part in _parts(one))
    return (annotation,)


def _model_of(annotation: Any) -> type[Document] | None:
    """The model inside: itself, or of a list's items, or the one that may be null."""
    for part in _parts(annotation):
        if isinstance(part, type) and issubclass(part, Document):
            return part
        if typing.get_origin(part) is list:
            return _model_of(typing.get_args(part)[0])
    return None


def _type_words(annotation: Any) -> str:
    """The type as a reader of JSON knows it."""
    words = []
    for part in _parts(annotation):
        origin, inside = typing.get_origin(part), typing.get_args(part)
        if origin is list:
            words.append("list" if _model_of(part) else f"list of {_type_words(inside[0])}s")
        elif origin is Literal:
            words.append(", ".join(f"`{one}`" for one in inside))
        elif origin in (dict, tuple) or (isinstance(part, type) and issubclass(part, Document)):
            words.append("pair" if origin is tuple else "object")
        else:
            names = {str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "null"}
            words.append(names.get(part) or f"text (`{part.__name__}`)")
    return " or ".join(words)


def tables() -> dict[str, str]:
    """The parts of the page by their names."""
    return {name: table(model) for name, model in DOCUMENTS.items()}
