"""Fragments of a torch model: flat float32 vectors out of its parameters, and back into them.

A ``Vector`` is one fragment in host memory: float32, the pieces in the layout's order. The training thread itself
only takes such vectors (``snapshot``) and moves the parameters to a new base (``move``); each is a copy of one
fragment and nothing else. All arithmetic is float32, whatever the parameters' dtype.

A parameter of less precision (bfloat16, float16) cannot hold a base exactly. What a move rounds off is kept beside
it, float32, and belongs to every later snapshot and move, so that rounding never counts as work: a learner that
learnt nothing pushes zeros. Without it, bfloat16 parameters pull a float32 base back to their own grid.

On a GPU neither waits for the device. A snapshot is gathered by a kernel on the current stream, so it lies between
two optimizer steps, and copied to pinned host memory on a side stream; the background thread, which reads the
vector, waits for that copy's event. A move uploads its vectors on another side stream, and the current stream, not the
host, waits for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _NormBase

from diloco_protocol.arrays.layout import Layout, LayoutError, Tensor
from diloco_worker.core.adoption import Kind
from diloco_worker.core.parts import Place, TensorPart
from diloco_worker.errors import shorten
from diloco_worker.named_parameters import (
    ModelWatch,
    check_whole,
    local_tensor,
    named_parameters,
    refuse_shared_memory,
    unwrap,
)
from diloco_worker.settings import ConfigurationError

Floats = np.ndarray[Any, np.dtype[np.float32]]

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float64: "float64"}
_ROUNDING = frozenset({torch.bfloat16, torch.float16})  # dtypes that cannot hold every float32


class Vector:
    """One fragment's float32 values in host memory. ``array`` waits for a copy under way."""

    __slots__ = ("_event", "tensor")

    def __init__(self, tensor: torch.Tensor, event: torch.cuda.Event | None = None) -> None:
        self.tensor = tensor
        self._event = event

    @classmethod
    def from_array(cls, array: Floats) -> Vector:
        """Wrap an array float32[n] without copying it."""
        return cls(torch.from_numpy(array))

    def wait_on(self, stream: torch.cuda.Stream) -> None:
        """Have ``stream``, not the host, wait for a copy under way."""
        event = self._event
        if event is not None:
            stream.wait_event(event)

    @property
    def array(self) -> Floats:
        """float32[n], complete."""
        event = self._event  # read once: two threads may ask
        if event is not None:
            event.synchronize()
            self._event = None
        array: Floats = self.tensor.numpy()
        return array


def model_tensors(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Trainable parameters by name; tied ones once, under the first of their names."""
    return {name: p for name, p in named_parameters(model).items() if p.requires_grad}


def frozen_tensors(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Parameters that are not trained, by name; tied ones once."""
    return {name: p for name, p in named_parameters(model).items() if not p.requires_grad}


def running_statistics(model: torch.nn.Module, updated_only: bool = False) -> list[str]:
    """Names of the modules that keep running statistics (BatchNorm, InstanceNorm with track_running_stats).

    ``updated_only``: leave out those in evaluation mode, whose statistics training does not touch.
    """
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, _NormBase) and module.running_mean is not None and (module.training or not updated_only)
    ]


def refuse_running_statistics(model: torch.nn.Module) -> None:
    """Raise ConfigurationError if training this model updates running statistics: buffers are not exchanged."""
    names = running_statistics(model, updated_only=True)
    if names:
        raise ConfigurationError(
            f"the model keeps running statistics in {shorten(names, 3)}: they are not merged, so the merged "
            "model would be evaluated with those that it began with; use GroupNorm or LayerNorm, or "
            "track_running_stats=False, or keep these modules in evaluation mode (module.eval()) all the time"
        )


def build_layout(
    model: torch.nn.Module, fragments: int, every: int | None = None, mean_patterns: Sequence[str] = ()
) -> Layout:
    """The layout of the model's trainable parameters (algorithm.md section 6).

    Embedding-like tensors (nn.Embedding weights, the output embedding) are marked as
    merged by mean. Raises ConfigurationError for what cannot be exchanged.
    """
    mean = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    check_whole(model)
    refuse_shared_memory(model)
    output = getattr(unwrap(model), "get_output_embeddings", None)
    if callable(output) and (head := output()) is not None:
        mean.add(id(getattr(head, "weight", None)))
    tensors = []
    for name, parameter in model_tensors(model).items():
        if parameter.dtype not in _DTYPES:
            raise ConfigurationError(
                f"parameter {name} is {parameter.dtype}: only floating-point parameters are trained and "
                "merged; freeze it (requires_grad_(False)) or convert it"
            )
        if not parameter.data.is_contiguous():
            raise ConfigurationError(
                f"parameter {name} is not contiguous: assign parameter.data.contiguous() to it, or where it is in "
                "channels_last, model.to(memory_format=torch.contiguous_format); the inputs may stay in channels_last"
            )
        tensors.append(Tensor(name, tuple(parameter.shape), _DTYPES[parameter.dtype], id(parameter) in mean))
    try:
        return Layout.build(tensors, fragments, every, mean_patterns)
    except LayoutError as error:
        raise ConfigurationError(str(error)) from error


@dataclass(frozen=True, slots=True)
class View:
    """What this process holds of one piece. ``name``: its parameter's, and ``mine``: where in this process's memory of
    it; ``theta``: that memory; ``place``: where that lies in the
    fragment's vector; ``rounded``: float32 of the same shape, what the last move rounded off (None: it rounds nothing
    off)."""

    name: str
    mine: Place
    theta: torch.Tensor
    place: Place
    rounded: torch.Tensor | None


