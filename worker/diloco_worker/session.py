"""One session: the control stream from Join to its end.

The stream carries small protobuf messages only, each measured before it is
parsed. What is to be said is kept as *state*, not as a queue: the newest report,
and at most one of each other message; so a slow link never builds a backlog, and
what a broken session did not deliver is said in the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from grpc import aio

from diloco_protocol import sync_pb2, wire

_EOF: Any = aio.EOF  # type: ignore[attr-defined]  # its stubs lack the name
REPORT_SECONDS = 0.02  # reports are at least so far apart


class SessionEnded(Exception):
    """The stream is over; the message says how."""


class Outbox:
    """What is to be said. All methods belong to the loop's thread, but for ``report``."""

    def __init__(self) -> None:
        self._report: sync_pb2.Report | None = None  # the newest
        self._fresh = False
        self._other: dict[str, sync_pb2.LearnerMessage] = {}
        self.wake = asyncio.Event()

    @property
    def newest_report(self) -> sync_pb2.Report | None:
        return self._report

    def report(self, report: sync_pb2.Report | None, fresh: bool = True) -> None:
        """Replace the report; None: nothing to report (no slot)."""
        self._report, self._fresh = report, fresh and report is not None

    def say(self, key: str, message: sync_pb2.LearnerMessage) -> None:
        """Say ``message`` as soon as possible; a newer one under the same key replaces it."""
        self._other[key] = message
        self.wake.set()

    def forget(self, key: str) -> None:
        self._other.pop(key, None)

    @property
    def fresh(self) -> bool:
        """Whether there is a report that was not sent."""
        return self._fresh

    @property
    def empty(self) -> bool:
        return not self._other and not self._fresh

    def take(self, heartbeat: bool) -> list[sync_pb2.LearnerMessage]:
        """What to send now: other messages after the report that they follow."""
        messages = []
        if self._report is not None and (self._fresh or heartbeat):
            messages.append(sync_pb2.LearnerMessage(report=self._report))
            self._fresh = False
        messages.extend(self._other.values())
        self._other.clear()
        return messages


class Session:
    """One stream. ``open`` joins, ``run`` pumps both directions until the stream ends."""

    def __init__(self, channel: aio.Channel, metadata: Sequence[tuple[str, str]]) -> None:
        method: Any = channel.stream_stream(wire.SESSION, request_serializer=None, response_deserializer=None)
        self._call = method(metadata=tuple(metadata))
        self._writing = asyncio.Lock()

    async def open(self, join: sync_pb2.Join) -> sync_pb2.SyncerMessage:
        """Say Join; the first message back, a Welcome or a Refusal. Raises SessionEnded."""
        try:
            async with asyncio.timeout(wire.JOIN_SECONDS):
                await self._send(sync_pb2.LearnerMessage(join=join))
                return await self._receive()
        except TimeoutError as error:
            raise SessionEnded(f"no answer to Join within {wire.JOIN_SECONDS:.0f} s") from error

    async def run(
        self, outbox: Outbox, heartbeat_seconds: float, handle: Callable[[sync_pb2.SyncerMessage], None]
    ) -> None:
        """Until the stream ends; always raises SessionEnded (or what ``handle`` raises)."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._speak(outbox, heartbeat_seconds))
            async for message in self._messages():
                handle(message)

    async def close(self) -> None:
        """Half-close and let the syncer end the stream; at most a second."""
        try:
            async with asyncio.timeout(1.0):
                await self._call.done_writing()
                while await self._call.read() is not _EOF:
                    pass
        except (TimeoutError, aio.AioRpcError, asyncio.InvalidStateError):
            pass  # it ended by itself, or never will: either way it is cancelled
        finally:
            self._call.cancel()

    def cancel(self) -> None:
        self._call.cancel()

    async def _speak(self, outbox: Outbox, heartbeat_seconds: float) -> None:
        loop = asyncio.get_running_loop()
        next_heartbeat = loop.time()
        while True:
            beat = loop.time() >= next_heartbeat
            for message in outbox.take(beat):
                await self._send(message)
            if beat:
                next_heartbeat = loop.time() + heartbeat_seconds
            await asyncio.sleep(REPORT_SECONDS)
            if outbox.empty:
                outbox.wake.clear()
                try:
                    async with asyncio.timeout(max(0.0, next_heartbeat - loop.time())):
                        await outbox.wake.wait()
                except TimeoutError:
                    pass  # the heartbeat is due

    async def _messages(self) -> AsyncIterator[sync_pb2.SyncerMessage]:
        while True:
            yield await self._receive()

    async def _send(self, message: sync_pb2.LearnerMessage) -> None:
        try:
            async with self._writing:
                await self._call.write(message.SerializeToString())
        except (aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await self._ended() from error

    async def _receive(self) -> sync_pb2.SyncerMessage:
        try:
            data = await self._call.read()
        except (aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await self._ended() from error
        if data is _EOF:
            raise await self._ended()
        try:
            return wire.parse(sync_pb2.SyncerMessage, data)
        except wire.WireError as error:
            raise SessionEnded(str(error)) from error

    async def _ended(self) -> SessionEnded:
        try:
            async with asyncio.timeout(1.0):
                code, details = await self._call.code(), await self._call.details()
        except TimeoutError:
            return SessionEnded("the stream broke")
        return SessionEnded(
            f"{code.name.lower().replace('_', ' ')}: {details or 'the syncer ended the stream'}"
        )
