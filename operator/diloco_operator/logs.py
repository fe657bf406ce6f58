"""The operator's log: one JSON object a line with ``job`` and ``namespace`` where it is about a job.

``about(job)`` gives the ``extra`` of a log call. kopf and the client are heard from warnings
on; what kopf says of every attempt at a request is told in one line of ours instead
(watches.py), so that an API server that is away is not a page of errors.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

from diloco_protocol.logs import MAX_MESSAGE

from .cache import Key


class Lines(logging.Formatter):
    """One JSON object a line; ``message`` last."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "role": "operator",
        }
        for name in ("namespace", "job"):
            if (value := getattr(record, name, None)) is not None:
                line[name] = value
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps({**line, "message": _message(record)}, ensure_ascii=False)


class Text(logging.Formatter):
    """A line for people."""

    def format(self, record: logging.LogRecord) -> str:
        job = getattr(record, "job", None)
        about = f" {getattr(record, 'namespace', '')}/{job}:" if job is not None else ""
        line = f"{self.formatTime(record)} {record.levelname:<7}{about} {_message(record)}"
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


def _message(record: logging.LogRecord) -> str:
    message = record.getMessage()
    return message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…"


def about(key: Key) -> dict[str, str]:
    """``extra`` of a log call about a job."""
    return {"namespace": key[0], "job": key[1]}


class _Attempts(logging.Filter):
    """kopf's line for every attempt at a request: known, and told elsewhere."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(("Request attempt", "OS signals are ignored", "Unresolved"))


def configure(form: str, level: str, stream: TextIO | None = None) -> None:
    """Log to ``stream`` (stderr)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(Lines() if form == "json" else Text())
    handler.addFilter(_Attempts())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("diloco_operator").setLevel(level)
    logging.getLogger("diloco_protocol").setLevel(level)
    logging.getLogger("aiohttp").setLevel(logging.ERROR)
    logging.captureWarnings(True)
