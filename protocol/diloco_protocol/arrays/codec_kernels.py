"""The codec's compiled loops, one pair per encoding; codec.py says what they write.

Indices are uint64, because a signed index may mean "from the end", and the test for that keeps a loop from being
vectorised. Within a block, values that share a byte lie a quarter or half a block apart, so that each loop reads and
writes runs of neighbours. Only the bytes at the end of a last, short block that have fewer values take another loop.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from diloco_protocol.arrays.kernels import (
    F32_IN,
    F32_OUT,
    RANGE,
    U8_IN,
    U8_OUT,
    U16_IN,
    U16_OUT,
    U32_IN,
    U32_OUT,
    Bytes,
    Float32s,
    kernel,
)

UInt16s = NDArray[np.uint16]
UInt32s = NDArray[np.uint32]

BLOCK = 128  # values under one scale

_INNER, _OUTER, _THRESHOLD = np.float32(0.4528), np.float32(1.510), np.float32(0.9816)

# Adding and dropping 1.5·2^23 rounds a float32 of magnitude below 2^22 to the nearest
# whole number, ties to even, and leaves that number in the low bits.
_MAGIC = np.float32(12582912.0)
_LARGEST = np.uint32(0x7E800000)  # 2^126: from here on a scale's multiples could overflow
_NAN16 = np.uint16(0x7FC0)
_SMALLEST = np.float32(2.0**-126)  # the smallest scale whose inverse is finite


@kernel(U32_IN, U16_OUT, RANGE)
def encode_bfloat16(bits: UInt32s, halves: UInt16s, first: int, last: int) -> None:
    for i in range(np.uint64(first), np.uint64(last)):
        b = bits[i]
        rounded = (b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        quiet = (b >> np.uint32(16)) | np.uint32(0x40)  # rounding could turn a NaN into something else
        nan = (b & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        halves[i] = np.uint16(quiet if nan else rounded)


@kernel(U16_IN, U32_OUT, RANGE)
def decode_bfloat16(halves: UInt16s, bits: UInt32s, first: int, last: int) -> None:
    for i in range(np.uint64(first), np.uint64(last)):
        bits[i] = np.uint32(np.uint32(halves[i]) << np.uint32(16))


@kernel(F32_IN, U32_IN, U16_OUT, U8_OUT, RANGE)
def encode_int8(values: Float32s, bits: UInt32s, scales: UInt16s, packed: Bytes, first: int, last: int) -> None:
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
def decode_int8(scales: UInt16s, packed: Bytes, out: Float32s, first: int, last: int) -> None:
    n = np.uint64(out.size)
    for block in range(np.uint64(first), np.uint64(last)):
        start = block * np.uint64(BLOCK)
        stop = min(start + np.uint64(BLOCK), n)
        scale = np.uint32(np.uint32(scales[block]) << np.uint32(16)).view(np.float32)
        for i in range(start, stop):
            out[i] = np.float32(np.int32(np.int8(packed[i]))) * scale


@kernel(F32_IN, U32_IN, U16_OUT, U8_OUT, RANGE)
def encode_int4(values: Float32s, bits: UInt32s, scales: UInt16s, packed: Bytes, first: int, last: int) -> None:
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
def decode_int4(scales: UInt16s, packed: Bytes, out: Float32s, first: int, last: int) -> None:
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
def encode_int2(values: Float32s, bits: UInt32s, scales: UInt16s, packed: Bytes, first: int, last: int) -> None:
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
        half = np.uint16((root + np.uint32(0x7FFF) + ((root >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
        if root >= _LARGEST:
            half = _NAN16
        scales[block] = half
        edge = np.float32(np.uint32(np.uint32(half) << np.uint32(16)).view(np.float32) * _THRESHOLD).view(np.uint32)
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
                    pair = np.uint32((a & np.uint32(0x7FFFFFFF)) > edge) | ((a >> np.uint32(31)) << np.uint32(1))
                    code |= np.uint32(pair << np.uint32(np.uint32(2) * np.uint32(k)))
            packed[target + j] = np.uint8(code)


@kernel(U16_IN, U8_IN, F32_OUT, RANGE)
def decode_int2(scales: UInt16s, packed: Bytes, out: Float32s, first: int, last: int) -> None:
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


ENCODERS = {"int8": encode_int8, "int4": encode_int4, "int2": encode_int2}
DECODERS = {"int8": decode_int8, "int4": decode_int4, "int2": decode_int2}
