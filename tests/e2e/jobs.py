"""A job in a cluster, as the tests see it: the object, its pods, and its syncer's status page."""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from patience import WaitFailed

from .clusters import Cluster, CommandFailed, read_patiently, until

GROUP = "/apis/diloco.io/v1alpha1"
# Three learners, the syncer and the evaluator together stay below 1.2 cores.
LEARNER_CPU, SYNCER_CPU, EVALUATOR_CPU = "300m", "200m", "100m"
CORPUS = ["/usr/local/lib/python3.11/asyncio/*.py", "/usr/local/lib/python3.11/email/*.py"]


def pod_template(container: str, cpu: str | None, memory: str = "1Gi", requested: str = "64Mi") -> dict[str, Any]:
    limits = {"memory": memory, **({"cpu": cpu} if cpu else {})}
    requests = {"memory": requested, "cpu": "10m"}
    return {"spec": {"containers": [{"name": container, "resources": {"requests": requests, "limits": limits}}]}}


def small_job(name: str, learners: int | dict[str, Any] = 3, tokens: int = 10**9, **spec: Any) -> dict[str, Any]:
    """A job whose steps take some tens of milliseconds. Without ``tokens`` it does not end by itself.
    ``learners`` is their number, or spec.learners itself (then with ``regions``); ``spec`` replaces
    fields of that name, of ``sync``, ``syncer`` and ``training`` their fields."""
    count = learners if isinstance(learners, int) else 1
    shared = {"podTemplate": pod_template("learner", LEARNER_CPU)} if isinstance(learners, int) else learners
    sync = {
        "fragments": 4,
        "every": 8,
        "overlap": 2,
        "quorum": 1,
        "heartbeat": {"intervalSeconds": 1, "timeoutSeconds": 10},
    } | spec.pop("sync", {})
    syncer = {
        "storage": {"size": "1Gi", "onDelete": "Delete"},
        "checkpoint": {"everySeconds": 10},
        "podTemplate": pod_template("syncer", SYNCER_CPU, requested="256Mi"),  # less would be told, as too little
    } | spec.pop("syncer", {})
    training = {
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 160,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "max_position_embeddings": 64,
                "tie_word_embeddings": False,
            }
        },
        "data": {"source": "text", "paths": CORPUS, "tokenizer": "bytes", "sequenceLength": 64},
        "batch": {"sequences": 8},
        "optimizer": {"lr": 3e-3, "warmupSteps": 20},
        "stop": {"tokens": tokens},
        "evaluation": {"fraction": 0},  # a null would not survive `kubectl apply`
    } | spec.pop("training", {})
    return {
        "apiVersion": "diloco.io/v1alpha1",
        "kind": "DiLoCoJob",
        "metadata": {"name": name},
        "spec": {
            "training": training,
            "sync": sync,
            "syncer": syncer,
            "learners": shared,
            "regions": [{"name": "local", "learners": count}],
            **spec,
        },
    }


