"""``validate`` and ``run`` of a job in other programs' words name the fields that were meant, all at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.main import app

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: theirs}
spec:
  learners: 4
  training:
    model: {config: {model_type: llama}}
    data: {paths: [python-stdlib]}
    learningRate: 0.001
    optimizer: {learning_rate: 0.001}
    batch: 16
    stop: 1000
  sync: {H: 10, K: 1, P: 4, τ: 2}
  regions: [{learners: 2}]
"""
TOLD = {
    "spec.sync.H = 10": "did you mean every? Such as every: 10",
    "spec.sync.K = 1": "did you mean quorum? Such as quorum: 1",
    "spec.sync.P = 4": "did you mean fragments? Such as fragments: 4",
    "spec.sync.τ = 2": "did you mean overlap? Such as overlap: 2",
    "spec.training.optimizer.learning_rate = 0.001": "did you mean lr? Such as lr: 0.001",
    "spec.training.learningRate = 0.001": "did you mean spec.training.optimizer.lr?",
    "spec.training.stop = 1000": "must be a mapping, such as {steps: 1000}",
    "spec.training.batch = 16": "must be a mapping, such as {sequences: 16}",
    "spec.learners = 4": "is set for each region, such as regions: [{learners: 4}]",
}


@pytest.mark.parametrize("command", [["validate", "--file-only"], ["run"]], ids=["validate", "run"])
def test_a_file_in_other_words_is_told_the_fields_all_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB, encoding="utf-8")
    done = CliRunner().invoke(app, [*command, "job.yaml"])
    head, *problems = re.split(r" (?=spec\.\S+ = )", " ".join(done.output.split()))
    assert done.exit_code == 2 and f"{len(TOLD)} problems" in head, done.output
    told = dict(problem.split(" (line ", 1) for problem in problems)
    assert told.keys() == TOLD.keys()
    for field, words in TOLD.items():
        assert words in told[field], field
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"], "nothing was started"
