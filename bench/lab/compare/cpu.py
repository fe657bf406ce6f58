"""CPU seconds of a process and of all that descend from it, followed while they come and go."""

from __future__ import annotations

import os
import time
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def read_processes() -> dict[int, tuple[int, float]]:
    """Of every process: its parent's id, and its CPU seconds so far."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            words = Path(f"/proc/{entry}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        found[int(entry)] = (int(words[1]), (int(words[11]) + int(words[12])) / _TICKS)
    return found


def descendants(root: int, processes: dict[int, tuple[int, float]]) -> set[int]:
    """Ids of the process and of all that descend from it."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in processes.items():
        children.setdefault(parent, []).append(pid)
    found, waiting = set[int](), [root]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return found


class CpuMeter:
    """``sample`` now and then; ``share`` says what of the cores was used between two moments. What a process used
    after the last sample before its end is missing."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._last: dict[int, float] = {}
        self._total = 0.0
        self._samples: list[tuple[float, float]] = []

    def sample(self) -> None:
        processes = read_processes()
        now = {pid: processes[pid][1] for pid in descendants(self._root, processes) if pid in processes}
        self._total += sum(max(0.0, used - self._last.get(pid, 0.0)) for pid, used in now.items())
        self._last = now
        self._samples.append((time.time(), self._total))

    def share(self, start: float, end: float, cores: int) -> float:
        """Of ``cores`` cores, 0 to 1, between two times (Unix seconds)."""
        within = [(at, used) for at, used in self._samples if start <= at <= end]
        if len(within) < 2:
            return 0.0
        (t0, u0), (t1, u1) = within[0], within[-1]
        return (u1 - u0) / ((t1 - t0) * cores)
