"""Starts the processes of the shards, and starts again those that end."""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from diloco_protocol.common.tasks import cancel_tasks
from diloco_protocol.vocabulary import SyncerExit
from diloco_protocol.wire.limits import WireError
from diloco_syncer.server.tls.listener import PortListener
from diloco_syncer.server.tls.passing import make_link
from diloco_syncer.shards import messages as ms
from diloco_syncer.shards.coordinator import Coordinator
from diloco_syncer.shards.stream import MessageStream

log = logging.getLogger(__name__)

HELLO_SECONDS = 10.0
LONGEST_PAUSE = 10.0  # seconds before a shard that ended is started again, or a life of the syncer
STEADY_SECONDS = 60.0  # a life that lasted so long begins the pauses anew
END_SECONDS = 5.0


def pause_after(failures: int) -> float:
    """Seconds before the next try, after so many in a row that failed."""
    return min(LONGEST_PAUSE, 0.2 * 2.0 ** min(failures, 16)) * random.uniform(0.5, 1.0)


class ShardProcesses:
    """The processes of one life of the syncer. ``command``: this program's, with its arguments; ``listener`` passes
    connections on to them. ``stop_by`` is called with a fault of the syncer's own."""

    def __init__(
        self,
        coordinator: Coordinator,
        command: Sequence[str],
        listener: PortListener,
        stop_by: Callable[[BaseException], None],
    ) -> None:
        self._coordinator, self._command, self._listener, self._stop_by = coordinator, command, listener, stop_by
        self._folder = tempfile.TemporaryDirectory(prefix="diloco-")  # 0700
        self._path = str(Path(self._folder.name) / "shards")
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._streams: set[MessageStream] = set()
        self._closing = asyncio.Event()

    async def start(self) -> None:
        """Start all of them."""
        self._server = await asyncio.start_unix_server(self._serve, self._path)
        self._listener.begin_shards(len(self._coordinator.shards))
        for shard in self._coordinator.shards:
            task = asyncio.create_task(self._keep(shard.index))
            task.add_done_callback(self._note_done)
            self._tasks.add(task)

    async def close(self) -> None:
        """End all of them."""
        self._closing.set()
        if self._server is not None:
            self._server.close()
        for stream in self._streams:  # what ends it
            stream.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=END_SECONDS)
        await cancel_tasks(self._tasks)
        self._folder.cleanup()

    def _note_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._stop_by(error)

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
            failures = self._coordinator.count_failure(index, why, code)
            log.error("shard %d: %s", index, why)
            await asyncio.sleep(pause_after(failures))

    async def _run_once(self, index: int) -> int:
        """Run a shard's process until it ends; returns its exit code. Raises OSError."""
        ours, theirs = make_link()
        self._listener.connect_shard(index, ours)
        with theirs:
            handle = theirs.fileno()
            words = ("--shard", str(index), "--syncer", self._path, "--connections", str(handle))
            process = await asyncio.create_subprocess_exec(*self._command, *words, pass_fds=(handle,))
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(STEADY_SECONDS):
                    return await process.wait()
            self._coordinator.note_steady(index)
            return await process.wait()
        finally:
            with suppress(ProcessLookupError):
                process.kill()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = MessageStream(reader, writer)
        self._streams.add(stream)
        index = -1
        why = "its process has ended"
        try:
            messages = stream.read_messages()
            async with asyncio.timeout(HELLO_SECONDS):
                hello = await anext(messages)
            if not isinstance(hello, ms.Hello) or not 0 <= hello.shard < len(self._coordinator.shards):
                raise WireError("a shard says who it is first")
            index = hello.shard
            self._coordinator.connect_shard(index, stream)
            async for message in messages:
                await self._coordinator.take_message(index, stream, message)
        except (WireError, TimeoutError, StopAsyncIteration) as error:
            why = str(error)
        except Exception as error:
            self._stop_by(error)
            why = repr(error)
        finally:
            stream.close()
            self._streams.discard(stream)
            if index >= 0 and not self._closing.is_set():
                self._coordinator.lose_shard(index, stream, why)
