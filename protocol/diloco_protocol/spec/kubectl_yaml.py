"""YAML as kubectl reads it, bounded.

kubectl turns a file into JSON through a fork of go-yaml v2 before anything looks at it, and that reading differs from
PyYAML's: ``1e-3`` is a number, ``yes`` and ``on`` are booleans, ``1:30`` and dates are text, ``1.0`` is as good as
``1`` where a whole number is wanted (JSON has one kind of number), keys are text. The same job file must mean the same
to ``kubectl apply`` and to ``diloco run``, so this module resolves scalars by those rules; the table in
tests/unit/protocol/spec/test_load.py was recorded from kubectl 1.32.

It reads libyaml's events and builds plain values from them (docs/decisions/017), with bounds on size, depth and the
number of values, so that neither nesting nor aliases of aliases can exhaust memory. Duplicate keys, tags other than
YAML's own, and several documents are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from diloco_protocol.spec.base import Path

MAX_BYTES = 1024 * 1024
MAX_DEPTH = 64
MAX_VALUES = 100_000

_TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"

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
_KINDS = {"int": (int,), "float": (int, float), "bool": (bool,), "null": (type(None),)}  # a bool is an int


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
    if kind not in _KINDS:
        raise ValueError(f"the tag {tag} is not known: only YAML's own tags are read")
    if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "bool"):
        raise ValueError(f"{event.value!r} is not a {kind}, as its tag says")
    return value


@dataclass
class YamlDocument:
    """A parsed document: plain values (None: there are none), and the line (from 1) of each path."""

    value: Any = None
    lines: dict[Path, int] = field(default_factory=dict)


class _DocumentReader:
    """Reads one document from libyaml's events. A call reads one value; what lies in it takes further calls, to
    the depth that is allowed."""

    def __init__(self, events: Iterator[Any]) -> None:
        self.events = events
        self.lines: dict[Path, int] = {}
        self.anchors: dict[str, Any] = {}
        self.count = 0

    def read_value(self, event: Any, path: Path, depth: int) -> Any:
        """The value at ``path`` that begins with ``event``, inside ``depth`` mappings and sequences."""
        line = _line(event)
        self.lines.setdefault(path, line)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                raise YamlProblem(f"*{event.anchor} names nothing that came before it", path, line)
            return self.copy_value(self.anchors[event.anchor], depth, line)
        self.count_value(line)
        value: Any
        if isinstance(event, yaml.ScalarEvent):
            try:
                value = _scalar(event)
            except ValueError as error:
                raise YamlProblem(str(error), path, line) from None
        else:
            value = self.read_collection(event, path, depth, line)
        if event.anchor is not None:
            self.anchors[event.anchor] = value
        return value

    def read_collection(self, event: Any, path: Path, depth: int, line: int) -> dict[str, Any] | list[Any]:
        if depth >= MAX_DEPTH:
            raise YamlProblem(_TOO_DEEP, (), line)
        mapping = isinstance(event, yaml.MappingStartEvent)
        if event.tag is not None and _TAGS.get(event.tag) != ("map" if mapping else "seq"):
            raise YamlProblem(f"the tag {event.tag} is not known: only YAML's own tags are read", path, line)
        self.anchors.pop(event.anchor, None)  # nothing contains itself
        if mapping:
            return self.read_mapping(path, depth + 1)
        items: list[Any] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self.read_value(event, (*path, len(items)), depth + 1))
        return items

    def read_mapping(self, path: Path, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        merged: list[Any] | None = None
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            line = _line(event)
            if isinstance(event, yaml.ScalarEvent) and event.value == "<<" and not event.style and event.tag is None:
                if found or merged is not None:
                    # go-yaml lets << replace the keys before it, other readers do not.
                    raise YamlProblem("<< must come first, and once, in its mapping", path, line)
                value = self.read_value(next(self.events), (*path, "<<"), depth)
                merged = value if isinstance(value, list) else [value]
                if not all(isinstance(source, dict) for source in merged):
                    raise YamlProblem("<< takes a mapping or a list of mappings", path, line)
                continue
            key = self.read_key(event, path, depth)
            if key in found:
                first = self.lines[*path, key]
                raise YamlProblem(f"{key} is given twice (first on line {first}): keep one", (*path, key), line)
            self.lines[*path, key] = line
            found[key] = self.read_value(next(self.events), (*path, key), depth)
        for source in merged or ():
            for key, value in source.items():
                found.setdefault(key, value)
        return found

    def read_key(self, event: Any, path: Path, depth: int) -> str:
        """The key that ``event`` is, as JSON has it, of the mapping at ``path``."""
        value = self.read_value(event, path, depth) if isinstance(event, yaml.ScalarEvent | yaml.AliasEvent) else None
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, str | int):
            return str(value)
        if isinstance(value, float):
            return f"{value:.9g}"
        raise YamlProblem("a key must be text", path, _line(event))

    def copy_value(self, value: Any, depth: int, line: int) -> Any:
        """What an anchor names, once more: all of it counts again, and may lie no deeper than other values."""
        self.count_value(line)
        if not isinstance(value, dict | list):
            return value
        if depth >= MAX_DEPTH:
            raise YamlProblem(_TOO_DEEP, (), line)
        if isinstance(value, list):
            return [self.copy_value(item, depth + 1, line) for item in value]
        return {key: self.copy_value(item, depth + 1, line) for key, item in value.items()}

    def count_value(self, line: int) -> None:
        self.count += 1
        if self.count > MAX_VALUES:
            raise YamlProblem(f"there are more than {MAX_VALUES} values (aliases count in full)", (), line)


_IN_WORDS = (
    ("while scanning a quoted scalar", "a quotation mark that is opened there is not closed"),
    ("mapping values are not allowed", "a second colon in one line: put text with a colon and a space into quotes"),
    ("did not find expected key", "this line is indented otherwise than those that it belongs to"),
    (
        "block sequence entries are not allowed",
        "a list item (-) where none can be: begin the list on a line of its own",
    ),
    ("could not find expected ':'", "a key without its colon, on this line or the one before"),
    ("did not find expected ',' or", "a comma or a closing bracket is missing here or before"),
)
"""What the parser says of common mistakes, and the same for people who do not write parsers."""


def _in_words(said: str, text: str, mark: Any) -> str:
    """A parser's complaint about ``text`` at ``mark`` (None: it names no place), in words with the fix."""
    lines = text.splitlines()
    line = lines[mark.line] if mark is not None and mark.line < len(lines) else ""
    there = line[mark.column : mark.column + 1] if line else ""
    if there == "\t" or "\t" in line[: len(line) - len(line.lstrip())]:
        return "a tab: YAML is indented with spaces only"
    if "cannot start any token" in said and there:
        return f"a value that begins with {there} needs quotes"
    return next((words for phrase, words in _IN_WORDS if phrase in said), said)


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def parse(text: str) -> YamlDocument:
    """The one document in ``text``; empty documents beside it do not count. Raises YamlProblem."""
    if len(text) > MAX_BYTES:
        raise YamlProblem(f"more than {MAX_BYTES} characters: a job file is a few kilobytes")
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    result = YamlDocument()
    try:
        events = iter(yaml.parse(text, Loader=loader))
        for event in events:
            if not isinstance(event, yaml.DocumentStartEvent):
                continue
            reader = _DocumentReader(events)
            value = reader.read_value(next(events), (), 0)
            if value is not None and result.value is not None:
                cure = "put what begins here into a file of its own"
                raise YamlProblem(f"there are several documents, and a file holds one job: {cure}", (), _line(event))
            if value is not None:
                result = YamlDocument(value, reader.lines)
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark or error.context_mark
        said = " ".join(part for part in (error.context, error.problem) if part)
        line = None if mark is None else mark.line + 1
        raise YamlProblem(f"not YAML: {_in_words(said, text, mark)}", (), line) from None
    except yaml.YAMLError as error:
        raise YamlProblem(f"not YAML: {' '.join(str(error).split())}") from None
    return result
