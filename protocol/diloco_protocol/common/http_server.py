"""A minimal HTTP/1.1 server for pages that are read and change nothing: status, metrics, probes, export.

Theory of operation. One request per connection, GET or HEAD, of at most ``MAX_REQUEST`` bytes and ``REQUEST_SECONDS``.
At most ``MAX_CONNECTIONS`` are open at once. They are counted when they are accepted; for each beyond that the oldest
one that has asked nothing yet is closed, else the oldest one. So connections that only lie there neither use up a
process's descriptors nor keep a probe out. Where descriptors run out all the same, some of the oldest are closed and
accepting pauses for ``PAUSE_SECONDS``. A page is a function without arguments that gives status, content type and body;
a body that is too large for one piece is a ``Stream``, whose chunks are made as the reader takes them. A reader that
takes nothing for ``STALL_SECONDS`` is hung up on.

A page in somebody's browser may not read these pages under a name of its own that leads to this machine (DNS
rebinding). So the request's Host must be an address, or a name that no stranger can have (``is_local_name``). Metrics
and probes, which tell nothing that would matter, are for any Host.

The syncer serves pages in its own event loop. ``ThreadedPages`` serves them in a thread of its own, for a program whose
main thread trains; the page functions then run in that thread, and what they read must bear it.

``[::]`` listens on IPv6 and IPv4 alike, and where the machine has no IPv6 on IPv4 alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from pydantic import BaseModel

log = logging.getLogger(__name__)

MAX_REQUEST = 16 << 10
REQUEST_SECONDS = 10.0  # to ask, and to take an answer that is one piece
STALL_SECONDS = 30.0  # without a byte taken of a stream
MAX_CONNECTIONS = 64
PAUSE_SECONDS = 0.2  # of accepting, when descriptors or memory ran out
_KEPT_TIMES, _KEPT_SECONDS = 20, 0.5  # how long a page is kept: so many times what it took to make, and at most
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

FOR_ANY_HOST = frozenset({"/metrics", "/healthz", "/livez", "/readyz"})
_LOCAL_NAMES = (".localhost", ".svc", ".svc.cluster.local")  # a Service's

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus' text format


@dataclass(frozen=True, slots=True)
class Stream:
    """A body of exactly ``length`` bytes that is made while it is sent. ``headers`` go beside it."""

    length: int
    chunks: AsyncGenerator[bytes, None]
    headers: Mapping[str, str] = field(default_factory=dict)


Answer = tuple[int, str, bytes | Stream]  # status, content type, body
Page = Callable[[], Answer | Awaitable[Answer]]


class AddressError(Exception):
    """An address cannot be listened on; the message names it and the cure."""


def json_page(document: Callable[[], BaseModel]) -> Callable[[], Answer]:
    def page() -> Answer:
        return 200, "application/json", document().model_dump_json().encode() + b"\n"

    return page


def text_page(
    text: Callable[[], tuple[int, bytes]], content_type: str = "text/plain; charset=utf-8"
) -> Callable[[], Answer]:
    """A page of plain text; ``text`` gives status and body."""

    def page() -> Answer:
        status, body = text()
        return status, content_type, body

    return page


def kept_page(page: Callable[[], Answer]) -> Page:
    """The page, made at most so often that it takes a twentieth of a thread's time, however often it is asked for."""
    made: Answer | None = None
    until = 0.0

    def kept() -> Answer:
        nonlocal made, until
        begun = time.monotonic()
        if made is None or begun >= until:
            made = page()
            ended = time.monotonic()
            until = ended + min(_KEPT_SECONDS, _KEPT_TIMES * (ended - begun))
        return made

    return kept


