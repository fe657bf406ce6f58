"""Isotropic merges: all singular values of each merged matrix are made equal.

Theory of operation
-------------------
(IsoLoCo, arXiv 2607.03011.) What learners agree on lies in few directions of a matrix's outer gradient, and the
noise of their own batches in many; outer steps along few directions learn the others slowly. So the merged Δ of a
matrix is replaced by its polar factor U·Vᵀ, as Muon does with gradients, at Δ's own length:
Δ ← ‖Δ‖/√r · U·Vᵀ, where r counts the singular values that are not rounding error (above ``TINY`` of the largest).
The paper scales to the mean singular value of the weighted mean; with RDA's length (merge.py) the outer learning rate
need not follow the number of learners, nor the spectrum.

What is a matrix: a parameter of two dimensions; of three each of the first (a stack of experts) where both others are
at least ``EXPERT``, and else, as of more dimensions, the first against the others (a convolution). A piece that holds
whole rows of one counts as a matrix of those rows. Vectors, parts of rows and what is merged by mean (embeddings) stay
as they are.

How: with A of m rows and n >= m columns (else transposed), A·Aᵀ = U·Σ²·Uᵀ, and U·Vᵀ = (U·Σ⁻¹·Uᵀ)·A. The product and
its eigenvectors are float64, summed over slabs of columns, so that memory beside A is some 5·m² numbers. It takes
2·m²·n multiplications and additions twice, and some 9·m³. The products are BLAS's: their bits depend on the machine's
kind of processor, unlike those of the other methods.

Matrices are shared among threads, up to ``AT_ONCE`` at a time, and BLAS has one thread (``__main__``). Its own threads
would have more to do only in large matrices, wait for the next product in a loop that takes a core each for some
100 ms, and make the bits depend on how many there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diloco_protocol.arrays.kernels import Float32s, share
from diloco_protocol.arrays.layout import Layout, Piece

TINY = 1e-5  # of the greatest singular value: what is below is rounding error
EXPERT = 16  # least rows and columns of the matrices in a stack
AT_ONCE = 4  # matrices, which bounds the memory
_SLAB = 4096  # columns

Matrix = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Span:
    """A matrix within its fragment's vector: ``rows`` of ``columns`` from ``offset`` on."""

    offset: int
    rows: int
    columns: int


def find_matrices(layout: Layout, pieces: Sequence[Piece]) -> list[Span]:
    """The matrices among a fragment's pieces, in their order."""
    shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
    return [span for piece in pieces if not piece.mean for span in _spans(piece, shapes[piece.tensor])]


def _spans(piece: Piece, shape: Sequence[int]) -> Iterator[Span]:
    if len(shape) < 2:
        return
    stacked = len(shape) == 3 and min(shape[1:]) >= EXPERT
    columns = shape[2] if stacked else math.prod(shape[1:])
    if not columns or piece.start % columns or piece.stop % columns:
        return  # it holds parts of rows
    size = math.prod(shape[1:]) if stacked else math.prod(shape)
    for first in range(piece.start - piece.start % size, piece.stop, size):
        start, stop = max(first, piece.start), min(first + size, piece.stop)
        if min(rows := (stop - start) // columns, columns) > 1:
            yield Span(piece.offset + start - piece.start, rows, columns)


def equalize_singular_values(delta: Float32s, spans: Sequence[Span], threads: int = 1) -> None:
    """Make the singular values of each of ``spans`` in ``delta`` (float32, changed in place) equal; each keeps its L2
    norm. A matrix of zeros stays. The result does not depend on ``threads``. Raises numpy.linalg.LinAlgError if an
    eigenvalue iteration does not converge."""

    def work(first: int, last: int) -> None:
        for span in spans[first:last]:
            matrix = delta[span.offset : span.offset + span.rows * span.columns].reshape(span.rows, span.columns)
            _equalize(matrix if span.rows <= span.columns else matrix.T)

    share(work, len(spans), 1, min(threads, AT_ONCE))


def _equalize(matrix: Matrix) -> None:
    """``matrix`` [m, n], m <= n, any strides, in place."""
    rows, columns = matrix.shape
    slabs = [slice(first, first + _SLAB) for first in range(0, columns, _SLAB)]
    product = np.zeros((rows, rows))
    for slab in slabs:
        part = matrix[:, slab].astype(np.float64)
        product += part @ part.T
    values, vectors = np.linalg.eigh(product)  # values ascending
    square = float(np.trace(product))
    if not values[-1] > 0:
        return
    kept = values > TINY**2 * values[-1]
    vectors = vectors[:, kept]
    length = math.sqrt(square / np.count_nonzero(kept))
    turn = ((vectors * (length / np.sqrt(values[kept]))) @ vectors.T).astype(np.float32)
    for slab in slabs:
        matrix[:, slab] = turn @ np.ascontiguousarray(matrix[:, slab])
