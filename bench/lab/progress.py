"""How far a long computation is, on stderr, with the time that is left."""

from __future__ import annotations

import sys
import time
from typing import IO

from diloco.console import print_text

_EVERY = 2.0  # seconds between two lines
_EVERY_IN_LOG = 15.0  # where stderr is no terminal


class Progress:
    """Says which share of ``what`` is done, every few seconds; nothing of what is over before that."""

    def __init__(self, what: str, file: IO[str] | None = None) -> None:
        self._what = what
        self._file = sys.stderr if file is None else file
        self._began = self._said = time.monotonic()
        self._every = _EVERY if self._file.isatty() else _EVERY_IN_LOG

    def advance(self, share: float) -> None:
        """``share``, 0 to 1, is done."""
        now = time.monotonic()
        if now - self._said < self._every or not 0 < share < 1:
            return
        self._said = now
        left = (now - self._began) * (1 / share - 1)
        print_text(f"{self._what}: {100 * share:.0f} %, {left:.0f} s left", file=self._file, flush=True)
