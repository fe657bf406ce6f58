"""A learner's way to the syncer that counts what it carries: TCP on this machine, without privileges.

It counts bytes of the TCP streams, so all that both sides say, and no headers of TCP/IP.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Self

CHUNK_BYTES = 1 << 18
START_SECONDS = 10.0
DIAL_SECONDS = 5.0
MAX_CONNECTIONS = 64


@dataclass(frozen=True, slots=True)
class Carried:
    """Bytes since the relay was made. Up is towards the syncer."""

    up: int = 0
    down: int = 0

    def __add__(self, other: Carried) -> Carried:
        return Carried(self.up + other.up, self.down + other.down)

    def __sub__(self, other: Carried) -> Carried:
        return Carried(self.up - other.up, self.down - other.down)


class Relay:
    """Passes connections to ``address`` on to ``target``; a thread with a loop of its own."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._up = self._down = 0
        self.address = ""
        self._loop = asyncio.new_event_loop()
        self._serving = threading.Event()
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    @property
    def carried(self) -> Carried:
        """Up to now."""
        return Carried(self._up, self._down)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._serving.wait(START_SECONDS):
            raise SystemExit("bench/relay: it does not listen")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(START_SECONDS)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=CHUNK_BYTES)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._serving.set()
        await self._stop.wait()
        server.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=START_SECONDS)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        ends = [writer]
        # One side is gone: the other learns it as its connection is closed below.
        with contextlib.suppress(OSError, TimeoutError, asyncio.CancelledError):
            if len(self._tasks) <= MAX_CONNECTIONS:
                dialling = asyncio.open_connection(*self._target, limit=CHUNK_BYTES)
                back, out = await asyncio.wait_for(dialling, DIAL_SECONDS)
                ends.append(out)
                await asyncio.gather(self._pump(reader, out, True), self._pump(back, writer, False))
        for end in ends:
            end.close()
        self._tasks.discard(task)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, up: bool) -> None:
        while data := await source.read(CHUNK_BYTES):
            if up:
                self._up += len(data)
            else:
                self._down += len(data)
            sink.write(data)
            await sink.drain()
        if sink.can_write_eof():
            sink.write_eof()
