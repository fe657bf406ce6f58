"""The merged parameters of a job whose model only its own program can build: safetensors files and the layout.

``model.safetensors``, or ``model-00001-of-0000N.safetensors`` with ``model.safetensors.index.json`` where there are
more than SHARD_BYTES, as transformers names them. Every parameter is there under the program's own name, float32.
A program loads them with ``model.load_state_dict(safetensors.torch.load_file(...), strict=False)``; what it does not
train as a parameter (buffers) is not among them. ``layout.json`` says which were trained, and in which dtype
(docs/protocol.md); ``diloco plan --layout`` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from diloco_protocol.arrays.layout import Layout
from diloco_protocol.common.files import create_directory

SHARD_BYTES = 5 * 10**9


def write_tensors(
    job: str,
    layout: Layout,
    tensors: Mapping[str, NDArray[Any]],
    versions: Sequence[int],
    out: Path,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write ``tensors`` (by name) to the new directory ``out``. ``versions``: of the fragments, for the files'
    metadata. Raises OSError, FileExistsError where ``out`` is not empty."""
    metadata = {"format": "pt", "job": job, "versions": json.dumps(list(versions)), "layout": layout.digest}
    shards = _shards(tensors, shard_bytes)
    names = [
        "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    with create_directory(out) as folder:
        for name, shard in zip(names, shards, strict=True):
            save_file({key: np.ascontiguousarray(tensors[key]) for key in shard}, folder / name, metadata)
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(values.nbytes for values in tensors.values())},
                "weight_map": {key: name for name, shard in zip(names, shards, strict=True) for key in shard},
            }
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        (folder / "layout.json").write_text(layout.to_json() + "\n", encoding="utf-8")


def _shards(tensors: Mapping[str, NDArray[Any]], most: int) -> list[list[str]]:
    """Names in order, cut wherever the next tensor would lift a file above ``most`` bytes."""
    shards: list[list[str]] = [[]]
    size = 0
    for name in sorted(tensors):
        if shards[-1] and size + tensors[name].nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensors[name].nbytes
    return shards
