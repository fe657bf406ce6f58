"""Whether the syncer's process that runs at the moment is still of use, and what it took of memory.

Theory of operation. ``Watchdog`` judges by its answers, and before the first of them by its progress. Here it is told
what the run knows beside: that a fault of ``--chaos`` has stopped the process, which is not held against it, and that
this process was killed, which takes a while and is not to be done twice.

What is still wrong here: memory is sampled at each look at the status, so that a peak of the last half second is
missed; the kernel would tell it to whoever waits for the process (wait4).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from diloco.processes.launch import Process
from diloco.processes.watchdog import Watchdog, peak_rss_bytes, progress


@dataclass(kw_only=True)
class SyncerHealth:
    """``running``: the processes by name, as they are at the moment. ``paused``: whether one is stopped on purpose."""

    running: Mapping[str, Process]
    paused: Callable[[str], bool]
    peak_rss: int = 0  # bytes, of all syncers of the run
    was_killed: bool = False  # the process that was started last, because it did not answer
    watchdog: Watchdog = field(default_factory=Watchdog)

    def on_started(self) -> None:
        self.was_killed = False
        self.watchdog.on_started(time.monotonic())

    def sample_rss(self) -> None:
        """The peak of resident memory, which the kernel forgets with the process."""
        if (process := self.running.get("syncer")) is not None:
            self.peak_rss = max(self.peak_rss, peak_rss_bytes(process.pid))

    def reason_to_kill(self) -> str:
        """Why the syncer that runs and does not answer is of no use any more; empty: it may be yet."""
        process = self.running.get("syncer")
        if process is None:
            return ""
        if self.paused("syncer"):
            self.watchdog.on_excused(time.monotonic())
        return self.watchdog.check(time.monotonic(), progress(process.pid))

    def kill(self) -> None:
        """End the syncer that runs; its end is no error of its own."""
        self.running["syncer"].signal(signal.SIGKILL)
        self.was_killed = True
        self.watchdog.on_excused(time.monotonic())  # until it is gone
