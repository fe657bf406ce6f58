"""5. A node is lost, dead or cut off with its pods alive, under ForceDelete and under Wait.
6. The API server is gone for 30 s."""

from __future__ import annotations

import re
from typing import Any

import pytest

from .clusters import Cluster, until
from .jobs import Job, clock, pod_template
from .test_syncer_pod import tape

FAR = 1  # the node that is lost; node 0 carries the control plane and, in these tests, the operator


def on_node(cluster: Cluster, number: int, container: str, cpu: str | None) -> dict[str, Any]:
    template = pod_template(container, cpu)
    template["spec"]["nodeSelector"] = {"kubernetes.io/hostname": cluster.nodes()[number]}
    return template


def node_ready(cluster: Cluster, number: int) -> bool:
    node = cluster.api(f"/api/v1/nodes/{cluster.nodes()[number]}")
    assert node is not None
    return any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"]["conditions"])


@pytest.fixture
def far_node(cluster: Cluster) -> Any:
    """The node that may be lost; brought back whatever happens."""
    if "node" not in cluster.can or len(cluster.nodes()) < 2:
        pytest.skip(f"{type(cluster).__name__} cannot lose a node")
    lost: list[str] = []

    def lose(word: str) -> None:
        lost.append({"stop-node": "start-node", "isolate": "rejoin"}[word])
        cluster.fault(word, str(FAR))

    def back() -> None:
        while lost:
            cluster.fault(lost.pop(), str(FAR))
        until("the node is ready again", lambda: node_ready(cluster, FAR), 120)

    yield lose, back
    back()


@pytest.mark.promise(
    "With `ForceDelete` a learner of a lost node is replaced on another node, and nothing of the old "
    "process is merged once its successor takes part"
)
@pytest.mark.parametrize("loss", [pytest.param("stop-node", marks=pytest.mark.ci), pytest.param("isolate")])
@pytest.mark.timeout(600)
def test_a_learner_is_replaced_elsewhere(cluster: Cluster, start: Any, far_node: Any, loss: str) -> None:
    lose, back = far_node
    job = start(
        f"force-{loss.split('-')[0]}",
        sync={"heartbeat": {"intervalSeconds": 1, "timeoutSeconds": 5}},
        syncer={"podTemplate": on_node(cluster, 0, "syncer", "200m")},
        regions=[
            {"name": "near", "learners": 1, "podTemplate": on_node(cluster, 0, "learner", "300m")},
            {"name": "far", "learners": 1, "podTemplate": prefers_far(cluster)},
        ],
        nodeLoss={"policy": "ForceDelete", "afterSeconds": 10},
    )
    before = job.in_merges(2)
    old = job.pod(f"{job.name}-far-0")
    assert old is not None and old["spec"]["nodeName"] == cluster.nodes()[FAR]
    theirs = old["metadata"]["uid"].replace("-", "")
    lost = next(row for row in before["slots"] if row["process"].startswith(theirs))
    near = job.identities()[f"{job.name}-near-0"]
    began = clock()
    lose(loss)
    told = job.training()
    job.merging_on()  # the one that is left goes on
    new = until(
        "a successor on another node",
        lambda: (
            (p := job.pod(old["metadata"]["name"])) is not None
            and p["metadata"]["uid"] != old["metadata"]["uid"]
            and p["spec"].get("nodeName") == cluster.nodes()[0]
            and p
        ),
        150,
    )
    mine = new["metadata"]["uid"].replace("-", "")
    document = job.wait_training(
        "the successor is in merges",
        lambda d: any(
            s["process"].startswith(mine) and (e["kind"], e["incarnation"]) == ("first-merge", s["incarnation"])
            for s in d["slots"]
            for e in d["events"]
        ),
        120,
    )
    print(f"{loss}: replaced and in a merge {clock() - began:.1f} s after the node was lost")
    back()
    # The old incarnation, alive on the isolated node, does not take its place back.
    began = clock()
    while clock() < began + 20:
        rows = job.training()["slots"]
        assert not any(s["process"].startswith(theirs) and s["state"] == "active" for s in rows)
        job.merging_on(merges=2)
    assert job.identities()[f"{job.name}-near-0"] == near
    assert job.training()["epoch"] == told["epoch"]
    # And nothing that it pushed is in a merge since its successor was in one.
    row = next(row for row in document["slots"] if row["process"].startswith(mine))
    merges = [{(r["slot"], r["incarnation"]) for r in line["responders"]} for line in tape(job) if "responders" in line]
    first = next(i for i, pairs in enumerate(merges) if (row["slot"], row["incarnation"]) in pairs)
    late = set().union(*merges[first:])
    assert (lost["slot"], lost["incarnation"]) not in late and len(merges) > first + 1
    job.exact()


def prefers_far(cluster: Cluster) -> dict[str, Any]:
    """A template whose pod goes to the far node while that is there, and elsewhere when it is not."""
    template = pod_template("learner", "300m")
    term = {
        "weight": 100,
        "preference": {
            "matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [cluster.nodes()[FAR]]}]
        },
    }
    template["spec"]["affinity"] = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}
    return template


