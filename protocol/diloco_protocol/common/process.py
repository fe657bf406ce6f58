"""A process that does not outlive its parent, and one with many connections. Standard library only: child_guard.py
runs it without site-packages."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal

_PR_SET_PDEATHSIG = 1
_MOST_FILES = 1 << 16  # each learner has five connections, of two descriptors under TLS


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


def raise_file_limit() -> None:
    """Let this process open as many files and connections as it may: a login shell's soft limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
