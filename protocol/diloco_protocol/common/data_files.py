"""Which files of training data hold records, by their names, and what looks like something else than plain text.

A file of records has the text in a field of each record (``training.data.textField``); every other file is plain text,
taken as it is. The name alone decides, so that every process reads a file in the same way; only ``.json`` is both, and
its first record decides.
"""

from __future__ import annotations

import csv
import io
import json
from enum import StrEnum

HEAD_BYTES = 65536
"""How much of a file's beginning ``appearance`` wants to see."""


class RecordFormat(StrEnum):
    """How a file holds its records."""

    JSON_LINES = "JSON lines"
    JSON = "JSON"
    CSV = "CSV"
    PARQUET = "Parquet"
    ARROW = "Arrow"


_ENDINGS = {
    ".jsonl": RecordFormat.JSON_LINES,
    ".ndjson": RecordFormat.JSON_LINES,
    ".json": RecordFormat.JSON,
    ".csv": RecordFormat.CSV,
    ".parquet": RecordFormat.PARQUET,
    ".arrow": RecordFormat.ARROW,
}
TABLES = frozenset({RecordFormat.PARQUET, RecordFormat.ARROW})
"""Formats that the package pyarrow reads."""
GZIP = ".gz"
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"PK\3\4": "zip"}


def is_gzipped(name: str) -> bool:
    return name.lower().endswith(GZIP)


def record_format(name: str) -> RecordFormat | None:
    """The format that a file's name says; None: it is plain text. Only text formats come compressed (``.gz``)."""
    name = name.lower()
    inner = name.removesuffix(GZIP)
    found = next((f for ending, f in _ENDINGS.items() if inner.endswith(ending)), None)
    return None if found in TABLES and inner != name else found


def appearance(head: bytes) -> str:
    """What a file that is read as plain text looks like instead, with the fix; empty: nothing else than text.
    ``head``: its first HEAD_BYTES bytes, or all of them."""
    for magic, packed in _MAGIC.items():
        if head.startswith(magic):
            return f"compressed with {packed}: unpack it first (only .jsonl.gz, .json.gz and .csv.gz are unpacked here)"
    if head.startswith(b"PAR1"):
        return "Parquet: name it .parquet, and its records are read"
    if head.startswith(b"ARROW1"):
        return "Arrow: name it .arrow, and its records are read"
    lines = [line for line in head.removeprefix(b"\xef\xbb\xbf").splitlines() if line.strip()]
    if len(head) >= HEAD_BYTES and len(lines) > 1:
        lines.pop()  # it may go on
    if lines and all(_is_object(line) for line in lines[:3]):
        return "JSON lines: name it .jsonl, and the field training.data.textField of each line is read"
    return ""


def head_problem(format: RecordFormat, head: bytes, field: str) -> str:
    """Why a record at the beginning of a file cannot be read, as far as ``head`` shows it (its first HEAD_BYTES bytes,
    unpacked); empty: nothing is wrong, or what is there does not say. Of CSV the names of the columns are looked at."""
    text = head.decode("utf-8-sig", "replace")
    if format is RecordFormat.CSV:
        header = next(csv.reader(io.StringIO(text)), [field])
        return "" if field in header else f"it has no column {field}; its columns are {', '.join(header[:8])}"
    if format is not RecordFormat.JSON_LINES:
        return ""
    lines = text.split("\n")
    if len(head) >= HEAD_BYTES:
        lines.pop()  # it may go on
    for number, line in enumerate(lines, 1):
        if line.strip() and (said := _line_problem(line, field)):
            return f"line {number} {said}"
    return ""


def _line_problem(line: str, field: str) -> str:
    """What is wrong with a line of JSON lines; empty: nothing."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return "is not JSON"
    if not isinstance(record, dict):
        return "holds no JSON object"
    if field not in record:
        return f"has no field {field}; its fields are {', '.join(map(str, list(record)[:8]))}"
    return "" if isinstance(record[field], str) else f"has no text in its field {field}"


def _is_object(line: bytes) -> bool:
    if not line.lstrip().startswith(b"{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
