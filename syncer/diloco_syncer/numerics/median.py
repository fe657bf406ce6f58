"""The median of a piece's outer gradients, for learners that need not believe each other.

Theory of operation. A push counts by its direction alone: each is brought to the median length R of the merge, and of
every element the median over the learners is taken. What comes out is brought to length R again, as in RDA (merge.py).
So one learner of three or more, whatever it sends, moves an element no further than to the next of the others' values,
and no length at all. Where the middle is between two values it is their mean.

Pieces that are merged by mean (embeddings, whose rows few learners touch, so that their median would be 0) are summed,
each push cut to length R at most: there a learner moves what the others' median learner does.

All pushes of one slot are one learner's, and counted as one: their sum, as long as they are together.

The elements' values are sorted side by side, by a sorting network (Batcher's): ``_RANGE`` elements of all learners
at a time, which stay in the cache. Only smallest and largest of two are taken, so that the bits depend on nothing but
the values. Memory: 16 KiB a thread for each learner, and at least half a MiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco_protocol.arrays.kernels import BLOCK, F32_OUT, Float32s, kernel

_RANGE = 512  # elements
_SCRATCH = 1 << 17  # values

Rows = NDArray[np.float32]


def scratch_width(learners: int) -> int:
    """Elements of a chunk; whole blocks."""
    return max(1, _SCRATCH // learners // BLOCK) * BLOCK


@cache
def sorting_network(rows: int) -> NDArray[np.int64]:
    """Pairs of rows, int64[pairs, 2]: the smaller value goes to the first, one pair after the other."""
    pairs = []
    size = 1
    while size < rows:
        step = size
        while step:
            for first in range(step % size, rows - step, 2 * step):
                pairs += [
                    (low, low + step)
                    for low in range(first, min(first + step, rows - step))
                    if low // (2 * size) == (low + step) // (2 * size)
                ]
            step //= 2
        size *= 2
    return np.array(pairs, np.int64).reshape(-1, 2)


def take_median(rows: Rows, out: Float32s) -> None:
    """``out`` = the median of each column of ``rows``, float32[learners, out.size or more], which are then sorted."""
    learners = len(rows)
    _median(rows, sorting_network(learners), (learners - 1) // 2, learners // 2, out)


def learners_of(slots: Sequence[int]) -> list[list[int]]:
    """The indices of each slot's pushes."""
    return [[m for m, own in enumerate(slots) if own == slot] for slot in dict.fromkeys(slots)]


# ---------------------------------------------------------------- kernels


@kernel("float32[:, ::1]", 'Array(int64, 2, "C", readonly=True)', "int64, int64", F32_OUT)
def _median(rows: Rows, pairs: Any, low: int, high: int, out: Float32s) -> None:
    n = np.uint64(out.size)
    for start in range(np.uint64(0), n, np.uint64(_RANGE)):
        stop = min(start + np.uint64(_RANGE), n)
        for k in range(pairs.shape[0]):
            first, second = rows[pairs[k, 0]], rows[pairs[k, 1]]
            for i in range(start, stop):
                x, y = first[i], second[i]
                first[i] = x if x < y else y
                second[i] = y if x < y else x
        below, above = rows[low], rows[high]
        for i in range(start, stop):
            out[i] = np.float32(0.5) * below[i] + np.float32(0.5) * above[i]
