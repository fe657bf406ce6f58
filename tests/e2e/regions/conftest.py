"""The clusters of these tests: a hub and two regions, made once, taken away at the end unless KEEP is set."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ..jobs import Job
from .world import EU, HUB, US, RunJob, World


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.regions)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(f"r{int(time.time()) % 100000}", tmp_path_factory.mktemp("regions"))
    made.begin(HUB, EU, US)
    yield made
    if not os.environ.get("KEEP"):
        with ThreadPoolExecutor(len(made.clusters)) as pool:
            list(pool.map(made.destroy, list(made.clusters)))


@pytest.fixture
def run_job(world: World) -> Iterator[RunJob]:
    made = []

    def begin(name: str, regions: dict[str, int], *but: str, issue: Sequence[str] = (), **spec: object) -> Job:
        made.append(name)
        return world.apply(world.document(name, regions, **spec), *but, issue=issue)  # type: ignore[arg-type]

    yield begin
    for name in made:
        world.delete(name)
