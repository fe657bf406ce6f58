"""What must hold between the fields of a job.

Each rule is a function of the whole spec that yields violations. A violation names every field that the rule read, so
that a loader which has already refused some of these fields can leave the violation out instead of reporting a
consequence of the first mistake.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from diloco_protocol.spec.base import Path, Spec
from diloco_protocol.spec.cluster import MAX_NODE_PORT, RegionSpec
from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.spec.sync import LEAST_OF_MEDIAN
from diloco_protocol.vocabulary import EVALUATOR

RESERVED_REGIONS = ("syncer", EVALUATOR)
RESERVED_BEGINNING = "syncer-shard"  # of names of objects beside those of regions


class Violation(NamedTuple):
    """A broken rule: the field to change (path below the job), what is wrong with the cure, all fields that were
    read to find it, and what is shown as the field's value (None: what stands there)."""

    path: Path
    message: str
    reads: tuple[Path, ...]
    value: Any = None


def _at(dotted: str) -> Path:
    return ("spec", *(int(part) if part.isdigit() else part for part in dotted.split(".")))


def broken(path: str, message: str, *also: str, value: Any = None) -> Violation:
    """A violation at ``path`` (dotted, below spec), found by reading that field and those of ``also``."""
    return Violation(_at(path), message, (_at(path), *map(_at, also)), value)


def with_values(spec: JobSpec, found: Iterable[Violation]) -> list[Violation]:
    """The violations with what stands at their paths, where they name no other value."""
    return [one if one.value is not None else one._replace(value=_value_at(spec, one.path)) for one in found]


def _value_at(spec: JobSpec, path: Path) -> Any:
    place: Any = spec
    for step in path[1:]:
        if isinstance(place, Spec):
            place = {field.alias: getattr(place, name) for name, field in type(place).model_fields.items()}
        place = place.get(step) if isinstance(place, dict) else place[step]
    return place


def _stop(spec: JobSpec) -> Iterator[Violation]:
    """Exactly one of training.stop.steps, .tokens and .seconds is given. stop.seconds is not for a deterministic job,
    nor for the built-in trainer's cosine schedule, which decays towards a known last step."""
    stop, path = spec.training.stop, "training.stop"
    given = [name for name in ("steps", "tokens", "seconds") if getattr(stop, name) is not None]
    if len(given) != 1:
        said = f"{' and '.join(given)} are given" if given else "none is given"
        value = {name: getattr(stop, name) for name in given}
        yield broken(path, f"needs exactly one of steps, tokens, seconds ({said}); set the others to null", value=value)
    if stop.seconds is not None:
        if spec.sync.deterministic:
            yield broken(
                "training.stop.seconds",
                "a deterministic job cannot stop by the clock: stop by steps or tokens",
                "sync.deterministic",
            )
        if spec.training.optimizer.schedule == "cosine" and spec.learners.command is None:
            yield broken(
                "training.optimizer.schedule",
                "cosine decays towards a known last step, and stop.seconds names none: "
                "use schedule constant, or stop by steps or tokens",
                "training.stop.seconds",
                "learners.command",
            )


