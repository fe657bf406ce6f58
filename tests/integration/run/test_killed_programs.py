"""A process that was killed for want of memory is said to have been, with the memory that the job needs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: own}
spec:
  learners: {command: [python, train.py]}
  training: {model: null, data: null, evaluation: null, device: cpu, stop: {steps: 20}}
  regions: [{learners: 1}]
"""
TRAINED = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: tiny}
spec:
  training:
    model: {config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
                     num_attention_heads: 2, num_key_value_heads: 2}}
    data: {source: text, paths: [corpus.txt], sequenceLength: 32}
    batch: {sequences: 4}
    evaluation: null
    device: cpu
    stop: {steps: 300}
  sync: {fragments: 4, every: 8, overlap: 1}
  regions: [{learners: 2}]
"""
# Its first process trains until there is a merge, from which faults count their seconds, and then waits to be killed.
# The second one trains to the job's end.
WAITS_ONCE = """
import json, pathlib, time, urllib.request
import torch
import diloco_worker

def merged():
    address = json.loads(pathlib.Path("run/address.json").read_text())["http"]
    with urllib.request.urlopen(f"http://{address}/status", timeout=60) as reply:
        return json.load(reply)["merges"] > 0

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = pathlib.Path("first")
waits = not first.exists()
first.touch()
with diloco_worker.Learner.from_environment(model, optimizer) as learner:
    for batch in learner.batches([torch.ones(4)] * 1000):
        while waits and merged():
            time.sleep(0.1)
        learner.after_step(tokens=1, loss=1.0)
"""

# The programs kill themselves, of which the kernel counts nothing where its counts can be read.
KILLED = re.compile(r"killed by (a person, or by a service that watches memory|the system, probably out of memory) \(")

pytestmark = pytest.mark.timeout(600)


def run(folder: Path, job: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "job.yaml").write_text(job)
    command = [sys.executable, "-m", "diloco.main", "run", str(folder / "job.yaml"), "--workdir", str(folder / "run")]
    return subprocess.run([*command, *words], capture_output=True, text=True, timeout=400)


@pytest.mark.promise(
    "A SIGKILL that the run did not send is reported as the system's, with the memory that the job needs; "
    "a kill of `--chaos` is not"
)
@pytest.mark.slow
def test_a_program_that_is_killed_again_and_again_fails_the_job_by_name(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    done = run(tmp_path, JOB)
    assert done.returncode == 1, done.stdout + done.stderr
    # The syncer's last event has the reason too, where the run still reads it.
    told = [line for line in done.stdout.splitlines() if not line.startswith("failed: ")]
    named = [line for line in told if KILLED.search(line)]
    assert len(named) == 1 and "diloco plan JOB.yaml --params N" in named[0], done.stdout
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["outcome"] == "failed" and KILLED.search(report["message"])
    assert "3 times with the same error" in done.stderr and KILLED.search(done.stderr)


@pytest.mark.slow
def test_the_memory_that_is_named_is_that_of_the_jobs_model(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os, signal\ndef make(*arguments, **more):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    job = TRAINED.replace("source: text, paths: [corpus.txt]", "source: python, function: 'mine:make'")
    done = run(tmp_path, job)
    assert done.returncode == 1, done.stdout + done.stderr
    assert KILLED.search(done.stderr) and "the job needs at least about" in done.stderr
    assert "for each of 2 learners" in done.stderr, done.stderr


@pytest.mark.promise(
    "A SIGKILL that the run did not send is reported as the system's, with the memory that the job needs; "
    "a kill of `--chaos` is not"
)
@pytest.mark.slow
def test_a_kill_of_the_runs_own_is_not_the_systems(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WAITS_ONCE)
    # Steps enough for a look that is half a second old, as the syncer's page may be.
    often = ("--set", "sync.every=4", "--set", "sync.fragments=2", "--set", "training.stop.steps=600")
    done = run(tmp_path, JOB, *often, "--chaos", "1s:kill:learner")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SIGKILL" in done.stdout and "killed by " not in done.stdout
