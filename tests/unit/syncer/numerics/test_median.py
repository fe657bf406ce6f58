"""The median merge against float64 numpy, and what one learner of several can do to it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_protocol.arrays import codec
from diloco_protocol.arrays.layout import Piece
from diloco_syncer.numerics import merge as numerics
from diloco_syncer.numerics.median import sorting_network, take_median
from diloco_syncer.numerics.merge import piece_squares
from example_counts import share_of


def pieces_of(sizes: Sequence[int], mean: Sequence[int] = ()) -> list[Piece]:
    offsets = [0, *itertools.accumulate(sizes)]
    return [Piece(f"t{i}", 0, size, offsets[i], mean=i in mean) for i, size in enumerate(sizes)]


def pushes(count: int, elements: int, seed: int) -> list[np.ndarray]:
    source = np.random.default_rng(seed)
    return [(source.standard_normal(elements) * source.uniform(0.1, 3)).astype(np.float32) for _ in range(count)]


def merge(
    pieces: list[Piece], deltas: Sequence[np.ndarray], slots: Sequence[int] | None = None, method: str = "median"
) -> numerics.MergeResult:
    squares = [piece_squares(pieces, delta) for delta in deltas]
    shares = [1 / len(deltas)] * len(deltas)
    return numerics.merge(pieces, deltas, shares, method, squares=squares, slots=slots, threads=2)


def oracle(pieces: list[Piece], deltas: Sequence[np.ndarray], slots: Sequence[int], method: str) -> np.ndarray:
    """Algorithm section 5 in float64."""
    out = np.zeros(deltas[0].size)
    for piece in pieces:
        span = slice(piece.offset, piece.offset + piece.elements)
        parts = [delta[span].astype(np.float64) for delta in deltas]
        own = {slot: [x for x, other in zip(parts, slots, strict=True) if other == slot] for slot in slots}
        sums = [sum(all_of) for all_of in own.values()]
        lengths = [sum(np.linalg.norm(x) for x in all_of) for all_of in own.values()]
        radius = np.median(lengths)
        if method == "clipped" or piece.mean:
            cut = [x * min(1, radius / n) if n else x for x, n in zip(sums, lengths, strict=True)]
            out[span] = np.mean(cut, axis=0)
            continue
        middle = np.median([x * (radius / n) if n else x for x, n in zip(sums, lengths, strict=True)], axis=0)
        length = np.linalg.norm(middle)
        out[span] = middle if length < 1e-3 * radius or not length else middle * (radius / length)
    return out


@pytest.mark.parametrize("rows", range(1, 13))
def test_the_network_sorts(rows: int) -> None:
    """It sorts all values if it sorts those of 0 and 1."""
    for bits in range(1 << rows):
        values = [(bits >> row) & 1 for row in range(rows)]
        for low, high in sorting_network(rows):
            if values[low] > values[high]:
                values[low], values[high] = values[high], values[low]
        assert values == sorted(values)


@settings(max_examples=share_of(60), deadline=None)
@given(
    st.lists(st.integers(1, 9000), min_size=1, max_size=4),
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.sampled_from(["median", "clipped"]),
    st.integers(0, 2**32 - 1),
)
def test_the_median_merge_is_the_algorithm_of_section_5(
    sizes: list[int], slots: list[int], method: str, seed: int
) -> None:
    pieces = pieces_of(sizes, mean=(1,))
    deltas = pushes(len(slots), sum(sizes), seed)
    deltas[-1][: sizes[0]] = 0  # a zero Δ in one piece
    result, expected = merge(pieces, deltas, slots, method), oracle(pieces, deltas, slots, method)
    scale = max(float(np.abs(d).max()) for d in deltas)
    np.testing.assert_allclose(result.delta, expected, rtol=1e-4, atol=4e-6 * scale)
    assert result.norm == pytest.approx(np.linalg.norm(expected), rel=1e-4, abs=1e-6)


@pytest.mark.promise(
    "With sync.merge.method median no single learner of three or more decides an element of a merge, or its length",
    section="Syncer",
)
@pytest.mark.parametrize("broken", ["huge", "against", "one element", "tiny"])
def test_one_learner_moves_no_element_beyond_the_others(broken: str) -> None:
    sizes = [3000, 200]
    pieces = pieces_of(sizes, mean=(1,))
    honest = pushes(4, sum(sizes), 7)
    wrong = {
        "huge": np.float32(1e30) * honest[0],
        "against": np.float32(-100) * honest[0],
        "one element": np.zeros_like(honest[0]),
        "tiny": np.float32(1e-30) * honest[0],
    }[broken]
    if broken == "one element":
        wrong[[5, 3005]] = 1e20
    result = merge(pieces, [*honest, wrong])
    for piece in pieces:
        span = slice(piece.offset, piece.offset + piece.elements)
        lengths = [float(np.linalg.norm(d[span])) for d in honest]
        assert np.linalg.norm(result.delta[span]) <= max(lengths) * 1.001
        assert piece.mean or np.linalg.norm(result.delta[span]) >= min(lengths) * 0.999
    alone = merge(pieces, honest).delta
    cosine = float(alone @ result.delta) / (np.linalg.norm(alone) * np.linalg.norm(result.delta))
    assert cosine > 0.7
    assert abs(result.delta[5]) <= 4 * max(abs(d[5]) for d in honest)


def test_all_pushes_of_a_slot_are_one_learners() -> None:
    """A learner that leaves and comes again may have several in a merge."""
    honest = pushes(3, 5000, 3)
    again = [-honest[0]] * 5
    result = merge(pieces_of([5000]), [*honest, *again], [0, 1, 2, *[3] * 5])
    once = merge(pieces_of([5000]), [*honest, sum(again)], [0, 1, 2, 3])
    np.testing.assert_allclose(result.delta, once.delta, rtol=1e-4, atol=1e-5)


def test_directions_that_cancel_stay_short() -> None:
    (delta,) = pushes(1, 1000, 5)
    result = merge(pieces_of([1000]), [delta, -delta])
    assert not result.delta.any()
    result = merge(pieces_of([1000]), [0 * delta, 0 * delta, delta])
    assert not result.delta.any()


def test_the_bits_depend_neither_on_threads_nor_on_encoding_ranges() -> None:
    sizes = [400_000, 3]
    pieces = pieces_of(sizes)
    encoded = [codec.encode(delta, "int4") for delta in pushes(5, sum(sizes), 11)]
    decoded = [codec.decode(one, "int4", sum(sizes)) for one in encoded]
    squares = [piece_squares(pieces, delta) for delta in decoded]
    waiting = [codec.EncodedValues(one, "int4", sum(sizes)) for one in encoded]
    found = {
        numerics.merge(pieces, deltas, [0.2] * 5, "median", squares=squares, threads=threads).delta.tobytes()
        for deltas in (decoded, waiting)
        for threads in (1, 3)
    }
    assert len(found) == 1


@pytest.mark.parametrize("learners", [3, 4, 9])
def test_the_middle_of_two_values_is_their_mean(learners: int) -> None:
    rows = np.random.default_rng(learners).standard_normal((learners, 1300)).astype(np.float32)
    out = np.empty(1300, np.float32)
    expected = np.median(rows.astype(np.float64), axis=0)
    take_median(rows.copy(), out)
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    assert math.isfinite(float(out.sum()))
