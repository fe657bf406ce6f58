"""Compiled loops over arrays: what codec, merge and outer optimizers are made of.

A ``Kernel`` is a plain function over numpy arrays and a declared signature. It is compiled at its first call (or by
``compile_all``), so that importing the protocol costs no compiler: the command line never needs one. Each has one
signature and never compiles a second time for another kind of argument.

Results do not depend on the machine or on the number of threads:

* no fast-math: the compiler neither reorders sums nor fuses a product and a sum
  into one rounding, so vector width and CPU do not show in the bits;
* a sum over an array is made of partial sums over fixed blocks of ``BLOCK``
  elements, each of fixed lanes, and the partial sums are added in order;
* ``run`` cuts work into ranges of whole blocks, and no range reads what another writes.

Numba's own thread pool is not used, for it may neither be entered from two threads nor survive a fork; kernels are
serial, release the GIL and are spread over a small pool of our own, which a forked child makes anew.

Compiled code is kept where NUMBA_CACHE_DIR says, else beside the source or in the user's cache folder; where none of
them can be written, it is compiled in memory (about half a second per kernel and process). An image that compiles at
build time sets NUMBA_CPU_NAME (x86-64-v3, say) and NUMBA_CPU_FEATURES to the same values at build and at run, for the
cache is keyed by them.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]
Bytes = NDArray[np.uint8]

BLOCK = 4096  # elements in one partial sum, and what ranges are whole multiples of
LANES = 32  # sums side by side within a block

# Signature words. Inputs are declared read-only, which admits both kinds of array.
F32_IN = 'Array(float32, 1, "C", readonly=True)'
F64_IN = 'Array(float64, 1, "C", readonly=True)'
U32_IN = 'Array(uint32, 1, "C", readonly=True)'
U16_IN = 'Array(uint16, 1, "C", readonly=True)'
U8_IN = 'Array(uint8, 1, "C", readonly=True)'
F32_OUT = "float32[::1]"
F64_OUT = "float64[::1]"
U16_OUT = "uint16[::1]"
U32_OUT = "uint32[::1]"
U8_OUT = "uint8[::1]"
RANGE = "int64, int64"  # first and one past the last, the unit is the kernel's


class Kernel:
    """A function that is compiled for its one signature when it is first called."""

    registry: list[Kernel] = []  # noqa: RUF012 - one list for all kernels

    def __init__(self, function: Callable[..., Any], signature: str) -> None:
        self.function = function
        self.signature = signature
        self.__doc__ = function.__doc__
        self._compiled: Callable[..., Any] | None = None
        Kernel.registry.append(self)

    def __call__(self, *arguments: Any) -> Any:
        return (self._compiled or self.compile())(*arguments)

    def compile(self) -> Callable[..., Any]:
        """Compile, or load from the cache. Repeated calls do nothing."""
        with _process.lock:
            if self._compiled is None:
                self._compiled = _compile(self.function, self.signature)
            return self._compiled


def kernel(*words: str, returns: str = "void") -> Callable[[Callable[..., Any]], Kernel]:
    """Decorator: the arguments' types, each a signature word or several joined by commas."""
    return lambda function: Kernel(function, f"{returns}({', '.join(words)})")


def compile_all() -> None:
    """Compile every kernel of the modules imported so far: when an image is built, and
    in a process that others are forked from."""
    for each in Kernel.registry:
        each.compile()


