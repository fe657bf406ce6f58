"""Processes that are started and signalled: what is known of their ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from diloco.checks.model import _wait_with_lines
from diloco.processes import loading
from diloco.processes.launch import Child, ForkServerClient, StartError
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


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "SILENT_SECONDS", 2.0)
    monkeypatch.setattr(loading, "TOLD_SECONDS", 0.5)


async def test_libraries_that_do_not_load_are_told_of_and_given_up_with_a_cure(tmp_path: Path, impatient: None) -> None:
    told: list[str] = []
    stuck = ForkServerClient(os.environ, tmp_path, tmp_path / "log", ("-c", "input()"), tell=told.append)
    with pytest.raises(StartError, match=r"nothing was done for .*importtime"):
        await stuck.load()
    assert told and told[0].startswith("still loading torch and the worker's libraries: ")
    await stuck.close()


def test_a_check_that_stands_still_is_told_of_and_killed(impatient: None) -> None:
    told: list[str] = []
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not _wait_with_lines(process, told.append)
        assert process.wait() == -signal.SIGKILL and told
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        assert _wait_with_lines(process, told.append)
