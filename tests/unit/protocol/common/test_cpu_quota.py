"""Threads follow the container's quota."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from diloco_protocol.common.cpu_quota import quota, usable_cores


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "30000 100000\n"}, 0.3),
        ({"cpu.max": "max 100000\n"}, math.inf),
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu/cpu.cfs_quota_us": "30000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ({"cpu.max": "nonsense"}, math.inf),
        ({}, math.inf),
    ],
)
def test_the_quota_is_read(tmp_path: Path, files: dict[str, str], cores: float) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert quota(tmp_path) == pytest.approx(cores)
    here = len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path) == (here if math.isinf(cores) else min(here, math.ceil(cores)))


def test_a_quota_is_rounded_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert usable_cores(tmp_path) == 2
