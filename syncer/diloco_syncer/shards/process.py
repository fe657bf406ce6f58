"""The process of a shard: the bulk connections that the syncer passes on to it, and the stream to that syncer, which
started it.

It ends when the syncer does: signals are the syncer's, and nothing here has to be brought to rest.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from dataclasses import dataclass

from diloco_protocol.security.credentials import Credentials
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.vocabulary import SyncerExit
from diloco_syncer.core.config import learners_by_region
from diloco_syncer.numerics.outer import OuterError
from diloco_syncer.numerics.warm_up import warm_up
from diloco_syncer.server.tls.access import CallAuthorizer
from diloco_syncer.server.tls.listener import PortListener
from diloco_syncer.shards import messages as ms
from diloco_syncer.shards.shard import Shard
from diloco_syncer.shards.stream import MessageStream
from diloco_syncer.store.base import HigherEpoch
from diloco_syncer.store.open import open_store
from diloco_syncer.store.records import FormatRefused

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShardOptions:
    """What the process was called with. ``syncer``: the path of the socket at which it is awaited; ``connections``: the
    descriptor of the link by which connections come."""

    job: DiLoCoJob
    store: str
    credentials: Credentials
    threads: int
    shard: int
    syncer: str
    connections: int


async def run_shard(options: ShardOptions) -> int:
    """Serve until the syncer ends; returns the exit code."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: None)
    regions = learners_by_region(options.job)
    listener = PortListener(options.credentials, options.job.metadata.name, regions, options.shard)
    listener.accept_passed(socket.socket(fileno=options.connections))
    await asyncio.to_thread(warm_up, options.job, options.threads)
    store = await asyncio.to_thread(open_store, options.store)
    reader, writer = await asyncio.open_unix_connection(options.syncer)
    stream = MessageStream(reader, writer)
    outcome: asyncio.Future[BaseException | None] = loop.create_future()

    def stop_by(error: BaseException) -> None:
        if not outcome.done():
            outcome.set_result(error)

    authorizer = CallAuthorizer(listener, regions, options.credentials)
    shard = Shard(options.job, store, authorizer, options.threads, send=stream.send, stop_by=stop_by)

    async def follow() -> None:
        async for message in stream.read_messages():
            await shard.take_message(message)
            if isinstance(message, ms.Begin) and shard.begun:
                listener.serve_bulk(shard.bulk.accept)
                listener.start()

    stream.send(ms.Hello(options.shard))
    following = loop.create_task(follow())
    following.add_done_callback(
        lambda task: stop_by(task.exception() or EOFError("the syncer has ended")) if not task.cancelled() else None
    )
    error = await outcome
    code, why = _judge_end(error)
    if code != SyncerExit.OK:
        stream.send(ms.ShardEnded(code, why))
    following.cancel()
    await shard.close()
    await asyncio.to_thread(listener.stop)
    stream.close()
    return code


def _judge_end(error: BaseException | None) -> tuple[SyncerExit, str]:
    """The exit code, and what a syncer without shards says as it ends by this."""
    match error:
        case EOFError():
            return SyncerExit.OK, ""
        case HigherEpoch():
            code, why = SyncerExit.SUPERSEDED, str(error)
        case OuterError() | FormatRefused():
            code, why = SyncerExit.CONFIGURATION, str(error)
        case OSError():
            code, why = SyncerExit.STORE, f"the store cannot be used: {error.strerror or error}"
        case _:
            log.error("a fault of this program", exc_info=error)
            code, why = SyncerExit.FAILED, f"a fault of this program: {error!r}"
    log.error("%s", why)
    return code, why
