"""A slow link in virtual time, between the worker's real transfers and the syncer's real side of a download.

One ``Link`` carries frames of all calls by turns, as the connections of one session share a real one, or lets one call
have all of it. A frame comes after the link's latency, and its sender waits until it has gone. ``Channel`` stands in
for a bulk connection. ``break_connection`` resets it, and ``stop`` makes it fall silent; the next call connects anew.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from diloco_protocol.wire import sync_pb2
from diloco_protocol.wire.byte_stream import StreamBroken

Serve = Callable[[sync_pb2.DownloadRequest, Any], Awaitable[None]]
FRAME = 16 << 10


class Link:
    """``rate`` bytes a second down, ``latency`` seconds one way. ``by_turns`` False: a call whose frame has gone has
    the next one too. ``carried``: bytes so far."""

    def __init__(self, rate: float, latency: float = 0.05, by_turns: bool = True) -> None:
        self.rate, self.latency, self.by_turns = rate, latency, by_turns
        self.carried = 0
        self.most_calls = 0
        self._waiting: deque[tuple[Call, int, asyncio.Future[None]]] = deque()  # a frame of each, and who waits for it
        self._carrying: asyncio.Task[None] | None = None
        self._served: Call | None = None  # last

    async def carry(self, call: Call, size: int) -> None:
        """Wait until a frame of so many bytes has gone."""
        gone = asyncio.get_running_loop().create_future()
        if call is self._served and not self.by_turns:
            self._waiting.appendleft((call, size, gone))
        else:
            self._waiting.append((call, size, gone))
        self.most_calls = max(self.most_calls, len({id(one) for one, _, _ in self._waiting}))
        if self._carrying is None or self._carrying.done():
            self._carrying = asyncio.ensure_future(self._carry())
        await gone

    async def _carry(self) -> None:
        while self._waiting:
            call, size, gone = one = self._waiting.popleft()
            if call.is_over:
                gone.cancel()
            elif call.is_silent:
                self._waiting.append(one)
                if all(other.is_silent for other, _, _ in self._waiting):
                    return
            else:
                await asyncio.sleep(size / self.rate)
                self.carried += size
                self._served = call
                if not gone.done():
                    gone.set_result(None)
                await asyncio.sleep(0)  # in which the sender has its next frame wait


class Call:
    """One download: what its caller has of it (``BulkCall``), and the syncer (``ServedCall``)."""

    def __init__(self, channel: Channel, request: sync_pb2.DownloadRequest) -> None:
        self._channel = channel
        self.is_over = self.is_silent = False
        self._arrived = 0.0
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._unread = -1  # bytes; -1: there was no answer yet
        self._left = b""
        self._serving = asyncio.ensure_future(self._serve(request))

    # ------------------------------------------------------------- the syncer's end

    async def _serve(self, request: sync_pb2.DownloadRequest) -> None:
        await asyncio.sleep(self._channel.link.latency)
        try:
            await self._channel.serve(request, self)
        except StreamBroken as error:
            self._arrive(error)

    def _arrive(self, message: Any) -> None:
        loop = asyncio.get_running_loop()
        self._arrived = max(self._arrived + 1e-6, loop.time() + self._channel.link.latency)  # in their order
        loop.call_at(self._arrived, self._messages.put_nowait, message)

    async def reply(self, reply: sync_pb2.BulkReply) -> None:
        await self._channel.link.carry(self, reply.ByteSize())
        self._arrive(reply)

    async def write(self, part: memoryview, note: Callable[[int], None] = lambda count: None) -> None:
        for start in range(0, len(part), FRAME):
            frame = bytes(part[start : start + FRAME])
            await self._channel.link.carry(self, len(frame))
            note(len(frame))
            self._arrive(frame)

    # ------------------------------------------------------------- the caller's end

    async def _take(self) -> Any:
        message = await self._messages.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def read_reply(self) -> sync_pb2.BulkReply:
        reply: sync_pb2.BulkReply = await self._take()
        self._unread = reply.download.bytes
        return reply

    async def read_into(self, view: memoryview, check: Callable[[], None] = lambda: None) -> int:
        if not self._unread:
            return 0
        self._left = self._left or await self._take()
        check()
        count = min(len(view), len(self._left))
        view[:count], self._left = self._left[:count], self._left[count:]
        self._unread -= count
        return count

    def reset(self) -> None:
        self.is_over = True
        self._serving.cancel()
        self._messages.put_nowait(StreamBroken("connection reset by peer"))

    def end(self) -> None:
        self.is_over = True
        self._serving.cancel()
        self._channel.end_call(whole=self._unread == 0)


class Channel:
    """A bulk connection to a syncer at the other end of ``link``, which answers calls by ``serve``."""

    def __init__(self, link: Link, serve: Serve) -> None:
        self.link, self.serve = link, serve
        self.is_connected = False
        self._call: Call | None = None

    async def begin(self, *, download: sync_pb2.DownloadRequest) -> Call:
        assert self._call is None, "one call at a time"
        if not self.is_connected:
            await asyncio.sleep(4 * self.link.latency)  # TCP and TLS: a round trip each
            self.is_connected = True
        self._call = Call(self, download)
        return self._call

    def end_call(self, whole: bool) -> None:
        """The call is over; one that did not come to its end costs the connection."""
        self.is_connected = self.is_connected and whole
        self._call = None

    def break_connection(self) -> None:
        """Reset it."""
        self.is_connected = False
        if self._call is not None:
            self._call.reset()

    def stop(self) -> None:
        """Let nothing of the call that runs through any more, without a word."""
        assert self._call is not None
        self._call.is_silent = True
