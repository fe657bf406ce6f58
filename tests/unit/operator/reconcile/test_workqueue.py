"""The work queue, in simulated time: a pause of the machine that runs the tests is none of the queue's."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, ParamSpec

import pytest

from diloco_operator.model import Key
from diloco_operator.reconcile import workqueue as queues
from diloco_operator.reconcile.workqueue import WorkQueue
from operator_simulation import virtual_time
from operator_simulation.kubernetes import now
from patience import until

A, B = ("n", "a"), ("n", "b")
P = ParamSpec("P")


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """The test, run in a loop whose time passes only when nothing is left to do. ``now`` is its clock."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        virtual_time.run(test(*args, **kwargs))

    return run


class Turns:
    """Records what is turned; ``then`` says what a turn does."""

    def __init__(self, then: Callable[[Key], Awaitable[float | None]] | None = None) -> None:
        self.began: list[tuple[Key, float]] = []
        self.active: dict[Key, int] = {}
        self.most = 0
        self._then = then

    async def __call__(self, key: Key) -> float | None:
        self.began.append((key, now()))
        self.active[key] = self.active.get(key, 0) + 1
        assert self.active[key] == 1, "one job is turned twice at once"
        self.most = max(self.most, sum(self.active.values()))
        try:
            return await self._then(key) if self._then else 60.0
        finally:
            self.active[key] -= 1

    def count(self, key: Key) -> int:
        return sum(1 for k, _ in self.began if k == key)

    async def until(self, key: Key, count: int) -> None:
        await until(lambda: self.count(key) >= count, f"{count} turns of {key}", every=0.005)


@asynccontextmanager
async def working(queue: WorkQueue) -> AsyncIterator[None]:
    task = asyncio.create_task(queue.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@in_virtual_time
async def test_a_burst_of_news_is_one_turn_and_then_one_more() -> None:
    turns = Turns()
    queue = WorkQueue(turns, 4, pause=0.15, clock=now)
    async with working(queue):
        for _ in range(20):
            queue.add(A)
        await turns.until(A, 1)
        for _ in range(20):
            queue.add(A)
        await turns.until(A, 2)
        await asyncio.sleep(0.3)
    assert turns.count(A) == 2
    assert turns.began[1][1] - turns.began[0][1] >= 0.14


@in_virtual_time
async def test_a_turn_says_when_the_next_one_is_due() -> None:
    async def soon(key: Key) -> float | None:
        return 0.05

    turns = Turns(soon)
    async with working(WorkQueue(turns, 1, pause=0.0, clock=now)) as _:
        pass
    queue = WorkQueue(turns, 1, pause=0.0, clock=now)
    async with working(queue):
        queue.add(A)
        await turns.until(A, 4)
    gaps = [b[1] - a[1] for a, b in zip(turns.began, turns.began[1:], strict=False)]
    assert min(gaps) >= 0.045


@in_virtual_time
async def test_news_during_a_turn_is_another_turn() -> None:
    gate = asyncio.Event()

    async def slow(key: Key) -> float | None:
        await gate.wait()
        return 60.0

    turns = Turns(slow)
    queue = WorkQueue(turns, 4, pause=0.0, clock=now)
    async with working(queue):
        queue.add(A)
        await turns.until(A, 1)
        queue.add(A)
        await asyncio.sleep(0.05)
        assert turns.count(A) == 1
        gate.set()
        await turns.until(A, 2)


@in_virtual_time
async def test_no_more_than_so_many_at_once_and_others_do_not_wait_for_a_slow_one() -> None:
    gate = asyncio.Event()

    async def slow(key: Key) -> float | None:
        if key == A or key[1].startswith("s"):
            await gate.wait()
        return 60.0

    turns = Turns(slow)
    queue = WorkQueue(turns, 2, pause=0.0, clock=now)
    async with working(queue):
        queue.add(A)
        await turns.until(A, 1)
        queue.add(B)
        await turns.until(B, 1)
        for i in range(6):
            queue.add(("n", f"s{i}"))
        await turns.until(("n", "s0"), 1)
        await asyncio.sleep(0.05)
        assert turns.most == 2
        assert queue.depth() == 5
        gate.set()
        await turns.until(("n", "s5"), 1)
    assert turns.most == 2


@in_virtual_time
async def test_failures_come_again_with_growing_patience_and_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "FIRST_BACKOFF", 0.08)
    told: list[str] = []

    async def fails(key: Key) -> float | None:
        if turns.count(key) < 5:
            raise ValueError(f"no {turns.count(key)}")
        return 60.0

    turns = Turns(fails)
    queue = WorkQueue(turns, 1, lambda key, error: told.append(str(error)), pause=0.0, clock=now)
    async with working(queue):
        queue.add(A)
        await turns.until(A, 5)
        await asyncio.sleep(0.05)
    assert told == ["no 1", "no 2", "no 3", "no 4"]
    gaps = [b[1] - a[1] for a, b in zip(turns.began, turns.began[1:], strict=False)]
    for gap, longest in zip(gaps, (0.08, 0.16, 0.32, 0.64), strict=True):
        assert longest / 2 - 0.005 <= gap <= longest + 0.005


