"""Links within a cluster are cut while what they join goes on.

The node that has the syncer is cut off from the other nodes' pods: no learner is taken. A node is cut off from the API
server alone, so that all that runs there goes on and reaches everybody else: neither the operator there nor a learner
that was replaced meanwhile (a zombie) changes anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from .clusters import Cluster, until
from .conftest import SYSTEM, install
from .jobs import Job, clock, pod_template
from .test_nodes import FAR, node_ready, on_node, prefers_far
from .test_syncer_pod import tape

NEAR = 0  # the node with the control plane
CUT_SECONDS = 90.0
LEARNERS = 8
LEARNER_CPU = "200m"
OPERATORS = "app.kubernetes.io/name=diloco-operator"


@pytest.fixture(autouse=True)
def two_nodes(cluster: Cluster) -> Iterator[None]:
    """Two nodes between which links can be cut, both well before and after."""
    if "links" not in cluster.can or len(cluster.nodes()) < 2:
        pytest.skip(f"{type(cluster).__name__} cannot cut links between nodes")
    yield
    until("both nodes are ready again", lambda: node_ready(cluster, NEAR) and node_ready(cluster, FAR), 120)


# ------------------------------------------------------------------ around the syncer's node


def spread_evenly(job: str) -> dict[str, Any]:
    """A template of learners of which each node gets as many."""
    template = pod_template("learner", LEARNER_CPU)
    template["spec"]["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": {"diloco.io/job": job, "diloco.io/role": "learner"}},
        }
    ]
    return template


@pytest.mark.promise(
    "After a cut of 90 s around the syncer's node all eight learners contribute again, whether half of "
    "them are beside the syncer or none"
)
@pytest.mark.parametrize("beside", [True, False], ids=["half-beside-it", "all-beyond"])
@pytest.mark.timeout(700)
def test_a_cut_around_the_syncers_node_takes_no_learner(cluster: Cluster, start: Any, beside: bool) -> None:
    """Eight learners; half of them, or none, are on the syncer's node, with the operator. Nobody is deleted or
    started again in 90 s, and all contribute afterwards."""
    name = "around" if beside else "beyond"
    template = spread_evenly(name) if beside else on_node(cluster, FAR, "learner", LEARNER_CPU)
    job: Job = start(
        name,
        syncer={"podTemplate": on_node(cluster, NEAR, "syncer", "200m")},
        regions=[{"name": "local", "learners": LEARNERS, "podTemplate": template}],
    )
    job.in_merges(LEARNERS, timeout=300)
    pods = job.identities() | job.identities("syncer")
    beyond = {p["metadata"]["name"] for p in job.pods("learner") if p["spec"]["nodeName"] == cluster.nodes()[FAR]}
    heard = LEARNERS - len(beyond)
    assert heard == (LEARNERS // 2 if beside else 0), beyond
    with cluster.without_link("pods", NEAR):
        began = clock()
        job.wait_training("those beyond are lost", lambda d: d["quorum"]["active"] == heard, 60)
        until("the operator sees it", lambda: job.status()["learners"] == f"{heard}/{LEARNERS}", 60)
        seen = clock() - began
        while clock() < began + CUT_SECONDS:
            assert job.identities() | job.identities("syncer") == pods, f"taken {clock() - began:.0f} s after the cut"
            assert node_ready(cluster, NEAR) and node_ready(cluster, FAR), "the API server was cut off, too"
            if heard:
                job.merging_on(merges=1)
    healed = clock()
    then = {s["slot"]: s["merged_pushes"] for s in job.training()["slots"]}
    document = job.wait_training(
        "all contribute again",
        lambda d: all(s["state"] == "active" and s["merged_pushes"] > then[s["slot"]] for s in d["slots"]),
        180,
    )
    took = clock() - healed
    back = sorted(e["time"] - healed for e in document["events"] if e["kind"] == "joined" and e["time"] > healed)
    print(
        f"cut for {healed - began:.0f} s, seen after {seen:.0f} s; back {back[0]:.1f} to {back[-1]:.1f} s after it, "
        f"all contribute after {took:.1f} s"
    )
    job.merging_on()
    assert job.identities() | job.identities("syncer") == pods, "a pod was taken after the cut"
    assert not [e["message"] for e in job.events() if e["reason"] == "LearnerDeleted"]
    assert job.status().get("replacements", {}).get("total", 0) == 0
    until("all are heard", lambda: job.status()["learners"] == f"{LEARNERS}/{LEARNERS}", 60)
    job.exact()


# ------------------------------------------------------------------ zombies


def operators(cluster: Cluster) -> dict[str, str]:
    """The operator's pods that are ready and not going: name -> node."""
    return {
        pod["metadata"]["name"]: pod["spec"]["nodeName"]
        for pod in cluster.items(f"/api/v1/namespaces/{SYSTEM}/pods", OPERATORS)
        if "deletionTimestamp" not in pod["metadata"]
        and any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))
    }


