"""An operator in this process on a real API server, with a plan that a test writes.

Tests of the operator's I/O shell say what is wanted and see what is observed; what the real plan wants is
tested elsewhere. Requests are counted by the operator's own metrics.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from diloco_operator import names
from diloco_operator.app import Operator
from diloco_operator.kube.client import configuration
from diloco_operator.kube.kinds import OWN_NEEDS, needs
from diloco_operator.model import JobPlan, Object, Observed, PlanMemory, PlanSettings, Ref, SecretWanted
from diloco_operator.settings import Settings
from diloco_protocol.vocabulary import LABEL_JOB, LABEL_ROLE
from diloco_protocol.wire import convert, sync_pb2
from diloco_protocol.wire.control_auth import NonceCache, sign_reply, verify_call
from repository import ROOT
from status_documents import job_report, status_document

from .clusters import Cluster, delete_at_end, open_cluster, until

CRD = ROOT / "manifests" / "crd.yaml"
NS = "default"
WRITES = frozenset({"create", "patch", "delete"})


_LEASES = itertools.count(int(time.time()))


class Wants:
    """A plan for all jobs. ``plan`` makes a job's plan from what is observed; default: ``children``."""

    def __init__(self) -> None:
        self.plan: Callable[[Observed], JobPlan] = lambda observed: JobPlan(
            finalizer=True, apply=children(observed.job), status=status(observed)
        )
        self.observed: dict[tuple[str, str], Observed] = {}
        self.turns = 0

    def __call__(self, observed: Observed, memory: PlanMemory, settings: PlanSettings) -> JobPlan:
        meta = observed.job["metadata"]
        self.observed[meta["namespace"], meta["name"]] = observed
        self.turns += 1
        if meta.get("deletionTimestamp"):
            return JobPlan(finalizer=False)
        return self.plan(observed)


class Running(AbstractContextManager["Running"]):
    """The operator, until the block ends."""

    def __init__(self, kubeconfig: Path, wants: Wants, key_file: Path, **settings: Any) -> None:
        self.wants = wants
        # A Lease of its own: several operators of a test are no replicas of each other.
        usual = {"resync_seconds": 5.0, "namespace": NS, "lease": f"operator-{next(_LEASES)}"}
        self._settings = Settings(http="127.0.0.1:0", key_file=str(key_file), **{**usual, **settings})
        self._kubeconfig = kubeconfig
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._made = threading.Event()
        self.error: BaseException | None = None
        self.operator: Operator | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Running:
        self._config = configuration(str(self._kubeconfig))
        self._thread.start()
        assert self._made.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive(), "the operator did not stop"
        assert self.error is None, self.error

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self.error = error
            self._made.set()

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        operator = self.operator = Operator(self._settings, self._config, self.wants)
        started = operator.health.start

        async def start(address: str) -> int:
            self.port = await started(address)
            self._made.set()
            return self.port

        operator.health.start = start  # type: ignore[method-assign]
        await operator.run(self._stop)

    def page(self, path: str) -> tuple[int, str]:
        """Status and text of one of its pages."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def ready(self) -> bool:
        """Whether it says so."""
        assert self.error is None, self.error
        return self.page("/readyz")[0] == 200

    def requests(self) -> dict[tuple[str, str, str], int]:
        """(verb, resource, code) -> how many so far."""
        assert self.operator is not None
        found: dict[tuple[str, str, str], int] = {}
        for metric in self.operator.metrics.api_requests.collect():
            for sample in metric.samples:
                labels = sample.labels
                found[labels["verb"], labels["resource"], labels["code"]] = int(sample.value)
        return found

    def since(self, before: dict[tuple[str, str, str], int]) -> dict[tuple[str, str, str], int]:
        """What was asked since, the streams' own, the Lease's and questions about permissions left out."""
        now = self.requests()
        return {
            key: now[key] - before.get(key, 0)
            for key in now
            if now[key] > before.get(key, 0)
            and key[0] != "watch"
            and key[1] not in ("discovery", "selfsubjectaccessreviews", "apigroup", "version", "leases")
        }


def key_file(folder: Path) -> Path:
    """A root key, as it is mounted."""
    file = folder / "key"
    file.write_text("0123456789abcdef" * 4)
    return file


def _meta(job: Object, name: str, role: str, region: str | None = None) -> Object:
    meta = job["metadata"]
    return {
        "name": name,
        "namespace": meta["namespace"],
        "labels": names.labels(meta["name"], role, region),
        "ownerReferences": [names.owner_reference(meta["name"], meta["uid"])],
    }


def config_map(job: Object, **data: str) -> Object:
    """The job's settings."""
    meta = _meta(job, names.settings_map(job["metadata"]["name"]).name, "syncer")
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"a": "1", **data}}


