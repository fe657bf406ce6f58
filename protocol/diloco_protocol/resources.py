"""Memory and disk that a job's programs need, from its settings and the size of its model.

Pure arithmetic, in bytes. ``diloco plan`` shows it before a job is started, and the operator compares it with what the
job asks for once the syncer knows the layout. The syncer's figures are upper bounds of what its code does (the volume's
is held against the store itself in tests/unit/syncer/store/test_volume.py); a learner's is a lower bound, for what its
own program takes beside the model is not known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco_protocol.common.quantities import bytes_of, parse_quantity
from diloco_protocol.spec.cluster import Group
from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.spec.sync import SyncSpec

STATES_KEPT = 2
"""The syncer's store keeps the records after the older of so many states."""
STATE_EVERY = 16
"""Merges between two states, or as many as there are fragments if those are more."""
BASE_BYTES = 192 << 20
"""Of a syncer without a model: the interpreter, compiled kernels, gRPC."""
ROOM = 2
"""A request may be so many times too small before it is told: a node has some room."""
SYNCER_REQUEST = "256Mi"
"""The syncer's request for memory where the job says nothing."""
SYNCER_VOLUME = "/var/lib/diloco"
"""Where a syncer's pod has its volume."""
_ENCODED = {"float32": 4.0, "bfloat16": 2.0, "int8": 8.125 / 8, "int4": 4.125 / 8, "int2": 2.125 / 8}
"""Bytes of a value (arrays/codec.py, which loads numpy)."""
_BLOCKS = 256
"""Bytes by which blocks that are not full may lift a payload."""
_OUTER_VECTORS = {"sgd": 0, "nesterov": 1, "adamw": 2, "cosine-gated": 2}
LOOP_BYTES = 16
"""Of a trained parameter in a loop: itself, its gradient, two moments, float32."""
_PATHS = "spec.containers[{}].resources"


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes. ``learner_memory``: of the region whose learners need most, as ``LearnerNeeds`` has it."""

    syncer_memory: int
    syncer_volume: int
    learner_memory: int


@dataclass(frozen=True, slots=True)
class LearnerNeeds:
    """Bytes that a learner needs at the least, for what the library and an optimizer with two moments keep. ``memory``:
    of the host of its first pod, whose first rank leads; ``shared_memory`` of it is in /dev/shm. ``other_memory``: of
    each other pod's. ``device_memory``: of each rank's GPU, 0 where training.device is cpu."""

    memory: int
    other_memory: int
    device_memory: int
    shared_memory: int


@dataclass(frozen=True, slots=True)
class Shortage:
    """A field of the job that asks for less than is needed, and what to do."""

    path: str
    message: str


def needs(spec: JobSpec, sizes: Sequence[int]) -> Needs:
    """What a job needs whose fragments have ``sizes`` elements."""
    most = max(learner_needs(spec, sizes, region.name).memory for region in spec.regions)
    return Needs(syncer_memory(spec, sizes, min(spec.syncer.shards, len(sizes))), _syncer_volume(spec, sizes), most)


def learner_needs(spec: JobSpec, sizes: Sequence[int], region: str) -> LearnerNeeds:
    """What a learner of the region needs whose fragments have ``sizes`` elements."""
    parameters, group, copies = sum(sizes), spec.group(region), model_copies(spec, region)
    shared = shared_bytes(group, sizes)
    library, state = library_bytes(spec, sizes) + shared, LOOP_BYTES * parameters * copies
    if spec.training.device == "cpu":
        return LearnerNeeds(library + state // group.pods, state // group.pods, 0, shared)
    moving = 2 * 4 * max(sizes) * copies
    return LearnerNeeds(library, 0, (state + moving) // group.ranks, shared)


def shared_bytes(group: Group, sizes: Sequence[int]) -> int:
    """Of /dev/shm on the leader's host, through which its ranks exchange fragments. In a pod it counts to the
    container's memory limit, as everything that is written to a volume in memory."""
    return 2 * 4 * max(sizes) if group.ranks > 1 else 0


def library_bytes(spec: JobSpec, sizes: Sequence[int]) -> int:
    """Of host memory, what the library keeps for a learner, however many ranks it has (docs/results/parts.md)."""
    return (8 + 4 * spec.sync.compression.error_feedback) * sum(sizes)


def model_copies(spec: JobSpec, region: str) -> int:
    """How often the ranks of one of the region's learners hold the model; of a program of the user's at the least."""
    return spec.parallel_of(region).replicate if spec.learners.command is None else 1


