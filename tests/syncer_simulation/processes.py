"""The event loop and the threads of a simulated process, in the simulation's time.

A ``ProcessLoop`` is the event loop of one process: its timers are the simulation's, and a process that dies is a loop
that runs nothing any more. Work that is given to a thread runs in a real one, but only while the simulation waits for
it: up to the next operation that takes virtual time (``park``). So one thing happens at a time, the same seed gives the
same order, and two processes interleave between any two operations of their stores.

Not operator_simulation/virtual_time.py: there is one loop, which waits for no thread, and asyncio's own does.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

At = Callable[[float, Callable[[], object]], None]
_current = threading.local()
_pool = ThreadPoolExecutor(64, "virtual")


class Killed(BaseException):
    """The process of this thread has died."""


def present_work() -> ThreadWork | None:
    """The work that this thread is for; None: it is the simulation's own."""
    return getattr(_current, "work", None)


class ThreadWork:
    """One piece of work in a thread: it runs while the simulation waits, from one ``park`` to the next."""

    def __init__(self, loop: ProcessLoop, work: Callable[[], Any]) -> None:
        self.loop = loop
        self.future: asyncio.Future[Any] = loop.create_future()
        self.delay: float | None = 0.0
        self.turns = 0  # how often it has run on
        self._work = work
        self._begun = self._ended = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)

    def advance(self) -> bool:
        """Run on to the next operation; whether the work has ended."""
        self.turns += 1
        if not self._begun:
            self._begun = True
            _pool.submit(self._run)
        else:
            self._go.release()
        self._back.acquire()
        if self._ended and self.loop.alive and not self.future.cancelled():
            if self._error is None:
                self.future.set_result(self._result)
            else:
                self.future.set_exception(self._error)
        return self._ended

    def was_cancelled(self) -> bool:
        """Whether it was before it began: then it never does."""
        return not self._begun and self.future.cancelled()

    def park(self, delay: float | None) -> None:
        """In the thread: stand still for so many virtual seconds, or until ``ProcessLoop.wake``; None: until that only.
        Raises ``Killed``."""
        self.delay = delay
        if self.loop.alive:
            self._back.release()
            self._go.acquire()
        if not self.loop.alive:
            raise Killed

    def _run(self) -> None:
        _current.work = self
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        _current.work = None
        self._ended = True
        self._back.release()

    def kill(self) -> None:
        """End the thread; the process is dead."""
        if self._begun and not self._ended:
            self.advance()
        assert self._ended or not self._begun


class ProcessLoop(asyncio.AbstractEventLoop):
    """The event loop of one process. ``at(delay, call)`` is the simulation's, as is ``now()``."""

    def __init__(self, at: At, now: Callable[[], float]) -> None:
        self.alive = True
        self.ahead = 0.0  # its wall clock
        self.stalled_until = 0.0  # its threads do nothing before
        self._at, self._now = at, now
        self._queues: dict[int, deque[ThreadWork]] = {}  # of each executor, which has one thread; the first is running
        self._tasks: list[asyncio.Task[Any]] = []  # those that may not be done
        self._most_tasks = 16  # then those that are done are forgotten

    def kill(self) -> None:
        """The process dies: nothing of it runs any more, whatever its threads were about to do is not done."""
        self.alive = False
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            if not task.done():
                _end_coroutine(task.get_coro())
        for queue in self._queues.values():
            for work in queue:
                work.kill()
        self._queues.clear()

    async def finish_threads(self) -> None:
        """Wait until no thread works, as a process does at its end."""
        while self._queues:
            await asyncio.sleep(0.01)

    def time(self) -> float:
        return self._now()

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._at(0.0, lambda: self._call(handle))
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._at(max(0.0, when - self._now()), lambda: self._call(timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def _call(self, handle: asyncio.Handle) -> None:
        if self.alive and not handle.cancelled():
            asyncio._set_running_loop(self)
            try:
                handle._run()
            finally:
                asyncio._set_running_loop(None)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, **options)
        self._tasks.append(task)
        if len(self._tasks) > self._most_tasks:
            self._tasks = [one for one in self._tasks if not one.done()]
            self._most_tasks = 16 + 2 * len(self._tasks)
        if not self.alive:
            self.kill()
        return task

    def run_in_executor(self, executor: Executor | None, func: Any, *args: Any) -> asyncio.Future[Any]:
        return self.start_work(lambda: func(*args), executor).future

    def start_work(self, func: Callable[[], Any], executor: Executor | None = None) -> ThreadWork:
        """Run ``func`` in the executor's thread; None: in a thread of its own."""
        work = ThreadWork(self, func)
        key = id(executor) if executor is not None else id(work)
        queue = self._queues.setdefault(key, deque())
        queue.append(work)
        if len(queue) == 1:
            self._at(0.0, lambda: self._advance(key))
        return work

    def wake(self, work: ThreadWork) -> None:
        """Have work that is parked in a thread of its own run on now."""
        turn = work, work.turns
        self._at(0.0, lambda: self._advance(id(work), turn))

    def _advance(self, key: int, turn: tuple[ThreadWork, int] | None = None) -> None:
        """``turn``: the work that this is for, and how often it had run on; it may have done so meanwhile."""
        queue = self._queues.get(key)
        if not self.alive or not queue or turn not in (None, (queue[0], queue[0].turns)):
            return
        if (wait := self.stalled_until - self._now()) > 0:
            self._at(wait, lambda: self._advance(key, turn))
        elif queue[0].was_cancelled() or queue[0].advance():
            queue.popleft()
            if queue:
                self._at(0.0, lambda: self._advance(key))
            else:
                del self._queues[key]
        elif (delay := queue[0].delay) is not None:
            turn = queue[0], queue[0].turns
            self._at(delay, lambda: self._advance(key, turn))

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self.alive

    def is_closed(self) -> bool:
        return not self.alive

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.alive and (error := context.get("exception")) is not None:
            raise error


def _end_coroutine(coro: Any) -> None:
    """Run what a coroutine of a dead process has to do at its end, now and not when Python collects it. Whatever it
    does reaches nobody."""
    if not inspect.iscoroutine(coro):
        coro.close()
        return
    while inspect.getcoroutinestate(coro) == inspect.CORO_SUSPENDED:
        with contextlib.suppress(BaseException):
            coro.throw(Killed())
    if inspect.getcoroutinestate(coro) == inspect.CORO_CREATED:
        coro.close()  # else Python says of it that it was never awaited
