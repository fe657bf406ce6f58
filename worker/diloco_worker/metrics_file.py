"""A process's metrics file: one JSON object a line, for people and for the runner's journal.

Metrics are worth less than the training that they tell of: where the file cannot be written, for instance because the
disk is full, a warning says so once, lines are dropped, and after ``AGAIN_SECONDS`` it is tried again. A line is in
the file whole or not at all, unless the process is killed in the middle of one.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)

FLUSH_SECONDS = 1.0
AGAIN_SECONDS = 10.0


class MetricsFile:
    """``path`` None: nothing is written. Not for several threads at once."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lines: list[bytes] = []
        self._next = 0.0  # monotonic seconds of the next write
        self._failed = False

    def add(self, row: Mapping[str, object], *, now: bool = False) -> None:
        """Take a line; it is in the file within a second of the next one, or at once if ``now``."""
        if self._path is None:
            return
        self._lines.append(json.dumps(row).encode() + b"\n")
        if now or time.monotonic() >= self._next:
            self.flush()

    def flush(self) -> None:
        """Write what is held. Never raises OSError."""
        if self._path is None or not self._lines:
            return
        lines, self._lines = self._lines, []
        if self._failed and time.monotonic() < self._next:
            return
        try:
            self._append(self._path, b"".join(lines))
        except OSError as error:
            if not self._failed:
                log.warning("metrics are not written: %s: %s", self._path, error.strerror or error)
            self._failed = True
            self._next = time.monotonic() + AGAIN_SECONDS
            return
        if self._failed:
            log.warning("metrics are written again")
        self._failed = False
        self._next = time.monotonic() + FLUSH_SECONDS

    def _append(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            before = os.fstat(handle).st_size
            if os.write(handle, data) != len(data):
                os.ftruncate(handle, before)  # no half line stays
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(handle)
