"""Safetensors in mapped files: what the safetensors library writes and reads, without a second copy in memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from diloco_worker.net import tensor_file
from diloco_worker.net.tensor_file import NotTensors, map_new_file, read_header, read_tensors, write_tensors
from own_process import anonymous_bytes, run_in_own_process

TENSORS = {
    "w|exp_avg": torch.randn(7, 5, generator=torch.Generator().manual_seed(1)),
    "w|step": torch.tensor(3.0),
    "b": torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(),  # not contiguous
    "codes": torch.arange(9, dtype=torch.uint8),
    "mask": torch.tensor([True, False]),
    "none": torch.empty(0, 4),
}


def test_the_library_reads_what_is_written_and_the_other_way_round(tmp_path: Path) -> None:
    data = write_tensors(TENSORS, {"format": "1"}, tmp_path)
    assert not list(tmp_path.iterdir()), "the file has no name"
    assert read_header(data)[0] == {"format": "1"}
    contiguous = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    for found in (load(data.tobytes()), read_tensors(data), read_tensors(bytearray(save(contiguous)))):
        assert found.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_many_small_tensors_are_copied_together() -> None:
    """The training thread of a learner on a CPU copies them, and a copy has a cost however small it is."""
    small = {f"{i}|{key}": torch.full((i % 7,), float(i)) for i in range(1000) for key in ("a", "b")}
    tensors = {**small, "large": torch.ones(100_000), "step": torch.tensor(3), "other": torch.ones(2)}
    assert len(list(tensor_file._pieces(tensors.values()))) == -(-len(small) // tensor_file._JOINED) + 3
    found = read_tensors(write_tensors(tensors, {}))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.promise(
    "Sending and receiving an optimizer's state, and the slot's own checkpoint, need no second copy in "
    "memory: one tensor at a time, through mapped files"
)
def test_writing_and_reading_take_one_tensors_memory_at_most(tmp_path: Path) -> None:
    run_in_own_process(write_and_read, tmp_path)


def write_and_read(folder: str) -> None:
    tensors = {str(n): torch.full((1 << 20,), float(n)) for n in range(32)}  # 128 MiB
    write_tensors({"warm": tensors["0"]}, {}, Path(folder))
    before = anonymous_bytes()
    data = write_tensors(tensors, {}, Path(folder))
    views = read_tensors(data)
    assert all(bool(torch.isfinite(view).all()) for view in views.values())
    assert anonymous_bytes() - before < 24 << 20


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    data = write_tensors(TENSORS, {}, tmp_path).tobytes()
    size = int.from_bytes(data[:8], "little")
    rows = json.loads(data[8 : 8 + size])

    def changed(**row: object) -> bytes:
        text = json.dumps({**rows, "w|exp_avg": {**rows["w|exp_avg"], **row}}).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + size :]

    for broken in (
        *(b"", data[:7], data[:40], data[:-1], data + b"x", b"\xff" * 64, data[:8] + b"[]" + data[10:]),
        *(changed(dtype="F8"), changed(shape=[7, 6]), changed(shape=[-7, -5]), changed(data_offsets=[4, 144])),
        *(changed(shape="x"), changed(data_offsets=None)),
    ):
        with pytest.raises(NotTensors):
            read_tensors(bytearray(broken))


def test_a_file_without_room_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        map_new_file(1 << 60, tmp_path)
    assert map_new_file(0).size == 0
