"""A program that crashes says so: its first end shows its traceback, and the job fails when new starts do not help."""

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
metadata: {{name: own}}
spec:
  learners: {{command: [python, train.py]}}
  training: {{model: null, data: null, evaluation: null, device: cpu, stop: {{steps: 20}}, batch: {{sequences: 2}}}}
  sync: {{fragments: 2, every: 4}}
  regions: [{{learners: {learners}}}]
"""
CRASHES = """
import sys

def step(batch):
    return lss

print("loading took", len(sys.argv), "s")
step(None)
"""
LOOP = """
import torch
import diloco_worker

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = [torch.ones(4)] * 1000
with diloco_worker.Learner.from_environment(model, optimizer) as learner:
    for batch in learner.batches(data):
        loss = lss
        learner.after_step(tokens=1, loss=loss)
"""
ERROR = "NameError: name 'lss' is not defined"

pytestmark = pytest.mark.timeout(600)


def diloco(*words: str | Path, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "diloco.main", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def run(folder: Path, program: str, learners: int = 1, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(program)
    (folder / "job.yaml").write_text(JOB.format(learners=learners))
    return diloco("run", folder / "job.yaml", "--workdir", folder / "run", *words)


TRACEBACK = "Traceback (most recent call last):"


def check_failed(folder: Path, done: subprocess.CompletedProcess[str], once: str = TRACEBACK) -> None:
    """The first end's traceback with its log's path, the job's failure, and the text wherever somebody looks. ``once``:
    what the end of a process's log has one time."""
    out = " ".join(done.stdout.split())
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("the end of ") == 1, "not again for the same error"
    (log,) = [line for line in done.stdout.splitlines() if line.startswith("the end of ")]
    path = Path(log.removeprefix("the end of ").removesuffix(":"))
    assert path.parent == folder / "run" / "logs" and path.read_text().count(ERROR) >= 1
    assert ERROR in out
    assert done.stdout.index("starting it again") < done.stdout.index("the end of ")
    assert "ended 3 times with the same error, and nothing was merged yet" in done.stderr and ERROR in done.stderr
    assert done.stderr.count(once) == 1, "of the last process, not of those before it"
    report = json.loads((folder / "run" / "report.json").read_text())
    assert report["outcome"] == "failed" and ERROR in report["message"] and report["merges"] == 0
    status = diloco("status", folder / "run")
    assert ERROR in " ".join(status.stdout.split()), status.stdout


@pytest.mark.promise(
    "A program that crashes shows its traceback at its first end; the same error three times before any "
    "merge fails the job, and the error is in report and status"
)
def test_a_program_that_crashes_at_its_start_fails_the_job(tmp_path: Path) -> None:
    done = run(tmp_path, CRASHES, learners=2)
    check_failed(tmp_path, done)
    assert done.stdout.count("starting it again") <= 2 * 2, "nobody is started a fourth time"
    assert "Traceback (most recent call last):" in done.stdout and "in step" in done.stdout, "it says where"


@pytest.mark.slow
def test_an_error_in_the_step_of_a_loop_fails_the_job(tmp_path: Path) -> None:
    check_failed(tmp_path, run(tmp_path, LOOP))


@pytest.mark.promise("One broken learner fails no job that can merge without it")
@pytest.mark.slow
def test_one_broken_learner_of_three_fails_no_job_that_merges_without_it(tmp_path: Path) -> None:
    """Its three errors come before the first merge, for which the others wait."""
    program = LOOP.replace("loss = lss", "loss = 1.0")
    broken = "import os, sys\nif os.environ['DILOCO_ORDINAL'] == '1':\n    raise RuntimeError('no such disk')\n"
    waits = (
        "import pathlib, time\nlog = pathlib.Path('run/logs/local-1.log')\n"
        "while not log.exists() or log.read_text().count('RuntimeError: no such disk') < 4:\n    time.sleep(0.05)\n"
    )
    done = run(tmp_path, broken + waits + program, 3, "--set", "sync.quorum=1")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["outcome"] == "complete" and report["merges"] > 0


