"""Frozen parameters are part of version 0, and no merge changes them.

Who builds version 0 uploads them once, with a digest of their names, shapes, dtypes and values. Everybody else compares
that with the digest of its own: mostly they are the same, because all load them from the same weights, and nothing is
downloaded. Where they differ, the job's are downloaded and put in place.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any

import torch
import xxhash

from diloco_worker.fragments import frozen_bytes, frozen_tensors, most_frozen_bytes
from diloco_worker.net.client import SyncerClient
from diloco_worker.net.inbox import FrozenDownloaded
from diloco_worker.net.tensor_file import NotTensors, read_tensors
from diloco_worker.settings import ConfigurationError

log = logging.getLogger(__name__)


class FrozenParameters:
    """Those of one model. ``missing``: they are to be downloaded before the model is whole."""

    def __init__(self, model: torch.nn.Module, client: SyncerClient) -> None:
        self.missing = bool(frozen_tensors(model))
        self._model = model
        self._client = client
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
        self._client.fetch_frozen(most_frozen_bytes(self._model), self.digest)

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
        load_frozen(self._model, message.data)
        self.missing = False

    def serialize(self) -> bytes:
        """This model's own, as safetensors, for version 0; empty if there are none. Nothing is missing then."""
        self.missing = False
        return frozen_bytes(self._model)

    def digest(self) -> str:
        """Of this model's own; for any thread, as long as nobody moves them."""
        return frozen_digest(self._model)


@torch.no_grad()
def frozen_digest(model: torch.nn.Module) -> str:
    """SHA-256 (hex) over name, dtype, shape and the values' xxh3-128 of each frozen parameter, in order of name."""
    rows = []
    for name, parameter in sorted(frozen_tensors(model).items()):
        values = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        rows.append([name, str(parameter.dtype), list(parameter.shape), xxhash.xxh3_128_hexdigest(values.data)])
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


@torch.no_grad()
def load_frozen(model: torch.nn.Module, data: Any) -> None:
    """Put received frozen parameters in place. Raises ConfigurationError unless names, shapes
    and dtypes are exactly the model's."""
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
    for name, parameter in frozen.items():
        parameter.data.copy_(tensors[name])
