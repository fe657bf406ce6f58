"""Carries messages between the syncer and a shard, over a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from diloco_protocol.wire.limits import WireError
from diloco_syncer.shards import messages as ms

_LENGTH = 4
MAX_WAITING = 256 << 20  # bytes that the other end has not taken: it stands still


class MessageStream:
    """One end of a stream of messages."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, message: ms.FromShard | ms.ToShard) -> None:
        """Send a message, in order. Nothing happens once the stream has ended; it ends where the other end does not
        take what is sent."""
        if self._writer.is_closing():
            return
        data = ms.write_message(message)
        self._writer.write(len(data).to_bytes(_LENGTH, "big") + data)
        if self._writer.transport.get_write_buffer_size() > MAX_WAITING:
            self._writer.transport.abort()

    async def read_messages(self) -> AsyncIterator[Any]:
        """What comes, until the other end ends. Raises ``WireError``."""
        while True:
            try:
                size = int.from_bytes(await self._reader.readexactly(_LENGTH), "big")
                if size > ms.MAX_MESSAGE:
                    raise WireError(f"a message of {size} bytes between the syncer and a shard")
                data = await self._reader.readexactly(size)
            except (asyncio.IncompleteReadError, OSError):
                return
            yield ms.read_message(data)

    def close(self) -> None:
        self._writer.close()
