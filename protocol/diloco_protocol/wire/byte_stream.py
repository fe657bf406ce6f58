"""One connection's bytes both ways, with TLS or without, on an event loop.

Theory of operation. Bulk bytes are most of what learners and syncer do with the network, so their way is short: from
the socket into one buffer, and from there TLS decrypts into the array where they belong; out, TLS encrypts from the
array, and the socket takes that. In plain text the socket reads into the array and sends from it. TLS is an
``ssl.SSLObject`` over memory: it costs less than Python's TLS sockets, which read each record (16 KiB) by two calls of
the system, and it can be handed from the thread that made the handshake to the loop that reads.

One task reads and one writes. The loop is the running one. There are no transports and no buffers of the stream's own:
while nobody reads, nothing is read, and the peer waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from diloco_protocol.wire import limits

WIRE_BYTES = 256 << 10  # read from a socket at a time
SENT_BYTES = 256 << 10  # encrypted at a time
_RECORD_BYTES = 16 << 10  # of TLS, at most
_TURN_BYTES = 1 << 20  # read or sent by one stream before others have their turn
_LEAST_BYTES = 64 << 10  # that a read or a send counts as: small ones cost their time too
_buffers = threading.local()


class StreamBroken(Exception):
    """A connection ended under way; the message says how."""


@dataclass(slots=True)
class ByteCount:
    """Bytes at the socket, as TLS has them."""

    received: int = 0
    sent: int = 0


@dataclass(slots=True)
class TlsState:
    """One side of TLS over memory."""

    tls: ssl.SSLObject
    incoming: ssl.MemoryBIO
    outgoing: ssl.MemoryBIO

    @classmethod
    def begin(cls, context: ssl.SSLContext, server_name: str | None = None) -> TlsState:
        """Before the handshake; ``server_name`` None: the server's side."""
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        side = context.wrap_bio(incoming, outgoing, server_side=server_name is None, server_hostname=server_name)
        return cls(side, incoming, outgoing)


