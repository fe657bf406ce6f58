"""The merged model as one safetensors file that is made while it is sent.

Parameters lie in the syncer by fragment, a file has them by name. ``ModelFile`` puts the one in the order of the
other: whole tensors, sorted by name, float32, the frozen ones among them. Nothing but the header and one chunk is
ever in memory beside the fragments themselves, which the file holds on to until it is sent: merges go on meanwhile
and make new arrays, and the file is of one moment.

Metadata: ``job`` (its name), ``epoch``, ``versions`` (a JSON list, one for each fragment),
``layout`` (its digest), and ``format``, which transformers asks for.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from diloco_protocol.arrays.layout import Layout

CHUNK_ELEMENTS = 1 << 18  # of one chunk: 1 MiB of float32
MAX_HEADER = 100 << 20  # as safetensors itself has it

# How safetensors names element types, and how numpy reads them. bfloat16, which numpy
# lacks, is the upper half of a float32.
_WIDTHS = {"F": (2, 4, 8), "I": (1, 2, 4, 8), "U": (1, 2, 4, 8)}
_DTYPES: dict[str, Any] = {f"{kind}{8 * n}": f"<{kind.lower()}{n}" for kind, widths in _WIDTHS.items() for n in widths}
_DTYPES |= {"BF16": "<u2", "BOOL": "<u1"}


class NotSafetensors(ValueError):
    """The bytes are no safetensors file, or hold a type that has no float32."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a safetensors file: bytes ``start:stop`` after its header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_header(data: bytes) -> tuple[list[Entry], dict[str, str]]:
    """The tensors of a safetensors file in the order of their bytes, and its metadata, from the
    header without its length. Raises NotSafetensors unless they follow each other without a gap."""
    try:
        document = json.loads(data)
        metadata = document.pop("__metadata__", {})
        entries = [
            Entry(name, row["dtype"], tuple(int(n) for n in row["shape"]), *map(int, row["data_offsets"]))
            for name, row in document.items()
        ]
        entries.sort(key=lambda entry: (entry.start, entry.stop))
        at = 0
        for entry in entries:
            width = np.dtype(_DTYPES[entry.dtype]).itemsize
            if entry.start != at or entry.stop - at != width * entry.elements or min((*entry.shape, 0)) < 0:
                raise ValueError(f"{entry.name} lies at {entry.start}:{entry.stop}")
            at = entry.stop
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NotSafetensors(f"this is no safetensors header: {error!r}") from error
    return entries, {str(key): str(value) for key, value in metadata.items()}


def frozen_entries(data: NDArray[np.uint8]) -> tuple[list[Entry], int]:
    """Tensors of a safetensors file in memory, and where its bytes begin. Raises NotSafetensors."""
    length = int.from_bytes(data[:8].tobytes(), "little")
    if data.size < 8 or length > min(MAX_HEADER, data.size - 8):
        raise NotSafetensors("this is no safetensors file: its header is cut off")
    entries, _ = read_header(data[8 : 8 + length].tobytes())
    if entries and entries[-1].stop != data.size - 8 - length:
        raise NotSafetensors("this is no safetensors file: its tensors are cut off")
    return entries, 8 + length


def as_float32(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """The elements of a safetensors tensor, float32."""
    values = raw.view(_DTYPES[dtype])
    if dtype == "BF16":
        return (values.astype("<u4") << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


class ModelFile:
    """One model, at one moment. ``thetas``: of each fragment float32[elements]; ``frozen``: a
    safetensors file's bytes, or None. Raises NotSafetensors."""

    def __init__(
        self,
        job: str,
        epoch: int,
        layout: Layout,
        thetas: Sequence[NDArray[np.float32]],
        versions: Sequence[int],
        frozen: NDArray[np.uint8] | None,
    ) -> None:
        self._thetas = thetas
        self._frozen = frozen
        self._pieces: dict[str, list[tuple[int, int, int]]] = {}  # name -> fragment, offset, elements
        pieces = sorted(
            (piece.tensor, piece.start, fragment, piece.offset, piece.elements)
            for fragment, of_fragment in enumerate(layout.fragments)
            for piece in of_fragment
        )
        for name, _, fragment, offset, elements in pieces:
            self._pieces.setdefault(name, []).append((fragment, offset, elements))
        shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
        self._frozen_entries: dict[str, Entry] = {}
        self._frozen_start = 0
        if frozen is not None:
            entries, self._frozen_start = frozen_entries(frozen)
            self._frozen_entries = {entry.name: entry for entry in entries if entry.name not in shapes}
            shapes |= {entry.name: entry.shape for entry in self._frozen_entries.values()}
        self._shapes = shapes
        self._metadata = {
            "format": "pt",
            "job": job,
            "epoch": str(epoch),
            "versions": json.dumps(list(versions)),
            "layout": layout.digest,
        }
        self._write_header(sorted(shapes))

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each tensor in the file, by name."""
        return {name: 4 * math.prod(self._shapes[name]) for name in self._names}

    def select(self, names: Sequence[str]) -> ModelFile:
        """A file of the same moment with these tensors alone."""
        made = copy.copy(self)
        made._write_header(sorted(names))
        return made

    def _write_header(self, names: Sequence[str]) -> None:
        self._names = names
        header: dict[str, Any] = {"__metadata__": self._metadata}
        at = 0
        for name, size in self.sizes.items():
            header[name] = {"dtype": "F32", "shape": list(self._shapes[name]), "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
        self._header = len(text).to_bytes(8, "little") + text
        self.length = len(self._header) + at

    def chunks(self) -> Iterator[bytes | memoryview]:
        """All bytes of the file, in pieces of at most 1 MiB (the header is one)."""
        yield self._header
        for name in self._names:
            if name in self._pieces:
                for fragment, offset, elements in self._pieces[name]:
                    theta = np.ascontiguousarray(self._thetas[fragment], np.float32)
                    for first in range(offset, offset + elements, CHUNK_ELEMENTS):
                        last = min(first + CHUNK_ELEMENTS, offset + elements)
                        yield theta[first:last].data.cast("B")
            else:
                yield from self._frozen_chunks(self._frozen_entries[name])

    def _frozen_chunks(self, entry: Entry) -> Iterator[memoryview]:
        assert self._frozen is not None
        width = np.dtype(_DTYPES[entry.dtype]).itemsize
        start, stop = self._frozen_start + entry.start, self._frozen_start + entry.stop
        for first in range(start, stop, CHUNK_ELEMENTS * width):
            raw = np.array(self._frozen[first : min(first + CHUNK_ELEMENTS * width, stop)])  # aligned
            yield as_float32(raw, entry.dtype).data.cast("B")

    def checksum(self) -> int:
        """xxh3-64 of all bytes; reads everything once."""
        digest = xxhash.xxh3_64()
        for chunk in self.chunks():
            digest.update(chunk)
        return digest.intdigest()