class ModelFragments:
    """A model's fragments. Its parameters must keep their memory (no ``.to`` or re-assignment
    afterwards): the views are made once.

    ``keep_rounding``: keep what moves round off parameters of less than float32 precision (4 bytes of each of their
    elements, where they lie); for who takes snapshots. ``parts``: by name, what this process holds of each parameter;
    None: all of them, whole."""

    def __init__(
        self,
        model: torch.nn.Module,
        layout: Layout,
        keep_rounding: bool = True,
        parts: Mapping[str, TensorPart] | None = None,
    ) -> None:
        self.layout = layout
        self.watch = ModelWatch(model)
        flat = {name: local_tensor(p).data.view(-1) for name, p in model_tensors(model).items()}
        parts = {name: TensorPart.whole(own.numel()) for name, own in flat.items()} if parts is None else parts
        self._views: list[list[View]] = []  # per fragment
        for pieces in layout.fragments:
            views = []
            for piece in pieces:
                part, own = parts[piece.tensor], flat[piece.tensor]
                rounds = keep_rounding and own.dtype in _ROUNDING
                for mine, there in part.cut(piece.start, piece.stop):
                    theta = mine.of(own)
                    rounded = torch.zeros_like(theta, dtype=torch.float32) if rounds else None
                    views.append(View(piece.tensor, mine, theta, there.shifted(piece.offset), rounded=rounded))
            self._views.append(views)
        devices = {view.theta.device for views in self._views for view in views}
        cuda = [device for device in devices if device.type == "cuda"]
        if cuda and len(devices) > 1:
            raise ConfigurationError(
                f"the model's parameters lie on {', '.join(sorted(map(str, devices)))}: "
                "one process of a learner trains on one device"
            )
        self._device = cuda[0] if cuda else None  # None: the CPU
        # A side stream for each direction: an upload, which training waits for, does not queue behind a snapshot's
        # download.
        self._up = torch.cuda.Stream(self._device) if self._device is not None else None
        self._down = torch.cuda.Stream(self._device) if self._device is not None else None

    @torch.no_grad()
    def snapshot(self, fragment: int) -> Vector:
        """A copy of the fragment as it is now, float32[elements], with what earlier moves rounded off."""
        self.watch.check()  # else the views may show dead memory
        elements = self.layout.elements(fragment)
        gathered = torch.empty(elements, dtype=torch.float32, device=self._device)
        for view in self._views[fragment]:
            copy_view(view, view.place.of(gathered))
        down = self._down
        if down is None:
            return Vector(gathered)
        host = torch.empty(elements, dtype=torch.float32, pin_memory=True)
        down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(down):
            host.copy_(gathered, non_blocking=True)
            gathered.record_stream(down)
            event = torch.cuda.Event()
            event.record(down)
        return Vector(host, event)

    @torch.no_grad()
    def move(self, fragment: int, kind: Kind, new: Vector, reference: Vector | None = None, alpha: float = 0.0) -> None:
        """Move the parameters to the base ``new`` (Θ'), float32[elements], in place.

        OVERWRITE: θ ← Θ'. KEEP and REBASE: θ ← Θ' + (θ - reference). MIX: θ ← (1-α)·Θ' + α·θ.
        """
        self.watch.check()  # else the views may show dead memory
        target = self._on_device(new)
        minus = None if reference is None or kind in (Kind.OVERWRITE, Kind.MIX) else self._on_device(reference)
        for view in self._views[fragment]:
            move_view(view, kind, view.place.of(target), None if minus is None else view.place.of(minus), alpha=alpha)

    def _on_device(self, vector: Vector) -> torch.Tensor:
        """The vector where the parameters are; on a GPU the current stream waits for it."""
        up = self._up
        if up is None:
            return vector.tensor
        host = vector.tensor if vector.tensor.is_pinned() else vector.tensor.pin_memory()
        with torch.cuda.stream(up):
            vector.wait_on(up)
            there = host.to(self._device, non_blocking=True)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(up)
        there.record_stream(current)
        return there  # torch gives pinned memory to nobody else while a copy out of it is under way

    def set_device(self) -> None:
        """Make the parameters' device this thread's: its pinned memory would otherwise open a context on another."""
        if self._device is not None:
            torch.cuda.set_device(self._device)

    def pinned(self, array: Floats) -> Vector:
        """Make a vector that ``move`` can upload without copying it first; the background thread calls this."""
        if self._device is None:
            return Vector.from_array(array)
        return Vector(torch.from_numpy(array).pin_memory())


def copy_view(view: View, target: torch.Tensor) -> None:
    """Copy a view's values, with what earlier moves rounded off, into ``target``, float32 of its shape."""
    target.copy_(view.theta)
    if view.rounded is not None:
        target.add_(view.rounded)


def move_view(view: View, kind: Kind, base: torch.Tensor, minus: torch.Tensor | None, alpha: float) -> None:
    """Move one view's parameters, as ``ModelFragments.move`` does. ``base`` and ``minus``: float32 of its shape, on its
    device."""
    theta = view.theta
    if kind is Kind.OVERWRITE:
        exact = base
    else:
        exact = theta if theta.dtype == torch.float32 else theta.float()
        if view.rounded is not None:
            exact.add_(view.rounded)
        if kind is Kind.MIX:
            exact.mul_(alpha).add_(base, alpha=1.0 - alpha)
        else:
            assert minus is not None
            exact.sub_(minus).add_(base)
    if exact is not theta:
        theta.copy_(exact)
    if view.rounded is not None:
        torch.sub(exact, theta, out=view.rounded)


def most_frozen_bytes(model: torch.nn.Module) -> int:
    """Upper bound of this model's frozen parameters as safetensors; more is not downloaded."""
    frozen = frozen_tensors(model)
    return sum(p.numel() * p.element_size() for p in frozen.values()) + (1 << 20) + 512 * len(frozen)
