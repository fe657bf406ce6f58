"""2. Learners' pods are deleted at random moments; 4. so is the operator's, in the middle.

Survivors never restart, and merge without the one that is away; every replacement contributes
again. Printed for each deletion: gone, fenced, running, joined, in a merge, in seconds from
`kubectl delete`, and how the survivors' step time after it compares with that before it.
"""

from __future__ import annotations

import calendar
import json
import math
import random
import re
import statistics
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from repository import ROOT

from .clusters import Cluster, until
from .conftest import SYSTEM
from .jobs import Job, clock, small_job
from .test_syncer_pod import tape

WINDOW = 20.0  # seconds of steps before and after a deletion


@dataclass
class Timeline:
    """Seconds from the deletion; ``slower``: the worst survivor's median step time against before (nan: unknown);
    ``without``: merges from the deletion until the successor joined, without a push of the pod."""

    pod: str
    forced: bool
    gone: float = 0.0
    fenced: float = 0.0
    running: float = 0.0
    joined: float = 0.0
    merged: float = 0.0
    slower: float = math.nan
    without: int = 0


def merges_without(job: Job, slot: int, incarnation: int, since: float, to: float) -> int:
    """How many merges there were between two wall-clock times without a push of this incarnation."""
    lines = [line for line in tape(job) if line.get("kind") == "merge" and since <= line["time"] <= to]
    responders = [{(r["slot"], r["incarnation"]) for r in line["responders"]} for line in lines]
    return sum(bool(pairs) and (slot, incarnation) not in pairs for pairs in responders)


def delete_and_follow(job: Job, victim: str, forced: bool) -> Timeline:
    pod = job.pod(victim)
    assert pod is not None
    uid = pod["metadata"]["uid"]
    old_process = uid.replace("-", "")
    document = job.wait_training(
        f"{victim} has a slot", lambda d: any(s["process"].startswith(old_process) for s in d["slots"])
    )
    newest = document["events"][-1]["n"] if document["events"] else 0
    held = next(s for s in document["slots"] if s["process"].startswith(old_process))
    slot = held["slot"]
    told = Timeline(victim, forced)
    start = clock()
    words = ("--grace-period=0", "--force") if forced else ()
    job.cluster.kubectl("delete", "pod", victim, "-n", job.namespace, "--wait=false", *words)

    def successor() -> dict[str, Any] | None:
        found = job.pod(victim)
        if told.gone == 0.0 and (found is None or found["metadata"]["uid"] != uid):
            told.gone = clock() - start
        return found if found is not None and found["metadata"]["uid"] != uid else None

    new = until(f"a successor of {victim}", successor, 90, every=0.2)
    process = new["metadata"]["uid"].replace("-", "")

    def running() -> str | None:
        states = (job.pod(victim) or {})["status"].get("containerStatuses", [])
        found = next((s["state"]["running"]["startedAt"] for s in states if "running" in s["state"]), None)
        return str(found) if found else None

    started = until(f"{victim} runs again", running, 90, every=0.2)
    told.running = max(calendar.timegm(time.strptime(started, "%Y-%m-%dT%H:%M:%SZ")) - start, told.gone)

    def merged(document: dict[str, Any]) -> bool:
        row = next((s for s in document["slots"] if s["process"].startswith(process)), None)
        return row is not None and any(
            e["kind"] == "first-merge" and e["slot"] == row["slot"] and e["incarnation"] == row["incarnation"]
            for e in document["events"]
        )

    document = job.wait_training(f"{victim} is in a merge again", merged, 120)
    events = [e for e in document["events"] if e["n"] > newest]
    row = next(s for s in document["slots"] if s["process"].startswith(process))
    told.fenced = (
        next(
            e["time"]
            for e in events
            if (e["slot"] == slot and e["kind"] in ("process-ended", "lost", "drained"))
            or (e["slot"] == row["slot"] and e["kind"] == "joined")
        )
        - start
    )
    mine = [e for e in events if e["slot"] == row["slot"] and e["incarnation"] == row["incarnation"]]
    told.joined = next(e["time"] for e in mine if e["kind"] == "joined") - start
    told.merged = next(e["time"] for e in mine if e["kind"] == "first-merge") - start
    told.without = merges_without(job, slot, held["incarnation"], start, to=start + told.joined)
    return told


