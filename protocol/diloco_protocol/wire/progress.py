"""When a transfer is given up: by the bytes of its session, not by a clock of its own.

Theory of operation. All streams of a session share one link, and which of them it serves next is the link's choice. So
a stream that gets nothing while others are served has not stalled; it waits. It is given up when nothing of its session
has moved for ``limits.STALL_SECONDS``. One connection may also stop beside others that go on. A stream is given up for
that when it had nothing for as long, and ``OVERTAKEN_BYTES`` of its session passed it by.

``Progress`` is plain code: the loop's time comes in as an argument. ``await_progress`` is the only wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from diloco_protocol.wire import limits
from diloco_protocol.wire.link_share import SharedLink

T = TypeVar("T")
OVERTAKEN_BYTES = limits.MAX_PART_BYTES  # more than the largest chunk of each stream that a session can have


class Stalled(limits.WireError):
    """Nothing came, or nothing was taken, for too long."""


class Progress:
    """The bulk bytes of one session in one direction. ``moved``: how many so far; ``rate`` of those since the first
    stream began. ``link``: what they go over."""

    def __init__(self) -> None:
        self.link = SharedLink()
        self.moved = 0
        self._last = float("-inf")
        self._begun: float | None = None

    def begin(self, now: float) -> None:
        """A stream begins."""
        if self._begun is None:
            self._begun = now

    def record_bytes(self, count: int, now: float) -> None:
        """So many bytes have moved."""
        self.moved += count
        self._last = now

    def rate(self, now: float) -> float | None:
        """Bytes per second, pauses between transfers included; None: nothing has moved."""
        return self.moved / max(now - self._begun, 1e-3) if self.moved and self._begun is not None else None

    def seconds_left(self, now: float, begun: float, moved: int, patience: float) -> float:
        """How long a stream is still waited for that has had nothing since ``begun``, when ``moved`` bytes of the
        session had. Not above 0: it is given up."""
        overtaken = self.moved - moved >= OVERTAKEN_BYTES
        return (begun if overtaken else max(begun, self._last)) + patience - now


async def await_progress(awaitable: Awaitable[T], progress: Progress, patience: float | None = None) -> T:
    """Await a stream's next bytes, or that it takes ours, for as long as its session moves. ``patience``: seconds
    without anything (``STALL_SECONDS``). Raises Stalled; then the awaitable is cancelled."""
    loop = asyncio.get_running_loop()
    begun, moved = loop.time(), progress.moved
    patience = limits.STALL_SECONDS if patience is None else patience
    first = progress.seconds_left(begun, begun, moved, patience=patience)
    looking = loop.call_later(first, lambda: look_again())

    def look_again() -> None:
        nonlocal looking
        left = progress.seconds_left(loop.time(), begun, moved, patience=patience)
        if left <= 0:
            limit.reschedule(loop.time())
        else:
            looking = loop.call_later(left, look_again)

    try:
        async with asyncio.timeout(None) as limit:
            return await awaitable
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise Stalled(f"no bytes for {loop.time() - begun:.0f} s") from error
    finally:
        looking.cancel()
