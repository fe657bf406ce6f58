"""Inner optimizer states on their way from a healthy learner to a newcomer, or to the checkpoint.

A state is as large as two or three models, so it is spooled to a temporary file and served from there in bounded
parts; it never lies in memory as a whole. The file's space is allocated before the first byte (a full disk is an
error then, not a fault in a mapped page). At most ``MAX_RELAYED`` transfers are kept, the oldest goes.
"""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diloco_protocol.vocabulary import TransferRefusal
from diloco_protocol.wire import convert, limits, sync_pb2
from diloco_protocol.wire.limits import WireError
from diloco_protocol.wire.records import Held
from diloco_syncer.core import events as ev
from diloco_syncer.runtime.durability import Durability
from diloco_syncer.runtime.global_model import GlobalModel
from diloco_syncer.runtime.multipart import ReadPayload, UploadRefused, upload_reply
from diloco_syncer.store.records import Array

MAX_RELAYED = 4
SLACK = 64 << 20  # names, scalars, per-row statistics
STATES_PER_PARAMETER = 4  # float32 values an inner optimizer may keep per parameter


@dataclass(slots=True)
class Relayed:
    """One learner's optimizer state in a temporary file, and the versions it held at the snapshot."""

    data: Array
    versions: tuple[Held, ...]


class OptimizerRelay:
    """Transfers that were requested, and those that have arrived."""

    def __init__(self, model: GlobalModel, durability: Durability, emit: Callable[[ev.Event], None]) -> None:
        self._model = model
        self._durability = durability
        self._emit = emit
        self._directory = tempfile.TemporaryDirectory(prefix="diloco-relay-")
        self._expected: OrderedDict[int, tuple[int, bool]] = OrderedDict()  # transfer -> connection, checkpoint
        self._arrived: OrderedDict[int, Relayed] = OrderedDict()

    def expect_upload(self, transfer: int, connection: int, checkpoint: bool) -> None:
        """Expect that a connection uploads its state under ``transfer``; for the ``checkpoint``, or a newcomer."""
        self._expected[transfer] = (connection, checkpoint)
        while len(self._expected) > 64:
            self._expected.popitem(last=False)

    async def receive(self, header: sync_pb2.UploadHeader, connection: int, read: ReadPayload) -> bytes | None:
        """Receive a part of a state that was asked for."""
        transfer, size = header.peer_state.transfer, header.total_bytes
        sender, checkpoint = self._expected.get(transfer, (0, False))
        if not connection or connection != sender:
            raise UploadRefused(TransferRefusal.NOT_ASKED, f"nobody asked this process for transfer {transfer}")
        assert self._model.layout is not None
        largest = self._model.layout.total_elements * 4 * STATES_PER_PARAMETER + SLACK
        if size > largest:
            raise UploadRefused(TransferRefusal.TOO_LARGE, f"{size} bytes of optimizer state; at most {largest}")
        if len(header.peer_state.versions) > limits.MAX_FRAGMENTS:
            raise WireError("versions: more than there can be fragments")
        held = tuple(convert.from_wire(Held, version) for version in header.peer_state.versions)
        try:
            whole = await read(("peer", transfer), lambda: self._allocate(size))
        except OSError as error:
            self._emit(ev.PeerStateFailed(connection, transfer))
            raise UploadRefused(TransferRefusal.NO_SPACE, f"the syncer has no room for it: {error.strerror}") from error
        if whole is None:
            return None
        self._expected.pop(transfer, None)
        self._arrived[transfer] = Relayed(whole, held)
        while len(self._arrived) > MAX_RELAYED:
            self._arrived.popitem(last=False)
        if checkpoint:
            await self._durability.write_optimizer(whole)
        self._emit(ev.PeerStateReceived(transfer))
        return upload_reply(True)

    def _allocate(self, size: int) -> Array:
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

    def find_arrived(self, transfer: int) -> Relayed | None:
        return self._arrived.get(transfer)

    def close(self) -> None:
        self._arrived.clear()
        self._directory.cleanup()
