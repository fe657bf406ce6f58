"""Metrics that cannot be written are dropped with one warning; training goes on."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco_worker import metrics_file
from diloco_worker.metrics_file import MetricsFile


def test_lines_are_written_whole_and_within_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(metrics_file, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    path = tmp_path / "metrics" / "a.jsonl"
    file = MetricsFile(path)
    for step in range(5):
        file.add({"step": step})
    assert path.read_text() == '{"step": 0}\n'  # the first one at once, the others with the next flush
    now[0] += 1.0
    file.add({"step": 4.5})
    assert len(path.read_text().splitlines()) == 6, "a second later all are"
    file.flush()
    other = MetricsFile(path)  # the next process of the same slot
    other.add({"step": 5}, now=True)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2, 3, 4, 4.5, 5]
    MetricsFile(None).add({"step": 0})


def test_a_full_disk_costs_lines_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    file = MetricsFile(Path("/dev/full"))
    with caplog.at_level(logging.WARNING):
        for step in range(1000):
            file.add({"step": step}, now=True)
    assert len(caplog.records) == 1 and "No space left on device" in caplog.text


def test_written_again_when_it_can_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_file, "AGAIN_SECONDS", 0.0)
    (tmp_path / "metrics").write_text("a file where the directory should be")
    file = MetricsFile(tmp_path / "metrics" / "a.jsonl")
    with caplog.at_level(logging.WARNING):
        file.add({"step": 0}, now=True)
        file.add({"step": 1}, now=True)
        (tmp_path / "metrics").unlink()
        file.add({"step": 2}, now=True)
    assert (tmp_path / "metrics" / "a.jsonl").read_text() == '{"step": 2}\n'
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "metrics are not written",
        "metrics are written again",
    ]
