"""A syncer for learners in the test's own process, and torch as it was before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_process import Syncer, make_job


@pytest.fixture
def syncer(tmp_path: Path) -> Iterator[Callable[..., Syncer]]:
    running: list[Syncer] = []

    def start(
        sync: dict[str, Any],
        stop: dict[str, Any],
        learners: int = 1,
        service: dict[str, Any] | None = None,
        stall_seconds: float | None = 600.0,
    ) -> Syncer:
        made = Syncer(tmp_path, make_job(sync, stop, learners, service=service, stall_seconds=stall_seconds))
        running.append(made)
        made.start()
        return made

    yield start
    for one in running:
        one.stop()


@pytest.fixture
def torch_settings() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
