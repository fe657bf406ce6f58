"""The generated parts of docs/contracts.md, from the models of diloco_protocol/documents.py (tools/generate.py)."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from diloco_protocol.documents import Document, LearnerPage, Report, StatusDocument

DOCUMENTS: dict[str, type[Document]] = {"status": StatusDocument, "learner": LearnerPage, "report": Report}
WIDTH = 116  # of an example's lines
_LINK: dict[str, Any] = {
    "up_bytes_per_second": 3.1e6, "down_bytes_per_second": None, "round_trip_seconds": 0.02, "missing_fragments": 0,
}  # fmt: skip
_SLOT: dict[str, Any] = {
    "slot": 0, "retired": False, "region": "local", "ordinal": 0, "process": "ab12", "incarnation": 1,
    "incarnations": 1, "state": "active", "ready": True, "step": 120, "steps": 120, "tokens": 245760, "loss": 2.41,
    "diverged": False, "step_seconds": 0.05, "compute_seconds": 6.1, "stalled_seconds": 0.02, "merged_pushes": 40,
    "heard_seconds_ago": 0.1, "starved": False, "paused": False, "bytes_up": 812000, "bytes_down": 1650000,
    "link": _LINK
    | {"needs_up_bytes_per_second": 65000.0, "needs_down_bytes_per_second": 132000.0, "too_slow": False, "message": ""},
    "sequences_per_step": 16.0, "ranks": 8, "slowest_rank": 5, "slowest_rank_seconds": 0.002,
}  # fmt: skip
_ROUND: dict[str, Any] = {
    "fragment": 1, "round": 17, "merging": False, "open_seconds": 0.4, "overdue": False, "message": "",
    "responders": [0], "waiting": [1, 2],
}  # fmt: skip
_REFUSAL: dict[str, Any] = {
    "role": "learner", "region": "local", "ordinal": 0, "reason": "spec-drift", "message": "...",
    "fields": ["training.model"], "seconds_ago": 3.0,
}  # fmt: skip
_TLS: dict[str, Any] = {
    "secure": True, "connections": 5, "handshakes": 0, "refused": {"expired": 1}, "expires": 1760000000.0,
    "peers_expire": 1760000000.0,
}  # fmt: skip
_EVENT: dict[str, Any] = {
    "n": 1, "time": 1760000000.0, "kind": "joined", "slot": 0, "incarnation": 1, "message": "...",
}  # fmt: skip
_STATUS: dict[str, Any] = {
    "job": "tiny-gpt", "phase": "training", "message": "", "epoch": 1, "elapsed_seconds": 12.5,
    "progress": 0.25, "seconds_left": 37.5,
    "stop": {"kind": "tokens", "limit": 2e6}, "step": 120, "loss": 2.4, "quorum": {"active": 3, "required": 1},
    "standby": 0, "standbys": [], "evaluators": 1, "versions": [3, 2, 2], "parameters": 869504, "rounds": [_ROUND],
    "slots": [_SLOT],
    "tokens": {"trained": 737280, "merged": 688128, "pending": 45056, "dropped": 4096}, "tokens_per_second": 58000.0,
    "merges": 7,
    "learners_in_merges": {"recent": 2.9, "overall": 2.8, "exchange_seconds": 0.4, "overlap_seconds": 0.3},
    "goodput": 0.93, "uptime": 1.0, "eval_loss": [(0, 5.6), (410000, 2.4)], "hold_since_seconds": None,
    "bytes_up": 2436000, "bytes_down": 4950000, "refused": {"other-round": 1}, "regions_lost": [], "sessions": 4,
    "refusals": [_REFUSAL],
    "regions": [
        {"name": "local", "bytes_up": 2436000, "bytes_down": 4950000, "wire_bytes_up": None, "wire_bytes_down": None}
    ],
    "tls": _TLS, "store_problem": "", "output": {"uri": "file:///models/tiny-gpt", "state": "waiting"},
    "seconds": {"merge": 0.2, "quorum": 3.1, "waited": 3.6}, "events": [_EVENT],
}  # fmt: skip
_LEARNER: dict[str, Any] = {
    "job": "tiny-gpt", "role": "learner", "region": "local", "ordinal": 0, "process": "ab12", "phase": "training",
    "message": "", "connected": True, "tried": True, "joined": True, "standby": False, "idle": False, "slot": 0,
    "merges": 57, "step": 120, "tokens": 245760, "loss": 2.41, "epoch": 1, "link": _LINK,
    "refused": None, "settings": {"sync": {}, "learners": 3, "stop": {}},
}  # fmt: skip
EXAMPLES: dict[str, Document] = {
    "status": StatusDocument.model_validate(_STATUS),
    "learner": LearnerPage.model_validate(_LEARNER),
}


def example(document: Document) -> str:
    """A document with every field of its model, as a block of JSON."""
    return f"```json\n{_json(document.model_dump(mode='json', by_alias=True), 0)}\n```"


def _json(value: Any, column: int) -> str:
    """JSON in lines of at most WIDTH characters, of which the first begins at this column."""
    whole = json.dumps(value, ensure_ascii=False)
    if column + len(whole) <= WIDTH or not isinstance(value, dict | list) or not value:
        return whole
    lines = [""]
    for item in _items(value, column + 1):
        if lines[-1] and (column + 1 + len(lines[-1]) + len(item) > WIDTH - 2 or "\n" in lines[-1] + item):
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + item
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return opening + f"\n{' ' * (column + 1)}".join(lines) + closing


def _items(value: dict[str, Any] | list[Any], column: int) -> Iterator[str]:
    """Each member of an object or a list, with the comma after it."""
    names = [f"{json.dumps(name)}: " for name in value] if isinstance(value, dict) else [""] * len(value)
    inner = list(value.values()) if isinstance(value, dict) else value
    for n, (name, one) in enumerate(zip(names, inner, strict=True), 1):
        yield name + _json(one, column + len(name)) + ("," if n < len(inner) else "")


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
    examples = {f"{name} example": example(document) for name, document in EXAMPLES.items()}
    return {name: table(model) for name, model in DOCUMENTS.items()} | examples
