"""Tasks of an event loop that end together."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any


async def cancel_tasks(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait until all of them have ended."""
    for task in tuple(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
