"""Encodings of a fragment's values on the wire: float32, bfloat16, int8, int4, int2.

Theory of operation
-------------------
(arXiv 2604.21428, communication; the formats are ours.) The values are cut into
blocks of 128. A block encoding is one bfloat16 scale per block, all scales first,
little-endian, then the packed values, block after block:

======== ================= =============================================== =============
encoding bytes             value                                           bits per value
======== ================= =============================================== =============
float32  4·n               itself                                          32
bfloat16 2·n               rounded to nearest, ties to even                16
int8     n + 2·b           q·s, q in -127..127, s >= max/127               8.125
int4     ceil(n/2) + 2·b   q·s, q in -7..7, s = max/7 cut to bfloat16      4.125
int2     ceil(n/4) + 2·b   ±0.4528·s or ±1.510·s, s = the block's r.m.s.   2.125
======== ================= =============================================== =============

for n values in b = ceil(n/128) blocks. int8 and int4 round to the nearest step, so
a decoded value is within half a step s of the original. The levels of int2, and the
threshold 0.9816·s between them, are Lloyd's and Max's for a Gaussian; its relative
L2 error there is 0.34.

Within a block of m values byte j of int4 holds values j (low bits) and j + h, with
h = ceil(m/2); byte j of int2 holds j, j + h, j + 2h and j + 3h, with h = ceil(m/4),
low bits first: neighbours in memory stay neighbours, and both directions are plain
vector code. Bits without a value are zero. int2's bits are sign (2) and outer level (1).

A value that is not finite (or of 2^126 and more) makes its block's scale NaN, and
the whole block decodes to NaN: nothing that is broken becomes a plausible number.
``norm_and_finite`` of what was decoded tells.

Everything is float32 arithmetic with one rounding per operation, so that encoder
and decoder give the same bytes on every machine and with any number of threads.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco_protocol import kernels
from diloco_protocol.kernels import (
    F32_IN,
    F32_OUT,
    RANGE,
    U8_IN,
    U8_OUT,
    U16_IN,
    U16_OUT,
    U32_IN,
    Bytes,
    Float32s,
    kernel,
)

UInt16s = NDArray[np.uint16]
UInt32s = NDArray[np.uint32]

ENCODINGS = ("float32", "bfloat16", "int8", "int4", "int2")
BLOCK = 128  # values under one scale

_PACKED = {"int8": 1, "int4": 2, "int2": 4}  # values per byte
_INNER, _OUTER, _THRESHOLD = np.float32(0.4528), np.float32(1.510), np.float32(0.9816)

# Adding and dropping 1.5·2^23 rounds a float32 of magnitude below 2^22 to the nearest
# whole number, ties to even, and leaves that number in the low bits.
_MAGIC = np.float32(12582912.0)
_LARGEST = np.uint32(0x7E800000)  # 2^126: from here on a scale's multiples could overflow
_NAN16 = np.uint16(0x7FC0)
_SMALLEST = np.float32(2.0**-126)  # the smallest scale whose inverse is finite


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

    ``out``: written and returned instead of a new array. Raises CodecError.
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
        target = _aligned(out.view(np.uint16))
        kernels.run(_encode_bfloat16, n, threads, values.view(np.uint32), target, align=BLOCK)
        _give_back(target, out)
        return out
    blocks = _blocks(n)
    scales = _aligned(out[: 2 * blocks].view(np.uint16))
    packed = out[2 * blocks :]
    kernels.run(_ENCODERS[encoding], blocks, threads, values, values.view(np.uint32), scales, packed)
    _give_back(scales, out[: 2 * blocks])
    return out


def decode(
    buffer: Bytes | bytes | bytearray | memoryview,
    encoding: str,
    elements: int,
    out: Float32s | None = None,
    *,
    threads: int = 1,
) -> Float32s:
    """Decode ``elements`` values; returns float32[elements]. The buffer's length is
    checked first; any content decodes to something. Raises CodecError."""
    source = as_bytes(buffer)
    size = encoded_bytes(encoding, elements)
    if source.size != size:
        raise CodecError(f"{source.size} bytes, and {elements} {encoding} values take {size}")
    if out is None:
        out = np.empty(elements, np.float32)
    _check_vector(out, "out", np.float32, elements, writable=True)
    if encoding == "float32":
        out.view(np.uint8)[:] = source
    elif encoding == "bfloat16":
        halves = _aligned(source.view(np.uint16))
        kernels.run(_decode_bfloat16, elements, threads, halves, out.view(np.uint32), align=BLOCK)
    else:
        scales, packed = _split(source, elements)
        kernels.run(_DECODERS[encoding], _blocks(elements), threads, scales, packed, out)
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


def apply_delta(
    base: Float32s,
    buffer: Bytes | bytes | bytearray | memoryview,
    encoding: str,
    out: Float32s | None = None,
) -> Float32s:
    """base + decode(buffer), float32: the same bits wherever it is computed.

    This is how syncer and learners both make version v from version v − 1 when
    ``compression.down`` is delta-*. ``out`` may be ``base``. Raises CodecError.
    """
    _check_vector(base, "base", np.float32)
    n = base.size
    if out is None:
        out = np.empty(n, np.float32)
    _check_vector(out, "out", np.float32, n, writable=True)
    source = as_bytes(buffer)
    size = encoded_bytes(encoding, n)
    if source.size != size:
        raise CodecError(f"{source.size} bytes, and {n} {encoding} values take {size}")
    # Decoding and adding are separate loops, through a scratch that stays in the
    # cache, so that no compiler can fuse product and sum into one rounding.
    step = 256 * BLOCK
    scratch = np.empty(min(n, step), np.float32)
    scales, packed = _split(source, n) if encoding in _PACKED else (None, source)
    for start in range(0, n, step):
        stop = min(start + step, n)
        part = scratch[: stop - start]
        if scales is None:
            width = source.size // n
            decode(packed[start * width : stop * width], encoding, stop - start, part)
        else:
            per_byte = _PACKED[encoding]
            _DECODERS[encoding](
                scales[start // BLOCK : _blocks(stop)],
                packed[start // per_byte : -(-stop // per_byte)],
                part,
                0,
                _blocks(stop - start),
            )
        np.add(base[start:stop], part, out=out[start:stop])
    return out


def norm_and_finite(values: Float32s, *, threads: int = 1) -> tuple[float, bool]:
    """The L2 norm of a contiguous float32 vector, and whether all values are finite.

    float64 over fixed blocks, block sums added in order: the same bits for any
    number of threads. One pass, for the sum of squares is finite exactly if all are.
    """
    _check_vector(values, "values", np.float32)
    total = kernels.square_sum(values, threads)
    return math.sqrt(total), math.isfinite(total)


def as_bytes(buffer: Bytes | bytes | bytearray | memoryview) -> Bytes:
    """A flat uint8 view of a contiguous buffer, without a copy."""
    if isinstance(buffer, np.ndarray):
        _check_vector(buffer, "buffer", np.uint8)
        return buffer
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise CodecError("buffer: not contiguous")
    return np.frombuffer(view, np.uint8)


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)


def _split(source: Bytes, elements: int) -> tuple[UInt16s, Bytes]:
    end = 2 * _blocks(elements)
    return _aligned(source[:end].view(np.uint16)), source[end:]


def _aligned(halves: UInt16s) -> UInt16s:
    """Kernels want aligned arrays, and a slice of a received buffer may begin anywhere."""
    return halves if halves.flags.aligned else halves.copy()


def _give_back(halves: UInt16s, out: Bytes) -> None:
    if not np.may_share_memory(halves, out):
        out[:] = halves.view(np.uint8)


def _check_vector(
    array: NDArray[Any],
    name: str,
    dtype: type[np.generic],
    size: int | None = None,
    *,
    writable: bool = False,
) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        kind = (
            f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        )
        raise CodecError(f"{name}: {kind}, and a flat {np.dtype(dtype)} array is needed")
    if not array.flags.c_contiguous or not (array.flags.aligned or dtype is np.uint8):
        raise CodecError(f"{name}: not contiguous and aligned")
    if writable and not array.flags.writeable:
        raise CodecError(f"{name}: read-only")
    if size is not None and array.size != size:
        raise CodecError(f"{name}: {array.size} elements, and {size} are needed")


# ---------------------------------------------------------------- kernels
#
# Indices are uint64, because a signed index may mean "from the end" and the test for
# it keeps the loops from being vectorised. A block's last part is handled by the same
# code with a smaller h; only a block that h does not divide takes the careful loop.


@kernel(U32_IN, U16_OUT, RANGE)
def _encode_bfloat16(bits: UInt32s, halves: UInt16s, first: int, last: int) -> None:
    for i in range(np.uint64(first), np.uint64(last)):
        b = bits[i]
        rounded = (b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        quiet = (b >> np.uint32(16)) | np.uint32(0x40)  # rounding could turn a NaN into something else
        nan = (b & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        halves[i] = np.uint16(quiet if nan else rounded)


@kernel(U16_IN, "uint32[::1]", RANGE)
def _decode_bfloat16(halves: UInt16s, bits: UInt32s, first: int, last: int) -> None:
    for i in range(np.uint64(first), np.uint64(last)):
        bits[i] = np.uint32(np.uint32(halves[i]) << np.uint32(16))


@kernel(F32_IN, U32_IN, U16_OUT, U8_OUT, RANGE)
def _encode_int8(
    values: Float32s, bits: UInt32s, scales: UInt16s, packed: Bytes, first: int, last: int
) -> None:
    n = np.uint64(values.size)
    for block in range(np.uint64(first), np.uint64(last)):
        start = block * np.uint64(BLOCK)
        stop = min(start + np.uint64(BLOCK), n)
        largest = np.uint32(0)  # as bits magnitudes are in order, NaN above all
        for i in range(start, stop):
            largest = max(largest, bits[i] & np.uint32(0x7FFFFFFF))
        half, inverse = np.uint16(0), np.float32(0.0)
        if largest >= _LARGEST:
            half = _NAN16
        elif largest > np.uint32(0):
            scale = max(np.float32(np.uint32(largest).view(np.float32) / np.float32(127.0)), _SMALLEST)
            # Rounded up: what is cut off here would be multiplied by 127.
            half = np.uint16((np.float32(scale).view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16))
            inverse = np.float32(1.0) / np.uint32(np.uint32(half) << np.uint32(16)).view(np.float32)
        scales[block] = half
        for i in range(start, stop):
            packed[i] = np.uint8(np.float32(values[i] * inverse + _MAGIC).view(np.uint32) & np.uint32(255))


@kernel(U16_IN, U8_IN, F32_OUT, RANGE)
def _decode_int8(scales: UInt16s, packed: Bytes, out: Float32s, first: int, last: int) -> None:
    n = np.uint64(out.size)
    for block in range(np.uint64(first), np.uint64(last)):
        start = block * np.uint64(BLOCK)
        stop = min(start + np.uint64(BLOCK), n)
        scale = np.uint32(np.uint32(scales[block]) << np.uint32(16)).view(np.float32)
        for i in range(start, stop):
            out[i] = np.float32(np.int32(np.int8(packed[i]))) * scale


@kernel(F32_IN, U32_IN, U16_OUT, U8_OUT, RANGE)
def _encode_int4(
    values: Float32s, bits: UInt32s, scales: UInt16s, packed: Bytes, first: int, last: int
) -> None:
    n = np.uint64(values.size)
    for block in range(np.uint64(first), np.uint64(last)):
        start = block * np.uint64(BLOCK)
        stop = min(start + np.uint64(BLOCK), n)
        largest = np.uint32(0)
        for i in range(start, stop):
            largest = max(largest, bits[i] & np.uint32(0x7FFFFFFF))
        half, inverse = np.uint16(0), np.float32(0.0)
        if largest >= _LARGEST:
            half = _NAN16
        elif largest > np.uint32(0):
            scale = max(np.float32(np.uint32(largest).view(np.float32) / np.float32(7.0)), _SMALLEST)
            # Cut: the largest value is then at most 7.06 steps, and all others finer.
            half = np.uint16(np.float32(scale).view(np.uint32) >> np.uint32(16))
            inverse = np.float32(1.0) / np.uint32(np.uint32(half) << np.uint32(16)).view(np.float32)
        scales[block] = half
        width = (stop - start + np.uint64(1)) // np.uint64(2)
        target = start // np.uint64(2)
        pairs = stop - start - width
        for j in range(pairs):
            low = np.float32(values[start + j] * inverse + _MAGIC).view(np.uint32)
            high = np.float32(values[start + width + j] * inverse + _MAGIC).view(np.uint32)
            packed[target + j] = np.uint8((low & np.uint32(15)) | ((high & np.uint32(15)) << np.uint32(4)))
        for j in range(pairs, width):
            low = np.float32(values[start + j] * inverse + _MAGIC).view(np.uint32)
            packed[target + j] = np.uint8(low & np.uint32(15))


@kernel(U16_IN, U8_IN, F32_OUT, RANGE)
def _decode_int4(scales: UInt16s, packed: Bytes, out: Float32s, first: int, last: int) -> None:
    n = np.uint64(out.size)
    for block in range(np.uint64(first), np.uint64(last)):
        start = block * np.uint64(BLOCK)
        stop = min(start + np.uint64(BLOCK), n)
        scale = np.uint32(np.uint32(scales[block]) << np.uint32(16)).view(np.float32)
        width = (stop - start + np.uint64(1)) // np.uint64(2)
        source = start // np.uint64(2)
        for j in range(width):
            byte = np.int32(packed[source + j])
            out[start + j] = np.float32(((byte & np.int32(15)) ^ np.int32(8)) - np.int32(8)) * scale
        for j in range(stop - start - width):
            byte = np.int32(packed[source + j])
            out[start + width + j] = np.float32(((byte >> np.int32(4)) ^ np.int32(8)) - np.int32(8)) * scale


@kernel(F32_IN, U32_IN, U16_OUT, U8_OUT, RANGE)
def _encode_int2(
    values: Float32s, bits: UInt32s, scales: UInt16s, packed: Bytes, first: int, last: int
) -> None:
    n = np.uint64(values.size)
    partial = np.empty(32, np.float64)
    for block in range(np.uint64(first), np.uint64(last)):
        start = block * np.uint64(BLOCK)
        stop = min(start + np.uint64(BLOCK), n)
        size = stop - start
        rows = size // np.uint64(32) * np.uint64(32)
        for lane in range(np.uint64(32)):
            partial[lane] = 0.0
        for i in range(np.uint64(0), rows, np.uint64(32)):
            for lane in range(np.uint64(32)):
                value = np.float64(values[start + i + lane])
                partial[lane] += value * value
        for i in range(rows, size):
            value = np.float64(values[start + i])
            partial[i - rows] += value * value
        total = 0.0
        for lane in range(np.uint64(8)):
            total += (partial[lane] + partial[lane + np.uint64(8)]) + (
                partial[lane + np.uint64(16)] + partial[lane + np.uint64(24)]
            )
        root = np.uint32(np.float32(np.sqrt(total / np.float64(size))).view(np.uint32))
        half = np.uint16(
            (root + np.uint32(0x7FFF) + ((root >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        )
        if root >= _LARGEST:
            half = _NAN16
        scales[block] = half
        edge = np.float32(np.uint32(np.uint32(half) << np.uint32(16)).view(np.float32) * _THRESHOLD).view(
            np.uint32
        )
        width = (size + np.uint64(3)) // np.uint64(4)
        target = start // np.uint64(4)
        # Sign and outer level straight from the bits; as bits magnitudes are in order.
        quads = size - np.uint64(3) * width if size > np.uint64(3) * width else np.uint64(0)
        for j in range(quads):
            a = bits[start + j]
            b = bits[start + j + width]
            c = bits[start + j + np.uint64(2) * width]
            d = bits[start + j + np.uint64(3) * width]
            code = np.uint32((a & np.uint32(0x7FFFFFFF)) > edge) | ((a >> np.uint32(31)) << np.uint32(1))
            code |= np.uint32((b & np.uint32(0x7FFFFFFF)) > edge) << np.uint32(2)
            code |= (b >> np.uint32(31)) << np.uint32(3)
            code |= np.uint32((c & np.uint32(0x7FFFFFFF)) > edge) << np.uint32(4)
            code |= (c >> np.uint32(31)) << np.uint32(5)
            code |= np.uint32((d & np.uint32(0x7FFFFFFF)) > edge) << np.uint32(6)
            code |= (d >> np.uint32(31)) << np.uint32(7)
            packed[target + j] = np.uint8(code)
        for j in range(quads, width):
            code = np.uint32(0)
            for k in range(np.uint64(4)):
                if j + k * width < size:
                    a = bits[start + j + k * width]
                    pair = np.uint32((a & np.uint32(0x7FFFFFFF)) > edge) | (
                        (a >> np.uint32(31)) << np.uint32(1)
                    )
                    code |= np.uint32(pair << np.uint32(np.uint32(2) * np.uint32(k)))
            packed[target + j] = np.uint8(code)


@kernel(U16_IN, U8_IN, F32_OUT, RANGE)
def _decode_int2(scales: UInt16s, packed: Bytes, out: Float32s, first: int, last: int) -> None:
    n = np.uint64(out.size)
    for block in range(np.uint64(first), np.uint64(last)):
        start = block * np.uint64(BLOCK)
        stop = min(start + np.uint64(BLOCK), n)
        scale = np.uint32(np.uint32(scales[block]) << np.uint32(16)).view(np.float32)
        inner, outer = np.float32(scale * _INNER), np.float32(scale * _OUTER)
        width = (stop - start + np.uint64(3)) // np.uint64(4)
        source = start // np.uint64(4)
        for k in range(np.uint64(4)):
            shift = np.uint32(2) * np.uint32(k)
            begin = min(start + k * width, stop)
            for j in range(min(width, stop - begin)):
                code = np.uint32(packed[source + j]) >> shift
                value = outer if code & np.uint32(1) else inner
                out[begin + j] = -value if code & np.uint32(2) else value


_ENCODERS = {"int8": _encode_int8, "int4": _encode_int4, "int2": _encode_int2}
_DECODERS = {"int8": _decode_int8, "int4": _decode_int4, "int2": _decode_int2}
