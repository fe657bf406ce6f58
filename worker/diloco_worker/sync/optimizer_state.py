"""The inner optimizer's state as bytes: for a newcomer, for the job's checkpoint, and for the slot's own.

The format is safetensors, never pickle: one tensor per parameter and key, named ``<parameter>|<key>``, and
plain numbers in the header. ``restore`` checks the optimizer's class, every name, shape and dtype before it
puts anything in place, so that a wrong or broken state is refused as a whole (algorithm.md section 8: a
newcomer then starts fresh, with learning-rate warm-up).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from diloco_protocol.wire import limits

_FORMAT = "1"
_SEPARATOR = "|"
_TENSORS_PER_PARAMETER = 4  # of its own shape; AdamW has two, AMSGrad three
_HEADER_BYTES = 512  # per tensor, in the safetensors header
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)


class StateRefused(Exception):
    """An optimizer state that does not fit this model and optimizer; one line says why."""


def _names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.nn.Parameter]:
    """The optimizer's parameters by their names in the model."""
    ours = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {name: p for name, p in model.named_parameters() if id(p) in ours}


def max_state_bytes(model: torch.nn.Module) -> int:
    """Upper bound of this model's optimizer state, in bytes; a larger one is not downloaded."""
    total = 1 << 20
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            total += _TENSORS_PER_PARAMETER * (4 * parameter.numel() + _HEADER_BYTES + 2 * len(name)) + 64
    return total


@dataclass(frozen=True, slots=True)
class Origin:
    """Where and when a state was made: the job and its layout's digest, the slot's step, and
    (epoch, version) per fragment. It travels in the state's metadata."""

    job: str
    layout: str
    step: int
    versions: tuple[tuple[int, int], ...]

    @property
    def age(self) -> tuple[int, int, int]:
        """A key by which states of one job are ordered, the newest greatest: by epoch, then merges, then slot step."""
        epochs, versions = zip(*self.versions, strict=True) if self.versions else ((0,), (0,))
        return max(epochs), sum(versions), self.step


def snapshot(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, origin: Origin | None = None
) -> Callable[[], bytes] | None:
    """Copy the state now, at a step boundary; the result serialises the copy, in any thread.

    None: there is nothing to give (no step was made), or the state holds what is neither a tensor nor a number.
    """
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, float | int | bool] = {}
    for name, parameter in _names(model, optimizer).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            label = f"{name}{_SEPARATOR}{key}"
            if isinstance(value, torch.Tensor):
                tensors[label] = value.detach().clone(memory_format=torch.contiguous_format)
            elif isinstance(value, (bool, int, float)) and math.isfinite(value):
                numbers[label] = value
            elif value is not None:
                return None
    if not tensors:
        return None
    metadata = {"format": _FORMAT, "optimizer": type(optimizer).__name__, "numbers": json.dumps(numbers)}
    if origin is not None:
        metadata["origin"] = json.dumps([origin.job, origin.layout, origin.step, origin.versions])
    copied = None
    if any(tensor.is_cuda for tensor in tensors.values()):
        copied = torch.cuda.Event()
        copied.record()

    def encode() -> bytes:
        if copied is not None:
            copied.synchronize()  # the copies were queued on the training thread's stream
        return bytes(save_tensors({label: tensor.cpu() for label, tensor in tensors.items()}, metadata))

    return encode


