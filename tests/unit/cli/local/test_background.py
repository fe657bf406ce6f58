"""Runs that go on by themselves, seen from outside: which of them runs, and what stopping one sends and waits for."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

from diloco.console import COMPLETE, CommandError
from diloco.local import background
from diloco.processes.workdir import Workdir
from status_documents import job_report

stop = background.stop.__wrapped__  # type: ignore[attr-defined]


class Runner:
    """Holds a workdir as a run does, under this process's id, until it has had so many signals."""

    def __init__(self, workdir: Workdir) -> None:
        self.workdir, self.signals, self.enough = workdir, 0, 1
        self.lock: IO[str] = workdir.lock.open("w")
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        print(os.getpid(), file=self.lock, flush=True)

    def kill(self, pid: int, number: int) -> None:
        """In the place of ``os.kill``."""
        if number == 0:
            return
        assert (pid, number) == (os.getpid(), signal.SIGTERM)
        self.signals += 1
        if self.signals == self.enough:
            self.leave()

    def leave(self) -> None:
        report = job_report(outcome="interrupted", message="stopped by the user")
        self.workdir.report.write_text(report.model_dump_json(by_alias=True))
        self.lock.truncate(0)
        self.lock.close()


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    workdir = Workdir(tmp_path)
    workdir.job.write_text("{}")
    made = Runner(workdir)
    monkeypatch.setattr(os, "kill", made.kill)
    monkeypatch.setattr(background, "SAME_SIGNAL_SECONDS", 0.0)
    yield made
    made.lock.close()


def test_a_run_is_asked_once_and_waited_for(runner: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    assert stop(str(runner.workdir.path), now=False) == COMPLETE
    assert runner.signals == 1 and "interrupted: stopped by the user" in capsys.readouterr().out


def test_stopping_at_once_is_a_second_signal(runner: Runner) -> None:
    runner.enough = 2
    assert stop(str(runner.workdir.path), now=True) == COMPLETE
    assert runner.signals == 2


def test_it_waits_for_as_long_as_the_run_holds_its_directory(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    runner.enough, looks = 99, list[float]()

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 50:
            runner.leave()

    monkeypatch.setattr(background, "time", SimpleNamespace(sleep=sleep))  # and nobody else's, in another thread
    assert stop(str(runner.workdir.path), now=False) == COMPLETE and len(looks) == 50


@pytest.mark.parametrize("command", [stop, background.attach.__wrapped__])  # type: ignore[attr-defined]
def test_a_process_that_has_the_id_of_a_dead_run_is_left_alone(
    runner: Runner, command: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.lock.close()  # as the kernel does; the id in the file is somebody else's by now
    with pytest.raises(CommandError, match=rf"is not running; its figures: \S+ status {runner.workdir.path}"):
        command(str(runner.workdir.path))
    assert runner.signals == 0
    with pytest.raises(CommandError, match="takes a run's directory, such as runs/tiny"):
        command("tiny")


def test_a_detached_run_serves_once_its_own_syncer_has_written_its_address(runner: Runner) -> None:
    workdir, pid = runner.workdir, os.getpid()
    assert not background._serves(workdir, pid, began=1000.0)
    workdir.address.write_text("{}")
    os.utime(workdir.address, (900.0, 900.0))
    assert not background._serves(workdir, pid, began=1000.0), "an earlier run's"
    os.utime(workdir.address, (1001.0, 1001.0))
    assert background._serves(workdir, pid, began=1000.0)
    assert not background._serves(workdir, pid + 1, began=1000.0)
