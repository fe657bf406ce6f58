"""The parameters of a model by the names that they have without wrappers, and which model cannot be a learner's.

``torch.compile(model)`` puts ``_orig_mod.`` before every name, DistributedDataParallel ``module.``, checkpointed layers
``_checkpoint_wrapped_module.``. A wrapped model is the same model: with the same names it has the same layout, and its
learner may join learners that do not wrap it.
"""

from __future__ import annotations

import torch

from diloco_worker.settings import ConfigurationError

_ALWAYS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_OWNERS = frozenset({"DistributedDataParallel", "DataParallel", "DeepSpeedEngine"})  # of a child that is named module


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The model within its wrappers."""
    while (inner := _wrapped(model)) is not None:
        model = getattr(model, inner)
    return model


def named_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """All parameters by name, without wrappers' prefixes; tied ones once, under the first of their names."""
    wrappers = set()
    for path, module in model.named_modules():
        if (inner := _wrapped(module)) is not None:
            wrappers.add(f"{path}.{inner}" if path else inner)
    if not wrappers:
        return dict(model.named_parameters())
    found = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        kept = [part for i, part in enumerate(parts) if ".".join(parts[: i + 1]) not in wrappers]
        found[".".join(kept)] = parameter
    return found


def check_whole(model: torch.nn.Module) -> None:
    """Raise ConfigurationError for a model of which this process has a part only: a learner is one process."""
    for module in model.modules():
        group = getattr(module, "process_group", None)
        if type(module).__name__ == "DistributedDataParallel" and group is not None and group.size() > 1:
            raise ConfigurationError(
                f"the model is one of {group.size()} replicas of DistributedDataParallel: each process of a job is a "
                "learner of its own, so leave DistributedDataParallel out"
            )
    for name, parameter in named_parameters(model).items():
        if hasattr(parameter, "placements") or name.rpartition(".")[2] == "_flat_param":
            kind = "a DTensor" if hasattr(parameter, "placements") else "flattened by FSDP"
            raise ConfigurationError(
                f"parameter {name} is {kind}, of which this process has one shard (FSDP, tensor parallelism): "
                "a learner is one process with whole parameters on one device"
            )


def _wrapped(module: torch.nn.Module) -> str | None:
    """The name of the only child of a wrapper; None: the module is no wrapper."""
    children = [name for name, _ in module.named_children()]
    if len(children) != 1:
        return None
    (name,) = children
    return name if name in _ALWAYS or (name == "module" and type(module).__name__ in _OWNERS) else None
