"""Who moves bytes: the session that a bulk call belongs to, and where its bytes are counted.

The syncer asks its sessions (``SessionCallers``). A shard asks the syncer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from diloco_protocol.vocabulary import PushRefusal
from diloco_protocol.wire import sync_pb2
from diloco_protocol.wire.progress import Progress
from diloco_syncer.core import events as ev
from diloco_syncer.core.core import Core
from diloco_syncer.runtime.global_model import Broadcast, GlobalModel
from diloco_syncer.runtime.multipart import UploadRefused
from diloco_syncer.runtime.traffic import Traffic
from diloco_syncer.server.sessions import Connection, Sessions
from diloco_syncer.server.tls.connection_limits import Peer

FRAGMENTS = (sync_pb2.DownloadRequest.FULL, sync_pb2.DownloadRequest.DELTA)


@dataclass(frozen=True, slots=True)
class Caller:
    """The process that a call acts for. ``connection``: its session's number; ``place`` and ``slot``: where its bytes
    are counted (traffic.py); ``received``, ``sent``: of all transfers of its session. ``receipt``: of the version that
    it asks for; empty where it would be too large, or is not known."""

    connection: int
    place: str
    slot: int | None = None
    received: Progress = field(default_factory=Progress)
    sent: Progress = field(default_factory=Progress)
    receipt: bytes = b""


class Callers(Protocol):
    """Finds callers, and counts what they move."""

    async def find_sender(self, header: sync_pb2.UploadHeader, peer: Peer, called: str) -> Caller:
        """Who uploads, once that may begin. ``called``: the listener's name for the connection. Raises
        ``CallerRefused``, ``UploadRefused``, ``TooManyUploads``."""

    async def find_reader(self, request: sync_pb2.DownloadRequest, peer: Peer, called: str) -> Caller:
        """Who downloads. Raises ``CallerRefused``."""

    def begin_upload(self, caller: Caller) -> None:
        """A part of an upload begins."""

    def end_upload(self, caller: Caller, count: int | None) -> None:
        """It is over; ``count``: its bytes, if it came whole."""

    def count_sent(self, caller: Caller, count: int) -> None: ...

    def note_sent(self, request: sync_pb2.DownloadRequest) -> None:
        """All bytes of a version were sent to a process."""


@dataclass
class SessionCallers:
    """Callers, by the sessions of this syncer."""

    job: str
    core: Core
    model: GlobalModel
    sessions: Sessions
    traffic: Traffic
    emit: Callable[[ev.Event], None]

    async def find_sender(self, header: sync_pb2.UploadHeader, peer: Peer, called: str) -> Caller:
        connection = self.sessions.find_caller(header.process, peer, called)
        if await connection.pace_upload():  # the process may have joined anew meanwhile
            connection = self.sessions.find_caller(header.process, peer, called)
        if header.job != self.job:
            raise UploadRefused(PushRefusal.OTHER_JOB, f"job {header.job[:80]!r}: this syncer serves {self.job!r}")
        return self._make_caller(connection)

    async def find_reader(self, request: sync_pb2.DownloadRequest, peer: Peer, called: str) -> Caller:
        # Who has not joined may ask for the job, to learn what to join. It is small, and nobody knows who they are.
        if request.what == sync_pb2.DownloadRequest.JOB:
            return Caller(0, self.sessions.authorizer.find_place(called))
        connection = self.sessions.find_caller(request.process, peer, called)
        return self._make_caller(connection, self._find_receipt(request))

    def _make_caller(self, connection: Connection, receipt: bytes = b"") -> Caller:
        # Looked up now: a learner that takes the last version may leave before the whole of it was sent.
        slot = self.core.slot_by_connection(connection.number)
        index, sent = None if slot is None else slot.index, connection.sent
        return Caller(connection.number, connection.place, index, connection.received, sent=sent, receipt=receipt)

    def _find_receipt(self, request: sync_pb2.DownloadRequest) -> bytes:
        found = find_version(self.model, request, self.core.epoch)
        if found is None:
            return b""
        if found.version == self.core.versions[found.fragment]:
            return self.model.make_receipt(found, self.core.receipt(found.fragment))
        return found.receipt

    def begin_upload(self, caller: Caller) -> None:
        if (connection := self.sessions.find_connection(caller.connection)) is not None:
            connection.link.up.begin(time.monotonic())

    def end_upload(self, caller: Caller, count: int | None) -> None:
        if (connection := self.sessions.find_connection(caller.connection)) is not None:
            connection.link.up.end(time.monotonic(), count)
        if count is not None:
            self.traffic.count_received(caller.place, caller.slot, count)

    def count_sent(self, caller: Caller, count: int) -> None:
        self.traffic.count_sent(caller.place, caller.slot, count)

    def note_sent(self, request: sync_pb2.DownloadRequest) -> None:
        connection = self.sessions.find_process(request.process)
        if connection is not None and request.epoch == self.core.epoch:
            self.emit(ev.VersionSent(connection.number, request.fragment, request.version))


def find_version(model: GlobalModel, request: sync_pb2.DownloadRequest, epoch: int) -> Broadcast | None:
    """The version of a fragment that is requested of a syncer of ``epoch``; None: another thing is, or it is not to be
    had."""
    if request.what not in FRAGMENTS or request.epoch != epoch:
        return None
    return model.find_broadcast(request.fragment, request.version)
