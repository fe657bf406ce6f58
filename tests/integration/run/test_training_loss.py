"""The report of a loop of one's own has its training loss, where no evaluator scores the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: own}
spec:
  learners: {command: [python, train.py]}
  training: {model: null, data: null, device: cpu, stop: {steps: 30}, batch: {sequences: 2}}
  sync: {fragments: 1, every: 4, overlap: 1, merge: {method: mean}, outer: {optimizer: sgd, lr: 1.0}}
  regions: [{learners: 1}]
"""
LOOP = """
import torch
import diloco_worker

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with diloco_worker.Learner.from_environment(model, optimizer) as learner:
    for batch in learner.batches([torch.ones(4)] * 1000):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.after_step(tokens=len(batch), loss=loss)
raise SystemExit(learner.exit_code)
"""


def diloco(*words: str | Path) -> str:
    command = [sys.executable, "-m", "diloco.main", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return " ".join(done.stdout.split())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_summary_and_the_report_have_the_learners_own_loss(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    (tmp_path / "job.yaml").write_text(JOB)
    run = tmp_path / "run"
    said = diloco("run", tmp_path / "job.yaml", "--workdir", run)
    report = json.loads((run / "report.json").read_text())
    assert report["outcome"] == "complete" and report["initial_loss"] is None and report["final_loss"] is None
    first, last = report["training_loss"]["first"], report["training_loss"]["last"]
    assert 0.0 <= last < first
    assert f"training loss {first:.3f} in the first step, {last:.3f} in the last" in said
    assert "- at the start, - at the end" not in said
    # The model of a job that is complete is exported too.
    diloco("export", run, tmp_path / "model")
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert {name: values.shape for name, values in exported.items()} == {"weight": (4, 4), "bias": (4,)}