def _model(spec: JobSpec) -> Iterator[Violation]:
    """training.model is given unless learners.command is; it has config, from, or both. config names its
    model_type unless from does. With the tokenizer bytes, config.vocab_size is at least 256 or left out.
    freeze and lora are not given together. revision and initialise belong to from. frozenDtype bfloat16 is not
    for precision float32."""
    training, path = spec.training, "training.model"
    model, builtin = training.model, spec.learners.command is None
    if model is None:
        if builtin:
            yield broken(
                path,
                "is required by the built-in trainer: give config or from "
                "(or learners.command for a program of your own)",
                "learners.command",
            )
        return
    if model.config is None and model.from_ is None:
        yield broken(path, "needs config (a transformers configuration) or from (weights to start from)", value={})
    if model.config is not None:
        kind = model.config.get("model_type")
        if model.from_ is None and (not isinstance(kind, str) or not kind):
            yield broken(
                f"{path}.config.model_type",
                "is required: the kind of transformers model, such as llama, mixtral or vit",
                f"{path}.config",
                f"{path}.from",
            )
        size = model.config.get("vocab_size")
        data = training.data
        if size is not None and data is not None and data.source != "python" and data.tokenizer == "bytes":
            whole = isinstance(size, int) and not isinstance(size, bool)
            if not whole or size < 256:
                yield broken(
                    f"{path}.config.vocab_size",
                    "must be a whole number, at least 256, with the tokenizer bytes; or leave it out",
                    f"{path}.config",
                    "training.data.tokenizer",
                    "training.data.source",
                )
    for name in ("revision", "initialise"):
        if getattr(model, name) and model.from_ is None:
            yield broken(f"{path}.{name}", "belongs to from: give that, or leave it out", f"{path}.from")
    if model.frozen_dtype == "bfloat16" and training.precision == "float32":
        yield broken(
            f"{path}.frozenDtype",
            "bfloat16 needs arithmetic in bfloat16: set training.precision to auto or bfloat16, or this to float32",
            "training.precision",
        )
    if model.lora is not None and model.freeze:
        yield broken(
            f"{path}.freeze",
            "has no meaning with lora, which freezes everything but the adapters: leave one of them out",
            f"{path}.lora",
        )


def _data(spec: JobSpec) -> Iterator[Violation]:
    """training.data is given unless learners.command is. Source text needs paths, datasets needs name,
    python needs function; what belongs to another source is left out."""
    data, path = spec.training.data, "training.data"
    if data is None:
        if spec.learners.command is None:
            yield broken(
                path,
                "is required by the built-in trainer, such as {paths: [python-stdlib]} "
                "(or learners.command for a program of your own)",
                "learners.command",
            )
        return
    needs = {"text": "paths", "datasets": "name", "python": "function"}
    examples = {"paths": "paths: [python-stdlib]", "name": "name: wikitext", "function": "function: my_data:load"}
    for source, name in needs.items():
        value = getattr(data, name)
        if source == data.source and not value:
            yield broken(
                f"{path}.{name}", f"is required with source {source}, such as {examples[name]}", f"{path}.source"
            )
        if source != data.source and value:
            yield broken(
                f"{path}.{name}",
                f"belongs to source {source}, and source is {data.source}: leave it out or set source: {source}",
                f"{path}.source",
            )
    for name in ("subset", "revision"):
        if getattr(data, name) is not None and data.source != "datasets":
            yield broken(
                f"{path}.{name}",
                f"belongs to source datasets, and source is {data.source}: leave it out",
                f"{path}.source",
            )


def _sync(spec: JobSpec) -> Iterator[Violation]:
    """sync.fragments is at most sync.every, sync.overlap is below it, sync.staleness.maxSteps (if given) at
    least it. sync.quorum is at most the number of learners in all regions, and at least 3 for sync.merge.method median.
    sync.heartbeat.timeoutSeconds is more than intervalSeconds. normGate.factor is not for a deterministic job,
    compression.errorFeedback not for float32."""
    sync = spec.sync
    if sync.fragments > sync.every:
        yield broken(
            "sync.fragments",
            f"must be at most sync.every ({sync.every}): every fragment is merged once in that many steps",
            "sync.every",
        )
    if sync.overlap >= sync.every:
        yield broken("sync.overlap", f"must be below sync.every ({sync.every})", "sync.every")
    if sync.quorum > spec.slots:
        yield broken(
            "sync.quorum",
            f"must be at most the number of learners in all regions ({spec.slots}), or nothing is ever merged",
            "regions",
        )
    if sync.merge.method == "median" and spec.quorum < LEAST_OF_MEDIAN:
        yield broken(
            "sync.quorum",
            f"must be at least {LEAST_OF_MEDIAN} with sync.merge.method median: of two learners nothing tells which is "
            "right; raise it, or choose another method",
            "sync.merge.method",
        )
    alone = sync.staleness.max_steps
    if alone is not None and alone < sync.every:
        yield broken(
            "sync.staleness.maxSteps",
            f"must be at least sync.every ({sync.every}), or learners pause before each merge",
            "sync.every",
        )
    beat = sync.heartbeat
    if beat.timeout_seconds <= beat.interval_seconds:
        yield broken(
            "sync.heartbeat.timeoutSeconds",
            "must be more than sync.heartbeat."
            f"intervalSeconds ({beat.interval_seconds:g}), or every learner is lost at once",
            "sync.heartbeat.intervalSeconds",
        )
    if sync.norm_gate.factor is not None and sync.deterministic:
        yield broken(
            "sync.normGate.factor",
            "is not for a deterministic job, whose rounds wait for every push: leave it out",
            "sync.deterministic",
        )
    if sync.compression.error_feedback and sync.compression.up == "float32":
        yield broken(
            "sync.compression.errorFeedback",
            "has no meaning with up float32, which drops nothing: set it to false or choose a smaller encoding",
            "sync.compression.up",
        )


