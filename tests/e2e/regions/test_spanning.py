"""1. One job over a hub and two regions, to its end.
2. A region's link is cut, and comes back; where a job is told to, it holds meanwhile, or fails."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from ..clusters import until
from ..jobs import Job
from .world import EU, US, RunJob, World, contributes

pytestmark = pytest.mark.timeout(900)


# What the report leaves out: headers of Ethernet and TCP/IP, 66 bytes a packet, and acknowledgements, which are nothing
# else. With payloads and each step's report they are a share of their bytes. By time go a heartbeat a second and its
# echo, so two packets each way, and of each of three connections a ping in half a minute.
SHARE, BYTES_PER_SECOND = 0.03, 2 * 66 + 3 * 2 * 66 / 30


@pytest.mark.ci
def test_a_job_over_three_clusters(world: World, run_job: RunJob) -> None:
    """What each region's link carried, as the kernel counts it, is what the report says."""
    # As many bytes up as down: what TCP/IP adds, acknowledgements above all, is then little of either.
    same = {"compression": {"up": "bfloat16", "down": "bfloat16"}}
    job = run_job("spanning", {EU: 1, US: 1}, tokens=600_000, sync=same)
    for name in (EU, US):
        there = world.job("spanning", name)
        there.wait_condition("HubReachable", timeout=180)
        assert {pod["metadata"]["name"] for pod in there.pods()} == {f"spanning-{name}-0"}
    job.in_merges(2)
    assert not job.pods("learner"), "the hub runs the syncer only"
    assert {row["name"] for row in job.status()["regions"]} == {EU, US}
    # From here to the job's end this test asks the hub alone: what it hears of a region's API server goes over the
    # region's link too. While training goes on, the link is read between two readings of the report.
    said, began = [reported_bytes(job)], time.monotonic()
    carried = {name: world.clusters[name].link_bytes() for name in (EU, US)}
    said.append(reported_bytes(job))
    job.wait_condition("Complete", timeout=600)
    ended = {name: world.clusters[name].link_bytes() for name in (EU, US)}
    seconds, at_the_end = time.monotonic() - began, reported_bytes(job)
    for name in (EU, US):
        world.job("spanning", name).wait_condition("Complete", timeout=60)
    job.exact()
    report = job.page("/report")
    assert report["outcome"] == "complete"
    for row in report["regions"]:
        assert row["bytes_up"] <= row["wire_bytes_up"] and row["bytes_down"] <= row["wire_bytes_down"]
    print(f"\n{'':12}{'kernel':>12}{'report':>12}{'at most':>12}  in {seconds:.0f} s")
    for name, way, index in [(name, way, index) for name in (EU, US) for index, way in enumerate(("down", "up"))]:
        kernel = ended[name][index] - carried[name][index]
        most, least = (at_the_end[name][index] - reading[name][index] for reading in said)
        bound = round(most * (1 + SHARE) + BYTES_PER_SECOND * seconds)
        print(f"{name:8}{way:4}{kernel:12}{most:12}{bound:12}  x {kernel / most:.3f}")
        assert least <= kernel <= bound, (name, way, least, kernel, bound)


def reported_bytes(job: Job) -> dict[str, tuple[int, int]]:
    """By region, bytes down and up since the job began, as the syncer counts them: with TLS, without TCP/IP."""
    return {row["name"]: (row["wire_bytes_down"], row["wire_bytes_up"]) for row in job.page("/report")["regions"]}


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
