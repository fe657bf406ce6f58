"""The streams of the syncer to its shards: to processes beside it, which it starts, and starts again when they end; or
to pods of their own, which connect to a port for shards alone."""

from __future__ import annotations

import asyncio
import hmac
import logging
import random
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from diloco_protocol.common.tasks import cancel_tasks
from diloco_protocol.vocabulary import ConnectionRefusal, SyncerExit
from diloco_protocol.wire.byte_stream import set_options
from diloco_protocol.wire.limits import WireError
from diloco_syncer.server.tls.connection_limits import RefusalCounter
from diloco_syncer.server.tls.listener import CredentialReloader, PortListener
from diloco_syncer.server.tls.passing import make_link
from diloco_syncer.shards import messages as ms
from diloco_syncer.shards.coordinator import Coordinator
from diloco_syncer.shards.stream import PROOF_BYTES, MessageStream, make_proof

log = logging.getLogger(__name__)

HELLO_SECONDS = 10.0
LONGEST_PAUSE = 10.0  # seconds before a shard that ended is started again, or a life of the syncer
END_SECONDS = 5.0
MAX_OPENING = 64  # connections of the port for shards that have proven nothing yet
AWAITED_SECONDS = 10.0  # then pods that have not come are told of


def pause_after(failures: int) -> float:
    """Seconds before the next try, after so many in a row that failed."""
    return min(LONGEST_PAUSE, 0.2 * 2.0 ** min(failures, 16)) * random.uniform(0.5, 1.0)


@dataclass(kw_only=True, eq=False)
class ShardStreams:
    """Those of one life of the syncer. ``stop_by`` is called with a fault of the syncer's own."""

    coordinator: Coordinator
    stop_by: Callable[[BaseException], None]
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _server: asyncio.Server | None = None
    _streams: set[MessageStream] = field(default_factory=set)
    _closing: asyncio.Event = field(default_factory=asyncio.Event)

    async def close(self) -> None:
        """End all of them."""
        self._closing.set()
        if self._server is not None:
            self._server.close()
        for stream in self._streams:  # what ends a shard's process, or a life of it
            stream.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=END_SECONDS)
        await cancel_tasks(self._tasks)

    def run_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a piece of work; its failure is the syncer's."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_done)
        return task

    def _note_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.stop_by(error)

    def count_end(self, index: int, why: str) -> None:
        """A shard's stream has ended."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Have what comes at a stream taken, until it ends."""
        stream = MessageStream(reader, writer)
        self._streams.add(stream)
        index = -1
        why = "it has ended, or is not reached"
        try:
            messages = stream.read_messages()
            async with asyncio.timeout(HELLO_SECONDS):
                hello = await anext(messages)
            if not isinstance(hello, ms.Hello):
                raise WireError("a shard says who it is first")
            if objection := hello.find_objection(len(self.coordinator.shards)):
                log.error("refused: %s", objection)
                stream.send(ms.HelloRefused(objection))
                return
            index = hello.shard
            self.coordinator.connect_shard(index, stream)
            async for message in messages:
                await self.coordinator.take_message(index, stream, message)
        except (WireError, TimeoutError, StopAsyncIteration) as error:
            why = str(error)
        except Exception as error:
            self.stop_by(error)
            why = repr(error)
        finally:
            stream.close()
            self._streams.discard(stream)
            if index >= 0 and not self._closing.is_set() and self.coordinator.lose_shard(index, stream, why):
                self.count_end(index, why)


