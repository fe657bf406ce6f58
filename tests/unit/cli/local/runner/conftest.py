from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scripted_run import ScriptedRun


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ScriptedRun]:
    """Makes the run of one test. ``chaos``: its faults; ``overrides``: fields of the job, with spaces between them."""

    def make(chaos: str = "", overrides: str = "") -> ScriptedRun:
        return ScriptedRun(tmp_path, monkeypatch, chaos, overrides)

    return make
