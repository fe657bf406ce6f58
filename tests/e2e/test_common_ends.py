"""All learners end at once: the job goes on with the optimizer state that there is."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .clusters import Cluster, until
from .jobs import LEARNER_CPU, Job, clock, pod_template

# The built-in trainer as a child of the container's first process, so that it can be killed from within, with a log
# that the pod keeps.
KILLABLE = """
trap 'kill -TERM "$child"; wait "$child"; exit $?' TERM
python -m diloco_worker >/tmp/log 2>&1 & child=$!
echo "$child" >/tmp/child
wait "$child"
"""
LEARNERS = 3
BEGAN = "the inner optimizer "
PEER, OWN = "goes on from the state of the peer", "goes on from the state of the slot's own checkpoint"


def began_with(job: Job, pod: str) -> str:
    """What a learner's optimizer began with, as its log says; empty: nothing yet."""
    text = job.cluster.kubectl("exec", "-n", job.namespace, pod, "--", "cat", "/tmp/log", check=False)
    messages = [json.loads(line).get("message", "") for line in text.splitlines() if line.startswith("{")]
    return next((m.removeprefix(BEGAN) for m in messages if m.startswith(BEGAN)), "")


def all_began(job: Job, timeout: float = 240) -> dict[str, str]:
    """Learner's pod -> what its optimizer began with, once all have."""
    pods = [pod["metadata"]["name"] for pod in job.pods("learner")]
    return dict(
        until(
            "every learner's optimizer has begun",
            lambda: (found := {pod: began_with(job, pod) for pod in pods}) and all(found.values()) and found,
            timeout,
            every=1,
        )
    )


def kill(job: Job, *pods: str) -> None:
    """Kill these learners' programs at the same moment."""
    with ThreadPoolExecutor(len(pods)) as pool:
        words = ("--", "sh", "-c", 'kill -9 "$(cat /tmp/child)"')
        list(pool.map(lambda pod: job.cluster.kubectl("exec", "-n", job.namespace, pod, *words), pods))


def merged_since(job: Job, before: dict[str, Any]) -> dict[str, Any]:
    """Wait until every slot has more pushes merged than ``before``, by a process that has begun anew."""
    then = {s["slot"]: s for s in before["slots"]}

    def has_more(slot: dict[str, Any]) -> bool:
        old = then[slot["slot"]]
        return slot["incarnation"] > old["incarnation"] and slot["merged_pushes"] > old["merged_pushes"]

    def holds(document: dict[str, Any]) -> bool:
        return all(s["state"] == "active" and has_more(s) for s in document["slots"])

    after = job.wait_training("all learners, begun anew, are in merges", holds, 240)
    assert all(a >= b for a, b in zip(after["versions"], before["versions"], strict=True)), "merges were lost"
    assert after["tokens"]["trained"] > before["tokens"]["trained"]
    return dict(after)


@pytest.mark.timeout(600)
def test_all_learners_programs_end_at_once(cluster: Cluster, start: Any) -> None:
    """Containers that are killed keep their directories, and with them the slot's own state: at least one goes on
    from its own, and nobody begins fresh."""
    job: Job = start(
        "killed",
        learners={"command": ["sh", "-c", KILLABLE], "podTemplate": pod_template("learner", LEARNER_CPU)},
        regions=[{"name": "local", "learners": LEARNERS}],
    )
    before = job.in_merges(LEARNERS)
    pods = sorted(job.identities())

    def written(pod: str) -> str:
        """The slot's own checkpoint; empty: there is none."""
        words = ("--", "sh", "-c", "ls /var/lib/diloco/state/*.safetensors")
        return cluster.kubectl("exec", "-n", job.namespace, pod, *words, check=False).strip()

    until("every slot has its own checkpoint", lambda: all(written(pod) for pod in pods), 90)
    identities, moment = job.identities(), clock()
    kill(job, *pods)
    after = merged_since(job, before)
    sources = all_began(job)
    print(f"all programs killed: {clock() - moment:.1f} s; {sources}")
    now = job.identities()
    assert now == {pod: (uid, restarts + 1) for pod, (uid, restarts) in identities.items()}
    assert after["epoch"] == before["epoch"]
    assert OWN in sources.values() and all(source in (OWN, PEER) for source in sources.values()), sources
    job.exact()