def keep_seconds(kind: str, timelines: list[Timeline]) -> None:
    """Add a line to the file of all measured runs, of which docs/results/cluster.md shows some."""
    words = ("git", "describe", "--always", "--dirty", "--abbrev=8")
    commit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    line = {"commit": commit, "cluster": kind, "seconds": [asdict(one) for one in timelines]}
    with (ROOT / "bench" / "results" / "deletions.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


@pytest.mark.promise(
    "Deleted learner pods are replaced and merged again, also while the operator restarts; the others are "
    "not restarted and merge meanwhile"
)
@pytest.mark.parametrize(
    "count", [pytest.param(3, marks=pytest.mark.timeout(600)), pytest.param(10, marks=pytest.mark.timeout(1500))]
)
def test_learners_are_deleted(cluster: Cluster, start: Any, count: int) -> None:
    job: Job = start("chaos", learners=3)
    job.in_merges(3)
    rng = random.Random(count)
    timelines: list[Timeline] = []
    pods = sorted(job.identities())
    for turn in range(count):
        # Long enough for the steps before the deletion to be those of a whole quorum.
        time.sleep(WINDOW + rng.uniform(0, 5))
        before = job.identities()
        victim, forced = rng.choice(pods), turn % 2 == 1
        began = clock()
        earlier = job.step_seconds(began - WINDOW, began)
        if turn == count // 2:  # nobody is there to replace anything, and nothing waits for it
            cluster.kubectl(
                "delete", "pod", "-n", SYSTEM, "-l", "app.kubernetes.io/name=diloco-operator", "--wait=false"
            )
        told = delete_and_follow(job, victim, forced)
        time.sleep(max(0.0, began + WINDOW - clock()))
        later = job.step_seconds(began, began + WINDOW)
        survivors = [p for p in pods if p != victim]
        # One that has made no step in the window took longer than that; one that had made none before says nothing.
        told.slower = max((later.get(p, math.inf) / earlier[p] for p in survivors if p in earlier), default=math.nan)
        timelines.append(told)
        print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in asdict(told).items()))
        after = job.identities()
        assert {p: after[p] for p in survivors} == {p: before[p] for p in survivors}, "a survivor restarted"
        job.in_merges(3)
        assert told.without, f"nobody merged while {victim} was away"
    job.exact()
    # The operator has caught up. Its conditions are no sign of it, they stood while it was away; what it
    # writes about once a minute is.
    trained = job.training()["tokens"]["trained"]
    until("the operator tells of now", lambda: job.status()["progress"]["tokens"] >= trained, 150)
    job.wait_condition("Ready", timeout=60)
    keep_seconds(type(cluster).__name__, timelines)
    for name in ("gone", "fenced", "running", "joined", "merged", "slower", "without"):
        values = [value for t in timelines if not math.isnan(value := getattr(t, name))] or [math.nan]
        print(f"{name:8} median {statistics.median(values):6.2f}  greatest {max(values):6.2f}")
    # `slower` is a figure and no limit: a replacement imports for seconds on cores that its survivors share, and so do
    # other programs of the machine.


@pytest.mark.timeout(900)
def test_pods_are_deleted_by_a_random_schedule(cluster: Cluster, start: Any, tmp_path: Path) -> None:
    """``diloco chaos --context``: learners' pods and then the syncer's are deleted, and the operator replaces them."""
    job: Job = start("random", learners=3)
    job.in_merges(3)
    before = job.identities() | job.identities("syncer")
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(small_job("random", learners=3)))
    chaos = ("chaos", str(file), "-n", job.namespace)
    said = cluster.diloco(*chaos, "--mtbf", "60", "--minutes", "1.5", "--seed", "1", timeout=200)
    deleted = set(re.findall(r"^deleted (\S+) ", said, re.MULTILINE))
    assert deleted and "random continues" in said, said
    said = cluster.diloco(*chaos, "--chaos", "1s:kill:syncer", "--minutes", "0.2", "--json", timeout=60)
    deleted |= {row["pod"] for row in json.loads(said)["rows"]}
    job.in_merges(3)
    job.merging_on()
    after = job.identities() | job.identities("syncer")
    for pod in before:
        same = after.get(pod) == before[pod]
        assert same == (pod not in deleted), f"{pod}: deleted were {sorted(deleted)}"
    job.exact()
