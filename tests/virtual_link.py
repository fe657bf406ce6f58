"""A slow link in virtual time, between the worker's real transfers and the syncer's real side of a download.

One ``Link`` carries frames of all streams by turns, as the connections of one session share a real one. A message comes
when its last frame has, and its sender waits for that, as gRPC's flow control makes it wait. ``Channel`` stands in for
a gRPC channel. ``break_streams`` resets all connections, and ``stop`` makes one fall silent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc import aio

Serve = Callable[[bytes, Any], Awaitable[None]]
FRAME = 16 << 10


class Link:
    """``rate`` bytes a second down, ``latency`` seconds one way. ``carried``: bytes so far."""

    def __init__(self, rate: float, latency: float = 0.05) -> None:
        self.rate, self.latency = rate, latency
        self.carried = 0
        self.most_streams = 0
        self._waiting: deque[list[Any]] = deque()  # of each message: its stream, the bytes left, and who waits
        self._carrying: asyncio.Task[None] | None = None

    async def carry(self, stream: Stream, size: int) -> None:
        """Wait until so many bytes have gone."""
        gone = asyncio.get_running_loop().create_future()
        self._waiting.append([stream, size, gone])
        self.most_streams = max(self.most_streams, len(self._waiting))
        if self._carrying is None or self._carrying.done():
            self._carrying = asyncio.ensure_future(self._carry())
        await gone

    async def _carry(self) -> None:
        while self._waiting:
            one = self._waiting.popleft()
            stream, left, gone = one
            if stream.is_over:
                gone.cancel()
                continue
            if stream.channel.silent:
                self._waiting.append(one)
                if all(other[0].channel.silent for other in self._waiting):
                    return
                continue
            frame = min(FRAME, left)
            await asyncio.sleep(frame / self.rate)
            self.carried += frame
            one[1] = left - frame
            if one[1] > 0:
                self._waiting.append(one)
            elif not gone.done():
                gone.set_result(None)


class Broken(aio.AioRpcError):
    """A connection was reset."""

    def __init__(self) -> None:
        metadata = aio.Metadata()
        super().__init__(grpc.StatusCode.UNAVAILABLE, metadata, metadata, details="reset")


class Stream:
    """One call of a download: what gRPC shows of it to both sides."""

    def __init__(self, channel: Channel, request: bytes) -> None:
        self.channel = channel
        self.is_over = False
        self._arrived = 0.0
        self._messages: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self._serving = asyncio.ensure_future(self._serve(request))

    async def _serve(self, request: bytes) -> None:
        await asyncio.sleep(self.channel.link.latency)
        await self.channel.serve(request, self)
        self._arrive(None)

    def _arrive(self, message: bytes | Exception | None) -> None:
        loop = asyncio.get_running_loop()
        self._arrived = max(self._arrived + 1e-6, loop.time() + self.channel.link.latency)  # in their order
        loop.call_at(self._arrived, self._messages.put_nowait, message)

    async def write(self, message: bytes) -> None:
        await self.channel.link.carry(self, len(message))
        self._arrive(message)

    async def abort(self, code: Any, details: str) -> None:
        self._arrive(Broken())
        raise asyncio.CancelledError

    def reset(self) -> None:
        self.is_over = True
        self._serving.cancel()
        self._messages.put_nowait(Broken())

    async def __aiter__(self) -> Any:
        while (message := await self._messages.get()) is not None:
            if isinstance(message, Exception):
                raise message
            yield message

    def cancel(self) -> None:
        self.is_over = True
        self._serving.cancel()
        self.channel.streams.discard(self)


class Channel:
    """A channel to a syncer at the other end of ``link``, which answers calls by ``serve``."""

    def __init__(self, link: Link, serve: Serve) -> None:
        self.link, self.serve = link, serve
        self.streams: set[Stream] = set()
        self.silent = False

    def unary_stream(self, *_: Any, **__: Any) -> Callable[..., Stream]:
        def call(request: bytes, **_: Any) -> Stream:
            made = Stream(self, request)
            self.streams.add(made)
            return made

        return call

    def break_streams(self) -> None:
        """Reset the connection."""
        for stream in list(self.streams):
            stream.reset()

    def stop(self) -> None:
        """Let nothing through any more, without a word."""
        self.silent = True
