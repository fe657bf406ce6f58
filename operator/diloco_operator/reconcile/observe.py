"""Read what the cache has of a job into an ``Observed``, for one turn of the plan.

Also what the shell itself has to read in pods: which one is the syncer that can be
asked, and which learners have a status page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from diloco_operator.informer.cache import Cache
from diloco_operator.kube.kinds import JOB
from diloco_operator.model import Key, Object, Observed
from diloco_operator.plan.pod_status import place_in_group
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
    """Name -> UID and IP of the learners that run; of a learner of several pods, of the pod that leads."""
    return {
        str(pod["metadata"]["name"]): (str(pod["metadata"]["uid"]), str(pod["status"]["podIP"]))
        for pod in pods
        if _role(pod) == "learner" and _runs(pod) and not pod["metadata"].get("deletionTimestamp")
        if place_in_group(str(pod["metadata"]["name"]), pod["metadata"]["labels"]).rank == 0
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


def read_cached_job(cache: Cache, key: Key, nodes_are_read: bool, now: float) -> Observed | None:
    """What the cache has of a job; None: there is no such job. Events, errors and answers are still missing."""
    job = cache.get(JOB, *key)
    if job is None:
        return None
    objects, pods = cache.of_job(key)
    nodes = {str(pod["spec"]["nodeName"]) for pod in pods if pod["spec"].get("nodeName")}
    return Observed(now, job, objects, pods, nodes=cache.nodes(nodes) if nodes_are_read else None)
