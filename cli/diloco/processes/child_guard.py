"""Starts a program that must not outlive the runner: ``python child_guard.py LIBRARY [--guard] PARENT COMMAND...``

Setting PR_SET_PDEATHSIG between fork and exec from Python would run Python code in a forked child of a process with
threads; this small program does it after an exec, where nothing can be held. Without ``--guard`` it then becomes the
command. With it, it stays: a command of the user's may start processes of its own, so the guard leads the process
group, kills all of it when the runner dies, passes SIGTERM and SIGINT on to the command, and ends as the command did.
Programs such as torchrun start their processes in sessions of their own: the guard adopts them when their parent dies,
and ends them too.
It runs with ``-I -S``, so that it starts at once and nothing of the command's environment changes it; LIBRARY is the
folder that holds ``diloco_protocol``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

LEFT_SECONDS = 0.5  # for what the command left behind, from SIGTERM to SIGKILL
RUNNER_GONE = signal.SIGHUP  # what a guard gets when the runner dies


def _execute(command: list[str]) -> None:
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}; check the command", file=sys.stderr, flush=True)
        os._exit(2)


def _guard(parent: int, command: list[str]) -> int:
    from diloco_protocol.common.process import adopt_orphans, die_with_parent, signal_descendants

    def kill_all(*_: object) -> None:
        signal_descendants(os.getpid(), signal.SIGKILL)
        os.killpg(0, signal.SIGKILL)

    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    adopt_orphans()
    signal.signal(RUNNER_GONE, kill_all)
    die_with_parent(parent, RUNNER_GONE)
    guard = os.getpid()
    passed_on = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    child = os.fork()
    if child == 0:
        signal.signal(RUNNER_GONE, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
        die_with_parent(guard)
        _execute(command)

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in passed_on:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    while (ended := os.wait())[0] != child:
        pass  # one that was adopted
    status = ended[1]
    code = os.waitstatus_to_exitcode(status)
    # What the command left behind ends with it, as it would in a container.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(0, signal.SIGTERM)
    end = time.monotonic() + LEFT_SECONDS
    while signal_descendants(guard, 0) and time.monotonic() < end:
        time.sleep(0.02)
    signal_descendants(guard, signal.SIGKILL)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    return code


def main(arguments: list[str]) -> int:
    library, *arguments = arguments
    sys.path.append(library)
    from diloco_protocol.common.process import die_with_parent

    guard = arguments[:1] == ["--guard"]
    parent, *command = arguments[1:] if guard else arguments
    if guard:
        return _guard(int(parent), command)
    die_with_parent(int(parent))
    _execute(command)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