def run(target: Kernel, units: int, threads: int, *arguments: Any, align: int = 1) -> None:
    """Call ``target(*arguments, first, last)`` for ranges that cover ``0..units``, as many
    as there are threads. Ranges begin at multiples of ``align``."""
    span = -(-units // max(1, threads))
    span = max(1, -(-span // align)) * align
    compiled = target.compile()
    share(lambda first, last: compiled(*arguments, first, last), units, span, threads)


def share(work: Callable[[int, int], None], units: int, span: int, threads: int, backwards: bool = False) -> None:
    """Call ``work(first, last)`` for consecutive ranges of ``span`` units that cover
    ``0..units``, on up to ``threads`` threads, the caller's among them; ``backwards``:
    the last ranges first, which are still in the cache after a pass forwards.

    Every range begun is waited for, whatever fails; the first error is raised.
    """
    starts = range(0, units, span)[:: -1 if backwards else 1]

    def worker(starts: range) -> None:
        for start in starts:
            work(start, min(start + span, units))

    count = min(threads, len(starts))
    if count <= 1:
        worker(starts)
        return
    pool = _process.pool()
    others: list[Future[None]] = [pool.submit(worker, starts[i::count]) for i in range(1, count)]
    try:
        worker(starts[::count])
    finally:
        errors = [other.exception() for other in others]
    for error in errors:
        if error is not None:
            raise error


def _compile(function: Callable[..., Any], signature: str) -> Callable[..., Any]:
    from numba import njit

    def attempt(cache: bool) -> Callable[..., Any]:
        # error_model numpy: a division by zero gives inf or NaN, not a branch to an exception.
        options = njit(signature, cache=cache, nogil=True, error_model="numpy", fastmath=False)
        compiled: Callable[..., Any] = options(function)
        return compiled

    try:
        return attempt(cache=True)
    except Exception as error:
        # No folder for the cache can be written (RuntimeError), or what lies there is broken,
        # which can raise anything. If it is the kernel that is wrong, the next line says so.
        level = logging.INFO if isinstance(error, RuntimeError) else logging.WARNING
        log.log(level, "kernel %s is compiled without a cache: %s", function.__name__, error)
        return attempt(cache=False)


class _Process:
    """What must be new in a forked child: a lock and a pool whose threads are not there."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._pool: ThreadPoolExecutor | None = None

    def pool(self) -> ThreadPoolExecutor:
        with self.lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="diloco-kernel")
            return self._pool


_process = _Process()
os.register_at_fork(after_in_child=_process.__init__)  # type: ignore[misc]


@kernel(F32_IN, F64_OUT, RANGE)
def square_sums(values: Float32s, sums: Float64s, first: int, last: int) -> None:
    """``sums[b]`` = sum of squares of block b, in float64, for blocks first..last."""
    lanes, n = np.uint64(LANES), np.uint64(values.size)
    partial = np.empty(lanes, np.float64)
    for b in range(np.uint64(first), np.uint64(last)):
        start = np.uint64(b) * np.uint64(BLOCK)
        stop = min(start + np.uint64(BLOCK), n)
        whole = start + (stop - start) // (np.uint64(4) * lanes) * (np.uint64(4) * lanes)
        for lane in range(lanes):
            partial[lane] = 0.0
        # Four rows of lanes at a time: an explicit order that a compiler can make wide.
        for i in range(start, whole, np.uint64(4) * lanes):
            for lane in range(lanes):
                v0 = np.float64(values[i + lane])
                v1 = np.float64(values[i + lane + lanes])
                v2 = np.float64(values[i + lane + np.uint64(2) * lanes])
                v3 = np.float64(values[i + lane + np.uint64(3) * lanes])
                partial[lane] += (v0 * v0 + v1 * v1) + (v2 * v2 + v3 * v3)
        for i in range(whole, stop):
            v0 = np.float64(values[i])
            partial[(i - whole) % lanes] += v0 * v0
        width = lanes
        while width > np.uint64(1):
            width //= np.uint64(2)
            for lane in range(width):
                partial[lane] += partial[lane + width]
        sums[b] = partial[np.uint64(0)]


@kernel(F64_IN, returns="float64")
def ordered_sum(sums: Float64s) -> float:
    """The sum, added from the first to the last."""
    total = 0.0
    for value in sums:
        total += value
    return total


def blocks_of(elements: int) -> int:
    return -(-elements // BLOCK)


def square_sum(values: Float32s, threads: int = 1) -> float:
    """Sum of squares in float64, the same for any number of threads. It cannot overflow
    for fewer than 1e230 elements, so it is finite exactly if all values are."""
    sums = np.empty(blocks_of(values.size), np.float64)
    run(square_sums, sums.size, threads, values, sums)
    return float(ordered_sum(sums))
