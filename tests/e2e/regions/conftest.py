"""The clusters of these tests: a hub and two regions, made once, taken away at the end unless KEEP is set.

What .ci/run has of them needs one region beside the hub, whose own cluster trains too."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ..clusters import delete_at_end
from ..jobs import Job
from .world import EU, HUB, US, Regions, RunJob, World


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.regions)


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    made = World(f"r{int(time.time()) % 100000}", tmp_path_factory.mktemp("regions"))
    delete_at_end(request.config, made.destroy_all)
    here = Path(__file__).parent
    tests = [item for item in request.session.items if here in item.path.parents]
    needs_three = any(item.get_closest_marker("ci") is None for item in tests)
    made.begin(HUB, *([EU] if needs_three else []), US)
    return made


@pytest.fixture
def run_job(world: World) -> Iterator[RunJob]:
    made = []

    def begin(name: str, regions: Regions, *but: str, issue: Sequence[str] = (), **spec: object) -> Job:
        made.append(name)
        return world.apply(world.document(name, regions, **spec), *but, issue=issue)  # type: ignore[arg-type]

    yield begin
    for name in made:
        world.delete(name)
