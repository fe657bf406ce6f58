"""Ways between programs that count what they carry and, where asked, carry no faster than a link of theirs.

TCP on this machine, in user space and without privileges, the same for whoever connects. Each party has a ``Link`` to
everybody else, with a rate each way; a connection's bytes pass the sender's link up and the receiver's link down, and
all connections of a party share its link. A connection can be reset, and it can stop: then it swallows what comes and
neither side hears of it, as a NAT does that has forgotten it (``idle_seconds``). Bytes are those of the TCP streams, so
all that both sides say, and no headers of TCP/IP. A rate is kept by a token bucket: over any time t no more than rate *
t and a burst of ``BURST_SECONDS`` pass. Latency is added to every chunk, one way; TCP's own slow start and losses are
not there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

CHUNK_BYTES = 1 << 18  # at most, read at once
CHUNK_SECONDS = 0.005  # of a link's rate; then the next connection has its turn
LEAST_CHUNK_BYTES = 1400  # a packet's
BURST_SECONDS = 0.02
QUEUED_CHUNKS = 1024  # under way on a link with latency
START_SECONDS = 10.0
DIAL_SECONDS = 5.0
MAX_CONNECTIONS = 1024
MAX_REQUEST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Carried:
    """Bytes since the link was made. Up is away from its party."""

    up: int = 0
    down: int = 0

    def __add__(self, other: Carried) -> Carried:
        return Carried(self.up + other.up, self.down + other.down)

    def __sub__(self, other: Carried) -> Carried:
        return Carried(self.up - other.up, self.down - other.down)


class TokenBucket:
    """When bytes may go on that share ``rate`` (bytes a second); pure: the caller tells the time, in seconds.

    Bytes go in the order in which they are reserved. After a pause at most ``burst_seconds`` of the rate go at once.
    """

    def __init__(self, rate: float, burst_seconds: float = BURST_SECONDS) -> None:
        self._rate, self._burst_seconds = rate, burst_seconds
        self._free_at = float("-inf")  # when everything that was reserved has gone

    def reserve(self, count: int, now: float) -> float:
        """Seconds from ``now`` until ``count`` bytes have gone, behind all that were reserved before."""
        begin = max(self._free_at, now - self._burst_seconds)
        self._free_at = begin + count / self._rate
        return max(0.0, self._free_at - now)


class Way:
    """One connection through a relay. ``silent``: it carries nothing any more. ``carried``: bytes, both ways."""

    def __init__(self, *writers: asyncio.StreamWriter) -> None:
        self.silent = False
        self.carried = 0
        self._writers = writers
        self._last = 0.0

    def note(self, count: int, now: float, idle_seconds: float | None) -> None:
        """Bytes have come, after a pause that may have been too long."""
        if idle_seconds is not None and self._last and now - self._last > idle_seconds:
            self.silent = True
        self._last = now
        self.carried += count

    def reset(self) -> None:
        """Break the connection, for both sides."""
        for writer in self._writers:
            writer.transport.abort()


class Link:
    """One party's way to everybody else, ``rate`` bytes a second in each direction (None: as fast as it goes), and
    ``latency`` seconds one way. A connection that was idle for ``idle_seconds`` falls silent. ``ways``: its connections
    through relays, in the order in which they were made."""

    def __init__(self, rate: float | None = None, latency: float = 0.0, idle_seconds: float | None = None) -> None:
        self.latency, self.idle_seconds = latency, idle_seconds
        self.ways: list[Way] = []
        self._bytes_up = self._bytes_down = 0
        self.shape(rate)

    def shape(self, rate: float | None) -> None:
        """Carry ``rate`` bytes a second from now on (None: as fast as it goes), on open connections too."""
        self.rate = rate
        self._up = None if rate is None else TokenBucket(rate)
        self._down = None if rate is None else TokenBucket(rate)

    @property
    def carried(self) -> Carried:
        """Up to now."""
        return Carried(self._bytes_up, self._bytes_down)

    @property
    def chunk(self) -> int:
        """Bytes that are read at once."""
        return CHUNK_BYTES if self.rate is None else int(max(LEAST_CHUNK_BYTES, self.rate * CHUNK_SECONDS))

    def send(self, count: int, now: float) -> float:
        """Count bytes from this party; seconds until they have gone."""
        self._bytes_up += count
        return 0.0 if self._up is None else self._up.reserve(count, now)

    def receive(self, count: int, now: float) -> float:
        """Count bytes to this party; seconds until they have come."""
        self._bytes_down += count
        return 0.0 if self._down is None else self._down.reserve(count, now)


class Relays:
    """All ways of one measurement: a thread with a loop of its own.

    Programs of this process ask by ``open``; others over ``requests_address``, with one line of JSON (``near``,
    ``far``: names of links given here; ``target``), answered by a line with the address.
    """

    def __init__(self, links: dict[str, Link] | None = None) -> None:
        self._links = links or {}
        self.requests_address = ""
        self._loop = asyncio.new_event_loop()
        self._serving = threading.Event()
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._run, name="relays", daemon=True)

    def open(self, target: str, near: Link | None = None, far: Link | None = None) -> str:
        """Listen for who is to reach ``target`` (host:port); returns the address. ``near``: the link of who connects,
        ``far``: the target's."""
        opening = self._listen(target, near or Link(), far or Link())
        return asyncio.run_coroutine_threadsafe(opening, self._loop).result(START_SECONDS)

    def do(self, work: Callable[[], object]) -> None:
        """Have the relays' thread do something to a ``Way``."""
        self._loop.call_soon_threadsafe(work)

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
        requests = await asyncio.start_server(self._answer, "127.0.0.1", 0, limit=MAX_REQUEST_BYTES)
        self._servers.append(requests)
        self.requests_address = _address(requests)
        self._serving.set()
        await self._stop.wait()
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=START_SECONDS)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TimeoutError):  # the caller finds no answer
            asked = json.loads(await asyncio.wait_for(reader.readline(), DIAL_SECONDS))
            near, far = self._links[asked["near"]], self._links[asked["far"]]
            address = await self._listen(asked["target"], near, far)
            writer.write(f"{address}\n".encode())
            await writer.drain()
        writer.close()

    async def _listen(self, target: str, near: Link, far: Link) -> str:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._accept(target, near, far, reader, writer=writer)

        server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=CHUNK_BYTES)
        self._servers.append(server)
        return _address(server)

    async def _accept(
        self, target: str, near: Link, far: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        ends = [writer]
        # One side is gone: the other learns it as its connection is closed below.
        with contextlib.suppress(OSError, TimeoutError, asyncio.CancelledError):
            if len(self._tasks) <= MAX_CONNECTIONS:
                host, _, port = target.rpartition(":")
                dialling = asyncio.open_connection(host, int(port), limit=CHUNK_BYTES)
                back, out = await asyncio.wait_for(dialling, DIAL_SECONDS)
                ends.append(out)
                near.ways.append(way := Way(writer, out))
                try:
                    await asyncio.gather(
                        _pump(reader, out, near, far, way=way), _pump(back, writer, far, near, way=way)
                    )
                finally:
                    near.ways.remove(way)
        for end in ends:
            end.close()
        self._tasks.discard(task)


def _address(server: asyncio.Server) -> str:
    return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def _pump(
    source: asyncio.StreamReader, sink: asyncio.StreamWriter, sender: Link, receiver: Link, *, way: Way
) -> None:
    """Carry one direction of a connection until its end."""
    loop = asyncio.get_running_loop()
    latency = sender.latency + receiver.latency
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(QUEUED_CHUNKS)
    arriving = asyncio.create_task(_deliver(under_way, sink)) if latency else None
    try:
        while data := await source.read(min(sender.chunk, receiver.chunk)):
            now = loop.time()
            way.note(len(data), now, sender.idle_seconds or receiver.idle_seconds)
            if way.silent:
                continue
            wait = max(sender.send(len(data), now), receiver.receive(len(data), now))
            if wait:
                await asyncio.sleep(wait)
            if arriving is None:
                sink.write(data)
                await sink.drain()
            else:
                await under_way.put((loop.time() + latency, data))
        if arriving is not None:
            await under_way.put((loop.time() + latency, b""))
            await arriving
        if sink.can_write_eof():
            sink.write_eof()
    finally:
        if arriving is not None:
            arriving.cancel()


async def _deliver(under_way: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due, data = await under_way.get()
        await asyncio.sleep(max(0.0, due - loop.time()))
        if not data:
            return
        sink.write(data)
        await sink.drain()
