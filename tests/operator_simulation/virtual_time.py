"""An event loop in which waiting costs nothing: when nothing is due, its time jumps to what is due next.

Nothing in such a loop may wait for a socket or a thread. ``run_in_executor`` runs the call at once; what a coroutine
function is called for takes its simulated time. ``Clock`` stands in for the module ``time`` in the operator's modules,
so that all of it lives in the same time.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any

WALL = 1_700_000_000.0
"""Wall-clock unix seconds at the loop's time 0."""


class _Jump(selectors.SelectSelector):
    """Selects nothing, and lets time pass instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing is due: a coroutine waits for what never comes")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """``time()`` is simulated seconds since the loop was made."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        if asyncio.iscoroutinefunction(func):
            return self.create_task(func(*args))
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class Clock:
    """The module ``time`` as the simulated loop has it. ``skew``: by how much the wall clock of who asks is ahead."""

    def __init__(self, skew: Callable[[], float] = lambda: 0.0) -> None:
        self._skew = skew

    def time(self) -> float:
        return WALL + asyncio.get_running_loop().time() + self._skew()

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end in simulated time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
