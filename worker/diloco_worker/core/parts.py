"""Which part of a whole tensor one process of a learner holds, and where it lies in a flat vector of the whole.

Theory of operation
-------------------
A fragment's vector is made of *pieces*: ranges of whole tensors, each flattened in its order of memory. A process of a
learner may hold a part of a tensor only: some rows (FSDP's Shard(0)), some columns (a tensor-parallel Shard(1)), or
both. A ``TensorPart`` says which, of the tensor seen as a matrix. Its ``cut`` gives what of a piece that is, as pairs
of ``Place``: in the process's own memory, and in the piece.

Example: of a matrix of 4 rows and 6 columns a process holds columns 3 to 5 of rows 2 and 3. The piece is elements 13 to
24. Of it the process holds columns 3 to 5 of row 2 (own elements 0 to 3, elements 2 to 5 of the piece), and the same of
row 3 (3 to 6, and 8 to 11).

A part that is a box in more than two dimensions, of which two beyond the first are cut, has no such form and is refused
by who makes parts (``group.placement``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Place:
    """Elements of a flat vector: ``rows`` runs of ``width`` elements, from ``start``, ``stride`` apart."""

    start: int
    width: int
    rows: int = 1
    stride: int = 0

    @property
    def elements(self) -> int:
        """How many."""
        return self.rows * self.width

    def shifted(self, offset: int) -> Place:
        """The same, in a vector in which all lies ``offset`` further back."""
        return Place(self.start + offset, self.width, self.rows, self.stride)

    def scaled(self, factor: int) -> Place:
        """The same, in units of which each element has ``factor``, such as bytes."""
        return Place(self.start * factor, self.width * factor, self.rows, self.stride * factor)

    def packed(self, start: int) -> Place:
        """As many elements in as many runs, without gaps, from ``start``."""
        return Place(start, self.width, self.rows, self.width)

    def of(self, vector: Any) -> Any:
        """A view of these elements of a contiguous torch vector: [width], or [rows, width]."""
        if self.rows == 1:
            return vector[self.start : self.start + self.width]
        return vector.as_strided(
            (self.rows, self.width), (self.stride, 1), vector.storage_offset() + self.start * vector.stride(0)
        )


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Of a whole tensor as a matrix of ``width`` columns: rows ``first_row`` to ``end_row`` (exclusive), columns
    ``first_column`` to ``end_column``. ``gives``: whether this process, of those that hold the same, gives it away."""

    width: int
    first_row: int
    end_row: int
    first_column: int
    end_column: int
    gives: bool = True

    @classmethod
    def whole(cls, elements: int, gives: bool = True) -> TensorPart:
        """All of a tensor of so many elements."""
        return cls(elements, 0, 1, 0, end_column=elements, gives=gives)

    @classmethod
    def box(
        cls, shape: Sequence[int], offset: Sequence[int], size: Sequence[int], gives: bool = True
    ) -> TensorPart | None:
        """The box of ``size`` at ``offset`` in a tensor of ``shape``; None: it is cut in two dimensions beyond the
        first, and has no such form."""
        cut = [d for d in range(1, len(shape)) if size[d] != shape[d]]
        if len(cut) > 1:
            return None
        if not shape:
            return cls.whole(1, gives)
        k = cut[0] if cut else 1
        width, inner, outer = math.prod(shape[k:]), math.prod(shape[k + 1 :]), math.prod(shape[1:k])
        columns = (offset[k] * inner, (offset[k] + size[k]) * inner) if cut else (0, width)
        rows = offset[0] * outer, (offset[0] + size[0]) * outer
        return cls(width, *rows, *columns, gives=gives)

    @property
    def elements(self) -> int:
        """How many elements this process holds."""
        return (self.end_row - self.first_row) * (self.end_column - self.first_column)

    def cut(self, start: int, stop: int) -> Iterator[tuple[Place, Place]]:
        """What of the flat range ``start`` to ``stop`` of the whole tensor this part is: in this process's own flat
        memory, and in the range. Runs of no elements are left out."""
        own, width = self.end_column - self.first_column, self.width
        if own == width:  # whole rows: one run
            first, end = max(start, self.first_row * width), min(stop, self.end_row * width)
            if first < end:
                yield Place(first - self.first_row * width, end - first), Place(first - start, end - first)
            return
        if not own or start >= stop:
            return
        body, end = -(-start // width), stop // width  # the rows that lie in the range whole
        if body > end:  # the range lies within one row
            yield from self._cut_row(start // width, start % width, stop - start // width * width, start)
            return
        if start % width:
            yield from self._cut_row(body - 1, start % width, width, start)
        first, last = max(body, self.first_row), min(end, self.end_row)
        if first < last:
            mine = Place((first - self.first_row) * own, own, last - first, own)
            yield mine, Place(first * width + self.first_column - start, own, last - first, width)
        if stop % width:
            yield from self._cut_row(end, 0, stop % width, start)

    def _cut_row(self, row: int, first: int, end: int, start: int) -> Iterator[tuple[Place, Place]]:
        """What of columns ``first`` to ``end`` of one row this part is, in a range that begins at ``start``."""
        first, end = max(first, self.first_column), min(end, self.end_column)
        if self.first_row <= row < self.end_row and first < end:
            own = self.end_column - self.first_column
            mine = Place((row - self.first_row) * own + first - self.first_column, end - first)
            yield mine, Place(row * self.width + first - start, end - first)
