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
from diloco.processes.child_guard import RUNNER_GONE
from diloco.processes.launch import Child, ForkServerClient, StartError, ranks_command
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


# A program such as torchrun: what it starts is in a session of its own, and ignores SIGTERM.
STARTER = """
import os, pathlib, subprocess, sys, time
stray = "import os, pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); at = sys.argv[1]; "
stray += "pathlib.Path(at + '~').write_text(str(os.getpid())); os.rename(at + '~', at); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", stray, sys.argv[1]], start_new_session=True)
while not os.path.exists(sys.argv[1]): time.sleep(0.01)
time.sleep(float(sys.argv[2]))
"""


async def start_starter(tmp_path: Path, seconds: float) -> tuple[Child, psutil.Process]:
    pid_file = tmp_path / "stray"
    command = [sys.executable, "-c", STARTER, str(pid_file), str(seconds)]
    child = await Child.start("one", command, os.environ, tmp_path / "log", guard=True)
    wait_until(pid_file.exists)
    return child, psutil.Process(int(pid_file.read_text()))


@pytest.mark.parametrize("end", ["killed", "runner gone", "ended", "command killed"])
async def test_what_a_command_started_in_a_session_of_its_own_ends_with_it(end: str, tmp_path: Path) -> None:
    child, stray = await start_starter(tmp_path, 0.0 if end == "ended" else 60.0)
    if end == "killed":
        child.signal(signal.SIGKILL)
    elif end == "runner gone":
        os.kill(child.pid, RUNNER_GONE)
    elif end == "command killed":
        next(one for one in psutil.Process(child.pid).children() if one.pid != stray.pid).kill()
    await child.wait()
    wait_until(lambda: not stray.is_running() or stray.status() == psutil.STATUS_ZOMBIE)


async def test_a_pause_holds_what_a_command_started_in_a_session_of_its_own(tmp_path: Path) -> None:
    child, stray = await start_starter(tmp_path, 60.0)
    child.signal(signal.SIGSTOP)
    wait_until(lambda: stray.status() == psutil.STATUS_STOPPED)
    child.signal(signal.SIGCONT)
    wait_until(lambda: stray.status() == psutil.STATUS_SLEEPING)
    child.signal(signal.SIGKILL)
    await child.wait()


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (1, ["-m", "diloco_worker"]),
        (2, ["-m", "diloco_worker.launch", "--processes", "2", sys.executable, "-m", "diloco_worker"]),
    ],
)
def test_a_learner_of_several_ranks_is_started_by_the_launch(ranks: int, words: list[str]) -> None:
    assert ranks_command(None, ranks)[1:] == words
    assert ranks_command(["python", "a.py"], ranks)[-2:] == [sys.executable, "a.py"]
