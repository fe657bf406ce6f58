"""The runner and a syncer that hangs, or that is stopped while the job ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runs import JOB

from diloco.local import run
from diloco.local.runner.job_follower import JobFollower
from diloco.local.runner.process_keepers import WorkerKeeper
from diloco.processes import watchdog
from diloco.processes.supervisor import Kind
from diloco.processes.worker_specs import WorkerSpec

pytestmark = pytest.mark.timeout(400)


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


class HeldEnd:
    """An end of the job that waits for its evaluator: learners start when it has joined, and it stands still from its
    first score on until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._pid, keep = 0, WorkerKeeper.keep

        async def begin_after_evaluator(one: WorkerKeeper, worker: WorkerSpec) -> None:
            while worker.kind is Kind.LEARNER and ((status := one.watch.view.status) is None or not status.evaluators):
                await asyncio.sleep(0.05)
            await keep(one, worker)

        monkeypatch.setattr(WorkerKeeper, "keep", begin_after_evaluator)

    def holds(self, one: JobFollower) -> bool:
        """Whether the job cannot end now; call it after each poll."""
        status = one.watch.view.status
        if not self._pid and "evaluator" in one.running and status and status.eval_loss:
            self._pid = one.running["evaluator"].pid
            os.kill(self._pid, signal.SIGSTOP)
        return self._pid > 0

    def release(self) -> None:
        os.kill(self._pid, signal.SIGCONT)


def signal_syncer(
    monkeypatch: pytest.MonkeyPatch, number: int, when: Callable[[JobFollower], bool], also: Callable[[bool], None]
) -> list[int]:
    """Send the first syncer this signal, once ``when`` holds after a poll, and let the job end when the next one runs.
    ``also`` is called with True at the first and with False at the second. The process id it was sent to."""
    poll, end, told = JobFollower.poll, HeldEnd(monkeypatch), list[int]()

    async def watched(self: JobFollower, now: bool = False, seconds: float | None = None) -> bool:
        answered, syncer = await poll(self, now, seconds), self.running.get("syncer")
        if end.holds(self) and syncer is not None:
            if not told and when(self):
                told.append(syncer.pid)
                os.kill(syncer.pid, number)
                also(True)
            elif told and syncer.pid not in told:
                end.release()
                also(False)
        return answered

    monkeypatch.setattr(JobFollower, "poll", watched)
    return told


@pytest.mark.slow
def test_a_syncer_that_hangs_is_killed_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    patience = watchdog.SYNCER_SILENT_SECONDS  # of all but the one that hangs

    def be_impatient(wanted: bool) -> None:
        monkeypatch.setattr(watchdog, "SYNCER_SILENT_SECONDS", 2.0 if wanted else patience)

    told = signal_syncer(monkeypatch, signal.SIGSTOP, lambda r: True, be_impatient)
    assert run.run(job(tmp_path, 600)) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert told and report["outcome"] == "complete" and report["syncer"]["restarts"] == 1
    assert "has not answered for 2 s; it is killed" in capsys.readouterr().out


@pytest.mark.slow
def test_a_syncer_that_is_told_to_stop_while_the_job_ends_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = signal_syncer(monkeypatch, signal.SIGTERM, lambda r: r.watch.closing, lambda first: None)
    assert run.run(job(tmp_path, 600)) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert told and report["outcome"] == "complete" and report["syncer"]["restarts"] == 1
    assert report["final_loss"] is not None and report["syncer"]["epoch"] == 2


@pytest.mark.slow
def test_a_syncer_that_ends_the_job_unheard_leaves_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner hears nothing more from the moment when the stop is reached."""
    poll, end, deaf = JobFollower.poll, HeldEnd(monkeypatch), list[float]()

    async def unheard(self: JobFollower, now: bool = False, seconds: float | None = None) -> bool:
        answered = not deaf and await poll(self, now, seconds)
        self.watch.view.serving = answered
        if end.holds(self) and self.watch.closing and not deaf:
            deaf.append(time.monotonic())
            end.release()
        return answered

    monkeypatch.setattr(JobFollower, "poll", unheard)
    assert run.run(job(tmp_path, 600)) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    stored = json.loads((tmp_path / "run" / "store" / "report.json").read_text())
    assert deaf and report["outcome"] == "complete" and report["syncer"]["epoch"] == 1
    assert report["final_loss"] == stored["final_loss"] is not None
    assert report["tokens"] == stored["tokens"] and report["ledger"] == stored["ledger"]
