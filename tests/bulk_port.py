"""The syncer's side of bulk connections, as the product has it, over what a test says of uploads and downloads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

from diloco_protocol.security.credentials import Credentials
from diloco_protocol.wire import sync_pb2
from diloco_protocol.wire.byte_stream import ByteStream
from diloco_protocol.wire.progress import Progress
from diloco_syncer.runtime.active_downloads import ActiveDownloads
from diloco_syncer.server.bulk import BulkServer
from diloco_syncer.server.callers import Caller
from diloco_syncer.server.downloads import Downloads
from diloco_syncer.server.tls.access import CallAuthorizer
from diloco_syncer.server.tls.connection_limits import Peer
from diloco_syncer.server.tls.listener import PortListener


class StoredDownloads(Downloads):
    """Downloads of whoever asks, all of one session. ``find``: the bytes of a request; None: there are none.
    ``sent``: the progress of the session."""

    def __init__(self, find: Callable[[sync_pb2.DownloadRequest], Any], sent: Progress) -> None:

        async def find_reader(*whom: Any) -> Caller:
            return Caller(1, "", sent=sent)

        callers: Any = SimpleNamespace(
            find_reader=find_reader, count_sent=lambda caller, count: None, note_sent=lambda request: None
        )
        nothing: Any = SimpleNamespace()
        super().__init__(callers, SimpleNamespace(downloads=ActiveDownloads()), epoch=-1, find_other=nothing)  # type: ignore[arg-type]
        self._stored = find

    async def _find(self, request: sync_pb2.DownloadRequest) -> tuple[Any, Any, str]:
        return self._stored(request), (), "superseded"


class BulkPort(BulkServer):
    """A port on loopback. ``uploads`` and ``downloads``: their ``upload`` and ``serve`` are called. ``connections``:
    all that have come."""

    def __init__(
        self,
        uploads: Any,
        downloads: Any,
        credentials: Credentials | None = None,
        job: str = "job",
        shard: int | None = None,
    ) -> None:
        self.credentials = credentials or Credentials()
        self.listener = PortListener(self.credentials, job, {"local": 2}, shard)
        authorizer = CallAuthorizer(self.listener, {"local": 2}, self.credentials)
        super().__init__(authorizer, uploads, downloads)
        self.connections: list[ByteStream] = []

    def accept(self, stream: ByteStream, peer: Peer, called: str) -> None:
        self.connections.append(stream)
        super().accept(stream, peer, called)

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """At which address it does."""
        port = self.listener.bind("127.0.0.1:0")
        self.listener.serve_bulk(self.accept)
        self.listener.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await self.close()
            await asyncio.to_thread(self.listener.stop)
