"""The inner optimizers' state as a file: for a newcomer, for the job's checkpoint, and for the slot's own.

The format is safetensors, never pickle: one tensor per parameter and key, named ``<parameter>|<key>``, and plain
numbers in the header, those of the groups (``InnerOptimizers.group_numbers``) too. The header also names the parameters
that have no state yet, as those of an unused layer, or of plain SGD. ``restore`` checks the optimizers'
classes, every name, shape and dtype before it puts anything in place, so that a wrong or broken state is refused as a
whole (algorithm.md section 8: a newcomer then starts fresh, with learning-rate warm-up).

A tensor of a parameter's state has the parameter's shape, some of its dimensions or 1 in their place (factors, as of
Adafactor), or is a square of one of them (as of Shampoo). Beside a quantised tensor of the parameter's size, as of an
8-bit optimizer, there may be vectors: its scales and its code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diloco_protocol.arrays.kernels import Bytes
from diloco_protocol.vocabulary import MAX_FRAGMENTS
from diloco_protocol.wire import limits
from diloco_worker.group.ranks import Command
from diloco_worker.named_parameters import named_parameters
from diloco_worker.net.tensor_file import NotTensors, read_header, read_tensors, write_tensors
from diloco_worker.sync import group_state
from diloco_worker.sync.group_state import SEPARATOR
from diloco_worker.sync.inner_optimizers import InnerOptimizers, Number

_FORMAT = "1"
_TENSORS_PER_PARAMETER = 4  # of its own shape; AdamW has two, AMSGrad three
_HEADER_BYTES = 512  # per tensor, in the safetensors header
_SMALL_BYTES = 4096  # per parameter: scalars, and the codes of a quantised state
_QUANTISED = (torch.uint8, torch.int8)
_LONGEST_CODE = 256  # values of a quantised state's code
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DTYPES = (*_FLOATS, *_QUANTISED, torch.int64, torch.int32, torch.bool)


_SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "square_avg"})
_MOST_DEVIATIONS = 100.0  # see ``_most_deviations``
_GREATEST, _GREATEST_SQUARE = 1e15, 1e30  # of any value
# Group entries that whoever wrote the loop chose, and no peer says.
_CHOSEN = frozenset({"lr", "initial_lr", "weight_decay", "eps", "momentum", "dampening", "alpha", "rho", "lr_decay"})

UNWRITABLE = "the optimizer's state holds more than tensors and numbers: no newcomer takes it over"


class StateRefused(Exception):
    """An optimizer state that does not fit this model and optimizer; one line says why."""


def max_state_bytes(model: torch.nn.Module) -> int:
    """Upper bound of this model's optimizer state, in bytes; a larger one is not downloaded."""
    total = 1 << 20
    for name, parameter in named_parameters(model).items():
        if parameter.requires_grad:
            total += _TENSORS_PER_PARAMETER * (4 * parameter.numel() + _HEADER_BYTES + 2 * len(name)) + _SMALL_BYTES
    return total


@dataclass(frozen=True, slots=True)
class Origin:
    """Where and when a state was made: the job and its layout's digest, the slot's step,
    (epoch, version) per fragment, and the inner steps since it began fresh. It travels in the state's metadata."""

    job: str
    layout: str
    step: int
    versions: tuple[tuple[int, int], ...]
    trained: int = 0

    @property
    def age(self) -> tuple[int, int, int]:
        """A key by which states of one job are ordered, the newest greatest: by epoch, then merges, then slot step."""
        epochs, versions = zip(*self.versions, strict=True) if self.versions else ((0,), (0,))
        return max(epochs), sum(versions), self.step


