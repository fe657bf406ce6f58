"""Lines of our programs' logs, for people: those that are JSON in the form of those that are text."""

from __future__ import annotations

import contextlib
import json
from datetime import datetime

LEVEL_STYLES = {"warning": "yellow", "error": "red", "critical": "red", "debug": "dim"}
_KNOWN = frozenset({"time", "level", "job", "role", "region", "ordinal", "slot", "message", "traceback"})


def log_document(line: str, process: str) -> str:
    """A line of a process's log as one JSON object in one line: the entry's own fields where it is JSON, else the
    line as its message; ``process`` is whose it is."""
    entry: object = None
    if line.startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            entry = json.loads(line)
    content = entry if isinstance(entry, dict) and "message" in entry else {"message": line}
    return json.dumps({"process": process, **content})


def rendered(line: str) -> tuple[str, str]:
    """A JSON log line for people, and its style; any other line as it is."""
    if not line.startswith("{"):
        return line, ""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return line, ""
    if not isinstance(entry, dict) or "message" not in entry:
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
