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

from diloco_protocol.wire import limits, services, sync_pb2

_EOF: Any = aio.EOF  # type: ignore[attr-defined]  # its stubs lack the name
REPORT_SECONDS = 0.02  # reports are at least so far apart
REPORT, LEASE = "report", "lease-"  # keys of the outbox: the report, and what lease requests begin with


class SessionEnded(Exception):
    """The stream is over; the message says how. ``clean``: the syncer ended it in good order, so
    what was said before hanging up has been read. ``unauthenticated``: it did not let us in."""

    def __init__(self, message: str, clean: bool = False, unauthenticated: bool = False) -> None:
        super().__init__(message)
        self.clean = clean
        self.unauthenticated = unauthenticated


class Outbox:
    """What is to be said. All methods belong to the loop's thread.

    A message stays until the transport took it (``sent``); a *lasting* one is said again in
    every session, because the end of a session may swallow what the transport took.
    """

    def __init__(self) -> None:
        self._report: sync_pb2.Report | None = None  # the newest
        self._fresh = False
        self._reports = self._saying = 0  # reports left so far; the one that is being sent
        self._other: dict[str, sync_pb2.LearnerMessage] = {}
        self._lasting: dict[str, sync_pb2.LearnerMessage] = {}
        self.wake = asyncio.Event()

    def report(self, report: sync_pb2.Report | None) -> None:
        """Replace the report; None: nothing to report (yet)."""
        self._report = report
        self._fresh = report is not None
        self._reports += 1

    def say(self, key: str, message: sync_pb2.LearnerMessage, lasting: bool = False) -> None:
        """Say ``message`` as soon as possible; a newer one under the same key replaces it."""
        self._other[key] = message
        if lasting:
            self._lasting[key] = message
        self.wake.set()

    def begin_session(self) -> None:
        """A new session: lasting messages are said again, and lease requests are forgotten
        (the prefetcher asks again when it knows what the slot holds)."""
        for key in [key for key in self._other if key.startswith(LEASE)]:
            del self._other[key]
        self._other.update(self._lasting)

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
        return not self._other and not self._fresh

    def waiting(self) -> list[tuple[str, sync_pb2.LearnerMessage]]:
        """What to send now: the newest report, then the messages that follow it.

        Without one an empty report goes out: a heartbeat, so that a slot is not lost while its
        learner uploads version 0 or downloads what it will start from."""
        report = self._report if self._report is not None else sync_pb2.Report()
        self._saying = self._reports
        return [(REPORT, sync_pb2.LearnerMessage(report=report)), *self._other.items()]

    def sent(self, key: str, message: sync_pb2.LearnerMessage) -> None:
        """The transport took what ``waiting`` named; a newer one under the key stays."""
        if key == REPORT:
            self._fresh = self._fresh and self._saying != self._reports
        elif self._other.get(key) is message:
            del self._other[key]


class Session:
    """One stream. ``open`` joins, ``run`` pumps both directions until the stream ends."""

    def __init__(self, channel: aio.Channel, metadata: Sequence[tuple[str, str]]) -> None:
        method: Any = channel.stream_stream(services.SESSION, request_serializer=None, response_deserializer=None)
        self._call = method(metadata=tuple(metadata))
        self._writing = asyncio.Lock()
        self._broken_off: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.hung_up = False

    async def open(self, join: sync_pb2.Join) -> sync_pb2.SyncerMessage:
        """Say Join; the first message back, a Welcome or a Refusal. Raises SessionEnded."""
        try:
            async with asyncio.timeout(limits.JOIN_SECONDS):
                await self._send(sync_pb2.LearnerMessage(join=join))
                return await self._receive()
        except TimeoutError as error:
            raise SessionEnded(f"no answer to Join within {limits.JOIN_SECONDS:.0f} s") from error

    async def run(
        self,
        outbox: Outbox,
        heartbeat_seconds: float,
        handle: Callable[[sync_pb2.SyncerMessage], None],
        stamp: Callable[[sync_pb2.Report, float, float], None] = lambda report, now, every: None,
    ) -> None:
        """Until the stream ends; always raises SessionEnded (or what ``handle`` raises). ``stamp`` gets
        each report before it is sent, the loop's time, and the heartbeat's seconds."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._speak(outbox, heartbeat_seconds, stamp))
            group.create_task(self._break())
            async for message in self._messages():
                handle(message)

    async def hang_up(self) -> None:
        """Say that nothing more follows: the syncer then ends the stream, and ``run`` with it."""
        self.hung_up = True
        async with self._writing:
            with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):  # it is over already
                await self._call.done_writing()

    def break_off(self, reason: str) -> None:
        """End ``run`` from this side."""
        if not self._broken_off.done():
            self._broken_off.set_result(reason)

    def cancel(self) -> None:
        self._call.cancel()

    async def _break(self) -> None:
        raise SessionEnded(await self._broken_off)

    async def _speak(
        self, outbox: Outbox, heartbeat_seconds: float, stamp: Callable[[sync_pb2.Report, float, float], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        next_report = next_heartbeat = loop.time()
        while True:
            now = loop.time()
            if outbox.urgent or now >= next_heartbeat or (outbox.fresh and now >= next_report):
                for key, message in outbox.waiting():
                    if key == REPORT:  # a copy of what the training thread left
                        stamp(message.report, loop.time(), heartbeat_seconds)
                    if not await self._send(message):
                        return
                    outbox.sent(key, message)
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

    async def _send(self, message: sync_pb2.LearnerMessage) -> bool:
        """Hand a message to the transport; False: this side has hung up."""
        try:
            async with self._writing:
                if self.hung_up:
                    return False
                await self._call.write(message.SerializeToString())
                return True
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
            return limits.parse(sync_pb2.SyncerMessage, data)
        except limits.WireError as error:
            raise SessionEnded(str(error)) from error

    async def _ended(self) -> SessionEnded:
        try:
            async with asyncio.timeout(1.0):
                code, details = await self._call.code(), await self._call.details()
        except TimeoutError:
            return SessionEnded("the stream broke")
        return SessionEnded(
            f"{code.name.lower().replace('_', ' ')}: {details or 'the syncer ended the stream'}",
            clean=code.name == "OK",
            unauthenticated=code.name == "UNAUTHENTICATED",
        )
