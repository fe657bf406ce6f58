"""Starts a program that must not outlive the runner: ``python child_guard.py [--guard] PARENT COMMAND...``

Setting PR_SET_PDEATHSIG between fork and exec from Python would run Python code in a
forked child of a process with threads; this small program does it after an exec, where
nothing can be held. Without ``--guard`` it then becomes the command. With it, it stays:
a command of the user's may start processes of its own, so the guard leads the process
group, kills all of it when the runner dies, passes SIGTERM and SIGINT on to the command,
and ends as the command did. It uses the standard library only and runs with ``-I -S``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
RUNNER_GONE = signal.SIGHUP  # what a guard gets when the runner dies


def _die_with(parent: int, number: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def _execute(command: list[str]) -> None:
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}; check the command", file=sys.stderr, flush=True)
        os._exit(2)


def _guard(parent: int, command: list[str]) -> int:
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    signal.signal(RUNNER_GONE, lambda *_: os.killpg(0, signal.SIGKILL))
    _die_with(parent, RUNNER_GONE)
    guard = os.getpid()
    passed_on = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    child = os.fork()
    if child == 0:
        signal.signal(RUNNER_GONE, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
        _die_with(guard, signal.SIGKILL)
        _execute(command)

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in passed_on:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    # What the command left behind ends with it, as it would in a container.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(0, signal.SIGTERM)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    return code


def main(arguments: list[str]) -> int:
    guard = arguments[:1] == ["--guard"]
    parent, *command = arguments[1:] if guard else arguments
    if guard:
        return _guard(int(parent), command)
    _die_with(int(parent), signal.SIGKILL)
    _execute(command)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
