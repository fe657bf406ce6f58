"""A transfer lives while bytes of its session move."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

import pytest

from diloco_protocol.wire import limits
from diloco_protocol.wire.progress import OVERTAKEN_BYTES, Progress, Stalled, await_progress
from operator_simulation import virtual_time

STALL = limits.STALL_SECONDS


def waited(move: Callable[[Progress], Awaitable[None]], patience: float | None = None) -> float:
    """After how many seconds a stream that gets nothing is given up, where its session moves so."""

    async def test() -> float:
        progress = Progress()
        moving = asyncio.ensure_future(move(progress))
        with pytest.raises(Stalled, match="no bytes for"):
            await await_progress(asyncio.Event().wait(), progress, patience)
        moving.cancel()
        return asyncio.get_running_loop().time()

    found: float = virtual_time.run(test())
    return found


async def moves(progress: Progress, size: int, every: float, times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(every)
        progress.record_bytes(size, asyncio.get_running_loop().time())


def test_a_session_in_which_nothing_moves_is_given_up_after_half_a_minute() -> None:
    assert waited(lambda progress: moves(progress, 0, 1.0, times=0)) == STALL
    assert waited(lambda progress: moves(progress, 0, 1.0, times=0), 7.0) == 7.0


def test_a_stream_waits_for_as_long_as_others_of_its_session_are_served() -> None:
    """Ten minutes of a slow link, on which others have their turn first."""
    assert waited(lambda progress: moves(progress, 65536, STALL - 1, times=20)) == 20 * (STALL - 1) + STALL


def test_a_stream_that_others_pass_by_has_a_dead_connection() -> None:
    """On a fast link it is known after the time of a stall, on a slow one when enough has passed it by."""
    assert waited(lambda progress: moves(progress, OVERTAKEN_BYTES, 1.0, times=9999)) == STALL
    slow = waited(lambda progress: moves(progress, OVERTAKEN_BYTES // 100, 1.0, times=9999))
    assert slow == pytest.approx(101.0, abs=STALL)


def test_what_comes_is_returned_and_a_cancelled_wait_cancels() -> None:
    async def test() -> None:
        async def after(seconds: float) -> int:
            await asyncio.sleep(seconds)
            return 7

        assert await await_progress(after(STALL - 1), Progress()) == 7
        work = asyncio.ensure_future(after(5.0))
        wait = asyncio.ensure_future(await_progress(work, Progress()))
        await asyncio.sleep(1.0)
        wait.cancel()
        await asyncio.gather(wait, return_exceptions=True)
        await asyncio.sleep(0)
        assert work.cancelled()

    virtual_time.run(test())


def test_a_stream_that_breaks_as_its_session_ends_is_not_logged_as_an_error_of_this_program() -> None:
    async def test() -> None:
        logged: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context))
        broken = asyncio.get_running_loop().create_future()
        wait = asyncio.ensure_future(await_progress(broken, Progress()))
        await asyncio.sleep(1.0)
        broken.set_exception(OSError("the connection broke"))
        wait.cancel()
        await asyncio.gather(wait, return_exceptions=True)
        await asyncio.sleep(0)
        del broken, wait
        gc.collect()
        assert logged == []

    virtual_time.run(test())


def test_the_rate_counts_from_the_first_stream() -> None:
    progress = Progress()
    assert progress.rate(5.0) is None
    progress.begin(10.0)
    progress.begin(11.0)
    assert progress.rate(12.0) is None
    progress.record_bytes(300, 13.0)
    progress.record_bytes(300, 14.0)
    assert progress.rate(16.0) == 100.0
