"""Log lines for programs that run in pods: one JSON object a line, or text for people.

A line has ``time`` (UTC), ``level``, the fields that the program gives (``job``, and for a
worker ``region`` and ``ordinal``), ``slot`` (-1: none), and ``message``. Whoever reads
only the end of a log, as a cluster does for a container that failed, finds there what
went wrong: a traceback is a line of its own, and ``message`` comes last in every line,
so that a line that was cut off at its beginning still ends with it.

Nothing here knows a secret, and what is logged must not hold one.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Literal, TextIO

Format = Literal["json", "text"]
FORMATS: tuple[Format, ...] = ("json", "text")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
MAX_MESSAGE = 1500  # characters of one message; a cluster keeps the last 2048 bytes of a log


class JsonLines(logging.Formatter):
    """One JSON object a line. ``fields``: what every line has; ``slot``: which slot this process
    holds, where the record does not say it."""

    def __init__(self, fields: Mapping[str, object], slot: Callable[[], int] = lambda: -1) -> None:
        super().__init__()
        self._fields, self._slot = dict(fields), slot

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            **self._fields,
            "slot": getattr(record, "slot", self._slot()),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        message = record.getMessage()
        if len(message) > MAX_MESSAGE:
            message = message[: MAX_MESSAGE - 1] + "…"
        return json.dumps({**line, "message": message})


def configure(
    form: Format,
    fields: Mapping[str, object],
    *,
    level: str,
    packages: tuple[str, ...],
    slot: Callable[[], int] = lambda: -1,
    stream: TextIO | None = None,
) -> None:
    """Log to ``stream`` (stderr), ``packages`` from ``level`` on and everybody else from warnings on."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(fields, slot) if form == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for package in packages:
        logging.getLogger(package).setLevel(level)
