"""Inner optimizer states on their way from a healthy learner to a newcomer, or to the checkpoint.

A state is as large as two or three models, so it is spooled to a temporary file
and served from there in bounded parts; it never lies in memory as a whole. The
file's space is allocated before the first byte (a full disk is an error then, not
a fault in a mapped page). At most ``MAX_RELAYED`` transfers are kept, the oldest goes.
"""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diloco_syncer.store.records import Array

MAX_RELAYED = 4
SLACK = 64 << 20  # names, scalars, per-row statistics
STATES_PER_PARAMETER = 4  # float32 values an inner optimizer may keep per parameter


@dataclass(slots=True)
class Relayed:
    """One learner's optimizer state in a temporary file, and the versions it held at the snapshot."""

    transfer: int
    data: Array
    versions: tuple[tuple[int, int], ...]
    checkpoint: bool


def largest_state(elements: int) -> int:
    """The most bytes that a model's inner optimizer state may have."""
    return elements * 4 * STATES_PER_PARAMETER + SLACK


class OptimizerRelay:
    """Transfers that were requested, and those that have arrived."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="diloco-relay-")
        self._expected: OrderedDict[int, tuple[int, bool]] = OrderedDict()  # transfer -> connection, checkpoint
        self._arrived: OrderedDict[int, Relayed] = OrderedDict()

    def expect_upload(self, transfer: int, connection: int, checkpoint: bool) -> None:
        """Expect that a connection uploads its state under ``transfer``; for the ``checkpoint``, or a newcomer."""
        self._expected[transfer] = (connection, checkpoint)
        while len(self._expected) > 64:
            self._expected.popitem(last=False)

    def find_expected(self, transfer: int) -> tuple[int, bool] | None:
        """The connection that uploads this transfer, and whether it is for the checkpoint; None: not expected."""
        return self._expected.get(transfer)

    def allocate(self, size: int) -> Array:
        """A file of ``size`` bytes as uint8[size]; unlinked already, gone when nobody uses it.

        Raises OSError if there is no space.
        """
        if size == 0:
            return np.empty(0, np.uint8)
        descriptor, name = tempfile.mkstemp(dir=self._directory.name)
        try:
            os.posix_fallocate(descriptor, 0, size)
            return np.memmap(Path(name), np.uint8, "r+", shape=(size,))
        finally:
            os.close(descriptor)
            os.unlink(name)

    def add_arrived(self, relayed: Relayed) -> None:
        """Keep a transfer whose bytes are all here; the oldest goes if there are too many."""
        self._expected.pop(relayed.transfer, None)
        self._arrived[relayed.transfer] = relayed
        while len(self._arrived) > MAX_RELAYED:
            self._arrived.popitem(last=False)

    def find_arrived(self, transfer: int) -> Relayed | None:
        """A transfer that has arrived and is still kept."""
        return self._arrived.get(transfer)

    def close(self) -> None:
        """Drop all transfers."""
        self._arrived.clear()
        self._directory.cleanup()
