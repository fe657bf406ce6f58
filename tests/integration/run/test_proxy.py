"""The proxy that can be cut, between real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from diloco.local.chaos.proxy import Proxy
from free_ports import free_port
from patience import until


@asynccontextmanager
async def echo_behind_proxy() -> AsyncIterator[tuple[Proxy, Callable[[int], None]]]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    target: list[str | None] = [f"127.0.0.1:{server.sockets[0].getsockname()[1]}"]

    def move(port: int) -> None:
        target[0] = f"127.0.0.1:{port}"

    proxy = Proxy(lambda: target[0])
    await proxy.start()
    try:
        yield proxy, move
    finally:
        await proxy.close()
        server.close()


async def ask(proxy: Proxy, data: bytes = b"hello") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        writer.write(data)
        writer.write_eof()
        return await asyncio.wait_for(reader.read(-1), 5)
    finally:
        writer.close()


async def refused(proxy: Proxy) -> bool:
    try:
        return await ask(proxy) == b""
    except OSError:
        return True


@pytest.mark.asyncio
async def test_bytes_pass_both_ways_whole_and_half_closed() -> None:
    data = bytes(range(256)) * 20_000
    async with echo_behind_proxy() as (proxy, _):
        assert await asyncio.gather(*(ask(proxy, data + bytes([i])) for i in range(4))) == [
            data + bytes([i]) for i in range(4)
        ]


@pytest.mark.asyncio
async def test_a_cut_resets_what_is_open_and_refuses_until_it_ends() -> None:
    async with echo_behind_proxy() as (proxy, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"before")
        assert await asyncio.wait_for(reader.readexactly(6), 5) == b"before"
        proxy.cut(1000)
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(reader.read(-1), 5)
            raise ConnectionResetError if reader.at_eof() else AssertionError("still open")
        assert await refused(proxy)
        writer.close()


@pytest.mark.asyncio
async def test_a_cut_ends_by_itself_at_the_same_port() -> None:
    async with echo_behind_proxy() as (proxy, _):
        loop = asyncio.get_running_loop()
        port, started = proxy.port, loop.time()
        proxy.cut(0.3)

        async def is_back() -> bool:
            return not await refused(proxy)

        await until(is_back)
        assert loop.time() - started >= 0.3 and proxy.port == port


@pytest.mark.asyncio
async def test_it_follows_the_syncer_to_another_port_and_survives_its_absence() -> None:
    async with echo_behind_proxy() as (proxy, move):
        assert await ask(proxy) == b"hello"
        other = await asyncio.start_server(lambda _, w: (w.write(b"other"), w.close()), "127.0.0.1", free_port())  # type: ignore[arg-type,return-value,func-returns-value]
        port = other.sockets[0].getsockname()[1]
        move(port)
        assert await ask(proxy, b"") == b"other"
        other.close()
        assert await refused(proxy)
