"""``diloco chaos --context``: learners' pods of a job in a cluster, deleted by a schedule.

What is deleted is gone at once, without its grace period, as with a lost machine; the operator makes it again, so how
long it is away is the cluster's to say. A pod that is not there when its turn comes is waited for until the time is
over. Nothing is compared here: the job's report says what it cost. As JSON it is one object, whose rows tell the second
of each deletion beside the schedule's (null: it was not carried out); progress goes to stderr then.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from diloco.cluster.client import Cluster, ClusterError, Where
from diloco.cluster.logs import chosen
from diloco.cluster.render import holds
from diloco.console import COMPLETE, FAILED, CommandError, print_text
from diloco.local.chaos.schedule import Fault, FaultSchedule

POLL_SECONDS = 0.5
TELL_SECONDS = 30.0


def delete_by_schedule(
    where: Where, name: str, schedule: Sequence[Fault], seconds: float, as_json: bool = False
) -> int:
    """Delete the pods of the schedule's learners, and of its syncer, within ``seconds``; its times count from now.

    Returns the exit code: 1 where the job failed, or a pod's turn never came. Raises ClusterError, CommandError."""
    for fault in schedule:
        if fault.action != "kill" or fault.at_step is not None or fault.duration:
            raise CommandError(
                f"--chaos {fault.text}: in a cluster pods are deleted, at times: write"
                f" {fault.after_seconds or 20:g}s:kill:{fault.target};"
                " manifests/chaos has cuts and slow-downs for Chaos Mesh"
            )
    cluster = where.open_one()

    def print_progress(text: str) -> None:
        print_text(text, sys.stderr if as_json else None, flush=True)

    deleted, held = _delete_all(cluster, name, FaultSchedule(schedule), seconds, print_progress=print_progress)
    for fault in held:
        print_progress(f"{fault.text} was never carried out: there was no such pod, or the job ended first")
    failed = holds(cluster.job(name), "Failed")
    print_progress(f"{name} {'has failed' if failed else 'continues'}: diloco report {name} {cluster.flags}")
    if as_json:
        rows = [_row(fault, pod, passed) for fault, pod, passed in deleted]
        rows += [_row(fault, None, None) for fault in held]
        print_text(json.dumps({"job": name, "failed": failed, "rows": rows}))
    return FAILED if failed or held else COMPLETE


def _row(fault: Fault, pod: str | None, passed: float | None) -> dict[str, Any]:
    due = fault.after_seconds
    row = {"name": fault.text, "value": passed, "unit": "s", "against": "the schedule", "baseline": due, "pod": pod}
    return {**row, "ratio": passed / due if passed is not None and due else None}


def _delete_all(
    cluster: Cluster, name: str, schedule: FaultSchedule, seconds: float, print_progress: Callable[[str], None]
) -> tuple[list[tuple[Fault, str, float]], list[Fault]]:
    """Returns what was deleted, by which pod and when, and those that were not there in time."""
    begun = time.monotonic()
    deleted: list[tuple[Fault, str, float]] = []
    held: list[Fault] = []
    told = 0.0
    while (passed := time.monotonic() - begun) < seconds:
        due = [*held, *(fault for _, fault in schedule.due(passed, 0))]
        held = []
        for fault in due:
            pod = _delete(cluster, name, fault)
            if pod is None:
                held.append(fault)
                continue
            deleted.append((fault, pod, time.monotonic() - begun))
            print_progress(f"deleted {pod} ({fault.text})")
        if _has_ended(cluster, name):
            break
        if passed >= told:
            told = passed + TELL_SECONDS
            print_progress(f"{passed:.0f} of {seconds:.0f} s, {len(schedule.waiting)} deletions to come")
        time.sleep(POLL_SECONDS)
    return deleted, [*held, *schedule.waiting]


def _has_ended(cluster: Cluster, name: str) -> bool:
    try:
        job = cluster.job(name)
    except ClusterError as error:
        if error.passing:
            return False  # asked again soon
        raise
    return holds(job, "Complete") or holds(job, "Failed")


def _delete(cluster: Cluster, name: str, fault: Fault) -> str | None:
    """The name of the pod that was deleted; None: there is no such pod at the moment, or nobody answers."""
    try:
        pods = [pod for pod in cluster.pods(name) if not pod["metadata"].get("deletionTimestamp")]
        targets = chosen(cluster.job(name), pods, fault.target)
        if not targets:
            return None
        target = targets[0]
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": target.uid}}
        cluster.request("DELETE", cluster.pod_path(target.pod), body=body)
    except ClusterError as error:
        if error.passing or error.reason in ("NotFound", "Conflict"):
            return None
        raise
    return target.pod
