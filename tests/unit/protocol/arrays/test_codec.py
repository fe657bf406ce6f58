"""Encodings against plain numpy and torch, and what must hold of them as properties."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diloco_protocol.arrays import codec, kernels
from diloco_protocol.spec.sync import CompressionSpec
from example_counts import share_of

BLOCKED = ("int8", "int4", "int2")
SIZES = (0, 1, 2, 3, 5, 31, 127, 128, 129, 130, 131, 255, 257, 1000, 4096, 4099)


def normal(n: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


def blocks(values: np.ndarray) -> list[np.ndarray]:
    return [values[i : i + 128] for i in range(0, values.size, 128)]


def scales_of(encoded: np.ndarray, n: int) -> np.ndarray:
    """The bfloat16 scales at the front of a block encoding."""
    count = -(-n // 128)
    return (encoded[: 2 * count].view("<u2").astype(np.uint32) << 16).view(np.float32)


def spread(values: np.ndarray, encoding: str) -> np.ndarray:
    """Bytes of one block of small numbers, by the definition in codec.py."""
    per_byte = {"int8": 1, "int4": 2, "int2": 4}[encoding]
    width, bits = -(-len(values) // per_byte), 8 // per_byte
    out = [0] * width
    for i, value in enumerate(values):
        out[i % width] |= (int(value) & ((1 << bits) - 1)) << (bits * (i // width))
    return np.array(out, np.uint8)


def plain_encode(values: np.ndarray, encoding: str) -> np.ndarray:
    """The format of codec.py in slow steps, for finite values."""
    scales, packed = [], []
    for block in blocks(values):
        if encoding == "int2":
            exact = np.float32(np.sqrt(np.mean(block.astype(np.float64) ** 2)))
            scale = torch.tensor(exact).to(torch.bfloat16).float().numpy()
            outer = np.abs(block) > scale * np.float32(0.9816)
            numbers = outer * 1 + np.signbit(block) * 2
        else:
            most = {"int8": 127, "int4": 7}[encoding]
            exact = np.float32(np.abs(block).max() / np.float32(most))
            bits = int(exact.view(np.uint32))
            bits = (bits + 0xFFFF if encoding == "int8" else bits) >> 16 << 16
            scale = np.uint32(bits).view(np.float32)
            inverse = np.float32(1) / scale if scale else np.float32(0)
            numbers = np.rint(block * inverse).astype(int)
        scales.append(scale)
        packed.append(spread(numbers, encoding))
    halves = (np.array(scales, np.float32).view(np.uint32) >> 16).astype("<u2")
    return np.concatenate([halves.view(np.uint8), *packed]) if packed else np.zeros(0, np.uint8)


@pytest.mark.parametrize("encoding", BLOCKED)
@pytest.mark.parametrize("n", SIZES)
def test_bytes_are_those_of_the_written_format(encoding: str, n: int) -> None:
    values = normal(n, seed=n)
    encoded = codec.encode(values, encoding)
    assert encoded.dtype == np.uint8 and encoded.size == codec.encoded_bytes(encoding, n)
    np.testing.assert_array_equal(encoded, plain_encode(values, encoding))


@pytest.mark.parametrize("n", SIZES)
def test_sizes_are_exact(n: int) -> None:
    b = -(-n // 128)
    sizes = {"float32": 4 * n, "bfloat16": 2 * n, "int8": n + 2 * b, "int4": -(-n // 2) + 2 * b}
    sizes["int2"] = -(-n // 4) + 2 * b
    for encoding, size in sizes.items():
        assert codec.encoded_bytes(encoding, n) == size == codec.encode(normal(n), encoding).size
        assert codec.decode(codec.encode(normal(n), encoding), encoding, n).shape == (n,)


vectors = hnp.arrays(
    np.float32, st.integers(0, 400), elements=st.floats(-(2.0**125), 2.0**125, width=32, allow_subnormal=True)
)


@settings(max_examples=share_of(150), deadline=None)
@given(vectors, st.sampled_from(["int8", "int4"]))
def test_decoded_values_are_within_half_a_step(values: np.ndarray, encoding: str) -> None:
    encoded = codec.encode(values, encoding)
    decoded = codec.decode(encoded, encoding, values.size)
    steps = np.repeat(scales_of(encoded, values.size), 128)[: values.size].astype(np.float64)
    error = np.abs(decoded.astype(np.float64) - values)
    assert (error <= steps * (0.5 + 1e-4)).all()
    most = {"int8": 127, "int4": 7}[encoding]
    for block, step in zip(blocks(values), steps[::128], strict=True):
        # A step is no coarser than the block's largest value asks for.
        assert step <= max(np.abs(block).max() / most * (1 + 2**-7), 2.0**-126)


@settings(max_examples=share_of(60), deadline=None)
@given(vectors)
def test_bfloat16_rounds_as_torch_does(values: np.ndarray) -> None:
    encoded = codec.encode(values, "bfloat16")
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    np.testing.assert_array_equal(encoded.view(np.int16), expected)
    np.testing.assert_array_equal(
        codec.decode(encoded, "bfloat16", values.size), torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    )


def test_bfloat16_ties_and_specials() -> None:
    bits = np.array(
        [0x3F808000, 0x3F818000, 0x3F80FFFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 1, 0x80000000],
        np.uint32,
    )
    expected = [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0, 0x8000]
    assert codec.encode(bits.view(np.float32), "bfloat16").view(np.uint16).tolist() == expected


@settings(max_examples=share_of(40), deadline=None)
@given(vectors)
def test_float32_is_the_bytes_themselves(values: np.ndarray) -> None:
    encoded = codec.encode(values, "float32")
    assert encoded.tobytes() == values.astype("<f4").tobytes()
    np.testing.assert_array_equal(codec.decode(encoded, "float32", values.size), values)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e20])
@pytest.mark.parametrize(("encoding", "bound"), [("int2", 0.36), ("int4", 0.13), ("int8", 0.008)])
def test_error_on_gaussian_blocks(encoding: str, bound: float, scale: float) -> None:
    for seed in range(20):
        values = normal(128 * 64, seed, scale)
        decoded = codec.decode(codec.encode(values, encoding), encoding, values.size)
        error = np.linalg.norm((decoded - values).astype(np.float64)) / np.linalg.norm(values.astype(np.float64))
        assert error <= bound


def test_a_job_may_name_every_encoding_and_no_other() -> None:
    allowed = CompressionSpec.model_fields["up"].annotation
    assert get_args(allowed) == codec.ENCODINGS


@pytest.mark.parametrize("encoding", codec.ENCODINGS)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 63, 64, 127, 128, 300])
def test_what_is_not_finite_stays_so(encoding: str, bad: float, place: int) -> None:
    values = normal(301)
    values[place] = bad
    decoded = codec.decode(codec.encode(values, encoding), encoding, values.size)
    assert not codec.norm_and_finite(decoded)[1]
    assert not np.isfinite(decoded[place])
    other = np.delete(np.arange(301), np.arange(place // 128 * 128, min(301, place // 128 * 128 + 128)))
    assert np.isfinite(decoded[other]).all()


@pytest.mark.parametrize("encoding", BLOCKED)
@pytest.mark.parametrize("half", [0x7F80, 0xFF80, 0x7FC0])
def test_a_scale_that_is_not_finite_is_seen_though_all_values_under_it_are_zero(encoding: str, half: int) -> None:
    encoded = np.zeros(codec.encoded_bytes(encoding, 256), np.uint8)
    encoded[2:4].view(np.uint16)[0] = half
    assert not codec.norm_and_finite(codec.decode(encoded, encoding, 256))[1]


@pytest.mark.parametrize("encoding", BLOCKED)
def test_zeros_and_single_spikes(encoding: str) -> None:
    assert not codec.decode(codec.encode(np.zeros(300, np.float32), encoding), encoding, 300).any()
    spike = np.zeros(300, np.float32)
    spike[200] = -3.0
    decoded = codec.decode(codec.encode(spike, encoding), encoding, 300)
    assert not decoded[:128].any() and not decoded[256:].any() and decoded[200] < 0
    if encoding != "int2":
        assert np.count_nonzero(decoded) == 1 and decoded[200] == pytest.approx(-3.0, rel=0.01)


@settings(max_examples=share_of(60), deadline=None)
@given(st.binary(max_size=600), st.integers(0, 600), st.sampled_from(codec.ENCODINGS))
def test_any_bytes_decode_or_are_refused_by_size(data: bytes, n: int, encoding: str) -> None:
    if len(data) == codec.encoded_bytes(encoding, n):
        assert codec.decode(data, encoding, n).shape == (n,)
    else:
        with pytest.raises(codec.CodecError, match=f"{len(data)} bytes"):
            codec.decode(data, encoding, n)


@pytest.mark.parametrize("encoding", codec.ENCODINGS)
def test_any_kind_of_buffer_at_any_address(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = kernels.run

    def run_on_aligned(kernel: kernels.Kernel, size: int, threads: int, *arguments: Any, **more: Any) -> None:
        """Compiled code takes it for granted, and most processors forgive it."""
        assert all(array.flags.aligned for array in arguments if isinstance(array, np.ndarray))
        run(kernel, size, threads, *arguments, **more)

    monkeypatch.setattr(kernels, "run", run_on_aligned)
    values = normal(1000)
    encoded = codec.encode(values, encoding)
    expected = codec.decode(encoded, encoding, 1000)
    data = encoded.tobytes()
    odd = memoryview(b"x" + data)[1:]
    for buffer in (data, bytearray(data), memoryview(data), odd, np.frombuffer(odd, np.uint8)):
        np.testing.assert_array_equal(codec.decode(buffer, encoding, 1000), expected)
    target = np.zeros(encoded.size, np.uint8)
    assert codec.encode(values, encoding, target) is target
    np.testing.assert_array_equal(target, encoded)
    values.setflags(write=False)
    np.testing.assert_array_equal(codec.encode(values, encoding), encoded)
    out = np.empty(1000, np.float32)
    assert codec.decode(data, encoding, 1000, out) is out


def test_wrong_arguments_are_named() -> None:
    values = normal(10)
    with pytest.raises(codec.CodecError, match="'int3' is not one of float32"):
        codec.encode(values, "int3")
    with pytest.raises(codec.CodecError, match="values: float64"):
        codec.encode(values.astype(np.float64), "int8")
    with pytest.raises(codec.CodecError, match="values: not contiguous"):
        codec.encode(normal(20)[::2], "int8")
    with pytest.raises(codec.CodecError, match="out: 9 elements, and 12 are needed"):
        codec.encode(values, "int8", np.empty(9, np.uint8))
    with pytest.raises(codec.CodecError, match="out: 9 elements"):
        codec.decode(codec.encode(values, "int8"), "int8", 10, np.empty(9, np.float32))
    with pytest.raises(codec.CodecError, match="residual: 9 elements"):
        codec.encode_with_feedback(values, values[:9], "int8")
    with pytest.raises(codec.CodecError, match="-1 elements"):
        codec.encoded_bytes("int8", -1)


@settings(max_examples=share_of(40), deadline=None)
@given(
    st.sampled_from(["bfloat16", *BLOCKED]),
    st.lists(st.booleans(), min_size=1, max_size=12),
    st.integers(1, 400),
    st.integers(0, 2**32 - 1),
)
def test_error_feedback_loses_nothing(encoding: str, merged: list[bool], n: int, seed: int) -> None:
    """Sum of decoded and residual is the sum of Δ. A refused push is not counted: its work is
    in the next Δ, and the residual stays."""
    source = np.random.default_rng(seed)
    residual = np.zeros(n, np.float32)
    told, sent, waiting = np.zeros(n), np.zeros(n), np.zeros(n, np.float32)
    for accepted in merged:
        waiting = waiting + source.standard_normal(n).astype(np.float32) * np.float32(1e-2)
        before = residual.copy()
        encoded, dropped = codec.encode_with_feedback(waiting, residual, encoding)
        np.testing.assert_array_equal(residual, before)
        if accepted:
            sent += codec.decode(encoded, encoding, n)
            told += waiting
            residual, waiting = dropped, np.zeros(n, np.float32)
    np.testing.assert_allclose(sent + residual, told, rtol=0, atol=1e-6)


def test_feedback_makes_up_for_a_coarse_encoding() -> None:
    delta = normal(4096, 1)
    total, residual = np.zeros(4096), None
    for _ in range(50):
        encoded, residual = codec.encode_with_feedback(delta, residual, "int2")
        total += codec.decode(encoded, "int2", 4096)
    without = codec.decode(codec.encode(delta, "int2"), "int2", 4096)
    assert np.linalg.norm(total / 50 - delta) < 0.1 * np.linalg.norm(without - delta)


@pytest.mark.parametrize("encoding", codec.ENCODINGS)
@pytest.mark.parametrize("n", [1, 130, 32768, 32769, 100_003])
def test_apply_delta_is_base_plus_decoded_bit_for_bit(encoding: str, n: int) -> None:
    base = normal(n, 5)
    encoded = codec.encode(normal(n, 6, 1e-2), encoding)
    expected = base + codec.decode(encoded, encoding, n)  # numpy rounds product and sum apart
    out = codec.apply_delta(base, encoded.tobytes(), encoding)
    assert out.tobytes() == expected.tobytes()
    with pytest.raises(codec.CodecError, match="bytes"):
        codec.apply_delta(base, encoded[:-1], encoding)


@pytest.mark.parametrize("encoding", codec.ENCODINGS)
def test_a_range_decodes_to_the_bits_that_the_whole_has_there(encoding: str) -> None:
    n = 128 * 5 + 77
    encoded = codec.encode(normal(n), encoding)
    whole = codec.decode(encoded, encoding, n)
    values = codec.EncodedValues(encoded.tobytes(), encoding, n)
    scratch = np.empty(codec.scratch_size(n), np.float32)
    for start, stop in ((0, n), (0, 128), (256, 512), (384, n), (640, n), (128, 128), (1, 128), (100, 300), (5, n)):
        assert values.decode(start, stop, scratch[: codec.scratch_size(stop - start)]).tobytes() == (
            whole[start:stop].tobytes()
        )
    for wrong in (encoded[:-1], np.append(encoded, np.uint8(0))):
        with pytest.raises(codec.CodecError, match="bytes"):
            codec.EncodedValues(wrong, encoding, n)


def test_apply_delta_of_nothing() -> None:
    empty = np.zeros(0, np.float32)
    for encoding in codec.ENCODINGS:
        assert codec.apply_delta(empty, b"", encoding).size == 0


@pytest.mark.parametrize("encoding", codec.ENCODINGS)
def test_any_number_of_threads_gives_the_same_bits(encoding: str) -> None:
    values = normal(300_007, 7)
    encoded = codec.encode(values, encoding)
    decoded = codec.decode(encoded, encoding, values.size)
    for threads in (2, 3, 7):
        assert codec.encode(values, encoding, threads=threads).tobytes() == encoded.tobytes()
        again = codec.decode(encoded, encoding, values.size, threads=threads)
        assert again.tobytes() == decoded.tobytes()
        assert codec.norm_and_finite(values, threads=threads) == codec.norm_and_finite(values)


@settings(max_examples=share_of(60), deadline=None)
@given(hnp.arrays(np.float32, st.integers(0, 9000), elements=st.floats(width=32, allow_nan=True)))
def test_norm_and_finite(values: np.ndarray) -> None:
    norm, finite = codec.norm_and_finite(values)
    assert finite == bool(np.isfinite(values).all())
    if finite:
        assert norm == pytest.approx(np.linalg.norm(values.astype(np.float64)), rel=1e-12)
    else:
        assert not np.isfinite(norm)


def test_norm_of_the_largest_numbers_does_not_overflow() -> None:
    assert codec.norm_and_finite(np.full(10_000, np.finfo(np.float32).max)) == (
        pytest.approx(float(np.finfo(np.float32).max) * 100),
        True,
    )


def test_many_threads_at_once_and_forked_children() -> None:
    values = normal(200_000, 9)
    expected = codec.encode(values, "int4").tobytes()

    def work(_: int) -> bool:
        encoded = codec.encode(values, "int4", threads=3)
        return encoded.tobytes() == expected and codec.norm_and_finite(values, threads=2)[1]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(16)))
    child = os.fork()  # the parent's kernel threads are not in the child
    if child == 0:
        os._exit(0 if work(0) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_kernel_without_a_place_for_a_cache_is_compiled_in_memory(caplog) -> None:  # type: ignore[no-untyped-def]
    # Code without a file has no cache folder, as in an image that is read-only.
    namespace: dict[str, object] = {}
    exec("def double(x):\n    return x + x\n", namespace)
    with caplog.at_level("INFO"):
        compiled = kernels._compile(namespace["double"], "float64(float64)")  # type: ignore[arg-type]
    assert compiled(2.0) == 4.0 and "compiled without a cache" in caplog.text


@pytest.mark.slow
def test_a_broken_cache_is_passed_by(tmp_path) -> None:  # type: ignore[no-untyped-def]
    program = (
        "import numpy as np\nfrom diloco_protocol.arrays import codec\n"
        "assert codec.norm_and_finite(np.ones(4, np.float32)) == (2.0, True)\n"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}

    def run() -> None:
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr.decode()

    run()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    for path in files:
        path.write_bytes(b"garbage")
    run()


def test_importing_the_codec_loads_no_compiler() -> None:
    program = "import sys, diloco_protocol.arrays.codec; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_kernels_never_fuse_product_and_sum() -> None:
    """A fused rounding would make machines differ. 1 + 2^-12 squared has a last bit that only
    a fused operation keeps when 1 is taken away."""
    x = np.float32(1 + 2**-12)
    values = np.full(128, x, np.float32)
    namespace: dict[str, object] = {"np": np}
    source = "def f(x, y, out):\n    for i in range(x.size):\n        out[i] = x[i] * x[i] + y[i]\n"
    exec(source, namespace)
    signature = f"void({kernels.F32_IN}, {kernels.F32_IN}, {kernels.F32_OUT})"
    compiled = kernels._compile(namespace["f"], signature)  # type: ignore[arg-type]
    out = np.empty(128, np.float32)
    compiled(values, np.full(128, -1, np.float32), out)
    np.testing.assert_array_equal(out, x * x - np.float32(1))
    assert float(out[0]) != float(np.float64(x) * np.float64(x) - 1)


def test_an_error_in_one_thread_is_raised_after_all_have_ended() -> None:
    ended = []

    def work(first: int, last: int) -> None:
        if first == 0:
            raise RuntimeError("broken")
        ended.append(first)

    with pytest.raises(RuntimeError, match="broken"):
        kernels.share(work, 8, 1, 4)
    assert {1, 2, 3, 5, 6, 7} <= set(ended)
