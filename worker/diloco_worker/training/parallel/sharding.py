"""The built-in trainer's model in ranks: torch's process group, FSDP2, and what each rank's loss weighs.

Theory of operation. The leader builds the model on its host; the other ranks build it on torch's meta device, without
values. ``fully_shard`` keeps this rank's rows of it: by blocks, so that no device holds more than its shards and one
block. The other ranks' rows then come from the leader, by the way on which fragments go (``group.exchange``). So one
process alone ever holds a whole model, while it begins, and initial values are those of a learner of one process. The
mesh has two dimensions, replicate × shard; with shard 1 each rank has every row, and FSDP averages gradients as DDP
does. One code path is left to be right.

Shards are float32, and so are the optimizer's moments. With bfloat16 arithmetic FSDP gathers each block in bfloat16,
which halves what travels, and sums gradients in float32.

A learner's batch is one batch, whatever number of ranks share it: each prediction weighs the same. FSDP takes the mean
of the ranks' gradients, so a rank's loss is scaled by its share of all predictions, times the number of ranks.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from diloco_protocol.spec.job_spec import JobSpec
from diloco_worker.core.stall_rule import FIRST_STEP
from diloco_worker.errors import job_error
from diloco_worker.group.exchange import Exchange, Form
from diloco_worker.group.placement import find_parts
from diloco_worker.group.ranks import Group, claim_rank
from diloco_worker.named_parameters import local_tensor
from diloco_worker.settings import ConfigurationError

log = logging.getLogger(__name__)

_HERE = "LOCAL_WORLD_SIZE"
LONGEST_SECONDS = 7200.0  # of one collective, where learners.stallSeconds bounds no step
_WINDOW_BYTES = 4 << 20  # in which initial values go to the ranks


def begin_ranks(spec: JobSpec, environ: Mapping[str, str] | None = None) -> int:
    """Join this process to the other ranks of its learner, and choose its GPU. Returns how many ranks there are; 1: it
    is alone, and nothing was done. Raises JobError if ``training.parallel`` is for another number of ranks,
    ConfigurationError for an environment that is not torchrun's."""
    env = os.environ if environ is None else environ
    size = _number(env, "WORLD_SIZE", "1")
    if size == 1:
        return 1
    _, local, here = (_number(env, name) for name in ("RANK", "LOCAL_RANK", _HERE))
    parallel = spec.training.parallel
    if size % parallel.replicate or (parallel.shard or size // parallel.replicate) * parallel.replicate != size:
        said = f"shard × replicate must be the {size} ranks that were started (WORLD_SIZE): leave shard out"
        raise job_error("spec.training.parallel.shard", parallel.shard, said)
    backend = "gloo"
    if spec.training.device != "cpu" and torch.cuda.is_available():
        count = torch.cuda.device_count()
        torch.cuda.set_device(local % count)
        # NCCL refuses two ranks on one GPU.
        backend = "cpu:gloo,cuda:nccl" if here <= count else "cpu:gloo,cuda:gloo"
    patience = timedelta(seconds=_find_patience(spec))
    store, rank, _ = next(rendezvous("env://", timeout=patience))
    store.set_timeout(patience)
    claim_rank(rank, store)  # before torch connects ranks by what it finds in the store
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
    log.info("rank %d of %d ranks, by %s", rank, size, backend)
    return size


def _find_patience(spec: JobSpec) -> float:
    """The longest that one collective may take, in seconds."""
    stall = spec.learners.stall_seconds
    return LONGEST_SECONDS if stall is None else FIRST_STEP * stall


def _number(env: Mapping[str, str], name: str, default: str = "") -> int:
    given = env.get(name, default)
    if not given.isdecimal():
        raise ConfigurationError(
            f"WORLD_SIZE is {env.get('WORLD_SIZE')}, and {name} is {given!r}: it must be a whole number. Ranks "
            "are started by learners.processes, or by torchrun; unset WORLD_SIZE where there is one process"
        )
    return int(given)


def build_model(
    build: Callable[[], nn.Module],
    outline: Callable[[], nn.Module],
    spec: JobSpec,
    *,
    where: torch.device,
    dtype: torch.dtype,
    ranks: int,
) -> nn.Module:
    """The model that ``build`` gives on the CPU, brought to the device ``where``. With several ranks it is this rank's
    shards of it: the leader alone builds it, and the others its ``outline`` on the meta device, while it does."""
    if ranks == 1:
        return prepare_blocks(build(), spec).to(where)
    group = Group(step_seconds=_find_patience(spec))  # before the leader builds: if it ends there, the others notice
    mesh = make_mesh(spec, where, ranks)
    model = build() if group.leads else outline()
    if any(isinstance(one, torch.Tensor) and one.is_meta for part in model.modules() for one in vars(part).values()):
        model = build()  # it has values that are neither parameters nor buffers
    model = prepare_blocks(model, spec)
    whole = {name: held.detach() for name, held in _held_tensors(model).items()} if group.leads else None
    model = shard_model(model, mesh, where, dtype)
    _spread_values(model, whole, group)
    group.close()
    return model


def _held_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name; tied ones once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _spread_values(model: nn.Module, whole: Mapping[str, torch.Tensor] | None, group: Group) -> None:
    """Give every rank what it holds of the leader's values, ``whole``: those of ``_held_tensors``."""
    named, held = dict(model.named_parameters()), _held_tensors(model)
    forms = [
        Form(name, name if name in named else "", tensor.numel(), tensor.element_size())
        for name, tensor in held.items()
    ]
    exchange = Exchange(group, find_parts(named, group.leads), _WINDOW_BYTES)
    own = {name: local_tensor(tensor) for name, tensor in held.items()}
    exchange.spread_bytes(own, forms, whole)


def make_mesh(spec: JobSpec, where: torch.device, ranks: int) -> DeviceMesh:
    """The ranks as replicate × shard (HSDP), or in one dimension where there is one copy."""
    copies = spec.training.parallel.replicate
    if copies == 1:
        return init_device_mesh(where.type, (ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(where.type, (copies, ranks // copies), mesh_dim_names=("replicate", "shard"))


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that a model repeats: those that its class says not to split, else the items of its lists."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    return found or [item for module in model.modules() if isinstance(module, nn.ModuleList) for item in module]


def prepare_blocks(model: nn.Module, spec: JobSpec) -> nn.Module:
    """Have the model's blocks recompute their activations and be compiled, where the job says so."""
    training = spec.training
    if training.activation_checkpointing:
        enable = getattr(model, "gradient_checkpointing_enable", None)
        if enable is None or not getattr(model, "supports_gradient_checkpointing", False):
            said = f"{type(model).__name__} of transformers cannot recompute its activations: leave it out"
            raise job_error("spec.training.activationCheckpointing", True, said)
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of its newer name, which 5.0 has not
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if training.compile:
        for block in find_blocks(model):
            block.compile()
    return model


def shard_model(model: nn.Module, mesh: DeviceMesh, where: torch.device, dtype: torch.dtype) -> nn.Module:
    """Keep this rank's float32 shards of the model's tensors, on the device of the mesh. Of a model without values they
    hold no values yet."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in find_blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if any(held.is_meta for held in _held_tensors(model).values()):
        return model.to_empty(device=where)
    return model.to(where)  # buffers, which are no shards


def loss_weights(counts: Sequence[int], ranks: int, where: torch.device) -> Sequence[float | torch.Tensor]:
    """What the mean loss of each part of this rank's batch is multiplied by. ``counts``: predictions of each part. With
    several ranks they are scalars on ``where``, so that nothing waits for the device."""
    if ranks == 1:
        return [count / max(1, sum(counts)) for count in counts]
    total = torch.tensor(float(sum(counts)), dtype=torch.float64, device=where)
    dist.all_reduce(total)
    return [(count * ranks / total.clamp(min=1)).float() for count in counts]
