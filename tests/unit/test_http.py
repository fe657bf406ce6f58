"""The status page's server, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from diloco_protocol import http_pages
from diloco_protocol.http_pages import HttpServer, json_page, text_page
from diloco_syncer.report import finite


def served(test: Callable[[int], Awaitable[None]]) -> None:
    async def run() -> None:
        server = HttpServer(
            {
                "/status": json_page(lambda: {"a": 1}),
                "/healthz": text_page(lambda: (503, b"disk full\n"), "text/plain"),
            }
        )
        port = await server.start("127.0.0.1", 0)
        try:
            async with asyncio.timeout(20):
                await test(port)
        finally:
            await server.stop()

    asyncio.run(run())


async def ask(port: int, request: bytes) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), body


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET /status?x=1 HTTP/1.1\r\n\r\n", 200),
        (b"GET /healthz HTTP/1.1\r\n\r\n", 503),
        (b"GET /etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"POST /status HTTP/1.1\r\n\r\n", 405),
        (b"nonsense\r\n\r\n", 400),
        (b"\xff\xfe /\r\n\r\n", 400),
        (b"GET /" + b"x" * (2 * http_pages.MAX_REQUEST) + b" HTTP/1.1\r\n\r\n", 400),
    ],
)
def test_requests(request_text: bytes, status: int) -> None:
    async def test(port: int) -> None:
        found, body = await ask(port, request_text)
        assert found == status
        if status == 200:
            assert json.loads(body) == {"a": 1}

    served(test)


def test_who_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_pages, "REQUEST_SECONDS", 0.2)

    async def test(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""
        writer.close()

    served(test)


def test_too_many_connections_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_pages, "MAX_CONNECTIONS", 2)

    async def test(port: int) -> None:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        assert (await ask(port, b"GET /status HTTP/1.1\r\n\r\n"))[0] == 503
        for _, writer in idle:
            writer.close()

    served(test)


def test_numbers_that_json_has_not_become_null() -> None:
    document = {"a": float("nan"), "b": [1.5, float("inf")], "c": {"d": (-float("inf"), "x", None, 3)}}
    assert finite(document) == {"a": None, "b": [1.5, None], "c": {"d": [None, "x", None, 3]}}
