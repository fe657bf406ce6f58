"""Bulk connections at the port that gRPC has too: real sockets, with TLS and in plain text."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio

from diloco_protocol.security.credentials import Credentials
from diloco_protocol.wire import bulk, channels, limits, sync_pb2
from diloco_protocol.wire.bulk_calls import CallFailed, ServedCall, bulk_connection, connect_bulk, frame, read_frame
from diloco_protocol.wire.byte_stream import StreamBroken
from diloco_syncer.runtime.multipart import MultipartUploads, upload_reply
from diloco_syncer.server.bulk import BulkServer
from diloco_syncer.server.tls import connection_limits
from diloco_syncer.server.tls import listener as listeners
from diloco_syncer.server.tls.access import CallAuthorizer
from diloco_syncer.server.tls.connection_limits import Peer
from diloco_syncer.server.tls.listener import PortListener
from parties import Parties
from patience import until

pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio]


class Payloads:
    """Takes uploads, and gives them back: what stands behind the calls here."""

    def __init__(self, authorizer: CallAuthorizer) -> None:
        self.refused: Counter[str] = Counter()
        self.uploads = MultipartUploads()
        self.whole: dict[int, Any] = {}
        self.callers: list[tuple[Peer, str]] = []
        self._authorizer = authorizer

    async def upload(
        self, header: sync_pb2.UploadHeader, source: bulk.Source, peer: Peer, called: str = ""
    ) -> sync_pb2.UploadReply:
        self.callers.append((peer, called))
        if header.slot == 99:
            return upload_reply(False, "no", "not this one")
        self._authorizer.assign_place(called, "us")
        whole = await self.uploads.receive_part(
            header.slot, header, source, lambda: np.empty(header.total_bytes, np.uint8)
        )
        if whole is None:
            return upload_reply(True, "partial")
        self.whole[header.slot] = whole
        return upload_reply(True)

    async def serve(self, request: sync_pb2.DownloadRequest, sink: ServedCall, peer: Peer, called: str = "") -> None:
        found = self.whole.get(request.fragment)
        if found is None:
            raise CallFailed("there is no such payload", final=False)
        header, part = bulk.cut_part(found, request.offset, request.bytes)
        await sink.reply(sync_pb2.BulkReply(download=header))
        await sink.write(part)


class Place:
    """A listener, a gRPC server and a bulk server behind it. ``mine``: a client's credentials."""

    def __init__(self, own: Credentials, mine: Credentials) -> None:
        self.mine = mine
        self.listener = PortListener(own, "tiny", {"us": 2, "eu": 2})
        self.server = aio.server(options=channels.server_options())
        authorizer = CallAuthorizer(self.listener, {"us": 2, "eu": 2}, own)
        self.payloads = Payloads(authorizer)
        stand_in: Any = self.payloads
        self.bulk = BulkServer(authorizer, stand_in, stand_in)

    async def __aenter__(self) -> Place:
        async def echo(raw: bytes, context: Any) -> bytes:
            assert self.listener.find_peer(context.peer()) is not None
            return raw

        method = grpc.unary_unary_rpc_method_handler(echo)
        self.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("T", {"Echo": method})])
        self.address = f"127.0.0.1:{self.listener.bind('127.0.0.1:0')}"
        self.server.add_insecure_port(self.listener.server_address)
        await self.server.start()
        self.listener.serve_bulk(self.bulk.accept)
        self.listener.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(0)
        await self.bulk.close()
        await asyncio.to_thread(self.listener.stop)

    async def echo(self, data: bytes) -> bytes:
        async with self.mine.aio_channel(self.address, channels.channel_options()) as channel:
            return bytes(await channel.unary_unary("/T/Echo")(data, timeout=30))

    @contextlib.contextmanager
    def lanes(self, count: int = 4) -> Any:
        made = [bulk_connection(self.mine, self.address) for _ in range(count)]
        try:
            yield bulk.Lanes(made)
        finally:
            for one in made:
                one.drop()

    def tcp(self) -> socket.socket:
        host, port = self.address.split(":")
        return socket.create_connection((host, int(port)), timeout=10)