@in_virtual_time
async def test_news_shorten_a_backoff_but_not_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "FIRST_BACKOFF", 30.0)
    monkeypatch.setattr(queues, "NEWS_SECONDS", 0.2)

    async def fails(key: Key) -> float | None:
        raise ValueError

    turns = Turns(fails)
    queue = WorkQueue(turns, 1, pause=0.0, clock=now)
    async with working(queue):
        queue.add(A)
        await turns.until(A, 1)
        await asyncio.sleep(0.02)
        queue.add(A)
        await turns.until(A, 2)
    assert 0.19 <= turns.began[1][1] - turns.began[0][1] <= 0.21


@in_virtual_time
async def test_a_turn_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "TURN_SECONDS", 0.05)
    monkeypatch.setattr(queues, "FIRST_BACKOFF", 0.01)
    told: list[Exception] = []

    async def hangs(key: Key) -> float | None:
        await asyncio.sleep(60)
        return None

    turns = Turns(hangs)
    queue = WorkQueue(turns, 1, lambda key, error: told.append(error), pause=0.0, clock=now)
    async with working(queue):
        queue.add(A)
        await turns.until(A, 2)
    assert isinstance(told[0], TimeoutError)


@in_virtual_time
async def test_a_job_that_is_gone_is_forgotten() -> None:
    gone: set[Key] = set()

    async def turn(key: Key) -> float | None:
        return None if key in gone else 0.02

    turns = Turns(turn)
    queue = WorkQueue(turns, 1, pause=0.0, clock=now)
    async with working(queue):
        queue.add(A)
        await turns.until(A, 3)
        gone.add(A)
        await asyncio.sleep(0.1)
        seen = turns.count(A)
        await asyncio.sleep(0.1)
        assert turns.count(A) == seen and not queue._states
        gone.clear()
        queue.add(A)  # a job of that name again
        await turns.until(A, seen + 2)


@in_virtual_time
async def test_a_long_queue_that_moves_does_not_stand_still() -> None:
    clock = [100.0]
    jobs = [("ns", f"job-{n}") for n in range(20)]
    seen: list[tuple[float, float]] = []

    async def slow(key: Key) -> float | None:
        clock[0] += 30.0
        seen.append((queue.lag(), queue.standstill()))
        return 1e6

    queue = WorkQueue(slow, 1, pause=0.0, clock=lambda: clock[0])
    for job in jobs:
        queue.add(job)
    async with working(queue):
        await until(lambda: len(seen) == len(jobs), "a turn of each")
    assert max(lag for lag, _ in seen) > 500.0
    assert max(still for _, still in seen) <= 30.0


@in_virtual_time
async def test_lag_and_standstill_by_which_liveness_is_judged() -> None:
    gate = asyncio.Event()

    async def slow(key: Key) -> float | None:
        await gate.wait()
        return 60.0

    clock = [100.0]
    turns = Turns(slow)
    queue = WorkQueue(turns, 1, pause=0.0, clock=lambda: clock[0])
    queue.add(A)
    clock[0] = 500.0
    assert queue.lag() == queue.standstill() == 0.0, "waiting to begin is not being stuck"
    async with working(queue):
        await turns.until(A, 1)
        assert queue.lag() == 0.0
        queue.add(B)
        clock[0] = 900.0
        assert queue.lag() == queue.standstill() == 400.0
        gate.set()
        await turns.until(B, 1)
        await asyncio.sleep(0.02)
        assert queue.lag() == queue.standstill() == 0.0
