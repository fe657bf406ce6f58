"""Uploads: pushes and offers, version 0, optimizer states, and versions that the store has lost.

Everything is decided from the header: which process sends it, and how many bytes it must have. Only then
are the chunks read, into a buffer of that size. Each kind of payload has its receiver in ``runtime``, which
checks and uses it. A refusal is a reply with a fixed word; only a broken transfer is an error of the call.

The head of core/merging/push_checks.py lists the checks of a push, in their order.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from diloco_protocol.vocabulary import PushRefusal, TransferRefusal
from diloco_protocol.wire import bulk as wire_bulk
from diloco_protocol.wire import limits, sync_pb2
from diloco_protocol.wire.limits import WireError
from diloco_syncer.runtime.multipart import MultipartUploads, ReadPayload, TooManyUploads, UploadRefused, upload_reply
from diloco_syncer.server.callers import Caller, Callers
from diloco_syncer.server.sessions import CallerRefused
from diloco_syncer.server.tls.connection_limits import Peer
from diloco_syncer.store.records import Array

log = logging.getLogger(__name__)

Receive = Callable[[sync_pb2.UploadHeader, int, ReadPayload], Awaitable[sync_pb2.UploadReply | None]]
"""Receives one part of a payload of some kind: from its header, the number of the sender's connection, and what reads
the bytes. Returns the reply, or None while parts are missing. Raises ``UploadRefused``."""


@dataclass
class Uploads:
    """The uploads of all bulk connections. ``receivers``: by the header's ``what``; ``refused``: counts by reason."""

    callers: Callers
    multipart: MultipartUploads
    receivers: Mapping[str, Receive]
    refused: Counter[str]

    async def upload(
        self, header: sync_pb2.UploadHeader, source: wire_bulk.Source, peer: Peer, called: str = ""
    ) -> sync_pb2.UploadReply:
        """Receive one part of a payload; the reply is ``partial``, or the verdict. ``called``: the listener's name for
        the connection."""
        try:
            limits.check_format(header.format)
            caller = await self.callers.find_sender(header, peer, called)
            reply = await self._receive(header, caller, source)
            return upload_reply(True, TransferRefusal.PARTIAL) if reply is None else reply
        except (CallerRefused, UploadRefused) as error:
            self.refused[error.reason] += 1
            return upload_reply(False, error.reason, str(error))
        except TooManyUploads:
            return upload_reply(False, TransferRefusal.BUSY, "too many uploads at once: try again after a pause")
        except WireError as error:
            wrong = isinstance(error, wire_bulk.ChecksumError)
            word = PushRefusal.BAD_CHECKSUM.value if wrong else TransferRefusal.BAD_TRANSFER
            self.refused[word] += 1
            log.warning("upload refused: %s", error)
            return upload_reply(False, word, str(error))

    async def _receive(
        self, header: sync_pb2.UploadHeader, caller: Caller, source: wire_bulk.Source
    ) -> sync_pb2.UploadReply | None:
        """Hand a part to the receiver of its kind."""
        receive = self.receivers.get(header.WhichOneof("what") or "")
        if receive is None:
            raise WireError("the header does not say what is uploaded")

        async def read(key: Hashable, allocate: Callable[[], Any]) -> Array | None:
            received: int | None = None
            self.callers.begin_upload(caller)
            try:
                whole = await self.multipart.receive_part(key, header, source, allocate, progress=caller.received)
                received = header.bytes
            finally:
                self.callers.end_upload(caller, received)
            return whole

        return await receive(header, caller.connection, read)
