"""Frozen parameters travel once: they are part of version 0, and no merge changes them."""

from __future__ import annotations

import torch

from diloco_worker.fragments import frozen_bytes, frozen_tensors, load_frozen, most_frozen_bytes
from diloco_worker.net.client import SyncerClient
from diloco_worker.net.inbox import FrozenDownloaded
from diloco_worker.settings import ConfigurationError


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
            self._client.fetch_frozen(most_frozen_bytes(self._model))

    def repeat_request(self) -> None:
        """Ask again in a new session: the one before may have lost the answer."""
        if self.missing and self._requested:
            self._client.fetch_frozen(most_frozen_bytes(self._model))

    def load(self, message: FrozenDownloaded) -> None:
        """Put them in place. Raises ConfigurationError if they are not this model's."""
        if message.data is None:
            raise ConfigurationError(
                "the job's version 0 has no frozen parameters and this model has: give every process the same model"
            )
        load_frozen(self._model, message.data)
        self.missing = False

    def serialize(self) -> bytes:
        """This model's own, as safetensors, for version 0; empty if there are none. Nothing is missing then."""
        self.missing = False
        return frozen_bytes(self._model)
