"""The manifests of a job's objects, for server-side apply: each names the fields that the operator owns.

Three kinds of objects hold pods: the Deployments of the syncer and of its shards that have pods, the evaluator's
Deployment, and the regions' StatefulSets. These are rendered anew only when what they are made of has changed
(``Origin``), or when ``spec.release`` has. Until then the old rendering is applied again; the annotation
``names.RENDERED`` keeps it, ``names.GENERATION`` says for which generation it holds, and ``names.ORIGIN`` what it was
made of, and by which release.

Example: release 2 of the operator would give every pod another label, and the syncer another flag. After the upgrade no
pod restarts, for the old renderings are applied, also after an edit of ``suspend``. Label, flag and the image that
knows the flag come together, with ``diloco upgrade``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from diloco_operator import names
from diloco_operator.job import Job, Placement
from diloco_operator.kube.kinds import BY_NAME
from diloco_operator.model import Object, PlanSettings, Ref, SecretWanted
from diloco_operator.names import GENERATION, ORIGIN, RENDERED
from diloco_operator.objects import pods
from diloco_protocol.common.quantities import bytes_of
from diloco_protocol.spec.cluster import RegionSpec
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import job_to_json
from diloco_protocol.vocabulary import (
    CONTROL_PORT,
    HTTP_PORT,
    LABEL_JOB,
    LABEL_REGION,
    LABEL_ROLE,
    LABEL_SHARD,
    SHARDS_PORT,
    SYNC_PORT,
    WORKER_PORT,
)


@dataclass(frozen=True, slots=True)
class Release:
    """A release of the operator, whose templates and default images a job has. ``asked``: ``spec.release`` that it
    carried out."""

    operator: str
    asked: str | None
    syncer: str  # image of the syncer
    worker: str  # image of learners and evaluator


@dataclass(frozen=True, slots=True)
class Origin:
    """What a rendering was made of. The digests are those of the release that computed them, so they are compared
    only where the generation has changed."""

    release: str  # of the operator that rendered it
    asked: str | None  # spec.release then
    template: str  # pods.template_inputs
    program: str  # what the program reads when it starts, pods.*_inputs


class Rendering(NamedTuple):
    """The spec of an object that holds pods, as it was rendered for a generation of the job. ``origin`` None: what it
    was made of is not known."""

    generation: int
    spec: Object
    origin: Origin | None = None


@dataclass(slots=True)
class Scale:
    """How many of each there shall be."""

    syncer: int = 0
    evaluator: int = 0
    learners: dict[str, int] = field(default_factory=dict)  # by region; absent: 0. Each has one pod or several


# ------------------------------------------------------------------ what holds no pods


def manifests_without_pods(job: Job, here: Placement, settings: PlanSettings) -> list[Object]:
    """The manifests of all objects that hold no pods, without the claim."""
    found = [_settings(job, here)]
    if here.syncer:
        found += [_syncer_policy(job, settings), _syncer_service(job)]
        if shard_deployments(job, here):
            found += [_shard_policy(job), _shards_service(job)]
        found += [_syncer_service(job, shard) for shard in range(len(shard_deployments(job, here)))]
    if here.regions or _evaluated(job, here):
        found.append(_worker_policy(job, here, settings))
    for region in here.regions:
        found += [_region_service(job, region), _budget(job, region)]
    return found


def _evaluated(job: Job, here: Placement) -> bool:
    return here.syncer and job.spec.evaluated


def sync_address(job: Job, here: Placement) -> str:
    """HOST:PORT at which this cluster's learners reach the syncer."""
    if here.syncer:
        # Without the cluster's domain, which is not everywhere cluster.local: the pods' resolver knows it.
        return f"{names.syncer_service(job.name).name}.{job.namespace}.svc:{SYNC_PORT}"
    return job.spec.syncer.endpoint.learner_address


def _settings(job: Job, here: Placement) -> Object:
    return _object(job, names.settings_map(job.name), "syncer", {"data": settings_data(job, here)})


def settings_data(job: Job, here: Placement) -> dict[str, str]:
    """The files that the job's programs read when they start."""
    document = job.document
    assert document is not None
    data = {"job.json": job.normal_form, "address.json": json.dumps({"sync": sync_address(job, here)}) + "\n"}
    if _evaluated(job, here) and job.spec.training.device == "cuda":
        data["evaluator.json"] = job_to_json(_on_any_device(document))
    return data


