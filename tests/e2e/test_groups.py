"""Learners of several pods, each of several ranks: one learner to the job, lost and replaced as one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .clusters import Cluster, until
from .jobs import Job, pod_template
from .test_nodes import FAR, far_node, on_node
from .test_replacement import replaced, said

__all__ = ["far_node"]  # a fixture
PAIRS = {"processes": 2, "pods": 2, "podTemplate": pod_template("learner", None, "2Gi")}
PATIENT = {"heartbeat": {"intervalSeconds": 1, "timeoutSeconds": 30}}


@pytest.mark.promise(
    "On a real cluster a learner of two pods of two ranks trains, and is replaced as one when a pod of it is deleted; "
    "the pods of other learners stay"
)
@pytest.mark.timeout(900)
def test_a_pod_of_a_learner_of_two_is_deleted(cluster: Cluster, start: Any) -> None:
    job: Job = start("grouped", learners=PAIRS, regions=[{"name": "local", "learners": 2}], sync=PATIENT)
    job.in_merges(2, timeout=400)
    assert job.status()["learners"] == "2/2"
    before = job.identities()
    assert sorted(before) == [f"grouped-local-{i}" for i in range(4)]
    cluster.kubectl("delete", "pod", "grouped-local-3", "-n", job.namespace, "--wait=false")
    for pod in ("grouped-local-2", "grouped-local-3"):
        until(f"a successor of {pod}", lambda pod=pod: job.identities().get(pod, before[pod])[0] != before[pod][0], 180)
    job.in_merges(2, timeout=400)
    now = job.identities()
    assert {name: now[name] for name in list(before)[:2]} == {name: before[name] for name in list(before)[:2]}
    until("it is told", lambda: said(job, "LearnerReplaced", "grouped-local-2"), 60)
    job.exact()


@pytest.mark.promise(
    "On a real cluster a learner of two pods is drained as one when a pod of it is evicted, takes an edit as one, and "
    "is scaled as one"
)
@pytest.mark.timeout(1500)
def test_a_learner_of_two_is_evicted_edited_and_scaled(cluster: Cluster, start: Any) -> None:
    job: Job = start("paired", learners=PAIRS, regions=[{"name": "local", "learners": 2}], sync=PATIENT)
    job.in_merges(2, timeout=400)
    first = job.identities()
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "paired-local-1"}}
    path = f"/api/v1/namespaces/{job.namespace}/pods/paired-local-1/eviction"
    cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))
    _wait_changed(job, first, {"paired-local-0", "paired-local-1"})
    job.in_merges(2, timeout=400)
    until("its return is told", lambda: said(job, "LearnerReplaced", "paired-local-0"), 60)
    assert replaced(job) == 0, "an eviction is no fault of the job's"

    second = job.identities()
    edited = pod_template("learner", None, "2Gi", requested="80Mi")
    job.patch({"spec": {"learners": {"podTemplate": edited}}})
    _wait_changed(job, second, set(second), at_once=2)
    until("the rollout is over", lambda: said(job, "RolledOut", "region local"), 200)
    for learner in ("paired-local-0", "paired-local-2"):
        assert said(job, "RollingOut", f"Learner {learner} is restarted")

    third = job.in_merges(2, timeout=400) and job.identities()
    job.patch({"spec": {"regions": [{"name": "local", "learners": 1}]}})
    until("two pods are left", lambda: sorted(job.identities()) == ["paired-local-0", "paired-local-1"], 120)
    job.merging_on(timeout=120)
    assert job.identities() == {name: third[name] for name in ("paired-local-0", "paired-local-1")}
    until("one learner is counted", lambda: job.status()["learners"] == "1/1", 60)
    job.exact()


def _wait_changed(job: Job, before: dict[str, tuple[str, int]], pods: set[str], at_once: int = 4) -> None:
    """Wait until these pods have successors, and none of the others has; of no more than ``at_once`` pods at a time
    neither the old one nor its successor runs."""

    def changed() -> bool:
        running = [p for p in job.pods("learner") if p["status"].get("phase") == "Running"]
        there = [p for p in running if "deletionTimestamp" not in p["metadata"]]
        assert len(there) >= len(before) - at_once, [p["metadata"]["name"] for p in there]
        now = job.identities()
        return {name for name in before if now.get(name, before[name])[0] != before[name][0]} == pods

    until(f"successors of {sorted(pods)}", changed, 400)


@pytest.mark.promise(
    "On a real cluster a learner whose pods are on two nodes is replaced as one when one of the nodes is lost"
)
@pytest.mark.timeout(1200)
def test_a_node_with_half_a_learner_is_lost(cluster: Cluster, start: Any, far_node: Any) -> None:
    lose, back = far_node
    template = pod_template("learner", None, "2Gi")
    term = {
        "labelSelector": {"matchLabels": {"diloco.io/job": "halved", "diloco.io/role": "learner"}},
        "topologyKey": "kubernetes.io/hostname",
    }
    weighted = [{"weight": 100, "podAffinityTerm": term}]
    template["spec"]["affinity"] = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": weighted}}
    job: Job = start(
        "halved",
        learners=PAIRS | {"podTemplate": template},
        regions=[{"name": "local", "learners": 1}],
        sync=PATIENT,
        syncer={"podTemplate": on_node(cluster, 0, "syncer", "200m")},
        nodeLoss={"policy": "ForceDelete", "afterSeconds": 10},
    )
    job.in_merges(1, timeout=400)
    nodes = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in job.pods("learner")}
    assert set(nodes.values()) == set(cluster.nodes()[: FAR + 1]), nodes
    before = job.identities()
    lose("stop-node")
    _wait_changed(job, before, set(before))
    job.in_merges(1, timeout=400)
    assert {pod["spec"]["nodeName"] for pod in job.pods("learner")} == {cluster.nodes()[0]}
    job.merging_on(timeout=120)
    back()
    job.exact()
