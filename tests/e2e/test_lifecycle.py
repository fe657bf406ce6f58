"""7. Suspend, resume, scale, rolling image change, a broken image and its repair, deletion, TTL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from repository import ROOT

from .clusters import Cluster, run, until
from .conftest import VERSION
from .jobs import Job, small_job

OTHER = f"diloco-worker:{VERSION}-other"


@pytest.mark.promise("Suspending and resuming a job drops no token, and deleting it leaves nothing behind")
@pytest.mark.ci
@pytest.mark.timeout(500)
def test_suspend_resume_delete(cluster: Cluster, start: Any) -> None:
    # A learner that the machine does not let run for a while is not lost by that, and its work not stale: what is
    # dropped here, the drain has dropped.
    patient = {"heartbeat": {"intervalSeconds": 1, "timeoutSeconds": 120}, "staleness": {"maxVersions": 100_000}}
    job: Job = start("paused", learners=2, sync=patient)
    job.in_merges(2)
    cluster.diloco("suspend", job.name, "-n", job.namespace)
    job.wait_condition("Suspended", timeout=120)
    until("no pod left", lambda: not job.pods(), 60)
    status = job.status()
    assert status["phase"] == "Suspended"
    tokens = status["progress"]["tokens"]
    assert tokens > 0
    cluster.diloco("resume", job.name, "-n", job.namespace)
    after = job.in_merges(2)
    assert after["tokens"]["trained"] >= tokens and after["tokens"]["dropped"] == 0
    assert after["epoch"] >= 2
    assert job.wait_condition("Suspended", "False")
    job.exact()
    claim = f"/api/v1/namespaces/{job.namespace}/persistentvolumeclaims/{job.name}-syncer"
    assert cluster.api(claim) is not None
    cluster.diloco("delete", job.name, "-n", job.namespace)
    until("the job is gone", lambda: job.object() is None, 60)
    until("its pods are gone", lambda: not job.pods(), 60)
    until("its volume is gone (onDelete: Delete)", lambda: cluster.api(claim) is None, 60)
    until("nothing of it is left", lambda: not left(job), 60)


def left(job: Job) -> list[str]:
    kinds = "statefulsets,deployments,services,configmaps,secrets,poddisruptionbudgets,networkpolicies,pods"
    text = job.cluster.kubectl("get", kinds, "-n", job.namespace, "-l", f"diloco.io/job={job.name}", "-o", "name")
    return text.split()


@pytest.mark.timeout(300)
def test_deletion_keeps_the_volume_and_a_new_job_goes_on_from_it(cluster: Cluster, start: Any) -> None:
    keep = {"storage": {"size": "1Gi", "onDelete": "Retain"}}
    job: Job = start("kept", learners=1, syncer=keep)
    before = job.in_merges(1)
    job.delete()
    claim = f"/api/v1/namespaces/{job.namespace}/persistentvolumeclaims/{job.name}-syncer"
    assert cluster.api(claim) is not None
    job.apply(small_job("kept", learners=1, syncer=keep))
    after = job.in_merges(1)
    assert after["epoch"] > before["epoch"] and after["tokens"]["trained"] > before["tokens"]["trained"]
    assert all(a >= b for a, b in zip(after["versions"], before["versions"], strict=True))
    job.exact()


@pytest.mark.timeout(600)
def test_scaling_up_and_down(cluster: Cluster, start: Any) -> None:
    job: Job = start("scaled", learners=3)
    job.in_merges(3)
    first = job.identities()
    cluster.diloco("scale", job.name, "local=5", "-n", job.namespace)
    job.in_merges(5)
    now = job.identities()
    assert {name: now[name] for name in first} == first, "a learner restarted"
    until("status says so", lambda: job.status()["learners"] == "5/5", 60)
    assert job.wait_condition("Ready", timeout=60)
    cluster.diloco("scale", job.name, "local=2", "-n", job.namespace)
    until("two learners", lambda: len(job.pods("learner")) == 2, 120)
    job.wait_training("two active", lambda d: d["quorum"]["active"] == 2, 120)
    until("the status says 2/2", lambda: job.status()["learners"] == "2/2", 90)
    job.merging_on(timeout=120)
    # A learner that the machine did not let run for as long as 16 versions loses work too, and that is no leaver's.
    lost = {reason for row in job.page("/report")["ledger"] for reason, count in row["reasons"].items() if count}
    assert lost <= {"stale"}, "those who left drained: nothing of theirs is dropped"
    now = job.identities()
    assert now == {name: first[name] for name in sorted(first)[:2]}
    job.exact()


@pytest.mark.timeout(600)
def test_scaling_within_the_bound_restarts_nobody(cluster: Cluster, start: Any) -> None:
    """``maxLearners``: those beyond ``learners`` train at once, under the same syncer."""
    job: Job = start("bounded", learners=2, regions=[{"name": "local", "learners": 2, "maxLearners": 4}])
    before = job.in_merges(2)
    learners, syncer = job.identities(), job.identities("syncer")
    cluster.diloco("scale", job.name, "local=4", "-n", job.namespace)
    after = job.in_merges(4)
    now = job.identities()
    assert len(now) == 4 and {name: now[name] for name in learners} == learners, "a learner restarted"
    assert after["epoch"] == before["epoch"] and job.identities("syncer") == syncer, "the syncer restarted"
    cluster.diloco("scale", job.name, "local=2", "-n", job.namespace)
    until("two learners", lambda: len(job.pods("learner")) == 2, 120)
    until("the status says 2/2", lambda: job.status()["learners"] == "2/2", 120)
    job.wait_training("two active", lambda d: d["quorum"]["active"] == 2, 120)
    job.merging_on(timeout=120)
    assert job.identities() == learners and job.identities("syncer") == syncer
    assert job.training()["epoch"] == before["epoch"]
    job.exact()


@pytest.fixture(scope="session")
def other_image(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The worker image under another name and digest."""
    folder: Path = tmp_path_factory.mktemp("other")
    (folder / "Dockerfile").write_text(f"FROM diloco-worker:{VERSION}\nLABEL other=yes\n")
    program = os.environ.get("BUILDER", str(ROOT / "tools" / "images.sh"))
    run(program, "build-one", str(folder), OTHER, timeout=300)
    cluster.load([OTHER])
    return OTHER


