"""One session: the control stream from Join to its end.

The stream carries small protobuf messages only, each measured before it is
parsed. What is to be said is kept as *state*, not as a queue: the newest report,
and at most one of each other message; so a slow link never builds a backlog, and
what a broken session did not deliver is said in the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
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
        self.sending = False  # what was taken last is not handed to the transport yet

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
    def urgent(self) -> bool:
        """Whether there is something else to say; it does not wait for the next report's time."""
        return bool(self._other)

    @property
    def empty(self) -> bool:
        """Whether everything was handed to the transport."""
        return not self._other and not self._fresh and not self.sending

    def take(self) -> list[sync_pb2.LearnerMessage]:
        """What to send now: the newest report, then the messages that follow it."""
        messages = []
        if self._report is not None:
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
        self._hung_up = False

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

    async def hang_up(self) -> None:
        """Say that nothing more follows: the syncer then ends the stream, and ``run`` with it."""
        self._hung_up = True
        async with self._writing:
            with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):  # it is over already
                await self._call.done_writing()

    def cancel(self) -> None:
        self._call.cancel()

    async def _speak(self, outbox: Outbox, heartbeat_seconds: float) -> None:
        loop = asyncio.get_running_loop()
        next_report = next_heartbeat = loop.time()
        while True:
            now = loop.time()
            if outbox.urgent or now >= next_heartbeat or (outbox.fresh and now >= next_report):
                messages = outbox.take()
                outbox.sending = True
                for message in messages:
                    await self._send(message)
                outbox.sending = False
                now = loop.time()
                next_report, next_heartbeat = now + REPORT_SECONDS, now + heartbeat_seconds
            outbox.wake.clear()
            if not outbox.urgent:
                due = min(next_heartbeat, next_report) if outbox.fresh else next_heartbeat
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(due):
                        await outbox.wake.wait()

    async def _messages(self) -> AsyncIterator[sync_pb2.SyncerMessage]:
        while True:
            yield await self._receive()

    async def _send(self, message: sync_pb2.LearnerMessage) -> None:
        try:
            async with self._writing:
                if self._hung_up:
                    return
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
