"""The merge: the outer gradients of one round become one.

Theory of operation
-------------------
(arXiv 2604.21428, merging.) The pushes Δ_m of a fragment carry weights w_m that sum to 1 (core/books/shares.py,
normalised_weights). Each piece of the fragment is merged by itself:

* *Radial-directional averaging* (RDA): R · φ(u) with R = Σ w_m·‖Δ_m‖ the mean norm, u = Σ w_m·φ(Δ_m) the mean
  direction, φ(x) = x/‖x‖ and φ(0) = 0. A plain mean of M nearly orthogonal vectors is √M times shorter than they are,
  so that its outer learning rate would have to follow M; the RDA keeps the norm. A Δ of zero still counts in R. If
  the directions cancel (‖u‖ < 1e-3), u is mostly rounding error and must not be blown up to length R: the weighted
  mean is taken instead.
* *Weighted mean* Σ w_m·Δ_m, for pieces marked ``mean`` (embeddings, whose rows few learners touch) and everywhere
  if the method is ``mean``.
* *Isotropic* is RDA here; what comes after it needs the layout (isotropic.py).
* *Median*: for learners that need not believe each other (median.py). ``clipped`` is its way with pieces marked
  ``mean``, for all pieces.

A push of weight 0 takes no part. With a single one that does, Δ is passed on bit for bit.

Three passes over a piece: the pushes' norms, which are taken when a push arrives (``piece_squares``);
Σ (w_m·R/‖Δ_m‖)·Δ_m, which is R·u, and its norm; and the scaling to length R. Sums over pushes are float32 in the
given order, one rounding per operation; norms are float64 over fixed blocks. The work is cut into chunks whose output
stays in the cache and which threads share; the result has the same bits for any number of threads. Of pushes that are
still encoded one at a time is decoded into a chunk's scratch and added: the chunk is so large that the calls, which
threads make one at a time, cost little beside the loops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from diloco_protocol.arrays import codec, kernels
from diloco_protocol.arrays.kernels import F32_IN, F32_OUT, RANGE, Float32s, Float64s, kernel
from diloco_protocol.arrays.layout import Piece
from diloco_syncer.numerics.median import learners_of, scratch_width, take_median

METHODS = ("rda", "mean", "isotropic", "median", "isotropic-median", "clipped")
CANCELLED = 1e-3  # a mean direction shorter than this is rounding error

_CHUNK = 32 * kernels.BLOCK  # elements
_ENCODED_CHUNK = 64 * kernels.BLOCK  # where pushes are decoded
_LARGE = 8 * _CHUNK  # from here on threads share a piece; smaller ones go to one thread each


Delta = Float32s | codec.EncodedValues
Factors = tuple[np.float32, ...]  # of a weighted sum, one for each part
Parts = tuple[Float32s, ...]


@dataclass(frozen=True, slots=True)
class MergeResult:
    """``delta``: float32, the fragment's merged outer gradient. ``norms``: L2 of each push,
    in the given order, those of weight 0 included. ``norm``: L2 of ``delta``."""

    delta: Float32s
    norms: tuple[float, ...]
    norm: float


def merge(
    pieces: Sequence[Piece],
    deltas: Sequence[Delta],
    weights: Sequence[float],
    method: str,
    squares: Sequence[Float64s],
    out: Float32s | None = None,
    *,
    slots: Sequence[int] | None = None,
    threads: int = 1,
) -> MergeResult:
    """Merge one fragment's pushes.

    ``pieces`` of the fragment, which cover it; ``deltas``: float32[elements] each, contiguous, or encoded, of which
    no more is decoded than is being added; ``weights``: not negative, sum 1; ``method``: of ``METHODS``; ``squares``:
    ``piece_squares`` of each push. ``out``: written and returned as ``delta``, and none of the inputs. ``slots``: of
    each push, for the median; None: each is another's. Raises ValueError if these do not fit together or a push holds
    a value that is not finite.
    """
    elements = _check(pieces, deltas, weights, method)
    if out is None:
        out = np.empty(elements, np.float32)
    if out.dtype != np.float32 or out.shape != (elements,) or not out.flags.carray:
        raise ValueError(f"out: not a flat, contiguous, writable float32 array of {elements} elements")
    if any(isinstance(delta, np.ndarray) and np.may_share_memory(out, delta) for delta in deltas):
        raise ValueError("out: shares memory with a push")

    if len(squares) != len(deltas) or any(known.shape != (len(pieces),) for known in squares):
        raise ValueError(f"squares: not one array per push, of {len(pieces)} pieces each")
    table = np.stack([*squares, np.zeros(len(pieces))], axis=1)
    learners = learners_of(slots or range(len(deltas)))

    def one(index: int, threads: int) -> None:
        piece = pieces[index]
        span = slice(piece.offset, piece.offset + piece.elements)
        radial = method not in ("mean", "clipped") and not piece.mean
        if method in ("median", "isotropic-median", "clipped"):
            _median_piece(deltas, piece.offset, learners, radial, out=out[span], squares=table[index], threads=threads)
        else:
            _piece(deltas, piece.offset, weights, radial, out=out[span], squares=table[index], threads=threads)

    def ones(first: int, last: int) -> None:
        for index in small[first:last]:
            one(index, 1)

    small = [index for index, piece in enumerate(pieces) if piece.elements < _LARGE]
    for index, piece in enumerate(pieces):
        if piece.elements >= _LARGE:
            one(index, threads)
    kernels.share(ones, len(small), 1 if threads > 1 else max(1, len(small)), threads)

    *norms, norm = [math.sqrt(math.fsum(column)) for column in table.T]
    for m, value in enumerate(norms):
        if not math.isfinite(value):
            raise ValueError(f"push {m}: holds a value that is not finite")
    return MergeResult(out, tuple(norms), norm)


def piece_squares(pieces: Sequence[Piece], delta: Delta, *, threads: int = 1) -> Float64s:
    """The squared L2 norm of each piece of one push, float64[pieces]. All are finite exactly if the push is, and
    the root of their sum is its norm: so the syncer takes them once, when a push arrives. Of an encoded push no more is
    decoded at a time than stays in the cache; the bits are those of the decoded one."""
    return np.array([_square(delta, piece, threads) for piece in pieces], np.float64)


def _square(delta: Delta, piece: Piece, threads: int) -> float:
    start, stop = piece.offset, piece.offset + piece.elements
    if isinstance(delta, np.ndarray):
        return kernels.square_sum(delta[start:stop], threads)
    sums = np.empty(kernels.blocks_of(piece.elements), np.float64)

    def chunk(first: int, last: int) -> None:
        window = sums[first // kernels.BLOCK : kernels.blocks_of(last)]
        scratch = np.empty(codec.scratch_size(last - first), np.float32)
        kernels.square_sums(delta.decode(start + first, start + last, scratch), window, 0, window.size)

    kernels.share(chunk, piece.elements, _CHUNK, threads)
    return float(kernels.ordered_sum(sums))


def growth(pieces: Sequence[Piece], delta_squares: Float64s, theta_squares: Float64s, usual_square: float) -> float:
    """The greatest r.m.s. of a piece of Δ, as a multiple of the r.m.s. of Θ in that piece and in the model together.
    ``usual_square``: the mean square of the model's parameters. 0 where these are 0: there is nothing to go by."""
    counts = np.array([piece.elements for piece in pieces], np.float64)
    sizes = np.sqrt(theta_squares / counts) + math.sqrt(usual_square)
    known = sizes > 0
    return float(np.max(np.sqrt(delta_squares / counts)[known] / sizes[known], initial=0.0))