def _regions(spec: JobSpec) -> Iterator[Violation]:
    """Regions have different names, none is called syncer or evaluator, or begins with syncer-shard, and hold at most
    4096 learners in all.
    maxLearners is at least learners; where it is more there are no spares, and the job is not deterministic."""
    first: dict[str, int] = {}
    for index, region in enumerate(spec.regions):
        path = f"regions.{index}.name"
        if region.name in first:
            yield broken(
                path,
                f"is the name of regions.{first[region.name]} too: give each region its own",
                f"regions.{first[region.name]}.name",
            )
        first.setdefault(region.name, index)
        if region.name in RESERVED_REGIONS or region.name.startswith(RESERVED_BEGINNING):
            yield broken(path, "is taken by a part of the job itself: choose another name")
        yield from _max_learners(spec, index, region)
    if spec.most_slots > 4096:
        yield broken("regions", "hold more than 4096 learners in all: ask for fewer", value=spec.most_slots)


def _max_learners(spec: JobSpec, index: int, region: RegionSpec) -> Iterator[Violation]:
    path, learners = f"regions.{index}.maxLearners", f"regions.{index}.learners"
    if region.most_learners < region.learners:
        yield broken(path, f"must be at least learners ({region.learners}), or be left out", learners)
    if region.most_learners <= region.learners:
        return
    if spec.sync.deterministic:
        yield broken(
            path,
            "is not for a deterministic job, whose data and pushes are dealt to a fixed number of learners: leave it "
            "out",
            learners,
            "sync.deterministic",
        )
    if region.spares:
        yield broken(
            f"regions.{index}.spares",
            "has no effect where maxLearners is above learners, for every learner that joins trains at once: leave it "
            "out, or raise learners",
            path,
            learners,
        )


def _parallel(spec: JobSpec) -> Iterator[Violation]:
    """learners.command does not start torchrun where a learner has several ranks. With the built-in trainer, in every
    region: parallel.shard × parallel.replicate is the ranks of a learner
    (processes × pods), and batch.sequences is divisible by them. A learner of several ranks has no
    training.model.frozenDtype bfloat16."""
    if (command := spec.learners.command) is not None:
        starts_ranks = command[0].endswith("torchrun") or "torch.distributed.run" in command
        if starts_ranks and any(spec.group(region.name).ranks > 1 for region in spec.regions):
            yield broken(
                "learners.command",
                "starts torchrun, and each of the ranks that learners.processes and learners.pods start would start it "
                "again: write the program alone, such as [python, train.py], or leave processes and pods at 1",
                "learners.processes",
                "learners.pods",
                *(f"regions.{i}.{name}" for i in range(len(spec.regions)) for name in ("processes", "pods")),
            )
        return
    for index, region in enumerate(spec.regions):
        ranks, parallel, batch = spec.group(region.name).ranks, spec.parallel_of(region.name), region.batch
        here = f"regions.{index}"
        shape = ("learners.processes", "learners.pods", f"{here}.processes", f"{here}.pods", "learners.command")
        path = "training.parallel" if region.parallel is None else f"{here}.parallel"
        said = f"a learner of region {region.name} has {ranks} rank{'s' * (ranks > 1)} (processes × pods)"
        if parallel.shard is None and ranks % parallel.replicate:
            yield broken(
                f"{path}.replicate",
                f"must divide the learner's ranks, and {said}: change it, or give the region its own parallel",
                *shape,
            )
        if parallel.shard is not None and parallel.shard * parallel.replicate != ranks:
            yield broken(
                f"{path}.shard",
                f"times replicate ({parallel.replicate}) must be the learner's ranks, and {said}: leave shard out, or "
                "give the region its own parallel",
                f"{path}.replicate",
                *shape,
            )
        sequences = spec.batch_of(region.name).sequences
        if sequences % ranks:
            yield broken(
                "training.batch.sequences" if batch is None else f"{here}.batch.sequences",
                f"must be divisible by the learner's ranks, which share a batch, and {said}: make it "
                f"{math.ceil(sequences / ranks) * ranks}, or give the region its own batch",
                *shape,
            )
        model = spec.training.model
        if ranks > 1 and model is not None and model.frozen_dtype == "bfloat16":
            yield broken(
                "training.model.frozenDtype",
                f"is float32 where ranks share tensors, and {said}: leave it out, or use one process a learner",
                *shape,
            )


