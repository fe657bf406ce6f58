"""Lines of our programs' logs, for people: those that are JSON in the form of those that are text."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from diloco.console import print_text
from diloco.text_console import TextConsole

LEVEL_STYLES = {"warning": "yellow", "error": "red", "critical": "red", "debug": "dim"}
_KNOWN = frozenset({"time", "level", "job", "role", "region", "ordinal", "slot", "message", "traceback"})


@dataclass(frozen=True, slots=True)
class LogOptions:
    """What the command line said. ``target``: whose logs; None: all. ``since``: seconds; ``tail``: lines of each;
    ``previous``: those of the container before the last restart."""

    target: str | None = None
    follow: bool = False
    since: float | None = None
    tail: int | None = None
    previous: bool = False
    raw: bool = False
    as_json: bool = False


class LinePrinter:
    """Prints lines of logs, each behind its process's label, in a column; those of a single process that was named
    without it."""

    def __init__(self, options: LogOptions, labels: Iterable[str] = ()) -> None:
        self._options = options
        self._labels = set(labels)
        self._console = TextConsole(soft_wrap=True, highlight=False)

    def widen(self, labels: Iterable[str]) -> None:
        """These processes may have lines, too."""
        self._labels.update(labels)

    def show(self, label: str, line: str) -> None:
        if self._options.raw:
            self._write(line, "")
            return
        if self._options.as_json:
            print_text(log_document(line, label), flush=True)
            return
        text, style = rendered(line)
        width = max(map(len, self._labels), default=0)
        prefix = f"{label:<{width}}  " if self._options.target is None or len(self._labels) > 1 else ""
        for part in text.split("\n"):
            self._write(f"{prefix}{part}", style)

    def _write(self, line: str, style: str) -> None:
        if self._options.raw and not sys.stdout.isatty():  # as it is, for a program
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
        elif style and sys.stdout.isatty():
            self._console.print(line, style=style)
        else:
            print_text(line, flush=True)


def log_document(line: str, process: str) -> str:
    """A line of a process's log as one JSON object in one line: the entry's own fields where it is JSON, else the
    line as its message; ``process`` is whose it is."""
    return json.dumps({"process": process, **(_entry_of(line) or {"message": line})})


def _entry_of(line: str) -> dict[str, Any] | None:
    """What a line of JSON logs; None: it is none."""
    entry: object = None
    if line.startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            entry = json.loads(line)
    return entry if isinstance(entry, dict) and "message" in entry else None


def rendered(line: str) -> tuple[str, str]:
    """A JSON log line for people, and its style; any other line as it is."""
    if (entry := _entry_of(line)) is None:
        return line, ""
    level = str(entry.get("level") or "").lower()
    stamp = _local_time(str(entry.get("time") or ""))
    slot = entry.get("slot")
    more = "".join(f"  {key}={value}" for key, value in entry.items() if key not in _KNOWN)
    held = f"slot {slot}  " if isinstance(slot, int) and slot >= 0 else ""
    text = f"{stamp} {level.upper():<7} {held}{entry['message']}{more}".strip()
    if entry.get("traceback"):
        text += "\n" + str(entry["traceback"])
    return text, LEVEL_STYLES.get(level, "")


def _local_time(stamp: str) -> str:
    """A time in UTC as the text lines of our programs have it: date and time, local; what is no time as it is."""
    try:
        return datetime.fromisoformat(stamp).astimezone().isoformat(" ", "milliseconds")[:23].replace(".", ",")
    except (ValueError, OverflowError):
        return stamp