def stateful_set(job: Object, generation: int = 1, replicas: int = 0, **pod: Any) -> Object:
    """A region's learners; ``pod``: fields of the pod's spec."""
    name = job["metadata"]["name"]
    meta = _meta(job, f"{name}-local", "learner", "local")
    meta["annotations"] = {names.GENERATION: str(generation)}
    selector = {LABEL_JOB: name, LABEL_ROLE: "learner"}
    container = {
        "name": "learner",
        "image": "none:none",
        "imagePullPolicy": "Never",
        "resources": {"requests": {"cpu": "1000m", "memory": "1024Mi"}},
        "env": [{"name": "EMPTY", "value": ""}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": meta,
        "spec": {
            "replicas": replicas,
            "serviceName": f"{name}-local",
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "selector": {"matchLabels": selector},
            "template": {
                "metadata": {"labels": names.labels(name, "learner", "local")},
                "spec": {"containers": [container], "terminationGracePeriodSeconds": 1, **pod},
            },
        },
    }


def service(job: Object) -> Object:
    """The region's."""
    name = job["metadata"]["name"]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(job, f"{name}-local", "learner", "local"),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {LABEL_JOB: name},
            "ports": [{"name": "status", "port": 7710}],
        },
    }


def budget(job: Object) -> Object:
    """The region's PodDisruptionBudget."""
    name = job["metadata"]["name"]
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _meta(job, f"{name}-local", "learner", "local"),
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": {LABEL_JOB: name}},
        },
    }


def claim(job: Object) -> Object:
    """The syncer's volume, which has no owner."""
    meta = _meta(job, names.claim(job["metadata"]["name"]).name, "syncer")
    del meta["ownerReferences"]
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": meta,
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1024Mi"}}},
    }


def secret(job: Object, missed: bool = False) -> SecretWanted:
    """The learners'."""
    meta = job["metadata"]
    name = names.secret_name(meta["name"], "learner", meta["uid"])
    head = {"apiVersion": "v1", "kind": "Secret", "metadata": _meta(job, name, "learner")}
    return SecretWanted(name, "learner", head, True, control_key=False, missed=missed)


def children(job: Object, **pod: Any) -> tuple[Object, ...]:
    """One of most kinds."""
    return (config_map(job), service(job), budget(job), claim(job), stateful_set(job, **pod))


