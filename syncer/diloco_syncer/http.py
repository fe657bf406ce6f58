"""The status page: a minimal HTTP/1.1 server for GET /status, /metrics, /healthz and /report.

One request per connection, of at most ``MAX_REQUEST`` bytes and ``REQUEST_SECONDS``; at
most ``MAX_CONNECTIONS`` at once. It shows numbers only and changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable

from diloco_syncer.metrics import CONTENT_TYPE

log = logging.getLogger(__name__)

MAX_REQUEST = 16 << 10
REQUEST_SECONDS = 10.0
MAX_CONNECTIONS = 64

Page = Callable[[], tuple[int, str, bytes]]  # status, content type, body
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}


def json_page(document: Callable[[], object]) -> Page:
    """A page that shows a JSON document."""

    def page() -> tuple[int, str, bytes]:
        text = json.dumps(document(), allow_nan=False)
        return 200, "application/json", text.encode() + b"\n"

    return page


def text_page(text: Callable[[], tuple[int, bytes]], content_type: str = CONTENT_TYPE) -> Page:
    """A page of plain text (or metrics)."""

    def page() -> tuple[int, str, bytes]:
        status, body = text()
        return status, content_type, body

    return page


class HttpServer:
    """Serves ``pages`` by path."""

    def __init__(self, pages: dict[str, Page]) -> None:
        self._pages = pages
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises OSError if it cannot be had."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_REQUEST)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            for writer in self._open:  # whoever has not asked yet gets no answer
                writer.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2):
                    await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                status, content_type, body = await self._answer(reader)
                head = (
                    f"HTTP/1.1 {status} {_REASONS[status]}",
                    f"Content-Type: {content_type}",
                    f"Content-Length: {len(body)}",
                    "Cache-Control: no-store",
                    "Connection: close",
                )
                writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            log.debug("http: %s", error)
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[int, str, bytes]:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            method, target, _ = head.split(b"\r\n", 1)[0].decode("ascii").split(" ")
        except asyncio.LimitOverrunError:
            await reader.read(
                4 * MAX_REQUEST
            )  # bytes left unread would reset the connection under the answer
            return 400, "text/plain", b"the request is too long\n"
        except ValueError:
            return 400, "text/plain", b"not an HTTP request\n"
        if len(self._open) > MAX_CONNECTIONS:
            return 503, "text/plain", b"too many connections: try again\n"
        if method != "GET":
            return 405, "text/plain", b"only GET\n"
        page = self._pages.get(target.partition("?")[0])
        if page is None:
            return 404, "text/plain", ("pages: " + ", ".join(sorted(self._pages)) + "\n").encode()
        return page()
