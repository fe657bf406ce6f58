"""Parts of whole tensors: what of any range a process holds, against numpy."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_worker.core.parts import Place, TensorPart
from example_counts import share_of


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int], list[int]]:
    """A shape, and the offset and size of a box in it that is cut in the first dimension and in one other at most."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    cut = {0, draw(st.integers(0, len(shape) - 1))}
    offset, size = [0] * len(shape), list(shape)
    for dimension in cut:
        offset[dimension] = draw(st.integers(0, shape[dimension]))
        size[dimension] = draw(st.integers(0, shape[dimension] - offset[dimension]))
    return shape, offset, size


@given(box=boxes(), data=st.data())
@settings(max_examples=share_of(600), deadline=None)
def test_a_cut_is_what_the_box_and_the_range_have_in_common(
    box: tuple[tuple[int, ...], list[int], list[int]], data: st.DataObject
) -> None:
    shape, offset, size = box
    whole = np.arange(math.prod(shape)).reshape(shape)
    own = whole[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))]
    part = TensorPart.box(shape, offset, size)
    assert part is not None and part.elements == own.size
    start = data.draw(st.integers(0, whole.size))
    stop = data.draw(st.integers(start, whole.size))
    held, vector = torch.from_numpy(own.copy()).view(-1), torch.full((stop - start + 3,), -1)
    for mine, there in part.cut(start, stop):
        assert mine.elements == there.elements > 0
        target = there.shifted(3).of(vector)
        assert bool((target == -1).all()), "no element comes twice"
        target.copy_(mine.of(held))
    expected = np.where(np.isin(whole.ravel(), own.ravel()), whole.ravel(), -1)[start:stop]
    assert vector[3:].tolist() == expected.tolist()


def test_a_box_that_is_cut_in_two_later_dimensions_has_no_form() -> None:
    assert TensorPart.box((4, 4, 4), (0, 0, 0), (4, 2, 2)) is None
    assert TensorPart.box((), (), ()) == TensorPart.whole(1)


def test_places_in_bytes_and_packed() -> None:
    place = Place(2, 3, rows=2, stride=5)
    assert place.elements == 6
    assert place.scaled(4) == Place(8, 12, rows=2, stride=20)
    assert place.packed(7) == Place(7, 3, rows=2, stride=3)
    assert place.of(torch.arange(20)).tolist() == [[2, 3, 4], [7, 8, 9]]