def restore(data: bytes, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Replace the optimizer's state by what ``snapshot`` made. Raises StateRefused and
    changes nothing if it does not fit."""
    metadata = _metadata(data)
    if metadata.get("format") != _FORMAT:
        raise StateRefused(f"its format is {metadata.get('format')!r}, and this program reads {_FORMAT}")
    if metadata.get("optimizer") != type(optimizer).__name__:
        raise StateRefused(f"it is of {metadata.get('optimizer')!r}, and this learner runs {type(optimizer).__name__}")
    try:
        tensors = load_tensors(data)
        numbers = json.loads(metadata.get("numbers", "{}"))
    except (SafetensorError, ValueError) as error:
        raise StateRefused(f"it cannot be read: {error}") from error
    if not isinstance(numbers, dict) or not all(isinstance(v, (bool, int, float)) for v in numbers.values()):
        raise StateRefused("its numbers are no numbers")
    parameters = _names(model, optimizer)
    state: dict[torch.nn.Parameter, dict[str, torch.Tensor | float | int | bool]] = {}
    for label, value in [*tensors.items(), *numbers.items()]:
        name, _, key = label.rpartition(_SEPARATOR)
        parameter = parameters.get(name)
        if parameter is None or not key.isidentifier():
            raise StateRefused(f"it has {label!r}, which this model lacks")
        if isinstance(value, torch.Tensor):
            if value.dtype not in _DTYPES or (value.shape != parameter.shape and value.numel() != 1):
                raise StateRefused(f"{label!r} is {tuple(value.shape)} {value.dtype}")
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise StateRefused(f"{label!r} has values that are not finite")
            # Counters (step) stay on the CPU, as torch's own optimizers keep them.
            value = value if value.numel() == 1 and parameter.numel() != 1 else value.to(parameter.device)
        state.setdefault(parameter, {})[key] = value
    missing = [name for name, parameter in parameters.items() if parameter not in state]
    if missing:
        raise StateRefused(f"it lacks {missing[0]!r} and {len(missing) - 1} more")
    optimizer.state.clear()
    for parameter, row in state.items():
        optimizer.state[parameter] = row


def origin_of(data: bytes) -> Origin | None:
    """Where a state was made; None: it does not say. Raises StateRefused for what is no state."""
    text = _metadata(data).get("origin")
    if text is None:
        return None
    try:
        match json.loads(text):
            case [str(job), str(layout), int(step), list(rows)] if len(rows) <= limits.MAX_FRAGMENTS:
                versions = tuple((int(epoch), int(version)) for epoch, version in rows)
                return Origin(job, layout, step, versions)
    except (TypeError, ValueError) as error:
        raise StateRefused("its origin cannot be read") from error
    raise StateRefused("its origin cannot be read")


def _metadata(data: bytes) -> dict[str, str]:
    """The safetensors header's metadata, parsed from the bytes themselves."""
    if len(data) < 8:
        raise StateRefused("it is too short")
    size = int.from_bytes(data[:8], "little")
    if size > min(len(data) - 8, 64 << 20):
        raise StateRefused("its header is cut off")
    try:
        header = json.loads(data[8 : 8 + size])
    except ValueError as error:
        raise StateRefused("its header is not JSON") from error
    metadata = header.get("__metadata__", {}) if isinstance(header, dict) else {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise StateRefused("its metadata are not text")
    return metadata


@dataclass(slots=True)
class ReceivedState:
    """A peer's state that waits until this learner's versions are at least the peer's."""

    data: bytes
    versions: tuple[tuple[int, int], ...]

    def usable(self, held: Sequence[tuple[int, int]]) -> bool:
        """(epoch, version) per fragment: ``held`` is at least the peer's everywhere. A stored
        state names no versions and is usable at once."""
        return all(mine >= theirs for mine, theirs in zip(held, self.versions, strict=False))


class Rewarm:
    """The learning-rate factor after the inner optimizer started fresh in the middle of a job:
    rises linearly to 1 within ``steps`` steps."""

    def __init__(self, steps: int) -> None:
        self._steps = max(1, steps)
        self._from: int | None = None

    def begin(self, step: int) -> None:
        """The optimizer is fresh before slot step ``step`` + 1."""
        self._from = step

    def scale(self, step: int) -> float:
        """In (0, 1], for the slot step ``step`` + 1 that comes next."""
        if self._from is None:
            return 1.0
        return min(1.0, (step - self._from + 1) / self._steps)
