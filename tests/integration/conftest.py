"""Makes the helper modules beside the tests importable (pytest imports tests by file, without a package),
and starts whole runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from runs import JOB, Run


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start a run of the tiny job, or of ``text``; whatever is left of it is killed at the end."""
    runs: list[Run] = []
    words = "the quick brown fox jumps over the lazy dog and runs away from the angry bear\n"
    (tmp_path / "corpus.txt").write_text(words * 2000)

    def make(
        *arguments: str,
        steps: int = 60,
        learners: int = 2,
        workdir: str | Path = "run",
        change: str = "",
        text: str | None = None,
    ) -> Run:
        job = tmp_path / "job.yaml"
        job.write_text(JOB.format(steps=steps, learners=learners) + change if text is None else text)
        run = Run(job, tmp_path / workdir, *arguments)
        runs.append(run)
        return run

    yield make
    for run in runs:
        run.ended_whole()