def _clusters(spec: JobSpec) -> Iterator[Violation]:
    """A cluster is named everywhere or nowhere. A job that spans clusters has an endpoint that is not ClusterIP, its
    address, syncer.tls.secretName and learners.credentials.secretName. Type External has an address."""
    places = [("syncer.cluster", spec.syncer.cluster)]
    places += [(f"regions.{i}.cluster", region.cluster) for i, region in enumerate(spec.regions)]
    paths = [path for path, _ in places]
    named = {name for _, name in places if name is not None}
    endpoint = spec.syncer.endpoint
    if endpoint.type == "External" and endpoint.address is None:
        yield broken(
            "syncer.endpoint.address",
            "is required with type External: host or host:port that leads to the syncer",
            "syncer.endpoint.type",
        )
    if not named:
        return
    for path, name in places:
        if name is None:
            yield broken(
                path,
                f"is required where the job names clusters ({', '.join(sorted(named))}): "
                "name it everywhere, or nowhere in a job of one cluster",
                *paths,
            )
    if len(named) < 2:
        return
    said = f"this job spans clusters ({', '.join(sorted(named))})"
    if endpoint.type == "ClusterIP":
        yield broken(
            "syncer.endpoint.type",
            f"is reachable from its own cluster only, and {said}: use NodePort, LoadBalancer or External",
            *paths,
        )
    if endpoint.address is None and endpoint.type != "External":
        yield broken(
            "syncer.endpoint.address",
            f"is required: {said}, and learners must know where to connect (host or host:port)",
            *paths,
        )
    for path, secret in (
        ("syncer.tls.secretName", spec.syncer.tls.secret_name),
        ("learners.credentials.secretName", spec.learners.credentials.secret_name),
    ):
        if secret is None:
            yield broken(
                path,
                f"is required: {said}, and a made secret does not leave its cluster: create one and name it",
                *paths,
            )