def _on_any_device(document: DiLoCoJob) -> DiLoCoJob:
    spec = document.spec
    training = spec.training.model_copy(update={"device": "auto"})
    return document.model_copy(update={"spec": spec.model_copy(update={"training": training})})


def _syncer_policy(job: Job, settings: PlanSettings) -> Object:
    control = {"ports": [_allow(CONTROL_PORT)], "from": [_namespace(settings.namespace)]}
    rules = [_sync_rule(job), control, _scraped(HTTP_PORT, settings)]
    if job.spec.syncer.shard_pods is not None:
        rules.append({"ports": [_allow(SHARDS_PORT)], "from": [{"podSelector": _of_role(job, names.SHARD)}]})
    return _policy(job, "syncer", _of_role(job, "syncer"), rules)


def _shard_policy(job: Job) -> Object:
    return _policy(job, names.SHARD, _of_role(job, names.SHARD), [_sync_rule(job)])


def _sync_rule(job: Job) -> Object:
    """Who may reach the syncer and its shards for training."""
    sync: Object = {"ports": [_allow(SYNC_PORT)]}
    if job.spec.syncer.endpoint.type == "ClusterIP":
        sync["from"] = [{"podSelector": {"matchLabels": {LABEL_JOB: job.name}}}]
    return sync


def _of_role(job: Job, role: str) -> Object:
    return {"matchLabels": {LABEL_JOB: job.name, LABEL_ROLE: role}}


def _worker_policy(job: Job, here: Placement, settings: PlanSettings) -> Object:
    selector = {
        "matchLabels": {LABEL_JOB: job.name},
        "matchExpressions": [{"key": LABEL_ROLE, "operator": "In", "values": ["learner", "evaluator"]}],
    }
    rules = [_scraped(WORKER_PORT, settings)]
    if any(job.spec.group(region.name).pods > 1 for region in here.regions):
        # Ranks of one learner choose their ports: torchrun's meeting, gloo, NCCL.
        rules.append({"from": [{"podSelector": _of_role(job, "learner")}]})
    return _policy(job, "learner", selector, rules)


def _policy(job: Job, role: str, selector: Object, rules: list[Object]) -> Object:
    word = {"syncer": "syncer", names.SHARD: "syncer-shards"}.get(role, "learners")
    ref = Ref("NetworkPolicy", f"{job.name}-{word}")
    spec = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": rules}
    return _object(job, ref, role, {"spec": spec})


def _scraped(port: int, settings: PlanSettings) -> Object:
    """The rule for a port with status and metrics: open to the operator, and to the namespace that scrapes."""
    rule: Object = {"ports": [_allow(port)]}
    if settings.metrics_namespace is not None:
        allowed = dict.fromkeys((settings.namespace, settings.metrics_namespace))
        rule["from"] = [_namespace(name) for name in allowed]
    return rule


def _allow(port: int) -> Object:
    return {"protocol": "TCP", "port": port}


def _namespace(name: str) -> Object:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def _shards_service(job: Job) -> Object:
    """Where shards reach their syncer, which may not be ready without them."""
    spec = {
        "type": "ClusterIP",
        "publishNotReadyAddresses": True,
        "selector": {LABEL_JOB: job.name, LABEL_ROLE: "syncer"},
        "ports": [
            {"name": "shards", "port": SHARDS_PORT, "targetPort": "shards", "protocol": "TCP", "appProtocol": "tls"}
        ],
    }
    return _object(job, names.shards_service(job.name), names.SHARD, {"spec": spec})


def _syncer_service(job: Job, shard: int | None = None) -> Object:
    """The Service by which learners reach the syncer, or one of its shards that have pods."""
    role, place = ("syncer", "") if shard is None else (names.SHARD, str(shard))
    ref = names.syncer_service(job.name) if shard is None else names.shard_service(job.name, shard)
    endpoint = job.spec.syncer.endpoint
    port: Object = {"name": "sync", "port": SYNC_PORT, "targetPort": "sync", "protocol": "TCP"}
    # Said, so that a mesh need not guess it from the first bytes.
    port["appProtocol"] = "kubernetes.io/h2c" if job.spec.syncer.tls.mode == "off" else "tls"
    if endpoint.node_port is not None:
        port["nodePort"] = endpoint.node_port + (0 if shard is None else 1 + shard)
    asked = endpoint.service
    more = {
        "loadBalancerClass": asked.load_balancer_class,
        "loadBalancerSourceRanges": asked.source_ranges or None,
        # Left out where they are Kubernetes' own defaults, which a cluster may have changed.
        "externalTrafficPolicy": asked.external_traffic_policy if asked.external_traffic_policy != "Cluster" else None,
        "ipFamilyPolicy": asked.ip_family_policy if asked.ip_family_policy != "SingleStack" else None,
    }
    spec = {
        "type": "ClusterIP" if endpoint.type == "External" else endpoint.type,
        "selector": {LABEL_JOB: job.name, LABEL_ROLE: role, **({LABEL_SHARD: place} if place else {})},
        "ports": [port],
        **{key: value for key, value in more.items() if value is not None},
    }
    manifest = _object(job, ref, role, {"spec": spec}, place=place)
    if asked.annotations:
        manifest["metadata"]["annotations"] = {**asked.annotations, **manifest["metadata"]["annotations"]}
    return manifest


