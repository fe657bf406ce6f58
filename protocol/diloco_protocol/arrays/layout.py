"""The fragment layout: which elements of which tensor are synchronised together.

Theory of operation
-------------------
A model's trainable tensors are dealt into P *fragments* of nearly equal size (algorithm: Streaming DiLoCo, arXiv
2501.18512, section 2; the bound is ours). Every party derives the layout by itself and only compares digests, so the
rule below uses integers alone: no float, no hash order, no locale, no case folding.

Pieces wait in a queue, largest first, ties by tensor name. Each goes into the emptiest bin, ties by bin index. A piece
that would lift its bin above 21/20 of the mean is cut at the first row boundary at which the bin holds at least the
mean, and the rest goes back into the queue. Where one row exceeds 1/20 of the mean, as one expert of a stack does, the
cut is at a row within it; where that one does, too, and for vectors, it is at an element. A cut closes its bin, because
the emptiest bin always holds less than the mean while elements are left; so there are at most P cuts, a bin holds at
most one piece of a tensor, and the largest bin is at most 21/20 of the mean.

One case needs more: 23 equal tensors in 24 bins are each within the bound, and the last bin would stay empty. Whenever
that happens the deal is repeated with every bin's exact share (T·(b+1)//P - T·b//P elements) as its bound and cuts at
elements; then every bin ends at its share.

Below 40 elements per fragment the bound cannot be kept, and with more fragments
than ``every`` steps the turns would not fit: P is lowered, and ``note`` says so.

A fragment travels as one flat float32 vector: its pieces in order of tensor name,
each the row-major elements ``start:stop`` of its tensor.
"""

from __future__ import annotations

import fnmatch
import hashlib
import heapq
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

FORMAT = 1
DTYPES = frozenset({"float32", "bfloat16", "float16", "float64"})
ELEMENTS_PER_FRAGMENT = 40  # fewer, and one element is more than the bound allows

MAX_JSON_BYTES = 64 << 20
MAX_TENSORS = 1_000_000
MAX_LAYOUT_FRAGMENTS = 65_536  # what is parsed; a job has at most vocabulary.MAX_FRAGMENTS
MAX_NAME = 1024
MAX_DIMENSIONS = 64
MAX_ELEMENTS = 1 << 50