def _piece(
    deltas: Sequence[Delta],
    offset: int,
    weights: Sequence[float],
    radial: bool,
    out: Float32s,
    squares: Float64s,
    threads: int,
) -> None:
    """Merge one piece, which begins at ``offset``, into ``out``. ``squares``: the squared norms of its parts; that of
    ``out`` is put behind them."""
    counted = [m for m, weight in enumerate(weights) if weight > 0]
    vectors = [deltas[m] for m in counted]
    shares = [weights[m] for m in counted] if len(counted) > 1 else [1.0]
    if radial and len(counted) > 1:
        square = _radial(vectors, offset, shares, np.sqrt(squares[counted]), out=out, threads=threads)
        if square is not None:
            squares[-1] = square
            return
    squares[-1] = _combine(vectors, offset, [np.float32(share) for share in shares], out, threads=threads)


def _median_piece(
    deltas: Sequence[Delta],
    offset: int,
    learners: Sequence[Sequence[int]],
    radial: bool,
    out: Float32s,
    squares: Float64s,
    threads: int,
) -> None:
    """As ``_piece``, by the median. ``learners``: the indices of each one's pushes."""
    lengths = [math.fsum(math.sqrt(squares[m]) for m in own) for own in learners]
    radius = median(lengths)
    if not radial:
        cuts = [min(1.0, radius / length) if length > 0 else 0.0 for length in lengths]
        pairs = [(m, cut / len(learners)) for own, cut in zip(learners, cuts, strict=True) for m in own]
        order = [deltas[m] for m, _ in pairs]
        squares[-1] = _combine(order, offset, [np.float32(share) for _, share in pairs], out, threads=threads)
        return
    factors = [_factor(radius, length) for length in lengths]
    sums = np.empty(kernels.blocks_of(out.size), np.float64)

    def chunk(start: int, stop: int) -> None:
        rows = np.empty((len(learners), stop - start), np.float32)
        for row, own, factor in zip(rows, learners, factors, strict=True):
            _add([deltas[m] for m in own], offset + start, [factor] * len(own), row)
        take_median(rows, out[start:stop])
        window = sums[start // kernels.BLOCK : kernels.blocks_of(stop)]
        kernels.square_sums(out[start:stop], window, 0, window.size)

    kernels.share(chunk, out.size, scratch_width(len(learners)), threads, backwards=True)
    square = float(kernels.ordered_sum(sums))
    if math.sqrt(square) < CANCELLED * radius or radius == 0:
        squares[-1] = square
        return
    factor = np.float32(radius / math.sqrt(square))
    kernels.share(lambda start, stop: _scale(factor, out, start, stop), out.size, _CHUNK, threads)
    squares[-1] = radius * radius


def _radial(
    deltas: Sequence[Delta], offset: int, shares: Sequence[float], norms: Float64s, out: Float32s, threads: int
) -> float | None:
    """RDA of one piece into ``out``; its squared norm, or None where the directions cancel."""
    radius = math.fsum(share * float(norm) for share, norm in zip(shares, norms, strict=True))
    if radius == 0:
        out[:] = 0
        return 0.0
    factors = [_factor(share * radius, float(norm)) for share, norm in zip(shares, norms, strict=True)]
    # radius may be infinite or NaN here: then so are the norms, and merge refuses the push.
    length = math.sqrt(_combine(deltas, offset, factors, out, threads=threads))
    if length < CANCELLED * radius:
        return None
    factor = np.float32(radius / length)
    kernels.share(lambda start, stop: _scale(factor, out, start, stop), out.size, _CHUNK, threads)
    return radius * radius


def _factor(numerator: float, norm: float) -> np.float32:
    """w·R/‖Δ‖ for a direction; 0 for a Δ of zero, or one so short beside the others
    (1e-38) that float32 has no factor for it."""
    factor = numerator / norm if norm > 0 else 0.0
    return np.float32(factor) if factor < 1e38 or not math.isfinite(factor) else np.float32(0)


def _combine(deltas: Sequence[Delta], offset: int, factors: Sequence[np.float32], out: Float32s, threads: int) -> float:
    """``out`` = Σ factor·delta in float32 and in order, from ``offset`` on; the squared norm of ``out``."""
    sums = np.empty(kernels.blocks_of(out.size), np.float64)

    def chunk(start: int, stop: int) -> None:
        _add(deltas, offset + start, factors, out[start:stop])
        window = sums[start // kernels.BLOCK : kernels.blocks_of(stop)]
        kernels.square_sums(out[start:stop], window, 0, window.size)

    span = _ENCODED_CHUNK if any(isinstance(delta, codec.EncodedValues) for delta in deltas) else _CHUNK
    kernels.share(chunk, out.size, span, threads, backwards=True)
    return float(kernels.ordered_sum(sums))


def _add(deltas: Sequence[Delta], start: int, factors: Sequence[np.float32], out: Float32s) -> None:
    """``out`` = ((f0·x0 + f1·x1) + f2·x2) + …, where x are as many values from ``start`` on: eight pushes, four, two or
    one at a time (one, where any is encoded), which does not change the order of the sum."""
    stop = start + out.size
    encoded = any(isinstance(delta, codec.EncodedValues) for delta in deltas)
    scratch = np.empty(codec.scratch_size(out.size) if encoded else 0, np.float32)

    def values(delta: Delta) -> Float32s:
        return delta[start:stop] if isinstance(delta, np.ndarray) else delta.decode(start, stop, scratch)

    if len(deltas) == 1 and factors[0] == 1:
        out[:] = values(deltas[0])
        return
    done = 0
    while done < len(deltas):
        left = 1 if encoded else len(deltas) - done
        width = 8 if left >= 8 else 4 if left >= 4 else 2 if left >= 2 else 1
        parts = tuple(values(delta) for delta in deltas[done : done + width])
        _ADD[width](out, done > 0, tuple(factors[done : done + width]), parts, 0, out.size)
        done += width


def _check(pieces: Sequence[Piece], deltas: Sequence[Delta], weights: Sequence[float], method: str) -> int:
    if method not in METHODS:
        raise ValueError(f"sync.merge.method: {method!r} is none of {', '.join(METHODS)}")
    if not deltas or len(deltas) != len(weights):
        raise ValueError(f"{len(deltas)} pushes and {len(weights)} weights")
    elements = 0
    for piece in pieces:
        if piece.offset != elements:
            raise ValueError(f"piece of {piece.tensor} begins at {piece.offset}, and {elements} come before it")
        elements += piece.elements
    for m, delta in enumerate(deltas):
        if isinstance(delta, codec.EncodedValues):
            if delta.elements != elements:
                raise ValueError(f"push {m}: {delta.elements} encoded values, fragment: {elements}")
        elif delta.dtype != np.float32 or delta.shape != (elements,) or not delta.flags.c_contiguous:
            raise ValueError(f"push {m}: {delta.dtype} of shape {delta.shape}, fragment: {elements} float32")
    if any(not 0 <= weight <= 1 for weight in weights) or abs(math.fsum(weights) - 1) > 1e-6:
        raise ValueError(f"weights {list(weights)} are not shares that sum to 1")
    return elements


# ---------------------------------------------------------------- kernels


@kernel("float32", F32_OUT, RANGE)
def _scale(factor: np.float32, out: Float32s, first: int, last: int) -> None:
    for i in range(np.uint64(first), np.uint64(last)):
        out[i] *= factor


@kernel(F32_OUT, "boolean", "UniTuple(float32, 1)", f"UniTuple({F32_IN}, 1)", RANGE)
def _add1(out: Float32s, more: bool, factors: Factors, parts: Parts, first: int, last: int) -> None:
    (f0,), (x0,) = factors, parts
    for i in range(np.uint64(first), np.uint64(last)):
        term = f0 * x0[i]
        out[i] = out[i] + term if more else term


@kernel(F32_OUT, "boolean", "UniTuple(float32, 2)", f"UniTuple({F32_IN}, 2)", RANGE)
def _add2(out: Float32s, more: bool, factors: Factors, parts: Parts, first: int, last: int) -> None:
    (f0, f1), (x0, x1) = factors, parts
    for i in range(np.uint64(first), np.uint64(last)):
        term = f0 * x0[i]
        out[i] = (out[i] + term if more else term) + f1 * x1[i]


@kernel(F32_OUT, "boolean", "UniTuple(float32, 4)", f"UniTuple({F32_IN}, 4)", RANGE)
def _add4(out: Float32s, more: bool, factors: Factors, parts: Parts, first: int, last: int) -> None:
    (f0, f1, f2, f3), (x0, x1, x2, x3) = factors, parts
    for i in range(np.uint64(first), np.uint64(last)):
        term = f0 * x0[i]
        head = out[i] + term if more else term
        out[i] = ((head + f1 * x1[i]) + f2 * x2[i]) + f3 * x3[i]


@kernel(F32_OUT, "boolean", "UniTuple(float32, 8)", f"UniTuple({F32_IN}, 8)", RANGE)
def _add8(out: Float32s, more: bool, factors: Factors, parts: Parts, first: int, last: int) -> None:
    f0, f1, f2, f3, f4, f5, f6, f7 = factors
    x0, x1, x2, x3, x4, x5, x6, x7 = parts
    for i in range(np.uint64(first), np.uint64(last)):
        term = f0 * x0[i]
        head = out[i] + term if more else term
        head = ((head + f1 * x1[i]) + f2 * x2[i]) + f3 * x3[i]
        out[i] = (((head + f4 * x4[i]) + f5 * x5[i]) + f6 * x6[i]) + f7 * x7[i]


_ADD = {1: _add1, 2: _add2, 4: _add4, 8: _add8}