@dataclass(kw_only=True, eq=False)
class ShardProcesses(ShardStreams):
    """Shards beside the syncer. ``command``: this program's, with its arguments; ``listener`` passes connections on to
    them."""

    command: Sequence[str]
    listener: PortListener

    async def start(self) -> None:
        """Start all of them."""
        self._folder = tempfile.TemporaryDirectory(prefix="diloco-")  # 0700
        self._path = str(Path(self._folder.name) / "shards")
        self._server = await asyncio.start_unix_server(self.serve, self._path)
        self.listener.begin_shards(len(self.coordinator.shards))
        for shard in self.coordinator.shards:
            self.run_task(self._keep(shard.index))

    async def close(self) -> None:
        """End all of them."""
        await super().close()
        self._folder.cleanup()

    async def _keep(self, index: int) -> None:
        """Run a shard's process again and again."""
        while not self._closing.is_set():
            code: int = SyncerExit.FAILED
            try:
                code = await self._run_once(index)
                why = f"its process ended with exit code {code}" if code >= 0 else f"signal {-code} ended its process"
            except OSError as error:
                why = f"its process cannot be started: {error.strerror or error}"
            if self._closing.is_set():
                return
            failures = self.coordinator.count_failure(index, why, code)
            log.error("shard %d: %s", index, why)
            await asyncio.sleep(pause_after(failures))

    async def _run_once(self, index: int) -> int:
        """Run a shard's process until it ends; returns its exit code. Raises OSError."""
        ours, theirs = make_link()
        self.listener.connect_shard(index, ours)
        with theirs:
            handle = theirs.fileno()
            words = ("--shard", str(index), "--syncer", self._path, "--connections", str(handle))
            process = await asyncio.create_subprocess_exec(*self.command, *words, pass_fds=(handle,))
        try:
            return await process.wait()
        finally:
            with suppress(ProcessLookupError):
                process.kill()


@dataclass(kw_only=True, eq=False)
class ShardPods(ShardStreams):
    """Shards in pods of their own, which connect to ``listening``. ``reloader``: of the syncer's credentials."""

    listening: socket.socket
    reloader: CredentialReloader
    _opening: dict[asyncio.Task[None], None] = field(default_factory=dict)  # in order
    _refusals: RefusalCounter = field(default_factory=RefusalCounter)

    async def start(self) -> None:
        """Accept them."""
        self.coordinator.await_pods()
        self._server = await asyncio.start_server(self._accept, sock=self.listening)
        self.run_task(self._tell_awaited())

    async def _tell_awaited(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), AWAITED_SECONDS)
            return
        self.coordinator.tell_awaited()

    def count_end(self, index: int, why: str) -> None:
        shard = self.coordinator.shards[index]
        if not shard.is_steady():
            self.coordinator.count_failure(index, why, shard.code)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cast(asyncio.Transport, writer.transport).pause_reading()  # what comes first is TLS's
        if len(self._opening) >= MAX_OPENING:
            oldest = next(iter(self._opening))
            del self._opening[oldest]
            oldest.cancel()
        task = self.run_task(self._open(reader, writer))
        task.add_done_callback(lambda _: writer.close())  # also of one that is cancelled before it has begun
        self._opening[task] = None

    async def _open(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve who shows that it has the syncer's key. Nothing that another says is parsed."""
        address, why = writer.get_extra_info("peername"), ""
        try:
            self.reloader.reload_if_changed(time.monotonic())
            context = self.reloader.context
            context.verify_mode = ssl.CERT_NONE  # stream.py says why
            set_options(writer.get_extra_info("socket"))
            async with asyncio.timeout(HELLO_SECONDS):
                await writer.start_tls(context)
                proof = await reader.readexactly(PROOF_BYTES)
            if not hmac.compare_digest(proof, make_proof(self.reloader.credentials)):
                why = "it has not the syncer's key: give shards the syncer's credentials"
        except (OSError, EOFError) as error:
            why = f"no handshake ({error!r})"
        except asyncio.CancelledError:
            why = f"{MAX_OPENING} others at once"
        finally:
            self._opening.pop(cast(asyncio.Task[None], asyncio.current_task()), None)
        if not why:
            await self.serve(reader, writer)
        elif self._refusals.count_refusal(ConnectionRefusal.STRANGER, time.monotonic()) is not None:
            log.warning("refused %s at the port of shards: %s", address, why)
