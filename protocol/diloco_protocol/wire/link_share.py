"""What newcomers have of a link that rounds use too: a share, and the oldest first.

A part of a transfer is *of a round* (a push, a version) or *a newcomer's* (its whole model, an optimizer's state).
While parts of rounds are under way, newcomers move ``SHARE`` of their bytes; else nothing holds them up.
``MOST_AT_ONCE`` parts of newcomers go at a time, of those that joined first; who waits has ``ALIVE_BYTES`` now and
then, or would give up. Whose own link is slow holds up nobody: after ``SLOW_SECONDS`` a newcomer's part leaves its
place, and a round's counts no more if it takes four times what others take.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

SHARE = 1 / 16
MOST_AT_ONCE = 16  # parts: four newcomers, each over its four connections
MOST_AHEAD = 4 << 20  # bytes that newcomers may have moved beyond their share, or below
SLOW_SECONDS = 60.0
ALIVE_SECONDS, ALIVE_BYTES = 10.0, 16 << 10


@dataclass(slots=True, eq=False)
class LinkPart:
    """``age``: the number of the newcomer's session; -1: it is of a round. ``begun``: when, a newcomer's with its first
    turn. ``turn``: awaited, for ``wanted`` bytes."""

    age: int
    begun: float = math.inf
    wanted: int = 0
    turn: asyncio.Future[None] | None = None


class SharedLink:
    """The parts that go over one link in one direction."""

    def __init__(self) -> None:
        self.parts: dict[LinkPart, None] = {}
        self._waiting: list[LinkPart] = []  # for their turns, the oldest first
        self._credit, self._usual = 0.0, math.inf  # bytes of newcomers; seconds of a round's part

    def take_turn(self, part: LinkPart, now: float) -> bool:
        """Whether the bytes that a part wants may go now; if so, they are counted."""
        if part.age < 0:
            self._credit = min(self._credit + SHARE * part.wanted, MOST_AHEAD)
            return True
        slow = max(SLOW_SECONDS, 4 * self._usual)
        if self._credit <= 0 and any(other.age < 0 and now - other.begun < slow for other in self.parts):
            return False
        older = (other for other in self.parts if 0 <= other.age < part.age)
        if sum(now - other.begun < SLOW_SECONDS for other in older) >= MOST_AT_ONCE:
            return False
        part.begun = min(part.begun, now)
        self._credit = max(self._credit - part.wanted, -MOST_AHEAD)
        return True

    def end_part(self, part: LinkPart, now: float) -> None:
        del self.parts[part]
        if part.age < 0:
            self._usual = min(now - part.begun, 1.1 * self._usual)

    @contextlib.contextmanager
    def carry_part(self, age: int = -1) -> Iterator[LinkPart]:
        """A part is under way; ``age`` as a LinkPart has it."""
        loop = asyncio.get_running_loop()
        part = LinkPart(age, loop.time() if age < 0 else math.inf)
        self.parts[part] = None
        try:
            yield part
        finally:
            self.end_part(part, loop.time())
            self._give_turns(loop.time())

    async def await_turn(self, part: LinkPart, count: int) -> int:
        """Wait until so many bytes of it, or the fewer that are returned, may go."""
        loop = asyncio.get_running_loop()
        part.wanted = count
        if part.age < 0:
            self.take_turn(part, loop.time())
            self._give_turns(loop.time())
            return count
        part.turn = loop.create_future()
        insort(self._waiting, part, key=lambda one: one.age)
        self._give_turns(loop.time())
        try:
            async with asyncio.timeout(ALIVE_SECONDS):
                await part.turn
        except TimeoutError:
            return min(count, ALIVE_BYTES)
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(part)
        return count

    def _give_turns(self, now: float) -> None:
        while self._waiting and self.take_turn(self._waiting[0], now):
            turn = self._waiting.pop(0).turn
            if turn is not None and not turn.done():
                turn.set_result(None)
