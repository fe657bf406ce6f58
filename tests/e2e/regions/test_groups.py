"""A learner of two pods of two ranks in one cluster, and a learner of one process in another."""

from __future__ import annotations

import pytest

from ..clusters import until
from ..jobs import pod_template
from .world import EU, HUB, US, RunJob, World, contributes, merged_of


@pytest.mark.promise(
    "A learner of two pods in one cluster and one of a single process in another train one job; a deleted pod, a cut "
    "link and the learner's end are of the whole learner, and cost the other nothing"
)
@pytest.mark.timeout(1200)
def test_a_learner_of_two_pods_beside_one_of_a_process(world: World, run_job: RunJob) -> None:
    regions = {EU: {"learners": 1, "processes": 2, "pods": 2}, US: {"learners": 1}}
    learners = {"podTemplate": pod_template("learner", None, "2Gi")}
    patient = {"heartbeat": {"intervalSeconds": 1, "timeoutSeconds": 30}}
    policy = {"regionLostSeconds": 40}
    job = run_job("unequal", regions, learners=learners, sync=patient, failurePolicy=policy)
    job.in_merges(2, timeout=400)
    there, before = world.job("unequal", EU), world.identities("unequal", EU, US)
    assert [sorted(pods) for pods in before.values()] == [["unequal-eu-1-0", "unequal-eu-1-1"], ["unequal-us-1-0"]]
    assert {row["name"]: row["inQuorum"] for row in job.status()["regions"]} == {EU: 1, US: 1}

    alone = job.training()
    world.clusters[EU].kubectl("delete", "pod", "unequal-eu-1-1", "-n", job.namespace, "--wait=false")
    for pod, (uid, _) in before[EU].items():
        until(f"a successor of {pod}", lambda pod=pod, uid=uid: there.identities().get(pod, (uid,))[0] != uid, 180)
    contributes(job, EU, 400)
    assert merged_of(job.training(), US) > merged_of(alone, US)

    replaced = world.identities("unequal", EU, US)
    assert replaced[US] == before[US]
    world.clusters[EU].fault("cut")
    try:
        assert EU in job.wait_condition("RegionLost", timeout=180)["message"]
        job.merging_on()
    finally:
        world.clusters[EU].fault("heal")
    contributes(job, EU, 180)
    job.wait_condition("RegionLost", "False", timeout=60)
    assert world.identities("unequal", EU, US) == replaced, "something restarted"

    enough = job.training()["tokens"]["trained"] + 20_000
    ended = {"learners": learners, "sync": patient, "failurePolicy": policy, "tokens": enough}
    for cluster in (HUB, EU, US):
        world.give(world.document("unequal", regions, **ended), cluster)
    for cluster in (HUB, EU, US):
        world.job("unequal", cluster).wait_condition("Complete", timeout=300)
    job.exact()
