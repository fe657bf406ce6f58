"""The event tape: one line of JSON per merge, from which a run can be audited.

Each line says when which fragment reached which version out of which pushes (slot, incarnation, sequence, base version,
age, tokens, steps, weight, norm), how long the round waited and the merge took, the SHA-256 of the result, and in
``previous`` the SHA-256 of the line before: changing or leaving out a line breaks the chain at the next.
Where a store has lost versions, a line ``discarded`` says from which version the fragment goes on, and a line
``recovered-from-learner`` that a later version came from a learner.

The merge's record is what is durable. Its line is written right after it, and flushed to the device at each checkpoint,
before older records are removed. So what a crash takes from the tape's end (at worst a line torn in two) is in the
records, and a restart writes it again (``missing``).

In a directory the tape is the file ``tape.jsonl``. A bucket cannot append: there the tape is a series of objects
``tape/<first line's number>.jsonl``, one per checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from diloco_syncer.store.base import ObjectExists, Store
from diloco_syncer.store.directory import DirectoryStore
from diloco_syncer.store.records import FORMAT, MergeRecord, check_format

MAX_LINE = 16 << 20
FILE = "tape.jsonl"
RECOVERED = "recovered-from-learner"


class TapeError(Exception):
    """The tape is not intact; the message names the line."""


def line_of(record: MergeRecord) -> dict[str, Any]:
    """The tape's line for a merge, without ``previous``. Times in seconds, tokens whole."""
    taken = record.recovered
    line = {
        "format": FORMAT,
        "kind": "merge" if taken is None else RECOVERED,
        "number": record.number,
        "time": round(record.time, 6),
        "fragment": record.fragment,
        "epoch": record.epoch,
        "version": record.version,
    }
    if taken is not None:
        return line | {"follows": taken.follows, "held_epoch": taken.epoch, "result": record.digest}
    return line | {
        "round": record.round,
        "responders": [
            {
                "slot": r.header.slot,
                "incarnation": r.header.incarnation,
                "sequence": r.header.sequence,
                "base_epoch": r.header.epoch,
                "base_version": r.header.base_version,
                "first_step": r.header.first_step,
                "last_step": r.header.last_step,
                "offer": r.header.round == 0,
                "age": r.age,
                "tokens": r.header.tokens,
                "steps": r.header.steps,
                "weight": r.weight,
                "norm": r.norm,
            }
            for r in record.responders
        ],
        "quorum_seconds": round(record.quorum_seconds, 6),
        "waited_seconds": round(record.waited_seconds, 6),
        "merge_seconds": round(record.merge_seconds, 6),
        "job_tokens": record.job_tokens,
        "result": record.digest,
    }


def _encode(line: dict[str, Any], previous: str) -> bytes:
    return json.dumps({**line, "previous": previous}, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def line_digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


class Tape:
    """The tape's end: appends lines, and knows each fragment's newest version on the tape."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._path = store.root / FILE if isinstance(store, DirectoryStore) else None
        self._unsaved: list[bytes] = []  # lines not yet on the medium
        self.previous = ""
        self.lines = 0
        self.newest: dict[int, int] = {}
        self.repaired_bytes = 0
        if self._path is not None:
            self._repair(self._path)
        for raw in raw_lines(store):
            line = decode_line(raw, self.lines + 1)
            self._count(line, raw)

    def _repair(self, path: Path) -> None:
        """Cut off a last line that was torn in two; its record is in the store."""
        if not path.exists():
            return
        with open(path, "r+b") as file:
            size = file.seek(0, os.SEEK_END)
            keep = size
            while keep:
                step = min(keep, 1 << 16)
                file.seek(keep - step)
                found = file.read(step).rfind(b"\n")
                if found >= 0:
                    keep = keep - step + found + 1
                    break
                keep -= step
            if keep != size:
                self.repaired_bytes = size - keep
                file.truncate(keep)
                os.fsync(file.fileno())

    def _count(self, line: dict[str, Any], raw: bytes) -> None:
        self.previous = line_digest(raw)
        self.lines += 1
        self.newest[line["fragment"]] = line["version"]

    def missing(self, records: Iterable[MergeRecord]) -> list[MergeRecord]:
        """Those of the records that are newer than the tape, in the order of their merges."""
        newer = [r for r in records if r.version > self.newest.get(r.fragment, 0)]
        return sorted(newer, key=lambda r: r.number)

    def append(self, record: MergeRecord) -> None:
        """Write the record's line. One that finds no space is kept and written by the next call."""
        self._add(line_of(record))

    def discard(self, fragment: int, version: int, epoch: int, reason: str, time: float) -> None:
        """Tell that the fragment goes on from ``version``, because newer records cannot be used."""
        self._add(
            {
                "format": FORMAT,
                "kind": "discarded",
                "time": round(time, 6),
                "fragment": fragment,
                "epoch": epoch,
                "version": version,
                "reason": reason,
            }
        )

    def _add(self, line: dict[str, Any]) -> None:
        raw = _encode(line, self.previous)
        self._count(line, raw)
        self._unsaved.append(raw)
        self._write(flush=False)

    def flush(self) -> None:
        """Bring every line to the device. Raises OSError; then nothing is lost and it may be repeated."""
        self._write(flush=True)

    def _write(self, flush: bool) -> None:
        if self._path is None:
            if flush and self._unsaved:
                name = f"tape/{self.lines - len(self._unsaved) + 1:012d}.jsonl"
                try:
                    self._store.create(name, *self._unsaved)
                except ObjectExists as error:
                    # A put whose answer was lost: what is there is what was to be written, or its beginning.
                    there = self._store.read(name, 1 << 32).splitlines(keepends=True)
                    if not there or there != self._unsaved[: len(there)]:
                        raise TapeError(f"{name} was written by another syncer") from error
                    del self._unsaved[: len(there)]
                    self._write(flush=True)
                    return
                self._unsaved.clear()
            return
        if not self._unsaved and not flush:
            return
        with open(self._path, "ab", buffering=0) as file:
            start = file.tell()
            while self._unsaved:
                raw = self._unsaved[0]
                try:
                    if file.write(raw) != len(raw):
                        raise OSError(28, f"disk full: the tape {self._path} could not be written whole")
                except OSError:
                    os.ftruncate(file.fileno(), start)  # no half line stays
                    if flush:
                        raise
                    return
                start += len(raw)
                self._unsaved.pop(0)
            if flush:
                os.fsync(file.fileno())


def raw_lines(store: Store) -> Iterator[bytes]:
    """The tape's lines in order, as they are in the store."""
    if isinstance(store, DirectoryStore):
        path = store.root / FILE
        if path.exists():
            with open(path, "rb") as file:
                while raw := file.readline(MAX_LINE):
                    yield raw
        return
    for name in store.list("tape"):
        yield from store.read(name, 1 << 32).splitlines(keepends=True)


def decode_line(raw: bytes, number: int) -> dict[str, Any]:
    """Line ``number`` (from 1) of a tape. Raises ``TapeError``, ``FormatRefused``."""
    try:
        line = json.loads(raw)
        check_format(line["format"], f"tape line {number}")
        if type(line["fragment"]) is not int or type(line["version"]) is not int:
            raise TypeError("fragment and version are whole numbers")
    except (ValueError, KeyError, TypeError) as error:
        raise TapeError(f"tape line {number} is not understood: {error}") from error
    return dict(line)
