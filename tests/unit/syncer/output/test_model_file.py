"""The model file that is made while it is sent: safetensors itself reads it as what went in."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.torch
import torch
import xxhash

from diloco_protocol.arrays.layout import Layout, Tensor
from diloco_syncer.output import model_file
from diloco_syncer.output.model_file import ModelFile, NotSafetensors, as_float32, frozen_entries, read_header

TENSORS = [
    Tensor("embed", (40, 16), "float32", True),
    Tensor("w.0", (64, 16), "bfloat16"),
    Tensor("w.1", (7,), "float32"),
]


def fragments(layout: Layout, whole: dict[str, np.ndarray]) -> list[np.ndarray]:
    made = []
    for index, pieces in enumerate(layout.fragments):
        theta = np.empty(layout.elements(index), np.float32)
        for piece in pieces:
            theta[piece.offset : piece.offset + piece.elements] = whole[piece.tensor].reshape(-1)[
                piece.start : piece.stop
            ]
        made.append(theta)
    return made


@pytest.mark.parametrize("count", [1, 5])
def test_it_is_the_model_whatever_the_fragments(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_file, "CHUNK_ELEMENTS", 100)  # pieces of several chunks
    layout = Layout.build(TENSORS, count)
    random = np.random.default_rng(1)
    whole = {t.name: random.standard_normal(t.shape).astype(np.float32) for t in TENSORS}
    frozen = {
        "a.table": torch.randn(9, 30, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
        "z.scale": torch.tensor([1.5, -2.25], dtype=torch.float64),
        "z.ids": torch.arange(5),
    }
    blob = np.frombuffer(safetensors.torch.save(frozen), np.uint8)
    file = ModelFile("tiny", 3, layout, fragments(layout, whole), versions=[4] * count, frozen=blob)
    data = b"".join(bytes(chunk) for chunk in file.chunks())
    assert len(data) == file.length
    assert xxhash.xxh3_64_intdigest(data) == file.checksum()
    assert max(len(bytes(c)) for c in list(file.chunks())[1:]) <= 400
    read = safetensors.torch.load(data)
    assert sorted(read) == sorted([*whole, *frozen])
    for name, values in whole.items():
        assert torch.equal(read[name], torch.from_numpy(values))
    for name, tensor in frozen.items():
        assert read[name].dtype == torch.float32 and torch.equal(read[name], tensor.float())
    length = int.from_bytes(data[:8], "little")
    metadata = read_header(data[8 : 8 + length])[1]
    assert metadata == {
        "format": "pt",
        "job": "tiny",
        "epoch": "3",
        "versions": json.dumps([4] * count),
        "layout": layout.digest,
    }


def test_every_type_that_torch_saves_becomes_its_float32() -> None:
    values = [0.0, 1.0, 2.0, 100.0]
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    ):
        tensor = torch.tensor(values).to(dtype)
        data = np.frombuffer(safetensors.torch.save({"a": tensor}), np.uint8)
        entries, begin = frozen_entries(data)
        found = as_float32(data[begin:].copy(), entries[0].dtype)
        assert torch.equal(torch.from_numpy(found), tensor.float()), dtype


def header(**changes: object) -> bytes:
    row = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | changes
    return json.dumps({"a": row, "b": {"dtype": "F32", "shape": [], "data_offsets": [24, 28]}}).encode()


def test_a_header_is_read() -> None:
    entries, metadata = read_header(header())
    assert [(e.name, e.shape, e.start, e.stop, e.elements) for e in entries] == [
        ("a", (2, 3), 0, 24, 6),
        ("b", (), 24, 28, 1),
    ]
    assert metadata == {}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'{"a": 1}',
        b'{"a": {}}',
        header(dtype="F4"),
        header(shape=[2, 4]),
        header(shape=[-2, -3]),
        header(data_offsets=[4, 28]),
        header(data_offsets=[0, 20]),
        header(data_offsets=[0]),
        header(shape="ab"),
        header(shape=None),
        b"[" * 100_000,
    ],
)
def test_a_header_that_makes_no_sense_is_refused(data: bytes) -> None:
    with pytest.raises(NotSafetensors):
        read_header(data)


def test_a_file_that_is_cut_off_is_refused() -> None:
    data = np.frombuffer(safetensors.torch.save({"a": torch.zeros(10)}), np.uint8)
    for length in (0, 5, 20, data.size - 1):
        with pytest.raises(NotSafetensors):
            frozen_entries(data[:length])
