"""A loop that never calls ``after_step`` is reported, in the events and in its slot's status."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from learner_process import Rows, Syncer, make_job, small_model

from diloco.local import run
from diloco.processes import unjoined
from diloco_protocol.common import first_step
from diloco_worker import Learner


@pytest.fixture
def syncer(tmp_path: Path) -> Iterator[Syncer]:
    made = Syncer(tmp_path, make_job({}, {"steps": 1000}))
    made.start()
    yield made
    made.stop()


@pytest.mark.promise("A loop that never calls `after_step` is reported; a slow first step is not")
@pytest.mark.slow
def test_a_loop_without_after_step_is_told_of(syncer: Syncer) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[str] = []

    def problem() -> str:
        return str(syncer.status()["slots"][0]["problem"])

    with Learner.from_environment(model, optimizer, environ=syncer.environ()) as learner:
        pause = threading.Event()
        for count, _ in enumerate(learner.batches(Rows(40_000))):
            if count < first_step.MANY_BATCHES:
                continue
            pause.wait(0.5)
            seen.append(problem())
            if seen[-1] or len(seen) > 4 * first_step.BATCHES_SECONDS:
                break
    assert "does it call learner.after_step()" in seen[-1]
    status = syncer.status()
    event, *more = [row for row in status["events"] if row["kind"] == "no-steps"]
    assert len(more) < status["slots"][0]["incarnations"], "once in each"
    assert event["slot"] == 0 and "has finished no step" in event["message"]


# It ends when as many learners have been told of as were started: this one, too.
PROGRAM = """
import pathlib, time

told = pathlib.Path("told")
with pathlib.Path("starts").open("a") as starts:
    starts.write("one\\n")
count = len(pathlib.Path("starts").read_text().splitlines())
while len(told.read_text().splitlines()) < count:
    time.sleep(0.05)
raise SystemExit("trained alone")
"""
JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: own}
spec:
  learners: {command: [python, train.py]}
  training: {model: null, data: null, evaluation: null, device: cpu, stop: {steps: 20}}
  regions: [{learners: 1}]
"""


@pytest.mark.slow
def test_a_loop_that_asks_for_no_batches_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = tmp_path / "told"
    told.touch()

    def tell(name: str, log: object) -> str:
        with told.open("a") as lines:
            lines.write(f"{name}\n")
        return unjoined.unjoined_text(name, log)

    monkeypatch.setattr(unjoined, "UNJOINED_SECONDS", 1.0)
    monkeypatch.setattr("diloco.local.runner.job_follower.unjoined_text", tell)
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "job.yaml").write_text(JOB)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert run.run(run.RunOptions(tmp_path / "job.yaml", tmp_path / "run")) == 1
    finally:  # a run ends by ignoring them, which is for a process that ends with it
        for number, handler in before.items():
            signal.signal(number, handler)
    out = capsys.readouterr().out
    assert out.count("has not joined: it still loads, or its loop does not ask for learner.batches()") == 3