def lease(cluster: Cluster) -> dict[str, Any]:
    found = cluster.api(f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/diloco-operator")
    assert found is not None
    return dict(found["spec"])


def leader(cluster: Cluster) -> str:
    """The pod that has the Lease; empty: nobody has."""
    return str(lease(cluster)["holderIdentity"] or "").rpartition("_")[0]


@pytest.fixture
def far_leader(cluster: Cluster) -> Iterator[str]:
    """Two operators, one on each node, of which the far one leads: its pod."""
    install(cluster, "replicas=2", anywhere=True)
    try:

        def apart() -> bool:
            found = operators(cluster)
            if len(found) == 2 and len(set(found.values())) == 1:
                remove(sorted(found)[0])
            return len(found) == 2 and len(set(found.values())) == 2

        def remove(pod: str) -> None:
            cluster.kubectl("delete", "pod", pod, "-n", SYSTEM, "--timeout=60s")

        def far() -> str:
            found = operators(cluster)
            first = leader(cluster)
            if not apart():
                return ""  # the successor of one that was removed has come to the same node
            if first in found and found[first] != cluster.nodes()[FAR]:
                remove(first)  # the standby is given the Lease
                return ""
            return first if found.get(first) == cluster.nodes()[FAR] else ""

        until("an operator on each node", apart, 120, every=3)
        yield str(until("the far operator leads", far, 120, every=3))
    finally:
        until("the far node is ready", lambda: node_ready(cluster, FAR), 120)
        install(cluster)


def metrics(cluster: Cluster, operator: str) -> dict[str, float]:
    text = cluster.raw(f"/api/v1/namespaces/{SYSTEM}/pods/{operator}:7720/proxy/metrics").decode()
    rows = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in rows}


def acts(cluster: Cluster, operator: str) -> dict[str, float]:
    """What an operator has done, by its own count: writes but for the Lease, and calls to syncers that change
    something."""
    counted = r"diloco_operator_(api_requests|syncer_calls|deletions)_total\{.*"
    reads = r'.*(verb="(get|list|watch)"|resource="leases"|method="(status|report|learner-status)")'
    found = metrics(cluster, operator).items()
    return {name: value for name, value in found if re.match(counted, name) and not re.match(reads, name)}


def process_of(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["uid"]).replace("-", "")


def has_merged(process: str) -> Any:
    """Whether a push of the pod's process was merged in its present incarnation, of a status page."""
    return lambda d: any(
        s["process"].startswith(process)
        and any(
            (e["kind"], e["slot"], e["incarnation"]) == ("first-merge", s["slot"], s["incarnation"])
            for e in d["events"]
        )
        for s in d["slots"]
    )


@pytest.mark.promise(
    "If an operator cannot reach the API server, the other one takes over by the Lease, and the first "
    "does nothing, although it reaches the syncer"
)
@pytest.mark.timeout(900)
def test_an_operator_that_cannot_hear_the_api_server_takes_nothing(
    cluster: Cluster, start: Any, far_leader: str
) -> None:
    """It leads, its node loses the API server, and it reaches the syncer as before. The other takes over by the Lease;
    a learner is deleted then, so that the old one's view of pods is wrong."""
    near = on_node(cluster, NEAR, "learner", "300m")
    job: Job = start(
        "led",
        syncer={"podTemplate": on_node(cluster, NEAR, "syncer", "200m")},
        regions=[{"name": "local", "learners": 2, "podTemplate": near}],
    )
    job.in_merges(2)
    before, old = job.identities(), lease(cluster)
    with cluster.without_link("api", FAR):
        began = clock()
        until("the other operator leads", lambda: leader(cluster) not in ("", far_leader), 60)
        print(f"the other operator leads {clock() - began:.1f} s after the cut")
        done = acts(cluster, far_leader)
        assert done, "the zombie counts nothing: it cannot be seen to be quiet"
        assert metrics(cluster, leader(cluster))["diloco_operator_leader"] == 1
        cluster.kubectl("delete", "pod", "led-local-1", "-n", job.namespace, "--force", "--grace-period=0")
        new = until(
            "a successor",
            lambda: (p := job.pod("led-local-1")) and p["metadata"]["uid"] != before["led-local-1"][0] and p,
            60,
        )
        job.patch({"spec": {"ttlSecondsAfterFinished": 5000}})
        generation = job.object()["metadata"]["generation"]  # type: ignore[index]
        until("the other one acts", lambda: job.status()["observedGeneration"] == generation, 60)
        document = job.wait_training("the successor is in merges", has_merged(process_of(new)), 300)
        newest, moment = document["events"][-1]["n"], clock() + 30
        while clock() < moment:  # a zombie's turns are at most some seconds apart
            document = job.merging_on(merges=1)
            told = [e for e in document["events"] if e["kind"] == "process-ended" and e["n"] > newest]
            assert not told, f"somebody said that a learner had ended that had not: {told}"
            assert any(s["process"].startswith(process_of(new)) for s in document["slots"]), "it has lost its slot"
        assert acts(cluster, far_leader) == done, "the zombie has acted"
        assert metrics(cluster, far_leader)["diloco_operator_leader"] == 0, "it does not know that it leads no more"
        assert job.identities()["led-local-0"] == before["led-local-0"]
        assert job.pod("led-local-1")["metadata"]["uid"] == new["metadata"]["uid"]  # type: ignore[index]
    until("the far node is heard again", lambda: node_ready(cluster, FAR), 120)
    now = lease(cluster)
    assert now["leaseTransitions"] == old["leaseTransitions"] + 1 and leader(cluster) != far_leader
    job.merging_on()
    job.exact()


