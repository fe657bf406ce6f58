"""M16: the paper's letters and other programs' names lead to the field that was meant.

On commit 8f0ca90 they got a list of all fields, or ``must be a mapping``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.main import app
from diloco_protocol.spec.load import JobError, parse_job

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
def test_m16_a_file_in_other_words_is_told_the_fields_all_at_once(
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


@pytest.mark.parametrize(
    ("written", "cure"),
    [("python train.py", "Such as command: [python, train.py]"), ("python 'no end", "each text"), ("", "each text")],
)
def test_a_text_for_a_command_gets_the_list_that_it_means(written: str, cure: str) -> None:
    job = {
        "apiVersion": "diloco.io/v1alpha1",
        "kind": "DiLoCoJob",
        "metadata": {"name": "own"},
        "spec": {"learners": {"command": written}, "regions": [{"learners": 1}]},
    }
    with pytest.raises(JobError) as refused:
        parse_job(json.dumps(job))
    (message,) = [one.message for one in refused.value.problems if one.path == "spec.learners.command"]
    assert cure in message and ("Such as" in message) == ("Such as" in cure)
