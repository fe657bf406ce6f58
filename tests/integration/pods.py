"""Syncer and learners as they run in pods, but as processes of this machine.

Not a test: what tests of a cluster's ways need. A ``Pod`` is a learner process with the
environment that an operator gives it; ``Hub`` a syncer that stays. Learners run this
file: a loop of the user's own, with a model that is small enough to be of no account.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from documents import conforming
from forked import ForkedProcess, fork
from syncer_calls import ask_report, ask_status

from diloco_protocol.documents import LearnerPage
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import job_to_json
from diloco_protocol.wire.control_auth import make_key
from free_ports import free_port
from patience import WaitFailed, on_started, own_work, wait_for_end, wait_until

STEP_SECONDS = 0.01
TOKENS = 4  # per step


LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def make_job(
    *,
    learners: int | dict[str, int] = 2,
    stop: dict[str, Any] | None = None,
    name: str = "pods",
    syncer: dict[str, Any] | None = None,
    corpus: Path | None = None,
    **sync: Any,
) -> DiLoCoJob:
    """Of learners that run this file; with ``corpus``, of the built-in trainer and an evaluator."""
    regions = learners if isinstance(learners, dict) else {"local": learners}
    settings = {
        "fragments": 3,
        "every": 4,
        "overlap": 1,
        "grace": {"factor": 0.9, "capSeconds": 0.2},
        "heartbeat": {"intervalSeconds": 0.1, "timeoutSeconds": 60},
        # With steps of 10 ms a busy machine leaves learners many versions behind.
        "staleness": {"maxVersions": 10_000},
        "merge": {"method": "rda"},
        "outer": {"optimizer": "sgd", "lr": 1.0},
    }
    training: dict[str, Any] = {"batch": {"sequences": 4}, "evaluation": None}
    if corpus is not None:
        training = {
            "model": {"config": LLAMA},
            "data": {"source": "text", "paths": [str(corpus)], "sequenceLength": 32},
            "batch": {"sequences": 4},
            "device": "cpu",
            "evaluation": {"fraction": 0.05, "everyTokens": 5000, "batches": 2},
        }
    return DiLoCoJob.model_validate(
        {
            "apiVersion": "diloco.io/v1alpha1",
            "kind": "DiLoCoJob",
            "metadata": {"name": name},
            "spec": {
                "sync": {**settings, **sync},
                "syncer": syncer or {},
                "learners": {"command": ["true"] if corpus is None else None},
                "regions": [{"name": region, "learners": count} for region, count in regions.items()],
                "training": {"stop": stop or {"steps": 1_000_000}, **training},
            },
        }
    )


def get(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=60) as reply:
            return int(reply.status), bytes(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, error.read()


class Process:
    """A program, its log, and its end."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.process: subprocess.Popen[bytes] | ForkedProcess | None = None

    def launch(self, command: list[str], env: dict[str, str]) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        on_started(self.process, self.log)

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def lines(self) -> list[dict[str, Any]]:
        """The log, which must be JSON throughout."""
        return [json.loads(line) for line in self.text().splitlines()]

    def ends(self) -> int:
        assert self.process is not None
        return wait_for_end(self.process, self.log)

    def terminate(self) -> tuple[int, float]:
        """SIGTERM; the exit code, and how long it took."""
        assert self.process is not None
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        return self.ends(), time.monotonic() - began

    def kill(self) -> None:
        if self.running:
            assert self.process is not None
            self.process.kill()
            self.ends()


