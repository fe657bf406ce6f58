"""How many cores this process may use: its affinity, and the quota that its container gives it.

A container with a limit of half a core on a machine of 64 sees 64. As many threads as that
would spend its half core on waiting for each other, and be stopped in the middle of a step.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def usable_cores(cgroups: Path = _CGROUPS) -> int:
    """At least 1. A quota is rounded up: 300 millicores are one core."""
    here = len(os.sched_getaffinity(0))
    return max(1, math.ceil(min(here, quota(cgroups))))


def quota(cgroups: Path = _CGROUPS) -> float:
    """Cores that the control group grants, as this process's own mount shows it; infinite if it sets none."""
    try:
        words = (cgroups / "cpu.max").read_text().split()  # version 2: quota (or max) and period
        return math.inf if words[0] == "max" else int(words[0]) / int(words[1])
    except (OSError, ValueError, IndexError, ZeroDivisionError):
        pass
    try:
        granted = int((cgroups / "cpu" / "cpu.cfs_quota_us").read_text())
        period = int((cgroups / "cpu" / "cpu.cfs_period_us").read_text())
        return math.inf if granted <= 0 else granted / period
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf
