"""A syncer whose shards have pods of their own, with its state in a bucket: a shard's pod is deleted, a shard's node is
lost, and the job trains to its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .buckets import bucket
from .clusters import Cluster, until
from .jobs import Job, clock
from .test_nodes import FAR, far_node, on_node, prefers_far

__all__ = ["far_node"]


def serving(document: dict[str, Any]) -> bool:
    """Whether every shard has fragments and is there."""
    return all(row["serving"] and row["fragments"] for row in document["shards"]) and len(document["shards"]) == 2


def prefers(cluster: Cluster, number: int) -> dict[str, Any]:
    """An affinity with which a pod goes to this node while that is there, and elsewhere when it is not."""
    affinity: dict[str, Any] = prefers_far(cluster)["spec"]["affinity"]
    (preferred,) = affinity["nodeAffinity"].values()
    preferred[0]["preference"]["matchExpressions"][0]["values"] = [cluster.nodes()[number]]
    return affinity


def shard_pod(job: Job, shard: int) -> dict[str, Any]:
    """The shard's pod that is not going. Raises KeyError."""
    for pod in job.pods("shard"):
        metadata = pod["metadata"]
        if metadata["labels"]["diloco.io/shard"] == str(shard) and "deletionTimestamp" not in metadata:
            return pod
    raise KeyError(f"no pod of shard {shard}")


def back_again(job: Job, shard: int, before: dict[str, Any], timeout: float = 120) -> dict[str, Any]:
    """Wait until a shard that was lost is back, and every fragment has had a merge since then."""
    newest = max((event["n"] for event in before["events"]), default=0)

    def said(document: dict[str, Any], kind: str) -> bool:
        words = (event["message"] for event in document["events"] if event["n"] > newest and event["kind"] == kind)
        return any(text.startswith(f"shard {shard} is ") for text in words)

    lost = job.wait_training(f"shard {shard} is lost", lambda d: said(d, "shard-lost"), timeout)
    ready = job.wait_training(f"shard {shard} is back", lambda d: said(d, "shard-ready") and serving(d), timeout)
    after = job.wait_training(
        "a merge of each fragment",
        lambda d: all(now > then for now, then in zip(d["versions"], ready["versions"], strict=True)),
        timeout,
    )
    assert {before["epoch"], lost["epoch"], after["epoch"]} == {before["epoch"]}, "the syncer began again"
    return dict(after)


@pytest.mark.promise("Shards of the syncer can have pods of their own, on any node, and each is replaced alone")
@pytest.mark.timeout(900)
def test_shards_have_pods_of_their_own(cluster: Cluster, start: Any, tmp_path: Path) -> None:
    with bucket(cluster, tmp_path) as syncer:
        job: Job = start("sharded", learners=2, syncer={**syncer, "shards": 2, "shardPods": {}})
        before = job.in_merges(2)
        assert serving(before), before["shards"]
        job.wait_condition("SyncerReady", timeout=60)
        others = job.identities() | job.identities("syncer")
        survivor, victim = (shard_pod(job, shard)["metadata"] for shard in (0, 1))
        began = clock()
        cluster.kubectl("delete", "pod", victim["name"], "-n", job.namespace, "--wait=false")
        after = back_again(job, 1, before)
        print(f"a shard that was deleted is in merges again {clock() - began:.1f} s later")
        assert shard_pod(job, 0)["metadata"]["uid"] == survivor["uid"]
        assert shard_pod(job, 1)["metadata"]["uid"] != victim["uid"]
        assert job.identities() | job.identities("syncer") == others, "another pod was started again"
        assert job.training()["quorum"]["active"] == 2

        # With the syncer's pod the shards live on, and serve its successor.
        shards = job.identities("shard")
        cluster.kubectl("delete", "pod", job.syncer_pod()["metadata"]["name"], "-n", job.namespace, "--wait=false")
        job.wait_training("a raised epoch", lambda d: d["epoch"] > after["epoch"] and serving(d), 180)
        job.merging_on()
        assert job.identities("shard") == shards, "a shard was started again"

        # Suspended, nothing of it runs; and it goes on with another number of shards.
        job.patch({"spec": {"suspend": True}})
        job.wait_condition("Suspended", timeout=180)
        until("no pod", lambda: not job.pods(), 60)
        job.patch({"spec": {"suspend": False, "syncer": {"shards": 1, "shardPods": None}}})
        job.in_merges(2)
        assert not job.training()["shards"] and not job.pods("shard")
        job.patch({"spec": {"syncer": {"shards": 2, "shardPods": {}}}})
        job.wait_training("shards again", serving, 180)
        job.merging_on()
        stop = job.training()["tokens"]["trained"] + 100_000
        job.patch({"spec": {"training": {"stop": {"tokens": stop}}}})
        job.wait_condition("Complete", timeout=300)
        job.exact()
        job.delete()  # while its bucket is there


@pytest.mark.timeout(900)
def test_a_shards_node_is_lost(cluster: Cluster, start: Any, far_node: Any, tmp_path: Path) -> None:
    lose, back = far_node
    with bucket(cluster, tmp_path) as syncer:
        near = on_node(cluster, 0, "learner", "300m")
        template = syncer.pop("podTemplate")
        template["spec"]["affinity"] = prefers(cluster, 0)
        far = {"spec": {"affinity": prefers(cluster, FAR)}}
        job: Job = start(
            "sharded-far",
            syncer={**syncer, "podTemplate": template, "shards": 2, "shardPods": {"podTemplate": far}},
            regions=[{"name": "near", "learners": 2, "podTemplate": near}],
        )
        before = job.in_merges(2)
        nodes = {shard: shard_pod(job, shard)["spec"]["nodeName"] for shard in (0, 1)}
        assert set(nodes.values()) == {cluster.nodes()[FAR]}, nodes
        others = job.identities() | job.identities("syncer")
        began = clock()
        lose("stop-node")
        found = job.wait_condition("SyncerReady", "False", "NodeLost", timeout=150)
        assert cluster.nodes()[FAR] in found["message"] and "-syncer-shard-" in found["message"], found
        back_again(job, 0, before, timeout=240)
        job.wait_training("both shards serve", serving, 240)
        print(f"both shards of a lost node are in merges again {clock() - began:.1f} s later")
        assert {shard_pod(job, shard)["spec"]["nodeName"] for shard in (0, 1)} == {cluster.nodes()[0]}
        job.wait_condition("SyncerReady", timeout=60)
        assert job.identities() | job.identities("syncer") == others
        back()
        job.merging_on()
        job.exact()
        job.delete()
