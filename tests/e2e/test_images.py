"""What is in the images, and what their programs show: metrics with help, log lines with job and slot."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from .clusters import Cluster, until
from .conftest import SYSTEM
from .jobs import Job

EVALUATION = {"evaluation": {"fraction": 0.05, "everyTokens": 20_000, "batches": 2}}
LOOK = """
import importlib.util, json, os, shutil, tempfile
def writable(path):
    try:
        tempfile.TemporaryFile(dir=path).close()
    except OSError:
        return False
    return True
print(json.dumps({
    "uid": os.getuid(),
    "capabilities": int(next(l.split()[1] for l in open("/proc/self/status") if l.startswith("CapEff")), 16),
    "modules": [m for m in ("torch", "transformers", "kopf", "numba", "pip", "setuptools")
                if importlib.util.find_spec(m)],
    "tools": [t for t in ("cc", "gcc", "g++", "clang", "ld", "make", "cmake", "git") if shutil.which(t)],
    "writable": [p for p in ("/", "/usr/local", "/etc", "/workspace", "/var/lib/diloco", "/tmp")
                 if os.path.isdir(p) and writable(p)],
}))
"""
MODULES = {
    "operator": {"kopf"},
    "syncer": {"numba", "pip"},
    "worker": {"torch", "transformers", "numba", "pip", "setuptools"},
}
# Of each page some names that must be there, with the labels that tell whose they are.
SHOWN = {
    "operator": ("diloco_operator_jobs", 'diloco_operator_api_requests_total{code="200",'),
    "syncer": ('diloco_merges_total{job="inside"}', 'diloco_slot_tokens{job="inside",region="local",slot="0"}'),
    "learner": ("diloco_worker_step{", "diloco_worker_joined{"),
    "evaluator": ("diloco_worker_joined{",),
}


@pytest.mark.timeout(300)
def test_what_runs_in_pods(cluster: Cluster, start: Any) -> None:
    job: Job = start("inside", learners=1, training=EVALUATION)
    job.in_merges(1)
    until("the evaluator is ready", lambda: any(ready(pod) for pod in job.pods("evaluator")), 90)
    pods = {role: job.pods(role)[0] for role in ("syncer", "learner", "evaluator")}
    operators = cluster.items(f"/api/v1/namespaces/{SYSTEM}/pods", "app.kubernetes.io/name=diloco-operator")
    pods["operator"] = next(p for p in operators if "deletionTimestamp" not in p["metadata"])

    for role, pod in pods.items():
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        seen = json.loads(cluster.kubectl("exec", "-n", namespace, name, "--", "python", "-c", LOOK))
        print(f"{role}: {seen}")
        assert seen["uid"] == 65532 and seen["capabilities"] == 0, role
        assert seen["tools"] == [], role
        assert set(seen["modules"]) == MODULES.get(role, MODULES["worker"]), role
        assert set(seen["writable"]) == {"/tmp"} | ({"/var/lib/diloco"} if role != "operator" else set())

        port = {"operator": 7720, "syncer": 7702}.get(role, 7710)
        page = cluster.raw(f"/api/v1/namespaces/{namespace}/pods/{name}:{port}/proxy/metrics").decode()
        for sample in SHOWN[role]:
            assert re.search(rf"^{re.escape(sample)}", page, re.M), f"{role} has no {sample}:\n{page[:3000]}"
        families = set(re.findall(r"^# TYPE (\S+)", page, re.M))
        helped = set(re.findall(r"^# HELP (\S+) \S", page, re.M))
        assert families and families == helped, families ^ helped

        lines = cluster.kubectl("logs", "-n", namespace, name).splitlines()
        told = [json.loads(line) for line in lines]
        assert any(line.get("job") == "inside" for line in told), (role, lines[-5:])
        if role in ("syncer", "learner"):
            assert any(line["slot"] == 0 for line in told), (role, lines[-5:])


def ready(pod: dict[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))
