"""``diloco chaos --context``: learners' pods of a job in a cluster, deleted by a schedule.

What is deleted is gone at once, without its grace period, as with a lost machine; the operator makes it again, so how
long it is away is the cluster's to say. A pod that is not there when its turn comes is waited for until the time is
over. Nothing is compared here: the job's report says what it cost.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from diloco.cluster.client import Cluster, ClusterError, Where
from diloco.cluster.logs import chosen
from diloco.cluster.render import holds
from diloco.console import COMPLETE, FAILED, CommandError, print_text
from diloco.local.chaos.schedule import Fault, FaultSchedule

POLL_SECONDS = 0.5
TELL_SECONDS = 30.0


def delete_by_schedule(where: Where, name: str, schedule: Sequence[Fault], seconds: float) -> int:
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
    held = _delete_all(cluster, name, FaultSchedule(schedule), seconds)
    for fault in held:
        print_text(f"{fault.text} was never carried out: there was no such pod, or the job ended first")
    failed = holds(cluster.job(name), "Failed")
    print_text(f"{name} {'has failed' if failed else 'continues'}: diloco report {name} {cluster.flags}")
    return FAILED if failed or held else COMPLETE


def _delete_all(cluster: Cluster, name: str, schedule: FaultSchedule, seconds: float) -> list[Fault]:
    """Returns those that were not there in time."""
    begun = time.monotonic()
    held: list[Fault] = []
    told = 0.0
    while (passed := time.monotonic() - begun) < seconds:
        due = [*held, *(fault for _, fault in schedule.due(passed, 0))]
        held = [fault for fault in due if not _delete(cluster, name, fault)]
        job = cluster.job(name)
        if holds(job, "Complete") or holds(job, "Failed"):
            break
        if passed >= told:
            told = passed + TELL_SECONDS
            print_text(f"{passed:.0f} of {seconds:.0f} s, {len(schedule.waiting)} deletions to come", flush=True)
        time.sleep(POLL_SECONDS)
    return [*held, *schedule.waiting]


def _delete(cluster: Cluster, name: str, fault: Fault) -> bool:
    """False: there is no such pod at the moment, or nobody answers."""
    try:
        pods = [pod for pod in cluster.pods(name) if not pod["metadata"].get("deletionTimestamp")]
        targets = chosen(cluster.job(name), pods, fault.target)
        if not targets:
            return False
        target = targets[0]
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": target.uid}}
        cluster.request("DELETE", cluster.pod_path(target.pod), body=body)
    except ClusterError as error:
        if error.passing or error.reason in ("NotFound", "Conflict"):
            return False
        raise
    print_text(f"deleted {target.pod} ({fault.text})", flush=True)
    return True
