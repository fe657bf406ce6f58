"""Safetensors in mapped files: written, sent, received and read one tensor at a time.

An inner optimizer's state is as large as two models, and so are the frozen parameters of a large model. Such a thing
never lies in memory a second time. It is written from the tensors where they are, sent and received as a mapped file,
and read from the mapping into the tensors where they shall be. The file has no name: its space is free again when
nobody uses the mapping any more. What the kernel keeps of it in its cache it may drop at any time.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diloco_protocol.arrays.kernels import Bytes

MAX_HEADER = 64 << 20
_SMALL, _JOINED = 64 << 10, 256  # bytes of a tensor, and how many are copied at once: 16 MiB at most
_NAMES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
}
_NAMES |= {torch.complex64: "C64", torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16"}
_NAMES |= {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0"}
_NAMES |= {torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ"}
_PAIRS = torch.float4_e2m1fn_x2  # an element of it is two of the format's "F4", along the last dimension
_NAMES[_PAIRS] = "F4"
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class NotTensors(ValueError):
    """The bytes are no safetensors file; the message says why."""


def map_new_file(nbytes: int, folder: Path | None = None) -> Bytes:
    """A file of so many bytes, as uint8[nbytes], in ``folder`` (None: the system's for temporary files). Raises OSError
    if there is no room for it."""
    if not nbytes:
        return np.empty(0, np.uint8)
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return np.memmap(file, np.uint8, "r+", shape=(nbytes,))


def begin_file(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], folder: Path | None = None
) -> tuple[Bytes, int]:
    """A safetensors file of tensors of these dtypes and shapes, uint8[bytes], and where the first one begins: they
    follow without gaps, and their values are for the caller to write. Raises OSError, and KeyError for a dtype that the
    format lacks."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        shape = list(tensor.shape)
        begin, end = end, end + math.prod(shape) * tensor.dtype.itemsize
        if tensor.dtype is _PAIRS:
            shape[-1] *= 2
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    data = map_new_file(8 + len(text) + end, folder)
    data[: 8 + len(text)] = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    return data, 8 + len(text)


def write_tensors(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], folder: Path | None = None
) -> Bytes:
    """A safetensors file of these tensors, on whatever device they lie: uint8[bytes]. Raises as ``begin_file``."""
    data, at = begin_file(tensors, metadata, folder)
    for piece in _pieces(tensors.values()):
        flat = piece.cpu().view(torch.uint8).numpy()
        data[at : at + flat.size] = flat
        at += flat.size
    return data


def _pieces(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors one after the other, flat, small ones of one kind joined: copying has a cost for each piece."""
    for (_, _, small), group in itertools.groupby(tensors, lambda one: (one.dtype, one.device, one.nbytes <= _SMALL)):
        flat = (tensor.detach().reshape(-1) for tensor in group)
        if not small:
            yield from flat
            continue
        while joined := list(itertools.islice(flat, _JOINED)):
            yield torch.cat(joined) if len(joined) > 1 else joined[0]


def read_header(data: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """A file's metadata, and its tensors' rows by name, unchecked. ``data``: its bytes. Raises NotTensors."""
    if len(data) < 8:
        raise NotTensors("it is too short")
    size = int.from_bytes(bytes(data[:8]), "little")
    if size > min(len(data) - 8, MAX_HEADER):
        raise NotTensors("its header is cut off")
    try:
        header = json.loads(bytes(data[8 : 8 + size]))
    except (ValueError, RecursionError) as error:
        raise NotTensors("its header is not JSON") from error
    metadata = header.pop("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise NotTensors("its metadata are not text")
    return metadata, header


def read_tensors(data: Any) -> dict[str, torch.Tensor]:
    """A file's tensors by name, as views of ``data``, a writable buffer. Raises NotTensors unless they fill it without
    gaps."""
    _, rows = read_header(data)
    start = 8 + int.from_bytes(bytes(data[:8]), "little")
    found, ends = {}, {0}
    try:
        for name, row in sorted(rows.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape, (begin, end) = _DTYPES[row["dtype"]], [int(n) for n in row["shape"]], row["data_offsets"]
            if dtype is _PAIRS:
                shape = [*shape[:-1], shape[-1] // 2]
            size = math.prod(shape) * dtype.itemsize
            if begin not in ends or end - begin != size or min(shape, default=0) < 0:
                raise ValueError(f"{name} lies at {begin}:{end}")
            ends = {end}
            view = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=start + begin) if size else None
            empty = torch.empty(0, dtype=torch.uint8)
            found[name] = (empty if view is None else view).view(dtype).reshape(shape)
        if ends != {len(data) - start}:
            raise ValueError(f"{len(data)} bytes")
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise NotTensors(repr(error)) from error
    return found
