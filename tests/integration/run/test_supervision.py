"""The runner and a syncer that hangs, or that is stopped while the job ends."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runs import JOB

from diloco.local import run
from diloco.local.runner import Runner
from diloco.processes import watchdog

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """A run ends by ignoring SIGTERM and SIGINT, which is for a process that ends with it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def job(folder: Path, steps: int) -> run.RunOptions:
    (folder / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog and runs away\n" * 2000)
    (folder / "job.yaml").write_text(JOB.format(steps=steps, learners=1))
    return run.RunOptions(folder / "job.yaml", folder / "run")


def signalled(monkeypatch: pytest.MonkeyPatch, number: int, when: Callable[[Runner], bool]) -> list[float]:
    """Send the syncer this signal once, when ``when`` holds after a poll; the times it was sent."""
    poll, sent = Runner._poll, list[float]()

    async def watched(self: Runner) -> bool:
        answered = await poll(self)
        if not sent and "syncer" in self.running and when(self):
            os.kill(self.running["syncer"].pid, number)
            sent.append(time.monotonic())
        return answered

    monkeypatch.setattr(Runner, "_poll", watched)
    return sent


@pytest.mark.slow
def test_a_syncer_that_hangs_is_killed_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watchdog, "SILENT_SECONDS", 2.0)
    sent = signalled(monkeypatch, signal.SIGSTOP, lambda r: r.view.status is not None and r.view.status.merges > 2)
    assert run.run(job(tmp_path, 150)) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert sent and report["outcome"] == "complete" and report["syncer"]["restarts"] == 1
    assert "has not answered for 2 s; it is killed" in capsys.readouterr().out


class PausedEvaluator:
    """An evaluator that stands still until it is told to go on: the job does not end meanwhile."""

    def __init__(self) -> None:
        self._pid = 0

    def pause(self, one: Runner) -> bool:
        """Pause it once it runs; whether that is done."""
        if not self._pid and "evaluator" in one.running:
            self._pid = one.running["evaluator"].pid
            os.kill(self._pid, signal.SIGSTOP)
        return self._pid > 0

    def resume(self) -> None:
        os.kill(self._pid, signal.SIGCONT)


@pytest.mark.slow
def test_a_syncer_that_is_told_to_stop_while_the_job_ends_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poll, evaluator, told = Runner._poll, PausedEvaluator(), list[int]()

    async def watched(self: Runner) -> bool:
        answered, syncer = await poll(self), self.running.get("syncer")
        if evaluator.pause(self) and self.watch.closing and syncer is not None:
            if not told:
                told.append(syncer.pid)
                os.kill(syncer.pid, signal.SIGTERM)
            elif syncer.pid not in told:
                evaluator.resume()
        return answered

    monkeypatch.setattr(Runner, "_poll", watched)
    assert run.run(job(tmp_path, 60)) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert told and report["outcome"] == "complete" and report["syncer"]["restarts"] == 1
    assert report["final_loss"] is not None and report["syncer"]["epoch"] == 2


@pytest.mark.slow
def test_a_syncer_that_ends_the_job_unheard_leaves_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poll, evaluator, deaf = Runner._poll, PausedEvaluator(), list[float]()

    async def unheard(self: Runner) -> bool:
        answered = not deaf and await poll(self)
        self.view.serving = answered
        if evaluator.pause(self) and self.watch.closing and not deaf:
            deaf.append(time.monotonic())
            evaluator.resume()
        return answered

    monkeypatch.setattr(Runner, "_poll", unheard)
    assert run.run(job(tmp_path, 60)) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    stored = json.loads((tmp_path / "run" / "store" / "report.json").read_text())
    assert deaf and report["outcome"] == "complete" and report["syncer"]["epoch"] == 1
    assert report["final_loss"] == stored["final_loss"] is not None
    assert report["tokens"] == stored["tokens"] and report["ledger"] == stored["ledger"]