class Hub(Process):
    """``diloco_syncer --stay`` on a folder's store, always at the same addresses."""

    def __init__(self, folder: Path, job: DiLoCoJob, credentials: Path | None = None) -> None:
        super().__init__(folder / "syncer.log")
        self.folder, self.credentials = folder, credentials
        self.key = make_key(folder / "control.key")
        self.ports = {name: free_port() for name in ("listen", "control", "http", "export")}
        self.change(job)

    def change(self, job: DiLoCoJob) -> None:
        """The job that the next start reads."""
        self.job = job
        (self.folder / "hub.json").write_text(job_to_json(job), encoding="utf-8")

    def start(self) -> Hub:
        words = ["--job", str(self.folder / "hub.json"), "--store", str(self.folder / "store"), "--stay"]
        words += ["--threads", "1", "--control-key-file", str(self.folder / "control.key")]
        for name, port in self.ports.items():
            words += [f"--{name}", f"127.0.0.1:{port}"]
        if self.credentials is not None:
            words += ["--credentials", str(self.credentials)]
        self.process = fork(["-m", "diloco_syncer", *words], {}, self.log)
        return self

    def serves(self) -> Hub:
        def answers() -> bool:
            try:
                return get(f"http://{self.address('http')}/readyz")[0] == 200
            except (OSError, urllib.error.URLError):
                return False

        wait_until(answers, "the syncer to serve", self.process, self.log)
        return self

    def restart(self, job: DiLoCoJob | None = None) -> Hub:
        if job is not None:
            self.change(job)
        assert self.terminate()[0] == 0
        return self.start().serves()

    def address(self, name: str) -> str:
        return f"127.0.0.1:{self.ports[name]}"

    def status(self) -> dict[str, Any]:
        return ask_status(self.address("control"), self.key)

    def report(self) -> dict[str, Any]:
        return ask_report(self.address("control"), self.key)

    def waits_until(self, condition: Callable[[dict[str, Any]], Any], what: str) -> Any:
        last: dict[str, Any] = {}

        def holds() -> Any:
            last.update(self.status())
            return condition(last)

        try:
            return wait_until(holds, what, own_work, self.log)
        except WaitFailed as error:
            raise WaitFailed(f"{error}\n{json.dumps(last, indent=1)[:6000]}") from None

    async def call(self, method: str, **body: Any) -> dict[str, Any]:
        from diloco_protocol.wire.control_client import ControlClient

        client = ControlClient(self.address("control"), self.key)
        try:
            return await client.call(method, body)
        finally:
            await client.close()


class Pod(Process):
    """A learner's pod: where it is started again, it is another process in the same place."""

    def __init__(
        self,
        hub: Hub,
        ordinal: int = 0,
        region: str = "local",
        credentials: Path | None = None,
        workdir: Path | None = None,
        **env: str,
    ) -> None:
        super().__init__(hub.folder / f"pod-{region}-{ordinal}-{uuid.uuid4().hex[:4]}.log")
        self.uid = str(uuid.uuid4())
        self.port = free_port()
        # Its own copy of the job, which does not follow a change of the hub's.
        job = self.log.with_suffix(".json")
        job.write_text(job_to_json(hub.job), encoding="utf-8")
        self.address_file = self.log.with_suffix(".address")
        self.address_file.write_text(json.dumps({"sync": hub.address("listen")}), encoding="utf-8")
        self.env = {
            "DILOCO_JOB_FILE": str(job),
            "DILOCO_SYNCER_FILE": str(self.address_file),
            "DILOCO_REGION": region,
            "DILOCO_ORDINAL": str(ordinal),
            "DILOCO_POD": self.uid,
            "DILOCO_STATUS": f"[::]:{self.port}",
            "DILOCO_IDLE_AT_END": "1",
            "DILOCO_LOG_FORMAT": "json",
            **({"DILOCO_CREDENTIALS": str(credentials)} if credentials else {}),
            **({"DILOCO_WORKDIR": str(workdir)} if workdir else {}),
            **env,
        }

    def start(self) -> Pod:
        built_in = json.loads(Path(self.env["DILOCO_JOB_FILE"]).read_text())["spec"]["learners"]["command"] is None
        self.process = fork(["-m", "diloco_worker"] if built_in else [__file__], self.env, self.log)
        return self

    def page(self, path: str) -> tuple[int, bytes]:
        """A page of its status port; 0 while nothing listens there."""
        try:
            return get(f"http://127.0.0.1:{self.port}{path}")
        except (OSError, urllib.error.URLError):
            return 0, b""

    def status(self) -> dict[str, Any]:
        code, body = self.page("/status")
        return conforming(LearnerPage, json.loads(body)) if code == 200 else {}

    def waits_until(self, condition: Callable[[dict[str, Any]], Any], what: str) -> Any:
        def holds() -> Any:
            status = self.status()
            return status and condition(status)

        try:
            return wait_until(holds, what, self.process, own_work, self.log)
        except WaitFailed as error:
            raise WaitFailed(f"{error}\n{self.status()}") from None


def main() -> int:
    """A loop of the user's own."""
    import torch

    import diloco_worker

    diloco_worker.configure_logging()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = torch.randn(4096, 8, generator=torch.Generator().manual_seed(5))
    with diloco_worker.Learner.from_environment(model, optimizer) as learner:
        for batch in learner.batches(rows):
            loss = (model(batch).squeeze(1) - batch.sum(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(STEP_SECONDS)
            learner.after_step(tokens=TOKENS, loss=loss.detach())
    return learner.exit_code


if __name__ == "__main__":
    sys.exit(main())
