"""The process of a shard: its bulk connections, and the stream to the syncer.

One beside the syncer ends when that does, which started it and passes connections on to it: signals are the syncer's.
One in a pod of its own outlives syncers.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from diloco_protocol.common.http_server import listen_on
from diloco_protocol.security.credentials import Credentials, CredentialsError
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.vocabulary import SyncerExit
from diloco_protocol.wire.byte_stream import StreamBroken
from diloco_syncer.core.config import learners_by_region
from diloco_syncer.numerics.outer import OuterError
from diloco_syncer.numerics.warm_up import warm_up
from diloco_syncer.server.tls.access import CallAuthorizer
from diloco_syncer.server.tls.listener import PortListener
from diloco_syncer.shards import messages as ms
from diloco_syncer.shards.coordinator import STEADY_SECONDS
from diloco_syncer.shards.shard import Shard
from diloco_syncer.shards.stream import MessageStream, connect_syncer
from diloco_syncer.shards.supervisor import pause_after
from diloco_syncer.store.base import HigherEpoch
from diloco_syncer.store.open import open_store
from diloco_syncer.store.records import FormatRefused

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShardOptions:
    """What the process was called with. ``syncer``: where it is awaited, the path of a socket; ``connections``: the
    descriptor of the link by which connections come. In a pod of its own there is no link: connections come to
    ``listen``, and ``syncer`` is host:port."""

    job: DiLoCoJob
    store: str
    credentials: Credentials
    threads: int
    shard: int
    syncer: str
    connections: int
    listen: str


async def run_shard(options: ShardOptions) -> int:
    """Serve until the syncer ends; returns the exit code. In a pod of its own a shard then goes on with the next
    syncer, and SIGTERM ends it at once: nothing here has to be brought to rest."""
    is_beside = options.connections >= 0
    for number in (signal.SIGINT, signal.SIGTERM) if is_beside else ():
        asyncio.get_running_loop().add_signal_handler(number, lambda: None)
    await asyncio.to_thread(warm_up, options.job, options.threads)
    if is_beside:
        reader, writer = await asyncio.open_unix_connection(options.syncer)
        link = socket.socket(fileno=options.connections)
        return await _serve(options, MessageStream(reader, writer), lambda listener: listener.accept_passed(link))
    listening, failures = listen_on(options.listen, "--listen"), 0
    while True:
        began = time.monotonic()
        try:
            options = replace(options, credentials=Credentials.from_directory(options.credentials.directory))
            stream = await connect_syncer(options.credentials, options.syncer)
        except (StreamBroken, CredentialsError) as error:
            log.error("%s", error)
        else:
            code = await _serve(options, stream, lambda listener: listener.accept_at(listening.dup()))
            if code not in (SyncerExit.OK, SyncerExit.SUPERSEDED):  # the syncer that is superseded has a successor
                return code
            gc.collect()  # a life's parts hold each other, and a model
        failures = failures + 1 if time.monotonic() - began < STEADY_SECONDS else 0
        await asyncio.sleep(pause_after(failures))


async def _serve(options: ShardOptions, stream: MessageStream, bind: Callable[[PortListener], None]) -> int:
    """Be a shard until the stream ends; returns the exit code. ``bind``: says where a listener accepts."""
    loop, regions = asyncio.get_running_loop(), learners_by_region(options.job)
    listener = PortListener(options.credentials, options.job.metadata.name, regions, options.shard)
    bind(listener)
    store = await asyncio.to_thread(open_store, options.store)
    outcome: asyncio.Future[BaseException | None] = loop.create_future()

    def stop_by(error: BaseException) -> None:
        if not outcome.done():
            outcome.set_result(error)

    authorizer = CallAuthorizer(listener, regions, options.credentials)
    shard = Shard(options.job, store, authorizer, options.threads, send=stream.send, stop_by=stop_by)

    async def follow() -> None:
        async for message in stream.read_messages():
            if isinstance(message, ms.HelloRefused):
                log.error("the syncer refuses this shard: %s", message.why)
                return
            await shard.take_message(message)
            if isinstance(message, ms.Begin) and shard.begun:
                listener.serve_bulk(shard.bulk.accept)
                listener.start()

    stream.send(ms.Hello(options.shard, options.job.spec.syncer.shards))
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
