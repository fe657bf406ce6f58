"""What is between simulated processes: a learner's session by gRPC, and its bulk connections, to a syncer's real side.

Messages of one direction come in order, each after a while; a link may stand still, and then they come when it goes on.
A call breaks at its two ends one after the other: the caller hears ``UNAVAILABLE``, the handler is cancelled, and what
was on its way is lost. So does a bulk connection, at whose ends are the product's own calls and frames; only its bytes
are carried here. So an upload may have been taken whose answer never came.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
from grpc import aio

from diloco_protocol.wire import channels, sync_pb2
from diloco_protocol.wire.bulk_calls import BulkCall, BulkConnection
from diloco_protocol.wire.byte_stream import ByteStream, StreamBroken
from diloco_protocol.wire.limits import WireError
from diloco_syncer.server.bulk import BulkServer
from diloco_syncer.server.tls.connection_limits import Peer
from diloco_syncer.store.base import HigherEpoch
from diloco_syncer.store.checkpoint import RecordMadeMeanwhile
from diloco_syncer.store.restore import StoreUnusable
from diloco_syncer.store.tape import TapeError

if TYPE_CHECKING:
    from syncer_simulation.worker_process import WorkerProcess
    from syncer_simulation.worker_world import WorkerWorld

_EOF: Any = aio.EOF  # type: ignore[attr-defined]  # its stubs lack the name
LONGER_THAN_HEADERS = 900  # bytes
AHEAD = 2  # messages that a writer may have on their way
ENDS_THE_PROCESS = (HigherEpoch, RecordMadeMeanwhile, TapeError, StoreUnusable, OSError)  # which is judged by that


@dataclass
class Link:
    """One process's way to the syncer. ``seconds``: the longest that a message takes."""

    seconds: float
    bytes_per_second: float
    stalled_until: float = 0.0
    calls: list[Call | VirtualConnection] = field(default_factory=list)  # that are not over at the process's end

    def sever(self, late: float) -> None:
        """Break all calls; the syncer notices ``late`` seconds after the process."""
        for call in list(self.calls):
            call.sever(late)


@dataclass
class End:
    """How a call ended."""

    code: grpc.StatusCode
    details: str = ""


