"""Frozen parameters are part of version 0, and no merge changes them.

Who builds version 0 uploads them once, with a digest of their names, shapes, dtypes and values. Everybody else compares
that with the digest of its own: mostly they are the same, because all load them from the same weights, and nothing is
downloaded. Where they differ, the job's are downloaded and put in place.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import xxhash

from diloco_worker.fragments import frozen_bytes, frozen_tensors, most_frozen_bytes
from diloco_worker.group.exchange import Exchange, Form
from diloco_worker.group.ranks import Command
from diloco_worker.named_parameters import local_tensor
from diloco_worker.net.client import SyncerClient
from diloco_worker.net.inbox import FrozenDownloaded
from diloco_worker.net.tensor_file import NotTensors, begin_file, read_tensors
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
        if message.same:
            self.missing = False
            return
        if message.data is None:
            raise ConfigurationError(
                "the job's version 0 has no frozen parameters and this model has: give every process the same model"
            )
        log.info("the job's frozen parameters are others than this model was built with: %d bytes", len(message.data))
        load_frozen(self._model, message.data, self._exchange)
        self.missing = False

    def serialize(self) -> bytes:
        """This model's own, as safetensors, for version 0; empty if there are none. Nothing is missing then."""
        self.missing = False
        if self._exchange is None or not frozen_tensors(self._model):
            return frozen_bytes(self._model)
        frozen = sorted(frozen_tensors(self._model).items())
        data, at = begin_file({name: (p.dtype, tuple(p.shape)) for name, p in frozen}, {})
        filled = [at]

        def take(_: str, window: torch.Tensor) -> None:
            data[filled[0] : filled[0] + window.numel()] = window.numpy()
            filled[0] += window.numel()

        collect_frozen(self._model, self._exchange, take)
        return bytes(data)

    def digest(self) -> str:
        """Of this model's own. For any thread of a learner of one process, as long as nobody moves them."""
        if self._exchange is None or not frozen_tensors(self._model):
            return frozen_digest(self._model)
        hashes = {name: xxhash.xxh3_128() for name in frozen_tensors(self._model)}
        collect_frozen(self._model, self._exchange, lambda name, window: hashes[name].update(window.numpy().data))
        return _digest_rows(self._model, {name: found.hexdigest() for name, found in hashes.items()})


@torch.no_grad()
def frozen_digest(model: torch.nn.Module) -> str:
    """SHA-256 (hex) over name, dtype, shape and the values' xxh3-128 of each frozen parameter, in order of name."""
    hashes = {}
    for name, parameter in frozen_tensors(model).items():
        values = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        hashes[name] = xxhash.xxh3_128_hexdigest(values.data)
    return _digest_rows(model, hashes)


def _digest_rows(model: torch.nn.Module, hashes: Mapping[str, str]) -> str:
    rows = [[name, str(p.dtype), list(p.shape), hashes[name]] for name, p in sorted(frozen_tensors(model).items())]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


@torch.no_grad()
def collect_frozen(
    model: torch.nn.Module, exchange: Exchange, take: Callable[[str, torch.Tensor], None] | None = None
) -> None:
    """Bring the frozen parameters to the leader, in order of name; every rank calls it. ``take(name, bytes)``: as the
    leader, uint8 values in their order."""
    if take is not None:
        exchange.group.tell(Command.FROZEN_OUT)
    for name, parameter in sorted(frozen_tensors(model).items()):
        mine = None if take is None else functools.partial(_take_named, take, name)
        exchange.collect_bytes({name: local_tensor(parameter)}, [_form(name, parameter)], mine)


def _take_named(take: Callable[[str, torch.Tensor], None], name: str, _: int, window: torch.Tensor) -> None:
    take(name, window)


@torch.no_grad()
def spread_frozen(
    model: torch.nn.Module, exchange: Exchange, tensors: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Put frozen parameters in place in every rank; every rank calls it. ``tensors``: as the leader, whole ones."""
    if tensors is not None:
        exchange.group.tell(Command.FROZEN_IN)
    for name, parameter in sorted(frozen_tensors(model).items()):
        give = None if tensors is None else functools.partial(_give_bytes, tensors[name])
        exchange.spread_bytes({name: local_tensor(parameter)}, [_form(name, parameter)], give)


def _give_bytes(tensor: torch.Tensor, at: int, window: torch.Tensor) -> None:
    window.copy_(tensor.contiguous().view(-1).view(torch.uint8)[at : at + window.numel()])


def _form(name: str, parameter: torch.nn.Parameter) -> Form:
    shared = name if hasattr(parameter, "placements") else ""
    return Form(name, shared, parameter.numel(), parameter.element_size())


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
        spread_frozen(model, exchange, tensors)
        return
    for name, parameter in frozen.items():
        parameter.data.copy_(tensors[name])