@pytest.mark.parametrize("loss", ["stop-node", "isolate"])
@pytest.mark.timeout(600)
def test_under_wait_it_is_told_and_comes_back(cluster: Cluster, start: Any, far_node: Any, loss: str) -> None:
    lose, back = far_node
    job = start(
        f"wait-{loss.split('-')[0]}",
        sync={"heartbeat": {"intervalSeconds": 1, "timeoutSeconds": 5}},
        syncer={"podTemplate": on_node(cluster, 0, "syncer", "200m")},
        regions=[
            {"name": "near", "learners": 1, "podTemplate": on_node(cluster, 0, "learner", "300m")},
            {"name": "far", "learners": 1, "podTemplate": on_node(cluster, FAR, "learner", "300m")},
        ],
        nodeLoss={"policy": "Wait", "afterSeconds": 10},
    )
    job.in_merges(2)
    uid = job.pod(f"{job.name}-far-0")["metadata"]["uid"]  # type: ignore[index]
    lose(loss)
    node = cluster.nodes()[FAR]
    until(
        "status names the node", lambda: any(node in region.get("cause", "") for region in job.status()["regions"]), 150
    )
    until("the pod is on its way", lambda: "deletionTimestamp" in job.pod(f"{job.name}-far-0")["metadata"], 120)  # type: ignore[index]
    began = clock()
    until("some time after its grace", lambda: clock() > began + 45, 60)
    left = job.pod(f"{job.name}-far-0")
    assert left is not None and left["metadata"]["uid"] == uid, "it was force-deleted under Wait"
    job.merging_on()
    back()
    job.in_merges(2, timeout=180)
    job.exact()


@pytest.mark.parametrize(
    ("policy", "loss"), [("ForceDelete", "stop-node"), ("ForceDelete", "isolate"), ("Wait", "stop-node")]
)
@pytest.mark.timeout(700)
def test_the_syncers_node(cluster: Cluster, start: Any, far_node: Any, policy: str, loss: str) -> None:
    lose, back = far_node
    template = prefers_far(cluster)
    template["spec"]["containers"] = pod_template("syncer", "200m")["spec"]["containers"]
    if policy == "Wait":
        template["spec"].pop("affinity")
        template["spec"]["nodeSelector"] = {"kubernetes.io/hostname": cluster.nodes()[FAR]}
    job = start(
        f"hub-{policy.lower()}-{loss.split('-')[0]}",
        syncer={"podTemplate": template},
        regions=[{"name": "near", "learners": 2, "podTemplate": on_node(cluster, 0, "learner", "300m")}],
        nodeLoss={"policy": policy, "afterSeconds": 10},
    )
    before = job.in_merges(2)
    assert job.syncer_pod()["spec"]["nodeName"] == cluster.nodes()[FAR]
    learners = job.identities()
    lose(loss)
    if policy == "Wait":
        found = job.wait_condition("SyncerReady", "False", timeout=150)
        assert cluster.nodes()[FAR] in until(
            "the condition names the node",
            lambda: (m := job.condition("SyncerReady")["message"]) and cluster.nodes()[FAR] in m and m,
            150,
        ), found
        assert re.search("out-of-service", job.condition("SyncerReady")["message"])
        back()
    after = job.wait_training("a raised epoch", lambda d: d["epoch"] > before["epoch"], 240)
    assert all(a >= b for a, b in zip(after["versions"], before["versions"], strict=True))
    job.merging_on(timeout=120)
    assert job.identities() == learners, "a learner restarted"
    back()
    job.merging_on()
    job.exact()
    # Also where the old one lived on, cut off, beside its successor and over the same volume.
    epochs = [line["epoch"] for line in tape(job) if "epoch" in line and "version" in line]
    assert epochs and epochs == sorted(epochs), "two syncers wrote at once"
    if loss == "isolate":
        assert job.training()["epoch"] == after["epoch"], "the two have taken the store from each other"


@pytest.mark.timeout(400)
def test_training_goes_on_without_the_api_server(cluster: Cluster, start: Any) -> None:
    if "api" not in cluster.can:
        pytest.skip(f"{type(cluster).__name__} cannot stop the API server")
    job: Job = start("alone", learners=2)
    before = job.in_merges(2)
    pods = job.identities() | job.identities("syncer")
    cluster.fault("stop-api")
    try:
        began = clock()
        until("30 seconds without it", lambda: clock() > began + 30, 60, every=1)
    finally:
        cluster.fault("start-api")
    until("the API server answers", lambda: cluster.nodes(), 60)
    after = job.wait_training("a status page", lambda d: True, 60)
    assert after["epoch"] == before["epoch"]
    times = [line["time"] - began for line in tape(job) if line.get("kind") == "merge"]
    meanwhile = sum(5 <= moment <= 30 for moment in times)
    assert meanwhile > 5, f"{meanwhile} merges in 25 seconds without it"
    assert job.identities() | job.identities("syncer") == pods
    job.merging_on()
    # The operator is with us again: it acts on what is asked of it now.
    job.patch({"spec": {"suspend": True}})
    job.wait_condition("Suspended", timeout=120)
