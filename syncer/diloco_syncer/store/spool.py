"""Room on a disk for what comes in and is too large for memory: optimizer states, frozen parameters.

The files lie on the store's volume, whose size is planned for the model, and where the store is a bucket in the
temporary folder. They have no name while they are used, so nothing is left of a process that was killed.

A disk may let its writers wait, and then it is one thread that waits, and not the event loop: it makes the files
(``prepare``) and writes to them (``write``), one after the other in the order of the calls. So what was to be written
before a range is somebody else's is written before what that one writes. At most ``WRITES`` wait for the thread.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from diloco_protocol.common.files import TEMPORARY, make_directory
from diloco_syncer.store.records import Array

WRITES = 16  # of at most ``CHUNK_BYTES`` each


class Spool:
    """Files without names. ``folder`` None: they lie in the temporary folder."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, "spool")
        self._turns = asyncio.Semaphore(WRITES)

    def prepare(self, size: int) -> asyncio.Future[Array]:
        """``allocate``, in the thread."""
        return asyncio.get_running_loop().run_in_executor(self._thread, self.allocate, size)

    async def write(self, target: memoryview, data: memoryview) -> None:
        """Have the thread write ``data`` to a range of a file."""
        async with self._turns:
            await asyncio.get_running_loop().run_in_executor(self._thread, _copy, target, data)

    def allocate(self, size: int) -> Array:
        """A file of ``size`` bytes as uint8[size]; gone when nobody uses it any more.

        Its space is taken before the first byte, so a full disk is an error here and not a fault in a mapped page.
        Raises OSError if there is none.
        """
        if size == 0:
            return np.empty(0, np.uint8)
        if self._folder is not None:
            make_directory(self._folder)
        descriptor, name = tempfile.mkstemp(TEMPORARY, ".", self._folder)
        try:
            os.posix_fallocate(descriptor, 0, size)
            return np.memmap(Path(name), np.uint8, "r+", shape=(size,))
        finally:
            os.close(descriptor)
            os.unlink(name)


def _copy(target: memoryview, data: memoryview) -> None:
    """Without the interpreter lock, which a slice's assignment would hold while a page waits for the disk."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(data, np.uint8))
