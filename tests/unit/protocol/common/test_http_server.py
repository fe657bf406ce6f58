"""The status page's server, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import resource
import socket
import urllib.request
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from pydantic import RootModel

from diloco_protocol.common import http_server
from diloco_protocol.common.http_server import (
    AddressError,
    Answer,
    HttpServer,
    Stream,
    ThreadedPages,
    json_page,
    split_address,
    text_page,
)
from free_ports import free_port
from patience import until
from status_documents import slot_row, status_document


def served(test: Callable[[int], Awaitable[None]]) -> None:
    async def run() -> None:
        server = HttpServer(
            {
                "/status": json_page(lambda: RootModel({"a": 1})),
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
        (b"GET /" + b"x" * (2 * http_server.MAX_REQUEST) + b" HTTP/1.1\r\n\r\n", 400),
    ],
)
def test_requests(request_text: bytes, status: int) -> None:
    async def test(port: int) -> None:
        found, body = await ask(port, request_text)
        assert found == status
        if status == 200:
            assert json.loads(body) == {"a": 1}

    served(test)


@pytest.mark.parametrize(("path", "status"), [(b"/status", 200), (b"/healthz", 503), (b"/nothing", 404)])
def test_a_head_has_the_length_and_no_body(path: bytes, status: int) -> None:
    async def test(port: int) -> None:
        assert await ask(port, b"HEAD " + path + b" HTTP/1.1\r\n\r\n") == (status, b"")

    served(test)


@pytest.mark.promise(
    "A foreign web page in a browser can read no status and no model (DNS rebinding), and cannot use a "
    "page as another type of content",
    section="Hostile callers",
)
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("attacker.example", 421),
        ("attacker.example:7703", 421),
        ("127.0.0.1.attacker.example", 421),
        ("job-syncer.team.svc.attacker.example", 421),
        ("localhost.attacker.example.", 421),
        ("127.0.0.1\r\nhOst : attacker.example", 421),
        ("", 200),
        ("127.0.0.1:7702", 200),
        ("[::1]:7702", 200),
        ("[fe80::1%eth0]", 200),
        ("LOCALHOST:7702", 200),
        ("job-syncer", 200),
        ("job-syncer.team.svc:7702", 200),
        ("job-syncer.team.svc.cluster.local.", 200),
        (socket.gethostname(), 200),
    ],
)
def test_a_page_in_a_browser_reads_nothing_under_a_name_of_its_own(host: str, status: int) -> None:
    """DNS rebinding. Metrics and probes are for any name."""

    async def test(port: int) -> None:
        found, body = await ask(port, f"GET /status HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert (found, json.loads(body) if found == 200 else None) == (status, {"a": 1} if status == 200 else None)
        found, _ = await ask(port, f"GET /healthz HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert found == 503

    served(test)


@pytest.mark.promise(
    "A foreign web page in a browser can read no status and no model (DNS rebinding), and cannot use a "
    "page as another type of content",
    section="Hostile callers",
)
def test_a_browser_takes_a_page_for_nothing_else_than_it_says() -> None:
    async def test(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /status HTTP/1.1\r\n\r\n")
        assert b"\r\nX-Content-Type-Options: nosniff\r\n" in await reader.read()
        writer.close()

    served(test)


def test_who_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REQUEST_SECONDS", 0.2)

    async def test(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""
        writer.close()

    served(test)


@pytest.mark.promise(
    "Idle connections without credentials to a status port (syncer, learner, operator) neither fail a "
    "probe nor use up descriptors; if descriptors run out, the server makes room, without a traceback"
)
def test_idle_connections_keep_nobody_out_and_use_up_nothing() -> None:
    async def test(port: int) -> None:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4 * http_server.MAX_CONNECTIONS)]
        for _ in range(3):
            assert (await ask(port, b"GET /status HTTP/1.1\r\n\r\n"))[0] == 200
        here = psutil.Process().net_connections("tcp")
        served = [one for one in here if one.laddr.port == port and one.status != psutil.CONN_LISTEN]
        assert len(served) <= http_server.MAX_CONNECTIONS
        assert await idle[0][0].read() == b""  # the oldest were closed
        for _, writer in idle:
            writer.close()

    served(test)


@pytest.mark.promise(
    "Idle connections without credentials to a status port (syncer, learner, operator) neither fail a "
    "probe nor use up descriptors; if descriptors run out, the server makes room, without a traceback"
)
def test_a_process_without_descriptors_makes_room_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """No traceback, and no turn of the event loop after the other."""

    async def test(port: int) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        late = socket.socket()
        late.setblocking(False)
        spare: list[int] = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (late.fileno() + 1, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    spare.append(os.dup(late.fileno()))
            loop = asyncio.get_running_loop()
            with contextlib.suppress(BlockingIOError):
                late.connect(("127.0.0.1", port))
            await loop.sock_sendall(late, b"GET /status HTTP/1.1\r\n\r\n")
            assert await idle[0][0].read() == b""  # closed, for the one that asks
            assert b" 200 " in await loop.sock_recv(late, 4096)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in (*spare, late.detach()):
                os.close(descriptor)
        for _, writer in idle:
            writer.close()

    served(test)
    assert not [record for record in caplog.records if record.name in ("asyncio", http_server.__name__)]


def test_a_connection_that_comes_while_the_server_stops_is_no_fault() -> None:
    async def run() -> None:
        server, faults = HttpServer({}), []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        port = await server.start("127.0.0.1", 0)
        await asyncio.sleep(0)  # it accepts
        with socket.create_connection(("127.0.0.1", port), 5):
            # In one turn of the loop it is stopped first, and then hears of the connection.
            accepting = server._accepting
            assert accepting is not None
            asyncio.get_running_loop().call_soon(accepting.cancel)
            await asyncio.wait([accepting], timeout=5)
            await server.stop()
        assert faults == []

    asyncio.run(run())


@pytest.mark.promise(
    "Status, report and metrics take at most a twentieth of the event loop's time, however often they are requested"
)
def test_a_page_that_is_asked_for_again_and_again_is_made_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    now, made = [0.0], [0]

    def page() -> Answer:
        made[0] += 1
        now[0] += 0.01
        return 200, "x/y", b"%d" % made[0]

    monkeypatch.setattr(http_server, "time", SimpleNamespace(monotonic=lambda: now[0]))
    kept = http_server.kept_page(page)
    for _ in range(1000):
        kept()
        now[0] += 0.001
    assert made[0] <= 6  # in a second, of which it may take a twentieth
    now[0] += 1.0
    assert kept() == (200, "x/y", b"%d" % made[0])


def test_numbers_that_json_has_not_become_null() -> None:
    nan, inf = float("nan"), float("inf")
    written = status_document(loss=nan, eval_loss=[(1, 1.5), (2, inf)], slots=[slot_row(loss=-inf, step_seconds=3)])
    shown = json.loads(written.model_dump_json())
    assert shown["loss"] is None and shown["eval_loss"] == [[1, 1.5], [2, None]]
    assert shown["slots"][0]["loss"] is None and shown["slots"][0]["step_seconds"] == 3


# ------------------------------------------------------------------ streams, threads, addresses


async def stream_of(parts: list[bytes], closed: list[bool]) -> AsyncGenerator[bytes, None]:
    try:
        for part in parts:
            yield part
    finally:
        closed.append(True)


def test_a_stream_is_sent_as_it_is_made_and_closed_when_its_reader_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, closed = [bytes([i]) * 300_000 for i in range(40)], list[bool]()

    async def big() -> Answer:
        return 200, "x/y", Stream(sum(map(len, parts)), stream_of(parts, closed), {"Check": "sum"})

    async def run() -> None:
        server = HttpServer({"/big": big})
        port = await server.start("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
        writer.write(b"GET /big HTTP/1.1\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert b"Check: sum" in head and f"Content-Length: {len(body)}".encode() in head
        assert body == b"".join(parts) and closed == [True]
        # Who takes nothing is hung up on, and what was made for him is let go.
        monkeypatch.setattr(http_server, "STALL_SECONDS", 0.3)
        _, deaf = await asyncio.open_connection("127.0.0.1", port, limit=1 << 10)
        deaf.transport.pause_reading()  # type: ignore[attr-defined]
        deaf.write(b"GET /big HTTP/1.1\r\n\r\n")
        await until(lambda: len(closed) == 2)
        deaf.close()
        await server.stop()

    asyncio.run(run())


def test_a_page_that_fails_says_so_and_the_next_is_served() -> None:
    def broken() -> Answer:
        raise RuntimeError("secret detail")

    async def run() -> None:
        server = HttpServer({"/broken": broken, "/fine": text_page(lambda: (200, b"ok"))})
        port = await server.start("127.0.0.1", 0)
        assert await ask(port, b"GET /broken HTTP/1.1\r\n\r\n") == (500, b"RuntimeError\n")
        assert await ask(port, b"GET /fine HTTP/1.1\r\n\r\n") == (200, b"ok")
        await server.stop()

    asyncio.run(run())


def test_pages_of_a_thread_are_served_whatever_the_caller_does() -> None:
    count = itertools.count()
    pages = ThreadedPages({"/n": json_page(lambda: RootModel(next(count)))}, f"127.0.0.1:{free_port()}")
    try:
        for expected in range(3):
            with urllib.request.urlopen(f"http://127.0.0.1:{pages.port}/n", timeout=5) as reply:
                assert json.load(reply) == expected
        with pytest.raises(AddressError, match=r"DILOCO_STATUS 127\.0\.0\.1:\d+: .*choose another"):
            ThreadedPages({}, f"127.0.0.1:{pages.port}", "DILOCO_STATUS")
    finally:
        pages.stop()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{pages.port}/n", timeout=5)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_all_addresses_means_of_both_kinds() -> None:
    """asyncio's own server on [::] would refuse IPv4, and so a kubelet's probes in most clusters."""
    pages = ThreadedPages({"/": text_page(lambda: (200, b"ok"))}, "[::]:0")
    try:
        for host in ("127.0.0.1", "[::1]"):
            with urllib.request.urlopen(f"http://{host}:{pages.port}/", timeout=5) as reply:
                assert reply.read() == b"ok"
    finally:
        pages.stop()


@pytest.mark.parametrize("address", ["", "7710", ":7710", "127.0.0.1:", "127.0.0.1:x", "a:65536", "a:\u0663"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(AddressError, match=r"--http .*expected HOST:PORT"):
        split_address(address, "--http")
