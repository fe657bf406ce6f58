"""A process that does not outlive its parent. Standard library only: child_guard.py runs it without site-packages."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def set_parent_death_signal(number: int) -> None:
    """Have the kernel send ``number`` to this process when its parent ends. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """The same, and end at once if ``parent``, its process id, has ended already. Raises OSError."""
    set_parent_death_signal(number)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
