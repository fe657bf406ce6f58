"""Learners of several pods, each of several ranks: one learner to the job, lost and replaced as one."""

from __future__ import annotations

from typing import Any

import pytest

from .clusters import Cluster, until
from .jobs import Job, pod_template
from .test_replacement import said


@pytest.mark.promise(
    "On a real cluster a learner of two pods of two ranks trains, and is replaced as one when a pod of it is deleted; "
    "the pods of other learners stay"
)
@pytest.mark.timeout(900)
def test_a_pod_of_a_learner_of_two_is_deleted(cluster: Cluster, start: Any) -> None:
    job: Job = start(
        "grouped",
        learners={"processes": 2, "pods": 2, "podTemplate": pod_template("learner", None, "2Gi")},
        regions=[{"name": "local", "learners": 2}],
        sync={"heartbeat": {"intervalSeconds": 1, "timeoutSeconds": 30}},
    )
    job.in_merges(2, timeout=400)
    assert job.status()["learners"] == "2/2"
    before = job.identities()
    assert sorted(before) == [f"grouped-local-{i}" for i in range(4)]
    cluster.kubectl("delete", "pod", "grouped-local-3", "-n", job.namespace, "--wait=false")
    for pod in ("grouped-local-2", "grouped-local-3"):
        until(f"a successor of {pod}", lambda pod=pod: job.identities().get(pod, before[pod])[0] != before[pod][0], 180)
    job.in_merges(2, timeout=400)
    now = job.identities()
    assert {name: now[name] for name in list(before)[:2]} == {name: before[name] for name in list(before)[:2]}
    until("it is told", lambda: said(job, "LearnerReplaced", "grouped-local-2"), 60)
    job.exact()
