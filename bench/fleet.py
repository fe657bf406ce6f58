"""A cluster with simulated nodes for the operator's benchmark: addresses, the operator's rights, jobs.

The nodes are kwok's: their pods run at once, as objects of the API server alone. Each node is
given a range of pod addresses out of those set aside for benchmarks (RFC 2544), and these ranges
are made local to this machine while the benchmark runs, so that one process on it can answer
for every pod, and no packet leaves it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from diloco_operator.kube import kinds
from diloco_operator.kube.client import MERGE_PATCH
from diloco_operator.kube.errors import ApiError
from kubeapi import Api

CRD = Path(__file__).resolve().parent.parent / "manifests" / "crd.yaml"
CLUSTER = "lkbench"
NAMESPACE = "diloco-bench"  # the operator's own
ACCOUNT = "diloco-operator"
RANGE = ipaddress.IPv4Network("198.18.0.0/15")
NODE_BITS = 20  # a node's share of it
NODE_PODS = 1000
JOBS_PER_NAMESPACE = 50
SIMULATED = {"type": "kwok"}
TAINT = "kwok.x-k8s.io/node"


class NoCluster(Exception):
    """There is no cluster to measure on, or it did not come to what was expected; the message has more."""


class NotYet(Exception):
    """What is waited for is not so yet; the message says what is."""


# ------------------------------------------------------------------ the cluster


def run(*command: str, timeout: float = 600) -> str:
    """The command's stdout. Raises NoCluster with what it said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode:
        raise NoCluster(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


@contextlib.contextmanager
def cluster(kubeconfig: str | None, pods: int, keep: bool) -> Iterator[str]:
    """The kubeconfig of a cluster with room for so many simulated pods. ``kubeconfig`` None: a localkube
    cluster, made now and deleted in the end unless ``keep``. Raises NoCluster."""
    if kubeconfig is not None:
        yield kubeconfig
        return
    program = os.environ.get("LOCALKUBE") or shutil.which("localkube")
    if program is None:
        raise NoCluster(
            "no cluster: name localkube's program in $LOCALKUBE, or give --kubeconfig of a cluster in which "
            f"kwok simulates nodes that are labelled type=kwok and tainted {TAINT}"
        )
    path = run(program, "up", CLUSTER).strip().splitlines()[-1]
    try:
        run(program, "fake-nodes", CLUSTER, str(-(-pods * 5 // 4 // NODE_PODS)))
        yield path
    finally:
        if not keep:
            run(program, "down", CLUSTER)


def give_addresses(api: Api) -> list[str]:
    """Give every simulated node that has none a range of pod addresses; all ranges. Raises NoCluster."""
    nodes = list(api.items("/api/v1/nodes", query={"labelSelector": "type=kwok"}))
    if not nodes:
        raise NoCluster("the cluster has no node with the label type=kwok")
    have = {cidr for node in nodes if (cidr := node["spec"].get("podCIDR"))}
    free = (str(net) for net in RANGE.subnets(new_prefix=NODE_BITS) if str(net) not in have)
    for node in nodes:
        if not node["spec"].get("podCIDR"):
            cidr = next(free)
            have.add(cidr)
            body = {"spec": {"podCIDR": cidr, "podCIDRs": [cidr]}}
            api.request("PATCH", f"/api/v1/nodes/{node['metadata']['name']}", body=body, content=MERGE_PATCH)
    outside = sorted(cidr for cidr in have if not ipaddress.IPv4Network(cidr).subnet_of(RANGE))
    if outside:
        raise NoCluster(f"pods would get addresses in {', '.join(outside)}, which are not {RANGE}")
    return sorted(have)


@contextlib.contextmanager
def local_addresses() -> Iterator[None]:
    """Every address of ``RANGE`` is this machine's. Needs the right to change routes. Raises NoCluster."""
    route = ("local", str(RANGE), "dev", "lo")
    there = run("ip", "route", "show", "table", "local", *route[1:2]).strip()
    if not there:
        for line in run("ip", "route", "show").splitlines():
            first = line.split()[0]
            if first != "default" and "/" in first and ipaddress.ip_network(first).overlaps(RANGE):
                raise NoCluster(f"this machine has a route to {first}, which the benchmark would take over")
        run("ip", "route", "add", *route)
    try:
        yield
    finally:
        if not there:
            run("ip", "route", "del", *route)


# ------------------------------------------------------------------ the operator's rights


def admit_operator(api: Api, folder: Path, kubeconfig: str) -> str:
    """The CRD, the operator's namespace, ServiceAccount and rights; the path of a kubeconfig with these
    rights. The API server counts this account's requests apart (``requests_counted``)."""
    definition = yaml.safe_load(CRD.read_text(encoding="utf-8"))
    name = definition["metadata"]["name"]
    api.apply(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}", definition)
    api.apply(f"/api/v1/namespaces/{NAMESPACE}", _named("v1", "Namespace", NAMESPACE))
    account = _named("v1", "ServiceAccount", ACCOUNT, NAMESPACE)
    api.apply(f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{ACCOUNT}", account)
    access = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}
    for prefix, namespace, needs in (("Cluster", "", kinds.needs(nodes=True)), ("", NAMESPACE, kinds.OWN_NEEDS)):
        rules = [{"apiGroups": [need.group], "resources": [need.resource], "verbs": list(need.verbs)} for need in needs]
        role = _named(f"{access}/v1", f"{prefix}Role", NAMESPACE, namespace) | {"rules": rules}
        binding = _named(f"{access}/v1", f"{prefix}RoleBinding", NAMESPACE, namespace) | {
            "roleRef": {"apiGroup": access, "kind": f"{prefix}Role", "name": NAMESPACE},
            "subjects": [subject],
        }
        path = f"/apis/{access}/v1" + (f"/namespaces/{namespace}" if namespace else "")
        api.apply(f"{path}/{prefix.lower()}roles/{NAMESPACE}", role)
        api.apply(f"{path}/{prefix.lower()}rolebindings/{NAMESPACE}", binding)
    flows = "flowcontrol.apiserver.k8s.io"
    everything = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "clusterScope": True}
    who = {"kind": "ServiceAccount", "serviceAccount": {"name": ACCOUNT, "namespace": NAMESPACE}}
    # The level is the one that a ServiceAccount's requests have without it.
    schema = _named(f"{flows}/v1", "FlowSchema", NAMESPACE) | {
        "spec": {
            "matchingPrecedence": 500,
            "priorityLevelConfiguration": {"name": "workload-low"},
            "distinguisherMethod": {"type": "ByUser"},
            "rules": [
                {
                    "subjects": [who],
                    "resourceRules": [everything | {"namespaces": ["*"]}],
                    "nonResourceRules": [{"verbs": ["*"], "nonResourceURLs": ["*"]}],
                }
            ],
        }
    }
    api.apply(f"/apis/{flows}/v1/flowschemas/{NAMESPACE}", schema)
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{ACCOUNT}/token"
    token = api.request("POST", path, body={"spec": {"expirationSeconds": 24 * 3600}})["status"]["token"]
    return _kubeconfig(Path(kubeconfig), token, folder / "operator.kubeconfig")


def _named(version: str, kind: str, name: str, namespace: str = "") -> dict[str, Any]:
    meta = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": version, "kind": kind, "metadata": meta}


def _kubeconfig(source: Path, token: str, path: Path) -> str:
    document = yaml.safe_load(source.read_text(encoding="utf-8"))
    context = next(c["context"] for c in document["contexts"] if c["name"] == document["current-context"])
    entry = next(c for c in document["clusters"] if c["name"] == context["cluster"])
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "operator",
        "clusters": [entry],
        "users": [{"name": "operator", "user": {"token": token}}],
        "contexts": [{"name": "operator", "context": {"cluster": entry["name"], "user": "operator"}}],
    }
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return str(path)


def requests_counted(api: Api) -> float:
    """Requests of the operator's account since the API server started, as the API server counts."""
    total = 0.0
    with api.stream("GET", "/metrics", silence=30.0, total=30.0, accept="*/*") as reply:
        page = reply.read().decode()
    for line in page.splitlines():
        if line.startswith("apiserver_flowcontrol_dispatched_requests_total") and f'"{NAMESPACE}"' in line:
            total += float(line.rpartition(" ")[2])
    return total


# ------------------------------------------------------------------ the jobs


def namespaces(jobs: int) -> list[str]:
    """The namespaces of so many jobs."""
    return [f"{NAMESPACE}-{n}" for n in range(-(-jobs // JOBS_PER_NAMESPACE))]


def job(number: int, pods: int, beat: float) -> dict[str, Any]:
    """A job of so many pods: a syncer, an evaluator and learners. ``beat``: between two heartbeats."""

    def template(container: str) -> dict[str, Any]:
        small = {"name": container, "resources": {"requests": {"cpu": "1m", "memory": "1Mi"}}}
        tolerated = [{"key": TAINT, "operator": "Exists"}]
        return {"spec": {"nodeSelector": SIMULATED, "tolerations": tolerated, "containers": [small]}}

    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
    return {
        "apiVersion": "diloco.io/v1alpha1",
        "kind": "DiLoCoJob",
        "metadata": {"name": f"job-{number}", "namespace": namespaces(number + 1)[-1]},
        "spec": {
            "training": {
                "model": {"config": config | {"num_attention_heads": 4, "num_key_value_heads": 4}},
                "data": {"source": "text", "paths": ["corpus/*.txt"], "tokenizer": "bytes"},
                "stop": {"steps": 1_000_000},
            },
            "sync": {
                "fragments": 2,
                "every": 4,
                "overlap": 1,
                "quorum": 1,
                "heartbeat": {"intervalSeconds": beat, "timeoutSeconds": 6 * beat},
            },
            "syncer": {"storage": {"size": "1Gi", "onDelete": "Delete"}, "podTemplate": template("syncer")},
            "learners": {"podTemplate": template("learner")},
            "regions": [{"name": "local", "learners": pods - 2}],
        },
    }


JOBS = "/apis/diloco.io/v1alpha1"


def create_jobs(api: Api, jobs: int, pods: int, beat: float) -> float:
    """All of them; the seconds that it took."""
    began = time.monotonic()
    for number in range(jobs):
        document = job(number, pods, beat)
        api.request("POST", f"{JOBS}/namespaces/{document['metadata']['namespace']}/dilocojobs", body=document)
    return time.monotonic() - began


def make_namespaces(api: Api, jobs: int) -> None:
    for name in namespaces(jobs):
        api.apply(f"/api/v1/namespaces/{name}", _named("v1", "Namespace", name))


def statuses(api: Api) -> list[dict[str, Any]]:
    """The status of every job."""
    return [item.get("status") or {} for item in api.items(f"{JOBS}/dilocojobs", page=100)]


def whole(status: dict[str, Any]) -> bool:
    """Whether a job runs with all of its learners in the quorum, as its status says."""
    active, _, wanted = str(status.get("learners") or "").partition("/")
    return status.get("phase") == "Running" and bool(active) and active == wanted


def until(what: str, holds: Callable[[], Any], seconds: float, every: float = 1.0) -> float:
    """Wait until it holds; the seconds that it took. Raises NoCluster with ``what`` and the last value."""
    began = time.monotonic()
    value: Any = None
    while time.monotonic() - began < seconds:
        try:
            if value := holds():
                return time.monotonic() - began
        except (ApiError, NotYet, OSError) as error:
            value = error
        time.sleep(every)
    raise NoCluster(f"after {seconds:.0f} s: not {what} ({value})")
