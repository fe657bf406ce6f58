"""Inner optimizer states on their way from a healthy learner to a newcomer, or to the checkpoint.

A state is as large as two or three models, so it is spooled to a file and served from there in bounded parts; it never
lies in memory as a whole. At most ``MAX_RELAYED`` transfers are kept, the oldest goes.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from diloco_protocol.vocabulary import MAX_FRAGMENTS, TransferRefusal
from diloco_protocol.wire import convert, sync_pb2
from diloco_protocol.wire.limits import WireError
from diloco_protocol.wire.progress import OVERTAKEN_BYTES
from diloco_protocol.wire.records import Held
from diloco_syncer.core import events as ev
from diloco_syncer.runtime.durability import Durability
from diloco_syncer.runtime.global_model import GlobalModel
from diloco_syncer.runtime.multipart import ReadPayload, UploadRefused, upload_reply
from diloco_syncer.store.records import Array
from diloco_syncer.store.spool import Spool

MAX_RELAYED = 2  # all newcomers that wait share one
SLACK = 64 << 20  # names, scalars, per-row statistics
STATES_PER_PARAMETER = 4  # float32 values an inner optimizer may keep per parameter


@dataclass(slots=True)
class Relayed:
    """One learner's optimizer state in a temporary file, and the versions it held at the snapshot. ``readers``: the
    processes that it was offered to."""

    data: Array
    versions: tuple[Held, ...]
    readers: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Expected:
    """A state that was asked for. ``overtaken_by``: bytes of its sender's other uploads since the last one of its own.
    ``tell_at``: time.monotonic() of its next progress."""

    connection: int
    process: str
    checkpoint: bool
    overtaken_by: int = 0
    tell_at: float = 0.0


class OptimizerRelay:
    """Transfers that were requested, and those that have arrived."""

    def __init__(
        self, model: GlobalModel, durability: Durability, spool: Spool, emit: Callable[[ev.Event], None]
    ) -> None:
        self._model = model
        self._durability = durability
        self._emit = emit
        self._spool = spool
        self._expected: OrderedDict[int, Expected] = OrderedDict()  # by transfer
        self._arrived: OrderedDict[int, Relayed] = OrderedDict()

    def expect_upload(self, transfer: int, connection: int, process: str, checkpoint: bool) -> None:
        """Expect that a connection uploads its state, or the rest; for the ``checkpoint``, or a newcomer."""
        known = self._expected.pop(transfer, None)
        self._expected[transfer] = Expected(connection, process, checkpoint, known.overtaken_by if known else 0)
        while len(self._expected) > 64:
            self._expected.popitem(last=False)

    async def receive(
        self, header: sync_pb2.UploadHeader, connection: int, read: ReadPayload
    ) -> sync_pb2.UploadReply | None:
        """Receive a part of a state that was asked for."""
        transfer, size = header.peer_state.transfer, header.total_bytes
        expected = self._expected.get(transfer)
        if expected is None or connection != expected.connection:
            raise UploadRefused(TransferRefusal.NOT_ASKED, f"this process was not asked for transfer {transfer}")
        assert self._model.layout is not None
        largest = self._model.layout.total_elements * 4 * STATES_PER_PARAMETER + SLACK
        if size > largest:
            raise UploadRefused(TransferRefusal.TOO_LARGE, f"{size} bytes of optimizer state; at most {largest}")
        if len(header.peer_state.versions) > MAX_FRAGMENTS:
            raise WireError("versions: more than there can be fragments")
        held = tuple(convert.from_wire(Held, version) for version in header.peer_state.versions)
        try:
            whole = await read(("peer", transfer), lambda: self._spool.prepare(size))
        except OSError as error:
            self._emit(ev.PeerStateFailed(connection, transfer))
            raise UploadRefused(TransferRefusal.NO_SPACE, f"the syncer has no room for it: {error.strerror}") from error
        if whole is None:
            return None
        self._expected.pop(transfer, None)
        self._arrived[transfer] = Relayed(whole, held)
        while len(self._arrived) > MAX_RELAYED:
            self._arrived.popitem(last=False)
        if expected.checkpoint:
            await self._durability.write_optimizer(whole)
        self._emit(ev.PeerStateReceived(transfer))
        return upload_reply(True)

    def note_chunk(self, key: Hashable, process: str, count: int) -> None:
        """So many bytes of an upload came. Of a state the core hears so about once a second, and also of what its
        sender uploads beside it, which has the same link; but not for ever."""
        now = time.monotonic()
        for transfer, expected in self._expected.items():
            if expected.process != process:
                continue
            expected.overtaken_by = 0 if key == ("peer", transfer) else expected.overtaken_by + count
            if now >= expected.tell_at and expected.overtaken_by < OVERTAKEN_BYTES:
                expected.tell_at = now + 1.0
                self._emit(ev.PeerStateAdvanced(transfer))

    def offer(self, transfer: int, process: str) -> None:
        """Let a process download a state that has arrived."""
        if (relayed := self._arrived.get(transfer)) is not None:
            relayed.readers.add(process)

    def find_offered(self, transfer: int, process: str) -> Relayed | None:
        """A state that was offered to this process; None: there is none."""
        relayed = self._arrived.get(transfer)
        return relayed if relayed is not None and process in relayed.readers else None

    def close(self) -> None:
        self._arrived.clear()
