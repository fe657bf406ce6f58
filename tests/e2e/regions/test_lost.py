"""3. A whole region's cluster is destroyed and built again; or all its learners end at once.
4. The hub is: with its volume kept, with a copy in an object store; and the node of its syncer is lost."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest

from ..buckets import bucket
from ..clusters import Cluster, until
from ..jobs import pod_template
from ..test_common_ends import PEER, all_began, delete, killable, merged_since
from .world import EU, HUB, NODE_PORT, US, RunJob, World, contributes, merged_of

pytestmark = pytest.mark.timeout(1200)
ELSEWHERE = NODE_PORT + 1


def test_a_regions_cluster_is_destroyed_and_built_again(world: World, run_job: RunJob) -> None:
    regions, policy = {EU: 1, US: 1}, {"regionLostSeconds": 20}
    job = run_job("rebuilt", regions, failurePolicy=policy)
    job.in_merges(2)
    pods = world.identities("rebuilt", EU)
    began = time.time()
    world.destroy(US)
    job.wait_condition("RegionLost", timeout=90)
    alone = job.merging_on()
    world.begin(US)
    world.give(world.document("rebuilt", regions, failurePolicy=policy), US)
    after = job.wait_training(
        "the new cluster's learner is in merges",
        lambda d: merged_of(d, US) > merged_of(alone, US) and d["quorum"]["active"] == 2,
        240,
    )
    print(f"in a merge {time.time() - began:.0f} s after the cluster was destroyed, building it included")
    assert after["epoch"] == alone["epoch"]
    job.wait_condition("RegionLost", "False", timeout=60)
    assert world.identities("rebuilt", EU) == pods
    enough = job.training()["tokens"]["trained"] + 100_000
    for cluster in (HUB, EU, US):
        world.give(world.document("rebuilt", regions, tokens=enough, failurePolicy=policy), cluster)
    for cluster in (HUB, EU, US):
        world.job("rebuilt", cluster).wait_condition("Complete", timeout=180)
    job.exact()


@pytest.mark.promise(
    "No learner begins with a fresh optimizer state after a common end: all programs killed at once; one "
    "killed while the others' pods are deleted; all pods deleted, before and after a suspension; all of "
    "one cluster"
)
def test_all_learners_of_a_cluster_are_deleted_at_once(world: World, run_job: RunJob) -> None:
    """Their directories go with them; their optimizers go on from the state of a learner elsewhere."""
    job = run_job("emptied", {EU: 2, US: 1}, learners=killable())
    job.in_merges(3)
    emptied, others = world.job("emptied", EU), world.identities("emptied", US)
    pods, before, began = emptied.identities(), job.training(), time.time()
    delete(emptied, "-l", "diloco.io/role=learner")
    until("successors", lambda: all(emptied.identities()[name][0] != pods[name][0] for name in pods), 90)
    assert set(all_began(emptied).values()) == {PEER}
    merged_since(job, before, EU)
    print(f"both in merges {time.time() - began:.1f} s after they were deleted, with a peer's optimizer state")
    assert world.identities("emptied", US) == others
    job.exact()


def kept_volume(world: World, name: str, folder: Path) -> None:
    """A volume that outlives the cluster: a folder of the machine, and a claim that is bound to it."""
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)
    size, modes = {"storage": "1Gi"}, ["ReadWriteOnce"]
    world.hub.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"{world.namespace}-{name}"},
            "spec": {
                "capacity": size,
                "accessModes": modes,
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": "",
                "hostPath": {"path": str(folder)},
                "claimRef": {"namespace": world.namespace, "name": name},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name},
            "spec": {"accessModes": modes, "storageClassName": "", "resources": {"requests": size}},
        },
        namespace=world.namespace,
    )


def learner_step(world: World, name: str, region: str) -> int:
    """What the learner itself says: nobody else hears it."""
    path = f"/api/v1/namespaces/{world.namespace}/pods/{name}-{region}-0:7710/proxy/status"
    return int(json.loads(world.clusters[region].raw(path))["step"])


@pytest.mark.parametrize("kept", ["volume", "bucket"])
def test_the_hub_is_destroyed_and_built_again(world: World, run_job: RunJob, tmp_path: Path, kept: str) -> None:
    """Elsewhere: at another port. Learners follow without being started again. Meanwhile they train on,
    and where they may not for so long, they pause."""
    name, folder = f"hub-{kept}", tmp_path / "volume"
    with contextlib.ExitStack() as stack:
        if kept == "volume":
            syncer: dict[str, Any] = {"storage": {"claimName": name}}
            kept_volume(world, name, folder)
        else:
            syncer = stack.enter_context(bucket(world.hub, tmp_path))
        regions = {EU: 1, US: 1}
        alone = 100_000 if kept == "volume" else 64  # steps for which learners go on alone
        # Nor is a small corpus to be what ends it: half of a slot's share of it is leased ahead.
        data = {"source": "text", "paths": ["python-stdlib"], "tokenizer": "bytes", "sequenceLength": 64}
        fields: dict[str, Any] = {
            "syncer": syncer,
            "sync": {"staleness": {"maxSteps": alone}},
            "training": {"data": data},
        }
        job = run_job(name, regions, **fields)
        job.in_merges(2)
        job.merging_on()
        pods = world.identities(name, EU, US)
        before = job.training()
        steps = {row["region"]: row["step"] for row in before["slots"]}
        began = time.time()
        world.destroy(HUB)
        for region in (EU, US):
            world.job(name, region).wait_condition("HubReachable", "False", timeout=90)
        left = {region: learner_step(world, name, region) for region in (EU, US)}
        world.begin(HUB)  # which takes a minute
        for region in (EU, US):
            made = learner_step(world, name, region) - left[region]
            print(f"{region}: {made} steps more alone, of {alone}")
            assert (made > 64) == (alone > 64), (region, made)
        if kept == "volume":
            kept_volume(world, name, folder)
        document = world.document(name, regions, ELSEWHERE, **fields)
        for cluster in (HUB, EU, US):
            world.give(document, cluster)
        job = world.job(name)
        after = job.wait_training("an epoch of the new hub", lambda d: d["epoch"] > before["epoch"], 240)
        assert all(a >= b for a, b in zip(after["versions"], before["versions"], strict=True)), "merges lost"
        for region in (EU, US):
            contributes(job, region, 240)
        took = time.time() - began
        print(f"{kept}: both regions in merges {took:.0f} s after the hub was destroyed, its building included")
        assert world.identities(name, EU, US) == pods, "a learner was started again"
        later = {row["region"]: row["step"] for row in job.training()["slots"]}
        assert all(later[region] > steps[region] for region in (EU, US))
        job.wait_condition("QuorumMet", timeout=60)
        job.exact()
        world.delete(name)  # while its bucket is there


def on_node(cluster: Cluster, number: int) -> dict[str, Any]:
    """The syncer's pod, rather there than elsewhere."""
    template = pod_template("syncer", "200m")
    term = {"key": "kubernetes.io/hostname", "operator": "In", "values": [cluster.nodes()[number]]}
    template["spec"]["affinity"] = {
        "nodeAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 100, "preference": {"matchExpressions": [term]}}
            ]
        }
    }
    return template


