"""A process that does not outlive its parent, and one with many connections. Standard library only: child_guard.py
runs it without site-packages."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MOST_FILES = 1 << 16  # each learner has five connections, of two descriptors under TLS


def set_parent_death_signal(number: int) -> None:
    """Have the kernel send ``number`` to this process when its parent ends. Raises OSError."""
    _set_control(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Be the parent of whatever processes below this one lose theirs, however they were started. Raises OSError."""
    _set_control(_PR_SET_CHILD_SUBREAPER, 1)


def _set_control(name: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(name, int(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({name}): {os.strerror(error)}")


def signal_descendants(pid: int, number: int) -> bool:
    """Send ``number`` to all processes below ``pid``, in whatever sessions and groups they are. False: there are
    none."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{name}/stat", encoding="ascii", errors="replace") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]  # behind the name, which may hold anything
            if state != "Z":
                children.setdefault(int(parent), []).append(int(name))
    below = list(children.get(pid, ()))
    for child in below:
        below += children.get(child, ())
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(child, number)
    return bool(below)


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
