"""Whether a data set can be leased out by number, and what to say where it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from diloco_worker.settings import ConfigurationError

_STREAMS = "a stream goes through learner.steps(): `for step in learner.steps(): batch = next(stream)`"


def check_map_style(dataset: Any) -> None:
    """Raise ConfigurationError unless ``dataset`` has a length and items by number, with what to do instead."""
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise ConfigurationError(
            "batches() got a DataLoader, and it makes the batches itself: give it the data set within, "
            "learner.batches(loader.dataset), and the loader's collate_fn as collate; training.batch of the job says "
            f"how large a batch is. To keep the loader: {_STREAMS}, where each learner reads a part of its own"
        )
    if isinstance(dataset, Mapping):
        names = ", ".join(map(repr, list(dataset)[:4]))
        raise ConfigurationError(f"batches() got a {kind} of {names}: give it one of these data sets")
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if isinstance(dataset, IterableDataset) or missing:
        lacks = f" ({' and '.join(missing)} missing)" if missing else ""
        raise ConfigurationError(
            f"batches() got a {kind}{lacks}: it wants a map-style data set, with __len__ and __getitem__, the same in "
            f"every learner, because the syncer deals out items by number; {_STREAMS}, where each learner reads a part "
            "of its own"
        )
