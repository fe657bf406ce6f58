"""The pod templates of the syncer, its shards, learners and evaluator.

A template holds what the job needs (names.py and docs/contracts.md have the contract), then the user's podTemplate is
merged in (template_merge.py), then come the labels and the annotation that nobody may change. The evaluator runs where
and as learners do, from ``learners.podTemplate``: their image, pull secrets, volumes, environment, node selectors. It
takes none of their resources and claims, and none of their probes; ``evaluator.podTemplate``, merged over that, asks
for its own (a GPU). A shard is the syncer's program: its container is called so too.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any, NamedTuple

from diloco_operator import names
from diloco_operator.job import Job, digest
from diloco_operator.model import Object, PlanSettings
from diloco_operator.objects.template_merge import Protected, TemplateRefusal, find_refusals, merge_template
from diloco_protocol.resources import SYNCER_REQUEST
from diloco_protocol.spec.base import Spec
from diloco_protocol.spec.cluster import Group, RegionSpec
from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.vocabulary import (
    CONTROL_PORT,
    EXPORT_PORT,
    HTTP_PORT,
    LABEL_POD_INDEX,
    LABEL_SHARD,
    SHARDS_PORT,
    SYNC_PORT,
    WORKER_PORT,
)

USER = 65532
GRACE_SECONDS = 30
SPARED_SECONDS = 5
"""A learner's drain leaves so much of the grace period for the process to end."""
TOLERATION_SECONDS = 20
DRAIN = "DILOCO_DRAIN_SECONDS"
TERMINATION_LOG = "DILOCO_TERMINATION_LOG"
POD_INDEX = "DILOCO_POD_INDEX"
START_SECONDS = 3600
"""A program may take so long to open its port: it reads a store, loads data, compiles."""

