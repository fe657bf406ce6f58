"""``diloco run`` end to end: real learners on real text, real processes, real faults."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {{name: tiny}}
spec:
  training:
    model: {{config: {{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
                     num_attention_heads: 2, num_key_value_heads: 2}}}}
    data: {{source: text, paths: [corpus.txt], sequenceLength: 32}}
    batch: {{sequences: 4}}
    optimizer: {{lr: 0.003, warmupSteps: 10}}
    device: cpu
    stop: {{steps: {steps}}}
    evaluation: {{fraction: 0.05, everyTokens: 20000, batches: 2}}
  sync: {{fragments: 4, every: 8, overlap: 1, outer: {{optimizer: sgd, lr: 1.0}},
         heartbeat: {{intervalSeconds: 0.2, timeoutSeconds: 3}}}}
  regions: [{{learners: {learners}}}]
  failurePolicy: {{maxReplacements: 3}}
"""
# Plain averaging: with steps of 10 ms a busy machine merges seldom, and momentum over so few and long
# outer gradients overshoots.
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


pytestmark = pytest.mark.timeout(300)  # each waits with its own limits, which name what did not come


class Run:
    """One ``diloco run`` in a process of its own, its output in a file."""

    def __init__(self, job: Path, workdir: Path, *arguments: str) -> None:
        self.workdir = workdir
        self.log = job.parent / f"{workdir.name}-{time.monotonic_ns()}.out"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "diloco.main", "run", str(job), "--workdir", str(workdir), *arguments],
                stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=ENV,
                start_new_session=True,
            )  # fmt: skip

    @property
    def output(self) -> str:
        return self.log.read_text()

    def ends(self, timeout: float = 90.0) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self.everything()}") from None

    def waits_for(self, words: str, timeout: float = 60.0) -> None:
        self.until(lambda: words in self.output, timeout)

    def until(self, condition: Callable[[], bool], timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.everything()}"
            assert time.monotonic() < deadline, f"it did not come about:\n{self.everything()}"
            time.sleep(0.02)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def status(self) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "diloco.main", "status", str(self.workdir), "--json"],
            capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def report(self) -> dict[str, Any]:
        return dict(json.loads((self.workdir / "report.json").read_text()))

    def everything(self) -> str:
        logs = [
            f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.workdir.glob("logs/*.log"))
        ]
        return "\n".join([self.output, *logs])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start a run of the tiny job; whatever is left of it is killed at the end."""
    runs: list[Run] = []
    words = "the quick brown fox jumps over the lazy dog and runs away from the angry bear\n"
    (tmp_path / "corpus.txt").write_text(words * 2000)

    def make(
        *arguments: str, steps: int = 60, learners: int = 2, workdir: str = "run", change: str = ""
    ) -> Run:
        job = tmp_path / "job.yaml"
        job.write_text(JOB.format(steps=steps, learners=learners) + change)
        run = Run(job, tmp_path / workdir, *arguments)
        runs.append(run)
        return run

    yield make
    for run in runs:
        if run.process.poll() is None:
            left = run.children()
            run.process.kill()
            run.process.wait()
            psutil.wait_procs(left, timeout=10)


def check_ledger(report: dict[str, Any]) -> None:
    tokens = report["tokens"]
    assert tokens["trained"] == tokens["merged"] + tokens["pending"] + tokens["dropped"]
    assert len(report["ledger"]) == 4
    for row in report["ledger"]:
        assert row["merged"] + row["pending"] + row["dropped"] == tokens["trained"], row
        assert sum(row["reasons"].values()) == row["dropped"], row


def test_a_job_runs_to_its_end_and_what_it_leaves_is_whole(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start("--report", str(tmp_path / "copy.json"))
    assert run.ends() == 0, run.everything()
    report = run.report()
    assert report == json.loads((tmp_path / "copy.json").read_text())
    assert report["schema"] == 1 and report["outcome"] == "complete" and report["seed"] == 0
    # Steps take 10 ms: how many merges fit between them depends on how busy this machine is.
    assert report["steps"] >= 60 and report["merges"] >= 8 and report["versions"]["min"] >= 1
    assert report["final_loss"] < report["initial_loss"] - 0.5
    assert report["syncer"]["restarts"] == 0 and report["syncer"]["peak_rss_bytes"] > 10 << 20
    assert report["faults"] == [] and len(report["learners"]) == 2
    assert 0 < report["goodput"] <= 1 and report["bytes_up"] > 0 and report["bytes_down"] > 0
    check_ledger(report)
    rows = [json.loads(line) for line in (run.workdir / "metrics.jsonl").read_text().splitlines()]
    assert {"status", "learner-local-0", "learner-local-1"} <= {row["source"] for row in rows}
    assert list((run.workdir / "tensorboard").glob("events*"))
    assert (run.workdir / "control.key").stat().st_mode & 0o077 == 0
    assert run.status()["report"]["outcome"] == "complete"

    out = tmp_path / "model"
    done = subprocess.run(
        [sys.executable, "-m", "diloco.main", "export", str(run.workdir), str(out)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(out)
    assert sum(parameter.numel() for parameter in model.parameters()) > 10_000

    again = start()  # the job is complete: nothing is trained, and that is said
    assert again.ends() == 0, again.everything()
    assert again.report()["outcome"] == "complete"
    assert again.report()["tokens"]["trained"] == report["tokens"]["trained"]

    more = start("--set", "training.stop.steps=90")
    assert more.ends() == 0, more.everything()
    assert "going on from the checkpoint" in more.output
    assert more.report()["steps"] >= 90
    check_ledger(more.report())


def test_faults_are_survived_and_accounted_for(start: Callable[..., Run]) -> None:
    chaos = (
        "step=20:kill:learner-1,step=60:term:learner-0,step=120:pause:learner-1:1s,"
        "step=160:cut:learner-0:1s,step=220:kill:syncer"
    )
    run = start("--chaos", chaos, steps=600)
    assert run.ends(180) == 0, run.everything()
    report = run.report()
    assert report["outcome"] == "complete", run.everything()
    faults = {(fault["action"], fault["target"]): fault for fault in report["faults"]}
    assert set(faults) == {
        ("kill", "learner-1"), ("term", "learner-0"), ("pause", "learner-1"), ("cut", "learner-0"),
        ("kill", "syncer"),
    }, run.everything()  # fmt: skip
    for name in (("kill", "learner-1"), ("term", "learner-0"), ("cut", "learner-0"), ("kill", "syncer")):
        fault = faults[name]
        times = [fault[f"{key}_seconds"] for key in ("detected", "joined", "first_step", "recovered")]
        assert None not in times, (fault, run.everything())
        assert times == sorted(times) and times[-1] < 30, fault
    assert report["syncer"]["restarts"] == 1 and report["syncer"]["epoch"] == 2
    assert "chaos: kill learner-1" in run.output and "gone:" in run.output and "joined:" in run.output
    check_ledger(report)
    assert all(row["reasons"].get("drain", 0) == 0 for row in report["ledger"]), report["ledger"]
    assert report["final_loss"] < report["initial_loss"] - 0.5


def test_ctrl_c_drains_and_the_same_command_goes_on(start: Callable[..., Run]) -> None:
    run = start(steps=100_000)
    run.waits_for("first-merge: slot 1")
    status = run.status()
    assert status["running"] and status["phase"] == "training" and len(status["slots"]) == 2
    children = run.children()
    started = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.ends(30) == 130, run.everything()
    assert time.monotonic() - started < 12
    assert not [child for child in children if child.is_running()]
    report = run.report()
    assert report["outcome"] == "interrupted"
    check_ledger(report)
    assert all(row["reasons"].get("died", 0) == 0 for row in report["ledger"]), report["ledger"]
    steps = report["steps"]

    again = start("--set", f"training.stop.steps={steps + 40}")
    assert again.ends() == 0, again.everything()
    assert re.search(rf"going on from the checkpoint in \S+: step {steps}, [\d,]+ merges", again.output), (
        again.output
    )
    assert again.report()["tokens"]["trained"] > report["tokens"]["trained"]
    check_ledger(again.report())


def test_a_second_ctrl_c_stops_at_once(start: Callable[..., Run]) -> None:
    run = start(steps=100_000)
    run.waits_for("first-merge: slot 1")
    children = run.children()
    for child in children:  # nobody answers the first one
        child.send_signal(signal.SIGSTOP)
    run.process.send_signal(signal.SIGINT)
    run.waits_for("interrupted")
    run.process.send_signal(signal.SIGINT)
    started = time.monotonic()
    assert run.ends(30) == 130, run.everything()
    assert time.monotonic() - started < 5
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive


def test_killing_the_runner_leaves_no_orphan(start: Callable[..., Run]) -> None:
    run = start(steps=100_000)
    run.waits_for("first-merge: slot 1")
    children = run.children()
    assert len(children) >= 5  # zygote, syncer, two learners, evaluator
    run.process.kill()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive, [child.cmdline() for child in alive]
    again = start("--set", "training.stop.steps=40")
    assert again.ends() == 0, again.everything()
    assert "going on from the checkpoint" in again.output


def test_what_a_command_started_goes_with_it(start: Callable[..., Run], tmp_path: Path) -> None:
    marker = f"seconds-{os.getpid()}-{time.monotonic_ns()}"
    script = tmp_path / "learner.sh"
    script.write_text(f"sh -c 'exec sleep 600' {marker} &\necho started in $(pwd) $DILOCO_ROLE\nwait\n")
    run = start(change="  learners: {command: [sh, learner.sh]}\n")
    log = run.workdir / "logs" / "learner-0.log"
    run.until(lambda: log.exists() and f"started in {tmp_path} learner" in log.read_text())
    children = run.children()
    assert [c for c in children if c.name() == "sleep"]
    run.process.kill()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive, [child.cmdline() for child in alive]


def test_learners_that_cannot_live_fail_the_job(start: Callable[..., Run]) -> None:
    run = start(change="  learners: {command: [sh, -c, 'echo broken on purpose; exit 7']}\n")
    assert run.ends(60) == 1, run.everything()
    assert "failurePolicy.maxReplacements: 3" in run.output and "broken on purpose" in run.output
    assert "Traceback" not in run.output
    assert run.report()["outcome"] == "failed"
    assert not psutil.pid_exists(run.process.pid)


def test_data_that_is_not_there_is_the_users_error(start: Callable[..., Run]) -> None:
    run = start("--set", "training.data.paths=[absent.txt]")
    assert run.ends(60) == 2, run.everything()
    assert "absent.txt" in run.output and "Traceback" not in run.output, run.output


def test_a_port_in_use(start: Callable[..., Run]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        run = start("--http", address)
        assert run.ends(30) == 2
    assert f"--http {address}: cannot listen there" in run.output and "Traceback" not in run.output
