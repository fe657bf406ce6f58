"""The script of a loop of one's own runs under plain ``python`` and under ``diloco run --debug``, with breakpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.main import app

LOOP = """
import torch
import diloco_worker

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with diloco_worker.Learner.from_environment(model, optimizer) as learner:
    for batch in learner.batches([torch.ones(4)] * 64):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if learner.step == 1:
            breakpoint()
        learner.after_step(tokens=len(batch), loss=loss)
        if learner.step == 3:
            break
print("ended at step", learner.step)
"""


JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: own}
spec:
  learners: {command: [python, train.py]}
  training: {batch: {sequences: 4}, stop: {steps: 9}}
  regions: [{name: local, learners: 3}]
"""


@pytest.mark.slow
def test_diloco_run_debug_gives_it_the_jobs_settings_and_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP.replace("learner.step == 3", "learner.job.spec.seed != 7"))
    (tmp_path / "job.yaml").write_text(JOB)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    words = ["run", "-f", "../job.yaml", "--debug", "--seed", "7", "--set", "training.stop.steps=5"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHONBREAK")}
    done = subprocess.run(
        [sys.executable, "-m", "diloco.main", *words],
        input="p 'stopped', tuple(batch.shape)\nc\n",
        env={**environ, "DILOCO_ORDINAL": "1"},
        cwd=elsewhere,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "('stopped', (4, 4))" in done.stdout and "ended at step 5" in done.stdout, done.stdout
    assert "running `python train.py` alone" in done.stderr and "training alone" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "job.yaml", "train.py"]


def test_debug_is_for_a_program_of_ones_own(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        JOB.replace("  learners: {command: [python, train.py]}\n", "").replace(
            "training: {", "training: {model: {config: {model_type: llama}}, data: {paths: [python-stdlib]}, "
        )
    )
    for words, said in (
        ([], "this job has the built-in trainer"),
        (["--workdir", "here"], "leave out --workdir"),
        (["--set", "learners.command=[python, absent.py]"], "there is no absent.py"),
    ):
        done = CliRunner().invoke(app, ["run", str(job), "--debug", *words])
        assert done.exit_code == 2 and said in done.output, done.output


def test_a_script_trains_alone_and_stops_at_a_breakpoint(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("DILOCO_", "PYTHONBREAK"))}
    done = subprocess.run(
        [sys.executable, "train.py"],
        input="p 'stopped', learner.step, tuple(batch.shape)\nc\n",
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "('stopped', 1, (16, 4))" in done.stdout and "ended at step 3" in done.stdout
    assert done.stderr.count("training alone") == 1 and "diloco run JOB.yaml" in done.stderr, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"], "nothing is written"
