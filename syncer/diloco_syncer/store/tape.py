"""The event tape: one line of JSON per merge, from which a run can be audited.

Each line says when which fragment reached which version out of which pushes (slot, incarnation, sequence, base version,
age, tokens, steps, weight, norm), how long the round waited and the merge took, the SHA-256 of the result, and in
``previous`` the SHA-256 of the line before: changing or leaving out a line breaks the chain at the next.
Where a store has lost versions, a line ``discarded`` says from which version the fragment goes on, and a line
``recovered-from-learner`` that a later version came from a learner. Before the first line of its own a syncer writes a
line ``settings``, by which rules merges are made from then on. An ``event`` is a transition of the job (a learner
joined, was lost or refused, the phase changed). ``refused`` counts the uploads that were refused, by reason, since the
job's start. ``diloco audit`` reads it all (``diloco_syncer.audit``).

**Segments.** The tape is a series of objects ``tape/<number of the first line>.jsonl``. In a directory a segment is
begun whole, then appended to up to ``SEGMENT_BYTES``. A bucket cannot append: there each checkpoint makes one. A
segment begins with a line ``segment``, which belongs to the chain and says how far each fragment was (``newest``). So
a start reads the last segment and nothing before it, however long the tape is. ``tape/last.json`` names it or one
shortly before it; without that file all names are listed.

**Damage** stops nothing, because the tape decides nothing that records and states do not say. A last segment with
lines that are not understood, or that do not follow each other, is moved to ``discarded/``. The next one says so in its
first line (``damaged``), and goes on from the versions that the readable lines tell of. A segment that does not follow
the one before it, both being readable, is of a tape of which the store has lost what was before: it tells nothing.
Earlier segments are read by who audits.

**Durability.** The merge's record is what is durable. Its line is written right after it, and flushed to the device at
each checkpoint, before older records are removed. So what a crash takes from the tape's end (at worst a line torn in
two) is in the records, and a restart writes it again (``Checkpoints.newer_than``).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import operator
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco_protocol.common.files import DiskFull
from diloco_syncer.store.base import ObjectExists, ObjectNotFound, Store
from diloco_syncer.store.records import FORMAT, FormatRefused, MergeRecord, check_format

FOLDER = "tape"
SEGMENT_BYTES = 64 << 20  # of a directory's; the next line begins another
RECOVERED = "recovered-from-learner"
MERGE = "merge"
SEGMENT = "segment"
DISCARDED = "discarded"
SETTINGS = "settings"
EVENT = "event"
REFUSED = "refused"
_LAST = f"{FOLDER}/last.json"
MAX_SEGMENT = 1 << 32
_MAX_HEAD = 1 << 20
_NAME = re.compile(rf"{FOLDER}/(\d{{12}})\.jsonl")


class TapeError(Exception):
    """A line is not what was written, or another syncer has written; the message names the line."""


def line_of(record: MergeRecord) -> dict[str, Any]:
    """The tape's line for a merge, without ``previous``. Times in seconds, tokens whole."""
    taken = record.recovered
    line = {
        "format": FORMAT,
        "kind": MERGE if taken is None else RECOVERED,
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
                "tenure": r.header.report.tenure or r.header.incarnation,
                "sequence": r.header.sequence,
                "base_epoch": r.header.epoch,
                "base_version": r.header.base_version,
                "oldest_version": r.header.oldest_version,
                "first_step": r.header.first_step,
                "last_step": r.header.last_step,
                "offer": r.header.round == 0,
                "age": r.age,
                "tokens": r.header.tokens,
                "steps": r.header.steps,
                "trained_tokens": r.header.report.trained_tokens,
                "trained_steps": r.header.report.trained_steps,
                "batch": r.batch,
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


def line_digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def segment_name(first: int) -> str:
    """The segment that begins with the tape's line ``first``, from 1."""
    return f"{FOLDER}/{first:012d}.jsonl"


def segment_names(store: Store) -> list[str]:
    """All segments, in order."""
    return [name for name in store.list(FOLDER) if _NAME.fullmatch(name)]


@dataclass
class _Segment:
    """A segment that is being written. ``unsaved``: lines that are not on the medium yet; ``begun``: it is there;
    ``tried``: or may be; ``size``: bytes, unsaved ones too."""

    name: str
    unsaved: list[bytes] = field(default_factory=list)
    begun: bool = False
    tried: bool = False
    size: int = 0


class Tape:
    """The tape's end: appends lines, and knows each fragment's newest version on the tape.

    ``appends``: a segment is a file, which grows. ``lines``: how many there are, heads of segments too. ``damage``:
    what was found wrong at the start, for people; empty: nothing.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.appends = store.local_path(FOLDER) is not None
        self._segment: _Segment | None = None  # that takes the next line
        self._waiting: list[_Segment] = []  # before it, to be saved
        self.previous = ""
        self.lines = 0
        self.newest: dict[int, int] = {}
        self.damage = ""
        self._read_end()

    # ------------------------------------------------------------- the start

    def _read_end(self) -> None:
        """Read the last segment, and those before it where its head is not to be had. Of what is damaged a copy is
        kept, and a new segment that says so takes its place."""
        names, damaged = self._last_segments(), list[str]()
        while names:
            name = names.pop(0)
            size = self._read_segment(name)
            if size is None:
                damaged.append(name)
                names = [other for other in segment_names(self._store) if other > name]
            elif not names and self._store.exists(following := segment_name(self.lines + 1)):
                names = [following]
            elif not names and self.appends:
                self._segment = _Segment(name, begun=True, tried=True, size=size)
        if damaged:
            if damaged[-1] == segment_name(self.lines + 1):
                self._store.delete(damaged.pop())
            self._begin_segment(damaged=self.damage)
            self.flush()
        for name in damaged:
            self._store.delete(name)

    def _last_segments(self) -> list[str]:
        """The segment to begin with, and those after it as far as names had to be listed."""
        with contextlib.suppress(ObjectNotFound, OSError, ValueError, KeyError, TypeError):
            last = str(json.loads(self._store.read(_LAST, 4096))["segment"])
            if _NAME.fullmatch(last) and self._has_head(last):
                return [last]
        names = segment_names(self._store)
        first = max(0, len(names) - 1)
        while first > 0 and not self._has_head(names[first]):
            first -= 1
        return names[first:]

    def _has_head(self, name: str) -> bool:
        """Whether the segment is there, and its first line is understood."""
        try:
            decode_line(self._store.read_start(name, _MAX_HEAD).split(b"\n", 1)[0], first_line_of(name))
        except (ObjectNotFound, TapeError):
            return False
        return True

    def _read_segment(self, name: str) -> int | None:
        """Take in a segment; returns its size. None: it is damaged, ``damage`` says why, and a copy was set aside."""
        path, data = self._store.local_path(name), self._store.read(name, MAX_SEGMENT)
        if path is not None and data and not data.endswith(b"\n"):
            data = data[: data.rfind(b"\n") + 1]
            self._cut_torn_line(path, len(data))
        self.lines = first_line_of(name) - 1
        wrong = "" if data else f"{name} is empty"
        follows = True
        for place, raw in enumerate(data.splitlines(keepends=True)):
            number = self.lines + 1
            try:
                line = decode_line(raw, number)
                if (line["kind"] == SEGMENT) != (place == 0):
                    raise TapeError(f"{name}: line {place + 1} is no line of this place")
                if line["previous"] != self.previous and (place or self.previous):
                    follows = follows and place > 0
                    raise TapeError(f"tape line {number} does not follow the line before it")
                if follows:
                    self.newest |= newest_of(line)
            except (TapeError, FormatRefused) as error:
                if place == 0 and isinstance(error, FormatRefused):
                    raise  # another release's
                wrong = wrong or str(error)
            self.previous = line_digest(raw)
            self.lines = number
        if not wrong:
            return len(data)
        self.damage = self.damage or wrong
        aside = f"discarded/tape-{first_line_of(name):012d}-{line_digest(data)[:8]}.jsonl"
        self._store.replace(aside, data)
        self.previous = ""
        return None

    def _cut_torn_line(self, path: Path, keep: int) -> None:
        """Cut off a last line that was torn in two; its record is in the store. ``keep``: bytes before it."""
        with open(path, "r+b") as file:
            file.truncate(keep)
            os.fsync(file.fileno())

    # ------------------------------------------------------------- writing

    def append(self, record: MergeRecord, late: bool = False) -> None:
        """Write the record's line. One that cannot be written now is kept, and written by a later call. ``late``: the
        merge is of an earlier life, whose settings the tape may lack as well."""
        self._add(line_of(record) | ({"late": True} if late else {}))

    def append_note(self, kind: str, time: float, body: Mapping[str, Any]) -> None:
        """Write a line that is of no merge: ``SETTINGS``, ``EVENT``, ``REFUSED`` or ``DISCARDED``."""
        self._add({"format": FORMAT, "kind": kind, "time": round(time, 6), **body})

    def flush(self) -> None:
        """Bring every line to the device. Raises ``TapeError``, OSError: nothing is lost, and it may be repeated."""
        while self._waiting:
            self._save(self._waiting[0], flush=True)
            del self._waiting[0]
        if self._segment is not None:
            self._save(self._segment, flush=True)
            if not self.appends:
                self._segment = None

    def _add(self, line: dict[str, Any]) -> None:
        segment = self._segment
        # A put that failed may have been carried out: it is repeated as it was, without further lines.
        if segment is None or (segment.size >= SEGMENT_BYTES if self.appends else segment.tried):
            segment = self._begin_segment()
        self._chain(segment, line)
        self.newest |= newest_of(line)
        if self.appends:
            with contextlib.suppress(OSError):  # ``flush`` tries again, and says what is wrong
                for unsaved in (*self._waiting, segment):
                    self._save(unsaved, flush=False)

    def _begin_segment(self, **more: str) -> _Segment:
        if self._segment is not None:
            self._waiting.append(self._segment)
        self._segment = _Segment(segment_name(self.lines + 1))
        newest = {str(fragment): version for fragment, version in sorted(self.newest.items())}
        self._chain(self._segment, {"format": FORMAT, "kind": SEGMENT, "newest": newest, **more})
        return self._segment

    def _chain(self, segment: _Segment, line: dict[str, Any]) -> None:
        raw = json.dumps({**line, "previous": self.previous}, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        self.previous = line_digest(raw)
        segment.unsaved.append(raw)
        segment.size += len(raw)
        self.lines += 1

    def _save(self, segment: _Segment, flush: bool) -> None:
        """Bring what is unsaved to the medium; ``flush``: to the device."""
        if not segment.begun and segment.unsaved:
            self._create(segment, segment.unsaved[:1] if self.appends else segment.unsaved[:])
        if self.appends and (segment.unsaved or flush):
            self._write(segment, flush)

    def _create(self, segment: _Segment, lines: list[bytes]) -> None:
        segment.tried = True
        try:
            self._store.create(segment.name, *lines)
        except ObjectExists as error:  # a put whose answer was lost, or not our own
            if self._store.read(segment.name, MAX_SEGMENT) != b"".join(lines):
                raise TapeError(f"{segment.name} was written by another syncer") from error
        segment.begun = True
        del segment.unsaved[: len(lines)]
        with contextlib.suppress(OSError):  # it only spares the next start the list of all names
            self._store.replace(_LAST, json.dumps({"segment": segment.name}).encode())

    def _write(self, segment: _Segment, flush: bool) -> None:
        """Append what is unsaved to the segment's file. Raises OSError; then no half line stays."""
        path = self._store.local_path(segment.name)
        assert path is not None
        with open(path, "ab", buffering=0) as file:
            end = file.tell()
            while segment.unsaved:
                raw = segment.unsaved[0]
                try:
                    if file.write(raw) != len(raw):
                        raise DiskFull(errno.ENOSPC, f"disk full: the tape {path} could not be written whole")
                except OSError:
                    os.ftruncate(file.fileno(), end)
                    raise
                end += len(raw)
                segment.unsaved.pop(0)
            if flush:
                os.fsync(file.fileno())


def decode_line(raw: bytes, number: int) -> dict[str, Any]:
    """Line ``number`` (from 1) of a tape. Raises ``TapeError``, ``FormatRefused``."""
    try:
        line = dict(json.loads(raw))
        check_format(line["format"], f"tape line {number}")
        newest_of(line)
        line["previous"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TapeError(f"tape line {number} is not understood: {error}") from error
    return line


def newest_of(line: dict[str, Any]) -> dict[int, int]:
    """The versions that a line says were reached, by fragment."""
    if line["kind"] == SEGMENT:
        return {int(fragment): operator.index(version) for fragment, version in line["newest"].items()}
    if line["kind"] in (SETTINGS, EVENT, REFUSED):
        return {}
    return {operator.index(line["fragment"]): operator.index(line["version"])}


def first_line_of(name: str) -> int:
    """The number of a segment's first line, by its name."""
    return int(name.removeprefix(f"{FOLDER}/").removesuffix(".jsonl"))
