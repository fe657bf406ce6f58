"""Bytes by region and slot: what the listener counts is what a socket carries, and counts outlive syncers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc import aio, method_handlers_generic_handler, unary_unary_rpc_method_handler

from diloco_protocol.documents import StatusDocument
from diloco_protocol.security.credentials import Credentials
from diloco_protocol.wire import channels
from diloco_syncer.runtime.traffic import EVALUATOR, Traffic
from diloco_syncer.server.pages.metrics import StatusCollector
from diloco_syncer.server.tls.listener import PortListener
from parties import Parties
from patience import until
from status_documents import slot_row, status_document

pytestmark = pytest.mark.timeout(60)


class Counting:
    """A TCP relay that counts what it passes on: the oracle."""

    def __init__(self, target: int) -> None:
        self.target, self.up, self.down = target, 0, 0

    async def __aenter__(self) -> Counting:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, out = await asyncio.open_connection("127.0.0.1", self.target)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, up: bool) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(1 << 16):
                    self.up += len(data) * up
                    self.down += len(data) * (not up)
                    sink.write(data)
                    await sink.drain()
                sink.write_eof()  # the other way still has a good-bye to say, which counts

        await asyncio.gather(pump(reader, out, True), pump(back, writer, False))
        out.close()
        writer.close()


@contextlib.asynccontextmanager
async def echoing(parties: Parties, regions: list[str]) -> AsyncIterator[tuple[PortListener, int, Traffic]]:
    """A listener before a server that echoes; a call of `Join` says whose the connection is."""
    listener = PortListener(Credentials.from_directory(parties.syncer()), parties.job, dict.fromkeys(regions, 2))
    traffic = Traffic(regions, listener.bytes_by_place)
    server = aio.server(options=channels.server_options())
    port = listener.bind("127.0.0.1:0")
    server.add_insecure_port(listener.server_address)

    async def echo(raw: bytes, context: Any) -> bytes:
        return raw

    async def join(raw: bytes, context: Any) -> bytes:
        listener.assign_place(context.peer(), traffic.place_of(raw.decode(), raw == EVALUATOR.encode()))
        return b""

    methods = {"Echo": unary_unary_rpc_method_handler(echo), "Join": unary_unary_rpc_method_handler(join)}
    server.add_generic_rpc_handlers([method_handlers_generic_handler("T", methods)])
    await server.start()
    listener.start()
    try:
        yield listener, port, traffic
    finally:
        await server.stop(0)
        await asyncio.to_thread(listener.stop)


async def talk(credentials: Path, port: int, size: int, join: str = "") -> None:
    """Connect, say who it is, and have ``size`` bytes echoed."""
    made = Credentials.from_directory(credentials)
    async with made.aio_channel(f"127.0.0.1:{port}", channels.channel_options()) as channel:
        if join:
            await channel.unary_unary("/T/Join")(join.encode(), timeout=10)
        await channel.unary_unary("/T/Echo")(os.urandom(size), timeout=10)


def parts(traffic: Traffic) -> dict[str, tuple[int | None, int | None]]:
    return {row.name: (row.wire_bytes_up, row.wire_bytes_down) for row in traffic.rows()}


async def test_the_listener_counts_what_sockets_carry_and_to_whom_it_belongs(tmp_path: Path) -> None:
    parties = Parties(tmp_path / "pki", "tiny")
    both = parties.other("both", [f"diloco://job/ns/tiny/learner/{region}" for region in ("eu", "us")])
    async with echoing(parties, ["eu", "us"]) as (listener, port, traffic), contextlib.AsyncExitStack() as stack:
        eu, us, named, hub = [await stack.enter_async_context(Counting(port)) for _ in range(4)]
        await asyncio.gather(
            talk(parties.learner("l-eu", "eu"), eu.port, 700_000),  # by its certificate
            talk(both, us.port, 300_000, join="us"),  # by what it says: its certificate names two
            talk(both, named.port, 50_000),  # two, and it does not say
            talk(parties.learner("l-hub", "eu"), hub.port, 90_000, join=EVALUATOR),
        )
        await until(lambda: not listener.connections)
        found = parts(traffic)
        for name, relay in (("eu", eu), ("us", us), ("", named), (EVALUATOR, hub)):
            # What came before a call told whose it is stays with the certificate's place.
            assert abs(found[name][0] - relay.up) < 10_000 and relay.up > 50_000, name
            assert abs(found[name][1] - relay.down) < 10_000, name
        everything = [eu, us, named, hub]
        assert sum(up for up, _ in found.values()) == sum(relay.up for relay in everything)
        assert sum(down for _, down in found.values()) == sum(relay.down for relay in everything)
        unsaid = us.up - found["us"][0], us.down - found["us"][1]
        # Those that are open count too, and nobody else's handshake does.
        made = Credentials.from_directory(parties.learner("l-us", "us"))
        async with made.aio_channel(f"127.0.0.1:{us.port}", channels.channel_options()) as channel:
            await channel.unary_unary("/T/Echo")(b"x" * 5000, timeout=60)
            await until(lambda: parts(traffic)["us"] == (us.up - unsaid[0], us.down - unsaid[1]))
        stranger = Parties(tmp_path / "other", "tiny").learner()
        with pytest.raises(aio.AioRpcError):
            await talk(stranger, eu.port, 10)
        assert parts(traffic)["eu"] == found["eu"]

        # The next syncer goes on from the state, whatever its own listener has seen.
        state = json.loads(json.dumps(traffic.state()))
    async with echoing(parties, ["eu", "us"]) as (second, port, after):
        after.load(state)
        before = parts(after)
        assert before["eu"] == found["eu"] and before["us"][0] == us.up - unsaid[0]
        await talk(parties.learner("l-eu", "eu"), port, 1000)
        await until(lambda: not second.connections)
        now = parts(after)
        up, down = now["eu"][0] - before["eu"][0], now["eu"][1] - before["eu"][1]  # type: ignore[operator]
        assert 1000 < up < 20_000 and 1000 < down < 20_000 and now["us"] == before["us"]


def test_payload_goes_to_regions_and_slots_and_outlives_a_syncer() -> None:
    first = Traffic(["eu", "us"])
    first.count_received(first.place_of("us", False), 1, 100)
    first.count_received(first.place_of("us", False), 1, 11)
    first.count_sent(first.place_of("eu", False), 0, 7)
    first.count_sent(first.place_of("eu", False), None, 3)  # a spare
    first.count_sent(first.place_of("eu", True), None, 5)
    first.count_sent(first.place_of("region-that-nobody-knows", False), None, 1)
    second = Traffic(["us", "eu", "ap"])
    second.load(json.loads(json.dumps(first.state())))
    second.count_received("us", 1, 1000)
    rows = second.rows()
    assert [row.name for row in rows] == ["us", "eu", "ap", "", EVALUATOR]
    assert {row.name: (row.bytes_up, row.bytes_down) for row in rows} == {
        "us": (1111, 0),
        "eu": (0, 10),
        "ap": (0, 0),
        "": (0, 1),
        EVALUATOR: (0, 5),
    }
    assert all(row.wire_bytes_up is row.wire_bytes_down is None for row in rows)
    assert [second.slot_bytes(slot) for slot in range(3)] == [(0, 7), (1111, 0), (0, 0)]
    older = Traffic(["eu"])
    older.load({})  # a state of a release that did not count
    assert older.rows()[0].bytes_up == 0


def carried(document: StatusDocument) -> Iterator[tuple[str, str, float]]:
    for family in StatusCollector(lambda: document).collect():
        for sample in family.samples:
            if "region" in sample.labels and sample.name.endswith("_bytes_total"):
                yield sample.name, sample.labels["region"], sample.value


def test_metrics_have_regions_and_leave_out_what_is_not_known() -> None:
    counts = {"bytes_up": 5, "bytes_down": 6}
    document = status_document(
        slots=[slot_row(region="eu", **counts)],
        regions=[
            {"name": "eu", **counts, "wire_bytes_up": 8, "wire_bytes_down": 9},
            {"name": "us", **counts, "wire_bytes_up": None, "wire_bytes_down": None},
        ],
    )
    assert set(carried(document)) == {
        ("diloco_slot_received_bytes_total", "eu", 5),
        ("diloco_slot_sent_bytes_total", "eu", 6),
        ("diloco_region_received_bytes_total", "eu", 5),
        ("diloco_region_received_bytes_total", "us", 5),
        ("diloco_region_sent_bytes_total", "eu", 6),
        ("diloco_region_sent_bytes_total", "us", 6),
        ("diloco_region_wire_received_bytes_total", "eu", 8),
        ("diloco_region_wire_sent_bytes_total", "eu", 9),
    }
