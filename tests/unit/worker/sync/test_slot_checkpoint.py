"""The slot's own checkpoint: written whole beside the training, refused unless it is this job's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from diloco_protocol.arrays.kernels import Bytes
from diloco_protocol.common.files import TEMPORARY
from diloco_worker.sync import slot_checkpoint
from diloco_worker.sync.inner_optimizers import InnerOptimizers
from diloco_worker.sync.optimizer_state import Origin, max_state_bytes, origin_of, restore, snapshot
from diloco_worker.sync.slot_checkpoint import SlotCheckpoint

VERSIONS = ((2, 5), (2, 4))
CLOCK = [1000.0]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time passes only as a test says."""
    monkeypatch.setattr(slot_checkpoint, "time", SimpleNamespace(monotonic=lambda: CLOCK[0]))


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def place(folder: Path, job: str = "a", layout: str = "d" * 64, limit: int | None = None) -> SlotCheckpoint:
    path = folder / "state" / "local-0.safetensors"
    return SlotCheckpoint(path, job, layout, 1e-6, limit=limit or max_state_bytes(trained()[0]))


def written(checkpoint: SlotCheckpoint, step: int = 7) -> None:
    model, optimizer = trained()
    encode = snapshot(InnerOptimizers(model, optimizer), checkpoint.origin(step, VERSIONS, 5))
    assert encode is not None
    keep(checkpoint, encode)


def keep(checkpoint: SlotCheckpoint, encode: Callable[[], Bytes]) -> None:
    CLOCK[0] += 1.0
    assert checkpoint.due
    checkpoint.start_write(encode, 0.0)
    checkpoint.close(timeout=3600.0)


def test_a_replacement_finds_what_its_predecessor_left(tmp_path: Path) -> None:
    assert place(tmp_path).load() is None
    checkpoint = place(tmp_path)
    written(checkpoint, step=7)
    leftover = tmp_path / "state" / f".local-0.safetensors.00{TEMPORARY}"
    leftover.write_bytes(b"half")  # of a process that was killed while it wrote
    written(checkpoint, step=8)
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["local-0.safetensors"]
    found = place(tmp_path).load()
    assert found is not None and found[1] == Origin("a", "d" * 64, 8, VERSIONS, trained=5)
    model, optimizer = trained()
    fresh = torch.optim.AdamW(model.parameters(), lr=0.1)
    restore(found[0], InnerOptimizers(model, fresh))
    for parameter in model.parameters():
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(fresh.state[parameter][key], value)


@pytest.mark.parametrize("other", [{"job": "b"}, {"layout": "e" * 64}, {"limit": 100}])
def test_another_jobs_or_too_large_a_file_is_not_used(
    tmp_path: Path, other: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    written(place(tmp_path))
    assert place(tmp_path, **other).load() is None  # type: ignore[arg-type]
    assert "is not used" in caplog.text


@pytest.mark.parametrize("origin", ["[1]", "[", '["a", "d", 1, [[1]], 5]', '["a", "d", 1, [["x", 1]], 5]', "null"])
def test_garbage_is_not_used(tmp_path: Path, origin: str, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = place(tmp_path)
    path = tmp_path / "state" / "local-0.safetensors"
    path.parent.mkdir()
    for data in (b"", b"\xff" * 64, header(f'{{"__metadata__":{{"origin":{quoted(origin)}}}}}')):
        path.write_bytes(data)
        assert checkpoint.load() is None
    assert caplog.text.count("is not used") == 3


def quoted(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'


def header(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


def test_a_disk_that_takes_nothing_costs_the_file_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "state").write_text("a file where the directory should be")
    checkpoint = place(tmp_path)
    for _ in range(5):
        written(checkpoint)
    keep(checkpoint, lambda: np.zeros(1 << 22, np.uint8))  # more than would be read back
    assert len(caplog.records) == 2, "each reason once"
    assert "training continues" in caplog.text
    (tmp_path / "state").unlink()
    written(checkpoint)
    keep(checkpoint, lambda: np.zeros(1 << 22, np.uint8))
    assert checkpoint.load() is not None, "what is too large replaces nothing"


def test_one_write_at_a_time_and_a_hundredth_of_the_time(tmp_path: Path) -> None:
    checkpoint = place(tmp_path)
    hold = threading.Event()

    def encode() -> Bytes:
        hold.wait()
        return np.ones(1, np.uint8)

    CLOCK[0] += 1.0
    assert checkpoint.due
    checkpoint.start_write(encode, 0.05)
    CLOCK[0] += 0.01
    assert not checkpoint.due, "it is being written"
    hold.set()
    checkpoint.close(timeout=3600.0)
    CLOCK[0] += 5.9
    assert not checkpoint.due, "it took 60 ms, so the next one is six seconds away"
    CLOCK[0] += 0.2
    assert checkpoint.due


def test_nothing_is_kept_without_a_working_directory() -> None:
    checkpoint = SlotCheckpoint(None, "a", "d", 1e-6, limit=1000)
    CLOCK[0] += 1.0
    assert not checkpoint.due
    assert checkpoint.load() is None


def test_the_newer_of_two_states() -> None:
    def age(step: int, *versions: tuple[int, int]) -> tuple[int, int, int]:
        return Origin("a", "d", step, versions).age

    assert age(9, (1, 5), (1, 5)) < age(1, (2, 4), (2, 0)), "a higher epoch"
    assert age(9, (1, 5), (1, 4)) < age(1, (1, 5), (1, 5)), "more merges"
    assert age(1, (1, 5)) < age(2, (1, 5)), "more steps"
    assert age(1) > (0, 0, 0)
    model, optimizer = trained()
    encode = snapshot(InnerOptimizers(model, optimizer))
    assert encode is not None and origin_of(encode()) is None


def test_a_failure_that_lasts_is_told_once_and_another_one_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = SlotCheckpoint(tmp_path / "state", "j", "L", every_seconds=60.0, limit=1 << 20)
    for free in range(50):  # once a minute
        checkpoint.report_failure(f"disk full: {free} bytes are free")
        CLOCK[0] += 60.0
    assert len(caplog.records) == 1
    checkpoint.report_failure("permission denied")
    assert len(caplog.records) == 2
    CLOCK[0] += slot_checkpoint.LOG_AGAIN_SECONDS
    checkpoint.report_failure("permission denied")
    assert len(caplog.records) == 3
    checkpoint.start_write(lambda: np.zeros(8, np.uint8), 0.0)
    checkpoint.close()
    checkpoint.report_failure("permission denied")
    assert len(caplog.records) == 4, "it had been written in between"
