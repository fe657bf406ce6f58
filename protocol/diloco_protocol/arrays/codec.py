"""Encodings of a fragment's values on the wire: float32, bfloat16, int8, int4, int2.

Theory of operation
-------------------
(arXiv 2604.21428, communication; the formats are ours.) The values are cut into blocks of 128. A block encoding is one
bfloat16 scale per block, all scales first, little-endian, then the packed values, block after block:

======== ================= =============================================== =============
encoding bytes             value                                           bits per value
======== ================= =============================================== =============
float32  4·n               itself                                          32
bfloat16 2·n               rounded to nearest, ties to even                16
int8     n + 2·b           q·s, q in -127..127, s >= max/127               8.125
int4     ceil(n/2) + 2·b   q·s, q in -7..7, s = max/7 cut to bfloat16      4.125
int2     ceil(n/4) + 2·b   ±0.4528·s or ±1.510·s, s = the block's r.m.s.   2.125
======== ================= =============================================== =============

for n values in b = ceil(n/128) blocks. int8 and int4 round to the nearest step, so a decoded value is within half a
step s of the original. The levels of int2, and the threshold 0.9816·s between them, are Lloyd's and Max's for a
Gaussian; its relative L2 error there is 0.34.

Within a block of m values byte j of int4 holds values j (low bits) and j + h, with h = ceil(m/2); byte j of int2 holds
j, j + h, j + 2h and j + 3h, with h = ceil(m/4), low bits first: neighbours in memory stay neighbours, and both
directions are plain vector code. Bits without a value are zero. int2's bits are sign (2) and outer level (1).

A value that is not finite (or of 2^126 and more) makes its block's scale NaN, and the whole block decodes to NaN:
nothing that is broken becomes a plausible number. The norm of what was decoded tells: it is not finite either.

Everything is float32 arithmetic with one rounding per operation, so that encoder
and decoder give the same bytes on every machine and with any number of threads.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco_protocol.arrays import codec_kernels, kernels
from diloco_protocol.arrays.codec_kernels import BLOCK, UInt16s
from diloco_protocol.arrays.kernels import Bytes, Float32s

ENCODINGS = ("float32", "bfloat16", "int8", "int4", "int2")
Buffer = Bytes | bytes | bytearray | memoryview
_PACKED = {"int8": 1, "int4": 2, "int2": 4}  # values per byte


class CodecError(ValueError):
    """An unknown encoding, or a buffer that does not fit: what, and how large it should be."""


def encoded_bytes(encoding: str, elements: int) -> int:
    """Exact size in bytes of ``elements`` encoded values."""
    if elements < 0:
        raise CodecError(f"{elements} elements")
    if encoding == "float32":
        return 4 * elements
    if encoding == "bfloat16":
        return 2 * elements
    per_byte = _PACKED.get(encoding)
    if per_byte is None:
        raise CodecError(f"encoding {encoding!r} is not one of {', '.join(ENCODINGS)}")
    return 2 * _blocks(elements) + -(-elements // per_byte)


def encode(values: Float32s, encoding: str, out: Bytes | None = None, *, threads: int = 1) -> Bytes:
    """Encode a contiguous float32 vector; returns uint8[encoded_bytes(encoding, n)].

    ``out``: written and returned instead of a new array; its address is even. Raises CodecError.
    """
    _check_vector(values, "values", np.float32)
    n = values.size
    size = encoded_bytes(encoding, n)
    if out is None:
        out = np.empty(size, np.uint8)
    _check_vector(out, "out", np.uint8, size, writable=True)
    if encoding == "float32":
        out[:] = values.view(np.uint8)
        return out
    if encoding == "bfloat16":
        halves = out.view(np.uint16)
        kernels.run(codec_kernels.encode_bfloat16, n, threads, values.view(np.uint32), halves, align=BLOCK)
        return out
    count = _blocks(n)
    scales, packed = out[: 2 * count].view(np.uint16), out[2 * count :]
    kernels.run(codec_kernels.ENCODERS[encoding], count, threads, values, values.view(np.uint32), scales, packed)
    return out


def decode(buffer: Buffer, encoding: str, elements: int, out: Float32s | None = None, *, threads: int = 1) -> Float32s:
    """Decode ``elements`` values; returns float32[elements]. The buffer's length is
    checked first; any content decodes to something. Raises CodecError."""
    source = _encoded(buffer, encoding, elements)
    if out is None:
        out = np.empty(elements, np.float32)
    _check_vector(out, "out", np.float32, elements, writable=True)
    if encoding == "float32":
        out.view(np.uint8)[:] = source
    elif encoding == "bfloat16":
        halves = _aligned(source.view(np.uint16))
        kernels.run(codec_kernels.decode_bfloat16, elements, threads, halves, out.view(np.uint32), align=BLOCK)
    else:
        count = _blocks(elements)
        scales = _aligned(source[: 2 * count].view(np.uint16))
        kernels.run(codec_kernels.DECODERS[encoding], count, threads, scales, source[2 * count :], out)
    return out


def encode_with_feedback(
    delta: Float32s, residual: Float32s | None, encoding: str, *, threads: int = 1
) -> tuple[Bytes, Float32s]:
    """Encode Δ + r; returns (encoded, r') with r' = Δ + r − decode(encoded).

    ``residual`` None: r = 0. The caller makes r' its residual only when it learns that
    the push was merged, and keeps r otherwise (algorithm, section 7): so over merged
    pushes the sum of decoded values and the last residual is the sum of Δ, to rounding.
    """
    _check_vector(delta, "delta", np.float32)
    if residual is None:
        values = delta
    else:
        _check_vector(residual, "residual", np.float32, delta.size)
        values = delta + residual
    encoded = encode(values, encoding, threads=threads)
    decoded = decode(encoded, encoding, delta.size, threads=threads)
    np.subtract(values, decoded, out=decoded)
    return encoded, decoded


def apply_delta(base: Float32s, buffer: Buffer, encoding: str, out: Float32s | None = None) -> Float32s:
    """base + decode(buffer), float32: the same bits wherever it is computed. ``out``: written and returned.

    This is how syncer and learners both make version v from version v − 1 when
    ``compression.down`` is delta-*. Raises CodecError.
    """
    _check_vector(base, "base", np.float32)
    n = base.size
    out = np.empty(n, np.float32) if out is None else out
    update = EncodedValues(buffer, encoding, n)
    # Decoding and adding are separate loops, through a scratch that stays in the
    # cache, so that no compiler can fuse product and sum into one rounding.
    step = 256 * BLOCK
    scratch = np.empty(scratch_size(min(n, step)), np.float32)
    for start in range(0, n, step):
        stop = min(start + step, n)
        np.add(base[start:stop], update.decode(start, stop, scratch), out=out[start:stop])
    return out


class EncodedValues:
    """``elements`` values as they were sent, of which any range may be decoded. What can be checked is checked here
    once, so that ``decode`` is little beside its loop: threads that decode call it one at a time.

    Raises CodecError if ``buffer`` has another length than the encoding gives so many values.
    """

    def __init__(self, buffer: Buffer, encoding: str, elements: int) -> None:
        source = _encoded(buffer, encoding, elements)
        self.elements = elements
        self._encoding = encoding
        self._per_byte = _PACKED.get(encoding, 0)
        scales = 2 * _blocks(elements) if self._per_byte else source.size
        self._halves = _aligned(source[:scales].view(np.uint16))  # scales, or all of bfloat16
        self._rest = source[scales:]

    def decode(self, start: int, stop: int, scratch: Float32s) -> Float32s:
        """The values from ``start`` to ``stop`` (0 <= start <= stop <= elements), float32, with the bits that
        ``decode`` of the whole has there: a view, mostly of ``scratch``, which has ``scratch_size(stop - start)``."""
        if self._encoding == "float32":
            return self._halves.view(np.float32)[start:stop]
        if self._encoding == "bfloat16":
            out = scratch[: stop - start]
            codec_kernels.decode_bfloat16(self._halves[start:stop], out.view(np.uint32), 0, out.size)
            return out
        first, last = start // BLOCK, _blocks(stop)
        out = scratch[: min(last * BLOCK, self.elements) - first * BLOCK]
        packed = self._rest[first * BLOCK // self._per_byte :]
        codec_kernels.DECODERS[self._encoding](self._halves[first:last], packed, out, 0, last - first)
        return out[start - first * BLOCK : stop - first * BLOCK]


def scratch_size(elements: int) -> int:
    """Of what a range of so many values is decoded into: its blocks may begin before it and end behind it."""
    return elements + 2 * BLOCK


def norm_and_finite(values: Float32s, *, threads: int = 1) -> tuple[float, bool]:
    """The L2 norm of a contiguous float32 vector, and whether all values are finite.

    float64 over fixed blocks, block sums added in order: the same bits for any
    number of threads. One pass, for the sum of squares is finite exactly if all are.
    """
    _check_vector(values, "values", np.float32)
    total = kernels.square_sum(values, threads)
    return math.sqrt(total), math.isfinite(total)


def as_bytes(buffer: Buffer) -> Bytes:
    """A flat uint8 view of a contiguous buffer, without a copy."""
    if isinstance(buffer, np.ndarray):
        _check_vector(buffer, "buffer", np.uint8)
        return buffer
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise CodecError("buffer: not contiguous")
    return np.frombuffer(view, np.uint8)


def _encoded(buffer: Buffer, encoding: str, elements: int) -> Bytes:
    """The buffer's bytes, if they are as many as the encoded values take."""
    source, size = as_bytes(buffer), encoded_bytes(encoding, elements)
    if source.size != size:
        raise CodecError(f"{source.size} bytes, and {elements} {encoding} values take {size}")
    return source


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)


def _aligned(halves: UInt16s) -> UInt16s:
    """Kernels want aligned arrays, and a slice of a received buffer may begin anywhere."""
    return halves if halves.flags.aligned else halves.copy()


def _check_vector(
    array: NDArray[Any], name: str, dtype: type[np.generic], size: int | None = None, *, writable: bool = False
) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        kind = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise CodecError(f"{name}: {kind}, and a flat {np.dtype(dtype)} array is needed")
    if not array.flags.c_contiguous or not (array.flags.aligned or dtype is np.uint8):
        raise CodecError(f"{name}: not contiguous and aligned")
    if writable and not array.flags.writeable:
        raise CodecError(f"{name}: read-only")
    if size is not None and array.size != size:
        raise CodecError(f"{name}: {array.size} elements, and {size} are needed")
