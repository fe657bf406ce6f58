"""The inner optimizers' state in a learner of several ranks.

It travels as whole tensors by parameter, as that of one process does, so learners of any number of ranks give it to
each other. Each rank gives, and takes, what it holds of a parameter: its rows of both moments. A value that all ranks
hold whole, such as a step count, the leader gives. So a state is taken whose tensors are placed as their parameters
are; any other is not handed over (a factor of Adafactor's under FSDP, an 8-bit optimizer's blocks).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from diloco_protocol.arrays.kernels import Bytes
from diloco_worker.group.exchange import Exchange, Form
from diloco_worker.group.ranks import Command
from diloco_worker.named_parameters import local_tensor
from diloco_worker.net.tensor_file import begin_file
from diloco_worker.settings import WorkerError
from diloco_worker.sync.inner_optimizers import InnerOptimizers, Number

SEPARATOR = "|"  # between a parameter's name and its state's
_Rows = Mapping[str, Mapping[str, torch.Tensor | Number]]


def is_sharded_alike(tensors: Mapping[str, torch.Tensor], inner: InnerOptimizers) -> bool:
    """Whether each of a state's tensors is placed as its parameter is, or whole in every rank."""
    parameters = inner.parameters()
    for label, tensor in tensors.items():
        parameter = parameters[label.rpartition(SEPARATOR)[0]][0]
        placed = getattr(tensor, "placements", None)
        if placed is None:
            if hasattr(parameter, "placements") and tensor.numel() > 1:
                return False
        elif (placed, tensor.shape) != (getattr(parameter, "placements", None), parameter.shape):
            return False
    return True


def collect_state(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], folder: Path | None, exchange: Exchange
) -> Bytes:
    """As the leader: a safetensors file of a state's whole tensors, of the parts of all ranks. Raises OSError, and
    WorkerError if the ranks have parted."""
    forms = [
        Form(label, label.rpartition(SEPARATOR)[0] if hasattr(t, "placements") else "", t.numel(), t.dtype.itemsize)
        for label, t in tensors.items()
    ]
    data, start = begin_file(tensors, metadata, folder)
    with _whole("given"):
        exchange.group.tell_others(Command.STATE_OUT, forms=forms)
        exchange.collect_bytes({label: local_tensor(tensor) for label, tensor in tensors.items()}, forms, data[start:])
    return data


def give_state(forms: list[list[Any]], inner: InnerOptimizers, exchange: Exchange) -> None:
    """As a follower: give this rank's part of what ``collect_state`` writes."""
    parameters, own = inner.parameters(), {}
    for label, *_ in forms:
        name, _, key = label.rpartition(SEPARATOR)
        parameter, optimizer, _ = parameters[name]
        own[label] = local_tensor(optimizer.state[parameter][key])
    exchange.collect_bytes(own, [Form(*form) for form in forms])


def spread_state(rows: _Rows, groups: Mapping[str, Number], inner: InnerOptimizers, exchange: Exchange) -> None:
    """As the leader: put a state in place in all ranks. ``rows``: by parameter and key, whole tensors on the CPU, and
    numbers; ``groups``: the numbers of the optimizers' groups. Raises WorkerError if the ranks have parted."""
    words: dict[str, dict[str, Any]] = {}
    whole = {}
    for name, row in rows.items():
        words[name] = {}
        for key, value in row.items():
            if isinstance(value, torch.Tensor):
                words[name][key] = [str(value.dtype).removeprefix("torch."), list(value.shape)]
                whole[f"{name}{SEPARATOR}{key}"] = value
            else:
                words[name][key] = value
    with _whole("taken"):
        exchange.group.tell_others(Command.STATE_IN, rows=words, groups=dict(groups))
        take_state(words, groups, inner, exchange, whole=whole)


@contextlib.contextmanager
def _whole(deed: str) -> Iterator[None]:
    """What the leader has told it does to the end: the others wait for what is left out. So an error within, such as
    one for want of memory, ends the learner."""
    try:
        yield
    except WorkerError:
        raise
    except Exception as error:
        raise WorkerError(f"the optimizer's state could not be {deed} by all ranks: {error!r}") from error


def take_state(
    rows: Mapping[str, Mapping[str, Any]],
    groups: Mapping[str, Number],
    inner: InnerOptimizers,
    exchange: Exchange,
    whole: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Put this rank's part of a state in place of its own. ``rows``: by parameter and key, a number, or a tensor's
    dtype and shape; ``whole``: as the leader, the tensors by label."""
    inner.clear_state()  # first: there may be no room for both
    parameters = inner.parameters()
    made: dict[str, dict[str, Any]] = {}
    own: dict[str, torch.Tensor] = {}
    forms = []
    for name, row in rows.items():
        parameter, _, group = parameters[name]
        made[name] = {}
        for key, value in row.items():
            if not isinstance(value, list):
                made[name][key] = value
                continue
            label, dtype, shape = f"{name}{SEPARATOR}{key}", getattr(torch, value[0]), tuple(value[1])
            sharded = hasattr(parameter, "placements") and shape == tuple(parameter.shape) != ()
            if sharded:
                own[label] = torch.empty_like(local_tensor(parameter), dtype=dtype)
                made[name][key] = _place_alike(own[label], parameter)
            else:
                made[name][key] = own[label] = torch.empty(shape, dtype=dtype, device=home_of(key, parameter, group))
            elements = made[name][key].numel()
            forms.append(Form(label, name if sharded else "", elements, dtype.itemsize))
    exchange.spread_bytes(own, forms, whole)
    inner.restore_rows(made, groups)


def _place_alike(local: torch.Tensor, parameter: Any) -> torch.Tensor:
    """A DTensor whose shard in this process is ``local``, placed as ``parameter`` is."""
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements
    made: torch.Tensor = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return made


def home_of(key: str, parameter: torch.nn.Parameter, group: Mapping[str, Any]) -> torch.device:
    """Where a state's tensor belongs, as torch's own optimizers have it (torch.optim.Optimizer.load_state_dict): the
    step counts on the CPU, unless kernels of the device read it (fused, capturable)."""
    if key == "step" and not (group.get("fused") or group.get("capturable")):
        return torch.device("cpu")
    return parameter.device