def test_the_node_of_the_syncer_is_lost(world: World, run_job: RunJob) -> None:
    if "node" not in world.hub.can:
        pytest.skip(f"{type(world.hub).__name__} cannot lose a node")
    if len(world.hub.nodes()) < 2:
        world.destroy(HUB)
        world.begin(HUB, nodes=2)
    job = run_job(
        "node",
        {EU: 1, US: 1},
        syncer={"podTemplate": on_node(world.hub, 1)},
        nodeLoss={"policy": "ForceDelete", "afterSeconds": 10},
    )
    job.in_merges(2)
    assert job.syncer_pod()["spec"]["nodeName"] == world.hub.nodes()[1]
    pods, before = world.identities("node", EU, US), job.training()
    began = time.time()
    world.hub.fault("stop-node", "1")
    try:
        until(
            "the syncer on the other node",
            lambda: job.syncer_pod()["spec"].get("nodeName") == world.hub.nodes()[0],
            180,
        )
        after = job.wait_training("an epoch there", lambda d: d["epoch"] > before["epoch"], 120)
        assert all(a >= b for a, b in zip(after["versions"], before["versions"], strict=True))
        for region in (EU, US):
            contributes(job, region, 120)
        print(f"both regions in merges {time.time() - began:.0f} s after the syncer's node was lost")
    finally:
        world.hub.fault("start-node", "1")
    assert world.identities("node", EU, US) == pods
    job.exact()
