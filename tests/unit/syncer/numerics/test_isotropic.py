"""Isotropic merges against numpy's singular value decomposition."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_protocol.arrays.layout import Layout, Piece, Tensor
from diloco_syncer.numerics import isotropic
from diloco_syncer.numerics.isotropic import Span, equalize_singular_values, find_matrices

RANDOM = np.random.default_rng(5)


def oracle(matrix: np.ndarray) -> np.ndarray:
    left, values, right = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    kept = values > 1e-5 * values[0]
    return np.asarray(left[:, kept] @ right[kept] * np.linalg.norm(values) / kept.sum() ** 0.5)


def equalized(matrix: np.ndarray) -> np.ndarray:
    flat = matrix.astype(np.float32).ravel()
    equalize_singular_values(flat, [Span(0, *matrix.shape)])
    return flat.reshape(matrix.shape)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 40), st.integers(2, 40), st.integers(1, 40), st.floats(1e-6, 1e3), st.integers(1, 50))
def test_singular_values_are_made_equal_and_the_norm_stays(
    rows: int, columns: int, rank: int, scale: float, slab: int
) -> None:
    # Values that fall by no more than a thousand: what is near TINY may be on either side of it.
    source = np.random.default_rng(rows * columns + rank)
    left = np.linalg.qr(source.normal(size=(rows, rows)))[0][:, : min(rank, rows, columns)]
    right = np.linalg.qr(source.normal(size=(columns, columns)))[0][:, : left.shape[1]]
    matrix = scale * (left * 10.0 ** -source.uniform(0, 3, left.shape[1])) @ right.T
    with mock.patch.object(isotropic, "_SLAB", slab):
        found = equalized(matrix)
    np.testing.assert_allclose(found, oracle(matrix), atol=2e-3 * np.abs(found).max())
    assert np.linalg.norm(found) == pytest.approx(np.linalg.norm(matrix), rel=1e-4)


def test_zeros_stay_and_the_other_elements_are_not_touched() -> None:
    delta = RANDOM.normal(size=100).astype(np.float32)
    delta[10:30] = 0
    before = delta.copy()
    equalize_singular_values(delta, [Span(10, 4, 5), Span(40, 6, 5)])
    np.testing.assert_array_equal(np.delete(delta, slice(40, 70)), np.delete(before, slice(40, 70)))
    np.testing.assert_allclose(delta[40:70].reshape(6, 5), oracle(before[40:70].reshape(6, 5)), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("threads", [2, 4, 16])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    spans = [Span(first * 800, *shape) for first, shape in enumerate([(20, 40), (40, 20), (2, 400), (28, 28)] * 3)]
    alone, shared = (RANDOM.normal(size=9600).astype(np.float32) for _ in range(2))
    shared[:] = alone
    equalize_singular_values(alone, spans)
    equalize_singular_values(shared, spans, threads)
    np.testing.assert_array_equal(shared, alone)


@pytest.mark.parametrize(
    ("shape", "start", "stop", "expected"),
    [
        ((6, 4), 0, 24, [(7, 6, 4)]),
        ((6, 4), 8, 24, [(7, 4, 4)]),  # whole rows
        ((6, 4), 8, 12, []),  # one row
        ((6, 4), 6, 24, []),  # parts of rows
        ((24,), 0, 24, []),
        ((24, 1), 0, 24, []),
        ((8, 3, 2, 2), 0, 96, [(7, 8, 12)]),  # a convolution
        ((8, 20, 3), 0, 480, [(7, 8, 60)]),
        ((3, 16, 20), 0, 960, [(7, 16, 20), (327, 16, 20), (647, 16, 20)]),  # experts
        ((3, 16, 20), 160, 700, [(7, 8, 20), (167, 16, 20), (487, 3, 20)]),
    ],
)
def test_what_is_a_matrix(shape: tuple[int, ...], start: int, stop: int, expected: Sequence[tuple[int, ...]]) -> None:
    layout = Layout.build([Tensor("w", shape, "float32"), Tensor("e", (40, 8), "float32", mean=True)], 1)
    pieces = [Piece("w", start, stop, 7, mean=False), Piece("e", 0, 320, 7 + stop - start, mean=True)]
    assert find_matrices(layout, pieces) == [Span(*each) for each in expected]
