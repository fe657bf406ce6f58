"""Which files of training data hold records, by their names, and what looks like something else than plain text.

A file of records has the text in a field of each record (``training.data.textField``); every other file is plain text,
taken as it is. The name alone decides, so that every process reads a file in the same way; only ``.json`` is both, and
its first record decides.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from diloco_protocol.common.data.delimited import has_header_and_rows

HEAD_BYTES = 65536
"""How much of a file's beginning ``appearance`` wants to see."""


class RecordFormat(StrEnum):
    """How a file holds its records."""

    JSON_LINES = "JSON lines"
    JSON = "JSON"
    CSV = "CSV"
    TSV = "TSV"
    PARQUET = "Parquet"
    ARROW = "Arrow"


_ENDINGS = {
    ".jsonl": RecordFormat.JSON_LINES,
    ".ndjson": RecordFormat.JSON_LINES,
    ".json": RecordFormat.JSON,
    ".csv": RecordFormat.CSV,
    ".tsv": RecordFormat.TSV,
    ".parquet": RecordFormat.PARQUET,
    ".arrow": RecordFormat.ARROW,
}
TABLES = frozenset({RecordFormat.PARQUET, RecordFormat.ARROW})
"""Formats that the package pyarrow reads."""
DELIMITERS = {RecordFormat.CSV: ",", RecordFormat.TSV: "\t"}
"""Formats of rows under a header, and what separates their cells."""
_FIELD = "training.data.textField"
GZIP = ".gz"
_PACKED = tuple(f"{ending}{GZIP}" for ending, format in _ENDINGS.items() if format not in TABLES)
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"PK\3\4": "zip"}
_OTHERS = {
    b"PAR1": "Parquet: name it .parquet, and its records are read",
    b"ARROW1": "Arrow: name it .arrow, and its records are read",
    b"%PDF-": "a PDF: extract its text first",
    b"\xff\xfe": "UTF-16: save it as UTF-8",
    b"\xfe\xff": "UTF-16: save it as UTF-8",
}
MOST_UNDECODABLE = 0.1
"""The share of bytes that are no UTF-8 in a file that is still text: Latin-1 has some."""


def is_gzipped(name: str) -> bool:
    return name.lower().endswith(GZIP)


def record_format(name: str) -> RecordFormat | None:
    """The format that a file's name says; None: it is plain text. Only text formats come compressed (``.gz``)."""
    name = name.lower()
    inner = name.removesuffix(GZIP)
    found = next((f for ending, f in _ENDINGS.items() if inner.endswith(ending)), None)
    return None if found in TABLES and inner != name else found


def binary_kind(head: bytes) -> str:
    """What a file is that holds no text, with the fix; empty: text. Such a file is not trained on. ``head``: its first
    HEAD_BYTES bytes, or all of them."""
    for magic, packed in _MAGIC.items():
        if head.startswith(magic):
            return f"compressed with {packed}: unpack it first (only {', '.join(_PACKED)} are unpacked here)"
    for magic, other in _OTHERS.items():
        if head.startswith(magic):
            return other
    zeros, most = head.count(b"\0"), MOST_UNDECODABLE * len(head)
    if b"\0\0" in head or zeros > most:  # one zero byte may stand between documents
        return "not text"
    return "not UTF-8: save it as UTF-8 if it is text" if _undecodable(head) > most else ""


def is_utf8(head: bytes) -> bool:
    """Whether a file's beginning is UTF-8."""
    return not _undecodable(head)


def _undecodable(head: bytes) -> int:
    lost = "\ufffd"
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(head)  # a character that is cut at the end is none
    return text.count(lost) - head.count(lost.encode())