def snapshot(
    inner: InnerOptimizers, origin: Origin | None = None, folder: Path | None = None
) -> Callable[[], Bytes] | None:
    """Copy the state now, at a step boundary; the result gives the copy as a mapped file in ``folder``, in any thread.

    What lies in host memory is copied into the file at once, and takes no more memory; what lies on a GPU is copied
    there, and fetched later, tensor by tensor. Raises OSError if there is no room for the file, and torch's error if
    there is none on the GPU. None: no step was made, or the state holds what is neither a tensor nor a number.
    """
    if not inner.has_state:
        return None
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Number] = {f"{SEPARATOR}{label}": value for label, value in inner.group_numbers().items()}
    empty = []
    for name, (parameter, optimizer, _) in inner.parameters().items():
        row = optimizer.state.get(parameter, {})
        if not row:
            empty.append(name)
        for key, value in row.items():
            label = f"{name}{SEPARATOR}{key}"
            if isinstance(value, torch.Tensor):
                tensors[label] = value.detach()
            elif isinstance(value, (bool, int, float)) and math.isfinite(value):
                numbers[label] = value
            elif value is not None:
                return None
    if inner.exchange is not None and not group_state.is_sharded_alike(tensors, inner):
        return None
    metadata = {"format": _FORMAT, "optimizer": inner.name, "numbers": json.dumps(numbers), "empty": json.dumps(empty)}
    if origin is not None:
        metadata["origin"] = json.dumps([origin.job, origin.layout, origin.step, origin.versions, origin.trained])
    if inner.exchange is not None:
        whole = group_state.collect_state(tensors, metadata, folder, inner.exchange)
        return lambda: whole
    gpu = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
    if gpu is None:
        made = write_tensors(tensors, metadata, folder)
        return lambda: made
    tensors = {label: tensor.clone(memory_format=torch.contiguous_format) for label, tensor in tensors.items()}
    copied = torch.cuda.current_stream(gpu).record_event()

    def encode() -> Bytes:
        # Not between training's kernels: another thread's current stream is the training thread's, the default one.
        stream = torch.cuda.Stream(gpu)
        stream.wait_event(copied)
        with torch.cuda.stream(stream):
            return write_tensors(tensors, metadata, folder)

    return encode


def clear_state(inner: InnerOptimizers) -> None:
    """Forget all state, in every rank of the learner: the next step begins fresh."""
    if inner.exchange is not None:
        inner.exchange.group.tell_others(Command.CLEAR)
    inner.clear_state()


def restore(data: Any, inner: InnerOptimizers) -> None:
    """Replace the optimizers' state by what ``snapshot`` made. Raises StateRefused and changes nothing if it does not
    fit."""
    try:
        metadata, _ = read_header(data)
    except NotTensors as error:
        raise StateRefused(str(error)) from error
    if metadata.get("format") != _FORMAT:
        raise StateRefused(f"its format is {metadata.get('format')!r}, and this program reads {_FORMAT}")
    if metadata.get("optimizer") != inner.name:
        raise StateRefused(f"it is of {metadata.get('optimizer')!r}, and this learner runs {inner.name}")
    try:
        tensors = read_tensors(data)
        numbers, empty = json.loads(metadata.get("numbers", "{}")), json.loads(metadata.get("empty", "[]"))
    except (ValueError, RecursionError) as error:
        raise StateRefused(f"it cannot be read: {error}") from error
    if not isinstance(numbers, dict) or not all(
        isinstance(value, (bool, int, float)) and math.isfinite(value) for value in numbers.values()
    ):
        raise StateRefused("its numbers are no numbers")
    if not isinstance(empty, list):
        raise StateRefused("its list of what has no state is no list")
    parameters = inner.parameters()
    rows: dict[str, dict[str, torch.Tensor | Number]] = {}
    groups: dict[str, Number] = {}
    for label, value in [*tensors.items(), *numbers.items()]:
        name, _, key = label.rpartition(SEPARATOR)
        if not name and not isinstance(value, torch.Tensor) and inner.find_group_number(key) is not None:
            if key.rpartition(".")[2] not in _CHOSEN:
                groups[key] = value
        elif name in parameters and key.isidentifier():
            rows.setdefault(name, {})[key] = value
        else:
            raise StateRefused(f"it has {label!r}, which this learner lacks")
    squares = _SQUARES | ({"sum"} if "Adagrad" in inner.name else frozenset())
    for name, row in rows.items():
        parameter, _, group = parameters[name]
        _check_row(name, row, parameter)
        _check_values(name, row, squares, _most_deviations(group))
    missing = [n for n, (p, _, _) in parameters.items() if n not in rows and n not in empty and p.requires_grad]
    if missing:
        raise StateRefused(f"it lacks {missing[0]!r} and {len(missing) - 1} more")
    if inner.exchange is not None:
        group_state.spread_state(rows, groups, inner, inner.exchange)
        return
    inner.clear_state()  # first: there may be no room for both
    for name, row in rows.items():
        parameter, _, group = parameters[name]
        for key, value in row.items():
            if isinstance(value, torch.Tensor):
                row[key] = value.to(group_state.home_of(key, parameter, group), copy=True)
    inner.restore_rows(rows, groups)


