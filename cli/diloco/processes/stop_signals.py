"""Signals that ask a command to stop what it runs: which of them it heeds, and what to say was the reason.

Whoever started the command may have had a signal ignored: ``nohup`` SIGHUP, a shell's background job SIGINT. Such a
signal stays ignored.
"""

from __future__ import annotations

import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def heeded_signals() -> list[signal.Signals]:
    """The stop signals that this process was not started to ignore; SIGTERM is always one."""
    return [one for one in STOP_SIGNALS if one is signal.SIGTERM or signal.getsignal(one) is not signal.SIG_IGN]


def stop_reason(number: int) -> str:
    """Why the job stops, for people."""
    return "the terminal was closed" if number == signal.SIGHUP else "stopped by the user"
