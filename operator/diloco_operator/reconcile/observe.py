"""Freeze what is known about a job into an ``Observed``, for one turn of the plan.

Also what the shell itself has to read in pods: which one is the syncer that can be
asked, and which learners have a status page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco_operator.informer.cache import Cache
from diloco_operator.kube.kinds import JOB
from diloco_operator.model import ApplyError, ClusterEvent, Key, Object, Observed, ProgramAnswer, Ref
from diloco_protocol.documents import LearnerPage, Report, StatusDocument
from diloco_protocol.vocabulary import LABEL_ROLE


def _role(pod: Object) -> str:
    return str((pod["metadata"].get("labels") or {}).get(LABEL_ROLE) or "")


def _runs(pod: Object) -> bool:
    """Whether the pod's main container runs and has an address."""
    status = pod.get("status") or {}
    if not status.get("podIP") or status.get("phase") != "Running":
        return False
    return any(
        container.get("name") == _role(pod) and "running" in (container.get("state") or {})
        for container in status.get("containerStatuses") or ()
    )


def syncer_pod(pods: Iterable[Object]) -> tuple[str, str] | None:
    """UID and IP of the syncer that can be asked: the youngest that runs, one that is not ending first."""
    running = [pod for pod in pods if _role(pod) == "syncer" and _runs(pod)]
    if not running:
        return None
    best = max(
        running,
        key=lambda pod: (not pod["metadata"].get("deletionTimestamp"), pod["metadata"].get("creationTimestamp") or ""),
    )
    return str(best["metadata"]["uid"]), str(best["status"]["podIP"])


def learner_pods(pods: Iterable[Object]) -> dict[str, tuple[str, str]]:
    """Name -> UID and IP of the learners that run."""
    return {
        str(pod["metadata"]["name"]): (str(pod["metadata"]["uid"]), str(pod["status"]["podIP"]))
        for pod in pods
        if _role(pod) == "learner" and _runs(pod) and not pod["metadata"].get("deletionTimestamp")
    }


def syncer_is_here(job: Object, cluster: str | None) -> bool:
    """Whether this cluster runs the job's syncer."""
    spec = job.get("spec")
    syncer = spec.get("syncer") if isinstance(spec, Mapping) else None
    wanted = syncer.get("cluster") if isinstance(syncer, Mapping) else None
    return wanted is None or wanted == cluster


def role_runs(pods: Iterable[Object], role: str) -> bool:
    """Whether a pod of the role runs, and so has everything that it mounts."""
    return any(_role(pod) == role and _runs(pod) for pod in pods)


@dataclass(frozen=True, slots=True)
class CachedJob:
    """The watches' part of an ``Observed``."""

    job: Object
    objects: dict[Ref, Object]
    pods: tuple[Object, ...]
    nodes: dict[str, Object] | None


def read_cached_job(cache: Cache, key: Key, nodes_are_read: bool) -> CachedJob | None:
    """What the cache has of a job; None: there is no such job."""
    job = cache.get(JOB, *key)
    if job is None:
        return None
    objects, pods = cache.of_job(key)
    names = {str(pod["spec"]["nodeName"]) for pod in pods if pod["spec"].get("nodeName")}
    return CachedJob(job, objects, pods, cache.nodes(names) if nodes_are_read else None)


def make_observed(
    seen: CachedJob,
    now: float,
    *,
    status: dict[str, Any] | None,
    cluster_events: Sequence[ClusterEvent],
    apply_errors: Sequence[ApplyError],
    syncer: ProgramAnswer[StatusDocument] | None,
    learners: dict[str, ProgramAnswer[LearnerPage]],
    report: Report | None,
) -> Observed:
    """The whole. ``status``: one that was planned and could not be written yet, and counts as the job's."""
    job = seen.job if status is None else {**seen.job, "status": status}
    return Observed(
        now=now,
        job=job,
        objects=seen.objects,
        pods=seen.pods,
        nodes=seen.nodes,
        cluster_events=tuple(cluster_events),
        apply_errors=tuple(apply_errors),
        syncer=syncer,
        learners=learners,
        report=report,
    )
