"""YAML as kubectl reads it, bounded.

kubectl turns a file into JSON through a fork of go-yaml v2 before anything
looks at it, and that reading differs from PyYAML's: ``1e-3`` is a number,
``yes`` and ``on`` are booleans, ``1:30`` and dates are text, ``1.0`` is as good
as ``1`` where a whole number is wanted (JSON has one kind of number), keys are
text. The same job file must mean the same to ``kubectl apply`` and to
``diloco run``, so this module resolves scalars by those rules; the table in
tests/unit/protocol/spec/test_load.py was recorded from kubectl 1.32.

Parsing goes over libyaml's events with a stack of our own (docs/decisions/017): no recursion, no
object construction, and bounds on size, depth and the number of values, so that
neither nesting nor aliases of aliases can exhaust memory. Duplicate keys,
tags other than YAML's own, and several documents are refused.
"""

from __future__ import annotations

import copy
import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

MAX_BYTES = 1024 * 1024
MAX_DEPTH = 64
MAX_VALUES = 100_000

_TOO_MANY = f"there are more than {MAX_VALUES} values (aliases count in full)"
_TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"

Path = tuple[str | int, ...]

_TRUE = {w for word in ("y", "yes", "true", "on") for w in (word, word.capitalize(), word.upper())}
_FALSE = {w for word in ("n", "no", "false", "off") for w in (word, word.capitalize(), word.upper())}
_NULL = {"", "~", "null", "Null", "NULL"}
_NOT_FINITE = {sign + word for sign in ("", "+", "-") for word in (".inf", ".Inf", ".INF")} | {".nan", ".NaN", ".NAN"}
_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
_LOOSE_UNDERSCORE = re.compile(r"(?<![0-9])_|_(?![0-9])")
_INTEGERS = (  # base, pattern of the digits after sign and prefix
    (16, re.compile(r"^([-+]?)0[xX]([0-9a-fA-F]+)$")),
    (2, re.compile(r"^([-+]?)0[bB]([01]+)$")),
    (2, re.compile(r"^()0b([-+][01]+)$")),  # go-yaml's own oddity
    (8, re.compile(r"^([-+]?)0[oO]?([0-7]+)$")),
    (10, re.compile(r"^([-+]?)(0|[1-9][0-9]*)$")),
)
_TAGS = {f"tag:yaml.org,2002:{kind}": kind for kind in ("str", "int", "float", "bool", "null", "map", "seq")}


