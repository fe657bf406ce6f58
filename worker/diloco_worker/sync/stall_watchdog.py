"""Ends a process whose training thread hangs, with the stack traces of all threads in the log.

A thread of its own observes the training thread by the rule of ``core.stall_rule``. From half of the limit on the
status port says so (``/healthz``). At the limit the process ends with exit code 6 (``WorkerExit.STALLED``), whatever
hangs in it, and is replaced as any learner that dies: the syncer drops its unmerged work, and the replacement takes a
peer's optimizer state.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable

from diloco_protocol.vocabulary import WorkerExit
from diloco_worker import exit_hooks
from diloco_worker.core.stall_rule import LifeSigns, StallRule
from diloco_worker.group.rank_watch import RankWatch
from diloco_worker.group.ranks import Group, Ranks

log = logging.getLogger(__name__)

_LONGEST_INTERVAL = 5.0
_TELL_SECONDS = 5.0  # for the log; whoever hangs may hold its lock


class StallWatchdog:
    """``observe`` returns the life signs of now, from any thread. ``stall_seconds`` None: no thread is started.
    ``ranks``: of the learner; of several it says for whom they wait."""

    def __init__(
        self, stall_seconds: float | None, observe: Callable[[], LifeSigns], ranks: Ranks | None = None
    ) -> None:
        self._stall_seconds = stall_seconds
        self._interval = min(_LONGEST_INTERVAL, (stall_seconds or 0.0) / 20)
        self._rule = StallRule(stall_seconds, self._interval)
        self._observe = observe
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._ranks = ranks
        self._rank_watch: RankWatch | None = None

    def start(self) -> None:
        """Begin to watch."""
        if self._stall_seconds is not None:
            self._thread = threading.Thread(target=self._watch, name="diloco-watchdog", daemon=True)
            self._thread.start()
            if isinstance(self._ranks, Group):
                self._rank_watch = RankWatch(self._ranks, self._interval, lambda: self._rule.suspect)

    def stop(self) -> None:
        """Watch no more: the loop is over."""
        self._stopped.set()
        if self._rank_watch is not None:
            self._rank_watch.stop()

    def problem(self) -> str:
        """What is the matter, from half of the limit on; empty: nothing."""
        rule = self._rule
        if self._stopped.is_set() or not rule.suspect:
            return ""
        return f"no step for {rule.idle_seconds:.0f} s; at {rule.limit:.0f} s this process ends and is replaced"

    def _watch(self) -> None:
        while not self._stopped.wait(self._interval):
            self._rule.observe(time.monotonic(), self._observe())
            if self._rule.stalled and not self._stopped.is_set():
                teller = threading.Thread(target=self._tell, daemon=True)
                teller.start()
                teller.join(_TELL_SECONDS)
                os._exit(WorkerExit.STALLED)

    def _tell(self) -> None:
        why = (
            f"stalled: no step for {self._rule.idle_seconds:.0f} s (learners.stallSeconds). A kernel, a collective or "
            "the data set hangs: the log has the stack traces of all threads. If a step needs so long, raise the field"
        )
        if self._rank_watch is not None:
            why = f"{why}. {self._rank_watch.describe()}"
        exit_hooks.write_termination_message(why)
        log.error("stack traces of all threads, the newest call first:\n%s", stack_traces())
        log.error("%s", why)


def stack_traces() -> str:
    """The stack traces of all threads, the newest call first, without waiting for any of them."""
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return file.read().decode("utf-8", "replace")
    except OSError as error:  # no room for a file: raw, beside the log's lines
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        return f"(written to stderr: {error})"
