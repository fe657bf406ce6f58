"""Replacement beyond a deleted pod (2) and a lost node (5): out of memory, evicted, silent, stuck Pending."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .clusters import Cluster, CommandFailed, until
from .jobs import LEARNER_CPU, Job, pod_template
from .test_wrong import told

ONE = [{"name": "local", "learners": 1}]

# The built-in trainer, deaf and dumb from the moment at which /tmp/mute is there: it lives and trains, its
# status port answers, and none of its connections to the syncer stays.
MUTED = """
import os, runpy, socket, threading, time

def cut():
    while not os.path.exists("/tmp/mute"):
        time.sleep(0.2)
    from diloco_worker.settings import WorkerSettings
    WorkerSettings.address = lambda self: None
    while True:
        for fd in os.listdir("/proc/self/fd"):
            try:
                one = socket.socket(fileno=int(fd))
            except OSError:
                continue  # no socket, or closed meanwhile
            try:
                if one.getpeername()[1:2] == (7700,):
                    one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            finally:
                one.detach()
        time.sleep(0.2)

threading.Thread(target=cut, daemon=True).start()
runpy.run_module("diloco_worker", run_name="__main__")
"""


def replaced(job: Job) -> int:
    """How many replacements count against the failure policy, since the job began."""
    return int(job.status().get("replacements", {}).get("total", 0))


def said(job: Job, reason: str, words: str) -> bool:
    return any(e["reason"] == reason and words in e["message"] for e in job.events())


@pytest.mark.timeout(400)
def test_a_learner_that_runs_out_of_memory(start: Any) -> None:
    """The cause is named with its cure, each end counts, and more memory heals it."""
    greedy = "kept = [b'x' * (1 << 20) for _ in range(512)]"
    job: Job = start(
        "greedy",
        learners={"command": ["python", "-c", greedy], "podTemplate": pod_template("learner", LEARNER_CPU, "128Mi")},
        regions=ONE,
        # The rule, for the same error again and again would fail a job that has not merged.
        failurePolicy={"maxReplacements": 100, "rules": [{"exitCodes": [137], "action": "Replace"}]},
    )
    told(job, "OOMKilled", "resources.limits.memory", timeout=120)
    until("it is counted", lambda: replaced(job) >= 1, 60)
    until("it is told", lambda: said(job, "LearnerCrashed", "OOMKilled"), 60)
    job.patch({"spec": {"learners": {"command": None, "podTemplate": pod_template("learner", LEARNER_CPU)}}})
    job.in_merges(1, timeout=200)


@pytest.mark.timeout(400)
def test_an_evicted_learner(cluster: Cluster, start: Any) -> None:
    """As `kubectl drain` does it: as many at once as the job can be without, replaced, told, and not counted."""
    job: Job = start("evicted", learners=3, sync={"quorum": 2})
    job.in_merges(3)
    before = job.identities()
    victim, other = sorted(before)[:2]

    def evict(pod: str) -> None:
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": job.namespace}}
        path = f"/api/v1/namespaces/{job.namespace}/pods/{pod}/eviction"
        cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))

    until("the budget knows its pods", lambda: not attempt(evict, victim), 60)
    with pytest.raises(CommandFailed, match="disruption budget"):
        evict(other)
    until(f"a successor of {victim}", lambda: job.identities()[victim][0] != before[victim][0], 90)
    job.in_merges(3)
    until("it is told", lambda: said(job, "LearnerGone", "it was evicted"), 60)
    until("its return too", lambda: said(job, "LearnerReplaced", victim), 60)
    assert replaced(job) == 0
    now = job.identities()
    assert {p: now[p] for p in before if p != victim} == {p: before[p] for p in before if p != victim}
    job.exact()


def attempt(evict: Any, pod: str) -> str:
    """Why it was refused; empty: it was not."""
    try:
        evict(pod)
    except CommandFailed as error:
        return str(error)
    return ""


@pytest.mark.timeout(500)
def test_a_silent_learner(cluster: Cluster, start: Any) -> None:
    """It runs, says that it is ready, and the syncer does not hear it: a new pod takes its place."""
    template = pod_template("learner", LEARNER_CPU)
    job: Job = start(
        "silent",
        learners={"command": ["python", "-c", MUTED], "podTemplate": template},
        regions=[{"name": "local", "learners": 2}],
    )
    job.in_merges(2)
    before = job.identities()
    cluster.kubectl("exec", "-n", job.namespace, "silent-local-1", "--", "touch", "/tmp/mute")
    told(job, "silent-local-1", "does not hear it", timeout=60)
    assert job.identities() == before, "first it is waited for"
    until("a successor", lambda: job.identities()["silent-local-1"][0] != before["silent-local-1"][0], 150)
    job.in_merges(2)
    until("it is told", lambda: said(job, "LearnerDeleted", "does not hear it"), 60)
    assert replaced(job) == 0, "the operator's own doing"
    assert job.identities()["silent-local-0"] == before["silent-local-0"]
    job.exact()


@pytest.mark.timeout(400)
def test_a_learner_that_no_node_takes(start: Any) -> None:
    """Told, left alone and not counted; a template that fits takes its place, and the others go on."""
    job: Job = start("placeless", learners=2)
    job.in_merges(2)
    template = pod_template("learner", LEARNER_CPU)
    template["spec"]["nodeSelector"] = {"example.com/gpu": "none-has-it"}
    job.patch({"spec": {"learners": {"podTemplate": template}}})
    told(job, "rolled out", "no node takes it", timeout=120)
    job.merging_on()
    taken = [pod for pod in job.pods("learner") if not pod["spec"].get("nodeName")]
    assert len(taken) == 1 and replaced(job) == 0
    job.patch({"spec": {"learners": {"podTemplate": {"spec": {"nodeSelector": None}}}}})
    job.in_merges(2, timeout=200)
    until("all are well", lambda: job.condition("Degraded").get("status") == "False", 90)
    assert replaced(job) == 0
    job.exact()
