"""Which part of each tensor this process holds: of plain tensors all, of torch's DTensors a shard.

FSDP2 (``fully_shard``), HSDP and tensor parallelism (``parallelize_module``) make parameters DTensors. Of those a
process holds a box, whose place torch computes, also where FSDP cuts what tensor parallelism has cut already.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from diloco_worker.core.parts import TensorPart
from diloco_worker.named_parameters import local_tensor
from diloco_worker.settings import ConfigurationError


def find_parts(tensors: Mapping[str, torch.Tensor], leads: bool) -> dict[str, TensorPart]:
    """By name, what this process holds. ``leads``: whether it is the leader, who gives what all ranks hold whole.
    Raises ConfigurationError for what cannot be exchanged."""
    return {name: find_part(name, tensor, leads) for name, tensor in tensors.items()}


def find_part(name: str, tensor: torch.Tensor, leads: bool) -> TensorPart:
    """What this process holds of one tensor. Raises ConfigurationError for what cannot be exchanged."""
    if not hasattr(tensor, "placements"):
        return TensorPart.whole(tensor.numel(), gives=leads)
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(tensor, DTensor)
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ConfigurationError(
            f"parameter {name} lies on a mesh that this rank is not in (pipeline parallelism): a learner's ranks hold "
            "the same parameters, sharded (fully_shard), replicated or tensor-parallel"
        )
    if any(place.is_partial() for place in placements):
        raise ConfigurationError(f"parameter {name} is a partial sum ({placements}): it has no value of its own")
    size, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    gives = all(not isinstance(p, Replicate) or coordinate[i] == 0 for i, p in enumerate(placements))
    part = TensorPart.box(tuple(tensor.shape), offset, size, gives)
    local = local_tensor(tensor)
    if part is None or part.elements != local.numel() or not local.is_contiguous():
        raise ConfigurationError(
            f"parameter {name} of shape {tuple(tensor.shape)} is placed as {placements}: its shards must be contiguous "
            "in memory, and cut in at most one dimension beyond the first"
        )
    return part
