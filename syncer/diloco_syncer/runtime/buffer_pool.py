"""Memory for pushes, used again and again.

Every push is received into a buffer of its size and, unless it came as float32, decoded into another. Fresh memory
costs more than what is done with it: the kernel clears each page first, which was a quarter of the syncer's time where
pushes come fast. So a buffer's memory comes back here when the last array or view of it is gone, and the next push of
about its size gets it. Fragments differ by a few percent: sizes are rounded up to an eighth of their power of two, so
that they share blocks, and the pages behind the size that was asked for are never touched.

Bounds: at most ``MAX_IDLE_BYTES`` lie idle, and none longer than ``IDLE_SECONDS`` (``sweep``).
"""

from __future__ import annotations

import threading
import time
import weakref

import numpy as np

from diloco_protocol.arrays.kernels import Bytes

MAX_IDLE_BYTES = 4 << 30
IDLE_SECONDS = 30.0
SMALLEST = 64 << 10  # bytes; below, the allocator is as good


class BufferPool:
    """A pool of memory blocks. All methods may be called from any thread."""

    def __init__(self, max_idle: int = MAX_IDLE_BYTES) -> None:
        # Reentrant: the last view of a buffer may die, by the garbage collector, inside ``allocate``.
        self._lock = threading.RLock()
        self._idle: list[tuple[float, Bytes]] = []  # since when, the oldest first
        self._max_idle = max_idle
        self.idle_bytes = 0

    def allocate(self, size: int) -> Bytes:
        """uint8[size], its content undefined; the memory comes back by itself."""
        if size < SMALLEST:
            return np.empty(size, np.uint8)
        rounded = rounded_up(size)
        block: Bytes | None = None
        with self._lock:
            for index in reversed(range(len(self._idle))):  # the newest may still be in the cache
                if self._idle[index][1].size == rounded:
                    block = self._idle.pop(index)[1]
                    self.idle_bytes -= rounded
                    break
        if block is None:
            block = np.empty(rounded, np.uint8)
        # A view refers to the last array of the chain behind it. The memoryview ends that chain here:
        # without it a view would keep the block alive and not this array, whose end gives it back.
        array: Bytes = np.frombuffer(block.data, np.uint8, size)
        weakref.finalize(array, self._return_block, block).atexit = False
        return array

    def _return_block(self, block: Bytes) -> None:
        with self._lock:
            self._idle.append((time.monotonic(), block))
            self.idle_bytes += block.size
            while self.idle_bytes > self._max_idle:
                self.idle_bytes -= self._idle.pop(0)[1].size

    def sweep(self, now: float) -> None:
        """Free blocks that were idle for ``IDLE_SECONDS``. ``now``: time.monotonic()."""
        with self._lock:
            while self._idle and now - self._idle[0][0] > IDLE_SECONDS:
                self.idle_bytes -= self._idle.pop(0)[1].size


def rounded_up(size: int) -> int:
    """The next of the sizes that are shared, in bytes: less than an eighth above ``size``."""
    step = 1 << max(0, size.bit_length() - 4)
    return -(-size // step) * step
