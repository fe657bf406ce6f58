"""TCP proxies between learners and syncer, so that ``--chaos`` can cut a connection.

Each process gets a port of its own on this machine, which stays the same over restarts of both sides. While a cut
lasts, its open connections have been reset and new ones are reset as soon as they come. Used only when a schedule
contains ``cut``: otherwise nothing stands between learners and syncer.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable

CHUNK_BYTES = 1 << 18
DIAL_SECONDS = 5.0
MAX_CONNECTIONS = 256  # per process


class Proxy:
    """Passes bytes between 127.0.0.1:``port`` and wherever ``target`` says the syncer is now."""

    def __init__(self, target: Callable[[], str | None]) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._cut_until = 0.0
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self, seconds: float) -> None:
        """Reset every connection now, and refuse new ones for ``seconds``."""
        self._cut_until = max(self._cut_until, asyncio.get_running_loop().time() + seconds)
        for writer in list(self._open):
            _reset(writer)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._open):
            _reset(writer)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._open.add(writer)
        out: asyncio.StreamWriter | None = None
        try:
            target = self._target()
            cut = asyncio.get_running_loop().time() < self._cut_until
            if target is None or cut or len(self._tasks) > MAX_CONNECTIONS:
                return
            host, _, port = target.rpartition(":")
            back, dialled = await asyncio.wait_for(asyncio.open_connection(host, int(port)), DIAL_SECONDS)
            out = dialled
            self._open.add(dialled)
            await asyncio.gather(_pump(reader, dialled), _pump(back, writer))
        except (OSError, TimeoutError):
            pass  # one side is gone; the other learns it by the reset below
        finally:
            for end in (writer, out):
                if end is not None:
                    self._open.discard(end)
                    _reset(end)
            self._tasks.discard(task)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST rather than FIN, as a lost link's first packet would be answered."""
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
