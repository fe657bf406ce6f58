"""Shards behind the syncer's one port: which connection reaches which, with TLS and in plain text, over real sockets.

Each shard is a listener of its own with its own end of a link, as its process has it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from bulk_port import BulkPort
from diloco_protocol.security.credentials import Credentials
from diloco_protocol.wire import sync_pb2
from diloco_protocol.wire.bulk_calls import (
    BulkConnection,
    bulk_connection,
    bulk_preface,
    bulk_protocol,
    connect_bulk,
    frame,
)
from diloco_protocol.wire.byte_stream import ByteStream, StreamBroken, TlsState, set_options
from diloco_syncer.runtime.multipart import upload_reply
from diloco_syncer.server.tls import listener as listeners
from diloco_syncer.server.tls.connection_limits import Peer
from diloco_syncer.server.tls.passing import LinkEnded, make_link, receive_connection, send_connection
from parties import Parties
from patience import until

pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio]


@dataclass
class Called:
    """Answers an upload with its name, and knows who called. It is all that stands behind a port here."""

    name: str
    peers: list[Peer] = field(default_factory=list)

    async def upload(self, header: Any, source: Any, peer: Peer, called: str = "") -> sync_pb2.UploadReply:
        self.peers.append(peer)
        return upload_reply(True, self.name)


class Place:
    """A syncer's port with shards. ``mine``: a client's credentials."""

    def __init__(self, own: Credentials, mine: Credentials) -> None:
        self.own, self.mine = own, mine
        self.syncer = BulkPort(Called("syncer"), None, own, "tiny")
        self.shards: dict[int, BulkPort] = {}
        self.called: dict[int, Called] = {}

    @property
    def refused(self) -> dict[str, int]:
        return dict(self.syncer.listener.refusals.counts)

    def start_shard(self, shard: int) -> None:
        ours, theirs = make_link()
        self.called[shard] = Called(f"shard {shard}")
        made = self.shards[shard] = BulkPort(self.called[shard], None, self.own, "tiny", shard=shard)
        made.listener.accept_passed(theirs)
        made.listener.serve_bulk(made.accept)
        made.listener.start()
        self.syncer.listener.connect_shard(shard, ours)

    async def stop_shard(self, shard: int) -> None:
        gone = self.shards.pop(shard)
        await gone.close()
        await asyncio.to_thread(gone.listener.stop)

    def first_bytes(self, shard: int | None) -> tuple[bytes, TlsState | None]:
        """What a client says first, and what it goes on with."""
        if not self.mine.secure:
            return bulk_preface(shard), None
        tls = TlsState.begin(self.mine.client_context([bulk_protocol(shard)]), self.mine.server_name)
        with contextlib.suppress(Exception):
            tls.tls.do_handshake()
        return tls.outgoing.read(), tls

    def tcp(self) -> socket.socket:
        host, port = self.address.split(":")
        made = socket.create_connection((host, int(port)), timeout=10)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def connection(self, shard: int | None) -> BulkConnection:
        return bulk_connection(self.mine, self.address, shard)


async def ask(connection: BulkConnection) -> str:
    """Who is at its other end."""
    call = await connection.begin(upload=sync_pb2.UploadHeader(slot=1))
    return (await call.read_reply()).upload.reason


async def ask_often(connection: BulkConnection) -> str:
    """As a learner does: again after it broke."""
    while True:
        with contextlib.suppress(StreamBroken):
            return await ask(connection)
        connection.drop()
        await asyncio.sleep(0.02)


@pytest.fixture(params=["plain", "tls"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    own, mine = Credentials(token="word"), Credentials(token="word")
    if request.param == "tls":
        parties = Parties(tmp_path / "pki", "tiny")
        own = Credentials.from_directory(parties.syncer())
        mine = Credentials.from_directory(parties.learner())
    there = Place(own, mine)
    there.syncer.listener.begin_shards(3)
    async with there.syncer.listening() as there.address:
        for shard in range(2):  # the third is away
            there.start_shard(shard)
        yield there
        for shard in list(there.shards):
            await there.stop_shard(shard)


async def test_a_connection_reaches_the_shard_that_it_names(place: Place) -> None:
    made = {shard: place.connection(shard) for shard in (None, 0, 1)}
    for _ in range(2):
        assert [await ask(one) for one in made.values()] == ["syncer", "shard 0", "shard 1"]
    [peer] = {peer for peer in place.called[1].peers}
    assert (bool(peer.fingerprint), bool(peer.names)) == (place.mine.secure, place.mine.secure)
    host, port = peer.address.split(":")
    assert host == "127.0.0.1" and int(port) != int(place.address.split(":")[1])
    # A connection that was passed on is the shard's alone, and its bytes are counted there, from the first one.
    assert [port.listener.connections for port in (place.syncer, *place.shards.values())] == [1, 1, 1]
    await until(lambda: place.syncer.listener.handshakes == 0, "the syncer to forget them")
    first = len(place.first_bytes(1)[0])
    received = sum(up for up, down in place.shards[1].listener.bytes_by_place().values())
    call = len(frame(sync_pb2.BulkRequest(token="word", upload=sync_pb2.UploadHeader(slot=1))))
    assert received > first + call if place.mine.secure else received == first + 2 * call
    assert place.refused == {}
    for one in made.values():
        one.drop()
    await until(lambda: not place.shards[1].listener.connections, "the shard to forget it")


@pytest.mark.parametrize("cut", [None, 1, 5, 11])
async def test_a_first_message_may_come_in_pieces(place: Place, cut: int | None) -> None:
    """``cut`` None: each byte by itself."""
    first, tls = place.first_bytes(1)
    raw = place.tcp()
    for piece in [bytes([one]) for one in first] if cut is None else [first[:cut], first[cut:]]:
        raw.send(piece)
        await asyncio.sleep(0.0005 if cut is None else 0.1)
    set_options(raw)
    stream = ByteStream(raw, tls)
    if tls is not None:
        await stream.shake_hands()

    async def connected() -> ByteStream:
        return stream

    connection = BulkConnection(connected, place.mine.token)
    assert await ask(connection) == "shard 1"
    connection.drop()
    assert place.refused == {}


async def test_half_a_first_message_waits_without_cost_until_its_time_is_over(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "HANDSHAKE_SECONDS", 2.0)
    half = place.first_bytes(0)[0][:-1]
    waiting = [place.tcp() for _ in range(20)]
    for one in waiting:
        one.send(half)
    await until(lambda: place.syncer.listener.handshakes == 20, "all to be there")
    await asyncio.sleep(0.3)
    began, spent = time.monotonic(), time.process_time()
    await asyncio.sleep(1.0)
    assert time.process_time() - spent < 0.3 * (time.monotonic() - began)
    assert await ask(place.connection(0)) == "shard 0"
    leaves = waiting.pop()
    leaves.close()
    if place.mine.secure:
        await until(lambda: place.refused == {"broken-off": 1}, "the one that left to be counted")
    assert all(one.recv(1) == b"" for one in waiting)
    await until(lambda: place.refused.get("handshake-timeout") == 19, "the others to be counted")
    assert place.syncer.listener.handshakes == 0


async def test_what_names_no_shard_is_judged_as_without_shards(place: Place) -> None:
    """Garbage, shards beyond the list, and numbers written in other ways."""
    source = random.Random(1)
    said = [b"\x16" + source.randbytes(300), source.randbytes(40), b"\x16\3\1\0\5\1\0\0\1\0", b"diloco-s00x\n"]
    said += [place.first_bytes(7)[0], place.first_bytes(63)[0], b"diloco-s7\n" + bytes(2)]
    for data in said:
        with place.tcp() as raw:
            raw.send(data)
            with contextlib.suppress(OSError):
                raw.shutdown(socket.SHUT_WR)
                while await asyncio.to_thread(raw.recv, 4096):
                    pass
    with pytest.raises(StreamBroken):
        await ask(place.connection(7))
    if place.mine.secure:
        for name in ("diloco-bulk-01", "diloco-bulk-", "diloco-bulk-+1"):
            tls = TlsState.begin(place.mine.client_context([name]), place.mine.server_name)
            raw = place.tcp()
            set_options(raw)
            stream = ByteStream(raw, tls)
            await stream.shake_hands()
            with contextlib.suppress(StreamBroken):
                assert await stream.read_exactly(1) == b""
            stream.close()
        await until(lambda: place.refused.get("other-tls", 0) >= 4, "them to be counted")
    assert not any(shard.connections or shard.listener.refusals.counts for shard in place.shards.values())
    assert [await ask(place.connection(shard)) for shard in (None, 1)] == ["syncer", "shard 1"]


async def test_a_flood_of_half_messages_keeps_nobody_from_a_shard(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "MAX_HANDSHAKES", 20)
    half = place.first_bytes(0)[0][:7]
    flood = []
    for _ in range(60):
        flood.append(place.tcp())
        flood[-1].send(half)
        if len(flood) % 6 == 0:
            assert await ask(place.connection(1)) == "shard 1"
    await until(lambda: place.refused.get("handshake-flood", 0) >= 40, "the oldest to go")
    assert place.shards[1].listener.refusals.counts == {}
    for one in flood:
        one.close()
    await until(lambda: place.syncer.listener.handshakes == 0, "those who left to be forgotten")


async def test_a_shard_that_is_away_ends_the_connection_and_one_that_comes_gets_it(place: Place) -> None:
    connection = place.connection(2)
    with pytest.raises(StreamBroken):
        await ask(connection)
    place.start_shard(2)
    assert await ask_often(connection) == "shard 2"
    await place.stop_shard(2)
    for _ in range(2):  # by its link, and without
        connection.drop()
        with pytest.raises(StreamBroken):
            await ask(connection)
    place.start_shard(2)  # its next process
    assert await ask_often(connection) == "shard 2"
    former = place.shards[2]
    place.start_shard(2)  # one that takes the place of a process which has not ended
    while not place.called[2].peers:
        connection.drop()
        await ask_often(connection)
    await former.close()
    await asyncio.to_thread(former.listener.stop)
    assert place.refused == {} and place.syncer.listener.handshakes == 0


async def test_a_shard_that_takes_nothing_costs_its_own_connections(place: Place) -> None:
    ours, theirs = make_link()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
    place.syncer.listener.connect_shard(2, ours)
    first, _ = place.first_bytes(2)
    waiting = [place.tcp() for _ in range(40)]
    for one in waiting:
        one.send(first)
    await until(lambda: place.refused.get("no-room", 0) > 0, "one to be refused")
    assert [await ask(place.connection(shard)) for shard in (None, 0)] == ["syncer", "shard 0"]
    theirs.close()
    for one in waiting:  # also of those that it has not taken
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.to_thread(one.recv, 1) == b""


async def test_a_shard_judges_the_certificates_of_its_connections(tmp_path: Path) -> None:
    ours, theirs = Parties(tmp_path / "ours", "tiny"), Parties(tmp_path / "theirs", "tiny", title="theirs")
    stranger = replace(Credentials.from_directory(theirs.learner()), authority=ours.authority.certificate)
    there = Place(Credentials.from_directory(ours.syncer()), stranger)
    there.syncer.listener.begin_shards(1)
    async with there.syncer.listening() as there.address:
        there.start_shard(0)
        with pytest.raises(StreamBroken):
            await ask(there.connection(0))
        await until(lambda: there.shards[0].listener.refusals.counts == {"stranger": 1}, "it to be refused")
        assert there.refused == {} and not there.called[0].peers
        await there.stop_shard(0)


async def test_without_shards_none_is_found(place: Place) -> None:
    alone = BulkPort(Called("alone"), None, place.own, "tiny")
    async with alone.listening() as place.address:
        assert await ask(place.connection(None)) == "alone"
        with pytest.raises(StreamBroken):
            stream = await connect_bulk(place.mine, place.address, 0)
            await ask(BulkConnection(lambda: asyncio.sleep(0, stream)))


async def test_a_shard_whose_syncer_has_gone_waits_without_cost() -> None:
    ours, theirs = make_link()
    shard = BulkPort(Called("shard"), None, job="tiny", shard=0)
    shard.listener.accept_passed(theirs)
    shard.listener.start()
    ours.close()
    await asyncio.sleep(0.1)
    began, spent = time.monotonic(), time.process_time()
    await asyncio.sleep(0.5)
    assert time.process_time() - spent < 0.3 * (time.monotonic() - began)
    await asyncio.to_thread(shard.listener.stop)


async def test_a_connection_is_passed_whole_or_not_at_all() -> None:
    ours, theirs = make_link()
    with theirs:
        near, far = socket.socketpair()
        with near, far:
            send_connection(ours, near, "[fe80::1]:4711", b"first")
            received, address, first = receive_connection(theirs)
            with received:
                assert (address, first) == ("[fe80::1]:4711", b"first")
                assert not received.get_inheritable()
                far.send(b"x")
                assert received.recv(1) == b"x"
        ours.send(b"\0\0")  # as where no descriptor was free
        with pytest.raises(OSError) as caught:
            receive_connection(theirs)
        assert caught.value.errno == errno.EMFILE
        ours.close()
        with pytest.raises(LinkEnded):
            receive_connection(theirs)
    ours, theirs = make_link()
    theirs.close()
    with ours, pytest.raises(LinkEnded):
        send_connection(ours, ours, "", b"")