def _syncer(spec: JobSpec) -> Iterator[Violation]:
    """endpoint.nodePort belongs to type NodePort. tls.mode off has endpoint.type ClusterIP and no secretName.
    storage.claimName and storage.uri exclude each other and what is about a volume that is made (storageClassName,
    onDelete Delete)."""
    syncer, storage, endpoint = spec.syncer, spec.syncer.storage, spec.syncer.endpoint
    if endpoint.node_port is not None and endpoint.type != "NodePort":
        yield broken(
            "syncer.endpoint.nodePort",
            f"belongs to type NodePort, and type is {endpoint.type}: leave it out",
            "syncer.endpoint.type",
        )
    asked = endpoint.service
    for field, given in (("loadBalancerClass", asked.load_balancer_class), ("sourceRanges", asked.source_ranges)):
        if given and endpoint.type != "LoadBalancer":
            yield broken(
                f"syncer.endpoint.service.{field}",
                f"belongs to type LoadBalancer, and type is {endpoint.type}: leave it out",
                "syncer.endpoint.type",
            )
    if asked.external_traffic_policy != "Cluster" and endpoint.type not in ("NodePort", "LoadBalancer"):
        yield broken(
            "syncer.endpoint.service.externalTrafficPolicy",
            f"belongs to types NodePort and LoadBalancer, and type is {endpoint.type}: leave it out",
            "syncer.endpoint.type",
        )
    if syncer.tls.mode == "off" and endpoint.type != "ClusterIP":
        yield broken(
            "syncer.tls.mode",
            f"lets in every process that reaches the port, and type {endpoint.type} opens it beyond this cluster: "
            "use auto, or endpoint.type ClusterIP",
            "syncer.endpoint.type",
        )
    if syncer.tls.mode == "off" and syncer.tls.secret_name is not None:
        yield broken(
            "syncer.tls.mode", "contradicts syncer.tls.secretName: leave one of them out", "syncer.tls.secretName"
        )
    if storage.claim_name is not None and storage.uri is not None:
        yield broken(
            "syncer.storage.uri",
            "contradicts syncer.storage.claimName: the state lies in one place",
            "syncer.storage.claimName",
        )
    own = "claimName" if storage.claim_name is not None else "uri" if storage.uri is not None else None
    if own is not None:
        if storage.storage_class_name is not None:
            yield broken(
                "syncer.storage.storageClassName",
                f"is for a volume that is made, and {own} names one of yours: leave it out",
                f"syncer.storage.{own}",
            )
        if storage.on_delete == "Delete":
            yield broken(
                "syncer.storage.onDelete",
                f"is for a volume that is made, and {own} names yours, which is never deleted: leave it out",
                f"syncer.storage.{own}",
            )


def _shard_pods(spec: JobSpec) -> Iterator[Violation]:
    """syncer.shardPods has syncer.shards above 1, syncer.storage.uri and tls.mode auto. Its addresses are none, or one
    for each shard; a job that spans clusters has them, or endpoint.nodePort. nodePort + shards is a port."""
    syncer, pods = spec.syncer, spec.syncer.shard_pods
    if pods is None:
        return
    node_port, shards, given = syncer.endpoint.node_port, syncer.shards, len(pods.addresses)
    is_far = syncer.cluster is not None and any(r.cluster not in (None, syncer.cluster) for r in spec.regions)
    most, path = MAX_NODE_PORT - shards, "syncer.shardPods"
    for is_wrong, field, message in (
        (shards == 1, "shards", f"must be more than 1 with {path}, a pod for each: raise it, or leave them out"),
        (syncer.storage.uri is None, "storage.uri", f"is required with {path}, which use one store: name a bucket"),
        (syncer.tls.mode == "off", "tls.mode", f"must be auto with {path}, which talk over the network"),
        (given not in (0, shards), "shardPods.addresses", f"has {given} for {shards} shards: name one each, in order"),
        (
            is_far and not given and node_port is None,
            "shardPods.addresses",
            "is required: this job spans clusters, and learners must know where to connect: name one for each shard, "
            "or set endpoint.nodePort",
        ),
        (
            node_port is not None and node_port > most,
            "endpoint.nodePort",
            f"must be at most {most} with {path}: the {shards} ports above it are theirs",
        ),
    ):
        if is_wrong:
            read = ("syncer.shards", path, "syncer.endpoint.nodePort", "syncer.cluster", "regions")
            yield broken(f"syncer.{field}", message, *read)


def _output(spec: JobSpec) -> Iterator[Violation]:
    """output.uri is not in the bucket folder of syncer.storage.uri."""
    uri, store = spec.output.uri, spec.syncer.storage.uri
    if uri is not None and store is not None and f"{uri}/".startswith(f"{store.rstrip('/')}/"):
        yield broken(
            "output.uri",
            "lies in the syncer's own store (syncer.storage.uri): give it a folder beside that",
            "syncer.storage.uri",
        )


RULES = (_stop, _model, _data, _sync, _regions, _parallel, _clusters, _syncer, _shard_pods, _output)


def violations(spec: JobSpec) -> list[Violation]:
    """All broken rules of a job whose fields are valid each on its own."""
    return with_values(spec, (violation for rule in RULES for violation in rule(spec)))
