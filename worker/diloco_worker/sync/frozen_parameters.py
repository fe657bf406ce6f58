"""Frozen parameters are part of version 0, and no merge changes them.

Who builds version 0 uploads them once, with a digest of their names, shapes, dtypes and values. Everybody else compares
that with the digest of its own: mostly they are the same, because all load them from the same weights, and nothing is
downloaded. Where they differ, the job's are downloaded and put in place.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from diloco_protocol.arrays.kernels import Bytes
from diloco_worker.fragments import frozen_tensors, most_frozen_bytes
from diloco_worker.group.exchange import Exchange, Form
from diloco_worker.group.ranks import Command
from diloco_worker.named_parameters import local_tensor
from diloco_worker.net.client import SyncerClient
from diloco_worker.net.inbox import FrozenDownloaded
from diloco_worker.net.tensor_file import NotTensors, begin_file, read_tensors, write_tensors
from diloco_worker.settings import ConfigurationError

log = logging.getLogger(__name__)


class FrozenParameters:
    """Those of one model. ``missing``: they are to be downloaded before the model is whole. ``exchange``: of a learner
    of several ranks, each of which may hold a part of them."""

    def __init__(self, model: torch.nn.Module, client: SyncerClient, exchange: Exchange | None = None) -> None:
        self.missing = bool(frozen_tensors(model))
        self._model = model
        self._client = client
        self._exchange = exchange
        self._requested = False

    def request(self) -> None:
        """Ask for them, once."""
        if self.missing and not self._requested:
            self._requested = True
            self._fetch()

    def repeat_request(self) -> None:
        """Ask again in a new session: the one before may have lost the answer."""
        if self.missing and self._requested:
            self._fetch()

    def _fetch(self) -> None:
        digest = self.digest
        if self._exchange is not None:  # all ranks take part, so it is made here and not in the client's thread
            known = self.digest()
            digest = lambda: known  # noqa: E731
        self._client.fetch_frozen(most_frozen_bytes(self._model), digest)

    def load(self, message: FrozenDownloaded) -> None:
        """Put them in place, where they are not the same. Raises ConfigurationError if they are not this model's."""
        if not message.same:
            if message.data is None:
                raise ConfigurationError(
                    "the job's version 0 has no frozen parameters and this model has: give every process the same model"
                )
            size = len(message.data)
            log.info("the job's frozen parameters are others than this model was built with: %d bytes", size)
            load_frozen(self._model, message.data, self._exchange)
        self.missing = False

    def serialize(self) -> Bytes | bytes:
        """This model's own, as safetensors, for version 0; empty if there are none. Nothing is missing then."""
        self.missing = False
        whole = self._collect()
        return frozen_file(self._model) if whole is None else whole

    def digest(self) -> str:
        """Of this model's own. For any thread of a learner of one process, as long as nobody moves them."""
        whole = self._collect()
        return digest_tensors(frozen_tensors(self._model) if whole is None else read_tensors(whole))

    def _collect(self) -> Bytes | None:
        """As the leader of several ranks: a file of whole tensors, of the parts of all of them. Else None."""
        frozen = frozen_tensors(self._model)
        if self._exchange is None or not frozen:
            return None
        data, start = begin_file(frozen, {})
        self._exchange.group.tell_others(Command.FROZEN_OUT)
        give_frozen(self._model, self._exchange, data[start:])
        return data


@torch.no_grad()
def digest_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 (hex) over name, dtype, shape and the values' xxh3-128 of each tensor, in order of name."""
    rows = []
    for name, tensor in sorted(tensors.items()):
        values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        rows.append([name, str(tensor.dtype), list(tensor.shape), xxhash.xxh3_128_hexdigest(values.data)])
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def frozen_file(model: torch.nn.Module) -> Bytes | bytes:
    """A model's frozen parameters as safetensors, of one process: a mapped file, empty if there are none."""
    frozen = frozen_tensors(model)
    return write_tensors(frozen, {}) if frozen else b""


@torch.no_grad()
def give_frozen(model: torch.nn.Module, exchange: Exchange, into: Bytes | None = None) -> None:
    """Bring the frozen parameters to the leader, who has them written ``into``; every rank calls it."""
    exchange.collect_bytes(_local(model), _forms(model), into)


@torch.no_grad()
def take_frozen(model: torch.nn.Module, exchange: Exchange, whole: Mapping[str, torch.Tensor] | None = None) -> None:
    """Put frozen parameters, which the leader gives ``whole``, in place; every rank calls it."""
    exchange.spread_bytes(_local(model), _forms(model), whole)


def _local(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: local_tensor(p) for name, p in frozen_tensors(model).items()}


def _forms(model: torch.nn.Module) -> list[Form]:
    return [
        Form(name, name if hasattr(p, "placements") else "", p.numel(), p.element_size())
        for name, p in frozen_tensors(model).items()
    ]


@torch.no_grad()
def load_frozen(model: torch.nn.Module, data: Any, exchange: Exchange | None = None) -> None:
    """Put received frozen parameters in place, in all ranks of the learner. Raises ConfigurationError unless names,
    shapes and dtypes are exactly the model's."""
    frozen = frozen_tensors(model)
    try:
        tensors = read_tensors(data)
    except NotTensors as error:
        raise ConfigurationError(f"the job's frozen parameters are not safetensors: {error}") from error
    if set(tensors) != set(frozen):
        odd = sorted(set(tensors) ^ set(frozen))
        raise ConfigurationError(f"the job's frozen parameters are not this model's: {', '.join(odd[:5])} differ")
    for name, parameter in frozen.items():
        got = tensors[name]
        if got.shape != parameter.shape or got.dtype != parameter.dtype:
            raise ConfigurationError(
                f"frozen parameter {name} is {tuple(got.shape)} {got.dtype} in the job and "
                f"{tuple(parameter.shape)} {parameter.dtype} here"
            )
    if exchange is not None:
        exchange.group.tell_others(Command.FROZEN_IN)
        take_frozen(model, exchange, tensors)
        return
    for name, parameter in frozen.items():
        parameter.data.copy_(tensors[name])
