"""The fragment layout against a straightforward oracle, and its bounds as properties."""

from __future__ import annotations

import json
import math
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from call_counts import count_calls
from diloco_protocol.arrays import layout as layout_module
from diloco_protocol.arrays.layout import (
    FORMAT,
    Layout,
    LayoutError,
    Piece,
    Tensor,
    describe_difference,
    tensors_from_json,
    tensors_to_json,
)
from example_counts import share_of

SIZES = (("x", 69), ("y", 66))


def transformer(layers: int = 4, width: int = 64, vocabulary: int = 256) -> list[Tensor]:
    tensors = [
        Tensor("model.embed_tokens.weight", (vocabulary, width), "float32", True),
        Tensor("lm_head.weight", (vocabulary, width), "float32", True),
        Tensor("model.norm.weight", (width,), "float32"),
    ]
    for i in range(layers):
        attention = f"model.layers.{i}.self_attn"
        tensors += [Tensor(f"{attention}.{n}_proj.weight", (width, width), "float32") for n in "qkvo"]
        tensors += [Tensor(f"model.layers.{i}.mlp.{n}_proj.weight", (3 * width, width), "float32") for n in "gu"]
        tensors += [Tensor(f"model.layers.{i}.mlp.d_proj.weight", (width, 3 * width), "float32")]
        tensors += [Tensor(f"model.layers.{i}.norm{n}.weight", (width,), "float32") for n in (1, 2)]
    return tensors


def oracle(tensors: list[Tensor], count: int) -> list[list[tuple[str, int, int]]] | None:
    """Algorithm section 6 as it is written, slowly and in fractions; None if a bin stays empty."""
    mean = Fraction(sum(t.elements for t in tensors), count)
    shapes = {t.name: t for t in tensors}
    queue = [(t.name, 0, t.elements) for t in tensors if t.elements]
    bins: list[list[tuple[str, int, int]]] = [[] for _ in range(count)]
    while queue:
        queue.sort(key=lambda piece: (piece[1] - piece[2], piece[0], piece[1]))
        name, start, stop = queue.pop(0)
        fills = [sum(e - s for _, s, e in pieces) for pieces in bins]
        b = fills.index(min(fills))
        if fills[b] + stop - start > Fraction(21, 20) * mean:
            shape = shapes[name].shape
            sizes = [math.prod(shape[first:]) for first in range(1, len(shape))]
            row = max([size for size in sizes if size <= mean / 20], default=1)
            cut = next(c for c in range(start + 1, stop + 1) if c % row == 0 and fills[b] + c - start >= mean)
            queue.append((name, cut, stop))
            stop = cut
        bins[b].append((name, start, stop))
    return [sorted(pieces) for pieces in bins] if all(bins) else None


def ranges(layout: Layout) -> list[list[tuple[str, int, int]]]:
    return [[(p.tensor, p.start, p.stop) for p in pieces] for pieces in layout.fragments]


def check(layout: Layout, tensors: list[Tensor]) -> None:
    """Every element in exactly one fragment, offsets without gaps, the bound of 1.05."""
    seen: dict[str, list[tuple[int, int]]] = {t.name: [] for t in tensors}
    for p, pieces in enumerate(layout.fragments):
        offset = 0
        for piece in pieces:
            assert piece.offset == offset and piece.start < piece.stop
            offset += piece.elements
            seen[piece.tensor].append((piece.start, piece.stop))
        assert offset == layout.elements(p) > 0
    for tensor in tensors:
        reached = 0
        for start, stop in sorted(seen[tensor.name]):
            assert start == reached
            reached = stop
        assert reached == tensor.elements
    total = sum(t.elements for t in tensors)
    assert layout.total_elements == total
    assert max(layout.elements(p) for p in range(len(layout))) * len(layout) <= Fraction(21, 20) * total


shapes = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple),
    st.tuples(st.integers(1, 2000), st.integers(1, 8)),
)
models = st.lists(shapes, min_size=1, max_size=30).map(
    lambda sizes: [Tensor(f"t{i % 7}.{i}", shape, "float32") for i, shape in enumerate(sizes)]
)


