"""Room on a disk for what comes in and is too large for memory: optimizer states, frozen parameters.

The files lie on the store's volume, whose size is planned for the model, and where the store is a bucket in the
temporary folder. They have no name while they are used, so nothing is left of a process that was killed.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np

from diloco_protocol.common.files import TEMPORARY, make_directory
from diloco_syncer.store.records import Array


class Spool:
    """Files without names. ``folder`` None: they lie in the temporary folder."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

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