@dataclass
class Job:
    """One DiLoCoJob. Everything is read anew at each call."""

    cluster: Cluster
    name: str
    namespace: str = "default"

    # ------------------------------------------------------------- the object

    def apply(self, document: dict[str, Any]) -> None:
        self.cluster.apply(document, namespace=self.namespace)

    def patch(self, patch: dict[str, Any]) -> None:
        self.cluster.kubectl(
            "patch", "dilocojob", self.name, "-n", self.namespace, "--type=merge", "-p", json.dumps(patch)
        )

    def object(self) -> dict[str, Any] | None:
        return self.cluster.api(f"{GROUP}/namespaces/{self.namespace}/dilocojobs/{self.name}")

    def status(self) -> dict[str, Any]:
        found = self.object()
        return dict(found.get("status") or {}) if found else {}

    def condition(self, kind: str) -> dict[str, Any]:
        return next((c for c in self.status().get("conditions", []) if c["type"] == kind), {})

    def wait_condition(self, kind: str, status: str = "True", reason: str = "", timeout: float = 120) -> Any:
        def holds() -> Any:
            found = self.condition(kind)
            return found if found.get("status") == status and reason in found.get("reason", "") else None

        try:
            return until(f"{self.name}: {kind}={status} {reason}", holds, timeout)
        except WaitFailed as error:
            raise WaitFailed(f"{error}\n{self.story()}") from None

    def wait_phase(self, *phases: str, timeout: float = 120) -> str:
        try:
            return str(
                until(
                    f"{self.name} in phase {phases}", lambda: (p := self.status().get("phase")) in phases and p, timeout
                )
            )
        except WaitFailed as error:
            raise WaitFailed(f"{error}\n{self.story()}") from None

    def events(self) -> list[dict[str, Any]]:
        path = f"/api/v1/namespaces/{self.namespace}/events?fieldSelector=involvedObject.name%3D{self.name}"
        found = self.cluster.items(path.split("?")[0])
        return [e for e in found if e["involvedObject"].get("name") == self.name]

    def story(self) -> str:
        """For failures: what a person would look at."""
        parts = []
        for words in (
            ("get", "dilocojob", self.name, "-o", "yaml"),
            ("get", "pods,sts,deploy,pvc", "-o", "wide"),
            ("get", "events", "--sort-by=.lastTimestamp"),
        ):
            text = self.cluster.kubectl(*words, "-n", self.namespace, check=False)
            parts.append(f"$ kubectl {' '.join(words)}\n{text[-4000:]}")
        pods: list[dict[str, Any]] = []
        with contextlib.suppress(OSError):  # the failure that this is told for is the one to raise
            pods = self.pods()
        for pod in pods:
            name = pod["metadata"]["name"]
            text = self.cluster.kubectl("logs", name, "-n", self.namespace, "--tail=8", check=False)
            parts.append(f"$ kubectl logs {name}\n{text[-1500:]}")
        words = ("logs", "-n", "diloco-system", "deploy/diloco-operator", "--tail=25")
        text = self.cluster.kubectl(*words, check=False)
        return "\n".join([*parts, f"operator:\n{text[-5000:]}"])

    # ------------------------------------------------------------- pods

    def pods(self, role: str = "") -> list[dict[str, Any]]:
        selector = f"diloco.io/job={self.name}" + (f",diloco.io/role={role}" if role else "")
        found = self.cluster.items(f"/api/v1/namespaces/{self.namespace}/pods", selector)
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    def pod(self, name: str) -> dict[str, Any] | None:
        return self.cluster.api(f"/api/v1/namespaces/{self.namespace}/pods/{name}")

    def identities(self, role: str = "learner") -> dict[str, tuple[str, int]]:
        """Pod name -> (uid, restarts): what must not change for survivors."""
        return {
            pod["metadata"]["name"]: (
                pod["metadata"]["uid"],
                sum(c["restartCount"] for c in pod["status"].get("containerStatuses", [])),
            )
            for pod in self.pods(role)
        }

    def syncer_pod(self) -> dict[str, Any]:
        """The syncer's pod that is not going. Raises KeyError."""
        for pod in self.pods("syncer"):
            if "deletionTimestamp" not in pod["metadata"] and pod["status"].get("podIP"):
                return pod
        raise KeyError("no syncer pod")

    # ------------------------------------------------------------- the syncer's pages

    def page(self, path: str) -> dict[str, Any]:
        """A page of the syncer, through the API server. Raises OSError, KeyError."""
        return dict(json.loads(self.page_text(path)))

    def page_text(self, path: str) -> str:
        """The page as it is. A pod that is not found was replaced after it was looked up: its successor is asked."""
        return read_patiently(lambda: self._get(path), lambda error: False)

    def _get(self, path: str) -> str:
        name = self.syncer_pod()["metadata"]["name"]
        base = f"/api/v1/namespaces/{self.namespace}/pods/{name}:7702/proxy"
        return self.cluster.raw(base + path).decode()

    def training(self) -> dict[str, Any]:
        return self.page("/status")

    def wait_training(self, what: str, holds: Callable[[dict[str, Any]], Any], timeout: float = 120) -> Any:
        reached: tuple[Any, ...] = ()

        def check() -> Any:
            nonlocal reached
            document = self.training()
            reached = document["epoch"], document["step"], document["merges"]
            return document if holds(document) else None

        try:
            return until(f"{self.name}: {what}", check, timeout, lambda: reached)
        except WaitFailed as error:
            raise WaitFailed(f"{error}\n{self.story()}") from None

    def in_merges(self, learners: int, timeout: float = 180) -> dict[str, Any]:
        """Wait until so many learners are active, each with a merged push, and go on merging."""
        document = self.wait_training(
            f"{learners} learners in merges",
            lambda d: (
                d["quorum"]["active"] >= learners
                and sum(s["state"] == "active" and s["merged_pushes"] > 0 for s in d["slots"]) >= learners
            ),
            timeout,
        )
        return dict(document)

    def merging_on(self, timeout: float = 60, merges: int = 4) -> dict[str, Any]:
        """Wait for some merges more than there are now."""
        now = self.wait_training("a status page", lambda d: True, timeout)["merges"]
        return dict(self.wait_training(f"{merges} merges after {now}", lambda d: d["merges"] >= now + merges, timeout))

    def exact(self) -> None:
        """The ledger balances: every fragment's merged + pending + dropped is what was trained."""
        report = self.page("/report")
        trained = report["tokens"]["trained"]
        assert report["ledger"], "the report has no ledger"
        for row in report["ledger"]:
            assert row["merged"] + row["pending"] + row["dropped"] == trained, (row, trained)

    def step_seconds(self, since: float, to: float) -> dict[str, float]:
        """Learner pod -> median step time between two wall-clock times, from its own metrics file."""
        medians = {}
        for pod in self.pods("learner"):
            name = pod["metadata"]["name"]
            try:
                text = self.cluster.kubectl(
                    "exec", "-n", self.namespace, name, "--", "sh", "-c", "cat /var/lib/diloco/metrics/*.jsonl"
                )
            except CommandFailed:
                continue  # it is starting
            rows = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
            inside = [row for row in rows if since <= row["time"] <= to]
            if len(inside) >= 2:
                steps = inside[-1]["step"] - inside[0]["step"]
                medians[name] = (
                    statistics.median(
                        (b["time"] - a["time"]) / (b["step"] - a["step"])
                        for a, b in itertools.pairwise(inside)
                        if b["step"] > a["step"]
                    )
                    if steps
                    else float("inf")
                )
        return medians

    def delete(self, timeout: float = 90) -> None:
        self.cluster.kubectl(
            "delete",
            "dilocojob",
            self.name,
            "-n",
            self.namespace,
            "--ignore-not-found",
            f"--timeout={timeout:.0f}s",
            timeout=timeout + 30,
        )
        until(f"{self.name} gone", lambda: self.object() is None, timeout)
        until(f"the pods of {self.name} gone", lambda: not self.pods(), timeout)


def clock() -> float:
    """Now, as the pods' clocks have it (one machine, or NTP)."""
    return time.time()