@pytest.fixture(params=["plain", "tls"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    own, mine = Credentials(token="word"), Credentials(token="word")
    if request.param == "tls":
        parties = Parties(tmp_path / "pki", "tiny")
        own = Credentials.from_directory(parties.syncer())
        mine = Credentials.from_directory(parties.other("both", [f"diloco://job/ns/tiny/learner/{r}" for r in REGIONS]))
    async with Place(own, mine) as made:
        yield made


REGIONS = ("us", "eu")


async def test_grpc_and_bulk_connections_share_a_port(place: Place) -> None:
    data = np.random.default_rng(0).integers(0, 256, 3 * limits.MIN_PART_BYTES + 7, np.uint8)
    with place.lanes() as up, place.lanes() as down:
        replies = await asyncio.gather(
            bulk.upload(up, sync_pb2.UploadHeader(slot=1), data),
            bulk.upload(up, sync_pb2.UploadHeader(slot=2), data[::-1].copy()),
            place.echo(b"x" * 70_000),
        )
        assert [replies[0].accepted, replies[1].accepted] == [True, True] and replies[2] == b"x" * 70_000
        (_, one), (_, two) = await asyncio.gather(
            *(bulk.download(down, sync_pb2.DownloadRequest(fragment=n), size=data.nbytes) for n in (1, 2))
        )
        assert np.array_equal(one, data) and np.array_equal(two, data[::-1])
        assert place.listener.connections >= 2
        named = {peer.fingerprint for peer, _ in place.payloads.callers}
        assert (named == {""}) is not place.listener.secure, "a caller's certificate is known"
        carried = place.listener.bytes_by_place()["us"]
        assert min(carried) > 0 and carried[0] > data.nbytes
    await until(lambda: place.listener.connections == 0, "closed connections to be forgotten")
    assert sum(place.listener.bytes_by_place()["us"]) >= sum(carried), "and their bytes stay counted"


async def test_a_refusal_costs_no_connection_and_a_wrong_token_every_call(place: Place) -> None:
    data = np.zeros(limits.MIN_PART_BYTES, np.uint8)
    with place.lanes(1) as lanes:
        for _ in range(3):
            reply = await bulk.upload(lanes, sync_pb2.UploadHeader(slot=99), data)
            assert (reply.reason, reply.message) == ("no", "not this one")
        with pytest.raises(bulk.TransferError, match="no such payload") as failed:
            await bulk.download(lanes, sync_pb2.DownloadRequest(fragment=7))
        assert failed.value.retry
    assert len({called for _, called in place.payloads.callers}) == 1, "one connection for all"
    place.mine = Credentials(**{**vars(place.mine), "token": "guessed"})
    with place.lanes(1) as lanes, pytest.raises(bulk.TransferError, match="join token is missing or wrong") as failed:
        await bulk.upload(lanes, sync_pb2.UploadHeader(slot=1), data)
    assert not failed.value.retry and not place.payloads.whole


async def test_who_makes_no_call_is_not_waited_for(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JOIN_SECONDS", 0.3)
    silent, honest = await connect_bulk(place.mine, place.address), await connect_bulk(place.mine, place.address)
    try:
        asked = sync_pb2.DownloadRequest(fragment=7)
        await honest.write(frame(sync_pb2.BulkRequest(token=place.mine.token, download=asked)))
        with contextlib.suppress(StreamBroken):
            assert await silent.read_exactly(1) == b""
        await until(lambda: place.listener.connections == 1)
        assert await read_frame(honest), "who has made a call may lie idle"
    finally:
        silent.close()
        honest.close()


@pytest.mark.parametrize(
    "said",
    [b"\xff\xff\xff\xff", b"\0\0\0\0", b"\0\0\0\4\xff\xff\xff\xff", b""],
    ids=["a length of 4 GB", "an empty message", "no message", "a chunk beyond the end"],
)
async def test_who_breaks_the_rules_loses_the_connection(place: Place, said: bytes) -> None:
    nine = sync_pb2.UploadHeader(total_bytes=9, bytes=9)
    said = said or frame(sync_pb2.BulkRequest(token=place.mine.token, upload=nine)) + (256).to_bytes(4, "big")
    stream = await connect_bulk(place.mine, place.address)
    try:
        await stream.write(said)
        with contextlib.suppress(StreamBroken):
            assert await stream.read_exactly(1) == b""
    finally:
        stream.close()
    assert await place.echo(b"still here") == b"still here"
    await until(lambda: place.listener.connections == 0)


async def test_the_connections_of_a_certificate_are_limited(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "SPARE_CONNECTIONS", -97)  # of the hundred of five learners
    opened = [await connect_bulk(place.mine, place.address) for _ in range(3)]
    try:
        await until(lambda: place.listener.connections == 3)
        one_more = await connect_bulk(place.mine, place.address)
        if place.listener.secure:
            with contextlib.suppress(StreamBroken):
                assert await one_more.read_exactly(1) == b""
            assert place.listener.refusals.counts["too-many-connections"] == 1
        else:
            await until(lambda: place.listener.connections == 4)
        one_more.close()
    finally:
        for stream in opened:
            stream.close()


async def test_who_says_nothing_is_not_waited_for(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "HANDSHAKE_SECONDS", 0.3)
    with place.tcp() as silent, place.tcp() as slow:
        slow.send(b"d")
        assert await asyncio.to_thread(silent.recv, 1) == await asyncio.to_thread(slow.recv, 1) == b""
    counts: Counter[str] = place.listener.refusals.counts
    assert counts["handshake-timeout"] + counts["not-tls"] == 2


async def test_who_leaves_in_the_middle_costs_its_call(place: Place) -> None:
    header = sync_pb2.UploadHeader(slot=1, total_bytes=1000, bytes=1000)
    stream = await connect_bulk(place.mine, place.address)
    await stream.write(frame(sync_pb2.BulkRequest(token=place.mine.token, upload=header)), (500).to_bytes(4, "big"))
    await stream.write(bytes(300))
    await until(lambda: len(place.payloads.uploads._open) == 1)
    stream.close()
    await until(lambda: place.listener.connections == 0)
    with place.lanes(1) as lanes:
        assert (await bulk.upload(lanes, sync_pb2.UploadHeader(slot=1), bytes(1000))).accepted
