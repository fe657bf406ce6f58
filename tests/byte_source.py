"""Bytes of a part, as a call gives them to who receives it (``bulk.Source``)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable


class ByteSource:
    """What an iterator yields, one piece after the other."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self._left = b""

    async def read_into(self, view: memoryview, check: Callable[[], None] = lambda: None) -> int:
        while not self._left:
            try:
                self._left = await anext(self._pieces)
            except StopAsyncIteration:
                return 0
        check()
        count = min(len(view), len(self._left))
        view[:count] = self._left[:count]
        self._left = self._left[count:]
        return count
