"""The names of a model's files, as transformers names them: one file, or several with an index."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def split_names(sizes: Mapping[str, int], most: int) -> dict[str, list[str]]:
    """File names, each with the tensors in it: names in order, cut wherever the next tensor would lift a file above
    ``most`` bytes. ``sizes``: bytes of the tensors, by name."""
    shards: list[list[str]] = [[]]
    size = 0
    for name in sorted(sizes):
        if shards[-1] and size + sizes[name] > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += sizes[name]
    if len(shards) == 1:
        return {WHOLE: shards[0]}
    return {f"model-{at:05}-of-{len(shards):05}.safetensors": names for at, names in enumerate(shards, 1)}


def index_text(shards: Mapping[str, Sequence[str]], sizes: Mapping[str, int]) -> str:
    """The index of several files (JSON): in which file each tensor lies."""
    index = {
        "metadata": {"total_size": sum(sizes.values())},
        "weight_map": {name: file for file, names in shards.items() for name in names},
    }
    return json.dumps(index, indent=1) + "\n"