class Aborted(Exception):
    """A handler ends its call."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.end = End(code, details)


class Pipe:
    """One direction of a call. The reader's future is of the loop that reads."""

    def __init__(self, world: WorkerWorld, link: Link) -> None:
        self._world, self._link = world, link
        self._flying: deque[Any] = deque()
        self._come: deque[Any] = deque()
        self._newest = 0.0  # when the newest message comes
        self._changed: list[asyncio.Future[None]] = []
        self.cut = False  # nothing comes any more

    def send(self, item: Any, size: int = 0) -> None:
        link = self._link
        seconds = self._world.random.uniform(0.0, link.seconds) + size / link.bytes_per_second
        self._newest = max(self._newest, self._world.now + seconds)
        self._flying.append(item)
        self._world.at(self._newest - self._world.now, self._arrive)

    def _arrive(self) -> None:
        if (wait := self._link.stalled_until - self._world.now) > 0:
            self._world.at(wait, self._arrive)
        elif not self.cut:
            self._come.append(self._flying.popleft())
            self._change()

    def finish(self, item: Any) -> None:
        """``item`` is the last; what is on its way is lost."""
        self.cut = True
        self._flying.clear()
        self._come.append(item)
        self._change()

    def _change(self) -> None:
        changed, self._changed = self._changed, []
        for future in changed:
            if not future.done():
                future.set_result(None)

    async def _wait(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._changed.append(future)
        await future

    async def read(self) -> Any:
        """The next message; an ``End`` stays where it is."""
        while not self._come:
            await self._wait()
        item = self._come[0]
        return item if isinstance(item, End) else self._come.popleft()

    async def await_room(self) -> None:
        while len(self._flying) >= AHEAD and not self.cut:
            await self._wait()

    @property
    def has_come(self) -> bool:
        """Whether there is something to be read."""
        return bool(self._come)

    @property
    def end(self) -> End | None:
        """How the call ended, if that has come, read or not."""
        return self._come[-1] if self._come and isinstance(self._come[-1], End) else None


@dataclass(frozen=True)
class Context:
    """What a handler has of its call."""

    pipe: Pipe

    async def write(self, message: bytes) -> None:
        await self.pipe.await_room()
        self.pipe.send(message, len(message))

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Aborted(code, details)

    def invocation_metadata(self) -> tuple[()]:
        return ()


class Call:
    """A call as its caller has it."""

    shard = None  # sessions are the syncer's own

    def __init__(self, channel: Channel, method: str, timeout: float | None) -> None:
        self.channel, self.method, self.life = channel, method, channel.life
        self.world, self.link = channel.world, channel.link
        self.up, self.down = Pipe(self.world, self.link), Pipe(self.world, self.link)
        self.done = False  # nothing more is sent
        self.task: asyncio.Task[None] | None = None
        self.link.calls.append(self)
        self.world.at(self.world.random.uniform(0.0, self.link.seconds), self._begin)
        if timeout is not None:
            self.world.at(timeout, lambda: self._close(End(grpc.StatusCode.DEADLINE_EXCEEDED, "too late"), 0.0))

    # ------------------------------------------------------------- the handler's end

    def _begin(self) -> None:
        life = self.channel.life
        if self.down.end is not None:
            return
        if life is None or not life.serving:
            self._close(End(grpc.StatusCode.UNAVAILABLE, "nobody listens"), 0.0)
        else:
            self.task = life.loop.create_task(self._serve())

    async def _serve(self) -> None:
        life = self.channel.life
        assert life is not None and life.syncer is not None
        asked = SimpleNamespace(method=self.method, invocation_metadata=())
        handler = channels.session_handler(life.syncer.sessions.serve).service(asked)
        end = End(grpc.StatusCode.OK)
        try:
            await handler.stream_stream(self._requests(), Context(self.down))
        except Aborted as aborted:
            end = aborted.end
        except ENDS_THE_PROCESS as error:
            end = End(grpc.StatusCode.UNKNOWN, repr(error))
        except Exception as error:
            self.world.failures.append(error)
            raise
        self.down.send(end)

    async def _requests(self) -> AsyncIterator[bytes]:
        while (message := await self.up.read()) is not _EOF and not isinstance(message, End):
            yield message

    # ------------------------------------------------------------- the caller's end

    async def write(self, message: bytes) -> None:
        self._raise_if_over()
        self.world.hear(self, message, answer=False)
        self.up.send(message, len(message))
        await self.up.await_room()
        self._raise_if_over()

    async def done_writing(self) -> None:
        self._raise_if_over()
        if not self.done:
            self.done = True
            self.up.send(_EOF)

    async def read(self) -> Any:
        message = await self.down.read()
        if isinstance(message, End):
            self._leave()
            if message.code is not grpc.StatusCode.OK:
                raise self._error(message)
            return _EOF
        self.world.hear(self, message, answer=True)
        return message

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (message := await self.read()) is not _EOF:
            yield message

    async def code(self) -> grpc.StatusCode:
        return (await self._ended()).code

    async def details(self) -> str:
        return (await self._ended()).details

    async def _ended(self) -> End:
        while (end := self.down.end) is None:
            await self.down._wait()
        return end

    def cancel(self) -> None:
        self._close(End(grpc.StatusCode.CANCELLED, "cancelled"), self.link.seconds)

    def sever(self, late: float) -> None:
        self._close(End(grpc.StatusCode.UNAVAILABLE, "the connection broke"), late)

    def _close(self, end: End, late: float) -> None:
        """The caller has ``end``; the handler is cancelled ``late`` seconds later."""
        self._leave()
        if self.down.end is None:
            self.down.finish(end)
            self.up._change()
            self.world.at(late, self._cancel_handler)

    def _cancel_handler(self) -> None:
        self.up.finish(End(grpc.StatusCode.CANCELLED))
        if self.task is not None:
            self.task.cancel()

    def _leave(self) -> None:
        if self in self.link.calls:
            self.link.calls.remove(self)

    def _raise_if_over(self) -> None:
        if (end := self.down.end) is not None:
            if end.code is grpc.StatusCode.OK:
                raise asyncio.InvalidStateError("the call is over")
            raise self._error(end)

    @staticmethod
    def _error(end: End) -> aio.AioRpcError:
        nothing = aio.Metadata()
        return aio.AioRpcError(end.code, nothing, nothing, details=end.details)


class Channel:
    """A connection of a process to the syncer that serves when it is made."""

    def __init__(self, process: WorkerProcess) -> None:
        self.process, self.world, self.link = process, process.world, process.link
        self.life = self.world.newest

    def stream_stream(self, method: str, **_: object) -> Any:
        return lambda metadata=(), timeout=None: Call(self, method, timeout)

    async def close(self, grace: float | None = None) -> None:
        pass


# ------------------------------------------------------------------ bulk connections


class VirtualStream(ByteStream):
    """One end of a bulk connection."""

    def __init__(self, connection: VirtualConnection, outward: Pipe, inward: Pipe) -> None:
        self._connection, self._outward, self._inward = connection, outward, inward
        self._left = memoryview(b"")
        self.closed = False

    async def read_into(self, view: memoryview, check: Callable[[], None] = lambda: None) -> int:
        while not self._left:
            if self.closed:
                raise StreamBroken("the connection was closed")
            item = await self._inward.read()
            if isinstance(item, End):
                if item.code is grpc.StatusCode.OK:
                    return 0
                raise StreamBroken(item.details)
            self._left = memoryview(item)
        check()
        count = min(len(view), len(self._left))
        view[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    async def write(self, *pieces: bytes | memoryview, note: Callable[[int], None] = lambda count: None) -> None:
        for piece in pieces:
            await self._outward.await_room()
            if self.closed or self._outward.cut:
                raise StreamBroken("the connection broke")
            self._outward.send(self._connection.carry(bytes(piece)), len(piece))
            note(len(piece))

    def has_ended(self) -> bool:
        return self.closed or bool(self._left) or self._inward.has_come

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._connection.close_end(self)


class VirtualConnection:
    """A bulk connection of a process to the syncer that serves when it is made, or to one of its shards."""

    def __init__(self, process: WorkerProcess, shard: int | None) -> None:
        self.world, self.link, self.shard = process.world, process.link, shard
        self.life = self.world.newest
        self._up, self._down = Pipe(self.world, self.link), Pipe(self.world, self.link)
        self.near = VirtualStream(self, self._up, self._down)
        self._far = VirtualStream(self, self._down, self._up)
        self.link.calls.append(self)
        self.world.at(self.world.random.uniform(0.0, self.link.seconds), self._begin)

    def _begin(self) -> None:
        found = self.world.find_bulk_server(self)
        if found is None:
            self.sever(0.0)
        elif not self._down.cut:
            loop, server = found
            loop.create_task(self._serve(server))

    async def _serve(self, server: BulkServer) -> None:
        try:
            await server.serve_calls(self._far, Peer())
        except (StreamBroken, WireError, *ENDS_THE_PROCESS):
            pass
        except Exception as error:
            self.world.failures.append(error)
            raise
        finally:
            self._far.close()

    def carry(self, piece: bytes) -> bytes:
        """The bytes as they come: of a payload, which is longer than any header here, a bit may have turned."""
        if len(piece) < LONGER_THAN_HEADERS or not self.world.chance(self.world.setup.flips):
            return piece
        self.world.seen["bits that turned"] += 1
        place = self.world.random.randrange(len(piece))
        return piece[:place] + bytes([piece[place] ^ 1 << self.world.random.randrange(8)]) + piece[place + 1 :]

    def close_end(self, stream: VirtualStream) -> None:
        """One side has closed: the other one reads what is on its way, and then that it is over."""
        outward, inward = (self._up, self._down) if stream is self.near else (self._down, self._up)
        inward.finish(End(grpc.StatusCode.CANCELLED, "closed here"))
        if not outward.cut:
            outward.send(End(grpc.StatusCode.OK))
        if self in self.link.calls and self._up.cut:
            self.link.calls.remove(self)

    def sever(self, late: float) -> None:
        """The connection breaks; the syncer notices ``late`` seconds after the process."""
        if self in self.link.calls:
            self.link.calls.remove(self)
        broken = End(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        self._down.finish(broken)
        self._up.cut = True  # what is written now goes nowhere
        self.world.at(late, lambda: self._up.finish(broken))


class HeardConnection(BulkConnection):
    """The product's connection over a virtual one; the world hears of its calls, and breaks some."""

    def __init__(self, process: WorkerProcess, shard: int | None) -> None:
        super().__init__(self._connect_virtually)
        self.process, self.world, self._shard = process, process.world, shard
        self.virtual: VirtualConnection | None = None

    async def _connect_virtually(self) -> ByteStream:
        self.virtual = VirtualConnection(self.process, self._shard)
        return self.virtual.near

    async def begin(self, **what: Any) -> BulkCall:
        call = await super().begin(**what)
        virtual = self.virtual
        assert virtual is not None
        if self.world.chance(self.world.setup.broken_calls):
            self.world.at(self.world.random.uniform(0.0, virtual.link.seconds), lambda: virtual.sever(0.0))
        return HeardUpload(self, call, what["upload"]) if "upload" in what else call


class HeardUpload(BulkCall):
    """An upload that the world hears."""

    def __init__(self, connection: HeardConnection, call: BulkCall, header: sync_pb2.UploadHeader) -> None:
        super().__init__(call._stream, header.bytes)
        self.process, self.world = connection.process, connection.world
        assert connection.virtual is not None
        self._virtual = connection.virtual
        self._offset = header.offset
        self._answer_lost = self.world.hear_upload(self, header)

    async def write(self, part: memoryview, note: Callable[[int], None] = lambda count: None) -> None:
        self.world.hear_bytes(self, self._offset, part)
        self._offset += len(part)
        await super().write(part, note)

    async def read_reply(self) -> sync_pb2.BulkReply:
        reply = await super().read_reply()
        if self._answer_lost:
            self._virtual.sever(0.0)
            raise StreamBroken("the connection broke")
        self.world.hear_reply(self, reply.upload)
        return reply