def set_options(connected: socket.socket) -> None:
    """Not blocking, without delay, and so that a dead peer is noticed as on gRPC's connections."""
    connected.setblocking(False)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle, answer = limits.KEEPALIVE_SECONDS, limits.KEEPALIVE_ANSWER_SECONDS
    probes = {"TCP_KEEPIDLE": idle, "TCP_KEEPINTVL": answer // 2, "TCP_KEEPCNT": 2}
    for name, value in {**probes, "TCP_USER_TIMEOUT": 1000 * (idle + answer)}.items():
        if hasattr(socket, name):  # some systems lack some of them
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class ByteStream:
    """A connected socket, which it owns. ``tls`` None: plain text."""

    def __init__(self, connected: socket.socket, tls: TlsState | None = None, count: ByteCount | None = None) -> None:
        self._socket, self._state = connected, tls
        self._loop = asyncio.get_running_loop()
        self.count = count or ByteCount()
        self._waiting: set[asyncio.Future[None]] = set()
        self._writing = False
        self._in_turn = 0
        self._on_close: Callable[[], None] = lambda: None
        self.closed = False

    async def shake_hands(self) -> None:
        """The client's handshake. Raises StreamBroken, and ssl.SSLError for a server that is not trusted."""
        assert self._state is not None
        while True:
            try:
                self._state.tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self._flush()
                if not await self._fill():
                    raise StreamBroken("the other side hung up in the handshake") from None
        await self._flush()

    # ------------------------------------------------------------- in

    async def read_into(self, view: memoryview, check: Callable[[], None] = lambda: None) -> int:
        """Read at least one byte, and no more than ``view`` (uint8, not empty) holds; 0: the other side has ended.
        ``check`` is called whenever bytes are about to be written into ``view``, and may raise. Raises StreamBroken."""
        while True:
            if self.closed:
                raise StreamBroken("the connection was closed")
            check()
            count = self._take(view)
            if count is not None:
                if self._turn_is_over(count):
                    await asyncio.sleep(0)
                return count
            if self._state is None:
                await self._wait(self._loop.add_reader, self._loop.remove_reader)
            elif not await self._fill():
                self._state.incoming.write_eof()

    async def read_exactly(self, size: int) -> bytes:
        """So many bytes; empty: the other side has ended before the first. Raises StreamBroken."""
        data, filled = bytearray(size), 0
        view = memoryview(data)
        while filled < size:
            count = await self.read_into(view[filled:])
            if not count:
                if filled:
                    raise StreamBroken(f"the other side ended after {filled} of {size} bytes")
                return b""
            filled += count
        return bytes(data)

    def _take(self, view: memoryview) -> int | None:
        """What is there, into ``view``; None: nothing yet."""
        if self._state is None:
            try:
                count = self._socket.recv_into(view)
            except BlockingIOError:
                return None
            except OSError as error:
                raise StreamBroken(_words(error)) from error
            self.count.received += count
            return count
        filled = 0
        try:
            while filled < len(view):
                count = self._state.tls.read(len(view) - filled, view[filled:])  # type: ignore[assignment]  # with a buffer: how many
                if not count:
                    break
                filled += int(count)
        except ssl.SSLWantReadError:
            return filled or None
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            pass
        except ssl.SSLError as error:
            if not filled:
                raise StreamBroken(f"TLS: {error.reason or error}") from error
        return filled

    async def _fill(self) -> bool:
        """Give TLS more of what has come; False: the other side has ended."""
        assert self._state is not None
        wire = _wire_buffer()
        while True:
            try:
                count = self._socket.recv_into(wire)
            except BlockingIOError:
                if self._state.outgoing.pending and not self._writing:  # else it goes with what is being written
                    await self._flush()  # an answer of TLS itself
                await self._wait(self._loop.add_reader, self._loop.remove_reader)
                continue
            except OSError as error:
                raise StreamBroken(_words(error)) from error
            self.count.received += count
            if count:
                self._state.incoming.write(wire[:count])
            return bool(count)

    def has_ended(self) -> bool:
        """Whether a connection that nobody reads has ended, or has bytes that nobody asked for."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    # ------------------------------------------------------------- out

    async def write(self, *pieces: bytes | memoryview, note: Callable[[int], None] = lambda count: None) -> None:
        """Send all, in order; returns when the socket has taken them. ``note`` hears how many bytes it took at a time.
        Raises StreamBroken. Who cancels it must close the stream."""
        self._writing = True
        try:
            await self._write(pieces, note)
        finally:
            self._writing = False

    async def _write(self, pieces: Iterable[bytes | memoryview], note: Callable[[int], None]) -> None:
        if self._state is None:
            for piece in pieces:
                await self._send(memoryview(piece), note)
            return
        for piece in pieces:
            view = memoryview(piece)
            sent, size, encrypt, outgoing = 0, len(view), self._state.tls.write, self._state.outgoing
            while sent < size:
                try:
                    while sent < size and outgoing.pending < SENT_BYTES:
                        sent += encrypt(view[sent : sent + _RECORD_BYTES])
                except ssl.SSLError as error:
                    raise StreamBroken(f"TLS: {error.reason or error}") from error
                if outgoing.pending >= SENT_BYTES:
                    await self._send(memoryview(outgoing.read()), note)
        await self._flush(note)

    async def _flush(self, note: Callable[[int], None] = lambda count: None) -> None:
        assert self._state is not None
        if self._state.outgoing.pending:
            await self._send(memoryview(self._state.outgoing.read()), note)

    async def _send(self, view: memoryview, note: Callable[[int], None]) -> None:
        while view:
            if self.closed:
                raise StreamBroken("the connection was closed")
            try:
                count = self._socket.send(view)
            except BlockingIOError:
                await self._wait(self._loop.add_writer, self._loop.remove_writer)
                continue
            except OSError as error:
                raise StreamBroken(_words(error)) from error
            self.count.sent += count
            view = view[count:]
            note(count)
            if self._turn_is_over(count):
                await asyncio.sleep(0)

    # ------------------------------------------------------------- waiting, and the end

    def _turn_is_over(self, count: int) -> bool:
        """Whether others are to be served, after so many bytes more."""
        self._in_turn += max(count, _LEAST_BYTES)
        if self._in_turn < _TURN_BYTES:
            return False
        self._in_turn = 0
        return True

    async def _wait(self, add: Callable[..., Any], remove: Callable[..., Any]) -> None:
        """Wait until the socket can be read, or written."""
        self._in_turn = 0
        future = self._loop.create_future()
        self._waiting.add(future)
        add(self._socket, _wake, future)
        try:
            await future
        finally:
            self._waiting.discard(future)
            if not self.closed:
                remove(self._socket)

    def when_closed(self, call: Callable[[], None]) -> None:
        """Have ``call`` called at the end."""
        self._on_close = call

    def close(self) -> None:
        """End the connection at once; whoever waits on it has StreamBroken."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        with contextlib.suppress(OSError, ssl.SSLError):
            if self._state is not None:
                self._state.tls.unwrap()  # says good-bye; nobody waits for the answer
        with contextlib.suppress(OSError):
            if self._state is not None:
                self._socket.send(self._state.outgoing.read())
        self._socket.close()
        for future in self._waiting:
            if not future.done():
                future.set_exception(StreamBroken("the connection was closed"))
        self._on_close()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _wire_buffer() -> memoryview:
    """The buffer of this thread: nothing is left in it when another stream has its turn."""
    if not hasattr(_buffers, "wire"):
        _buffers.wire = memoryview(bytearray(WIRE_BYTES))
    found: memoryview = _buffers.wire
    return found


def _words(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
