"""What ended a program, by the text that it left: its last lines, the error in one line, and which errors are the same.

``diloco run`` reads the log of a process that ended, the operator a pod's termination message. Both ask the same
questions: what to show, and whether it is the error of before, which another start will not cure.

*The error in one line* is the last line of the last traceback, or the last line that was logged as an error, whichever
came later; where there is neither, the last line.

*The same error*: two lines that differ in nothing but numbers and identifiers (addresses, steps, seconds, ids).

Example. A log that ends with ``Traceback … File "train.py", line 12 … NameError: name 'lss' is not defined`` has the
error ``NameError: name 'lss' is not defined``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

LINES_SHOWN = 10
SAME_ERRORS = 3
"""A place that ended so often with the same error, before any merge of the job, fails the job."""
MAX_ERROR_CHARS = 300
MAX_KINDS = 32  # different errors that are counted of one place
NEVER_JOINED = (
    "its program ended well (exit code 0) and had never joined the job: a program of one's own trains through"
    " diloco_worker.Learner.from_environment and its batches() (docs/your-own-loop.md)"
)
"""The error of a learner that ended so."""

_TRACEBACK = "Traceback (most recent call last):"
_LOGGED = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.,]\d+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) +[\w.]+: ")
_GROUP = re.compile(r"^\s*[|+]-?\s?")  # before each line of an exception group
_FAILED = "failed: "  # before the error, in the last line of our own programs
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-f]{8,}\b|\d+")


def last_lines(lines: Iterable[str], count: int = LINES_SHOWN) -> list[str]:
    """The last lines that are not empty."""
    return [line.rstrip() for line in lines if line.strip()][-count:]


def error_line(lines: Iterable[str]) -> str:
    """The error that these lines end with, in one line; empty: they say nothing."""
    found, last, traced = "", "", False
    for line in lines:
        text, logged = _read_line(line)
        if not text.strip():
            continue
        last = text.strip()
        if _TRACEBACK in text:
            traced = True
            continue
        text = _GROUP.sub("", text) if traced else text
        frame = text[:1].isspace() or set(text) <= {"-", "+"}
        if logged == "ERROR" or (traced and not logged and not frame):
            found, traced = text.strip(), False
        elif logged:
            traced = False
    return shorten((found or last).removeprefix(_FAILED))


def _read_line(line: str) -> tuple[str, str]:
    """A line without what our logs write before it, and its level; empty: it is no line of a log."""
    if line.startswith("{"):
        try:
            entry = json.loads(line)
            return str(entry["message"]), str(entry["level"]).upper()
        except (ValueError, KeyError, TypeError, RecursionError):
            return line, ""
    match = _LOGGED.match(line)
    return (line[match.end() :], match[1]) if match else (line, "")


def shorten(text: str, limit: int = MAX_ERROR_CHARS) -> str:
    """One line of at most ``limit`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def normal_form(error: str) -> str:
    """An error without what varies from one end to the next: two errors are the same if theirs are equal."""
    return _VARYING.sub("#", error)


@dataclass(slots=True)
class RepeatedErrors:
    """How often each place (a learner's, the syncer's) ended with which error. What it keeps is bounded."""

    _counts: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, place: str, error: str) -> int:
        """Count an end of ``place``; how often it has ended with that error. An empty error is none: 0."""
        if not error:
            return 0
        counts = self._counts.setdefault(place, {})
        form = normal_form(error)
        if form not in counts and len(counts) >= MAX_KINDS:
            counts.clear()  # nothing of this place repeats
        counts[form] = counts.get(form, 0) + 1
        return counts[form]

    def clear(self) -> None:
        self._counts.clear()


def repeated_text(subject: str, times: int, error: str) -> str:
    """Why a job fails whose place ended again and again with the same error."""
    return f"{subject} ended {times} times with the same error, and nothing was merged yet: {error}"
