"""All learners end at once, and all pods of the job: it goes on with the newest optimizer state that there is."""

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
REGIONS = [{"name": "local", "learners": LEARNERS}]
BEGAN = "the inner optimizer "
PEER, JOB, OWN = (
    "continues from the state of the peer",
    "continues from the state of the job's checkpoint",
    "continues from the state of the slot's own checkpoint",
)


def killable() -> dict[str, Any]:
    """spec.learners of a job whose learners' log ``began_with`` reads."""
    return {"command": ["sh", "-c", KILLABLE], "podTemplate": pod_template("learner", LEARNER_CPU)}


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


def delete(job: Job, *words: str) -> None:
    """Delete pods at once, without grace."""
    job.cluster.kubectl("delete", "pod", "-n", job.namespace, *words, "--force", "--grace-period=0", "--wait=false")


def merged_since(job: Job, before: dict[str, Any], region: str = "local") -> dict[str, Any]:
    """Wait until every slot that the region had ``before`` has more pushes merged, by another process or the same one
    begun anew."""
    then = {s["slot"]: s for s in before["slots"] if s["region"] == region}

    def has_more(slot: dict[str, Any]) -> bool:
        old = then[slot["slot"]]
        return slot["incarnation"] > old["incarnation"] and slot["merged_pushes"] > old["merged_pushes"]

    def holds(document: dict[str, Any]) -> bool:
        return all(s["state"] == "active" and has_more(s) for s in document["slots"] if s["slot"] in then)

    after = job.wait_training("all learners, begun anew, are in merges", holds, 240)
    assert all(a >= b for a, b in zip(after["versions"], before["versions"], strict=True)), "merges were lost"
    assert after["tokens"]["trained"] > before["tokens"]["trained"]
    return dict(after)


@pytest.mark.promise(
    "No learner begins with a fresh optimizer state after a common end: all programs killed at once; one "
    "killed while the others' pods are deleted; all pods deleted, before and after a suspension; all of "
    "one cluster"
)
@pytest.mark.timeout(800)
def test_all_learners_and_then_all_pods_are_deleted_at_once(cluster: Cluster, start: Any) -> None:
    """Their directories go with them. Before the job was ever suspended there is no optimizer state left then; after
    it, there is that of the job's checkpoint, and all begin with it."""
    job: Job = start("gone", learners=killable(), regions=REGIONS)
    before = job.in_merges(LEARNERS)
    for suspended in (False, True):
        if suspended:
            cluster.diloco("suspend", job.name, "-n", job.namespace)
            job.wait_condition("Suspended", timeout=120)
            cluster.diloco("resume", job.name, "-n", job.namespace)
            before = job.in_merges(LEARNERS)
        for selector in ("diloco.io/role=learner", f"diloco.io/job={job.name}"):
            pods, syncer = job.identities(), job.identities("syncer")
            moment = clock()
            delete(job, "-l", selector)
            until("successors", lambda old=pods: all(job.identities()[name][0] != old[name][0] for name in old), 90)
            if "job" in selector:
                until("a new syncer", lambda old=syncer: not job.identities("syncer").keys() & old.keys(), 90)
            else:
                assert job.identities("syncer") == syncer
            sources = all_began(job)
            after = merged_since(job, before)
            print(f"{selector}, suspended before: {suspended}: {clock() - moment:.1f} s; {sorted(sources.values())}")
            assert (after["epoch"] > before["epoch"]) == ("job" in selector)
            # Whoever comes later may be given the state of who came first.
            first = JOB if suspended else "begins fresh"
            assert any(source.startswith(first) for source in sources.values()), sources
            assert all(source.startswith((first, PEER)) for source in sources.values()), sources
            before = after
            job.exact()
    assert job.status()["phase"] == "Running"


@pytest.mark.promise(
    "No learner begins with a fresh optimizer state after a common end: all programs killed at once; one "
    "killed while the others' pods are deleted; all pods deleted, before and after a suspension; all of "
    "one cluster"
)
@pytest.mark.timeout(600)
def test_all_programs_end_at_once_and_some_directories_are_gone(cluster: Cluster, start: Any) -> None:
    """Containers that are killed keep their directories, and with them the slot's own state. First all are killed;
    then one is, and the others' pods are deleted: these get the state of the one that found its own."""
    job: Job = start("killed", learners=killable(), regions=REGIONS)
    before = job.in_merges(LEARNERS)
    pods = sorted(job.identities())

    def written(pod: str) -> str:
        """The slot's own checkpoint, with its time; empty: there is none."""
        words = ("--", "sh", "-c", "cd /var/lib/diloco/state && stat -c '%n %Y' *.safetensors")
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

    keeper, others, moment = pods[0], pods[1:], clock()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda act: act(), (lambda: kill(job, keeper), lambda: delete(job, *others))))
    until("successors", lambda: all(job.identities()[pod][0] != now[pod][0] for pod in others), 90)
    merged_since(job, after)
    sources = all_began(job)
    print(f"one killed, the others' pods deleted: {clock() - moment:.1f} s; {sources}")
    assert job.identities()[keeper] == (now[keeper][0], now[keeper][1] + 1)
    assert sources == {keeper: OWN, **dict.fromkeys(others, PEER)}
    job.exact()