def appearance(head: bytes) -> str:
    """What a file of text that is read as it is looks like instead, with the fix; empty: nothing else. ``head``: its
    first HEAD_BYTES bytes, or all of them."""
    text, cut = head.decode("utf-8-sig", "replace"), len(head) >= HEAD_BYTES
    lines = [line for line in text.split("\n") if line.strip()]
    if cut and len(lines) > 1:
        lines.pop()  # its end may be missing
    if lines and all(_object_at(line) is not None for line in lines[:3]):
        return f"JSON lines: name it .jsonl, and the field {_FIELD} of each line is read"
    if _first_of_array(text) is not None:
        return f"a JSON array: name it .json, and the field {_FIELD} of each record is read"
    for format, delimiter in DELIMITERS.items():
        if has_header_and_rows(text, delimiter, cut):
            return f"{format.value}: name it .{format.value.lower()}, and the column {_FIELD} of each row is read"
    if has_header_and_rows(text, ";", cut):
        return (
            f"CSV with semicolons: write it with commas and name it .csv, and the column {_FIELD} of each row is read"
        )
    return ""


def head_problem(format: RecordFormat, head: bytes, field: str) -> str:
    """Why a record at the beginning of a file cannot be read, with the fix, as far as ``head`` shows it (its first
    HEAD_BYTES bytes, unpacked); empty: nothing is wrong, or ``head`` does not show it. Of CSV and TSV this checks the
    names of the columns. Of ``.json`` it checks the first record; a file whose first value is no object is plain
    text."""
    text = head.decode("utf-8-sig", "replace")
    if format in DELIMITERS:
        rows = (row for row in csv.reader(io.StringIO(text), delimiter=DELIMITERS[format]) if row)
        header = next(rows, [field])
        if field in header:
            return ""
        row = next(rows, [])
        return f"it has no column {field}: {_other_field(dict(zip(header, row, strict=False)) or header, 'columns')}"
    if format is RecordFormat.JSON:
        first = _first_of_array(text)
        if first is None:
            first = _object_at(next((line for line in text.split("\n") if line.strip()), ""))
        said = "" if first is None else _field_problem(first, field)
        return f"record 1 {said}" if said else ""
    if format is not RecordFormat.JSON_LINES:
        return ""
    lines = text.split("\n")
    if len(head) >= HEAD_BYTES:
        lines.pop()  # its end may be missing
    for number, line in enumerate(lines, 1):
        if line.strip() and (said := _line_problem(line, field)):
            return f"line {number} {said}"
    return ""


def _line_problem(line: str, field: str) -> str:
    """What is wrong with a line of JSON lines; empty: nothing."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return "is not JSON: correct or remove it (each line holds one object)"
    return _field_problem(record, field) if isinstance(record, dict) else "holds no JSON object: correct or remove it"


def _field_problem(record: dict[str, Any], field: str) -> str:
    """Why a record gives no text, with the fix; empty: it gives one."""
    if field not in record:
        return f"has no field {field}: {_other_field(record, 'fields')}"
    if isinstance(record[field], str):
        return ""
    texts = [name for name, value in record.items() if isinstance(value, str)]
    other = _other_field(record, "fields") if texts else "put text there, or remove the line"
    return f"has no text in its field {field}: {other}"


def _other_field(record: Mapping[str, object] | Sequence[str], what: str) -> str:
    """Which field to read instead: the one with the longest text. ``record``: its names, with values if there are."""
    values = record if isinstance(record, Mapping) else {}
    texts = {name: len(value) for name, value in values.items() if isinstance(value, str)}
    named = max(texts, key=lambda name: texts[name]) if texts else "NAME"
    more = " …" if len(record) > 8 else ""
    return f"set training.data.textField: {named}; the {what} are {', '.join(list(record)[:8])}{more}"


def _object_at(text: str, *, alone: bool = True) -> dict[str, Any] | None:
    """The JSON object with which ``text`` begins, after spaces; ``alone``: nothing may follow it. None: there is none,
    or its end is not in ``text``."""
    text = text.strip()
    if not text.startswith("{"):
        return None
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and (end == len(text) or not alone) else None


def _first_of_array(text: str) -> dict[str, Any] | None:
    """The first element of a JSON array of objects; None: ``text`` does not begin with one."""
    text = text.lstrip()
    return _object_at(text[1:], alone=False) if text.startswith("[") else None
