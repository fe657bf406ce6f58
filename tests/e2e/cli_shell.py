"""The command line as the end-to-end tests use it, where no operator runs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from repository import ROOT
from status_documents import job_report, kept_report

from .clusters import FAILURES, Cluster, until
from .conftest import without_operator
from .jobs import GROUP, small_job

CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/dilocojobs.diloco.io"
REPORT = job_report(
    outcome="complete",
    merges=7,
    tokens={"trained": 1234, "merged": 1, "pending": 1233, "dropped": 0},
    ledger=[{"fragment": 0, "merged": 1, "pending": 1233, "dropped": 0, "reasons": {}}],
)
RUNNING: dict[str, Any] = {
    "observedGeneration": 1,
    "phase": "Running",
    "startTime": "2026-01-01T00:00:00Z",
    "learners": "2/3",
    "quorum": "2/1",
    "progress": {"tokens": 3000, "step": 120, "loss": 2.415, "goodput": 0.93, "merges": 7},
    "regions": [{"name": "local", "desired": 3, "ready": 2, "inQuorum": 2, "cause": "local-2: no image"}],
    "conditions": [
        {
            "type": "Ready",
            "status": "False",
            "reason": "LearnersMissing",
            "message": "2 of 3 are in",
            "observedGeneration": 1,
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
    ],
    "report": kept_report(REPORT),
}


@contextlib.contextmanager
def only_the_crd(cluster: Cluster) -> Iterator[str]:
    """A namespace of its own in the cluster with the CRD and without an operator; as it was, afterwards."""
    made = cluster.api(CRD) is None
    if made:
        install_crd(cluster)
    name = f"cli-{time.time_ns() // 1_000_000 % 10_000_000}"
    cluster.kubectl("create", "namespace", name)
    account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
    until("the default account is there", lambda: cluster.api(account), 30)
    with without_operator(cluster):
        yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")
    if made:
        cluster.kubectl("delete", "crd", "dilocojobs.diloco.io")


def install_crd(cluster: Cluster, marks: dict[str, dict[str, str]] | None = None) -> None:
    """Apply manifests/crd.yaml; ``marks``: labels and annotations that it is to bear beside its own."""
    crd = yaml.safe_load((ROOT / "manifests" / "crd.yaml").read_text())
    for key, values in (marks or {}).items():
        crd["metadata"][key] = {**values, **crd["metadata"].get(key, {})}
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(crd))
    wait_established(cluster)


def wait_established(cluster: Cluster) -> None:
    """Wait until the API server serves our CRD. (``kubectl wait`` fails at once for an object without conditions.)"""

    def established() -> bool:
        crd = cluster.api("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/dilocojobs.diloco.io") or {}
        conditions = crd["status"]["conditions"] or ()
        return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)

    until("the CRD is established", established, 30)


class Shell:
    """The command line, on one namespace of one cluster."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace
        self.reach = ("--kubeconfig", str(cluster.kubeconfig), "--context", cluster.context, "-n", namespace)

    def start(self, *words: str | Path, reach: tuple[str, ...] | None = None) -> subprocess.Popen[str]:
        program = str(Path(sys.executable).with_name("diloco"))
        return subprocess.Popen(
            [program, *map(str, words), *(self.reach if reach is None else reach)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "COLUMNS": "150"},
        )

    def __call__(
        self, *words: str | Path, code: int = 0, reach: tuple[str, ...] | None = None, timeout: float = 60
    ) -> str:
        """What the command said, both streams; it must end with ``code``."""
        process = self.start(*words, reach=reach)
        out, error = process.communicate(timeout=timeout)
        assert process.returncode == code, f"{words}: {process.returncode}\n{out}\n{error}"
        assert "Traceback" not in error
        return out + error

    def job(self, name: str) -> dict[str, Any]:
        found = self.cluster.api(f"{GROUP}/namespaces/{self.namespace}/dilocojobs/{name}")
        assert found is not None
        return found

    def create(self, path: Path) -> None:
        """As `apply` does, without waiting for an operator that is not there."""
        self.cluster.kubectl("apply", "--server-side", "--field-manager=diloco", "-n", self.namespace, "-f", str(path))

    def _note_generations(self) -> None:
        for job in self.cluster.items(f"{GROUP}/dilocojobs"):
            metadata, status = job["metadata"], job.get("status") or {}
            seen = {"status": {"observedGeneration": metadata["generation"]}}
            if status.get("observedGeneration") != metadata["generation"]:
                self.cluster.kubectl(
                    "patch",
                    "dilocojob",
                    metadata["name"],
                    "-n",
                    metadata["namespace"],
                    "--subresource=status",
                    "--type=merge",
                    "-p",
                    json.dumps(seen),
                    check=False,
                )

    @contextlib.contextmanager
    def operator(self) -> Iterator[None]:
        """Somebody who notes every job's generation, as an operator would, and does nothing else."""
        over = threading.Event()

        def note() -> None:
            while not over.wait(0.3):
                # A read or a write without an answer is repeated at the next turn; the thread must not end by it.
                with contextlib.suppress(*FAILURES):
                    self._note_generations()

        thread = threading.Thread(target=note, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(30)

    def set_status(self, name: str, **status: Any) -> None:
        """Write the status that an operator would."""
        generation = self.job(name)["metadata"]["generation"]
        status = {**RUNNING, **status, "observedGeneration": generation}
        for one in status["conditions"]:
            one["observedGeneration"] = generation
        self.cluster.kubectl(
            "patch",
            "dilocojob",
            name,
            "-n",
            self.namespace,
            "--subresource=status",
            "--type=merge",
            "-p",
            json.dumps({"status": status}),
        )


def write(path: Path, name: str, **spec: Any) -> Path:
    path.write_text(yaml.safe_dump(json.loads(json.dumps(small_job(name, **spec)))))
    return path


def a_condition(kind: str, message: str) -> dict[str, Any]:
    return {
        "type": kind,
        "status": "True",
        "reason": kind,
        "message": message,
        "observedGeneration": 1,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
