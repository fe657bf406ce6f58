"""The merge against float64 numpy, and what must hold of it whatever the pushes are."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_protocol.arrays import codec
from diloco_protocol.arrays.layout import Piece
from diloco_syncer.core.books.shares import normalised_weights
from diloco_syncer.numerics import merge as numerics
from diloco_syncer.numerics.merge import MergeResult, piece_squares
from example_counts import share_of


def pieces_of(sizes: list[int], mean: tuple[int, ...] = ()) -> list[Piece]:
    pieces, offset = [], 0
    for i, size in enumerate(sizes):
        pieces.append(Piece(f"tensor{i}", 0, size, offset, mean=i in mean))
        offset += size
    return pieces


def merge(
    pieces: list[Piece], deltas: list[np.ndarray], shares: list[float], method: str, threads: int = 1
) -> MergeResult:
    squares = [piece_squares(pieces, delta) for delta in deltas]
    return numerics.merge(pieces, deltas, shares, method, squares=squares, threads=threads)


def pushes(count: int, elements: int, seed: int = 0, scales: bool = True) -> list[np.ndarray]:
    source = np.random.default_rng(seed)
    return [
        (source.standard_normal(elements) * (source.uniform(0.1, 3) if scales else 1)).astype(np.float32)
        for _ in range(count)
    ]


def oracle(pieces: list[Piece], deltas: list[np.ndarray], shares: list[float], method: str) -> np.ndarray:
    """Algorithm section 5 in float64."""
    out = np.zeros(deltas[0].size)
    for piece in pieces:
        span = slice(piece.offset, piece.offset + piece.elements)
        parts = [d[span].astype(np.float64) for d in deltas]
        mean = sum(w * x for w, x in zip(shares, parts, strict=True))
        norms = [np.linalg.norm(x) for x in parts]
        radius = sum(w * n for w, n in zip(shares, norms, strict=True))
        direction = sum(w * (x / n if n else x) for w, x, n in zip(shares, parts, norms, strict=True))
        if method == "mean" or piece.mean or np.linalg.norm(direction) < 1e-3:
            out[span] = mean
        else:
            out[span] = radius * direction / np.linalg.norm(direction)
    return out


@settings(max_examples=share_of(120), deadline=None)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=6),
    st.integers(1, 19),
    st.sampled_from(["rda", "mean"]),
    st.integers(0, 2**32 - 1),
    st.integers(1, 3),
)
def test_merge_is_the_algorithm_of_section_5(
    sizes: list[int], count: int, method: str, seed: int, threads: int
) -> None:
    pieces = pieces_of(sizes, mean=(1,))
    deltas = pushes(count, sum(sizes), seed)
    source = np.random.default_rng(seed)
    raw = source.uniform(0, 1, count) * (source.uniform(0, 1, count) > 0.2)
    if not raw.any():
        raw[0] = 1
    shares = [float(w) for w in raw / raw.sum()]
    deltas[-1][: sizes[0]] = 0  # a zero Δ in one piece
    result = merge(pieces, deltas, shares, method, threads=threads)
    expected = oracle(pieces, deltas, shares, method)
    scale = max(float(np.abs(d).max()) for d in deltas)
    np.testing.assert_allclose(result.delta, expected, rtol=1e-5, atol=2e-6 * scale)
    assert result.norm == pytest.approx(np.linalg.norm(expected), rel=1e-5, abs=1e-12)
    for norm, delta in zip(result.norms, deltas, strict=True):
        assert norm == pytest.approx(np.linalg.norm(delta.astype(np.float64)), rel=1e-12)
    squares = [piece_squares(pieces, delta, threads=threads) for delta in deltas]
    again = numerics.merge(pieces, deltas, shares, method, squares=squares)
    assert again.delta.tobytes() == result.delta.tobytes()
    assert (again.norms, again.norm) == (result.norms, result.norm)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 16, 32])
def test_the_merged_norm_does_not_shrink_with_the_learners(count: int) -> None:
    elements = 20_000
    deltas = [d / np.linalg.norm(d) for d in pushes(count, elements, count)]
    deltas = [np.float32(1.7) * d.astype(np.float32) for d in deltas]
    radial = merge(pieces_of([elements]), deltas, [1 / count] * count, "rda")
    assert np.linalg.norm(radial.delta) == pytest.approx(1.7, rel=1e-5)
    assert radial.norm == pytest.approx(1.7, rel=1e-6)
    mean = merge(pieces_of([elements]), deltas, [1 / count] * count, "mean")
    assert np.linalg.norm(mean.delta) == pytest.approx(1.7 / math.sqrt(count), rel=0.05)


@pytest.mark.parametrize("method", ["rda", "mean"])
@pytest.mark.parametrize("others", [0, 2])
def test_one_responder_is_passed_on_bit_for_bit(method: str, others: int) -> None:
    pieces = pieces_of([100, 1, 5000, 33], mean=(0,))
    deltas = pushes(1 + others, 5134, 3)
    deltas[0][:5] = [0.0, -0.0, 1e-45, 3e38, -1e-38]
    result = merge(pieces, deltas, [1.0] + [0.0] * others, method)
    assert result.delta.tobytes() == deltas[0].tobytes()
    assert result.delta is not deltas[0] and len(result.norms) == 1 + others


def test_equal_pushes_come_back() -> None:
    (delta,) = pushes(1, 10_000, 4)
    result = merge(pieces_of([4000, 6000]), [delta] * 5, [0.1, 0.2, 0.3, 0.15, 0.25], "rda")
    np.testing.assert_allclose(result.delta, delta, rtol=1e-6)


def test_a_zero_push_counts_in_the_radius_only() -> None:
    (delta,) = pushes(1, 1000, 5)
    result = merge(pieces_of([1000]), [delta, np.zeros_like(delta)], [0.25, 0.75], "rda")
    np.testing.assert_allclose(result.delta, 0.25 * delta, rtol=1e-6)
    assert not merge(pieces_of([1000]), [0 * delta, 0 * delta], [0.5, 0.5], "rda").delta.any()


def test_directions_that_cancel_are_merged_by_mean_per_piece() -> None:
    (delta,) = pushes(1, 2000, 6)
    other = np.concatenate([-3 * delta[:1000], delta[1000:]])
    result = merge(pieces_of([1000, 1000]), [delta, other], [0.5, 0.5], "rda")
    np.testing.assert_allclose(result.delta[:1000], -delta[:1000], rtol=1e-5)  # the mean, not noise
    np.testing.assert_allclose(result.delta[1000:], delta[1000:], rtol=1e-6)


def test_just_above_the_threshold_is_radial() -> None:
    x, y = np.eye(2, dtype=np.float32)
    for angle, cancels in ((0.9e-3, True), (1.1e-3, False)):
        other = (-math.cos(2 * angle) * x + math.sin(2 * angle) * y).astype(np.float32)
        result = merge(pieces_of([2]), [x, other], [0.5, 0.5], "rda")
        assert np.linalg.norm(result.delta) == pytest.approx(1e-3 * 0.9 if cancels else 1.0, rel=0.01)


@pytest.mark.parametrize("scale", [1e-37, 1e-20, 1e20, 1e34])
def test_very_small_and_very_large_pushes(scale: float) -> None:
    deltas = [(d * scale).astype(np.float32) for d in pushes(3, 3000, 7)]
    shares = [0.2, 0.3, 0.5]
    expected = oracle(pieces_of([3000]), deltas, shares, "rda")
    result = merge(pieces_of([3000]), deltas, shares, "rda")
    np.testing.assert_allclose(result.delta, expected, rtol=1e-4, atol=float(np.abs(expected).max()) * 1e-5)


def test_a_push_beyond_float32_smaller_than_another_does_no_harm() -> None:
    large, small = pushes(2, 500, 8)
    tiny = (small * 1e-42).astype(np.float32)
    result = merge(pieces_of([500]), [large * 1e3, tiny], [0.5, 0.5], "rda")
    assert np.isfinite(result.delta).all()
    assert np.linalg.norm(result.delta) == pytest.approx(np.linalg.norm(large) * 500, rel=1e-5)


def test_any_number_of_threads_gives_the_same_bits() -> None:
    # Pieces that threads share, and small ones that go to one thread each.
    sizes = [1_200_007, 5, 70_001, 1_048_576, 130_000]
    deltas = pushes(3, sum(sizes), 9)
    results = [merge(pieces_of(sizes, (3,)), deltas, [0.2, 0.3, 0.5], "rda", threads=n) for n in (1, 2, 5)]
    for other in results[1:]:
        assert other.delta.tobytes() == results[0].delta.tobytes()
        assert other.norms == results[0].norms and other.norm == results[0].norm


@pytest.mark.promise("A merge of encoded offers has the same bits as a merge of decoded ones")
@pytest.mark.parametrize("encoding", codec.ENCODINGS)
@pytest.mark.parametrize("method", ["rda", "mean"])
def test_encoded_pushes_are_merged_to_the_same_bits(encoding: str, method: str) -> None:
    pieces = pieces_of([5, 300_001, 70, 131_072, 131_100], mean=(2,))  # on both sides of blocks and chunks
    elements = sum(piece.elements for piece in pieces)
    encoded = [codec.encode(delta, encoding) for delta in pushes(3, elements)]
    decoded = [codec.decode(data, encoding, elements) for data in encoded]
    shares = [0.5, 0.2, 0.3]
    squares = [piece_squares(pieces, delta) for delta in decoded]
    waiting = [codec.EncodedValues(data, encoding, elements) for data in encoded]
    for delta, known in zip(waiting, squares, strict=True):
        assert all(piece_squares(pieces, delta, threads=n).tobytes() == known.tobytes() for n in (1, 3))
    expected = numerics.merge(pieces, decoded, shares, method, squares=squares)
    for deltas in (waiting, [decoded[0], *waiting[1:]]):
        merged = numerics.merge(pieces, deltas, shares, method, squares=squares, threads=3)
        assert merged.delta.tobytes() == expected.delta.tobytes() and merged.norms == expected.norms
    with pytest.raises(codec.CodecError):
        codec.EncodedValues(encoded[0], encoding, elements + 128)
    with pytest.raises(ValueError, match="push 0"):
        numerics.merge(pieces_of([4]), waiting[:1], [1.0], method, squares=[np.ones(1)])


@pytest.mark.parametrize("method", ["rda", "mean"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("count", [1, 2])
def test_what_is_not_finite_is_refused_by_name(method: str, bad: float, count: int) -> None:
    deltas = pushes(count, 300, 10)
    deltas[-1][150] = bad
    with pytest.raises(ValueError, match=f"push {count - 1}: holds a value that is not finite"):
        merge(pieces_of([100, 200]), deltas, [1 / count] * count, method)
    assert not np.isfinite(piece_squares(pieces_of([100, 200]), deltas[-1])).all()


def test_arguments_that_do_not_fit_are_refused() -> None:
    deltas = pushes(2, 300, 11)
    pieces = pieces_of([100, 200])
    for bad_pieces, bad_deltas, shares, method, what in [
        (pieces, deltas, [0.5, 0.5], "mode", "'mode' is none of rda, mean"),
        (pieces, [], [], "rda", "0 pushes"),
        (pieces, deltas, [1.0], "rda", "2 pushes and 1 weights"),
        (pieces, deltas, [0.5, 0.6], "rda", "sum to 1"),
        (pieces, deltas, [1.5, -0.5], "rda", "sum to 1"),
        (pieces, deltas, [math.nan, 1.0], "rda", "sum to 1"),
        (pieces[1:], deltas, [0.5, 0.5], "rda", "begins at 100"),
        (pieces, [deltas[0], deltas[1][:299]], [0.5, 0.5], "rda", "push 1: float32 of shape"),
        (pieces, [deltas[0], deltas[1].astype(np.float64)], [0.5, 0.5], "rda", "push 1: float64"),
    ]:
        with pytest.raises(ValueError, match=what):
            numerics.merge(bad_pieces, bad_deltas, shares, method, squares=[np.zeros(2)] * len(bad_deltas))
    with pytest.raises(ValueError, match="squares: not one array per push"):
        numerics.merge(pieces, deltas, [0.5, 0.5], "rda", squares=[np.zeros(2)])
    squares = [piece_squares(pieces, delta) for delta in deltas]
    with pytest.raises(ValueError, match="shares memory"):
        numerics.merge(pieces, deltas, [0.5, 0.5], "rda", squares=squares, out=deltas[0])
    out = np.empty(300, np.float32)
    assert numerics.merge(pieces, deltas, [0.5, 0.5], "rda", squares=squares, out=out).delta is out


def test_weights_are_quantity_times_quality() -> None:
    # 1000 tokens in 10 steps, 3000 in 20: 1000·100 against 3000·150.
    assert normalised_weights("tokens-quality", [1000, 3000], [10, 20]) == pytest.approx([100 / 550, 450 / 550])
    assert normalised_weights("tokens", [1000, 3000], [10, 20]) == pytest.approx([0.25, 0.75])
    assert normalised_weights("uniform", [1000, 3000], [10, 20]) == [0.5, 0.5]
    for kind in ("tokens-quality", "tokens", "uniform"):
        assert normalised_weights(kind, [1000, 500], [10, 0]) == [1.0, 0.0]  # no steps: weight 0
        with pytest.raises(ValueError):
            normalised_weights(kind, [0], [0])
    with pytest.raises(ValueError, match="'steps' is none of"):
        normalised_weights("steps", [1], [1])