def with_image(image: str) -> dict[str, Any]:
    template = small_job("x")["spec"]["learners"]["podTemplate"]
    template["spec"]["containers"][0]["image"] = image
    return {"podTemplate": template}


@pytest.mark.timeout(900)
def test_a_changed_image_rolls_out_one_by_one_and_a_broken_one_stops(
    cluster: Cluster, start: Any, other_image: str
) -> None:
    job: Job = start("rolled", learners=3)
    job.in_merges(3)
    first, epoch = job.identities(), job.training()["epoch"]
    job.patch({"spec": {"learners": with_image(other_image)}})
    fewest = 3

    def rolled() -> bool:
        nonlocal fewest
        fewest = min(fewest, job.training()["quorum"]["active"])
        pods = job.pods("learner")
        return len(pods) == 3 and all(p["spec"]["containers"][0]["image"] == other_image for p in pods)

    until("all three have the other image", rolled, 300)
    assert fewest >= 2, "more than one learner was taken at once"
    job.in_merges(3)
    assert all(job.identities()[name] != first[name] for name in first)

    # A broken one: the rollout stops at the first learner, and says so; two go on.
    second = job.identities()
    job.patch({"spec": {"learners": with_image("diloco-worker:not-there")}})
    until(
        "the status names the image",
        lambda: any("not-there" in r.get("cause", "") for r in job.status()["regions"]),
        120,
    )
    job.merging_on(merges=20)
    now = job.identities()
    assert sum(now[name][0] == second[name][0] for name in second) == 2, "more than one learner was taken"
    # Repaired: the unready one comes first, then the rest.
    job.patch({"spec": {"learners": with_image(f"diloco-worker:{VERSION}")}})
    until(
        "all three have the repaired image",
        lambda: [p["spec"]["containers"][0]["image"] for p in job.pods("learner")] == [f"diloco-worker:{VERSION}"] * 3,
        300,
    )
    job.in_merges(3)
    assert job.training()["epoch"] == epoch, "the syncer had nothing to change"
    job.exact()


@pytest.mark.timeout(400)
def test_time_to_live(cluster: Cluster, start: Any) -> None:
    job: Job = start("brief", learners=1, tokens=30_000, ttlSecondsAfterFinished=20)
    job.wait_condition("Complete", timeout=240)
    job.exact()
    until("the job deletes itself", lambda: job.object() is None, 90)
    until("nothing of it is left", lambda: not left(job), 60)


@pytest.mark.timeout(400)
def test_two_jobs_and_two_namespaces_do_not_meet(cluster: Cluster, start: Any) -> None:
    one, two = start("first", learners=1), start("second", learners=1)
    spaced = f"{one.namespace}-b"
    cluster.kubectl("create", "namespace", spaced)
    try:
        three = Job(cluster, "first", spaced)
        three.apply(small_job("first", learners=1))
        for job in (one, two, three):
            job.in_merges(1)
        processes = [s["process"] for j in (one, two, three) for s in j.training()["slots"] if s["process"]]
        assert len(set(processes)) == len(processes) == 3
        two.delete()
        one.merging_on()
        three.merging_on()
    finally:
        Job(cluster, "first", spaced).delete()
        cluster.kubectl("delete", "namespace", spaced, "--wait=false")


@pytest.mark.timeout(600)
def test_a_program_of_the_users_own(cluster: Cluster, namespace: str) -> None:
    """examples/custom_loop.py in an image of its own, run by a job with learners.command."""
    import yaml

    program = os.environ.get("BUILDER", str(ROOT / "tools" / "images.sh"))
    image = f"diloco-custom-loop:{VERSION}"
    run(program, "build-one", str(ROOT / "examples"), image, "custom-loop.Dockerfile", timeout=300)
    cluster.load([image])
    document = yaml.safe_load((ROOT / "manifests" / "examples" / "custom-loop.yaml").read_text())
    job = Job(cluster, document["metadata"]["name"], namespace)
    job.apply(document)
    job.wait_condition("Complete", timeout=400)
    # Own programs idle at the end as the built-in trainer does, and go when they are told.
    until("no learner left", lambda: not job.pods("learner"), 60)
    job.exact()
