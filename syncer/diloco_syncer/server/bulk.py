"""The bulk connections of the sync port: one call after the other, handed to uploads and downloads.

The listener has made the connection and knows its peer. A caller that breaks the rules loses its connection, and one
that is refused keeps it. Its first call comes within ``JOIN_SECONDS`` and shows the join token, or the connection ends:
in plain text anybody may connect. After that it may lie idle. It costs its certificate one of those that it may have,
and the system finds out that a peer is dead (byte_stream.py).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from diloco_protocol.common.tasks import cancel_tasks
from diloco_protocol.vocabulary import TransferRefusal
from diloco_protocol.wire import convert, limits, sync_pb2
from diloco_protocol.wire.bulk_calls import MESSAGE_BYTES, CallFailed, ServedCall, read_frame
from diloco_protocol.wire.byte_stream import ByteStream, StreamBroken
from diloco_syncer.server.downloads import Downloads
from diloco_syncer.server.tls.access import CallAuthorizer
from diloco_syncer.server.tls.connection_limits import Peer
from diloco_syncer.server.uploads import Uploads

log = logging.getLogger(__name__)


@dataclass
class BulkServer:
    """Serves the calls of all bulk connections, in the syncer's loop."""

    authorizer: CallAuthorizer
    uploads: Uploads
    downloads: Downloads
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _is_probed: bool = False

    def accept(self, stream: ByteStream, peer: Peer, called: str) -> None:
        """Serve a connection until it ends. ``called``: the listener's name for it."""
        task = asyncio.get_running_loop().create_task(self._serve(stream, peer, called))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all connections."""
        await cancel_tasks(self._tasks)

    async def _serve(self, stream: ByteStream, peer: Peer, called: str) -> None:
        try:
            await self.serve_calls(stream, peer, called)
        except StreamBroken as error:
            log.debug("a bulk connection of %s ended: %s", peer, error)
        except limits.WireError as error:
            self.uploads.refused[TransferRefusal.BAD_TRANSFER] += 1
            log.debug("a bulk connection of %s breaks the rules: %s", peer, error)
        except Exception:
            log.exception("a fault of this program, at a bulk connection of %s", peer)
        finally:
            stream.close()

    async def serve_calls(self, stream: ByteStream, peer: Peer, called: str = "") -> None:
        """Carry out one call after the other until the caller ends the connection. Raises StreamBroken, WireError."""
        try:
            async with asyncio.timeout(limits.JOIN_SECONDS):
                raw = await read_frame(stream)
        except TimeoutError:
            raise StreamBroken(f"no call within {limits.JOIN_SECONDS:.0f} s") from None
        while raw:
            call = ServedCall(stream, convert.parse(sync_pb2.BulkRequest, raw, MESSAGE_BYTES))
            await self._answer(call, peer, called)
            await call.drain()
            if not self.authorizer.accepts_token(call.request.token):
                raise StreamBroken("it does not show the join token")
            raw = await read_frame(stream, limits.STALL_SECONDS)

    async def _answer_probe(self, probe: sync_pb2.Probe, call: ServedCall) -> None:
        """Take bytes and send some, for who measures the way here: one at a time, because learners share the link.
        Raises CallFailed, StreamBroken."""
        if max(probe.up, probe.down) > limits.PROBE_BYTES:
            raise CallFailed(f"a measurement moves at most {limits.PROBE_BYTES} bytes at a time", True)
        if self._is_probed:
            raise CallFailed("somebody else measures the link: try again later", False)
        self._is_probed = True
        nothing, left = memoryview(bytearray(limits.CHUNK_BYTES)), probe.down
        try:
            async with asyncio.timeout(limits.PROBE_SECONDS):
                while await call.read_into(nothing):
                    pass
                header = sync_pb2.DownloadHeader(found=True, total_bytes=left, bytes=left)
                await call.reply(sync_pb2.BulkReply(download=header))
                while left:
                    part = nothing[:left]
                    await call.write(part)
                    left -= len(part)
        except TimeoutError:
            raise StreamBroken(f"a measurement took {limits.PROBE_SECONDS:.0f} s") from None
        finally:
            self._is_probed = False

    async def _answer(self, call: ServedCall, peer: Peer, called: str) -> None:
        """Carry out one call. Raises StreamBroken: the connection is of no use any more."""
        request = call.request
        try:
            self.authorizer.check_token(peer, request.token)
            if request.HasField("upload"):
                reply = await self.uploads.upload(request.upload, call, peer, called)
                await call.reply(sync_pb2.BulkReply(upload=reply))
            elif request.HasField("download"):
                await self.downloads.serve(request.download, call, peer, called)
            elif request.HasField("probe"):
                await self._answer_probe(request.probe, call)
            else:
                raise CallFailed("the request does not say what is to be moved", True)
        except CallFailed as error:
            failure = sync_pb2.BulkFailure(message=str(error)[: limits.MAX_TEXT], final=error.final)
            await call.reply(sync_pb2.BulkReply(failure=failure))
