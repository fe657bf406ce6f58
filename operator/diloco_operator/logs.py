"""The operator's log: one JSON object a line with ``job`` and ``namespace`` where it is about a job.

``about(job)`` gives the ``extra`` of a log call. Other programs' loggers are heard from warnings
on, kopf's only with level DEBUG: of an API server that is away it fills pages, and what
matters of that is logged in one line by kube/api.py and app.py.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from diloco_operator.model import Key
from diloco_protocol.common.logs import JsonLines, bounded_message, printable


class Text(logging.Formatter):
    """A line for people."""

    def format(self, record: logging.LogRecord) -> str:
        job = getattr(record, "job", None)
        about = f" {getattr(record, 'namespace', '')}/{job}:" if job is not None else ""
        line = f"{self.formatTime(record)} {record.levelname:<7}{about} {bounded_message(record)}"
        return printable(line + ("\n" + self.formatException(record.exc_info) if record.exc_info else ""))


def about(key: Key) -> dict[str, str]:
    """``extra`` of a log call about a job."""
    return {"namespace": key[0], "job": key[1]}


def _is_news(record: logging.LogRecord) -> bool:
    """Not what kopf says of attempts and of its own ends: kube/api.py and app.py log that in one line."""
    of_an_end = record.name == "asyncio" and "request_cancel_callback" in record.getMessage()
    return not record.name.startswith("kopf") and not of_an_end


def configure(form: str, level: str, stream: TextIO | None = None) -> None:
    """Log to ``stream`` (stderr)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines({"role": "operator"}, ("namespace", "job")) if form == "json" else Text())
    if level != "DEBUG":
        handler.addFilter(_is_news)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("diloco_operator").setLevel(level)
    logging.getLogger("diloco_protocol").setLevel(level)
    logging.getLogger("aiohttp").setLevel(logging.ERROR)
    logging.captureWarnings(True)
