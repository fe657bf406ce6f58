"""Virtual time: what is to happen at which second, in an order that depends on nothing else."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import count


class Timeline:
    """Calls that are due at virtual times (seconds). Calls of one time are made in the order in which they were asked
    for; those asked for with ``last`` after all others of that time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, bool, int, Callable[[], None]]] = []
        self._order = count()

    def call_at(self, time: float, call: Callable[[], None], *, last: bool = False) -> None:
        """Have ``call`` made at ``time``. Raises ValueError for a time that has passed."""
        if not time >= self.now:
            raise ValueError(f"a call at {time} s, and it is {self.now} s")
        heapq.heappush(self._calls, (time, last, next(self._order), call))

    def call_in(self, seconds: float, call: Callable[[], None]) -> None:
        """Have ``call`` made so many seconds from now."""
        self.call_at(self.now + seconds, call)

    @property
    def next_at(self) -> float:
        """When the next call is due; infinite: there is none."""
        return self._calls[0][0] if self._calls else math.inf

    def run_until(self, time: float) -> None:
        """Make all calls that are due until then; it is that time then."""
        while self.next_at <= time:
            self.run_next()
        self.now = max(self.now, time)

    def run_next(self) -> bool:
        """Make the next call, at its time; False: there is none."""
        if not self._calls:
            return False
        self.now, _, _, call = heapq.heappop(self._calls)
        call()
        return True
