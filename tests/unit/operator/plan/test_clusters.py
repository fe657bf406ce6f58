"""A job that spans clusters, as each cluster's operator sees it."""

from __future__ import annotations

import json
from typing import Any

from diloco_operator import names
from diloco_operator.job import rfc3339
from diloco_operator.model import JobPlan, Observed, PlanMemory, PlanSettings
from diloco_operator.plan.planning import plan_job
from operator_world import SPREAD, START, Far, World, job_object


def test_the_far_cluster_runs_its_learners_and_judges_what_it_can() -> None:
    world = Far(job_object(**SPREAD))
    world.until(lambda w: w.truth("Ready") == "True", 60)
    kinds = {c["type"] for c in world.status["conditions"]}
    always = {"Ready", "NameConflict", "Degraded", "Suspended", "Complete", "Failed", "Reconciling", "Stalled"}
    assert kinds == always | {"HubReachable", "SpecDrift", "SettingsDiffer"}
    assert world.status["learners"] == "2/2" and world.status["phase"] == "Running"
    assert [row["name"] for row in world.status["regions"]] == ["away"]
    assert world.status["syncer"] == {"address": "10.0.0.1:30700"}
    assert {p.role for p in world.pods.values()} == {"learner"} and not world.secrets
    assert not [c for p in world.plans for c in p.calls]


def test_a_hub_that_is_not_reached() -> None:
    world = Far(job_object(**SPREAD))
    world.until(lambda w: w.truth("Ready") == "True", 60)
    world.page |= {"connected": False, "message": "connection refused"}
    world.run(30)
    hub = world.condition("HubReachable")
    assert hub["status"] == "False" and "10.0.0.1:30700" in hub["message"] and "refused" in hub["message"]
    assert world.truth("Ready") == "False" and world.told("HubUnreachable") == 1
    world.page |= {"connected": True, "message": ""}
    world.run(30)
    assert world.truth("HubReachable") == "True" and world.told("HubReachable") == 1


def test_a_copy_that_differs_from_the_hubs() -> None:
    world = Far(job_object(**SPREAD))
    refused = {"reason": "spec-drift", "message": "training.model differ from the job's"}
    world.page |= {"connected": False, "slot": None, "refused": refused}
    world.run(40)
    drift = world.condition("SpecDrift")
    assert drift["status"] == "True" and "training.model" in drift["message"]
    assert "training.model" in world.region("away")["cause"] and world.told("SpecDrift") == 1


def test_a_copy_whose_learners_have_ended_by_its_difference() -> None:
    """The syncer's refusal is for good, so a learner ends by it: its page is gone before it was read."""
    world = Far(job_object(**SPREAD))
    message = "training.model differ from the job's: apply the same job everywhere"
    world.last_words = json.dumps({"level": "error", "message": f"refused by the syncer (spec-drift): {message}"})
    world.crashing = {"job-away-0": 4, "job-away-1": 4}
    joined, world.page = world.page, {**world.page, "connected": False, "slot": None}
    world.run(30)
    drift = world.condition("SpecDrift")
    assert drift["status"] == "True" and drift["message"].startswith(message) and world.told("SpecDrift") == 1
    assert message in world.region("away")["cause"] and "level" not in world.region("away")["cause"]
    world.crashing, world.page = {}, joined
    world.until(lambda w: w.truth("SpecDrift") == "False" and w.truth("Ready") == "True", 400)


def test_the_end_that_learners_were_told_is_the_copys_too() -> None:
    world = Far(job_object(**SPREAD))
    world.until(lambda w: w.truth("Ready") == "True", 60)
    world.page["phase"] = "complete"
    world.until(lambda w: w.truth("Complete") == "True" and not w.pods, 60)
    assert world.status["phase"] == "Complete" and world.status["completionTime"]


def test_a_copy_is_suspended_and_goes_on() -> None:
    world = Far(job_object(**SPREAD))
    world.until(lambda w: w.truth("Ready") == "True", 60)
    world.edit(suspend=True)
    world.run(5)
    assert world.pods, "the hub may be about to say that all is saved"
    world.page["phase"] = "suspended"
    world.until(lambda w: w.truth("Suspended") == "True", 60)
    assert not world.pods
    world.page["phase"] = "training"
    world.edit(suspend=False)
    world.until(lambda w: w.truth("Ready") == "True", 60)


def test_a_copy_is_deleted_at_once() -> None:
    world = Far(job_object(**SPREAD))
    world.until(lambda w: w.truth("Ready") == "True", 60)
    world.delete_job()
    world.until(lambda w: w.gone, 5)


def test_the_hub_knows_remote_learners_from_the_syncer() -> None:
    world = World(job_object(**SPREAD), settings=PlanSettings("hub", "diloco-system", "s:1", "w:1"))
    world.run(40)
    rows = {row["name"]: row for row in world.status["regions"]}
    assert rows["away"]["state"] == "Elsewhere" and rows["away"]["cluster"] == "far"
    assert not rows["away"]["cause"], "the order in which clusters get the job does not matter"
    world.run(120)
    (row,) = [row for row in world.status["regions"] if row["name"] == "away"]
    assert "no learner there has joined yet" in row["cause"] and "cluster far" in row["cause"]
    assert row["cause"] in world.condition("Degraded")["message"] and world.truth("Ready") == "True"
    assert world.status["learners"] == "1/3" and {p.region for p in world.of("learner")} == {"near"}
    # Two learners of the other cluster join: their processes are none of this cluster's pods.
    for slot in world.syncer.slots:
        if slot.region == "away":
            slot.process, slot.state, slot.place = ("f" * 32 + str(slot.ordinal), "active", ("away", slot.ordinal))
            slot.heard = slot.ready_at = 0.0
    members, world._members = world._members, lambda hub: None  # type: ignore[method-assign]
    world.run(30)
    (row,) = [row for row in world.status["regions"] if row["name"] == "away"]
    assert (row["ready"], row["inQuorum"], row["cause"]) == (2, 2, "")
    assert world.status["learners"] == "3/3" and world.truth("Degraded") == "False"
    assert not [c for p in world.plans for c in p.calls], "nobody here says that they are gone"
    assert members


def made(cluster: str | None, **spec: Any) -> JobPlan:
    job = job_object(**spec)
    return plan_job(Observed(now=START, job=job), PlanMemory(), PlanSettings(cluster, "o", "s", "w"))


def test_a_job_that_is_placed_elsewhere() -> None:
    for cluster, word in ((None, "cluster.name"), ("other", "called other")):
        found = made(cluster, **SPREAD)
        assert not found.finalizer and not found.apply and not found.secrets
        assert found.status is not None and found.status["phase"] == "Pending"
        ready = found.status["conditions"][0]
        assert ready["reason"] == "NotPlaced" and word in ready["message"]
        assert ready["lastTransitionTime"] == rfc3339(START)
    assert made("other").finalizer, "one that names no cluster is where it was applied"


def test_what_moved_away_stays_until_it_is_deleted_here() -> None:
    """The operator cannot know whether a name was mistyped; learners are not taken down for that."""
    world = World(job_object())
    world.until(World.whole, 60)
    pods = set(world.pods)
    world.edit(**SPREAD)
    world.run(40)
    assert world.condition("Ready")["reason"] == "NotPlaced" and set(world.pods) == pods
    assert world.objects[names.stateful_set("job", "local")]["spec"]["replicas"] == 3
