"""How long a program may take to load: as long as it makes progress, with a line now and then that says so.

``LoadWatch`` decides by values alone; ``is_loading`` reads the clock and what the process has done.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from diloco.processes.watchdog import progress
from diloco_protocol.common.format_units import duration_text

LOOK_SECONDS = 0.5
TOLD_SECONDS = 15.0  # between two lines
SILENT_SECONDS = 180.0  # without any progress, before a program is given up
CURE = "is the environment on a network disk? `python -X importtime -c 'import torch'` shows what takes long"


@dataclass(slots=True)
class LoadWatch:
    """Over one program, which began at ``begun`` (monotonic seconds). ``what``: what it does, for people."""

    what: str
    begun: float
    _told: float = 0.0
    _moved: float = 0.0
    _figure: int = -1

    def __post_init__(self) -> None:
        self._told = self._moved = self.begun

    def is_stuck(self, now: float, figure: int) -> bool:
        """Whether it has done nothing for long. ``figure``: its ``watchdog.progress``."""
        if figure != self._figure:
            self._figure, self._moved = figure, now
        return now - self._moved > SILENT_SECONDS

    def news(self, now: float, cpu: float) -> str:
        """The line that is due; empty: none is. ``cpu``: its processor time, seconds."""
        if now - self._told < TOLD_SECONDS:
            return ""
        self._told = now
        return f"still {self.what}: {duration_text(now - self.begun)}, {duration_text(cpu)} of it processor time"


def is_loading(watch: LoadWatch, pid: int, tell: Callable[[str], None]) -> bool:
    """Look at the process: False if it has done nothing for long. ``tell`` gets the line that is due."""
    now = time.monotonic()
    if line := watch.news(now, cpu_seconds(pid)):
        tell(line)
    return not watch.is_stuck(now, progress(pid))


def cpu_seconds(pid: int) -> float:
    """The processor time that a process has used; 0: it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
