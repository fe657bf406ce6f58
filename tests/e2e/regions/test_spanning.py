"""1. One job over a hub and two regions, to its end.
2. A region's link is cut, and comes back; where a job is told to, it holds meanwhile, or fails."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import pytest

from ..clusters import until
from ..jobs import Job
from .world import EU, HUB, US, RunJob, World, contributes

pytestmark = pytest.mark.timeout(900)


# What the report leaves out: headers of Ethernet and TCP/IP, 66 bytes a packet, and acknowledgements, which are nothing
# else. With payloads they are a share of their bytes. A step's report is a packet of its own, and has its answer. By
# time go a heartbeat a second and its echo, so two packets each way, and of each of three connections a ping in half a
# minute.
SHARE, BYTES_PER_STEP, BYTES_PER_SECOND = 0.03, 2 * 66, 2 * 66 + 3 * 2 * 66 / 30
MERGES = 250  # between the two readings of the links
Carried = dict[str, tuple[int, int]]  # by region, bytes down and up


@dataclass
class Reading:
    """Of the regions' links, between two reports. What is under way at the time is in the kernel's count or in the
    syncer's, and not yet in the other."""

    before: Carried
    kernel: Carried
    after: Carried
    time: float
    steps: dict[str, int]
    merges: int


def read_links(world: World, job: Job) -> Reading:
    before = reported_bytes(job)
    kernel = {name: world.clusters[name].link_bytes() for name in (EU, US)}
    time.sleep(0.6)  # the syncer keeps its pages for up to half a second: the next are of after the kernel's counts
    after, page = reported_bytes(job), job.training()
    steps = {name: sum(row["steps"] for row in page["slots"] if row["region"] == name) for name in (EU, US)}
    return Reading(before, kernel, after, time.monotonic(), steps=steps, merges=page["merges"])


@pytest.mark.promise(
    "A job across three clusters trains to its end, and its report has the bytes that each region's link carried"
)
def test_a_job_over_three_clusters(world: World, run_job: RunJob) -> None:
    """What each region's link carried, as the kernel counts it, is what the report says."""
    # As many bytes up as down: what TCP/IP adds, acknowledgements above all, is then little of either. Nobody merges
    # alone, and the job does not end before the links were read.
    same = {"compression": {"up": "bfloat16", "down": "bfloat16"}, "quorum": 2}
    regions = {EU: 1, US: 1}
    job = run_job("spanning", regions, sync=same)
    for name in (EU, US):
        there = world.job("spanning", name)
        there.wait_condition("HubReachable", timeout=180)
        assert {pod["metadata"]["name"] for pod in there.pods()} == {f"spanning-{name}-0"}
    job.in_merges(2)
    assert not job.pods("learner"), "the hub runs the syncer only"
    assert {row["name"] for row in job.status()["regions"]} == {EU, US}
    # Between the readings this test asks the hub alone: what it hears of a region's API server goes over the region's
    # link too.
    first = read_links(world, job)
    job.merging_on(timeout=300, merges=MERGES)
    last = read_links(world, job)
    enough = job.training()["tokens"]["trained"] + 50_000
    for name in (HUB, EU, US):
        world.give(world.document("spanning", regions, tokens=enough, sync=same), name)
    for name in (HUB, EU, US):
        world.job("spanning", name).wait_condition("Complete", timeout=300)
    job.exact()
    report = job.page("/report")
    assert report["outcome"] == "complete"
    for row in report["regions"]:
        assert row["bytes_up"] <= row["wire_bytes_up"] and row["bytes_down"] <= row["wire_bytes_down"]
    seconds, merges = last.time - first.time, last.merges - first.merges
    print(f"\n{'':12}{'kernel':>12}{'report':>12}{'at most':>12}  {merges} merges in {seconds:.0f} s")
    for name, way, index in [(name, way, index) for name in (EU, US) for index, way in enumerate(("down", "up"))]:
        kernel = last.kernel[name][index] - first.kernel[name][index]
        most = last.after[name][index] - first.before[name][index]
        least = last.before[name][index] - first.after[name][index]
        steps, exchange = last.steps[name] - first.steps[name], most / merges  # one exchange may be under way
        bound = round(most * (1 + SHARE) + exchange + BYTES_PER_STEP * steps + BYTES_PER_SECOND * seconds)
        print(f"{name:8}{way:4}{kernel:12}{most:12}{bound:12}  x {kernel / most:.3f}")
        assert least - exchange <= kernel <= bound, (name, way, least, kernel, bound)


def reported_bytes(job: Job) -> Carried:
    """Since the job began, as the syncer counts: with TLS, without TCP/IP."""
    return {row["name"]: (row["wire_bytes_down"], row["wire_bytes_up"]) for row in job.page("/report")["regions"]}


@pytest.mark.promise(
    "A region whose link is cut is reported as lost and returns by itself, with the same processes, while "
    "the other region merges"
)
@pytest.mark.ci
def test_a_region_is_cut_off(world: World, run_job: RunJob) -> None:
    """The other goes on at its own pace; it comes back by itself; the books are exact."""
    job = run_job("cut", {HUB: 1, US: 1}, failurePolicy={"regionLostSeconds": 20})
    job.in_merges(2)
    time.sleep(random.uniform(0, 10))  # at any moment
    pods, before = world.identities("cut", HUB, US), us_slot(job)
    cutting = time.time()
    world.clusters[US].fault("cut")
    try:
        cut_at = time.time()
        job.wait_condition("RegionLost", timeout=90)
        known = time.time()
        assert US in job.condition("RegionLost")["message"]
        world.job("cut", US).wait_condition("HubReachable", "False", timeout=90)
        job.merging_on()
        time.sleep(max(0.0, cut_at + 60 - time.time()))
        healing = time.time()
    finally:
        world.clusters[US].fault("heal")
    healed = time.time()
    contributes(job, US, 120)
    print(f"in a merge {time.time() - healed:.1f} s after the link was healed")
    after = us_slot(job)
    assert after["process"] == before["process"] and after["incarnation"] > before["incarnation"], (before, after)
    job.wait_condition("RegionLost", "False", timeout=60)
    world.job("cut", US).wait_condition("HubReachable", timeout=60)
    assert world.identities("cut", HUB, US) == pods, "something restarted"
    back = time.time()
    job.exact()
    (row,) = job.page("/report")["regions_lost"]
    # Since it was given up, which was after the cut and before the condition, until it was heard again, which was after
    # the link was healed and before the condition. A second is for the rounding of both.
    lasted = row["to_seconds"] - row["from_seconds"]
    assert row["region"] == US and healing - known - 1 <= lasted <= back - cutting + 1, row
    until(
        "the events tell of both",
        lambda: {"RegionLost", "RegionBack"} <= {event["reason"] for event in job.events()},
        60,
    )


def us_slot(job: Job) -> dict[str, Any]:
    """The row of the US's only learner."""
    (row,) = [row for row in job.training()["slots"] if row["region"] == US]
    return dict(row)


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
