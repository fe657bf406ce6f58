"""A syncer process and a learner process of the library, with a small torch model.

Not a test: what the tests of the learner library share. Learner processes run this file.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from forked import ForkedProcess, fork
from syncer_calls import announce_end, ask_report, ask_status

from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import job_to_json
from diloco_protocol.wire.control_auth import read_key
from diloco_syncer.store.directory import DirectoryStore
from diloco_worker import Learner
from patience import wait_until

SYNC = {
    "fragments": 3,
    "every": 4,
    "overlap": 1,
    "heartbeat": {"intervalSeconds": 0.1, "timeoutSeconds": 60},
    "grace": {"factor": 0.9, "capSeconds": 0.2},
}


def make_job(
    sync: dict[str, Any],
    stop: dict[str, Any],
    learners: int = 1,
    seed: int = 3,
    service: dict[str, Any] | None = None,
    stall_seconds: float | None = 600.0,
) -> DiLoCoJob:
    return DiLoCoJob.model_validate(
        {
            "apiVersion": "diloco.io/v1alpha1",
            "kind": "DiLoCoJob",
            "metadata": {"name": "small"},
            "spec": {
                "seed": seed,
                "sync": {**SYNC, **sync},
                "syncer": service or {},
                "learners": {"command": ["true"], "stallSeconds": stall_seconds},
                "regions": [{"name": "local", "learners": learners}],
                "training": {"stop": stop, "batch": {"sequences": 4}, "evaluation": None},
            },
        }
    )


class Syncer:
    """A syncer process on a store directory; ``start`` again after ``kill`` goes on from it."""

    def __init__(self, folder: Path, job: DiLoCoJob) -> None:
        self.folder, self.address_file = folder, folder / "address.json"
        self.job_file = folder / "job.json"
        self.job_file.write_text(job_to_json(job), encoding="utf-8")
        (folder / "control.key").write_text("0123456789abcdef" * 4 + "\n", encoding="utf-8")
        self.process: ForkedProcess | None = None

    def start(self) -> None:
        self.address_file.unlink(missing_ok=True)
        words = ["--job", self.job_file, "--store", self.folder / "store", "--address-file", self.address_file]
        words += ["--control-key-file", self.folder / "control.key"]
        self.process = fork(["-m", "diloco_syncer", *map(str, words)], {}, self.folder / "syncer.log")
        wait_until(self.address_file.exists, "the syncer's address file", self.process, self.process.log)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()

    def address(self, name: str) -> str:
        return str(json.loads(self.address_file.read_text(encoding="utf-8"))[name])

    def status(self) -> dict[str, Any]:
        return ask_status(self.address("control"), read_key(self.folder / "control.key"))

    def report(self) -> dict[str, Any]:
        return ask_report(self.address("control"), read_key(self.folder / "control.key"))

    def announce(self, phase: str) -> None:
        announce_end(self.address("control"), read_key(self.folder / "control.key"), phase)

    def last_report(self) -> dict[str, Any]:
        """What the syncer wrote when the job was over."""
        assert self.process is not None
        assert self.process.wait() == 0
        document: dict[str, Any] = json.loads((self.folder / "store" / "report.json").read_bytes())
        return document

    def learner(self, ordinal: int, rows: int = 64, **environ: str) -> ForkedProcess:
        """A learner process (run_learner); its log goes to the syncer's."""
        arguments = [__file__, str(rows), str(self.metrics_file(ordinal))]
        return fork(arguments, self.environ(ordinal=ordinal) | environ, self.folder / "syncer.log")

    def metrics_file(self, ordinal: int) -> Path:
        """What a learner process that ended well wrote: its metrics, and how many steps it has made itself."""
        return self.folder / f"metrics-{ordinal}.json"

    def tape(self) -> dict[tuple[int, int], str]:
        """(fragment, version) -> digest of the merged parameters."""
        import tape_reader  # not on the path of a learner's process

        merges = [row for row in tape_reader.read(DirectoryStore(self.folder / "store")) if row["kind"] == "merge"]
        return {(row["fragment"], row["version"]): row["result"] for row in merges}

    def environ(self, role: str = "learner", ordinal: int = 0) -> dict[str, str]:
        return {
            "DILOCO_JOB_FILE": str(self.job_file),
            "DILOCO_SYNCER_FILE": str(self.address_file),
            "DILOCO_ROLE": role,
            "DILOCO_ORDINAL": str(ordinal),
            "DILOCO_WORKDIR": str(self.folder),
        }


class Rows:
    """Sequences of 8 numbers whose sum is to be learnt."""

    def __init__(self, count: int = 64, hangs_at: int | None = None) -> None:
        """``hangs_at``: reading the item number so many (of this process) never returns."""
        self.rows = torch.randn(count, 8, generator=torch.Generator().manual_seed(5))
        self.hangs_at = hangs_at
        self.read = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read += 1
        while self.read == self.hangs_at:
            time.sleep(0.1)
        return self.rows[index]


def small_model(seed: int = 1, width: int = 16) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    loss = (model(batch).squeeze(1) - batch.sum(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def run_learner(rows: int, metrics: Path) -> None:
    """A learner process of its own, as a user would write it."""
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    steps = 0
    with Learner.from_environment(model, optimizer) as learner:
        for batch in learner.batches(Rows(rows, int(os.environ.get("HANGS_AT", "0")) or None)):
            if learner.step == 0:
                time.sleep(float(os.environ.get("FIRST_STEP", "0")))
            loss = one_step(model, optimizer, batch)
            learner.after_step(tokens=batch.numel(), loss=loss)
            steps += 1
            time.sleep(0.002)  # as long as a step: what tests wait for needs the processors too
    metrics.write_text(json.dumps(learner.metrics | {"steps_made": steps}))


if __name__ == "__main__":
    run_learner(int(sys.argv[1]), Path(sys.argv[2]))
