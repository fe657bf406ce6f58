"""Processes that are started and signalled: what is known of their ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import psutil
import pytest

from diloco.processes.launch import Child
from diloco.processes.supervisor import Exit
from patience import wait_until


async def test_a_signal_to_a_process_that_has_just_ended_leaves_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes between the end and the moment in which the event loop hears of it."""
    may_reap = threading.Event()
    waitpid = os.waitpid

    def late(pid: int, options: int) -> tuple[int, int]:
        if threading.current_thread() is not threading.main_thread():  # the loop's watcher
            may_reap.wait()
        return waitpid(pid, options)

    monkeypatch.setattr(os, "waitpid", late)
    child = await Child.start("one", [sys.executable, "-c", "raise SystemExit(7)"], os.environ, tmp_path / "log")
    wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
    child.signal(signal.SIGTERM)
    may_reap.set()
    assert await child.wait() == Exit(code=7)
    child.signal(signal.SIGTERM)  # to nothing
