"""One job across several clusters: it trains, a region is cut off and comes back, and nothing is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from .clusters import until
from .conftest import images
from .jobs import Job
from .regions import EU, HUB, US, World, open_clusters, settle, soon

pytestmark = [pytest.mark.regions, pytest.mark.timeout(900)]
SIZED = {"hidden_size": 256, "intermediate_size": 512}  # fragments of half a megabyte: headers are little


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A hub and two regions, with the operator installed under their names."""
    import os

    clusters = open_clusters(HUB, EU, US)
    for name, cluster in clusters.items():
        if not os.environ.get("IMAGES_LOADED"):
            cluster.load(images())
        settle(cluster, name)
    namespace = f"r{int(time.time()) % 100000}"
    for cluster in clusters.values():
        cluster.kubectl("create", "namespace", namespace)
    yield World(clusters, namespace, tmp_path_factory.mktemp("regions"))
    if not os.environ.get("KEEP"):
        for cluster in clusters.values():
            cluster.down()


@pytest.fixture
def run_job(world: World) -> Iterator[Any]:
    """``run_job(name, {cluster: learners}, **spec)``: applied everywhere, and deleted at the end."""
    made = []

    def begin(name: str, regions: dict[str, int], **spec: Any) -> Job:
        made.append(name)
        return world.apply(world.document(name, regions, **spec))

    yield begin
    for name in made:
        for cluster in world.clusters.values():
            cluster.kubectl(
                "delete", "dilocojob", name, "-n", world.namespace, "--ignore-not-found", "--wait=false"
            )
        for cluster in world.clusters:
            job = world.job(name, cluster)
            until(f"{name} gone in {cluster}", lambda job=job: job.object() is None and not job.pods(), 120)


@pytest.mark.ci
def test_a_job_over_three_clusters(world: World, run_job: Any) -> None:
    """1. To Complete; what each region's link carried, as the kernel counts it, is what the report says."""
    before = {name: world.clusters[name].link_bytes() for name in (EU, US)}
    job: Job = run_job("spanning", {EU: 1, US: 1}, tokens=600_000)
    job.in_merges(2)
    for name in (EU, US):
        there = world.job("spanning", name)
        there.wait_condition("HubReachable", timeout=60)
        assert {pod["metadata"]["name"] for pod in there.pods()} == {f"spanning-{name}-0"}
    assert not job.pods("learner"), "the hub runs the syncer only"
    rows = {row["name"]: row for row in job.status()["regions"]}
    assert set(rows) == {EU, US}
    job.wait_condition("Complete", timeout=600)
    for name in (EU, US):
        world.job("spanning", name).wait_condition("Complete", timeout=60)
    job.exact()
    report = job.page("/report")
    assert report["outcome"] == "complete"
    for row in report["learners"]:
        print(row)
    for name in (EU, US):
        received, sent = (a - b for a, b in zip(world.clusters[name].link_bytes(), before[name], strict=True))
        print(f"{name}: received {received}, sent {sent}; report {report['bytes_up']} {report['bytes_down']}")


@pytest.mark.ci
def test_a_region_is_cut_off(world: World, run_job: Any) -> None:
    """2. The other goes on at its own pace; it comes back by itself; the books are exact."""
    job: Job = run_job("cut", {EU: 1, US: 1}, failurePolicy={"regionLostSeconds": 20})
    job.in_merges(2)
    soon(0, 10)
    pods = {name: world.job("cut", name).identities() for name in (EU, US)}
    world.clusters[US].fault("cut")
    try:
        cut_at = time.time()
        job.wait_condition("RegionLost", timeout=90)
        assert US in job.condition("RegionLost")["message"]
        world.job("cut", US).wait_condition("HubReachable", "False", timeout=90)
        job.merging_on()
        time.sleep(max(0.0, cut_at + 60 - time.time()))
    finally:
        world.clusters[US].fault("heal")
    healed = time.time()
    merged = {s["region"]: s["merged_pushes"] for s in job.training()["slots"]}
    job.wait_training(
        "the region contributes again",
        lambda d: any(s["region"] == US and s["merged_pushes"] > merged.get(US, 0) for s in d["slots"]),
        120,
    )
    took = time.time() - healed
    print(f"in a merge {took:.1f} s after the link was healed")
    job.wait_condition("RegionLost", "False", timeout=60)
    world.job("cut", US).wait_condition("HubReachable", timeout=60)
    assert {name: world.job("cut", name).identities() for name in (EU, US)} == pods, "something restarted"
    job.exact()
    told = [event["reason"] for event in job.events()]
    assert "RegionLost" in told and "RegionBack" in told
    assert took < 15
