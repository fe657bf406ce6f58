"""The texts in files of records: one field of each JSON object, row of CSV or TSV, or row of a table.

``texts(document, format, field)`` yields them in the file's order, one at a time, so that memory holds a record and
not the file. What is wrong is told with the file, the line (of JSON arrays and tables: the record, from 1) and the
field. Which files hold records is said in data_files.py; tables are read by tables.py.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import posixpath
import zlib
from collections.abc import Iterator
from typing import IO, Any

from diloco_protocol.common.data.data_files import DELIMITERS, TABLES, RecordFormat, is_gzipped
from diloco_protocol.spec.load import JobError
from diloco_worker.data import tables
from diloco_worker.data.corpus import Document, words_of
from diloco_worker.data.tables import DATA, TEXT_FIELD
from diloco_worker.errors import job_error

CHUNK_BYTES = 1 << 20  # of a JSON array, read at a time
MAX_CELL_CHARACTERS = 1 << 30  # of CSV; the csv module's own limit is 131 072
_BOM = "\ufeff"
# A JSON token that the end of a chunk cuts is found wrong this near to that end; a string, where it begins.
_LONGEST_TOKEN = 16


def texts(document: Document, format: RecordFormat, field: str) -> Iterator[str]:
    """The text of every record, in order. Raises JobError naming file, line or record, and field."""
    with document.open() as raw:
        if format in TABLES:
            for number, value in enumerate(tables.column(raw, document.uri, format, field), 1):
                yield _checked(document.uri, f"record {number}", value, field)
            return
        file = io.BufferedReader(gzip.GzipFile(fileobj=raw) if is_gzipped(document.uri) else raw)  # type: ignore[type-var, arg-type]
        if format in DELIMITERS:
            yield from _rows(document.uri, file, format, field)
        elif format is RecordFormat.JSON and _is_array(document.uri, file):
            yield from _array(document.uri, file, field)
        else:
            yield from _json_lines(document.uri, file, field)


def is_records(document: Document, field: str) -> tuple[bool, str]:
    """Whether a ``.json`` file holds records with this field, by its first one; and a remark, where it holds records
    without it. A compressed file always counts as records, because its bytes are no text."""
    if is_gzipped(document.uri):
        return True, ""
    try:
        return next(texts(document, RecordFormat.JSON, field), None) is not None, ""
    except JobError as e:
        if e.problems[0].path != TEXT_FIELD:
            return False, ""
        return False, f"JSON records without text in the field {field}: set training.data.textField"


# ------------------------------------------------------------------ JSON


def _is_array(uri: str, file: Any) -> bool:
    try:
        return file.peek(1).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    except (OSError, EOFError, zlib.error) as e:
        raise _damaged(uri, "its beginning", f"cannot be read: {words_of(e)}") from e


def _json_lines(uri: str, file: IO[bytes], field: str) -> Iterator[str]:
    for number, line in _lines(uri, file):
        if line.isspace():
            continue
        where = f"line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as e:
            place = f", character {e.colno}" if isinstance(e, json.JSONDecodeError) else ""
            raise _damaged(uri, where, f"is not JSON ({_json_words(e)}{place}); each line must hold one object") from e
        yield _text_of(uri, where, record, field)


def _array(uri: str, file: IO[bytes], field: str) -> Iterator[str]:
    text = _Ahead(uri, file)
    text.skip(1)  # [
    number = 0
    if text.next() == "]":
        return
    while True:
        number += 1
        where = f"record {number}"
        if text.next() != "{":
            raise _damaged(uri, where, "is not an object; each element of the array must be one")
        yield _text_of(uri, where, text.read_object(where), field)
        end = text.next()
        text.skip(1)
        if end == "]":
            return
        if end != ",":
            raise _damaged(uri, where, "is followed by neither a comma nor the end of the array")


class _Ahead:
    """The characters of a JSON array, read as far ahead as its records need."""

    def __init__(self, uri: str, file: IO[bytes]) -> None:
        self._uri, self._file = uri, file
        self._decode = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder()
        self._text, self._at, self._chunk = "", 0, CHUNK_BYTES
        self.next()

    def next(self) -> str:
        """The next character that is no space, without taking it; empty at the end."""
        while True:
            while self._at < len(self._text):
                if not self._text[self._at].isspace():
                    return self._text[self._at]
                self._at += 1
            if not self._read_more():
                return ""

    def skip(self, count: int) -> None:
        self._at += count

    def read_object(self, where: str) -> Any:
        """The object that begins here."""
        self._chunk = CHUNK_BYTES
        while True:
            try:
                value, self._at = self._json.raw_decode(self._text, self._at)
                return value
            except (ValueError, RecursionError) as e:
                if not self._may_go_on(e) or not self._read_more():
                    raise _damaged(self._uri, where, f"is not JSON ({_json_words(e)})") from e

    def _may_go_on(self, error: Exception) -> bool:
        if not isinstance(error, json.JSONDecodeError):
            return False
        return error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - _LONGEST_TOKEN

    def _read_more(self) -> bool:
        try:
            data = self._file.read(self._chunk)
            more = self._decode.decode(data, final=not data)
        except UnicodeDecodeError as e:
            raise _not_utf8(self._uri, "a record", e) from e
        except (OSError, EOFError, zlib.error) as e:
            raise _damaged(self._uri, "a record", f"cannot be read: {words_of(e)}") from e
        self._text, self._at = self._text[self._at :] + more, 0
        self._chunk *= 2  # so that little of a long record is parsed again and again
        return bool(data)


# ------------------------------------------------------------------ CSV and TSV


def _rows(uri: str, file: IO[bytes], format: RecordFormat, field: str) -> Iterator[str]:
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    reader = csv.reader((line for _, line in _lines(uri, file)), strict=True, delimiter=DELIMITERS[format])
    header: list[str] = []
    while True:
        try:
            row = next(reader, None)
        except csv.Error as e:
            raise _damaged(uri, f"line {reader.line_num}", f"is not {format.value} ({e})") from e
        if row is None:
            return
        if not row:
            continue  # an empty line
        where = f"line {reader.line_num}"
        if not header:
            header = row
            if field not in header:
                raise _no_field(uri, f"{where}, the header", header, field)
            column = header.index(field)
        elif len(row) != len(header):
            raise _damaged(uri, where, f"has {len(row)} values, and the header has {len(header)}")
        else:
            yield row[column]


# ------------------------------------------------------------------ lines, records, and what is wrong with them


def _lines(uri: str, file: IO[bytes]) -> Iterator[tuple[int, str]]:
    """Each line with its number, from 1."""
    number = 0
    while True:
        number += 1
        where = f"line {number}"
        try:
            raw = file.readline()
        except (OSError, EOFError, zlib.error) as e:
            raise _damaged(uri, where, f"cannot be read: {words_of(e)}") from e
        if not raw:
            return
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as e:
            raise _not_utf8(uri, where, e) from e
        yield number, line.removeprefix(_BOM) if number == 1 else line


def _text_of(uri: str, where: str, record: Any, field: str) -> str:
    if not isinstance(record, dict):
        raise _damaged(uri, where, f"holds {_kind(record)}; each record must be an object")
    if field not in record:
        raise _no_field(uri, where, list(record), field)
    return _checked(uri, where, record[field], field)


def _checked(uri: str, where: str, value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise job_error(TEXT_FIELD, field, f"{uri}, {where}: the field must hold text, and holds {_kind(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as e:  # half of a surrogate pair, which JSON can write
            raise job_error(
                TEXT_FIELD, field, f"{uri}, {where}: character {e.start + 1} of the field is not Unicode text"
            ) from e
    return value


def _kind(value: Any) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object", str: "text"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")


def _no_field(uri: str, where: str, fields: list[str], field: str) -> JobError:
    named = ", ".join(map(str, fields[:8])) + (" …" if len(fields) > 8 else "") if fields else "none"
    return job_error(
        TEXT_FIELD, field, f"{uri}, {where}: there is no such field; name the one that holds the text: {named}"
    )


def _damaged(uri: str, where: str, what: str) -> JobError:
    # An error shows the start of a long value: the name would be lost.
    return job_error(DATA, uri, f"{posixpath.basename(uri)}, {where} {what}")


def _not_utf8(uri: str, where: str, error: UnicodeDecodeError) -> JobError:
    byte = error.object[error.start]
    return _damaged(uri, where, f"is not UTF-8 (byte 0x{byte:02x}, {error.start + 1} bytes in)")


def _json_words(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return error.msg[:1].lower() + error.msg[1:].removesuffix(" at")
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)
