"""The worker's log lines: text for people, or JSON for a cluster (protocol's logs.py).

The built-in program calls ``configure`` first of all. A program of your own that is to log
in the same way calls ``diloco_worker.configure_logging()`` before anything else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from diloco_protocol.common import logs
from diloco_worker import exit_hooks
from diloco_worker.settings import ConfigurationError

_fields: dict[str, object] = {}  # of every JSON line of this process


def set_fields(**fields: object) -> None:
    """Write these fields into every JSON line from now on: ``job``, ``slot`` (-1: none)."""
    _fields.update(fields)


def configure(environ: Mapping[str, str] | None = None) -> None:
    """Log to stderr, as DILOCO_LOG_FORMAT (text, json) and DILOCO_LOG_LEVEL say; other libraries from
    warnings on. Raises ConfigurationError, and then logs all the same."""
    env = os.environ if environ is None else environ
    form, level = env.get("DILOCO_LOG_FORMAT", "text"), env.get("DILOCO_LOG_LEVEL", "INFO").upper()
    ordinal = env.get("DILOCO_ORDINAL", "0")
    set_fields(
        job="",
        region=env.get("DILOCO_REGION", "local"),
        ordinal=int(ordinal) if ordinal.isdecimal() else ordinal,
        slot=-1,
    )
    if (rank := env.get("RANK", "")).isdecimal() and env.get("WORLD_SIZE", "1") != "1":
        set_fields(rank=int(rank))
    logs.configure(
        "json" if form == "json" else "text",
        _fields,
        level=level if level in logs.LEVELS else "INFO",
        packages=("diloco_worker", "diloco_protocol"),
    )
    exit_hooks.install(json=form == "json")
    for name, value, words in (("DILOCO_LOG_FORMAT", form, logs.FORMATS), ("DILOCO_LOG_LEVEL", level, logs.LEVELS)):
        if value not in words:
            raise ConfigurationError(f"{name} is {value!r}: it must be one of {', '.join(words)}")
