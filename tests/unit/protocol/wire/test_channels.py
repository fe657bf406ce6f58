"""gRPC's options: it takes a name that it does not know without a word."""

from __future__ import annotations

import asyncio
import mmap

import pytest
from grpc import aio
from grpc._cython import cygrpc

from diloco_protocol.wire.channels import channel_options, control_options, control_server_options, server_options

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7
INTERVAL = "grpc.http2.min_ping_interval_without_data_ms"


@pytest.mark.promise("A connection without calls for minutes is kept alive, and not ended for its pings")
def test_grpc_knows_every_option() -> None:
    ways = (channel_options(), control_options(), server_options(), control_server_options(1))
    names = {name for way in ways for name, _ in way}
    with open(cygrpc.__file__, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        unknown = {name for name in names if library.find(name.encode() + b"\0") < 0}
    assert not unknown


def test_a_try_to_connect_takes_four_round_trips_of_two_seconds_and_pauses_grow() -> None:
    """gRPC's least backoff is how long one try may take: TCP, TLS and HTTP/2's first frames."""
    for options in (channel_options(), control_options()):
        found = dict(options)
        assert found["grpc.min_reconnect_backoff_ms"] >= 4 * 2000
        assert found["grpc.initial_reconnect_backoff_ms"] == 2000
        assert found["grpc.max_reconnect_backoff_ms"] == 15_000


@pytest.mark.promise("A connection without calls for minutes is kept alive, and not ended for its pings")
async def test_a_connection_without_calls_may_be_kept_alive() -> None:
    """Pings that come no faster than allowed end no connection, however many they are."""
    server = aio.server(options=[(name, 1 if name == INTERVAL else value) for name, value in server_options()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(PREFACE + frame(SETTINGS, b""))
        for n in range(12):  # more than strikes
            await asyncio.sleep(0.01)  # the interval, and more
            writer.write(frame(PING, n.to_bytes(8, "big")))
            kinds = [kind async for kind in frames_until(reader, PING)]
            assert GOAWAY not in kinds, f"ping {n}"
        writer.close()
    finally:
        await server.stop(None)


def frame(kind: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, 0]) + bytes(4) + payload


async def frames_until(reader: asyncio.StreamReader, last: int):  # type: ignore[no-untyped-def]
    """The kinds of the frames that come, up to one of the kind ``last`` or the end of the connection."""
    while True:
        try:
            head = await asyncio.wait_for(reader.readexactly(9), 10)
            await reader.readexactly(int.from_bytes(head[:3], "big"))
        except asyncio.IncompleteReadError:
            return
        yield head[3]
        if head[3] == last:
            return
