"""1. One job over a hub and two regions, to its end.
2. A region's link is cut, and comes back; where a job is told to, it holds meanwhile, or fails."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from ..clusters import until
from .world import EU, US, RunJob, World, contributes

pytestmark = pytest.mark.timeout(900)


@pytest.mark.ci
def test_a_job_over_three_clusters(world: World, run_job: RunJob) -> None:
    """What each region's link carried, as the kernel counts it, is what the report says."""
    before = {name: world.clusters[name].link_bytes() for name in (EU, US)}
    # As many bytes up as down: what TCP/IP adds, acknowledgements above all, is then little of either.
    same = {"compression": {"up": "bfloat16", "down": "bfloat16"}}
    job = run_job("spanning", {EU: 1, US: 1}, tokens=600_000, sync=same)
    job.in_merges(2)
    for name in (EU, US):
        there = world.job("spanning", name)
        there.wait_condition("HubReachable", timeout=60)
        assert {pod["metadata"]["name"] for pod in there.pods()} == {f"spanning-{name}-0"}
    assert not job.pods("learner"), "the hub runs the syncer only"
    assert {row["name"] for row in job.status()["regions"]} == {EU, US}
    job.wait_condition("Complete", timeout=600)
    for name in (EU, US):
        world.job("spanning", name).wait_condition("Complete", timeout=60)
    job.exact()
    report = job.page("/report")
    assert report["outcome"] == "complete"
    rows = {row["name"]: row for row in report["regions"]}
    print(f"\n{'':8}{'kernel up':>12}{'report':>12}{'kernel down':>14}{'report':>12}")
    for name in (EU, US):
        down, up = (a - b for a, b in zip(world.clusters[name].link_bytes(), before[name], strict=True))
        said_up, said_down = rows[name]["wire_bytes_up"], rows[name]["wire_bytes_down"]
        print(f"{name:8}{up:12}{said_up:12}{down:14}{said_down:12}  x {up / said_up:.3f} {down / said_down:.3f}")
        # TCP/IP, and what goes by time and not by training: heartbeats, probes. It is more where a machine is slow.
        assert abs(up / said_up - 1) < 0.08 and abs(down / said_down - 1) < 0.08
        assert rows[name]["bytes_up"] <= said_up and rows[name]["bytes_down"] <= said_down


@pytest.mark.ci
def test_a_region_is_cut_off(world: World, run_job: RunJob) -> None:
    """The other goes on at its own pace; it comes back by itself; the books are exact."""
    job = run_job("cut", {EU: 1, US: 1}, failurePolicy={"regionLostSeconds": 20})
    job.in_merges(2)
    time.sleep(random.uniform(0, 10))  # at any moment
    pods = world.identities("cut", EU, US)
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
    contributes(job, US, 120)
    took = time.time() - healed
    print(f"in a merge {took:.1f} s after the link was healed")
    job.wait_condition("RegionLost", "False", timeout=60)
    world.job("cut", US).wait_condition("HubReachable", timeout=60)
    assert world.identities("cut", EU, US) == pods, "something restarted"
    job.exact()
    (row,) = job.page("/report")["regions_lost"]
    # Since it was given up, 10 s after the cut, until it joined again.
    lasted = healed - cut_at - 10
    assert row["region"] == US and abs(row["to_seconds"] - row["from_seconds"] - lasted) < 25, row
    told = [event["reason"] for event in job.events()]
    assert "RegionLost" in told and "RegionBack" in told
    assert took < 15


def test_a_job_holds_until_a_lost_region_is_back(world: World, run_job: RunJob) -> None:
    policy = {"regionLostSeconds": 15, "onRegionLost": "Hold"}
    patient = {"staleness": {"maxSteps": 100_000}}  # steps for which learners go on alone
    job = run_job("hold", {EU: 1, US: 1}, failurePolicy=policy, sync=patient)
    job.in_merges(2)
    pods = world.identities("hold", EU, US)
    world.clusters[US].fault("cut")
    try:
        job.wait_phase("Holding", timeout=90)
        assert US in job.wait_condition("RegionLost", timeout=30)["message"]
        said = job.wait_condition("Ready", "False", "Holding", timeout=30)["message"]
        assert US in said and "onRegionLost is Hold" in said
        held = job.training()
        steps = {row["region"]: row["step"] for row in held["slots"]}
        # Who is there goes on, alone.
        job.wait_training(
            "steps without merges",
            lambda d: next(row["step"] for row in d["slots"] if row["region"] == EU) > steps[EU] + 200,
        )
        assert job.training()["merges"] == held["merges"]
    finally:
        world.clusters[US].fault("heal")
    job.wait_phase("Running", timeout=90)
    for region in (EU, US):
        contributes(job, region, 60)
    assert world.identities("hold", EU, US) == pods
    report = job.page("/report")
    assert len(report["holds"]) == 1 and [row["region"] for row in report["regions_lost"]] == [US]
    job.exact()


def test_a_job_fails_with_a_region(world: World, run_job: RunJob) -> None:
    policy = {"regionLostSeconds": 15, "onRegionLost": "Fail"}
    job = run_job("fail", {EU: 1, US: 1}, failurePolicy=policy)
    job.in_merges(2)
    world.clusters[US].fault("cut")
    try:
        job.wait_phase("Failed", timeout=90)
        said = job.condition("Failed")["message"]
        assert US in said and "onRegionLost" in said
        world.job("fail", EU).wait_phase("Failed", timeout=90)
    finally:
        world.clusters[US].fault("heal")
    there = world.job("fail", US)
    there.wait_phase("Failed", timeout=120)
    for name in (EU, US):
        told = world.job("fail", name)
        until(f"no learner goes on in {name}", lambda j=told: not any(map(running, j.pods())), 60)


def test_a_job_that_is_suspended_at_the_hub_pauses_everywhere(world: World, run_job: RunJob) -> None:
    """Its copies elsewhere say so, and count nothing as lost; it goes on where it was."""
    job = run_job("paused", {EU: 1, US: 1})
    job.in_merges(2)
    job.patch({"spec": {"suspend": True}})
    job.wait_phase("Suspended", timeout=120)
    for name in (EU, US):
        said = world.job("paused", name).wait_condition("HubReachable", "False", "Drained", timeout=90)
        assert "suspended" in said["message"]
    job.patch({"spec": {"suspend": False}})
    job.wait_phase("Running", timeout=120)
    for name in (EU, US):
        contributes(job, name, 180)
        there = world.job("paused", name)
        there.wait_condition("HubReachable", timeout=60)
        told = {event["reason"] for event in there.events()}
        assert "HubDrained" in told and not told & {"HubUnreachable", "LearnerCrashed", "LearnerGone"}, told
        assert not (there.status().get("replacements") or {}).get("total")
    job.exact()


def running(pod: dict[str, Any]) -> bool:
    return bool(pod["status"]["phase"] == "Running")
