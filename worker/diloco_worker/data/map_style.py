"""A data set that is leased out by number: whether it can be, and what of its content the syncer compares.

Learners must read the same item under the same number. Counts alone do not show it: so a Join has digests of items at
the data set's beginning, in its middle and at its end. Items that are drawn anew at each reading (augmentation with a
generator of the data set's own) are not compared.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from diloco_protocol.wire.records import DataSample
from diloco_worker.settings import ConfigurationError

log = logging.getLogger(__name__)

_STREAMS = "a stream goes through learner.steps(): `for step in learner.steps(): batch = next(stream)`"


def sample_items(dataset: Any) -> tuple[DataSample, ...]:
    """Digests of the data set's first, middle and last item, of a data set with ``compared_items`` of so many each (0:
    its content is not compared). Empty: they differ from one reading to the next, or hold what has no digest."""
    size = len(dataset)
    each = min(size, getattr(dataset, "compared_items", 1))
    samples = []
    for first in sorted({0, (size - each) // 2, size - each}) if each else ():
        found = {_digest_items(dataset, range(first, first + each)) for _ in range(2)}
        digest = found.pop()
        if found or not digest:
            log.info("the content of the data is not compared with that of other learners: it is drawn or has no bytes")
            return ()
        samples.append(DataSample(first, each, digest))
    return tuple(samples)


def _digest_items(dataset: Any, indices: Iterable[int]) -> str:
    """Of their content, the same in every process: whoever draws from a global generator draws the same. Empty: they
    hold what has no digest."""
    digest = hashlib.blake2b(digest_size=16)
    drawn = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            for index in indices:
                random.seed(index)
                np.random.seed(index % 2**32)
                torch.default_generator.manual_seed(index)
                if not _add(digest, dataset[index]):
                    return ""
    finally:
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> bool:
    """Add what an item holds to the digest. False: it holds something that has no digest."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        digest.update(f"{value.dtype.str} {value.shape}".encode() + value.tobytes())
    elif isinstance(value, str | bytes | int | float | None):
        digest.update(repr(value).encode())
    elif isinstance(value, Mapping):
        return all(_add(digest, part) for name in sorted(value, key=repr) for part in (name, value[name]))
    elif isinstance(value, list | tuple):
        return all(_add(digest, part) for part in (len(value), *value))
    elif callable(getattr(value, "tobytes", None)) and not isinstance(value, np.ndarray):  # an image of PIL's
        digest.update(f"{type(value).__name__} {getattr(value, 'size', '')}".encode() + value.tobytes())
    else:
        return False
    return True


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
