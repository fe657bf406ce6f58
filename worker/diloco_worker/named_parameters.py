"""The parameters of a model by the names that they have without wrappers, and which model cannot be a learner's.

``torch.compile(model)`` puts ``_orig_mod.`` before every name, DistributedDataParallel ``module.``, checkpointed layers
``_checkpoint_wrapped_module.``. A wrapped model is the same model: with the same names it has the same layout, and its
learner may join learners that do not wrap it.
"""

from __future__ import annotations

import torch
import xxhash

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


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor: of a DTensor its shard, in the shard's own memory; else the tensor."""
    shard: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return shard


def check_whole(model: torch.nn.Module) -> None:
    """Raise ConfigurationError for a model that is not built yet, or one of which this process has a part that no rank
    of a learner can give: one flattened by FSDP1, or shards where the learner is one process."""
    alone = world_size() == 1
    for name, parameter in named_parameters(model).items():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise ConfigurationError(
                f"parameter {name} has no shape before the first forward pass (a lazy module): run one, on a batch of "
                "any data, before the Learner is made"
            )
        if name.rpartition(".")[2] == "_flat_param":
            raise ConfigurationError(
                f"parameter {name} is flattened by FSDP (FullyShardedDataParallel): use FSDP2, fully_shard, which "
                "keeps each parameter by itself"
            )
        if alone and hasattr(parameter, "placements") and local_tensor(parameter).shape != parameter.shape:
            raise ConfigurationError(
                f"parameter {name} is a DTensor of which this process has one shard, and torch.distributed has one "
                "process: the ranks that hold a learner's shards are one process group (init_process_group)"
            )


def world_size() -> int:
    """How many processes torch's default process group has: a learner's ranks; 1: there is none."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if there else 1


def refuse_shared_memory(model: torch.nn.Module) -> None:
    """Raise ConfigurationError if two parameters lie in the same memory and one of them is trained: a move of both
    would count twice."""
    spans = sorted(
        (str(p.device), p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), p.requires_grad, name)
        for name, p in named_parameters(model).items()
        if p.numel() and type(p.data) is torch.Tensor and not p.is_meta and p.is_contiguous()
    )
    furthest = ("", 0, 0, False, "")
    for span in spans:
        if span[0] == furthest[0] and span[1] < furthest[2] and (span[3] or furthest[3]):
            raise ConfigurationError(
                f"parameters {furthest[4]} and {span[4]} lie in the same memory and are two parameters: an exchange "
                "would move it twice. Tie them as one, b.weight = a.weight, or give each its own memory (.clone())"
            )
        furthest = max(furthest, span, key=lambda one: (one[0], one[2]))


class ModelWatch:
    """What of a model must stay as it was when its Learner was made: its trained parameters, where each of them lies,
    and that no others are trained. While nothing has changed a check takes less than a microsecond for each tensor.
    ``exact``: compare values where else writes are counted, which does not see those through ``.data``."""

    def __init__(self, model: torch.nn.Module, exact: bool = False) -> None:
        self._model = model
        self._exact = exact
        named = named_parameters(model)
        self._trained = {name: (local_tensor(p).data_ptr(), p.dtype) for name, p in named.items() if p.requires_grad}
        self._state = self._read_state()
        self._remember()

    def check(self) -> None:
        """Raise ConfigurationError if a trained parameter is not where it was, or another one is trained too."""
        if self._read_tree() == self._tree:
            return
        now = named_parameters(self._model)
        for name, (address, dtype) in self._trained.items():
            parameter = now.get(name)
            if parameter is None or local_tensor(parameter).data_ptr() != address or parameter.dtype != dtype:
                raise ConfigurationError(
                    f"parameter {name} was moved or assigned anew after the Learner was made (as by model.to(...), or "
                    "by a new module in the place of its own): bring the model where and how it will be trained "
                    "first, then make the Learner"
                )
        for name, parameter in now.items():
            if parameter.requires_grad and name not in self._trained:
                raise ConfigurationError(
                    f"parameter {name} was unfrozen, or added, after the Learner was made: no merge and no export "
                    "would have it. Let it require gradients before that, and set its .grad to None until its time"
                )
        self._remember()

    def changed_state(self) -> list[str]:
        """Names of frozen parameters and persistent buffers that were written to since the last call."""
        before, self._state = self._state, self._read_state()
        return [name for name, seen in self._state.items() if before.get(name, seen) != seen]

    def _remember(self) -> None:
        self._modules = list(self._model.modules())
        self._tree = self._read_tree()

    def _read_tree(self) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for module in self._modules:
            found.append(tuple(map(id, module._modules.values())))
            for p in module._parameters.values():
                if p is not None:
                    found.append((id(p), local_tensor(p).data_ptr(), 1) if p.requires_grad else (id(p), 0, 0))
        return found

    def _read_state(self) -> dict[str, tuple[int, int]]:
        """What each learner keeps for itself: the identity and the count of writes, or a hash of the values."""
        tensors: dict[str, torch.Tensor] = {
            n: p for n, p in named_parameters(self._model).items() if not p.requires_grad
        }
        for path, module in self._model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    tensors[f"{path}.{name}".lstrip(".")] = buffer
        if self._exact:
            flat = {
                name: local_tensor(t).detach().cpu().contiguous().view(-1).view(torch.uint8)
                for name, t in tensors.items()
            }
            return {name: (xxhash.xxh3_64_intdigest(values.numpy().data), 0) for name, values in flat.items()}
        return {name: (id(t), t._version) for name, t in tensors.items() if not t.is_inference()}


def _wrapped(module: torch.nn.Module) -> str | None:
    """The name of the only child of a wrapper; None: the module is no wrapper."""
    children = [name for name, _ in module.named_children()]
    if len(children) != 1:
        return None
    (name,) = children
    return name if name in _ALWAYS or (name == "module" and type(module).__name__ in _OWNERS) else None
