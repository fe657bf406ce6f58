"""The learner process of `diloco learner join`, a program of the test's own, and signals to the command."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.console import COMPLETE, INTERRUPTED
from diloco.machines import join as joining
from diloco.machines.join import JoinOptions
from diloco.processes.workdir import Workdir
from diloco_protocol.spec.load import parse_job
from patience import wait_until

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: a}
spec:
  learners: {command: [python, program.py]}
  regions: [{name: local, learners: 1}]
  training: {stop: {steps: 1}, evaluation: null}
"""
# It offers its work for as long as the test wants, and leaves.
OFFERS = """
import pathlib, signal, time

def leave(number, frame):
    pathlib.Path("asked").touch()
    while not pathlib.Path("offered").exists():
        time.sleep(0.01)
    raise SystemExit(0)

signal.signal(signal.SIGTERM, leave)
pathlib.Path("ready").touch()
while True:
    signal.pause()
"""
# It loads its libraries still.
LOADS = """
import pathlib, time

pathlib.Path("ready").touch()
time.sleep(600)
"""
RANK = """
import os, pathlib

names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
pathlib.Path("rank-" + os.environ["RANK"]).write_text(" ".join(os.environ[name] for name in names))
"""


def joined(folder: Path, program: str, told: Callable[[], None]) -> int:
    """Run the learner process in this thread, as signals need it; ``told`` runs beside it once the program is ready."""
    (folder / "program.py").write_text(program)
    (folder / "job.yaml").write_text(JOB)
    options = JoinOptions("127.0.0.1:1", job=folder / "job.yaml")
    process = joining._LearnerProcess(parse_job(JOB), Workdir(folder), options, "local", place=1)

    def tell() -> None:
        wait_until((folder / "ready").exists)
        told()

    thread = threading.Thread(target=tell)
    thread.start()
    try:
        return process.run()
    finally:
        thread.join()


@pytest.mark.promise("Two signals at once to `diloco learner join` are one: the work is offered")
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_two_signals_that_come_together_are_one_wish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: signal.Signals
) -> None:
    monkeypatch.setattr(joining, "SAME_SIGNAL_SECONDS", 3600.0)

    def told() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        wait_until((tmp_path / "asked").exists)
        os.kill(os.getpid(), second)
        (tmp_path / "offered").touch()

    assert joined(tmp_path, OFFERS, told) == COMPLETE


def test_a_second_signal_later_ends_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "SAME_SIGNAL_SECONDS", 0.0)

    def told() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until((tmp_path / "asked").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    assert joined(tmp_path, OFFERS, told) == INTERRUPTED


def test_a_signal_before_the_learner_has_a_handler_is_no_failure(tmp_path: Path) -> None:
    assert joined(tmp_path, LOADS, lambda: os.kill(os.getpid(), signal.SIGTERM)) == COMPLETE


@pytest.mark.parametrize(
    ("processes", "ranks"),
    [(4, {"rank-2": "2 4 2 10.0.0.1 400", "rank-3": "3 4 2 10.0.0.1 400"}), (2, {"rank-1": "1 2 1 10.0.0.1 400"})],
)
def test_a_machine_of_several_starts_its_share_of_the_ranks(
    tmp_path: Path, processes: int, ranks: dict[str, str]
) -> None:
    (tmp_path / "program.py").write_text(RANK)
    job = JOB.replace("learners: 1}", f"learners: 1, processes: {processes}}}")
    (tmp_path / "job.yaml").write_text(job)
    options = JoinOptions("127.0.0.1:1", tmp_path / "job.yaml", nnodes=2, node_rank=1, master="10.0.0.1:400")
    process = joining._LearnerProcess(parse_job(job), Workdir(tmp_path), options, "local", place=1)
    assert process.run() == COMPLETE
    assert {path.name: path.read_text() for path in tmp_path.glob("rank-*")} == ranks