@pytest.mark.slow
def test_a_bug_that_comes_after_the_first_merge_is_named_at_each_restart_and_at_the_end(tmp_path: Path) -> None:
    # However late the first merge comes: a learner pauses at its 16th step alone, before the job's stop.
    merged = (
        "import json, pathlib, time, urllib.request\n\ndef merged():\n"
        "    address = json.loads(pathlib.Path('run/address.json').read_text())['http']\n"
        "    with urllib.request.urlopen(f'http://{address}/status', timeout=60) as reply:\n"
        "        return json.load(reply)['merges'] > 0\n"
    )
    step = "time.sleep(0.1)\n        loss = 1.0 if learner.step < 12 or not merged() else xyz"
    program = merged + LOOP.replace("loss = lss", step)
    error = "NameError: name 'xyz' is not defined"
    # Steps enough for a look that is half a second old, as the syncer's page may be.
    words = ("--set", "failurePolicy.maxReplacements=3", "--set", "training.stop.steps=60")
    done = run(tmp_path, program, 1, *words)
    assert done.returncode == 1, done.stdout + done.stderr
    again = [line for line in done.stdout.splitlines() if "starting it again" in line]
    assert done.stdout.count("the end of ") == 1 and error not in again[0], "the first end shows its traceback"
    assert error in again[-1] and "; replacement 3 of at most 3 without a merge" in again[-1], done.stdout
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["merges"] > 0 and error in report["message"] and "maxReplacements: 3" in report["message"]
    events = diloco("events", tmp_path / "run")
    assert f"its process ended (exit code 1: {error}" in events.stdout, events.stdout


@pytest.mark.promise(
    "A learner that ends with exit code 0 and never joined counts as an error that names how a program "
    "joins; one that joined does not"
)
@pytest.mark.slow
def test_a_program_that_never_joins_and_ends_well_fails_the_job_with_the_way_to_join(tmp_path: Path) -> None:
    done = run(tmp_path, "print('trained by myself')\n")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ended 3 times with the same error" in done.stderr and "Learner.from_environment" in done.stderr


@pytest.mark.slow
def test_an_error_in_a_data_source_of_ones_own_fails_the_job(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def make(*arguments, **more):\n    return lss\n")
    (tmp_path / "job.yaml").write_text(
        "apiVersion: diloco.io/v1alpha1\nkind: DiLoCoJob\nmetadata: {name: own}\nspec:\n"
        "  training:\n"
        "    model: {config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1,\n"
        "                     num_attention_heads: 2, vocab_size: 64}}\n"
        "    data: {source: python, function: 'mine:make', sequenceLength: 16}\n"
        "    evaluation: null\n    device: cpu\n    stop: {steps: 20}\n"
        "  regions: [{learners: 1}]\n"
    )
    # The traceback is longer than what is shown of it.
    done = diloco("run", tmp_path / "job.yaml", "--workdir", tmp_path / "run")
    check_failed(tmp_path, done, once="diloco_worker: failed: ")


@pytest.mark.promise("A syncer that cannot start fails the run after three starts, with the end of its log")
@pytest.mark.slow
def test_a_syncer_that_cannot_start_fails_the_run_with_the_end_of_its_log(tmp_path: Path) -> None:
    """As where a package of its own is not installed."""
    (tmp_path / "train.py").write_text("raise SystemExit('never started')")
    (tmp_path / "job.yaml").write_text(JOB.format(learners=1))
    hidden = tmp_path / "hidden" / "prometheus_client"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'prometheus_client'\")\n")
    done = subprocess.run(
        [sys.executable, "-m", "diloco.main", "run", str(tmp_path / "job.yaml"), "--workdir", str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": f"{hidden.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "syncer ended 3 times before it answered" in done.stderr
    assert "No module named 'prometheus_client'" in done.stdout and "No module named 'prometheus_client'" in done.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["outcome"] == "failed" and "prometheus_client" in report["message"]
