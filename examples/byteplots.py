"""Byte plots: image classification with no download.

A byte plot is a grey image whose pixels are consecutive bytes of a file, row by
row; malware researchers sort programs by them. Here the files are the standard
library's own source: each image is 32 x 32 = 1024 bytes, and its label is which of
the ten largest top-level packages the bytes come from. Tables, prose and code
look different enough that a small vision transformer learns it in minutes, and
alike enough that it does not learn it at once.

Every 20th image of each package, evenly over its source, is held out.

A job names this function as ``training.data: {source: python, function: byteplots:load}``.
"""

from __future__ import annotations

import os
import sysconfig
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

SIDE = 32
CLASSES = 10
HELD_OUT_EVERY = 20
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class BytePlots(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """``self[i]``: pixel_values float32 [1, 32, 32] in -1..1, labels int64 []."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, names: list[str]) -> None:
        self.images, self.labels, self.names = images, labels, names

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        pixels = torch.from_numpy(self.images[i].astype(np.float32) / 127.5 - 1)
        return {"pixel_values": pixels[None], "labels": torch.tensor(int(self.labels[i]))}


def packages() -> dict[str, bytes]:
    """The ten largest packages of the standard library, name to all its source, in order of name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    source: dict[str, list[bytes]] = defaultdict(list)
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(s for s in subfolders if s not in SKIPPED)
        parts = Path(folder).relative_to(root).parts
        if parts:
            source[parts[0]] += [Path(folder, n).read_bytes() for n in sorted(names) if n.endswith(".py")]
    joined = {name: b"".join(files) for name, files in source.items()}
    largest = sorted(joined, key=lambda name: (-len(joined[name]), name))[:CLASSES]
    return {name: joined[name] for name in sorted(largest)}


def load(data: Any, held_out: bool) -> BytePlots:
    """The images to train on, or those held out. ``data`` is the job's training.data, not needed here."""
    images, labels, names = [], [], []
    for label, (name, source) in enumerate(packages().items()):
        count = len(source) // SIDE**2
        plots = np.frombuffer(source, np.uint8, count * SIDE**2).reshape(count, SIDE, SIDE)
        # The last of every HELD_OUT_EVERY, so that a package with few images gives some to training first.
        out = np.arange(count) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        images.append(plots[out if held_out else ~out])
        labels.append(np.full(len(images[-1]), label))
        names.append(name)
    return BytePlots(np.concatenate(images), np.concatenate(labels), names)
