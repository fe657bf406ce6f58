"""One session: the control stream from Join to its end.

The stream carries small protobuf messages only, and each is measured before it is parsed. What is to be
sent is kept as *state*, not as a queue: the newest report, and at most one message under each key. So a
slow link never builds a backlog, and what a broken session did not deliver is sent in the next one.

Example: the learner leaves reports for steps 7, 8 and 9 while the stream is busy; only 9's is sent, and
nothing is lost, because counts in reports are cumulative.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from grpc import aio

from diloco_protocol.wire import channels, convert, limits, sync_pb2
from diloco_protocol.wire.records import StepReport

_EOF: Any = aio.EOF  # type: ignore[attr-defined]  # its stubs lack the name
REPORT_SECONDS = 0.02  # reports are at least so far apart
_REPORT = "report"  # the report's key among the messages to send
LEASE_KEY = "lease-"  # what the keys of lease requests begin with


class SessionEnded(Exception):
    """The stream is over; the message says how.

    ``clean``: the syncer ended it in good order, so it has read everything that was sent before this side
    half-closed the stream. ``unauthenticated``: the syncer did not accept this process's token.
    """

    def __init__(self, message: str, clean: bool = False, unauthenticated: bool = False) -> None:
        super().__init__(message)
        self.clean = clean
        self.unauthenticated = unauthenticated


class Outbox:
    """What is to be sent to the syncer. Only the client's thread calls its methods.

    A message stays until the transport took it (``mark_sent``). A *lasting* one is sent again in every
    session, because the end of a session may swallow what the transport took.
    """

    def __init__(self) -> None:
        self._report: StepReport | None = None  # the newest
        self.has_new_report = False  # that was not sent
        self._reports = 0  # put so far
        self._reports_sending = 0  # of which this was the newest when the sending began
        self._messages: dict[str, sync_pb2.LearnerMessage] = {}
        self._lasting: dict[str, sync_pb2.LearnerMessage] = {}
        self.changed = asyncio.Event()

    def put_report(self, report: StepReport | None) -> None:
        """Replace the report; None: there is nothing to report (yet)."""
        self._report = report
        self.has_new_report = report is not None
        self._reports += 1
        self.changed.set()

    def put(self, key: str, message: sync_pb2.LearnerMessage, lasting: bool = False) -> None:
        """Send ``message`` as soon as possible; a newer one under the same key replaces it."""
        self._messages[key] = message
        if lasting:
            self._lasting[key] = message
        self.changed.set()

    def begin_session(self) -> None:
        """Prepare a new session: lasting messages are sent again, and lease requests are forgotten, because
        the prefetcher asks again when it knows what the slot holds."""
        for key in [key for key in self._messages if key.startswith(LEASE_KEY)]:
            del self._messages[key]
        self._messages.update(self._lasting)

    @property
    def has_messages(self) -> bool:
        """Whether there is a message beside the report; it does not wait for the next report's time."""
        return bool(self._messages)

    @property
    def is_empty(self) -> bool:
        """Whether everything was handed to the transport."""
        return not self._messages and not self.has_new_report

    def begin_sending(
        self, stamp: Callable[[StepReport], StepReport] = lambda report: report
    ) -> list[tuple[str, sync_pb2.LearnerMessage]]:
        """What to send now, with the keys for ``mark_sent``: the newest report, completed by ``stamp``, then the
        other messages.

        Without a report an empty one goes out as a heartbeat, so that a slot is not lost while its learner
        uploads version 0 or downloads what it will start from.
        """
        report = convert.to_wire(stamp(self._report or StepReport()))
        self._reports_sending = self._reports
        return [(_REPORT, sync_pb2.LearnerMessage(report=report)), *self._messages.items()]

    def mark_sent(self, key: str, message: sync_pb2.LearnerMessage) -> None:
        """Forget what the transport took; a newer message under the key stays."""
        if key == _REPORT:
            self.has_new_report = self.has_new_report and self._reports_sending != self._reports
        elif self._messages.get(key) is message:
            del self._messages[key]


class Session:
    """One stream. ``open`` joins, ``run`` sends and receives until the stream ends."""

    def __init__(self, channel: aio.Channel, metadata: Sequence[tuple[str, str]]) -> None:
        method: Any = channel.stream_stream(channels.SESSION, request_serializer=None, response_deserializer=None)
        self._call = method(metadata=tuple(metadata))
        self._writing = asyncio.Lock()
        self._end_reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.half_closed = False  # nothing more is sent

    async def open(self, join: sync_pb2.Join) -> sync_pb2.SyncerMessage:
        """Send Join, and return the first message back, a Welcome or a Refusal. Raises SessionEnded."""
        seconds = limits.CONNECT_SECONDS + limits.JOIN_SECONDS
        try:
            async with asyncio.timeout(seconds):
                await self._send(sync_pb2.LearnerMessage(join=join))
                return await self._receive()
        except TimeoutError as error:
            raise SessionEnded(f"no answer to Join within {seconds:.0f} s") from error

    async def run(
        self,
        outbox: Outbox,
        heartbeat_seconds: float,
        handle: Callable[[sync_pb2.SyncerMessage], None],
        stamp: Callable[[StepReport, float, float], StepReport] = lambda report, now, every: report,
    ) -> None:
        """Send what is in the outbox and pass each message received to ``handle``, until the stream ends.

        Always raises SessionEnded, or what ``handle`` raises. ``stamp(report, now, every)`` completes each
        report before it is sent: the loop's time, and the seconds between heartbeats.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send_outbox(outbox, heartbeat_seconds, stamp))
            group.create_task(self._raise_when_ended())
            while True:
                handle(await self._receive())

    async def half_close(self) -> None:
        """Tell the syncer that nothing more follows: it then ends the stream, and ``run`` with it."""
        self.half_closed = True
        async with self._writing:
            with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):  # it is over already
                await self._call.done_writing()

    def end(self, reason: str) -> None:
        """End ``run`` from this side."""
        if not self._end_reason.done():
            self._end_reason.set_result(reason)

    def cancel(self) -> None:
        """Drop the stream at once."""
        self._call.cancel()

    async def _raise_when_ended(self) -> None:
        raise SessionEnded(await self._end_reason)

    async def _send_outbox(
        self, outbox: Outbox, heartbeat_seconds: float, stamp: Callable[[StepReport, float, float], StepReport]
    ) -> None:
        loop = asyncio.get_running_loop()
        next_report = next_heartbeat = loop.time()
        while True:
            now = loop.time()
            if outbox.has_messages or now >= next_heartbeat or (outbox.has_new_report and now >= next_report):
                for key, message in outbox.begin_sending(lambda report: stamp(report, loop.time(), heartbeat_seconds)):
                    if not await self._send(message):
                        return
                    outbox.mark_sent(key, message)
                now = loop.time()
                next_report, next_heartbeat = now + REPORT_SECONDS, now + heartbeat_seconds
            outbox.changed.clear()
            if not outbox.has_messages:
                due = min(next_heartbeat, next_report) if outbox.has_new_report else next_heartbeat
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(due):
                        await outbox.changed.wait()

    async def _send(self, message: sync_pb2.LearnerMessage) -> bool:
        """Hand a message to the transport; False: this side has half-closed the stream."""
        try:
            async with self._writing:
                if self.half_closed:
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
            return convert.parse(sync_pb2.SyncerMessage, data)
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
