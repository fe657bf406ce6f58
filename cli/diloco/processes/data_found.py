"""What learners found in the job's data, for the screen, once.

A learner that has read the data leaves a line and its warnings in ``cache/data.json`` of the run's directory
(docs/contracts.md); an earlier run's may be there already.
"""

from __future__ import annotations

import json
from pathlib import Path

from diloco_protocol.common.files import read_bounded

MAX_BYTES = 1 << 16


class DataFound:
    """Call ``news`` now and then: once the file is there or has changed, it gives what it says."""

    def __init__(self, workdir: Path) -> None:
        self._file = workdir / "cache" / "data.json"
        self._before = self._stamp()
        self._told = False

    def news(self) -> list[tuple[str, str]]:
        """Texts, each with its style; none before there are some, and after they were given."""
        if self._told or self._stamp() == self._before:
            return []
        self._told = True  # all learners write the same
        try:
            found = json.loads(read_bounded(self._file, MAX_BYTES))
            line, warnings = str(found["line"]), [str(warning) for warning in found["warnings"]]
        except (OSError, ValueError, KeyError, TypeError):
            return []
        return [(f"data: {line}", ""), *((f"warning: data: {warning}", "yellow") for warning in warnings)]

    def _stamp(self) -> int | None:
        try:
            return self._file.stat().st_mtime_ns
        except OSError:
            return None