def plan_hint(spec: JobSpec) -> str:
    """Where a person finds what memory a job needs, as long as the size of its model is not known."""
    own = spec.training.model is None  # of its size only its program knows
    with_size = " --params N" if own else ""
    of_size = " with N trained parameters" if own else ""
    return f"`diloco plan JOB.yaml{with_size}` prints what memory the job needs{of_size}"


def even_sizes(parameters: int, fragments: int) -> list[int]:
    """Elements of each fragment where only the number of parameters is known."""
    return [parameters * (i + 1) // fragments - parameters * i // fragments for i in range(fragments)]


def payload_bytes(encoding: str, elements: int) -> int:
    """Bytes of a fragment in an encoding of the job file, ``delta-int4`` among them; a few more than it has."""
    return math.ceil(_ENCODED[encoding.removeprefix("delta-")] * elements) + _BLOCKS


def record_floats(sync: SyncSpec) -> int:
    """float32 values that a version's record has for each parameter: the parameter, the outer optimizer's state, and
    what a delta dropped."""
    return 1 + _OUTER_VECTORS[sync.outer.optimizer] + sync.compression.down.startswith("delta-")


def versions_kept(spec: JobSpec, fragments: int) -> int:
    """Versions of one fragment that the store holds at most: those of the checkpoints, those between the states that
    are kept, those made since, and the one being written."""
    between = math.ceil(max(STATE_EVERY, fragments) / fragments)
    return spec.syncer.checkpoint.keep + STATES_KEPT * between + 1


def most_rounds(spec: JobSpec, sizes: Sequence[int]) -> int:
    """Rounds that may be open at once, where exchanges are so long that merges come faster for it: those whose pushes
    take no more memory than half of the model's own, and no more than there are fragments. Fewer than the τ·P/H that
    every job has they never are."""
    sync = spec.sync
    least = max(1, math.ceil(sync.overlap * len(sizes) / sync.every))
    room = max(BASE_BYTES, 2 * record_floats(sync) * sum(sizes))
    return max(least, min(len(sizes), room // _round_bytes(spec, sizes)))


def _round_bytes(spec: JobSpec, sizes: Sequence[int]) -> int:
    """Of the pushes of one open round, as they came."""
    return spec.most_slots * payload_bytes(spec.sync.compression.up, max(sizes))


def _syncer_volume(spec: JobSpec, sizes: Sequence[int]) -> int:
    parameters, sync = sum(sizes), spec.sync
    records = versions_kept(spec, len(sizes)) * 4 * record_floats(sync) * parameters
    offers = spec.most_slots * sum(payload_bytes(sync.compression.up, size) for size in sizes)
    inner_states = 2 * 8 * parameters  # two moments, of the last suspension and of the one under way
    output = 4 * parameters if (spec.output.uri or "").startswith(f"{SYNCER_VOLUME}/") else 0
    return records + offers + inner_states + output


def syncer_memory(spec: JobSpec, sizes: Sequence[int], shards: int) -> int:
    """Of the syncer's processes together: one, or with more than one shard these and the one that coordinates them."""
    whole = _process_memory(spec, sizes, most_rounds(spec, sizes))
    return whole if shards == 1 else whole + shards * BASE_BYTES + (shards - 1) * _merge_bytes(spec, sizes)


def syncer_pod_memory(spec: JobSpec, sizes: Sequence[int]) -> int:
    """Of the syncer's pod. Without its shards, where these have pods of their own, it reads the records of all
    fragments as it starts."""
    if spec.syncer.shard_pods is None:
        return needs(spec, sizes).syncer_memory
    return BASE_BYTES + 4 * record_floats(spec.sync) * sum(sizes)


def shard_memory(spec: JobSpec, sizes: Sequence[int], shards: int) -> int:
    """Of the largest of so many shards, which share the fragments evenly."""
    dealt = sorted(sizes)[-math.ceil(len(sizes) / shards) :]
    return _process_memory(spec, dealt, min(most_rounds(spec, sizes), len(dealt)))


def _merge_bytes(spec: JobSpec, sizes: Sequence[int]) -> int:
    """Of a merge under way."""
    return 4 * max(sizes) * (2 * record_floats(spec.sync) + 2)


def _process_memory(spec: JobSpec, sizes: Sequence[int], rounds: int) -> int:
    """Of a process that has these fragments, of which so many rounds may be open."""
    sync, parameters = spec.sync, sum(sizes)
    down = sync.compression.down
    sent = sum(payload_bytes(down, size) for size in sizes)
    # The newest whole broadcast is the parameters themselves where float32 is sent, and so is what a delta is of.
    broadcasts = sent if down == "float32" else 2 * sent
    overtaken = (1 if down == "bfloat16" else 2) * parameters  # half a model, for those who still read it
    pushes = rounds * _round_bytes(spec, sizes)
    # A push that came too late waits for the next merge of its fragment, encoded.
    late = spec.most_slots * sum(payload_bytes(sync.compression.up, size) for size in sizes)
    model = 4 * record_floats(sync) * parameters + broadcasts + overtaken
    return BASE_BYTES + model + pushes + late + _merge_bytes(spec, sizes)


# ------------------------------------------------------------------ compared with what the job asks for


def find_shortages(spec: JobSpec, sizes: Sequence[int], volume: int | None = None) -> list[Shortage]:
    """Where the job asks for less than it needs. ``volume``: bytes of the syncer's volume that is there, if that is
    known; else that of the job counts."""
    return [*_syncer_shortages(spec, sizes, volume), *_learner_shortages(spec, sizes)]


def _syncer_shortages(spec: JobSpec, sizes: Sequence[int], volume: int | None) -> Iterator[Shortage]:
    syncer, storage = spec.syncer, spec.syncer.storage
    template, shards = [syncer.pod_template], syncer.shard_pods
    yield from _memory_shortages("syncer.podTemplate.", template, "the syncer", syncer_pod_memory(spec, sizes))
    if shards is not None:
        of_shard = shard_memory(spec, sizes, syncer.shards)
        templates = [*template, shards.pod_template]
        yield from _memory_shortages("syncer.shardPods.podTemplate.", templates, "a shard", of_shard)
    if storage.uri is None and storage.claim_name is None:
        size = parse_quantity(storage.size) if volume is None else volume
        needed = _syncer_volume(spec, sizes)
        if size < needed:
            asked = storage.size if volume is None else _size(volume)
            state = f"the state of this model grows to {_size(needed)}"
            yield Shortage("syncer.storage.size", f"is {asked}, and {state}: raise it; merges wait while it is full")


def _memory_shortages(path: str, templates: Sequence[Mapping[str, Any]], who: str, needed: int) -> Iterator[Shortage]:
    """Of a pod of the syncer's program."""
    path += _PATHS.format("syncer")
    limit, request = _memory(templates, "syncer")
    said = f"{who} needs up to {_size(needed)} for this model"
    if limit is not None and bytes_of(limit) < needed:
        yield Shortage(f"{path}.limits.memory", f"is {limit}, and {said}: raise it, or {who} is killed at it")
    request = request or limit or SYNCER_REQUEST
    if ROOM * bytes_of(request) < needed:
        cure = "ask for that much, or a full node evicts it first"
        yield Shortage(f"{path}.requests.memory", f"is {request}, and {said}: {cure}")


def _learner_shortages(spec: JobSpec, sizes: Sequence[int]) -> Iterator[Shortage]:
    for index, region in enumerate(spec.regions):
        limit, _ = _memory([spec.learners.pod_template, region.pod_template], "learner")
        found = learner_needs(spec, sizes, region.name)
        needed, shared = found.memory, found.shared_memory
        if limit is None or bytes_of(limit) >= needed:
            continue
        own = _memory([region.pod_template], "learner")[0] is not None
        path = f"regions[{index}].podTemplate." if own else "learners.podTemplate."
        yield Shortage(
            path + _PATHS.format("learner") + ".limits.memory",
            f"is {limit}, and a learner (region {region.name}) needs at least {_size(needed)}"
            f"{' in its first pod' * (spec.group(region.name).pods > 1)} for this model"
            f"{f', {_size(shared)} of it in /dev/shm' if shared else ''}: raise it, or it is killed at it",
        )


def _memory(templates: Sequence[Mapping[str, Any]], container: str) -> tuple[str | None, str | None]:
    """Limit and request for memory of a container, as the last of the podTemplates that says so has it."""
    found: dict[str, str | None] = {"limits": None, "requests": None}
    for template in templates:
        pod = template.get("spec")
        containers = pod.get("containers") if isinstance(pod, Mapping) else None
        for one in containers if isinstance(containers, list) else []:
            if not isinstance(one, Mapping) or one.get("name") != container:
                continue
            asked = one.get("resources")
            for kind in found:
                amounts = asked.get(kind) if isinstance(asked, Mapping) else None
                memory = str(amounts.get("memory")) if isinstance(amounts, Mapping) else ""
                found[kind] = memory if bytes_of(memory) else found[kind]
    return found["limits"], found["requests"]


def _size(count: int) -> str:
    """As quantities of Kubernetes have it, rounded up, such as 12Gi."""
    for factor, unit in ((1 << 40, "Ti"), (1 << 30, "Gi"), (1 << 20, "Mi")):
        if count >= 10 * factor:
            return f"{math.ceil(count / factor)}{unit}"
    return f"{math.ceil(count / (1 << 20))}Mi"
