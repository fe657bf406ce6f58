"""A whole ``diloco run`` in a process of its own, for tests that look at what it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from patience import on_started, wait_for_end, wait_until

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
  sync: {{fragments: 4, every: 8, overlap: 1, merge: {{method: rda}}, outer: {{optimizer: sgd, lr: 1.0}},
         heartbeat: {{intervalSeconds: 0.2, timeoutSeconds: 60}}}}
  regions: [{{learners: {learners}}}]
  failurePolicy: {{maxReplacements: 3}}
"""
# A process that stands still for a while stays in its slot: of one that ends the runner tells the syncer at once.
# Plain averaging: with steps of 10 ms a busy machine merges seldom, and momentum over so few and long
# outer gradients overshoots.
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
RUN_SECONDS = 900.0  # at most, of a whole run that goes on


class Run:
    """One ``diloco run`` in a process of its own, its output in a file."""

    def __init__(self, job: Path, workdir: Path, *arguments: str) -> None:
        self.workdir = workdir
        self.log = job.parent / f"{workdir.name}-{time.monotonic_ns()}.out"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "diloco.main", "run", str(job), "--workdir", str(workdir), *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=ENV,
                start_new_session=True,
            )
        on_started(self.process, self.log)

    @property
    def output(self) -> str:
        return self.log.read_text()

    def ends(self) -> int:
        """Its exit code."""
        return wait_for_end(self.process, self.workdir, self.log, longest=RUN_SECONDS)

    def waits_for(self, words: str) -> None:
        self.until(lambda: words in self.output, repr(words))

    def until(self, condition: Callable[[], Any], what: str = "") -> None:
        wait_until(condition, what, self.process, self.workdir, self.log)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def ranks(self, region: str) -> dict[int, psutil.Process]:
        """The processes of a region's one learner of several ranks, by rank."""
        found = {}
        for process in self.children():
            with contextlib.suppress(psutil.Error):
                environ = process.environ()
                here = environ.get("DILOCO_REGION") == region and "diloco_worker.launch" not in process.cmdline()
                if here and (rank := environ.get("RANK")):
                    found[int(rank)] = process
        return found

    def status(self) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "diloco.main", "status", str(self.workdir), "--json"],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def live_status(self) -> dict[str, Any]:
        """The syncer's status; `diloco status` gives it 2 s, and shows what was there before where it is late."""
        found: dict[str, Any] = {}

        def is_live() -> bool:
            found.update(self.status())
            return bool(found["running"])

        self.until(is_live, "the syncer's status")
        return found

    def report(self) -> dict[str, Any]:
        return dict(json.loads((self.workdir / "report.json").read_text()))

    def everything(self) -> str:
        logs = [f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.workdir.glob("logs/*.log"))]
        return "\n".join([self.output, *logs])

    def ended_whole(self) -> None:
        """Kill what is left of the run, its processes included."""
        if self.process.poll() is None:
            left = self.children()
            self.process.kill()
            self.process.wait()
            psutil.wait_procs(left, timeout=10)

    def events(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self.live_status()["events"]]

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """The rows of one process's metrics file; a torn last line is left out."""
        raw = (self.workdir / "metrics" / f"{name}.jsonl").read_bytes()
        return [json.loads(line) for line in raw.splitlines(keepends=True) if line.endswith(b"\n")]


def diloco(*arguments: str | Path, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
    """Another command of the program, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "diloco.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=ENV,
        stdin=subprocess.DEVNULL,
    )


def check_ledger(report: dict[str, Any], fragments: int = 4) -> None:
    """Every fragment's row adds up to what was trained, and its reasons to what was dropped."""
    tokens = report["tokens"]
    assert tokens["trained"] == tokens["merged"] + tokens["pending"] + tokens["dropped"]
    assert len(report["ledger"]) == fragments
    for row in report["ledger"]:
        assert row["merged"] + row["pending"] + row["dropped"] == tokens["trained"], row
        assert sum(row["reasons"].values()) == row["dropped"], row
