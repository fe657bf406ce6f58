"""3. The syncer's pod is deleted: learners stay, nothing acknowledged is lost, one writes at a time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .clusters import until
from .jobs import Job


def tape(job: Job) -> list[dict[str, Any]]:
    """The event tape, line by line, from the volume of the running syncer."""
    command = "find /var/lib/diloco/store -name '*.jsonl' | sort | xargs cat"

    def read() -> str:
        name = job.syncer_pod()["metadata"]["name"]
        return job.cluster.kubectl("exec", "-n", job.namespace, name, "--", "sh", "-c", command)

    text = until("the tape", read, 60)
    return [json.loads(line) for line in text.splitlines() if line.strip()]


@pytest.mark.promise(
    "A deleted syncer pod, also one that is deleted by force or scaled away by hand, loses no merge, restarts no "
    "learner, and never writes beside its successor"
)
@pytest.mark.ci
@pytest.mark.timeout(500)
def test_the_syncer_is_deleted(start: Any) -> None:
    job: Job = start("restarted", learners=2)
    before = job.in_merges(2)
    learners = job.identities()
    epoch, versions = before["epoch"], before["versions"]
    for words in (
        ("delete", "pod", "--wait=false"),
        ("delete", "pod", "--wait=false", "--grace-period=0", "--force"),  # the old one may still be writing
        ("scale", "deployment", f"{job.name}-syncer", "--replicas=0"),  # as who saves costs at night does
    ):
        old = job.syncer_pod()["metadata"]
        versions, epoch = (d := job.training())["versions"], d["epoch"]
        pod = [old["name"]] if words[0] == "delete" else []
        job.cluster.kubectl(*words, *pod, "-n", job.namespace)
        until("a new syncer pod", lambda old=old: job.syncer_pod()["metadata"]["uid"] != old["uid"], 90)
        after = job.wait_training("a raised epoch", lambda d, e=epoch: d["epoch"] > e, 120)
        assert all(a >= b for a, b in zip(after["versions"], versions, strict=True)), "merges were lost"
        job.merging_on()
        job.in_merges(2)
        assert job.identities() == learners, "a learner restarted"
    job.exact()
    lines = [line for line in tape(job) if "epoch" in line and "version" in line]
    assert len(lines) > 10
    epochs = [line["epoch"] for line in lines]
    assert epochs == sorted(epochs), "two syncers wrote at once"
    job.wait_condition("SyncerReady", timeout=60)
