"""A run and the terminal that it was started from: nohup, a terminal that is closed, Ctrl-C in the first seconds, and
runs that go on by themselves."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from runs import ENV, JOB, diloco

from diloco.processes.workdir import Workdir
from patience import wait_for_end, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Started:
    """A run in a folder of its own, without an end in sight."""

    def __init__(self, folder: Path) -> None:
        (folder / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog and runs away\n" * 2000)
        (folder / "job.yaml").write_text(JOB.format(steps=1_000_000, learners=1))
        self.folder, self.workdir, self.log = folder, folder / "run", folder / "out"
        self.words = [sys.executable, "-m", "diloco.main", "run", str(folder / "job.yaml")]
        self.words += ["--workdir", str(self.workdir)]
        self.watched: tuple[Any, ...] = (self.workdir, self.log)

    def start(self, **options: Any) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as out:
            where = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out, "start_new_session": True, **options}
            process = subprocess.Popen(self.words, env=ENV, **where)
        self.watched = (process, *self.watched)
        return process

    def merges(self) -> int:
        said = diloco("status", self.workdir, "--json")
        return 0 if said.returncode else int(json.loads(said.stdout).get("merges", 0))

    def trains_on(self) -> None:
        before = self.merges()
        wait_until(lambda: self.merges() > before, "a merge", *self.watched)

    def report(self) -> dict[str, Any]:
        return dict(json.loads((self.workdir / "report.json").read_text()))


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    made = Started(tmp_path)
    yield made
    pid = Workdir(made.workdir).runner()
    for process in [psutil.Process(pid)] if pid else []:
        process.kill()


def test_a_run_with_nohup_outlives_its_terminal(started: Started) -> None:
    started.words = ["nohup", *started.words]
    process = started.start()
    started.trains_on()
    process.send_signal(signal.SIGHUP)
    started.trains_on()
    process.terminate()
    assert wait_for_end(process, *started.watched) == 130
    assert started.report()["message"] == "stopped by the user"


def _read_until(terminal: int, gone: threading.Event) -> None:
    while not gone.is_set():
        if select.select([terminal], [], [], 0.1)[0]:
            os.read(terminal, 1 << 16)


@pytest.mark.promise("A run whose terminal is closed drains, and says that this was the reason")
def test_a_run_whose_terminal_is_closed_drains(started: Started) -> None:
    ours, theirs = pty.openpty()
    process = started.start(
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=False, preexec_fn=lambda: os.login_tty(theirs)
    )
    os.close(theirs)
    gone = threading.Event()
    reader = threading.Thread(target=_read_until, args=(ours, gone))  # who writes to a full terminal stands still
    reader.start()
    try:
        wait_until((started.workdir / "address.json").exists, "the syncer", process, started.workdir)
        started.trains_on()
    finally:
        gone.set()
        reader.join()
        os.close(ours)
    assert wait_for_end(process, started.workdir) == 130
    report = started.report()
    assert (report["outcome"], report["message"]) == ("interrupted", "the terminal was closed")


def test_ctrl_c_while_the_job_is_checked_leaves_nothing(started: Started) -> None:
    process = started.start()
    wait_until(lambda: "checking tiny" in started.log.read_text(), "the check", *started.watched)
    process.send_signal(signal.SIGINT)
    assert wait_for_end(process, started.log) == 130
    said = started.log.read_text()
    assert said.endswith("stopped by the user, before the job began: nothing is kept\n") and "learners" not in said
    assert not started.workdir.exists()


@pytest.mark.promise("`diloco run --detach` goes on by itself; `diloco attach` looks at it, `diloco stop` drains it")
def test_a_detached_run_is_looked_at_and_stopped(started: Started) -> None:
    started.words.append("--detach")
    assert wait_for_end(started.start(), *started.watched) == 0, started.log.read_text()
    assert "diloco attach" in started.log.read_text()
    started.watched = (started.workdir,)
    started.trains_on()
    looking = started.folder / "looking"
    with looking.open("wb") as out:
        words = [sys.executable, "-m", "diloco.main", "attach", str(started.workdir)]
        attached = subprocess.Popen(words, env=ENV, stdout=out, stderr=out, start_new_session=True)
    wait_until(lambda: "training" in looking.read_text(), "figures", attached, looking)
    attached.send_signal(signal.SIGINT)
    assert wait_for_end(attached, looking) == 0
    assert "the run goes on; to stop it:" in looking.read_text()
    started.trains_on()
    stopped = diloco("stop", started.workdir)
    assert stopped.returncode == 0 and "stopped by the user" in stopped.stdout, stopped
    report = started.report()
    assert report["outcome"] == "interrupted" and report["tokens"]["dropped"] == 0
    again = diloco("stop", started.workdir)
    assert again.returncode == 2 and "is not running" in again.stderr


def test_a_detached_run_that_is_refused_says_why_and_leaves_nothing(started: Started) -> None:
    (started.folder / "corpus.txt").unlink()
    started.words.append("--detach")
    assert wait_for_end(started.start(), *started.watched) == 2
    assert "corpus.txt" in started.log.read_text()
    assert sorted(path.name for path in started.folder.iterdir()) == ["job.yaml", "out"]