class LayoutError(ValueError):
    """The tensors cannot be laid out, or a layout received is not one. One line, for people."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A trainable tensor. ``mean``: embedding-like, merged by the weighted mean."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    mean: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def row_within(self, most: int) -> int:
        """Elements of the largest rows of at most ``most`` elements: of all dimensions but the first, else but the
        first two, and so on. 1 for scalars and vectors, and where no row is so small."""
        rows = (math.prod(self.shape[first:]) for first in range(1, len(self.shape)))
        return next((row for row in rows if row <= most), 1)


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``start:stop`` (row-major) of the tensor named ``tensor``, at
    ``offset : offset + stop - start`` in the fragment's flat float32 vector."""

    tensor: str
    start: int
    stop: int
    offset: int
    mean: bool

    @property
    def elements(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """The assignment of every element to one fragment. Make it with ``build`` or ``from_json``.

    ``tensors`` are sorted by name. ``note`` is empty, or says what was lowered and why; it is no part of the digest.
    """

    tensors: tuple[Tensor, ...]
    fragments: tuple[tuple[Piece, ...], ...]
    note: str = ""
    digest: str = field(init=False)  # SHA-256, 64 hex digits
    _sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sizes", tuple(sum(p.elements for p in f) for f in self.fragments))
        text = json.dumps(self._document(), separators=(",", ":"), ensure_ascii=True)
        object.__setattr__(self, "digest", hashlib.sha256(text.encode("ascii")).hexdigest())

    @classmethod
    def build(
        cls, tensors: Iterable[Tensor], fragments: int, every: int | None = None, mean_patterns: Sequence[str] = ()
    ) -> Layout:
        """Deal ``tensors`` into ``fragments`` (P) bins; their order does not matter.

        ``every`` is H, the inner steps between two merges of one fragment: P is lowered to it. A tensor is merged by
        mean if its ``mean`` is set or one of ``mean_patterns`` (shell patterns, case-sensitive) matches its name.
        Raises LayoutError for duplicate names, impossible shapes or dtypes, or a model without elements.
        """
        if type(fragments) is not int or fragments < 1:
            raise LayoutError(f"fragments: {fragments!r} is not a whole number of at least 1")
        if every is not None and (type(every) is not int or every < 1):
            raise LayoutError(f"every: {every!r} is not a whole number of at least 1")
        ordered = sorted(_marked(tensors, mean_patterns), key=lambda tensor: tensor.name)
        _check_tensors(ordered)
        total = sum(tensor.elements for tensor in ordered)
        if total == 0:
            raise LayoutError("the model has no trainable elements: leave at least one parameter unfrozen")

        count, notes = fragments, []
        if every is not None and count > every:
            notes.append(f"fragments lowered from {count} to {every}: at most one per inner step of a turn")
            count = every
        most = max(1, total // ELEMENTS_PER_FRAGMENT)
        if count > most:
            notes.append(
                f"fragments lowered from {count} to {most}: the model has {total} trainable elements,"
                f" and a fragment needs {ELEMENTS_PER_FRAGMENT}"
            )
            count = most
        bins = _deal(ordered, count)
        return cls(tuple(ordered), tuple(_flat(ordered, pieces) for pieces in bins), "; ".join(notes))

    def __len__(self) -> int:
        return len(self.fragments)

    def elements(self, fragment: int) -> int:
        return self._sizes[fragment]

    @property
    def total_elements(self) -> int:
        return sum(self._sizes)

    def to_json(self) -> str:
        """One line of ASCII; ``from_json`` gives back an equal layout with the same digest."""
        document = self._document()
        document["note"] = self.note
        return json.dumps(document, separators=(",", ":"), ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Layout:
        """Read what ``to_json`` wrote. The text may come from the network: everything is checked (types, bounds, every
        element in exactly one piece, the size bound), and LayoutError says what is wrong."""
        document = _load(text)
        if type(document) is not dict or set(document) != {"format", "tensors", "fragments", "note"}:
            _refuse("expected an object with format, tensors, fragments and note")
        if document["format"] != FORMAT:
            _refuse(f"format {document['format']!r}, and this program reads {FORMAT}")
        if type(document["note"]) is not str or len(document["note"]) > 4096:
            _refuse("note is not a short text")
        tensors = [_read_tensor(row) for row in _rows(document["tensors"], MAX_TENSORS, "tensors")]
        _check_tensors(tensors)
        bins = [
            [_read_piece(row, tensors) for row in _rows(rows, MAX_TENSORS + MAX_LAYOUT_FRAGMENTS, "a fragment")]
            for rows in _rows(document["fragments"], MAX_LAYOUT_FRAGMENTS, "fragments")
        ]
        _check_assignment(tensors, bins)
        return cls(tuple(tensors), tuple(_flat(tensors, pieces) for pieces in bins), document["note"])

    def _document(self) -> dict[str, object]:
        index = {tensor.name: i for i, tensor in enumerate(self.tensors)}
        return {
            "format": FORMAT,
            "tensors": [[t.name, list(t.shape), t.dtype, int(t.mean)] for t in self.tensors],
            "fragments": [[[index[p.tensor], p.start, p.stop] for p in pieces] for pieces in self.fragments],
        }


def tensors_to_json(tensors: Sequence[Tensor]) -> bytes:
    """Tensors without their fragments, for somebody whose layout is another (``describe_difference``)."""
    rows = [[t.name, list(t.shape), t.dtype, int(t.mean)] for t in tensors]
    return json.dumps(rows, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def tensors_from_json(text: bytes) -> list[Tensor]:
    """Read what ``tensors_to_json`` wrote; the text may come from the network. Raises LayoutError."""
    tensors = [_read_tensor(row) for row in _rows(_load(text), MAX_TENSORS, "tensors")]
    _check_tensors(tensors)
    return tensors


def describe_difference(here: Sequence[Tensor], there: Sequence[Tensor]) -> str:
    """The first tensor, by name, that a model has otherwise than the job, in words: one that is missing, or of another
    shape or dtype; where there is none, one that is merged in another way. Empty: the tensors are the same."""
    mine, theirs = {t.name: t for t in here}, {t.name: t for t in there}
    for name in sorted(mine.keys() | theirs.keys()):
        one, other = mine.get(name), theirs.get(name)
        if other is None:
            return f"{name} is {_form(mine[name])} here, and the job's model has no such tensor"
        if one is None:
            return f"{name} is {_form(other)} in the job, and this model has no such tensor"
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"{name} is {_form(one)} here and {_form(other)} in the job"
    for name, one in sorted(mine.items()):
        if one.mean != theirs[name].mean:
            where, elsewhere = ("here", "in the job") if one.mean else ("in the job", "here")
            return f"{name} is merged by the mean {where} and not {elsewhere} (sync.merge.meanTensors)"
    return ""


def _form(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}"


_Range = tuple[int, int, int]  # index of the tensor in name order, start, stop


def _marked(tensors: Iterable[Tensor], patterns: Sequence[str]) -> list[Tensor]:
    """Copies with normal shapes and the final merge kind."""
    matching = re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns)) if patterns else None
    marked = []
    for tensor in tensors:
        mean = bool(tensor.mean or (matching and matching.match(tensor.name)))
        marked.append(replace(tensor, shape=tuple(tensor.shape), mean=mean))
    return marked


def _deal(tensors: Sequence[Tensor], count: int) -> list[list[_Range]]:
    """The pieces of each of ``count`` bins, in the order in which they were put there."""
    total = sum(tensor.elements for tensor in tensors)
    # f + s > 1.05·T/P and f + s >= T/P in integers, f and s times P.
    limit, mean = 21 * total, total

    def row_cut(index: int, start: int, fill: int) -> int:
        row = tensors[index].row_within(total // (20 * count))
        least = start - (fill * count - mean) // count  # where the bin holds the mean
        return -(-least // row) * row

    bins = _fill(tensors, [0] * count, lambda fill: 20 * count * fill > limit, row_cut)
    if all(bins):
        return bins
    # Some bin stayed empty: exact shares, cut at elements. The bins with the smaller
    # share begin one element full, so that all of them end at the same fill.
    share = -(-total // count)
    filled = [share - (total * (b + 1) // count - total * b // count) for b in range(count)]
    return _fill(tensors, filled, lambda fill: fill > share, lambda _, start, fill: start + share - fill)


def _fill(
    tensors: Sequence[Tensor],
    filled: list[int],
    too_full: Callable[[int], bool],
    cut_at: Callable[[int, int, int], int],
) -> list[list[_Range]]:
    """Deal into bins that hold ``filled`` elements already. ``too_full(fill)`` asks for
    a cut, and ``cut_at(tensor, start, fill)`` says where."""
    queue = [(-t.elements, i, 0) for i, t in enumerate(tensors) if t.elements]  # index: in order of name
    heapq.heapify(queue)
    room = [(fill, b) for b, fill in enumerate(filled)]
    heapq.heapify(room)
    bins: list[list[_Range]] = [[] for _ in filled]
    while queue:
        negative, index, start = heapq.heappop(queue)
        fill, b = room[0]
        stop = start - negative
        if too_full(fill + stop - start):
            cut = cut_at(index, start, fill)
            heapq.heappush(queue, (cut - stop, index, cut))
            stop = cut
        bins[b].append((index, start, stop))
        heapq.heapreplace(room, (fill + stop - start, b))
    return bins


def _flat(tensors: Sequence[Tensor], ranges: Iterable[_Range]) -> tuple[Piece, ...]:
    pieces, offset = [], 0
    for index, start, stop in sorted(ranges):
        pieces.append(Piece(tensors[index].name, start, stop, offset, mean=tensors[index].mean))
        offset += stop - start
    return tuple(pieces)


def _check_tensors(tensors: Sequence[Tensor]) -> None:
    total, previous = 0, None
    for t in tensors:
        if type(t.name) is not str or not 0 < len(t.name) <= MAX_NAME:
            raise LayoutError(f"tensor name {t.name!r}: expected 1 to {MAX_NAME} characters")
        if previous is not None and t.name <= previous:
            wrong = "named twice" if t.name == previous else "out of order, sort by name"
            raise LayoutError(f"tensor {t.name}: {wrong}")
        if t.dtype not in DTYPES:
            raise LayoutError(f"tensor {t.name}: dtype {t.dtype!r} is not one of {', '.join(sorted(DTYPES))}")
        if len(t.shape) > MAX_DIMENSIONS or any(type(n) is not int or n < 0 for n in t.shape):
            raise LayoutError(f"tensor {t.name}: {t.shape!r} is not a shape")
        total += t.elements
        if total > MAX_ELEMENTS or any(n > MAX_ELEMENTS for n in t.shape):
            raise LayoutError(f"tensor {t.name}: more than {MAX_ELEMENTS} elements in all")
        previous = t.name


def _check_assignment(tensors: Sequence[Tensor], bins: Sequence[Sequence[_Range]]) -> None:
    total = sum(tensor.elements for tensor in tensors)
    if not bins or total == 0:
        _refuse("no fragments or no elements")
    sizes = [sum(stop - start for _, start, stop in pieces) for pieces in bins]
    if min(sizes) < 1:
        _refuse(f"fragment {sizes.index(min(sizes))} is empty")
    if 20 * len(bins) * max(sizes) > 21 * total:
        _refuse(f"fragment {sizes.index(max(sizes))} holds more than 1.05 times the mean")
    reached = [0] * len(tensors)
    for index, start, stop in sorted(piece for pieces in bins for piece in pieces):
        if start != reached[index]:
            wrong = min(start, reached[index])
            _refuse(f"tensor {tensors[index].name}: elements from {wrong} are not in exactly one piece")
        reached[index] = stop
    for tensor, end in zip(tensors, reached, strict=True):
        if end != tensor.elements:
            _refuse(f"tensor {tensor.name}: elements from {end} are in no fragment")
    if any(list(pieces) != sorted(pieces) for pieces in bins):
        _refuse("pieces of a fragment are out of order")


def _load(text: str | bytes) -> object:
    if len(text) > MAX_JSON_BYTES:
        _refuse(f"{len(text)} bytes, and at most {MAX_JSON_BYTES} are read")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"layout: not JSON ({error})") from None


def _rows(value: object, most: int, what: str) -> list[object]:
    if type(value) is not list or len(value) > most:
        _refuse(f"{what}: expected a list of at most {most}")
    return value


def _read_tensor(row: object) -> Tensor:
    if type(row) is not list or len(row) != 4 or type(row[1]) is not list or type(row[2]) is not str:
        _refuse("a tensor is [name, shape, dtype, mean]")
    if type(row[3]) is not int or row[3] not in (0, 1):
        _refuse("a tensor's mean is 0 or 1")
    return Tensor(row[0], tuple(row[1]), row[2], bool(row[3]))


def _read_piece(row: object, tensors: Sequence[Tensor]) -> _Range:
    if type(row) is not list or len(row) != 3 or any(type(n) is not int for n in row):
        _refuse("a piece is [tensor, start, stop]")
    index, start, stop = row
    if not (0 <= index < len(tensors) and 0 <= start < stop <= tensors[index].elements):
        _refuse(f"piece {row} lies outside its tensor")
    return index, start, stop


def _refuse(message: str) -> NoReturn:
    raise LayoutError(f"layout: {message}")
