"""How many downloads a process may have at a time: each holds the version that it sends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from diloco_protocol.wire.bulk_calls import CallFailed

MAX_PER_PROCESS = 16  # parts that are sent at the same time; the others wait, and hold nothing
MAX_WAITING = 2048  # of one process: a newcomer asks for all of its fragments at once, over several connections


@dataclass(slots=True)
class _Calls:
    """The calls of one process, running and waiting."""

    count: int = 0
    running: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_PER_PROCESS))


class DownloadQueue:
    """The download calls of all processes; what one of them does holds up no other."""

    def __init__(self) -> None:
        self._calls: dict[str, _Calls] = {}

    def __len__(self) -> int:
        return sum(calls.count for calls in self._calls.values())

    @contextlib.asynccontextmanager
    async def await_turn(self, process: str) -> AsyncIterator[None]:
        """Wait until the process has fewer than ``MAX_PER_PROCESS`` running; this one runs within the context. Raises
        CallFailed."""
        calls = self._calls.setdefault(process, _Calls())
        if calls.count >= MAX_PER_PROCESS + MAX_WAITING:
            raise CallFailed("too many downloads at once: try again later", final=False)
        calls.count += 1
        try:
            async with calls.running:
                yield
        finally:
            calls.count -= 1
            if not calls.count:
                del self._calls[process]
