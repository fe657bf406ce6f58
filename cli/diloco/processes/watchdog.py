"""Whether a syncer that lives is still of use: when its silence means that it hangs.

Theory of operation. Before a syncer first answers it may be busy for long: it compiles kernels, and reads a store that
may be large. So its start is judged by progress: it is given up when it has neither worked nor read for
``SYNCER_SILENT_SECONDS``, and in any case after ``START_SECONDS``. One that has answered answers within milliseconds,
whatever else it does; when it has not for ``SYNCER_SILENT_SECONDS`` it hangs, however busy it looks.

Plain code but for what reads /proc; the time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

SYNCER_SILENT_SECONDS = 60.0
START_SECONDS = 3600.0


@dataclass(slots=True)
class Watchdog:
    """Over one syncer process after the other. Times are monotonic seconds."""

    begun: float = 0.0
    heard: float = 0.0  # the last sign: an answer, or progress before the first answer
    answers: bool = False
    figure: int = -1

    def on_started(self, now: float) -> None:
        self.begun = self.heard = now
        self.answers = False
        self.figure = -1

    def on_answered(self, now: float) -> None:
        self.heard = now
        self.answers = True

    def on_excused(self, now: float) -> None:
        """It is held up on purpose."""
        self.heard = now

    def check(self, now: float, figure: int) -> str:
        """Why it is to be given up; empty: it is not. ``figure``: its ``progress``."""
        if not self.answers and figure != self.figure:
            self.heard = now
            self.figure = figure
        if not self.answers and now - self.begun > START_SECONDS:
            return f"the syncer did not serve within {START_SECONDS:.0f} s"
        if now - self.heard <= SYNCER_SILENT_SECONDS:
            return ""
        if self.answers:
            return f"the syncer has not answered for {SYNCER_SILENT_SECONDS:.0f} s"
        return f"the syncer does not serve, and has done nothing for {SYNCER_SILENT_SECONDS:.0f} s"


def progress(pid: int) -> int:
    """What a process has done so far: clock ticks on a processor, pages and bytes read. -1: it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # behind the name, which may hold anything
        done = int(fields[9]) + int(fields[11]) + int(fields[12])  # major faults, user, system
    except (OSError, ValueError, IndexError):
        return -1
    try:
        with open(f"/proc/{pid}/io", encoding="ascii", errors="replace") as file:
            done += sum(int(line.split()[1]) for line in file if line.startswith(("rchar", "wchar")))
    except (OSError, ValueError, IndexError):
        pass  # not everybody may read it; the processor's time tells as well
    return done


def peak_rss_bytes(pid: int) -> int:
    """The most resident memory that a process has had; 0: it is gone."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:")), 0)
    except OSError:
        return 0
