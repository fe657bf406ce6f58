"""The calls on bulk connections: a client against the syncer's own port, and what either may find on the wire."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from bulk_port import BulkPort
from diloco_protocol.security.credentials import Credentials
from diloco_protocol.vocabulary import TransferRefusal
from diloco_protocol.wire import bulk, limits, sync_pb2
from diloco_protocol.wire.bulk_calls import (
    MESSAGE_BYTES,
    PREFACE,
    BulkCall,
    BulkConnection,
    CallFailed,
    ServedCall,
    bulk_connection,
    connect_bulk,
    frame,
    read_frame,
)
from diloco_protocol.wire.byte_stream import ByteStream, StreamBroken
from diloco_syncer.server.tls.connection_limits import Peer
from parties import TOKEN, Parties
from patience import until

UPLOAD = sync_pb2.UploadHeader(bytes=1 << 20)
DOWNLOAD = sync_pb2.DownloadRequest(job="j")
TAKEN = sync_pb2.UploadReply(accepted=True)


@contextlib.contextmanager
def stream_pair() -> Any:
    ends = socket.socketpair()
    for one in ends:
        one.setblocking(False)
    streams = [ByteStream(one) for one in ends]
    try:
        yield streams
    finally:
        for stream in streams:
            stream.close()


# ------------------------------------------------------------------ messages


async def test_a_message_comes_as_it_was_sent_and_the_end_is_told() -> None:
    with stream_pair() as (here, there):
        largest = sync_pb2.BulkRequest(token="x" * (MESSAGE_BYTES - 4))
        await here.write(frame(sync_pb2.BulkRequest(token="word")) + frame(largest))
        assert sync_pb2.BulkRequest.FromString(await read_frame(there)).token == "word"
        assert len(await read_frame(there)) == MESSAGE_BYTES
        here.close()
        assert await read_frame(there) == b""


def test_a_message_that_is_too_large_is_not_sent() -> None:
    with pytest.raises(limits.WireError, match=f"has {MESSAGE_BYTES + 1} bytes; at most {MESSAGE_BYTES}"):
        frame(sync_pb2.BulkRequest(token="x" * (MESSAGE_BYTES - 3)))


@pytest.mark.parametrize("size", [0, MESSAGE_BYTES + 1, (1 << 32) - 1])
async def test_a_message_of_a_length_that_none_has_is_not_waited_for(size: int) -> None:
    with stream_pair() as (here, there):
        await here.write(size.to_bytes(4, "big"))
        with pytest.raises(limits.WireError, match=f"a message of {size} bytes"):
            await read_frame(there)


@pytest.mark.parametrize(("sent", "words"), [(b"\0\0", "2 of 4"), (b"\0\0\0\5abc", "3 of 5")])
async def test_an_end_in_the_middle_of_a_message_is_a_break(sent: bytes, words: str) -> None:
    with stream_pair() as (here, there):
        await here.write(sent)
        here.close()
        with pytest.raises(StreamBroken, match=f"ended after {words} bytes"):
            await read_frame(there)


async def test_a_message_that_has_begun_must_be_whole_in_time() -> None:
    """How long a connection lies idle before it does not matter."""
    loop = asyncio.get_running_loop()
    with stream_pair() as (here, there):
        begun, reading = loop.time(), asyncio.ensure_future(read_frame(there, 0.05))
        await until(lambda: loop.time() > begun + 0.1)
        await here.write(frame(sync_pb2.BulkRequest(token="word")))
        assert await reading
        await here.write(b"\0\0\0\5abc")
        with pytest.raises(StreamBroken, match="no whole message within 0 s"):
            await read_frame(there, 0.05)


# ------------------------------------------------------------------ the two ends of a call


class Syncer:
    """Takes uploads, and offers downloads of ``stored``; fails where it is told to."""

    def __init__(self) -> None:
        self.stored = bytes(range(256)) * 1000
        self.taken = bytearray()
        self.refuse = False  # uploads, before their bytes
        self.answer: Callable[[Any], Awaitable[Any]] | None = None  # instead of all that
        self.failure: CallFailed | None = None
        self.error: BaseException | None = None  # what the last upload ended with
        self.refused = Counter[str]()

    async def upload(
        self, header: sync_pb2.UploadHeader, source: ServedCall, peer: Peer, called: str
    ) -> sync_pb2.UploadReply:
        if self.failure is not None:
            raise self.failure
        if self.answer is not None:
            await self.answer(source)
        if self.refuse:
            return sync_pb2.UploadReply(accepted=False, reason="fenced")
        self.taken = bytearray(header.bytes)
        try:
            await bulk.receive_into(source, memoryview(self.taken))
        except (limits.WireError, StreamBroken) as error:
            self.error = error
            if isinstance(error, StreamBroken):
                raise
            return sync_pb2.UploadReply(accepted=False, reason="broken")
        return TAKEN

    async def serve(self, request: sync_pb2.DownloadRequest, call: ServedCall, peer: Peer, called: str) -> None:
        if self.failure is not None:
            raise self.failure
        if request.what == sync_pb2.DownloadRequest.FROZEN:
            await call.reply(sync_pb2.BulkReply(download=sync_pb2.DownloadHeader(found=False)))
            return
        header, part = bulk.cut_part(self.stored, request.offset, request.bytes)
        await call.reply(sync_pb2.BulkReply(download=header))
        await call.write(part)


class Place:
    """A syncer, its port, and a connection to it."""

    def __init__(self, credentials: Credentials | None = None) -> None:
        self.syncer = Syncer()
        self.port = BulkPort(self.syncer, self.syncer, credentials)
        self.address = ""
        self.one: BulkConnection

    @property
    def connections(self) -> list[ByteStream]:
        """That have come to it."""
        return self.port.connections

    async def upload(self, data: bytes) -> sync_pb2.UploadReply:
        """A call that comes to its end."""
        return await bulk.upload(self.one, sync_pb2.UploadHeader(), data)

    async def download(self) -> bytes:
        _, data = await bulk.download(self.one, DOWNLOAD)
        return data.tobytes()

    async def check_connections(self, count: int) -> None:
        """A further call is carried out; then so many connections have come."""
        assert await self.download() == self.syncer.stored and len(self.connections) == count


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with opened(Credentials()) as made:
        yield made


@contextlib.asynccontextmanager
async def opened(server: Credentials, client: Credentials | None = None) -> AsyncIterator[Place]:
    made = Place(server)
    async with made.port.listening() as made.address:
        made.one = bulk_connection(client or server, made.address)
        try:
            yield made
        finally:
            made.one.drop()


async def probe(connection: BulkConnection, up: int = 0, down: int = 0, sent: int | None = None) -> int:
    """The bytes that come back. ``sent``: of those that go up, those that are sent now."""
    call = await connection.begin(probe=sync_pb2.Probe(up=up, down=down))
    try:
        for start in range(0, up if sent is None else sent, limits.CHUNK_BYTES):
            await call.write(memoryview(bytes(min(limits.CHUNK_BYTES, up - start))))
        reply = await call.read_reply()
        room, came = memoryview(bytearray(100_000)), 0
        while count := await call.read_into(room):
            came += count
        assert reply.download.bytes == came
        return came
    finally:
        call.end()


async def test_a_link_is_measured_with_bytes_of_no_meaning(place: Place) -> None:
    for up, down in ((0, 0), (1, 0), (0, 1), (700_001, 300_001), (limits.PROBE_BYTES, limits.PROBE_BYTES)):
        assert await probe(place.one, up, down) == down
    await place.check_connections(1)


@pytest.mark.parametrize("what", [{"up": limits.PROBE_BYTES + 1}, {"down": limits.PROBE_BYTES + 1}])
async def test_a_measurement_of_a_link_has_a_bound(place: Place, what: dict[str, int]) -> None:
    with pytest.raises(CallFailed, match="at most 16777216 bytes") as failed:
        await probe(place.one, **what, sent=0)
    assert failed.value.final


async def test_one_measures_a_link_at_a_time(place: Place) -> None:
    """Also when the one before has broken off."""
    other = bulk_connection(Credentials(), place.address)
    call = await place.one.begin(probe=sync_pb2.Probe(up=10))
    await until(lambda: place.port._is_probed)
    with pytest.raises(CallFailed, match="somebody else measures the link") as failed:
        await probe(other)
    assert not failed.value.final
    call.end()
    await until(lambda: not place.port._is_probed)
    assert await probe(other, 5, 5) == 5
    other.drop()


async def test_a_measurement_that_does_not_go_on_ends(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PROBE_SECONDS", 0.2)
    with pytest.raises(StreamBroken):
        await probe(place.one, 10, sent=0)
    await until(lambda: not place.port._is_probed)


async def test_a_connection_is_made_for_the_first_call_and_carries_one_after_the_other(place: Place) -> None:
    assert not place.connections
    data = bytes(range(251)) * 5000
    for _ in range(3):
        assert (await place.upload(data)).accepted and place.syncer.taken == data
        assert await place.download() == place.syncer.stored
        assert (await place.upload(b"")).accepted
        missing, _ = await bulk.download(place.one, sync_pb2.DownloadRequest(what=sync_pb2.DownloadRequest.FROZEN))
        assert not missing.found
    assert len(place.connections) == 1


async def test_an_upload_that_is_refused_before_its_bytes_are_there_keeps_the_connection(place: Place) -> None:
    place.syncer.refuse = True
    for _ in range(2):
        reply = await place.upload(bytes(8 << 20))
        assert (reply.accepted, reply.reason) == (False, "fenced")
    await place.check_connections(1)


async def test_a_call_that_was_answered_and_is_not_given_up_costs_the_connection(place: Place) -> None:
    """The next call connects anew."""
    place.syncer.refuse = True
    call = await place.one.begin(upload=UPLOAD)
    assert (await call.read_reply()).upload.reason == "fenced"
    call.end()
    await until(lambda: place.connections[0].closed)
    await place.check_connections(2)


async def test_a_call_that_is_given_up_before_its_answer_costs_the_connection(place: Place) -> None:
    call = await place.one.begin(upload=UPLOAD)
    await call.write(memoryview(bytes(UPLOAD.bytes - 1)))
    await call.give_up_upload()  # is for those that were answered
    call.end()
    await until(lambda: place.connections and place.connections[0].closed)
    assert str(place.syncer.error) == "the sender ended the connection"
    await place.check_connections(2)


async def test_a_download_that_is_not_read_to_its_end_costs_the_connection(place: Place) -> None:
    call = await place.one.begin(download=DOWNLOAD)
    reply = await call.read_reply()
    target = memoryview(bytearray(len(place.syncer.stored) + 1))
    left = reply.download.bytes
    while left > 1:
        left -= await call.read_into(target[: left - 1])
    call.end()
    await place.check_connections(2)


async def test_of_a_download_no_more_is_read_than_its_header_says(place: Place) -> None:
    call = await place.one.begin(download=DOWNLOAD)
    await call.read_reply()
    target, filled = memoryview(bytearray(len(place.syncer.stored) + 9)), 0
    while count := await call.read_into(target[filled:]):
        filled += count
    assert target[:filled] == place.syncer.stored and await call.read_into(target) == 0
    call.end()
    await place.check_connections(1)


async def test_a_write_that_is_cancelled_costs_the_connection(place: Place) -> None:
    """Nobody knows how much of it has gone."""

    async def wait(call: ServedCall) -> None:
        await asyncio.Event().wait()

    place.syncer.answer = wait
    size = 32 << 20
    call = await place.one.begin(upload=sync_pb2.UploadHeader(bytes=size))
    writing = asyncio.ensure_future(call.write(memoryview(bytes(size))))
    await until(lambda: place.one._stream is not None and place.one._stream._waiting)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    call.end()
    await place.check_connections(2)


async def test_a_connection_that_the_syncer_has_ended_meanwhile_is_made_anew(place: Place) -> None:
    await place.check_connections(1)
    place.connections[0].close()
    await until(lambda: place.one._stream is not None and place.one._stream.has_ended())
    await place.check_connections(2)


async def test_a_connection_that_was_dropped_is_made_anew(place: Place) -> None:
    place.one.drop()
    await place.check_connections(1)
    stream = place.one._stream
    place.one.drop()
    assert stream is not None and stream.closed
    await until(lambda: place.connections[0].closed)
    await place.check_connections(2)


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("of", ["download", "upload"])
async def test_a_failure_says_why_and_whether_it_is_one_for_good(place: Place, of: str, final: bool) -> None:
    place.syncer.failure = CallFailed("not " * limits.MAX_TEXT, final)
    call = await place.one.begin(**({"upload": UPLOAD} if of == "upload" else {"download": DOWNLOAD}))
    with pytest.raises(CallFailed) as caught:
        await call.read_reply()
    assert caught.value.final is final and str(caught.value) == ("not " * limits.MAX_TEXT)[: limits.MAX_TEXT]
    call.end()
    place.syncer.failure = None
    # Of an upload bytes may be on their way.
    await place.check_connections(2 if of == "upload" else 1)


async def test_a_fault_of_the_syncer_costs_the_connection_and_is_none_for_good(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(call: ServedCall) -> None:
        raise ZeroDivisionError

    place.syncer.answer = fail
    with pytest.raises(bulk.TransferError) as caught:
        await place.upload(b"x")
    assert caught.value.retry and "a fault of this program, at a bulk connection" in caplog.text
    await place.check_connections(2)


# ------------------------------------------------------------------ what the syncer may find on the wire


Raw = Callable[[ByteStream], Awaitable[None]]


async def announce(stream: ByteStream, size: int) -> None:
    await stream.write(frame(sync_pb2.BulkRequest(upload=sync_pb2.UploadHeader(bytes=size))))


async def chunk(stream: ByteStream, size: int) -> None:
    await stream.write(size.to_bytes(4, "big") + bytes(size))


async def reply(stream: ByteStream) -> sync_pb2.BulkReply:
    return sync_pb2.BulkReply.FromString(await read_frame(stream))


@pytest.fixture
async def raw(place: Place) -> AsyncIterator[ByteStream]:
    made = await connect_bulk(Credentials(), place.address)
    yield made
    made.close()


async def test_an_upload_may_come_in_any_chunks(place: Place, raw: ByteStream) -> None:
    await announce(raw, 10)
    for size in (1, 6, 3):
        await chunk(raw, size)
    assert (await reply(raw)).upload.accepted and place.syncer.taken == bytes(10)


async def test_an_upload_that_its_sender_gives_up_keeps_the_connection(place: Place, raw: ByteStream) -> None:
    await announce(raw, 10)
    await chunk(raw, 9)
    await chunk(raw, 0)
    assert (await reply(raw)).upload.reason == "broken"
    assert str(place.syncer.error) == "the sender gave the part up, 1 bytes before its end"
    await raw.write(frame(sync_pb2.BulkRequest(download=DOWNLOAD)))
    assert (await reply(raw)).download.found


async def test_a_chunk_that_goes_beyond_the_upload_ends_the_connection(place: Place, raw: ByteStream) -> None:
    await announce(raw, 10)
    await chunk(raw, 4)
    await chunk(raw, 7)
    assert await ended(raw)
    assert str(place.syncer.error) == "a chunk of 7 bytes, where 6 are left"


async def test_an_end_within_a_chunk_is_a_break(place: Place, raw: ByteStream) -> None:
    await announce(raw, 10)
    await raw.write((10).to_bytes(4, "big") + b"0123")
    raw.close()
    await until(lambda: place.syncer.error)
    assert str(place.syncer.error) == "the sender ended the connection" and place.syncer.taken[:5] == b"0123\0"


@pytest.mark.parametrize("end", ["client", "syncer"])
async def test_the_check_of_whose_the_memory_is_comes_before_bytes_are_written(end: str) -> None:
    def check() -> None:
        raise ValueError("it is another's")

    target = memoryview(bytearray(4))
    with stream_pair() as (here, there):
        if end == "client":
            call: Any = BulkCall(here, 0)
            await there.write(frame(sync_pb2.BulkReply(download=sync_pb2.DownloadHeader(bytes=4))) + b"abcd")
            await call.read_reply()
        else:
            call = ServedCall(here, sync_pb2.BulkRequest(upload=sync_pb2.UploadHeader(bytes=4)))
            await there.write(b"\0\0\0\4abcd")
        with pytest.raises(ValueError, match="another's"):
            await call.read_into(target, check)
        assert target == bytes(4)
        assert await call.read_into(target) == 4 and target == b"abcd"


async def ended(stream: ByteStream) -> bool:
    """Whether the syncer ends the connection, without a word."""
    try:
        return await read_frame(stream) == b""
    except StreamBroken:
        return True  # with bytes that it has not read


@pytest.mark.parametrize(
    "sent",
    [bytes(4), b"\xff" * 4, b"\0\0\0\4\xff\xff\xff\xff", (MESSAGE_BYTES + 1).to_bytes(4, "big")],
    ids=["empty", "huge", "not a message", "too large"],
)
async def test_what_is_no_request_ends_the_connection(place: Place, raw: ByteStream, sent: bytes) -> None:
    await raw.write(sent)
    assert await ended(raw)
    await until(lambda: place.connections[0].closed)
    assert place.syncer.refused == {TransferRefusal.BAD_TRANSFER: 1}
    await place.check_connections(2)


async def test_a_connection_without_a_call_is_ended_and_one_that_had_a_call_may_lie_idle(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "JOIN_SECONDS", 0.1)
    await place.check_connections(1)
    raw = await connect_bulk(Credentials(), place.address)
    await raw.write(b"\0\0")
    assert await ended(raw)
    raw.close()
    await place.check_connections(2)
    assert [one.closed for one in place.connections] == [False, True]


async def test_a_request_for_nothing_is_answered_so(place: Place, raw: ByteStream) -> None:
    await raw.write(frame(sync_pb2.BulkRequest(token="x")))
    failure = (await reply(raw)).failure
    assert failure.final and "does not say what is to be moved" in failure.message


async def test_a_refused_upload_that_is_not_given_up_is_not_waited_for_long(
    place: Place, raw: ByteStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STALL_SECONDS", 0.05)
    place.syncer.refuse = True
    await announce(raw, 10)
    await chunk(raw, 9)
    assert (await reply(raw)).upload.reason == "fenced"
    assert await ended(raw)


async def test_what_follows_a_refused_upload_is_read_once_the_upload_is_over(place: Place, raw: ByteStream) -> None:
    place.syncer.refuse = True
    for sizes in ((10,), (4, 6), (9, 0), (0,)):
        await announce(raw, 10)
        for size in sizes:
            await chunk(raw, size)
        assert (await reply(raw)).upload.reason == "fenced"
    await raw.write(frame(sync_pb2.BulkRequest(download=DOWNLOAD)))
    assert (await reply(raw)).download.found


# ------------------------------------------------------------------ what a client may find on the wire


@pytest.mark.parametrize(
    ("sent", "error", "words"),
    [
        (b"", StreamBroken, "the syncer ended the connection"),
        (b"\0\0", StreamBroken, "ended after 2 of 4 bytes"),
        (bytes(4), limits.WireError, "a message of 0 bytes"),
        (b"\0\0\0\4\xff\xff\xff\xff", limits.WireError, "BulkReply"),
        (frame(sync_pb2.BulkReply(download=sync_pb2.DownloadHeader(bytes=2))) + b"x", StreamBroken, "the syncer ended"),
    ],
)
async def test_a_syncer_that_answers_wrongly_costs_the_connection(
    sent: bytes, error: type[Exception], words: str
) -> None:
    with stream_pair() as (here, there):
        call = BulkCall(here, 0)
        await there.write(sent)
        there.close()
        with pytest.raises(error, match=words):
            await call.read_reply()
            while await call.read_into(memoryview(bytearray(8))):
                pass
        call.end()
        assert here.closed


async def test_of_what_follows_a_download_nothing_is_read() -> None:
    with stream_pair() as (here, there):
        call, target = BulkCall(here, 0), memoryview(bytearray(8))
        await there.write(frame(sync_pb2.BulkReply(download=sync_pb2.DownloadHeader(bytes=2))) + b"xyNEXT")
        await call.read_reply()
        assert [await call.read_into(target), await call.read_into(target)] == [2, 0] and target[:3] == b"xy\0"
        call.end()
        assert not here.closed and await here.read_exactly(4) == b"NEXT"


async def test_a_refusal_that_ends_the_connection_has_come_all_the_same() -> None:
    """Then there is nobody who could be told that the rest is given up."""
    with stream_pair() as (here, there):
        call = BulkCall(here, 10)
        await there.write(frame(sync_pb2.BulkReply(upload=sync_pb2.UploadReply(reason="fenced"))))
        there.close()
        with pytest.raises(StreamBroken):
            await call.write(memoryview(bytes(4)))
        assert (await call.read_reply()).upload.reason == "fenced"
        await call.give_up_upload()
        call.end()
        assert here.closed


async def test_a_request_that_did_not_go_out_costs_the_connection() -> None:
    made = list[ByteStream]()
    with stream_pair() as (here, _):

        async def connect() -> ByteStream:
            made.append(here)
            return here

        async def write(*pieces: Any) -> None:
            raise StreamBroken("broken pipe")

        here.write = write
        one = BulkConnection(connect)
        for count in (1, 2):
            with pytest.raises(StreamBroken, match="broken pipe"):
                await one.begin(download=DOWNLOAD)
            assert here.closed and len(made) == count


@pytest.mark.parametrize("of", ["upload", "download"])
async def test_an_answer_to_something_else_is_an_error_of_the_wire_and_costs_the_connection(of: str) -> None:
    with stream_pair() as (here, there):

        async def connect() -> ByteStream:
            return here

        one = BulkConnection(connect)
        if of == "upload":
            transfer: Any = bulk.upload(one, sync_pb2.UploadHeader(), b"x")
            answer = sync_pb2.BulkReply(download=sync_pb2.DownloadHeader(found=True, bytes=7))
        else:
            transfer = bulk.download(one, sync_pb2.DownloadRequest())
            answer = sync_pb2.BulkReply(upload=TAKEN)
        await there.write(frame(answer))
        with pytest.raises(limits.WireError, match=f"an? {of} was answered as an? "):
            await transfer
        assert here.closed is (of == "upload")


# ------------------------------------------------------------------ connecting


async def test_in_plain_text_a_connection_begins_with_its_name_and_a_call_with_the_token() -> None:
    server = await asyncio.start_server(lambda reader, writer: came.set_result((reader, writer)), "127.0.0.1", 0)
    came: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    async with server:
        port = server.sockets[0].getsockname()[1]
        one = bulk_connection(Credentials(token="word"), f"127.0.0.1:{port}")
        await one.begin(download=DOWNLOAD)
        reader, writer = await came
        assert await reader.readexactly(len(PREFACE)) == PREFACE
        size = int.from_bytes(await reader.readexactly(4), "big")
        request = sync_pb2.BulkRequest.FromString(await reader.readexactly(size))
        assert request.token == "word" and request.download == DOWNLOAD
        one.drop()
        assert await reader.read() == b""
        writer.close()


async def test_where_nobody_listens_it_is_said_and_may_be_tried_again() -> None:
    with pytest.raises(StreamBroken, match=r"nothing listens on 127\.0\.0\.1:1; is the syncer up"):
        await connect_bulk(Credentials(), "127.0.0.1:1")
    one = bulk_connection(Credentials(), "127.0.0.1:1")
    with pytest.raises(StreamBroken):
        await one.begin(download=DOWNLOAD)
    one.drop()


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory) -> Parties:
    made = Parties(tmp_path_factory.mktemp("pki"), "job")
    made.syncer()
    made.learner()
    return made


def syncer_of(parties: Parties) -> Credentials:
    return Credentials.from_directory(parties.folder / "syncer")


def learner_of(parties: Parties) -> Credentials:
    return Credentials.from_directory(parties.folder / "learner")


async def test_calls_by_tls(parties: Parties) -> None:
    async with opened(syncer_of(parties), learner_of(parties)) as place:
        data = bytes(range(251)) * 5000
        assert (await place.upload(data)).accepted and place.syncer.taken == data
        place.syncer.refuse = True
        assert not (await place.upload(bytes(8 << 20))).accepted
        await place.check_connections(1)
        place.connections[0].close()
        await until(lambda: place.one._stream is not None and place.one._stream.has_ended())
        await place.check_connections(2)


async def test_a_wrong_token_is_a_failure_for_good_and_costs_the_connection(parties: Parties, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(parties.folder / "learner", folder)
    (folder / "join-token").write_text(TOKEN[::-1])
    async with opened(syncer_of(parties), Credentials.from_directory(folder)) as place:
        for count in (1, 2):
            with pytest.raises(bulk.TransferError, match="the join token is missing or wrong") as caught:
                await place.download()
            assert not caught.value.retry
            await until(lambda: all(one.closed for one in place.connections))
            assert len(place.connections) == count


async def test_a_syncer_whose_certificate_is_not_trusted_is_a_failure_for_good(
    parties: Parties, tmp_path: Path
) -> None:
    other = Parties(tmp_path / "others", "job")
    other.syncer()
    async with opened(syncer_of(other), learner_of(parties)) as place:
        for _ in range(2):
            with pytest.raises(CallFailed, match="the syncer's certificate is not trusted: ") as caught:
                await place.one.begin(download=DOWNLOAD)
            assert caught.value.final
        assert not place.connections and place.port.listener.refusals.counts


async def test_a_pinned_certificate_is_believed_and_no_other_of_the_same_authority(
    parties: Parties, tmp_path: Path
) -> None:
    learner, syncer = learner_of(parties), syncer_of(parties)
    async with opened(syncer, learner.pinned(syncer.certificate)) as place:
        await place.check_connections(1)
    async with opened(syncer, learner.pinned(learner.certificate)) as place:
        with pytest.raises(CallFailed, match="not trusted") as caught:
            await place.one.begin(download=DOWNLOAD)
        assert caught.value.final


async def test_a_syncer_of_another_name_is_a_failure_for_good(parties: Parties, tmp_path: Path) -> None:
    folder = tmp_path / "learner"
    shutil.copytree(parties.folder / "learner", folder)
    (folder / "server-name").write_text("another")
    async with opened(syncer_of(parties), Credentials.from_directory(folder)) as place:
        with pytest.raises(CallFailed, match="Hostname mismatch") as caught:
            await place.one.begin(download=DOWNLOAD)
        assert caught.value.final


async def test_a_client_whom_the_syncer_refuses_may_try_again(parties: Parties, tmp_path: Path) -> None:
    """With TLS 1.3 it hears of that by its first answer."""
    folder = parties.learner("elsewhere", job="other")
    async with opened(syncer_of(parties), Credentials.from_directory(folder)) as place:
        with pytest.raises(bulk.TransferError) as caught:
            await place.download()
        assert caught.value.retry and not place.connections


async def test_credentials_that_cannot_be_used_are_told(parties: Parties, tmp_path: Path) -> None:
    folder = tmp_path / "learner"
    shutil.copytree(parties.folder / "learner", folder)
    made = Credentials.from_directory(folder)
    (folder / "tls.key").write_text("hello")
    async with opened(syncer_of(parties), made) as place:
        with pytest.raises(CallFailed, match="a certificate and its key in PEM"):
            await place.one.begin(download=DOWNLOAD)


async def test_a_server_without_tls_is_no_failure_for_good(parties: Parties) -> None:
    """Something else may have the port for a while."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(StreamBroken, match=f"no TLS with 127.0.0.1:{port}"):
            await connect_bulk(learner_of(parties), f"127.0.0.1:{port}")


async def test_a_server_that_never_answers_is_given_up(parties: Parties, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONNECT_SECONDS", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StreamBroken, match=f"{address} does not answer") as caught:
            await connect_bulk(learner_of(parties), address)
        with silent.accept()[0] as there:
            there.settimeout(10)
            while there.recv(1 << 16):
                pass  # its greeting; then it has hung up
        assert caught.value
