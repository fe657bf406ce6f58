"""The methods of the sync port, and how a server offers them: as raw bytes, unparsed.

Control messages are protobuf and small. Bulk bytes never are protobuf: the two methods of the
Bulk service carry one header message and then raw chunks, with identity serialisers, so that a
chunk is copied once on its way in and once on its way out and is never parsed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc

from diloco_protocol.wire import limits
from diloco_protocol.wire.progress import Progress, Stalled, await_progress

SERVICE = "diloco.v1.Bulk"
UPLOAD = f"/{SERVICE}/Upload"
DOWNLOAD = f"/{SERVICE}/Download"
SESSION_SERVICE = "diloco.v1.Sync"
SESSION = f"/{SESSION_SERVICE}/Session"

Context = Any  # grpc.aio.ServicerContext; its stubs are generic and the class is not
UploadHandler = Callable[[AsyncIterator[bytes], Context], Any]
DownloadHandler = Callable[[bytes, Context], Any]  # a coroutine that uses write_download
SessionHandler = Callable[[AsyncIterator[bytes], Context], Any]  # a coroutine that uses context.write


def bulk_handlers(upload: UploadHandler, download: DownloadHandler) -> Any:
    """The Bulk service. ``upload(stream, context) -> bytes`` (UploadReply) gets the raw messages,
    header first; ``download(request, context)`` writes DownloadHeader and then chunks.

    An upload may be answered before its bytes were read (a refusal): the reply is sent at once,
    and the call ends when the client has seen it and stops, or after ``STALL_SECONDS``.
    Ending the call at once would make gRPC report an internal error instead of the reply.
    """

    async def answered(stream: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        yield await upload(stream, context)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.STALL_SECONDS):
                async for _ in stream:
                    pass  # what was on its way when the refusal was sent

    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "Upload": grpc.stream_stream_rpc_method_handler(answered),
            "Download": grpc.unary_stream_rpc_method_handler(download),
        },
    )


async def write_download(
    messages: AsyncGenerator[bytes, None], context: Context, progress: Progress | None = None
) -> None:
    """Send a download's messages. ``progress``: of all downloads of its caller's session. If they take no byte for
    ``STALL_SECONDS``, it is given up: ``messages`` is closed, and with it what it would send.

    The call itself stays until its caller reads on or leaves: no status can follow a message that is still being sent.
    So whoever calls this bounds the calls of one caller. The one message that it holds has ``CHUNK_BYTES`` at most.
    """
    progress = progress or Progress()
    async with contextlib.aclosing(messages):
        async for message in messages:
            write = asyncio.ensure_future(context.write(message))
            try:
                await await_progress(asyncio.shield(write), progress)
            except asyncio.CancelledError:
                write.cancel()
                raise
            except Stalled:
                break
            progress.record_bytes(len(message), asyncio.get_running_loop().time())
        else:
            return
    await write
    await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the download was not read, and is given up")


def session_handler(session: SessionHandler) -> Any:
    """The Sync service with unparsed messages, so that their sizes are checked first (``parse``)."""
    return grpc.method_handlers_generic_handler(
        SESSION_SERVICE, {"Session": grpc.stream_stream_rpc_method_handler(session)}
    )