@settings(max_examples=share_of(150), deadline=None)
@given(models, st.integers(1, 30))
def test_any_model_is_balanced_and_covered_once(tensors: list[Tensor], count: int) -> None:
    total = sum(t.elements for t in tensors)
    if total == 0:
        with pytest.raises(LayoutError, match="no trainable elements"):
            Layout.build(tensors, count)
        return
    layout = Layout.build(tensors, count)
    assert len(layout) == (count if total >= 40 * count else max(1, total // 40))
    assert bool(layout.note) == (len(layout) != count)
    check(layout, tensors)


@settings(max_examples=share_of(60), deadline=None)
@given(models, st.integers(1, 12))
def test_the_deal_is_the_algorithm_of_section_6(tensors: list[Tensor], count: int) -> None:
    if sum(t.elements for t in tensors) < 40 * count:
        return
    expected = oracle(tensors, count)
    if expected is not None:
        assert ranges(Layout.build(tensors, count)) == expected


@settings(max_examples=share_of(40), deadline=None)
@given(models, st.integers(1, 30), st.randoms(use_true_random=False))
def test_order_of_the_tensors_does_not_matter_and_json_is_exact(
    tensors: list[Tensor], count: int, order: random.Random
) -> None:
    if sum(t.elements for t in tensors) == 0:
        return
    layout = Layout.build(tensors, count)
    shuffled = tensors[:]
    order.shuffle(shuffled)
    assert Layout.build(shuffled, count) == layout
    again = Layout.from_json(layout.to_json())
    assert again == layout and again.digest == layout.digest and again.to_json() == layout.to_json()


def test_pinned_so_that_it_is_the_same_on_every_platform() -> None:
    layout = Layout.build(transformer(), 24, 24, ["*.norm*"])
    assert layout.digest == "0d183aa4cf5390a1c41f422674a81502491adfae993dfde2ba77a5b2c375f76e"
    # Names beyond ASCII, a scalar, an empty tensor, cuts inside rows.
    odd = [
        Tensor("größe", (), "bfloat16"),
        Tensor("層.weight", (3, 999), "float32"),
        Tensor("Z", (0, 5), "float16"),
        Tensor("z", (5000,), "float64", True),
    ]
    assert Layout.build(odd, 7).digest == "6972bddb573853e1e01d0fd0ccb7b900b30114b5a7c901f3de7c5b2f2040581f"


@pytest.mark.parametrize("tensors", range(1, 24))
def test_no_fragment_is_empty_when_whole_tensors_fill_fewer_bins(tensors: int) -> None:
    # 23 equal tensors are 1.043 means each: by the plain rule the 24th bin stays empty.
    model = [Tensor(f"layer{i}", (481, 7), "float32") for i in range(tensors)]
    layout = Layout.build(model, 24)
    assert len(layout) == 24 and not layout.note
    check(layout, model)


def test_cuts_are_at_rows_where_rows_are_small() -> None:
    model = [Tensor("embedding", (10_000, 16), "float32", True), Tensor("w", (100, 100), "float32")]
    layout = Layout.build(model, 8)
    check(layout, model)
    cuts = {p.stop for pieces in layout.fragments for p in pieces if p.tensor == "embedding"}
    assert len(cuts) > 5 and all(cut % 16 == 0 for cut in cuts)


def test_cuts_are_at_rows_of_an_expert_where_one_expert_is_large() -> None:
    """Parts of rows are no matrices, and isotropic merges would leave all experts as they are."""
    model = [Tensor("experts", (4, 192, 48), "float32"), Tensor("w", (100, 100), "float32")]
    layout = Layout.build(model, 8)
    check(layout, model)
    cuts = {p.stop for pieces in layout.fragments for p in pieces if p.tensor == "experts"}
    assert len(cuts) > 5 and all(cut % 48 == 0 for cut in cuts)
    assert any(cut % (192 * 48) for cut in cuts)


def test_a_row_of_a_twentieth_of_a_fragment_is_still_cut_between_rows() -> None:
    """The mean is 100 and a's rows have 5 elements; the cut that reaches the mean would be at 34."""
    layout = Layout.build([Tensor("a", (13, 5), "float32"), *(Tensor(n, (s,), "float32") for n, s in SIZES)], 2)
    assert [(piece.start, piece.stop) for pieces in layout.fragments for piece in pieces if piece.tensor == "a"] == [
        (35, 65),
        (0, 35),
    ]


def test_fragments_are_lowered_and_said() -> None:
    small = Layout.build([Tensor("w", (10, 10), "float32")], 24)
    assert len(small) == 2 and "from 24 to 2" in small.note and "100" in small.note
    steps = Layout.build(transformer(), 24, 6)
    assert len(steps) == 6 and "from 24 to 6" in steps.note
    assert Layout.build([Tensor("w", (), "float32")], 3).fragments == ((Piece("w", 0, 1, 0, mean=False),),)


def test_merge_kind_by_flag_or_pattern_and_in_the_digest() -> None:
    model = transformer()
    layout = Layout.build(model, 4, None, ["model.layers.[01].*", "*NORM*"])
    kinds = {t.name: t.mean for t in layout.tensors}
    assert kinds["lm_head.weight"] and kinds["model.layers.1.mlp.g_proj.weight"]
    assert not kinds["model.layers.2.mlp.g_proj.weight"]
    assert not kinds["model.norm.weight"]  # patterns are case-sensitive everywhere
    assert all(p.mean == kinds[p.tensor] for pieces in layout.fragments for p in pieces)
    plain = Layout.build(model, 4)
    assert ranges(plain) == ranges(layout) and plain.digest != layout.digest


@pytest.mark.parametrize("field", ["name", "shape", "dtype", "assignment"])
def test_the_digest_covers(field: str) -> None:
    base = Layout.build([Tensor("a", (10, 20), "float32"), Tensor("b", (7,), "float32")], 2)
    other = {
        "name": Layout.build([Tensor("a", (10, 20), "float32"), Tensor("c", (7,), "float32")], 2),
        "shape": Layout.build([Tensor("a", (20, 10), "float32"), Tensor("b", (7,), "float32")], 2),
        "dtype": Layout.build([Tensor("a", (10, 20), "bfloat16"), Tensor("b", (7,), "float32")], 2),
        "assignment": Layout.build([Tensor("a", (10, 20), "float32"), Tensor("b", (7,), "float32")], 3),
    }[field]
    assert other.digest != base.digest


@pytest.mark.parametrize(
    ("tensors", "what"),
    [
        ([Tensor("a", (2,), "float32"), Tensor("a", (3,), "float32")], "a: named twice"),
        ([Tensor("a", (2,), "int64")], "dtype 'int64'"),
        ([Tensor("a", (2, -1), "float32")], "not a shape"),
        ([Tensor("", (2,), "float32")], "tensor name"),
        ([Tensor("a", (1 << 30, 1 << 30), "float32")], "more than"),
        ([Tensor("a", (0,), "float32")], "unfrozen"),
    ],
)
def test_impossible_models_are_refused(tensors: list[Tensor], what: str) -> None:
    with pytest.raises(LayoutError, match=what):
        Layout.build(tensors, 2)


@pytest.mark.parametrize("fragments", [0, -1, True, 2.0])
def test_impossible_counts_are_refused(fragments: int) -> None:
    with pytest.raises(LayoutError, match="fragments"):
        Layout.build(transformer(), fragments)


def corrupt(change: str) -> str:
    document = json.loads(Layout.build(transformer(1), 4).to_json())
    bins, tensors = document["fragments"], document["tensors"]
    if change == "twice":
        bins[1].append(bins[0][0])
    elif change == "missing":
        bins[0].pop()
    elif change == "overlap":
        bins[0][0][1] -= 1 if bins[0][0][1] else 0
        bins[0][0][2] += 1
    elif change == "outside":
        bins[0][0][2] = 10**9
    elif change == "negative":
        bins[0][0][1] = -1
    elif change == "empty fragment":
        bins.append([])
    elif change == "unbalanced":
        bins[0] = sorted(bins[0] + bins.pop())
    elif change == "order":
        next(b for b in bins if len(b) > 1).reverse()
    elif change == "float":
        bins[0][0][2] = float(bins[0][0][2])
    elif change == "bool":
        tensors[0][3] = True
    elif change == "tensors out of order":
        tensors.reverse()
    elif change == "huge shape":
        tensors[0][1] = [10**12, 10**12]
    elif change == "nested shape":
        tensors[0][1] = [[1]]
    elif change == "name":
        tensors[0][0] = 7
    elif change == "format":
        document["format"] = 2
    elif change == "extra":
        document["more"] = 1
    elif change == "note":
        document["note"] = "x" * 5000
    return json.dumps(document)


@pytest.mark.parametrize(
    "change",
    [
        "twice",
        "missing",
        "overlap",
        "outside",
        "negative",
        "empty fragment",
        "unbalanced",
        "order",
        "float",
        "bool",
        "tensors out of order",
        "huge shape",
        "nested shape",
        "name",
        "format",
        "extra",
        "note",
    ],
)
def test_a_layout_from_the_network_is_checked(change: str) -> None:
    Layout.from_json(corrupt("nothing"))
    with pytest.raises(LayoutError):
        Layout.from_json(corrupt(change))


@pytest.mark.promise("Overlapping pieces of a received layout are refused, however small the overlap")
def test_pieces_that_overlap_by_less_than_the_bound_of_sizes_are_refused() -> None:
    rows = [["w", [100], "float32", 0]]
    for bins in ([[[0, 0, 52]], [[0, 48, 100]]], [[[0, 0, 49]], [[0, 51, 100]]]):
        document = {"format": FORMAT, "tensors": rows, "fragments": bins, "note": ""}
        with pytest.raises(LayoutError, match="are not in exactly one piece"):
            Layout.from_json(json.dumps(document))


def test_a_text_that_is_too_large_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Layout.build(transformer(1), 4).to_json()
    monkeypatch.setattr(layout_module, "MAX_JSON_BYTES", len(text) - 1)
    with pytest.raises(LayoutError, match=f"{len(text)} bytes, and at most {len(text) - 1} are read"):
        Layout.from_json(text)


def test_lists_and_shapes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Layout.build(transformer(1), 4).to_json()
    monkeypatch.setattr(layout_module, "MAX_TENSORS", 3)
    with pytest.raises(LayoutError, match="tensors: expected a list of at most 3"):
        Layout.from_json(text)
    for shape in ((1,) * 65, (0, 1 << 60)):
        with pytest.raises(LayoutError, match="tensor deep"):
            Layout.build([Tensor("a", (8,), "float32"), Tensor("deep", shape, "float32")], 1)


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", "[" * 100_000, b"\xff\xfe{", '{"format": 1}', "1" * 5000])
def test_what_is_no_layout_at_all_is_refused(text: str | bytes) -> None:
    with pytest.raises(LayoutError):
        Layout.from_json(text)


def test_a_layout_of_many_tensors_takes_work_in_proportion() -> None:
    def model(tensors: int) -> list[Tensor]:
        source = random.Random(3)
        return [
            Tensor(f"model.layers.{i}.weight", (source.randint(1, 500), source.randint(1, 300)), "float32")
            for i in range(tensors)
        ]

    def build(tensors: list[Tensor]) -> Layout:
        layout = Layout.build(tensors, 24, 24, ["*.77.*"])
        assert Layout.from_json(layout.to_json()) == layout
        return layout

    few, many = model(500), model(5_000)
    assert count_calls(lambda: build(many)) < 11 * count_calls(lambda: build(few))
    whole = model(20_000)
    check(build(whole), whole)


def test_a_fragment_may_be_exactly_as_large_as_the_bound() -> None:
    layout = Layout.build([Tensor("x", (105,), "float32"), Tensor("y", (95,), "float32")], 2)
    assert ranges(layout) == [[("x", 0, 105)], [("y", 0, 95)]]


def test_a_piece_without_elements_is_refused() -> None:
    bins = [[[0, 0, 50]], [[0, 50, 50], [0, 50, 100]]]
    document = {"format": FORMAT, "tensors": [["w", [100], "float32", 0]], "fragments": bins, "note": ""}
    with pytest.raises(LayoutError, match="lies outside its tensor"):
        Layout.from_json(json.dumps(document))


HERE = [Tensor("a", (4, 40), "float32"), Tensor("b", (7,), "float32", True)]


@pytest.mark.parametrize(
    ("here", "words"),
    [
        (HERE, ""),
        ([Tensor("a", (4, 41), "float32"), HERE[1]], "a is [4, 41] float32 here and [4, 40] float32 in the job"),
        ([HERE[0], Tensor("b", (7,), "bfloat16", True)], "b is [7] bfloat16 here and [7] float32 in the job"),
        ([HERE[0]], "b is [7] float32 in the job, and this model has no such tensor"),
        ([HERE[0], Tensor("aa", (), "float32"), HERE[1]], "aa is [] float32 here, and the job's model has no"),
        ([HERE[0], Tensor("b", (7,), "float32")], "b is merged by the mean in the job and not here"),
        ([Tensor("a", (4, 40), "float32", True), HERE[1]], "a is merged by the mean here and not in the job"),
        ([Tensor("a", (4, 40), "float32", True), Tensor("b", (8,), "float32")], "b is [8] float32 here"),
    ],
)
def test_the_first_tensor_that_differs_is_named(here: list[Tensor], words: str) -> None:
    said = describe_difference(here, HERE)
    assert said.startswith(words) and bool(said) == bool(words)


def test_tensors_travel_alone_and_are_checked() -> None:
    tensors = list(Layout.build(transformer(), 8).tensors)
    assert tensors_from_json(tensors_to_json(tensors)) == tensors
    for text in (b"", b"[", b"{}", b'[["a"]]', b'[["b", [1], "float32", 0], ["a", [1], "float32", 0]]', b"[" * 10_000):
        with pytest.raises(LayoutError):
            tensors_from_json(text)
