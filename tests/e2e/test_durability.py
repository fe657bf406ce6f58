"""What a job says and keeps while its store is in danger, or others take its pods or refuse its objects."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .clusters import Cluster, LocalKube, run, until
from .jobs import Job, small_job

pytestmark = pytest.mark.timeout(900)
SMALL = "small"  # a claim of a volume of a few megabytes


def events(job: Job, reason: str) -> list[str]:
    return [event["message"] for event in job.events() if event["reason"] == reason]


def delete_the_syncer(job: Job) -> None:
    name = job.syncer_pod()["metadata"]["name"]
    job.cluster.kubectl("delete", "pod", name, "-n", job.namespace, "--wait=false")


@pytest.mark.promise("A claim that is deleted costs nothing while learners run: they give the model to a new volume")
def test_a_claim_that_is_deleted_under_a_job(cluster: Cluster, start: Any) -> None:
    job: Job = start("claimed", learners=2)
    job.in_merges(2)
    learners, before = job.identities(), job.merging_on(merges=12)
    job.cluster.kubectl("delete", "pvc", "claimed-syncer", "-n", job.namespace, "--wait=false")
    assert "diloco export" in job.wait_condition("Durable", "False", "VolumeGoing")["message"]
    assert until("an Event", lambda: events(job, "VolumeGoing"), 30)
    job.patch({"spec": {"suspend": True}})
    job.wait_condition("Stalled", "True", "VolumeGoing")
    job.merging_on()
    assert job.identities() == learners, "a learner was taken, which had the only copy"
    delete_the_syncer(job)  # as the condition says
    job.wait_condition("Suspended", "True", "Saved", timeout=300)
    assert until("an Event", lambda: events(job, "StoreLost"), 30)
    job.patch({"spec": {"suspend": False}})
    after = job.in_merges(2)
    assert after["merges"] > before["merges"] and after["tokens"]["trained"] > before["tokens"]["trained"]
    job.exact()
    # While the job is suspended nobody holds the model.
    job.patch({"spec": {"suspend": True}})
    job.wait_condition("Suspended", "True", "Saved")
    until("no pod left", lambda: not job.pods(), 60)
    job.cluster.kubectl("delete", "pvc", "claimed-syncer", "-n", job.namespace)
    job.wait_condition("Suspended", "True", "NotSaved")
    job.patch({"spec": {"suspend": False}})
    job.wait_condition("Stalled", "True", "StoreLost")
    assert not job.pods(), "the job has begun anew without its user's word"


@pytest.fixture
def small_volume(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[Path]:
    """A claim named SMALL, whose volume is a file system of its own in the memory of this machine."""
    if not isinstance(cluster, LocalKube):
        pytest.skip(f"{type(cluster).__name__} has no folder of this machine as a volume")
    run("mount", "-t", "tmpfs", "-o", "size=64m,mode=0777", "tmpfs", str(tmp_path))
    volume = f"{SMALL}-{namespace}"
    spec = {"accessModes": ["ReadWriteOnce"], "storageClassName": SMALL}
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": spec
            | {
                "capacity": {"storage": "1Gi"},
                "hostPath": {"path": str(tmp_path)},
                "claimRef": {"namespace": namespace, "name": SMALL},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": SMALL},
            "spec": spec | {"resources": {"requests": {"storage": "1Gi"}}},
        },
        namespace=namespace,
    )
    try:
        yield tmp_path
    finally:
        cluster.kubectl("delete", "pv", volume, "--wait=false", check=False)
        run("umount", "-l", str(tmp_path), check=False)


@pytest.mark.promise("While a volume is full, learners keep what they train, a suspension waits, and nothing is lost")
def test_a_volume_that_is_full_under_a_suspension(start: Any, small_volume: Path) -> None:
    job: Job = start("filled", learners=2, syncer={"storage": {"claimName": SMALL}})
    job.in_merges(2)
    learners, ballast = job.identities(), small_volume / "ballast"
    subprocess.run(["dd", "if=/dev/zero", f"of={ballast}", "bs=1M"], capture_output=True, check=False)
    said = job.wait_condition("Durable", "False", "StoreProblem")["message"]
    assert "disk full" in said and until("an Event", lambda: events(job, "SyncerStoreProblem"), 30)
    job.patch({"spec": {"suspend": True}})
    assert said in job.wait_condition("Stalled", "True", "StoreProblem")["message"], "it is said anew at each try"
    trained = job.training()["tokens"]["trained"]
    assert job.identities() == learners and job.condition("Suspended")["status"] != "True"
    ballast.unlink()
    job.wait_condition("Suspended", "True", "Saved", timeout=300)
    assert job.status()["progress"]["tokens"] >= trained and job.status()["progress"]["notMerged"] == 0
    job.patch({"spec": {"suspend": False}})
    after = job.in_merges(2)
    assert after["tokens"]["trained"] > trained and after["tokens"]["dropped"] == 0
    job.exact()


def webhook_that_is_down(namespace: str, group: str, resource: str) -> dict[str, Any]:
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": namespace},
        "webhooks": [
            {
                "name": "check.example.com",
                "failurePolicy": "Fail",
                "sideEffects": "None",
                "admissionReviewVersions": ["v1"],
                "timeoutSeconds": 2,
                "clientConfig": {"url": "https://127.0.0.1:9/check"},
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
                "rules": [
                    {
                        "apiGroups": [group],
                        "apiVersions": ["*"],
                        "operations": ["CREATE", "UPDATE"],
                        "resources": [resource],
                    }
                ],
            }
        ],
    }


@pytest.mark.promise("A webhook of somebody else that is down is named, and stops no status and no suspension")
def test_a_webhook_of_somebody_else_that_is_down(cluster: Cluster, start: Any, namespace: str) -> None:
    job: Job = start("hooked", learners=2)
    job.in_merges(2)
    budgets = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
    try:
        cluster.apply(webhook_that_is_down(namespace, "policy", "poddisruptionbudgets"))
        cluster.kubectl("delete", "pdb", "--all", "-n", namespace)
        role = f"diloco.io/job={job.name},diloco.io/role=learner"
        cluster.kubectl("delete", "pod", "-l", role, "-n", namespace, "--grace-period=0", "--force")
        assert "check.example.com" in job.wait_condition("Degraded", "True", "ApplyFailed")["message"]
        job.wait_condition("QuorumMet", "False")
        job.patch({"spec": {"suspend": True}})
        job.wait_condition("Suspended", "True", "Saved")
        assert not cluster.items(budgets)
        # A new job, of which an object is refused that it cannot do without.
        cluster.apply(webhook_that_is_down(namespace, "apps", "statefulsets"))
        newer = Job(cluster, "newer", namespace)
        newer.apply(small_job("newer", learners=1))
        newer.wait_condition("Ready", "False", "WebhookUnavailable")
        newer.wait_condition("SyncerReady", timeout=180)
        assert "check.example.com" in newer.wait_condition("Stalled", timeout=300)["message"]
    finally:
        cluster.kubectl("delete", "validatingwebhookconfiguration", namespace, check=False)
    newer.in_merges(1)
    newer.wait_condition("Stalled", "False")
    until("the budgets are back", lambda: len(cluster.items(budgets)) == 2, 60)
