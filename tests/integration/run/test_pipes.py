"""``diloco run job.yaml | head`` ends with the job's own exit code.

rich would end such a run with exit code 1 though its job is complete.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: piped}
spec:
  learners: {command: [python, train.py]}
  regions: [{learners: 1}]
  sync: {fragments: 2, every: 4}
  training: {model: null, data: null, evaluation: null, device: cpu, stop: {steps: 20}, batch: {sequences: 1}}
"""
LOOP = """
import torch
import diloco_worker

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = [torch.ones(4)] * 1000
with diloco_worker.Learner.from_environment(model, optimizer) as learner:
    for batch in learner.batches(data):
        learner.after_step(tokens=1, loss=1.0)
"""
PRINTS = """
import sys
from diloco.console import command, print_text
from diloco.text_console import TextConsole
from diloco.local.screen import Lines
import typer

app = typer.Typer()

@app.command()
@command
def main(code: int) -> int:
    lines, console = Lines(), TextConsole()
    sys.stdin.readline()  # until the reader has left
    for _ in range(3):
        lines.event("x" * 10_000)
        console.print("y" * 10_000)
    return code

@app.command()
@command
def plain() -> None:
    sys.stdin.readline()
    for _ in range(100):
        print_text("z" * 10_000)

app()
"""


@pytest.mark.parametrize(("words", "code"), [(["main", "0"], 0), (["main", "1"], 1), (["plain"], 0)])
def test_a_reader_that_leaves_changes_no_exit_code(words: list[str], code: int) -> None:
    program = [sys.executable, "-c", PRINTS, *words]
    reader, writer = os.pipe()
    process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    os.close(reader)
    _, said = process.communicate(b"\n", timeout=60)
    assert process.returncode == code, said.decode()
    assert said == b""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_completed_job_is_no_failed_one_because_its_reader_has_left(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "train.py").write_text(LOOP)
    words = [sys.executable, "-m", "diloco.main", "run", tmp_path / "job.yaml", "--workdir", tmp_path / "run"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    first = process.stdout.readline()
    assert "starting piped" in first, first + process.stderr.read()
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait(timeout=300) == 0, said
    assert json.loads((tmp_path / "run" / "report.json").read_text())["outcome"] == "complete"