class YamlProblem(Exception):
    """The text cannot be read; ``path`` is where, as far as it is known."""

    def __init__(self, message: str, path: Path = (), line: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.line = line


def resolve(text: str) -> str | int | float | bool | None:
    """A plain (unquoted) scalar, as kubectl reads it. Raises ValueError for what JSON cannot carry."""
    if text in _NULL:
        return None
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    if text in _NOT_FINITE:
        raise ValueError(f"{text} is not a finite number")
    if text[0] not in "+-.0123456789":
        return text
    if text[0] == "." and _LOOSE_UNDERSCORE.search(text):
        return text
    plain = text.replace("_", "")
    for base, pattern in _INTEGERS:
        if match := pattern.match(plain):
            if len(match[2]) > 300:
                return text
            return int(match[1] + match[2], base)
    if _FLOAT.match(plain):
        number = float(plain)
        if math.isinf(number):
            return text
        # JSON writes 1.0 and 1e3 as 1 and 1000, which then pass as whole numbers.
        return int(number) if number.is_integer() and abs(number) < 1e21 else number
    return text


def _scalar(event: yaml.ScalarEvent) -> str | int | float | bool | None:
    tag = event.tag
    if tag is None or tag == "!":
        quoted = event.style in ("'", '"', "|", ">") or tag == "!"
        return event.value if quoted else resolve(event.value)
    kind = _TAGS.get(tag)
    if kind == "str":
        return event.value
    value = resolve(event.value)
    fits = {
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": isinstance(value, (int, float)) and not isinstance(value, bool),
        "bool": isinstance(value, bool),
        "null": value is None,
    }
    if kind not in fits:
        raise ValueError(f"the tag {tag} is not known: only YAML's own tags are read")
    if not fits[kind]:
        raise ValueError(f"{event.value!r} is not a {kind}, as its tag says")
    return value


def _key(value: Any) -> str:
    """A mapping's key as JSON has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int)):
        return str(value)
    if isinstance(value, float):
        return f"{value:.9g}"
    raise ValueError("a key must be text")


@dataclass
class _Open:
    """A mapping or sequence whose end has not come yet."""

    value: dict[str, Any] | list[Any]
    path: Path
    anchor: str | None
    line: int
    key: str | None = None
    merging: bool = False  # the value of << comes next
    merged: list[tuple[Any, int]] = field(default_factory=list)


@dataclass
class YamlDocument:
    """A parsed document: plain values, and the line (from 1) of each path."""

    value: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    found: bool = False


class _Builder:
    """Builds one document from libyaml's events."""

    def __init__(self) -> None:
        self.document = YamlDocument()
        self.stack: list[_Open] = []
        self.anchors: dict[str, tuple[Any, int, int]] = {}  # value, number of values, depth
        self.count = 0

    def path(self) -> Path:
        if not self.stack:
            return ()
        top = self.stack[-1]
        if isinstance(top.value, list):
            return (*top.path, len(top.value))
        return top.path if top.key is None else (*top.path, top.key)

    def add(self, value: Any, size: int, line: int, *, scalar: bool) -> None:
        self.count += size
        if self.count > MAX_VALUES:
            raise YamlProblem(_TOO_MANY, (), line)
        if not self.stack:
            self.document.value, self.document.found = value, True
            return
        top = self.stack[-1]
        if isinstance(top.value, list):
            top.value.append(value)
        elif top.key is None:
            if not scalar:
                raise YamlProblem("a key must be text", top.path, line)
            try:
                key = _key(value)
            except ValueError as error:
                raise YamlProblem(str(error), top.path, line) from None
            if key in top.value:
                first = self.document.lines.get((*top.path, key))
                where = f" (first on line {first})" if first else ""
                raise YamlProblem(f"{key} is given twice{where}: keep one", (*top.path, key), line)
            top.key = key
            self.document.lines[(*top.path, key)] = line
        else:
            if top.merging:
                top.merged.append((value, line))
                top.merging = False
            else:
                top.value[top.key] = value
            top.key = None

    def open(self, value: dict[str, Any] | list[Any], event: Any) -> None:
        line = event.start_mark.line + 1
        if len(self.stack) >= MAX_DEPTH:
            raise YamlProblem(_TOO_DEEP, (), line)
        top = self.stack[-1] if self.stack else None
        if top is not None and isinstance(top.value, dict) and top.key is None:
            raise YamlProblem("a key must be text", top.path, line)
        if event.tag is not None and _TAGS.get(event.tag) != ("map" if isinstance(value, dict) else "seq"):
            raise YamlProblem(f"the tag {event.tag} is not known: only YAML's own tags are read", self.path(), line)
        path = self.path()
        self.document.lines.setdefault(path, line)
        if event.anchor is not None:
            self.anchors.pop(event.anchor, None)
        self.stack.append(_Open(value, path, event.anchor, line))

    def close(self) -> None:
        done = self.stack.pop()
        if isinstance(done.value, dict):
            for merged, line in done.merged:
                for source in merged if isinstance(merged, list) else [merged]:
                    if not isinstance(source, dict):
                        raise YamlProblem("<< takes a mapping or a list of mappings", done.path, line)
                    for key, value in source.items():
                        done.value.setdefault(key, value)
        if done.anchor is not None:
            self.anchors[done.anchor] = (done.value, *_extent(done.value))
        self.add(done.value, 1, done.line, scalar=False)

    def handle(self, event: Any) -> None:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.ScalarEvent):
            is_key = bool(self.stack) and isinstance(self.stack[-1].value, dict) and self.stack[-1].key is None
            if event.value == "<<" and is_key and not event.style and event.tag is None:
                top = self.stack[-1]
                if top.value or top.merged:
                    # go-yaml lets << replace the keys before it, other readers do not.
                    raise YamlProblem("<< must come first, and once, in its mapping", top.path, line)
                top.key, top.merging = "<<", True
                return
            try:
                value = _scalar(event)
            except ValueError as error:
                raise YamlProblem(str(error), self.path(), line) from None
            if event.anchor is not None:
                self.anchors[event.anchor] = (value, 1, 0)
            if not is_key:
                self.document.lines.setdefault(self.path(), line)
            self.add(value, 1, line, scalar=True)
        elif isinstance(event, yaml.MappingStartEvent):
            self.open({}, event)
        elif isinstance(event, yaml.SequenceStartEvent):
            self.open([], event)
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            self.close()
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                raise YamlProblem(f"*{event.anchor} names nothing that came before it", self.path(), line)
            value, size, depth = self.anchors[event.anchor]
            if self.count + size > MAX_VALUES:
                raise YamlProblem(_TOO_MANY, (), line)
            if len(self.stack) + depth > MAX_DEPTH:
                raise YamlProblem(_TOO_DEEP, (), line)
            self.add(copy.deepcopy(value), size, line, scalar=not isinstance(value, (dict, list)))


def _extent(value: Any) -> tuple[int, int]:
    """Number of values in a tree, and its depth (a scalar's is 0)."""
    total, deepest, todo = 0, 0, [(value, 0)]
    while todo:
        item, depth = todo.pop()
        total, deepest = total + 1, max(deepest, depth)
        if isinstance(item, (dict, list)):
            inner = item.values() if isinstance(item, dict) else item
            todo.extend((child, depth + 1) for child in inner)
    return total, deepest


def parse(text: str) -> YamlDocument:
    """The one document in ``text``; empty documents beside it do not count.

    Raises YamlProblem. A text without any value gives a document whose ``found`` is False.
    """
    if len(text) > MAX_BYTES:
        raise YamlProblem(f"more than {MAX_BYTES} characters: a job file is a few kilobytes")
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    result, builder, first_line = YamlDocument(), _Builder(), 1
    try:
        for event in yaml.parse(text, Loader=loader):
            if isinstance(event, yaml.DocumentStartEvent):
                builder, start = _Builder(), event.start_mark
                first_line = 1 if start is None else start.line + 1
            elif isinstance(event, yaml.DocumentEndEvent):
                if builder.document.value is not None:
                    if result.found:
                        raise YamlProblem(
                            "there are several documents, and a file holds one job: "
                            "put what begins here into a file of its own",
                            (),
                            first_line,
                        )
                    result = builder.document
            else:
                builder.handle(event)
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark or error.context_mark
        said = " ".join(part for part in (error.context, error.problem) if part)
        raise YamlProblem(f"not YAML: {said}", (), None if mark is None else mark.line + 1) from None
    except yaml.YAMLError as error:
        raise YamlProblem(f"not YAML: {' '.join(str(error).split())}") from None
    return result
