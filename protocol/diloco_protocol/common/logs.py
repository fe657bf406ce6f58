"""Log lines for programs that run in pods: one JSON object a line, or text for people.

A line has ``time`` (UTC), ``level``, ``slot`` (-1: none), the fields that the program gives (``job``, and for a worker
``region`` and ``ordinal``), and ``message``. A cluster that looks at a container that failed reads the end of its log
alone; so the last line that a program of ours writes says what went wrong and the cure, a traceback comes in a line
before it, and ``message`` is last in every line.

Nothing here knows a secret, and what is logged must not hold one.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Mapping
from typing import Literal, TextIO

Format = Literal["json", "text"]
FORMATS: tuple[Format, ...] = ("json", "text")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
MAX_MESSAGE = 1500  # characters of one message; a cluster keeps the last 2048 bytes of a log


def printable(text: str) -> str:
    """A text that others wrote, without what a terminal would obey: control characters but for tabs and line ends."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


class TextLines(logging.Formatter):
    """Lines for people, in a terminal perhaps."""

    def __init__(self) -> None:
        super().__init__(TEXT)

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class JsonLines(logging.Formatter):
    """One JSON object a line. ``fields``: what every line has; the caller may change them later. ``own``: what a
    record may have of its own, which goes before theirs."""

    def __init__(self, fields: Mapping[str, object], own: tuple[str, ...] = ("slot",)) -> None:
        super().__init__()
        self._fields, self._own = fields, own

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            **({"slot": -1} if "slot" in self._own else {}),
            **self._fields,
            **{name: getattr(record, name) for name in self._own if hasattr(record, name)},
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps({**line, "message": bounded_message(record)})


def bounded_message(record: logging.LogRecord) -> str:
    """The record's message, at most ``MAX_MESSAGE`` characters of it."""
    message = record.getMessage()
    return message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…"


def is_of_caller_that_left(record: logging.LogRecord) -> bool:
    """Whether gRPC logs, as an error with a traceback, that a caller left while the end of its call was being sent.
    That is no fault of the server, which hears of the caller's leaving anyway."""
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ == "ExecuteBatchError" and "SendStatusFromServerOperation" in str(error)


def configure(
    form: Format, fields: Mapping[str, object], *, level: str, packages: tuple[str, ...], stream: TextIO | None = None
) -> None:
    """Log to ``stream`` (stderr), ``packages`` from ``level`` on and everybody else from warnings on."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(fields) if form == "json" else TextLines())
    handler.addFilter(lambda record: not is_of_caller_that_left(record))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(form == "json")  # else Python writes them beside the log, as they are
    for package in packages:
        logging.getLogger(package).setLevel(level)
