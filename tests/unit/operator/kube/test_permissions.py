"""What the operator says of rights that it lacks."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from diloco_operator.kube.permissions import Permissions
from diloco_operator.settings import Settings


class ScriptedApi:
    """Allows all but what ``refuses`` names by verb, resource and namespace."""

    def __init__(self, refuses: Any) -> None:
        self.refuses = refuses

    async def is_allowed(self, group: str, resource: str, verb: str, namespace: str | None) -> bool:
        return not self.refuses(verb, resource, namespace)


def said_of(refuses: Any, caplog: pytest.LogCaptureFixture) -> list[str]:
    settings = Settings(watch_namespaces=("here", "nowhere"), namespace="system")

    async def ask() -> None:
        asking = asyncio.create_task(Permissions(ScriptedApi(refuses), settings).run())  # type: ignore[arg-type]
        for _ in range(10):
            await asyncio.sleep(0)
        asking.cancel()

    with caplog.at_level(logging.INFO):
        asyncio.run(ask())
    return [record.getMessage() for record in caplog.records]


def test_a_namespace_that_does_not_exist_is_named_as_the_cause(caplog: pytest.LogCaptureFixture) -> None:
    """An API server answers for it as where every right is missing."""
    (line,) = said_of(lambda verb, resource, namespace: namespace == "nowhere", caplog)
    assert "may do nothing in namespace nowhere: make it, or take it out of --watch-namespaces" in line


def test_a_right_that_is_missing_is_named_with_its_verb_and_resource(caplog: pytest.LogCaptureFixture) -> None:
    lines = said_of(lambda verb, resource, namespace: (verb, resource) == ("patch", "services"), caplog)
    assert len(lines) == 2 and "may not patch services in namespace here" in lines[0]