def split_address(address: str, name: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[v6]:port``; ``name`` is the option's, for the error.

    Raises AddressError.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise AddressError(f"{name} {address!r}: expected HOST:PORT, e.g. 127.0.0.1:4001 (port 0: any)")
    return host.strip("[]"), int(port)


def is_local_name(host: str) -> bool:
    """Whether a request's Host (a name or an address, perhaps with a port) is none that a stranger could have made to
    lead here: an address, a name without a dot, a Service's, or this machine's own name."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    name = name.rstrip(".").lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "." not in name or name.endswith(_LOCAL_NAMES) or name == socket.gethostname().lower()
    return True


def listening_socket(host: str, port: int) -> socket.socket:
    """A listening TCP socket; ``::`` takes IPv4 connections too (asyncio's own would not).

    Raises OSError if the address cannot be had.
    """
    if host != "::":
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, where = found[0]
        return socket.create_server((str(where[0]), port), family=family)
    try:
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
        return socket.create_server(("0.0.0.0", port))


def listen_on(address: str, name: str) -> socket.socket:
    """A listening socket on ``host:port``; ``name`` is the option's, for the error. Raises AddressError."""
    try:
        return listening_socket(*split_address(address, name))
    except OSError as error:
        raise AddressError(f"{name} {address}: {error.strerror or error}; choose another port") from error


async def _wait_readable(listening: socket.socket) -> None:
    """Wait until a connection can be accepted. The loop's own ``sock_accept`` takes a connection, and fails with it,
    when it is cancelled in the moment in which one comes."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(listening, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(listening)


class HttpServer:
    def __init__(self, pages: Mapping[str, Page]) -> None:
        self._pages = pages
        self._accepting: asyncio.Task[None] | None = None
        # In the order in which they came: those that have not asked yet, and all.
        self._asking: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises OSError if it cannot be had."""
        listening = await asyncio.to_thread(listening_socket, host, port)
        return await self.serve(listening)

    async def serve(self, listening: socket.socket) -> int:
        """Serve on a listening socket, which is this object's from now on; returns its port."""
        listening.setblocking(False)
        self._accepting = asyncio.create_task(self._accept_all(listening))
        return int(listening.getsockname()[1])

    async def stop(self) -> None:
        """Hang up on everybody; whoever has not asked yet gets no answer."""
        if self._accepting is None:
            return
        tasks = [self._accepting, *self._open]
        self._close_oldest(len(tasks))
        self._accepting.cancel()
        await asyncio.wait(tasks, timeout=2)

    async def _accept_all(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listening:
            while True:
                try:
                    await _wait_readable(listening)
                    front, _ = listening.accept()
                    front.setblocking(False)
                    reader, writer = await asyncio.open_connection(sock=front, limit=MAX_REQUEST)
                except OSError as error:
                    if error.errno in _NO_ROOM:
                        self._close_oldest(MAX_CONNECTIONS // 4)
                        await asyncio.sleep(PAUSE_SECONDS)
                    continue  # else the caller has left already
                if len(self._open) >= MAX_CONNECTIONS:
                    self._close_oldest(1)
                task = loop.create_task(self._serve(reader, writer))
                self._asking[task] = self._open[task] = writer
                task.add_done_callback(self._forget)

    def _close_oldest(self, count: int) -> None:
        """Close so many connections, first those that have asked nothing."""
        for task, writer in [*self._asking.items(), *self._open.items()][:count]:
            self._forget(task)
            writer.transport.abort()
            task.cancel()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._asking.pop(task, None)
        self._open.pop(task, None)
        if not task.cancelled() and task.done() and (error := task.exception()) is not None:
            log.error("a fault of this program, in the status pages", exc_info=error)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                page, with_body = await self._asked(reader)
            task = asyncio.current_task()
            assert task is not None
            self._asking.pop(task, None)
            # Making a large body ready (its checksum) may take longer than a request.
            status, content_type, body = await self._answer(page) if callable(page) else page
            await self._send(writer, status, content_type, body, with_body=with_body)
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            log.debug("http: %s", error)
        finally:
            writer.close()

    async def _answer(self, page: Page) -> Answer:
        try:
            answer = page()
            return answer if isinstance(answer, tuple) else await answer
        except Exception as error:
            log.exception("a page could not be made")
            return 500, "text/plain", f"{type(error).__name__}\n".encode()

    async def _send(
        self, writer: asyncio.StreamWriter, status: int, content_type: str, body: bytes | Stream, *, with_body: bool
    ) -> None:
        length, headers = (len(body), {}) if isinstance(body, bytes) else (body.length, body.headers)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            f"Content-Type: {content_type}",
            f"Content-Length: {length}",
            "Cache-Control: no-store",
            "X-Content-Type-Options: nosniff",
            "Connection: close",
            *(f"{name}: {value}" for name, value in headers.items()),
        )
        writer.write("\r\n".join(head).encode() + b"\r\n\r\n")
        if isinstance(body, bytes):
            writer.write(body if with_body else b"")
            async with asyncio.timeout(REQUEST_SECONDS):
                await writer.drain()
            return
        async with contextlib.aclosing(body.chunks) as chunks:
            if not with_body:
                return
            async for chunk in chunks:
                writer.write(chunk)
                async with asyncio.timeout(STALL_SECONDS):
                    await writer.drain()

    async def _asked(self, reader: asyncio.StreamReader) -> tuple[Page | Answer, bool]:
        """The page that is asked for, or the answer that there is none; and whether its body is wanted, too."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            first, *fields = head.decode("ascii", "replace").split("\r\n")
            method, target, _ = first.split(" ")
        except asyncio.LimitOverrunError:
            await reader.read(4 * MAX_REQUEST)  # bytes left unread would reset the connection under the answer
            return (400, "text/plain", b"the request is too long\n"), True
        except ValueError:
            return (400, "text/plain", b"not an HTTP request\n"), True
        if method not in ("GET", "HEAD"):
            return (405, "text/plain", b"only GET and HEAD\n"), True
        return self._find_page(target.partition("?")[0], fields), method == "GET"

    def _find_page(self, path: str, fields: Sequence[str]) -> Page | Answer:
        """``fields``: the lines of the request's head."""
        hosts = [
            value.strip()
            for name, _, value in (field.partition(":") for field in fields)
            if name.strip().lower() == "host"
        ]
        if path not in FOR_ANY_HOST and not all(map(is_local_name, hosts)):
            return 421, "text/plain", b"ask by this machine's address, by localhost, or by the Service's name\n"
        page = self._pages.get(path)
        if page is None:
            return 404, "text/plain", ("pages: " + ", ".join(sorted(self._pages)) + "\n").encode()
        return page


class ThreadedPages:
    """``pages`` on ``address`` (host:port), served by a thread of its own until ``stop``."""

    def __init__(self, pages: Mapping[str, Page], address: str, name: str = "address") -> None:
        """Listens at once. ``name`` is the option's, for the error. Raises AddressError."""
        self._socket = listen_on(address, name)
        self.port = int(self._socket.getsockname()[1])
        self._server = HttpServer(pages)
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="diloco-pages", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 3.0) -> None:
        """Hang up on everybody and end the thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception:  # pages are worth less than the training beside them
            log.exception("the status pages are not served any more")
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        await self._server.serve(self._socket)
        await self._ending.wait()
        await self._server.stop()