def status(observed: Observed, phase: str = "Pending") -> Object:
    """A status that shows the apply errors as conditions."""
    generation = observed.job["metadata"]["generation"]
    conditions = [
        {
            "type": f"ApplyError{i}",
            "status": "True",
            "reason": apply_error.reason.capitalize(),
            "message": f"{apply_error.ref.kind} {apply_error.ref.name}: {apply_error.message}",
            "observedGeneration": generation,
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        for i, apply_error in enumerate(observed.apply_errors[:16])
    ]
    return {"phase": phase, "observedGeneration": generation, "conditions": conditions}


def job(name: str, namespace: str = "default") -> Object:
    """A small valid job."""
    return copy.deepcopy(
        json.loads(
            json.dumps(
                {
                    "apiVersion": "diloco.io/v1alpha1",
                    "kind": "DiLoCoJob",
                    "metadata": {"name": name, "namespace": namespace},
                    "spec": {
                        "training": {
                            "model": {"config": {"model_type": "llama"}},
                            "data": {
                                "source": "text",
                                "paths": ["python-stdlib"],
                                "tokenizer": "bytes",
                                "sequenceLength": 128,
                            },
                            "stop": {"tokens": 1000},
                        },
                        "regions": [{"name": "local", "learners": 1}],
                    },
                }
            )
        )
    )


def apply_errors(observed: Observed) -> dict[Ref, tuple[str, str]]:
    """By object: reason and message."""
    return {apply_error.ref: (apply_error.reason, apply_error.message) for apply_error in observed.apply_errors}


# ------------------------------------------------------------------ fixtures (conftest.py)


@pytest.fixture(scope="session")
def kube_bare(request: pytest.FixtureRequest) -> Cluster:
    found = open_cluster(os.environ.get("SHELL_CLUSTER", "lkshell"), nodes=1)
    if isinstance(found, str):
        pytest.skip(found)
    if "api" not in found.can:
        pytest.skip("a cluster of the tests' own is needed, whose API server may be stopped")
    delete_at_end(request.config, found.down)
    return found


@pytest.fixture
def kube(kube_bare: Cluster) -> Iterator[Cluster]:
    """With the CRD, and without anything of an earlier test."""
    kube_bare.kubectl("apply", "--server-side", "-f", str(CRD))
    until("the CRD is served", lambda: kube_bare.api("/apis/diloco.io/v1alpha1"), 20)
    yield kube_bare
    for item in kube_bare.items("/apis/diloco.io/v1alpha1/dilocojobs"):
        name = item["metadata"]["name"]
        kube_bare.kubectl("patch", "dj", name, "--type=merge", "-p", '{"metadata":{"finalizers":null}}', check=False)
        kube_bare.kubectl("delete", "dj", name, "--wait=false", check=False)
    kinds = "sts,deploy,svc,cm,pvc,pdb,pods"
    kube_bare.kubectl("delete", kinds, "-l", "diloco.io/job", "--grace-period=0", "--force", check=False)


@pytest.fixture
def operate(kube: Cluster, tmp_path: Path) -> Callable[..., Running]:
    """``operate(wants)``: an operator, to be entered."""
    key = key_file(tmp_path)

    def begin(wants: Wants | None = None, kubeconfig: Path | None = None, **settings: Any) -> Running:
        return Running(kubeconfig or kube.kubeconfig, wants or Wants(), key, **settings)

    return begin


def get(kube: Cluster, path: str) -> Any:
    return kube.api(path)


def named(kind: str, name: str) -> str:
    groups = {
        "statefulsets": "apis/apps/v1",
        "poddisruptionbudgets": "apis/policy/v1",
        "dilocojobs": "apis/diloco.io/v1alpha1",
    }
    return f"/{groups.get(kind, 'api/v1')}/namespaces/{NS}/{kind}/{name}"


def settled(kube: Cluster, name: str, seconds: float = 20) -> dict[str, Any]:
    """The job, once its objects are there and its status is written."""
    until(f"{name} has its objects", lambda: get(kube, named("statefulsets", f"{name}-local")), seconds)
    return dict(
        until(
            f"{name} has a status",
            lambda: (
                (found := get(kube, named("dilocojobs", name)))
                and "observedGeneration" in found.get("status", {})
                and found
            ),
            seconds,
        )
    )


def quiet(operator: Running, seconds: float) -> dict[tuple[str, str, str], int]:
    """What is asked in so many seconds, once what is under way has ended."""
    time.sleep(1.5)
    before = operator.requests()
    time.sleep(seconds)
    return operator.since(before)


def wants_secret(found: dict[str, Any]) -> str:
    return names.secret_name(found["metadata"]["name"], "learner", found["metadata"]["uid"])


def account(kube: Cluster, folder: Path, leave_out: set[tuple[str, str]]) -> Path:
    """A kubeconfig of a ServiceAccount with all that the operator needs but (resource, verb) in leave_out."""
    rules = [
        {
            "apiGroups": [need.group],
            "resources": [need.resource],
            "verbs": [verb for verb in need.verbs if (need.resource, verb) not in leave_out],
        }
        for need in (*needs(nodes=True), *OWN_NEEDS)
    ]
    rbac = "rbac.authorization.k8s.io"
    kube.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "small"}},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRole",
            "metadata": {"name": "small"},
            "rules": [rule for rule in rules if rule["verbs"]],
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "small"},
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "small"},
            "subjects": [{"kind": "ServiceAccount", "name": "small", "namespace": NS}],
        },
    )
    document = yaml.safe_load(kube.kubeconfig.read_text())
    document["users"][0]["user"] = {"token": kube.kubectl("create", "token", "small").strip()}
    made = folder / "small.kubeconfig"
    made.write_text(yaml.safe_dump(document))
    return made


def pod(name: str, job_name: str, role: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NS, "labels": names.labels(job_name, role)},
        "spec": {
            "containers": [{"name": role, "image": "none:none", "imagePullPolicy": "Never"}],
            "terminationGracePeriodSeconds": 0,
            **spec,
        },
    }


class Syncer:
    """A control service on 127.0.0.1, in a thread; believes as the real one does."""

    def __init__(self, key: bytes) -> None:
        self.key, self.nonces = key, NonceCache()
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.phase = "training"
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()
        assert self._ready.wait(10)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.run_forever()

    async def _serve(self) -> None:
        self.server = grpc.aio.server()
        method = grpc.unary_unary_rpc_method_handler(self._call)
        handler = grpc.method_handlers_generic_handler("diloco.v1.Control", {"Call": method})
        self.server.add_generic_rpc_handlers((handler,))
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self._ready.set()

    async def _call(self, raw: bytes, context: Any) -> bytes:
        call = convert.parse(sync_pb2.SignedCall, raw)
        verify_call(self.key, call, self.nonces)
        self.calls.append((call.method, json.loads(call.body)))
        documents = {"status": status_document(phase=self.phase), "report": job_report(outcome="complete")}
        answer = documents[call.method].model_dump_json().encode() if call.method in documents else b"{}"
        reply = sync_pb2.CallReply(ok=True, body=answer)
        sign_reply(self.key, call.nonce, reply)
        return reply.SerializeToString()

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.stop(0), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
