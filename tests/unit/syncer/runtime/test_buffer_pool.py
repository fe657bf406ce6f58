"""The pool of memory for pushes: reuse, and never while somebody still looks."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_syncer.runtime.buffer_pool import IDLE_SECONDS, SMALLEST, BufferPool, rounded_up

MIB = 1 << 20


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_comes_back_when_the_last_view_is_gone() -> None:
    pool = BufferPool()
    first = pool.allocate(MIB)
    assert first.dtype == np.uint8 and first.shape == (MIB,) and first.flags.writeable
    where, view = address(first), first.view(np.float32)[10:20]
    target = memoryview(first)[5:]
    del first
    gc.collect()
    assert pool.idle_bytes == 0
    other = pool.allocate(MIB)
    assert address(other) != where
    view[:] = 1.0
    del view
    assert pool.idle_bytes == 0  # the memoryview holds it
    del target
    assert pool.idle_bytes == MIB
    again = pool.allocate(MIB - 1000)  # about the same size
    assert address(again) == where and again.size == MIB - 1000 and pool.idle_bytes == 0


@pytest.mark.parametrize(
    "look",
    [
        lambda a: a.view(np.float32),
        lambda a: a[8:],
        lambda a: a[8:][8:].view(np.float32)[1:],
        lambda a: a.reshape(2, -1).T,
        memoryview,
        lambda a: np.frombuffer(a, np.float32, 10),
    ],
    ids=["view", "slice", "view of slices", "transposed", "memoryview", "frombuffer"],
)
def test_any_view_alone_keeps_the_memory(look: Callable[[np.ndarray], object]) -> None:
    """A push is decoded into a float32 view, and that is all that is kept of it until it is merged."""
    pool = BufferPool()
    view = look(pool.allocate(MIB))
    gc.collect()
    assert pool.idle_bytes == 0
    assert not np.shares_memory(np.asarray(view), pool.allocate(MIB))
    del view
    assert pool.idle_bytes == 2 * MIB


def test_idle_memory_is_bounded_in_bytes_and_time() -> None:
    pool = BufferPool(max_idle=3 * MIB)
    held = [pool.allocate(MIB) for _ in range(5)]
    held.clear()
    assert pool.idle_bytes == 3 * MIB
    now = time.monotonic()
    pool.sweep(now)
    assert pool.idle_bytes == 3 * MIB
    pool.sweep(now + IDLE_SECONDS + 1)
    assert pool.idle_bytes == 0


def test_small_ones_are_not_kept() -> None:
    pool = BufferPool()
    small = pool.allocate(SMALLEST - 1)
    assert small.size == SMALLEST - 1
    del small
    assert pool.allocate(0).size == 0
    assert pool.idle_bytes == 0


@given(st.integers(1, 1 << 36))
def test_sizes_are_shared_within_an_eighth(size: int) -> None:
    rounded = rounded_up(size)
    assert size <= rounded < size * 1.125 + 1
    assert rounded_up(rounded) == rounded


def test_no_two_threads_get_the_same_memory() -> None:
    pool, wrong = BufferPool(), []

    def work(number: int) -> None:
        for _ in range(200):
            buffer = pool.allocate(SMALLEST)
            buffer[:64] = number
            again = pool.allocate(SMALLEST)
            again[:64] = 255
            if not (buffer[:64] == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong and not any(thread.is_alive() for thread in threads)
