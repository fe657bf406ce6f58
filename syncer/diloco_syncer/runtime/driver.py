"""Drives the core: events go in, and the actions that come out are carried out in order.

Theory of operation. One event loop owns the core. Whatever happens becomes an event and is handled
at once (``handle``). The actions that the core returns go into one queue, and one task carries them
out strictly in order, because an action may rely on those before it: a Welcome must not be sent
before the ``Persist`` that makes the seat durable.

Each kind of action has one handler, registered with ``on`` by syncer.py. A handler that has to wait
(for the store) holds up the queue; a handler that only begins something (a merge) does not. A handler
may also be given what was true when the core decided: a Welcome that waits in the queue must tell of
the versions that the core knew then, not of those that are in force when it is sent.

Example: ``driver.on(ev.AnswerPush, pushes.reply)`` makes ``ReceivedPushes.reply`` answer the sender of a push.

Time. Heartbeats are judged by ``SteadyClock``. It does not count a gap in which this process itself
stood still (stopped, starved, swapped), or every learner would be found silent when it goes on. For
the same reason it stands still from the moment at which this life is to end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar, get_args

from diloco_protocol.common.tasks import cancel_tasks
from diloco_protocol.vocabulary import SyncerExit
from diloco_syncer.core import events as ev
from diloco_syncer.core.core import Core
from diloco_syncer.store.base import HigherEpoch
from diloco_syncer.store.checkpoint import RecordMadeMeanwhile
from diloco_syncer.store.restore import StoreUnusable
from diloco_syncer.store.tape import TapeError

log = logging.getLogger(__name__)
A = TypeVar("A", bound=ev.Action)
C = TypeVar("C")

MAX_ACTIONS = 200_000  # waiting for a store that cannot be written
RESTART = -1  # outcome: begin again from the store

Step = Callable[[], Awaitable[None] | None]


class SteadyClock:
    """Monotonic seconds, less what exceeds ``limit`` in gaps during which the clock was not read."""

    def __init__(self, limit: float = 3.0, raw: Callable[[], float] = time.monotonic) -> None:
        self._raw = raw
        self._limit = limit
        self._last = raw()
        self._skipped = 0.0

    def __call__(self) -> float:
        now = self._raw()
        if now - self._last > self._limit:
            self._skipped += now - self._last - self._limit
        self._last = now
        return now - self._skipped

    def stop(self) -> None:
        """Show this moment from now on."""
        self()
        stopped = self._last
        self._raw = lambda: stopped


class Driver:
    """Owns the core, the queue of its actions, and the outcome of this life of the syncer.

    ``blame(action, error)`` is called where carrying out an action fails. It ends the session or the upload of the
    caller whom the action answers, and returns True; False: the action is nobody's, and the process ends.
    """

    def __init__(
        self, core: Core, loop: asyncio.AbstractEventLoop, blame: Callable[[ev.Action, Exception], bool]
    ) -> None:
        self.core = core
        self.clock = SteadyClock()
        self.generation = 0  # events handled
        self.outcome: asyncio.Future[int] = loop.create_future()  # the exit code, or RESTART
        self.stop_reason = ""
        self._loop = loop
        self._handlers: dict[type[Any], Callable[[Any], Step]] = {}
        self._blame = blame
        self._actions: deque[tuple[ev.Action, Step]] = deque()
        self._work = asyncio.Event()
        self._rearm = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------- handlers

    def on(self, kind: type[A], handler: Callable[[A], Awaitable[None] | None]) -> None:
        self._handlers[kind] = lambda action: partial(handler, action)

    def on_with(
        self, kind: type[A], capture: Callable[[], C], handler: Callable[[A, C], Awaitable[None] | None]
    ) -> None:
        """Carry out actions of this kind by ``handler(action, captured)``, where ``captured`` is what ``capture()``
        returned when the core decided."""
        self._handlers[kind] = lambda action: partial(handler, action, capture())

    # ------------------------------------------------------------- events and actions

    def handle(self, event: ev.Event) -> None:
        """Let the core decide, and queue the actions that it decides on."""
        self.generation += 1
        self._queue(self.core.handle(event, self.clock()))

    def start(self, made: Sequence[int], behind: bool) -> None:
        """Begin: the core's first actions, the queue and the clock. ``made``, ``behind``: see ``Core.start``."""
        missing = [kind.__name__ for kind in get_args(ev.Action) if kind not in self._handlers]
        if missing:
            raise TypeError(f"actions without a handler: {', '.join(missing)}")
        self._queue(self.core.start(self.clock(), made, behind))
        self.run_task(self._carry_out())
        self.run_task(self._tick())

    def _queue(self, actions: Sequence[ev.Action]) -> None:
        if len(self._actions) > MAX_ACTIONS:
            self.stop(SyncerExit.STORE, f"{len(self._actions)} actions wait for the store")
            return
        self._actions.extend((action, self._handlers[type(action)](action)) for action in actions)
        self._work.set()
        self._rearm.set()

    async def _carry_out(self) -> None:
        while True:
            while self._actions:
                action, step = self._actions.popleft()
                try:
                    waiting = step()
                    if waiting is not None:
                        await waiting
                except Exception as error:
                    if not self._blame(action, error):
                        raise
                    log.error("a fault in carrying out %s", type(action).__name__, exc_info=error)
            self._work.clear()
            if not self._actions:
                await self._work.wait()

    async def _tick(self) -> None:
        while True:
            self._rearm.clear()
            try:
                async with asyncio.timeout(min(1.0, max(0.0, self.core.wake_at - self.clock()))):
                    await self._rearm.wait()
            except TimeoutError:
                self.handle(ev.Tick())

    # ------------------------------------------------------------- tasks and the end

    def run_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a piece of work beside the queue; its failure ends the process."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.stop_by(error)

    def stop_by(self, error: BaseException) -> None:
        """End this life by what went wrong."""
        if isinstance(error, HigherEpoch):
            self.stop(SyncerExit.SUPERSEDED, str(error))
        elif isinstance(error, RecordMadeMeanwhile | TapeError):  # a predecessor's, at the last moment
            self.stop(RESTART, str(error))
        elif isinstance(error, OSError | StoreUnusable):
            self.stop(SyncerExit.STORE, f"the store cannot be used: {error}")
        else:
            log.error("a fault of this program", exc_info=error)
            self.stop(SyncerExit.FAILED, f"a fault of this program: {error!r}")

    def stop(self, outcome: int, reason: str) -> None:
        """End this life with an exit code (or ``RESTART``) and a reason for people. The first call counts, unless it is
        ``RESTART`` and this one says 0: a process that is told to stop while a life ends does not begin another."""
        if self.outcome.done():
            if self.outcome.result() != RESTART or outcome != SyncerExit.OK:
                return
            self.outcome = self._loop.create_future()
        self.stop_reason = reason
        # Learners are away while a life ends, which a slow store may draw out: nobody is given up for it.
        self.clock.stop()
        log.log(logging.INFO if outcome == 0 else logging.ERROR, "stopping: %s", reason)
        self.outcome.set_result(outcome)

    async def cancel_tasks(self) -> None:
        """Cancel all tasks, the queue among them, and wait until they have ended."""
        await cancel_tasks(self._tasks)
