"""The merged parameters of a job whose model only its own program can build: safetensors files and the layout.

``model.safetensors``, or ``model-00001-of-0000N.safetensors`` with ``model.safetensors.index.json`` where there are
more than SHARD_BYTES, as transformers names them. Every parameter is there under the program's own name, float32.
A program loads them with ``model.load_state_dict(safetensors.torch.load_file(...), strict=False)``; what it does not
train as a parameter (buffers) is not among them. ``layout.json`` says which were trained, and in which dtype
(docs/protocol.md).
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
from diloco_syncer.output.shards import INDEX, index_text, split_names

SHARD_BYTES = 5 * 10**9


def write_tensors(
    job: str,
    layout: Layout,
    tensors: Mapping[str, NDArray[Any]],
    versions: Sequence[int],
    out: Path,
    shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Write ``tensors`` (by name) to the new directory ``out``; returns the names of its safetensors files.
    ``versions``: of the fragments, for the files' metadata. Raises OSError, FileExistsError where ``out`` is not empty,
    and what safetensors raises."""
    metadata = {"format": "pt", "job": job, "versions": json.dumps(list(versions)), "layout": layout.digest}
    sizes = {name: values.nbytes for name, values in tensors.items()}
    shards = split_names(sizes, shard_bytes)
    with create_directory(out) as folder:
        for file, names in shards.items():
            save_file({name: np.ascontiguousarray(tensors[name]) for name in names}, folder / file, metadata)
        if len(shards) > 1:
            (folder / INDEX).write_text(index_text(shards, sizes), encoding="utf-8")
        (folder / "layout.json").write_text(layout.to_json() + "\n", encoding="utf-8")
    return list(shards)