_POD: Object = {"name": "DILOCO_POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}
_SECURITY: Object = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
_REQUESTS = {
    "syncer": {"cpu": "250m", "memory": SYNCER_REQUEST},
    "learner": {"cpu": "250m", "memory": "512Mi"},
    "evaluator": {"cpu": "100m", "memory": "512Mi"},
}
_LABELS = frozenset(
    {*names.labels("", "", "any"), LABEL_SHARD, LABEL_POD_INDEX, names.POD_REVISION}
    | {"statefulset.kubernetes.io/pod-name", "pod-template-hash"}
)


class _Volume(NamedTuple):
    source: Object  # as the pod's spec has it
    path: str  # where the container sees it
    read_only: bool = False

    def mount(self) -> Object:
        found: Object = {"name": self.source["name"], "mountPath": self.path}
        return found | ({"readOnly": True} if self.read_only else {})


# ------------------------------------------------------------------ what users give


def template_refusals(spec: JobSpec) -> list[TemplateRefusal]:
    """Where the job's podTemplates contradict what makes the job work."""
    found = find_refusals(spec.syncer.pod_template, "spec.syncer.podTemplate", _syncer_protected())
    if spec.syncer.shard_pods is not None:
        path = "spec.syncer.shardPods.podTemplate"
        found += find_refusals(spec.syncer.shard_pods.pod_template, path, _syncer_protected())
    shared = _worker_protected("learner", "is set by spec.learners.command: give your program there")
    found += find_refusals(spec.learners.pod_template, "spec.learners.podTemplate", shared)
    for index, region in enumerate(spec.regions):
        found += find_refusals(region.pod_template, f"spec.regions[{index}].podTemplate", shared)
    own = _worker_protected("evaluator", "is set by spec.evaluator.command: give your program there")
    found += find_refusals(spec.evaluator.pod_template, "spec.evaluator.podTemplate", own)
    return found or _output_refusals(spec)


def _output_refusals(spec: JobSpec) -> list[TemplateRefusal]:
    """Whether a directory for the merged model is on a volume that outlives the syncer's pod, beside its store."""
    uri = spec.output.uri
    if uri is None or not uri.startswith("/"):
        return []
    containers = (spec.syncer.pod_template.get("spec") or {}).get("containers") or []
    main = [one for one in containers if one["name"] == "syncer"]
    mounts = [str(mount["mountPath"]) for one in main for mount in one.get("volumeMounts") or []]
    mounts += [names.DATA_PATH] if spec.syncer.storage.uri is None else []
    if uri.rstrip("/") == names.DATA_PATH or _is_inside(uri, f"{names.DATA_PATH}/store") or "/.." in uri:
        return [TemplateRefusal("spec.output.uri", f"is the store's own place: give {names.DATA_PATH}/output")]
    if any(_is_inside(uri, mount) for mount in mounts):
        return []
    cure = "mount one for the container syncer in syncer.podTemplate, or give a bucket such as s3://bucket/folder"
    return [TemplateRefusal("spec.output.uri", f"is on no volume of the syncer's pod: {cure}")]


def _syncer_protected() -> Protected:
    return Protected(
        container="syncer",
        labels=_LABELS,
        env=("DILOCO_POD",),
        mounts=(names.SETTINGS_PATH, names.CREDENTIALS_PATH, names.CONTROL_PATH, names.DATA_PATH, "/tmp"),
        volumes=("settings", "credentials", "control", "data", "tmp"),
        command="is the operator's: leave it out",
    )


def _worker_protected(role: str, command: str) -> Protected:
    return Protected(
        container=role,
        labels=_LABELS,
        env={DRAIN, TERMINATION_LOG, POD_INDEX, *(item["name"] for item in _worker_env(role, "x", True))},
        # The work directory's volume (`work`) may be another one: it is scratch.
        mounts=(names.SETTINGS_PATH, names.CREDENTIALS_PATH, names.DATA_PATH, "/tmp"),
        volumes=("settings", "credentials", "tmp"),
        command=command,
    )


def _is_inside(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


# ------------------------------------------------------------------ templates


def syncer_template(job: Job, image: str, settings: PlanSettings) -> Object:
    """The syncer's pod template."""
    spec = job.spec
    flags = {
        "--control": f"[::]:{CONTROL_PORT}",
        "--http": f"[::]:{HTTP_PORT}",
        "--export": f"127.0.0.1:{EXPORT_PORT}",
        "--control-key-file": f"{names.CONTROL_PATH}/control-key",
    }
    ports = [_port("control", CONTROL_PORT), _port("http", HTTP_PORT)]
    if spec.syncer.shard_pods is not None:
        host = f"{names.shard_service(job.name, '{}').name}.{job.namespace}.svc"
        flags |= {"--shards-listen": f"[::]:{SHARDS_PORT}", "--shard-host": host}
        ports.append(_port("shards", SHARDS_PORT))
    container, volumes = _syncer_program(job, image, settings, flags)
    container["command"].append("--stay")
    container["ports"] += ports
    secret = _secret_volume("control", names.secret_name(job.name, "syncer", job.uid), "control-key")
    volumes.append(_Volume(secret, names.CONTROL_PATH, read_only=True))
    # Not the sync port: it is bound before the store is read, and a kubelet has no certificate to show there.
    container["startupProbe"] = _probe("/readyz", "http", 2, START_SECONDS // 2)
    container["livenessProbe"] = _probe("/healthz", "http", 10, 6)
    container["readinessProbe"] = _probe("/readyz", "http", 2, 3)
    patches = [_defaults(settings), spec.syncer.pod_template]
    return _template(job, "syncer", container, volumes, patches=patches, inputs=syncer_inputs(spec))


def shard_template(job: Job, shard: str, image: str, settings: PlanSettings) -> Object:
    """The pod template of one of the syncer's shards. It has no probes: who shows no certificate at its port is a
    stranger, and a shard that hangs loses its stream."""
    spec = job.spec.syncer
    assert spec.shard_pods is not None
    address = f"{names.shards_service(job.name).name}.{job.namespace}.svc:{SHARDS_PORT}"
    container, volumes = _syncer_program(job, image, settings, {"--shard": shard, "--syncer": address})
    patches = [_defaults(settings), spec.pod_template, spec.shard_pods.pod_template]
    inputs = syncer_inputs(job.spec)
    return _template(job, names.SHARD, container, volumes, patches=patches, inputs=inputs, place=shard)


def _syncer_program(
    job: Job, image: str, settings: PlanSettings, flags: dict[str, str]
) -> tuple[Object, list[_Volume]]:
    """The container and the volumes that the syncer and its shards have alike. ``flags``: more of them."""
    storage = job.spec.syncer.storage
    flags = {
        "--job": f"{names.SETTINGS_PATH}/job.json",
        "--store": storage.uri if storage.uri is not None else f"{names.DATA_PATH}/store",
        "--listen": f"[::]:{SYNC_PORT}",
        **flags,
    }
    volumes = [
        _Volume(_settings_volume(job), names.SETTINGS_PATH, read_only=True),
        _Volume({"name": "data", **_store(job)}, names.DATA_PATH),
        _Volume({"name": "tmp", "emptyDir": {}}, "/tmp"),
    ]
    if job.spec.syncer.tls.mode == "auto":
        flags["--credentials"] = names.CREDENTIALS_PATH
        volumes.append(_Volume(_syncer_credentials(job), names.CREDENTIALS_PATH, read_only=True))
    command = ["python", "-m", "diloco_syncer", *itertools.chain(*flags.items())]
    container = _container("syncer", image, settings.image_pull_policy, command)
    return {**container, "env": [_POD], "ports": [_port("sync", SYNC_PORT)]}, volumes


def learner_template(job: Job, region: RegionSpec, image: str, settings: PlanSettings) -> Object:
    """The pod template of a region's learners."""
    spec, volumes, group = job.spec, _worker_volumes(job), job.spec.group(region.name)
    container = _worker(job, "learner", image, settings.image_pull_policy, region=region.name)
    if group.ranks > 1:
        _launch_ranks(container, group, names.region_service(job.name, region.name).name)
        # As large as the pod's memory limit, to which it counts: ranks exchange fragments in it, and NCCL uses it too.
        volumes.append(_Volume({"name": "shm", "emptyDir": {"medium": "Memory"}}, "/dev/shm"))
    patches = [_defaults(settings), spec.learners.pod_template, region.pod_template]
    template = _template(
        job, "learner", container, volumes, patches=patches, inputs=learner_inputs(spec, region.name), place=region.name
    )
    # The drain is bounded by the pod's grace period, the user's or ours. A learner that is killed while it still
    # offers its work has not reported which of its tokens are dropped.
    grace = template["spec"].get("terminationGracePeriodSeconds")
    seconds = max(1, (grace if isinstance(grace, int) else GRACE_SECONDS) - SPARED_SECONDS)
    for one in template["spec"]["containers"]:
        if one["name"] == "learner":
            one["env"].append({"name": DRAIN, "value": str(seconds)})
            if path := one.get("terminationMessagePath"):  # else the learner writes to Kubernetes' default
                one["env"].append({"name": TERMINATION_LOG, "value": str(path)})
    if group.pods > 1:
        template["metadata"]["labels"][names.GROUP_PODS] = str(group.pods)
    return template


def _launch_ranks(container: Object, group: Group, service: str) -> None:
    """Have the learner's command started in each of its ranks, by a program that knows the learner's ordinal from the
    pod's index."""
    shape = ["--processes", str(group.processes), "--pods", str(group.pods)]
    shape += ["--master", f"{service}-{{first}}.{service}"] if group.pods > 1 else []
    container["command"] = ["python", "-m", "diloco_worker.launch", *shape, *container["command"]]
    for one in container["env"]:
        if one["name"] == "DILOCO_ORDINAL":
            one["name"] = POD_INDEX


def evaluator_template(job: Job, image: str, settings: PlanSettings) -> Object:
    """The evaluator's pod template."""
    spec = job.spec
    container = _worker(job, "evaluator", image, settings.image_pull_policy)
    patches = [_defaults(settings), _for_evaluator(spec.learners.pod_template), spec.evaluator.pod_template]
    return _template(job, "evaluator", container, _worker_volumes(job), patches=patches, inputs=evaluator_inputs(spec))


def _template(
    job: Job, role: str, container: Object, volumes: list[_Volume], patches: list[Object], inputs: str, place: str = ""
) -> Object:
    """``place``: as in ``names.labels``."""
    base: Object = {
        "metadata": {},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            # Of these two Kubernetes' own default is 300 s, and a pod's end is when its successor begins.
            "tolerations": [
                {
                    "key": f"node.kubernetes.io/{key}",
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": TOLERATION_SECONDS,
                }
                for key in ("not-ready", "unreachable")
            ],
            "containers": [{**container, "volumeMounts": [volume.mount() for volume in volumes]}],
            "volumes": [volume.source for volume in volumes],
        },
    }
    main = base["spec"]["containers"][0]
    image, pull = main["image"], main.pop("imagePullPolicy")
    for patch in patches:
        base = merge_template(base, patch)
    for one in base["spec"]["containers"]:
        # An image of the user's own has Kubernetes' default.
        if one["name"] == main["name"] and one.get("image") == image:
            one.setdefault("imagePullPolicy", pull)
    metadata = base["metadata"]
    metadata["labels"] = {**(metadata.get("labels") or {}), **names.labels(job.name, role, place)}
    own = {names.INPUTS: inputs, names.JOB_UID: job.uid}
    metadata["annotations"] = {**(metadata.get("annotations") or {}), **own}
    return base


def _defaults(settings: PlanSettings) -> Object:
    """The patch, before the job's own, by which the operator's settings hold for the pods of all jobs."""
    spec: Object = {}
    if settings.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in settings.pull_secrets]
    if settings.priority_class is not None:
        spec["priorityClassName"] = settings.priority_class
    return {"spec": spec}


def _for_evaluator(template: Object) -> Object:
    """The patch for the evaluator's pod, from learners.podTemplate."""
    patch = copy.deepcopy(template)
    for name in ("resources", "resourceClaims"):
        (patch.get("spec") or {}).pop(name, None)
    containers = (patch.get("spec") or {}).get("containers")
    for container in containers if isinstance(containers, list) else []:
        if container.get("name") != "learner":
            continue
        container["name"] = "evaluator"
        container.pop("resources", None)
        # Probes of a program of the user's own would not fit ours.
        for name in ("startupProbe", "livenessProbe", "readinessProbe", "lifecycle"):
            container.pop(name, None)
    return patch


# ------------------------------------------------------------------ digests of what programs read


def learner_inputs(spec: JobSpec, region: str) -> str:
    """A digest of what a learner of the region reads when it starts. The rest of ``sync`` and ``training.stop`` come
    from the syncer when it joins. A program of the user's own may read all of ``training``."""
    training = _dump(spec.in_region(region).training)
    if spec.group(region).ranks == 1:
        del training["parallel"]  # one process has nothing to divide
    if spec.learners.command is None:
        del training["stop"]
        # Which part of the data is held out is a learner's business, when it is scored is not.
        training["evaluation"] = training["evaluation"] and training["evaluation"]["fraction"]
    return digest([training, spec.learners.command, spec.learners.stall_seconds, *_layout(spec)])


def evaluator_inputs(spec: JobSpec) -> str:
    """A digest of what the evaluator reads when it starts."""
    training = _dump(spec.training)
    del training["stop"], training["parallel"]
    return digest([training, spec.evaluator.command, *_layout(spec)])


def template_inputs(spec: JobSpec, role: str, region: RegionSpec | None = None) -> str:
    """A digest of what of the job the pod template of a role is made of; with ``syncer_inputs``, ``learner_inputs``
    and ``evaluator_inputs`` all of it. ``region``: of learners."""
    tls, storage, secret = spec.syncer.tls, spec.syncer.storage, spec.learners.credentials.secret_name
    if role in ("syncer", names.SHARD):
        shared, shard_pods = secret if tls.secret_name is not None else None, spec.syncer.shard_pods
        found = [tls.mode, tls.secret_name, shared, storage.uri, storage.claim_name, spec.syncer.pod_template]
        if shard_pods is not None:
            found.append(shard_pods.pod_template if role == names.SHARD else "its shards have pods")
        return digest(found)
    found = [tls.mode, secret, spec.learners.pod_template]
    if region is None:
        return digest([*found, spec.evaluator.command, spec.evaluator.pod_template, spec.training.device == "cuda"])
    group = spec.group(region.name)
    shape = [list(group)] if group.ranks > 1 else []
    return digest([*found, spec.learners.command, region.pod_template, *shape])


def _dump(part: Spec) -> Object:
    return part.model_dump(mode="json", by_alias=True)


def _layout(spec: JobSpec) -> list[Any]:
    return [spec.seed, spec.sync.fragments, spec.sync.merge.mean_tensors, spec.sync.deterministic]


def syncer_inputs(spec: JobSpec) -> str:
    """A digest of what the syncer, and each of its shards, reads when it starts."""
    training, shard_pods = _dump(spec.training), spec.syncer.shard_pods
    return digest(
        [
            _dump(spec.sync),
            training["stop"],
            training["model"],
            training["data"],
            spec.evaluated,
            spec.seed,
            [[region.name, region.most_learners] for region in spec.regions],  # within the bound it need not know
            _dump(spec.syncer.checkpoint),
            [spec.failure_policy.on_region_lost, spec.failure_policy.region_lost_seconds],
            *([spec.output.uri] if spec.output.uri is not None else []),
            *([spec.syncer.shards] if spec.syncer.shards > 1 else []),
            *([shard_pods.addresses, spec.syncer.endpoint.node_port] if shard_pods is not None else []),
        ]
    )


# ------------------------------------------------------------------ parts


def _worker(job: Job, role: str, image: str, pull: str, region: str | None = None) -> Object:
    secure = job.spec.syncer.tls.mode == "auto"
    command = job.spec.learners.command if role == "learner" else job.spec.evaluator.command
    container = _container(role, image, pull, command or ["python", "-m", "diloco_worker"])
    env = _worker_env(role, region, secure)
    if role == "evaluator" and job.spec.training.device == "cuda":  # it may have no GPU
        env[0]["value"] = f"{names.SETTINGS_PATH}/evaluator.json"
    container["env"] = env
    container["ports"] = [_port("status", WORKER_PORT)]
    # Not /healthz: a learner that stalls ends by itself, with its stack traces in the log.
    container["startupProbe"] = _probe("/livez", "status", 2, START_SECONDS // 2)
    # Patient: a step that holds the interpreter for long is no reason to kill what trains.
    container["livenessProbe"] = _probe("/livez", "status", 20, 9, timeout=10)
    container["readinessProbe"] = _probe("/readyz", "status", 2, 3, timeout=5)
    return container


def _worker_env(role: str, region: str | None, secure: bool) -> list[Object]:
    env: list[Object] = [
        {"name": "DILOCO_JOB_FILE", "value": f"{names.SETTINGS_PATH}/job.json"},
        {"name": "DILOCO_SYNCER_FILE", "value": f"{names.SETTINGS_PATH}/address.json"},
        {"name": "DILOCO_ROLE", "value": role},
        _POD,
        {"name": "DILOCO_WORKDIR", "value": names.DATA_PATH},
        {"name": "DILOCO_IDLE_AT_END", "value": "1"},
        {"name": "DILOCO_LOG_FORMAT", "value": "json"},
        {"name": "DILOCO_STATUS", "value": f"[::]:{WORKER_PORT}"},
    ]
    if region is not None:
        index = f"metadata.labels['{LABEL_POD_INDEX}']"
        env += [
            {"name": "DILOCO_REGION", "value": region},
            {"name": "DILOCO_ORDINAL", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        ]
    if secure:
        env.append({"name": "DILOCO_CREDENTIALS", "value": names.CREDENTIALS_PATH})
    return env


def _worker_volumes(job: Job) -> list[_Volume]:
    found = [
        _Volume(_settings_volume(job), names.SETTINGS_PATH, read_only=True),
        _Volume({"name": "work", "emptyDir": {}}, names.DATA_PATH),
        _Volume({"name": "tmp", "emptyDir": {}}, "/tmp"),
    ]
    if job.spec.syncer.tls.mode == "auto":
        secret = job.spec.learners.credentials.secret_name or names.secret_name(job.name, "learner", job.uid)
        found.append(_Volume(_secret_volume("credentials", secret), names.CREDENTIALS_PATH, read_only=True))
    return found


def _syncer_credentials(job: Job) -> Object:
    """The volume with the syncer's TLS files and the join token. Where users name the Secrets, the token is in
    the learners' Secret."""
    own = job.spec.syncer.tls.secret_name
    if own is None:
        files = ("tls.crt", "tls.key", "ca.crt", "join-token")
        return _secret_volume("credentials", names.secret_name(job.name, "syncer", job.uid), *files)
    shared = job.spec.learners.credentials.secret_name
    assert shared is not None, "job.find_unsupported refuses this"
    return {
        "name": "credentials",
        "projected": {
            "defaultMode": 0o440,
            "sources": [
                {"secret": {"name": own}},
                {"secret": {"name": shared, "items": [{"key": "join-token", "path": "join-token"}]}},
            ],
        },
    }


def _store(job: Job) -> Object:
    storage = job.spec.syncer.storage
    if storage.uri is not None:
        return {"emptyDir": {}}
    return {"persistentVolumeClaim": {"claimName": storage.claim_name or names.claim(job.name).name}}


def _settings_volume(job: Job) -> Object:
    return {"name": "settings", "configMap": {"name": names.settings_map(job.name).name}}


def _secret_volume(name: str, secret: str, *files: str) -> Object:
    source: Object = {"secretName": secret, "defaultMode": 0o440}
    if files:
        source["items"] = [{"key": file, "path": file} for file in files]
    return {"name": name, "secret": source}


def _container(role: str, image: str, pull: str, command: list[str]) -> Object:
    return {
        "name": role,
        "image": image,
        "imagePullPolicy": pull,
        "command": list(command),
        "securityContext": copy.deepcopy(_SECURITY),
        "resources": {"requests": dict(_REQUESTS[role])},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _port(name: str, number: int) -> Object:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def _probe(path: str, port: str, period: int, failures: int, timeout: int = 3) -> Object:
    how = {"periodSeconds": period, "timeoutSeconds": timeout, "failureThreshold": failures}
    return {"httpGet": {"path": path, "port": port}, **how}
