"""What threads of a simulated process have of ``threading`` and ``queue``: they wait in the simulation's time.

One thread runs at a time, and only until it parks. So nothing is locked, and entering a ``Condition`` does nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from syncer_simulation.processes import Killed, ThreadWork, present_work


class Waiters:
    """Threads that wait for the same thing. Anybody may wake them, the simulation too."""

    def __init__(self) -> None:
        self._works: list[ThreadWork] = []

    def wait(self, timeout: float | None) -> None:
        """Wait until ``wake``, at most ``timeout`` seconds."""
        work = present_work()
        assert work is not None, "only threads wait"
        self._works.append(work)
        try:
            work.park(timeout)
        finally:
            self._works.remove(work)

    def wake(self) -> None:
        for work in self._works:
            work.loop.wake(work)


class Condition:
    """``threading.Condition``."""

    def __init__(self) -> None:
        self._waiters = Waiters()
        self._notified = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self, timeout: float | None = None) -> bool:
        before = self._notified
        self._waiters.wait(timeout)
        return self._notified > before

    def notify_all(self) -> None:
        self._notified += 1
        self._waiters.wake()


class SimpleQueue:
    """``queue.SimpleQueue``."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiters = Waiters()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._waiters.wake()

    def get(self) -> Any:
        while not self._items:
            self._waiters.wait(None)
        return self._items.popleft()


class Thread:
    """``threading.Thread``, of the process whose thread makes it."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...] = (), **_: object) -> None:
        self._target, self._args = target, args
        self._work: ThreadWork | None = None
        self._waiters = Waiters()

    @property
    def ident(self) -> int | None:
        return None if self._work is None else id(self._work)

    def start(self) -> None:
        here = present_work()
        assert here is not None
        self._work = here.loop.start_work(lambda: self._target(*self._args))
        self._work.future.add_done_callback(lambda _: self._waiters.wake())

    def is_alive(self) -> bool:
        return self._work is not None and not self._work.future.done()

    def join(self, timeout: float | None = None) -> None:
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while self.is_alive() and (left := end - time.monotonic()) > 0:
            try:
                self._waiters.wait(None if timeout is None else left)
            except Killed:
                return  # this process has died, and its threads with it


def sleep(seconds: float) -> None:
    """``time.sleep``."""
    work = present_work()
    assert work is not None, "only threads sleep"
    work.park(seconds)