@pytest.mark.promise(
    "A learner that was replaced while its node was cut off from the API server, and that trains on, has "
    "no slot and is in no merge"
)
@pytest.mark.timeout(900)
def test_a_learner_on_a_node_that_the_api_server_does_not_hear_is_fenced(cluster: Cluster, start: Any) -> None:
    """The zombie trains on and reaches the syncer. Once its successor, on another node, has joined, the syncer takes
    it no more, however often it comes, and nothing of it is merged."""
    job: Job = start(
        "fenced",
        sync={"heartbeat": {"intervalSeconds": 1, "timeoutSeconds": 5}},
        syncer={"podTemplate": on_node(cluster, NEAR, "syncer", "200m")},
        regions=[
            {"name": "near", "learners": 1, "podTemplate": on_node(cluster, NEAR, "learner", "300m")},
            {"name": "far", "learners": 1, "podTemplate": prefers_far(cluster)},
        ],
        nodeLoss={"policy": "ForceDelete", "afterSeconds": 10},
    )
    job.in_merges(2)
    old = job.pod("fenced-far-0")
    assert old is not None and old["spec"]["nodeName"] == cluster.nodes()[FAR]
    zombie, near = process_of(old), job.identities()["fenced-near-0"]
    with cluster.without_link("api", FAR):
        began = clock()
        until("the node counts as lost", lambda: not node_ready(cluster, FAR), 60)
        assert any(s["process"].startswith(zombie) and s["state"] == "active" for s in job.training()["slots"])
        new = until(
            "a successor on the other node",
            lambda: (
                (p := job.pod("fenced-far-0"))
                and p["metadata"]["uid"] != old["metadata"]["uid"]
                and p["spec"].get("nodeName") == cluster.nodes()[NEAR]
                and p
            ),
            150,
        )
        document = job.wait_training("the successor is in merges", has_merged(process_of(new)), 300)
        print(f"replaced and in a merge {clock() - began:.1f} s after the cut")
        row = next(s for s in document["slots"] if s["process"].startswith(process_of(new)))
        # The API server knows no such pod any more, so its node is asked.
        page = ("curl", "-sf", "-m", "3", f"http://{old['status']['podIP']}:7710/status")
        until("the zombie lives", lambda: zombie in cluster.run_in_node(FAR, *page), 90)
        moment = clock() + 20
        while clock() < moment:
            rows = job.training()["slots"]
            assert not any(s["process"].startswith(zombie) for s in rows), "the zombie has a slot"
            assert any(s["incarnation"] == row["incarnation"] and s["state"] == "active" for s in rows)
            job.merging_on(merges=2)
    until("the far node is heard again", lambda: node_ready(cluster, FAR), 120)
    job.merging_on()
    document = job.training()
    theirs = {
        (e["slot"], e["incarnation"])
        for e in document["events"]
        if str(e["details"].get("process", "")).startswith(zombie)
    }
    assert theirs, "the zombie's incarnations are not among the events"
    merges = [{(r["slot"], r["incarnation"]) for r in line["responders"]} for line in tape(job) if "responders" in line]
    first = next(i for i, pairs in enumerate(merges) if (row["slot"], row["incarnation"]) in pairs)
    assert any(theirs & pairs for pairs in merges[:first]), "it was in merges before"
    assert not theirs & set().union(*merges[first:]) and len(merges) > first + 1, "a push of the zombie was merged"
    assert job.identities()["fenced-near-0"] == near
    job.exact()
