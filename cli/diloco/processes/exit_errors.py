"""Which error ended a process of a run: by how it ended, the end of its log, and the kernel's counts.

``error_of_exit`` decides, by values alone. ``ExitErrors`` reads what it needs: of a log only what the process itself
wrote, for its successors write to the same file.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from diloco.log_lines import rendered
from diloco.processes.memory_kills import count_memory_kills
from diloco.processes.supervisor import Exit, Kind, describe_end
from diloco_protocol.common.program_errors import NEVER_JOINED, error_line, last_lines, normal_form, shorten

BRIEF_CHARS = 160
TOGETHER_SECONDS = 5.0  # kills within them were of one shortage
MAX_LOG_BYTES = 64 << 10  # of the end of a log
_OF_IMPORTS = ("ImportError:", "ModuleNotFoundError:")
_TOLD_TO_END = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_SHELLS = 128  # a shell's exit code is this much above the signal that ended its command


@dataclass(frozen=True, slots=True)
class ExitError:
    """``text``: the error in a line. ``lines``: the end of the process's log, where that says more. ``cause``: the text
    without what is said beside it; empty: all of it."""

    text: str
    lines: tuple[str, ...] = ()
    cause: str = ""

    @property
    def brief(self) -> str:
        """The error within a line that says more."""
        return shorten(self.cause or self.text, BRIEF_CHARS)


class ErrorScreen(Protocol):
    """Where errors are shown."""

    def event(self, text: str, style: str = "") -> None: ...

    def show_text(self, text: str) -> None: ...


def error_of_exit(
    kind: Kind, how: Exit, log: Sequence[str], memory_killed: bool | None, need: str, joined: bool = True
) -> ExitError | None:
    """The error that ended a process; None: it was told to end, or ended well. ``log``: the last lines that it wrote.
    ``memory_killed``: whether the kernel has killed for want of memory meanwhile; None: its counts cannot be read.
    ``need``: the memory that the job needs. ``joined``: of a learner, whether it ever joined the job."""
    number = _signal(how)
    if number in _TOLD_TO_END:
        return None
    if how.code == 0:
        return ExitError(NEVER_JOINED) if kind is Kind.LEARNER and not joined else None
    if number == signal.SIGKILL:
        cause = _killer_text(memory_killed)
        uncounted = "; the kernel counts no kill for want of memory" if memory_killed is False else ""
        return ExitError(f"{cause} ({how}){uncounted}; {need}", cause=cause)
    end, said, lines = describe_end(kind, how), error_line(log), tuple(last_lines(readable(log)))
    if said.startswith(_OF_IMPORTS):
        return ExitError(f"{said} (imported by {sys.executable}; a command's python is diloco's own)", cause=said)
    if number is not None:
        return ExitError(end, lines)
    return ExitError(said or f"{end}, and nothing in its log", lines)


def _signal(how: Exit) -> int | None:
    """The signal that ended a process, or the command that it was the shell of."""
    if how.signal is None and how.code is not None and how.code > _SHELLS:
        return how.code - _SHELLS
    return how.signal


def _killer_text(memory_killed: bool | None) -> str:
    """Who may have killed a process that this run did not. A count that has not risen does not rule out daemons that
    watch memory themselves."""
    if memory_killed is None:
        return "killed by the system, probably out of memory"
    if memory_killed:
        return "killed by the system, out of memory"
    return "killed by a person, or by a service that watches memory"


class ExitErrors:
    """What ended the processes of one run. ``log_of``: a process's log; ``memory_need``: what memory the job needs, in
    words, as far as it is known by now."""

    def __init__(self, log_of: Callable[[str], Path], memory_need: Callable[[], str]) -> None:
        self._log_of = log_of
        self._memory_need = memory_need
        self._begins: dict[str, int] = {}  # where in its log a process begins
        self._kills = count_memory_kills()
        self._unexplained = 0  # of the kernel's kills, those that no process's end is told by yet
        self._risen_at = -math.inf  # monotonic seconds: when the count last rose
        self._shown: set[str] = set()

    def begin(self, name: str) -> None:
        """A process is about to be started."""
        self._count_kills()
        try:
            self._begins[name] = self._log_of(name).stat().st_size
        except OSError:
            self._begins[name] = 0

    def log_begin(self, name: str) -> int:
        """Where in its log the process that was started last begins, bytes."""
        return self._begins.get(name, 0)

    def find(self, name: str, kind: Kind, how: Exit, joined: bool = True) -> ExitError | None:
        """The error that ended it; None: none. ``joined``: of a learner, whether it ever joined the job."""
        killed = self._unexplained > 0 if self._count_kills() else None
        if killed and _signal(how) == signal.SIGKILL:
            self._unexplained -= 1
        log = tail(self._log_of(name), begin=self.log_begin(name))
        return error_of_exit(kind, how, log, killed, need=self._memory_need(), joined=joined)

    def _count_kills(self) -> bool:
        """Take in what the kernel has counted since the last time; False: its counts cannot be read."""
        before, self._kills = self._kills, count_memory_kills()
        if before is None or self._kills is None:
            return False
        now = time.monotonic()
        if now > self._risen_at + TOGETHER_SECONDS:
            self._unexplained = 0  # they were other programs'
        if self._kills > before:
            self._unexplained += self._kills - before
            self._risen_at = now
        return True

    def was_shown(self, error: ExitError | None) -> bool:
        """Whether this error was shown before, with the end of a log."""
        return error is not None and normal_form(error.text) in self._shown

    def show(self, name: str, error: ExitError | None, screen: ErrorScreen) -> None:
        """Show what ended a process: the first time that any process ended so."""
        if error is None or self.was_shown(error):
            return
        form = normal_form(error.text)
        self._shown.add(form)
        if error.lines:
            screen.show_text("\n".join([f"the end of {self._log_of(name)}:", *(f"  {line}" for line in error.lines)]))
        else:
            screen.event(f"{name}: {error.text}", "red")


def readable(lines: Sequence[str]) -> list[str]:
    """Lines of a log for people: of JSON what it says."""
    return [part for line in lines for part in rendered(line)[0].split("\n")]


def tail(path: Path, lines: int = 0, begin: int = 0) -> list[str]:
    """The last ``lines`` (0: all) of the end of a file that may be large, from its byte ``begin`` on; none if it cannot
    be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(begin, path.stat().st_size - MAX_LOG_BYTES))
            return file.read(MAX_LOG_BYTES).decode("utf-8", "replace").splitlines()[-lines:]
    except OSError:
        return []