def external_address(live: Mapping[str, Any] | None) -> str:
    """host:port of the load balancer of the syncer's Service; empty: it has none yet."""
    for found in (((live or {}).get("status") or {}).get("loadBalancer") or {}).get("ingress") or ():
        host = str(found.get("hostname") or found.get("ip") or "")
        if host:
            return f"[{host}]:{SYNC_PORT}" if ":" in host else f"{host}:{SYNC_PORT}"
    return ""


def _region_service(job: Job, region: RegionSpec) -> Object:
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": _learners(job, region.name),
        "ports": [
            {"name": "status", "port": WORKER_PORT, "targetPort": "status", "protocol": "TCP", "appProtocol": "http"}
        ],
    }
    return _object(job, names.region_service(job.name, region.name), "learner", {"spec": spec}, place=region.name)


def _budget(job: Job, region: RegionSpec) -> Object:
    """As many learners as the job can be without (M - K) may be evicted at once, each region its
    share by learners; one of a region at least. Of learners of several pods it is as many pods: each that is evicted
    may be another learner's, and takes it along."""
    spare = job.spec.slots - job.spec.quorum
    spec = {
        "maxUnavailable": max(1, spare * region.learners // job.spec.slots),
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": _learners(job, region.name)},
    }
    return _object(job, names.budget(job.name, region.name), "learner", {"spec": spec}, place=region.name)


def _learners(job: Job, region: str) -> dict[str, str]:
    return {LABEL_JOB: job.name, LABEL_ROLE: "learner", LABEL_REGION: region}


# ------------------------------------------------------------------ the claim and the secrets


def claim_manifest(job: Job, live: Mapping[str, Any] | None) -> Object | None:
    """The claim of the syncer's volume; None where the job names a store of its own. Of a claim that is there,
    even of an earlier job of this name, only the size can change, and it only grows."""
    storage = job.spec.syncer.storage
    if storage.uri is not None or storage.claim_name is not None:
        return None
    size, modes, storage_class = storage.size, ["ReadWriteOncePod"], storage.storage_class_name
    if live is not None:
        spec = live.get("spec") or {}
        modes = spec.get("accessModes") or modes
        storage_class = spec.get("storageClassName")
        asked = ((spec.get("resources") or {}).get("requests") or {}).get("storage")
        if isinstance(asked, str) and bytes_of(asked) >= bytes_of(size):
            size = asked
    spec = {"accessModes": modes, "resources": {"requests": {"storage": size}}}
    if storage_class is not None:
        spec["storageClassName"] = storage_class
    manifest = _object(job, names.claim(job.name), "syncer", {"spec": spec})
    del manifest["metadata"]["ownerReferences"]
    # By its labels Argo CD may take it for a part of an Application of the job's name that is not in git any more.
    manifest["metadata"]["annotations"] |= {
        "argocd.argoproj.io/sync-options": "Prune=false",
        "argocd.argoproj.io/compare-options": "IgnoreExtraneous",
    }
    return manifest


def wanted_secrets(job: Job, here: Placement, missed: frozenset[str] = frozenset()) -> list[SecretWanted]:
    """The Secrets that the operator makes. ``missed``: names of Secrets that a pod waits for."""
    spec, found = job.spec, []
    secure = spec.syncer.tls.mode == "auto"

    def wanted(role: Any, tls: bool, control_key: bool) -> SecretWanted:
        name = names.secret_name(job.name, role, job.uid)
        head = _object(job, Ref("Secret", name), role, {})
        return SecretWanted(name, role, head, tls, control_key=control_key, missed=name in missed)

    if here.syncer:
        found.append(wanted("syncer", secure and spec.syncer.tls.secret_name is None, True))
    learners = bool(here.regions) or _evaluated(job, here)
    if learners and secure and spec.learners.credentials.secret_name is None:
        found.append(wanted("learner", True, False))
    return found


# ------------------------------------------------------------------ what holds pods


def pod_holders(job: Job, here: Placement) -> list[Ref]:
    """The objects that hold pods: the Deployments of the syncer and of its shards, the regions' StatefulSets, the
    evaluator's Deployment."""
    found = [names.syncer_deployment(job.name)] if here.syncer else []
    found += shard_deployments(job, here)
    found += [names.stateful_set(job.name, region.name) for region in here.regions]
    return found + ([names.evaluator_deployment(job.name)] if _evaluated(job, here) else [])


def shard_deployments(job: Job, here: Placement) -> list[Ref]:
    """The Deployments of the syncer's shards, in their order, where they have pods."""
    count = job.spec.syncer.shards if here.syncer and job.spec.syncer.shard_pods is not None else 0
    return [names.shard_deployment(job.name, shard) for shard in range(count)]


def render_pod_holder(job: Job, here: Placement, ref: Ref, release: Release, settings: PlanSettings) -> Object:
    """The spec of an object that holds pods, rendered from the job as it is now, without replicas."""
    role, place = names.role_of(job.name, ref)
    if role == "learner":
        region = next(r for r in here.regions if r.name == place)
        return {
            "serviceName": names.region_service(job.name, place).name,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": _learners(job, place)},
            "template": pods.learner_template(job, region, release.worker, settings),
        }
    selector = _of_role(job, role)
    if role == names.SHARD:
        selector["matchLabels"][LABEL_SHARD] = place
        template = pods.shard_template(job, place, release.syncer, settings)
    elif role == "syncer":
        template = pods.syncer_template(job, release.syncer, settings)
    else:
        template = pods.evaluator_template(job, release.worker, settings)
    return {"strategy": {"type": "Recreate"}, "revisionHistoryLimit": 2, "selector": selector, "template": template}


def origin_of(job: Job, here: Placement, ref: Ref, release: str) -> Origin:
    """What ``render_pod_holder`` would make an object of now."""
    spec, (role, place) = job.spec, names.role_of(job.name, ref)
    region = next((r for r in here.regions if r.name == place), None)
    if role == "learner":
        program = pods.learner_inputs(spec, place)
    else:
        program = pods.evaluator_inputs(spec) if role == "evaluator" else pods.syncer_inputs(spec)
    return Origin(release, spec.release, pods.template_inputs(spec, role, region), program)


def with_program_inputs(spec: Object, program: str) -> Object:
    """A rendering whose pods start again, since what their program reads has changed; all else stays."""
    found: Object = copy.deepcopy(spec)
    found["template"]["metadata"]["annotations"][names.INPUTS] = program
    return found


def stored_rendering(live: Mapping[str, Any] | None) -> Rendering | None:
    """The rendering of a live object; None: the object does not say."""
    annotations = ((live or {}).get("metadata") or {}).get("annotations") or {}
    try:
        generation, spec = int(annotations[GENERATION]), json.loads(annotations[RENDERED])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    if not isinstance(spec, dict) or "template" not in spec:
        return None
    try:
        return Rendering(generation, spec, Origin(**json.loads(annotations[ORIGIN])))
    except (KeyError, TypeError, ValueError, RecursionError):
        return Rendering(generation, spec)


def pod_holder_manifest(job: Job, ref: Ref, rendering: Rendering, replicas: int) -> Object:
    """The manifest of an object that holds pods."""
    role, place = names.role_of(job.name, ref)
    manifest = _object(job, ref, role, {"spec": {**rendering.spec, "replicas": replicas}}, place=place)
    manifest["metadata"]["annotations"] |= {
        GENERATION: str(rendering.generation),
        RENDERED: json.dumps(rendering.spec, sort_keys=True, separators=(",", ":")),
    }
    if rendering.origin is not None:
        manifest["metadata"]["annotations"][ORIGIN] = json.dumps(asdict(rendering.origin), sort_keys=True)
    return manifest


def _object(job: Job, ref: Ref, role: str, body: Object, place: str = "") -> Object:
    """``place``: as in ``names.labels``."""
    return {
        "apiVersion": BY_NAME[ref.kind].api_version,
        "kind": ref.kind,
        "metadata": {
            "name": ref.name,
            "namespace": job.namespace,
            "labels": names.labels(job.name, role, place),
            "annotations": {names.JOB_UID: job.uid},
            "ownerReferences": [names.owner_reference(job.name, job.uid)],
        },
        **body,
    }
