"""Names, labels and annotations of a job's objects, and the paths in its pods.

docs/contracts.md has them as the contract between operator, images, chart and command line.
Names that other packages use too are in ``diloco_protocol.vocabulary``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco_operator.model import Object, Ref
from diloco_protocol.resources import SYNCER_VOLUME
from diloco_protocol.vocabulary import API_VERSION, DOMAIN, JOB_KIND, LABEL_JOB, LABEL_REGION, LABEL_ROLE, LABEL_SHARD

SHARD = "shard"
"""The role of a pod that has a shard of the syncer."""
MANAGER = "diloco-operator"
"""Field manager of server-side apply, and the value of app.kubernetes.io/managed-by."""

GENERATION = f"{DOMAIN}/generation"
"""Annotation of pod-carrying objects: the job's generation that they were rendered for."""
RENDERED = f"{DOMAIN}/rendered"
"""Annotation of pod-carrying objects: their spec as it was rendered then, JSON without replicas."""
ORIGIN = f"{DOMAIN}/rendered-by"
"""Annotation of pod-carrying objects: which release rendered them, and digests of what they were rendered from."""
JOB_UID = f"{DOMAIN}/job-uid"
"""Annotation of every object of a job, and its pods: the job's UID. By it an object is known whose labels or owners
were edited, and a pod that an earlier job of the name has left."""
INPUTS = f"{DOMAIN}/inputs"
"""Annotation of pod templates: a digest of what of the job the program reads when it starts."""

POD_REVISION = "controller-revision-hash"
GROUP_PODS = f"{DOMAIN}/pods"
"""Label of a learner's pods where it has several: how many. Those of one learner follow each other: its ordinal is the
pod's index divided by this number, and what remains is the pod's rank in it. The pod with rank 0 leads."""

SETTINGS_PATH = "/etc/diloco/settings"
CREDENTIALS_PATH = "/etc/diloco/credentials"
CONTROL_PATH = "/etc/diloco/control"
DATA_PATH = SYNCER_VOLUME


def ref_of(manifest: Object) -> Ref:
    return Ref(manifest["kind"], manifest["metadata"]["name"])


def settings_map(job: str) -> Ref:
    return Ref("ConfigMap", f"{job}-settings")


def claim(job: str) -> Ref:
    return Ref("PersistentVolumeClaim", f"{job}-syncer")


def syncer_deployment(job: str) -> Ref:
    return Ref("Deployment", f"{job}-syncer")


def syncer_service(job: str) -> Ref:
    return Ref("Service", f"{job}-syncer")


def shard_deployment(job: str, shard: int) -> Ref:
    return Ref("Deployment", f"{job}-syncer-shard-{shard}")


def shard_service(job: str, shard: int | str) -> Ref:
    """Where learners reach a shard of the syncer."""
    return Ref("Service", f"{job}-syncer-shard-{shard}")


def shards_service(job: str) -> Ref:
    """Where the shards of a syncer reach it."""
    return Ref("Service", f"{job}-syncer-shards")


def role_of(job: str, ref: Ref) -> tuple[str, str]:
    """The role of the pods that an object makes, and their place as ``labels`` has it; empty: they have none."""
    name = ref.name.removeprefix(f"{job}-")
    if ref.kind == "StatefulSet":
        return "learner", name
    shard = name.removeprefix("syncer-shard-")
    return (SHARD, shard) if shard != name else (name, "")


def evaluator_deployment(job: str) -> Ref:
    return Ref("Deployment", f"{job}-evaluator")


def stateful_set(job: str, region: str) -> Ref:
    return Ref("StatefulSet", f"{job}-{region}")


def region_service(job: str, region: str) -> Ref:
    return Ref("Service", f"{job}-{region}")


def budget(job: str, region: str) -> Ref:
    return Ref("PodDisruptionBudget", f"{job}-{region}")


def secret_name(job: str, role: str, uid: str) -> str:
    """The name of a Secret that the operator makes. ``role``: syncer or learner. It has the first 8 digits of
    the job's UID: Secrets are never read back, so an earlier job's must not be used for this one."""
    return f"{job}-{role}-{uid.replace('-', '')[:8]}"


def labels(job: str, role: str, place: str | None = None) -> dict[str, str]:
    """The labels of an object of that job. ``role``: syncer, shard, learner or evaluator. ``place``: of a learner its
    region, of a shard its number."""
    found = {
        "app.kubernetes.io/name": "diloco",
        "app.kubernetes.io/instance": job,
        "app.kubernetes.io/component": role,
        "app.kubernetes.io/managed-by": MANAGER,
        LABEL_JOB: job,
        LABEL_ROLE: role,
    }
    return found | ({LABEL_SHARD if role == SHARD else LABEL_REGION: place} if place else {})


def owner_reference(job: str, uid: str) -> Object:
    """The ownerReference of a job's objects."""
    return {
        "apiVersion": API_VERSION,
        "kind": JOB_KIND,
        "name": job,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def is_ours(ref: Ref, live: Mapping[str, Any], job: str, uid: str) -> bool:
    """Whether a live object is this job's: its controller has the job's UID, or it has no controller any more and was
    made for this very job. A claim outlives jobs, and has no owner: it is the job's by its labels, too."""
    metadata = live.get("metadata") or {}
    controllers = [o for o in metadata.get("ownerReferences") or [] if o.get("controller")]
    if controllers:
        return any(o.get("uid") == uid for o in controllers)
    made_for_it = (metadata.get("annotations") or {}).get(JOB_UID) == uid
    return made_for_it or (ref.kind == "PersistentVolumeClaim" and is_left_by(live, job))


def is_left_by(live: Mapping[str, Any], job: str) -> bool:
    """Whether an operator made the object for a job of this name, by its labels."""
    found = (live.get("metadata") or {}).get("labels") or {}
    return found.get(LABEL_JOB) == job and found.get("app.kubernetes.io/managed-by") == MANAGER
