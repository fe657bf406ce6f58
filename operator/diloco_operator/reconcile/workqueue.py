"""The work queue: which job is looked at next.

Theory of operation. A key (a job) is in the queue once, with the time at which it is due. ``add`` can make it due
earlier, never later. Only one turn of a key runs at a time; if the key is added meanwhile, another turn follows.

A turn returns the seconds until the next one. So every job is looked at again even if no watch brings anything.
A turn that finds no job takes the key out: there are never more keys than jobs.

A turn that fails, or takes longer than ``TURN_SECONDS``, is repeated after a backoff that doubles, with jitter.
News about the job shortens the backoff, to ``NEWS_SECONDS`` at the least. Between two turns of a key there are
at least ``PAUSE_SECONDS``, so that the news about ten pods makes one turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from diloco_operator.model import Key
from diloco_protocol.common.tasks import cancel_tasks

log = logging.getLogger(__name__)

PAUSE_SECONDS = 0.2
NEWS_SECONDS = 2.0
FIRST_BACKOFF, LAST_BACKOFF = 0.5, 60.0
TURN_SECONDS = 180.0

Turn = Callable[[Key], Awaitable[float | None]]
"""Looks at a job; the seconds until the next look, or None: the job is gone."""


@dataclass(slots=True)
class _State:
    due: float | None = None  # when it is due; None: not waiting
    ticket: int = 0  # of its valid place in the heap
    began: float | None = None  # of the turn that is under way
    ended: float = -1e9  # of the last turn
    failures: int = 0  # in a row


@dataclass
class WorkQueue:
    """``turn`` is called for each key when it is due, at most ``workers`` side by side.

    ``failed``: told of each turn that failed (key, error). ``clock``: monotonic seconds.
    """

    turn: Turn
    workers: int
    failed: Callable[[Key, Exception], None] = lambda key, error: None
    clock: Callable[[], float] = time.monotonic
    pause: float = PAUSE_SECONDS

    def __post_init__(self) -> None:
        self._states: dict[Key, _State] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._tickets = itertools.count(1)
        self._changed = asyncio.Event()
        self._free = asyncio.Semaphore(self.workers)
        self._tasks: set[asyncio.Task[None]] = set()
        self._running_since: float | None = None
        self._moved_at = -1e9  # when a turn ended last

    def add(self, key: Key, delay: float = 0.0) -> None:
        """Look at ``key`` in ``delay`` seconds at the latest."""
        state = self._states.setdefault(key, _State())
        self._place(key, state, max(self.clock() + delay, self._earliest(state)))

    def depth(self) -> int:
        """Keys that are due and wait for a worker."""
        now = self.clock()
        return sum(1 for state in self._states.values() if state.due is not None and state.due <= now)

    def lag(self) -> float:
        """Seconds that the most overdue key has waited, or the longest turn has taken, whichever is more; 0
        before ``run``."""
        return self._longest_wait(-math.inf)

    def standstill(self) -> float:
        """Seconds for which keys have been due and no turn has ended, or that the longest turn has taken,
        whichever is more; 0 before ``run``. However long a queue is that moves, it does not stand still."""
        return self._longest_wait(self._moved_at)

    def _longest_wait(self, since: float) -> float:
        """Seconds of the longest turn, or for which a key has been due after ``since``, whichever is more."""
        if self._running_since is None:
            return 0.0
        now, since = self.clock(), max(self._running_since, since)
        waits = [now - max(state.due, since) for state in self._states.values() if state.due is not None]
        turns = [now - state.began for state in self._states.values() if state.began is not None]
        return max([0.0, *waits, *turns])

    async def run(self) -> None:
        """Work until cancelled."""
        self._running_since = self.clock()
        try:
            while True:
                async with self._free:  # a place is free; the turn takes it, at once
                    key = await self._next()
                await self._free.acquire()
                task = asyncio.create_task(self._work(key), name=f"turn {key[0]}/{key[1]}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        finally:
            self._running_since = None
            await cancel_tasks(self._tasks)

    # ------------------------------------------------------------------ inside

    def _place(self, key: Key, state: _State, due: float) -> None:
        if state.due is not None and state.due <= due:
            return
        state.due, state.ticket = due, next(self._tickets)
        if state.began is None:
            heapq.heappush(self._heap, (due, state.ticket, key))
            self._changed.set()

    def _earliest(self, state: _State) -> float:
        return state.ended + max(self.pause, min(NEWS_SECONDS, _longest(state.failures)))

    async def _next(self) -> Key:
        while True:
            self._changed.clear()
            wait: float | None = None
            while self._heap:
                due, ticket, key = self._heap[0]
                state = self._states.get(key)
                if state is None or state.ticket != ticket or state.due is None or state.began is not None:
                    heapq.heappop(self._heap)  # an earlier place of a key that was moved
                    continue
                wait = due - self.clock()
                if wait > 0:
                    break
                heapq.heappop(self._heap)
                state.due, state.began = None, self.clock()
                return key
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._changed.wait()

    async def _work(self, key: Key) -> None:
        state = self._states[key]
        again: float | None
        try:
            async with asyncio.timeout(TURN_SECONDS):
                again = await self.turn(key)
            state.failures = 0
        except asyncio.CancelledError:
            state.due = None  # it has no place in the heap
            raise
        except Exception as error:
            state.failures += 1
            longest = _longest(state.failures)
            again = longest * random.uniform(0.5, 1.0)
            self.failed(key, error)
        finally:
            state.began, state.ended = None, self.clock()
            self._moved_at = state.ended
            self._free.release()
        if again is None and state.due is None:
            del self._states[key]
            return
        if again is not None:
            self._place(key, state, state.ended + max(again, self.pause))
        if state.due is not None:  # what came while it was turned has no place in the heap yet
            state.due, state.ticket = max(state.due, self._earliest(state)), next(self._tickets)
            heapq.heappush(self._heap, (state.due, state.ticket, key))
            self._changed.set()


def _longest(failures: int) -> float:
    """The backoff after so many failures in a row, before jitter, in seconds."""
    return min(LAST_BACKOFF, FIRST_BACKOFF * 2.0 ** min(failures - 1, 10)) if failures else 0.0