def _check_row(name: str, row: Mapping[str, torch.Tensor | Number], parameter: torch.nn.Parameter) -> None:
    """Raises StateRefused unless all of it may be the state of this parameter."""
    tensors = {key: value for key, value in row.items() if isinstance(value, torch.Tensor)}
    quantised = any(t.dtype in _QUANTISED and t.numel() == parameter.numel() for t in tensors.values())
    for key, value in tensors.items():
        fits = value.numel() == 1 or _fits(tuple(value.shape), tuple(parameter.shape))
        code = quantised and value.ndim == 1 and value.numel() <= max(_LONGEST_CODE, parameter.numel())
        if value.dtype not in _DTYPES or not (fits or code):
            label = f"{name}{SEPARATOR}{key}"
            raise StateRefused(f"{label!r} is {tuple(value.shape)} {value.dtype}, for {tuple(parameter.shape)}")
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise StateRefused(f"'{name}{SEPARATOR}{key}' has values that are not finite")


def _most_deviations(group: Mapping[str, Any]) -> float:
    """How many times the root of its mean square a mean gradient may be.

    By Cauchy and Schwarz it is at most (1 - b1) / sqrt((1 - b2) (1 - b1²/b2)) times, with the decays b1 and b2: 7.3
    times for 0.9 and 0.999. Rounding gets room. Where b1² >= b2 there is no bound: while gradients are zero the root
    fades faster than the mean. ``group``: of this learner's optimizer, not of who gave the state.
    """
    decays = group.get("betas")
    if not isinstance(decays, (tuple, list)) or len(decays) != 2:
        return _MOST_DEVIATIONS
    first, second = map(float, decays)
    if first * first >= second:
        return math.inf
    most = (1 - first) / math.sqrt((1 - second) * (1 - first * first / second)) if second < 1 else math.inf
    return max(_MOST_DEVIATIONS, 2 * most)


def _check_values(
    name: str, row: Mapping[str, torch.Tensor | Number], squares: Collection[str], most_deviations: float
) -> None:
    """Raises StateRefused for what no training leaves behind, and would make a newcomer's parameters useless.
    ``squares``: the keys of means or sums of squares."""
    for key, value in row.items():
        label, tensor = f"{name}{SEPARATOR}{key}", torch.as_tensor(value)
        if not tensor.numel() or not tensor.is_floating_point():
            continue
        least, most = (float(end) for end in torch.aminmax(tensor))
        if key == "step" and not 0 <= least <= most <= limits.MAX_STEPS:
            raise StateRefused(f"{label!r} is {least:g}, no count of steps")
        if key in squares and least < 0:
            raise StateRefused(f"{label!r} is made of squares, and has negative values")
        greatest = _GREATEST_SQUARE if key in squares else _GREATEST
        if max(-least, most) > greatest:
            raise StateRefused(f"{label!r} has values beyond {greatest:g}")
    first, second = row.get("exp_avg"), row.get("exp_avg_sq")
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and first.shape == second.shape:
        if not second.is_floating_point() or math.isinf(most_deviations):
            return
        slack = most_deviations * math.sqrt(torch.finfo(second.dtype).tiny)
        if bool((first.float().abs() > most_deviations * second.float().sqrt() + slack).any()):
            raise StateRefused(f"'{name}{SEPARATOR}exp_avg' is far beyond what 'exp_avg_sq' allows")


def _fits(shape: tuple[int, ...], dimensions: tuple[int, ...]) -> bool:
    """Whether a tensor of ``shape`` may be of the state of a parameter with these dimensions."""
    if len(shape) == len(dimensions) and all(
        size in (1, dimension) for size, dimension in zip(shape, dimensions, strict=True)
    ):
        return True
    left = iter(dimensions)
    factor = all(size in left for size in shape)  # some of them, in their order
    return factor or (len(shape) == 2 and len(set(shape)) == 1 and shape[0] in dimensions)


def origin_of(data: Any) -> Origin | None:
    """Where a state was made; None: it does not say. Raises StateRefused for what is no state."""
    try:
        text = read_header(data)[0].get("origin")
    except NotTensors as error:
        raise StateRefused(str(error)) from error
    if text is None:
        return None
    try:
        match json.loads(text):
            case [str(job), str(layout), int(step), list(rows), int(trained)] if (
                len(rows) <= MAX_FRAGMENTS and trained >= 0
            ):
                versions = tuple((int(epoch), int(version)) for epoch, version in rows)
                return Origin(job, layout, step, versions, trained=trained)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise StateRefused("its origin cannot be read") from error
    raise StateRefused("its origin cannot be read")


@dataclass(slots=True)
class ReceivedState:
    """A peer's state that waits until this learner's versions are at least the peer's."""

    data: Any  # a buffer: the bytes of what ``snapshot`` gave
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
