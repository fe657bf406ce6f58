"""Bulk transfers over real connections on loopback, and the rules for messages."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from grpc import aio
from hypothesis import given, settings
from hypothesis import strategies as st

from bulk_port import BulkPort, StoredDownloads
from byte_source import ByteSource
from diloco_protocol.security.credentials import Credentials, CredentialsError
from diloco_protocol.vocabulary import MAX_FRAGMENTS, TransferRefusal
from diloco_protocol.wire import bulk, convert, limits, sync_pb2
from diloco_protocol.wire import channels as wire_channels
from diloco_protocol.wire.bulk_calls import BulkConnection, CallFailed, ServedCall, bulk_connection
from diloco_protocol.wire.byte_stream import StreamBroken
from diloco_protocol.wire.progress import Progress
from diloco_syncer.server.tls.connection_limits import Peer
from example_counts import share_of
from operator_simulation import virtual_time
from patience import until

RESET = StreamBroken("reset")


class Receiver:
    """Assembles one payload, as a syncer does, and serves ``stored``."""

    def __init__(self) -> None:
        self.buffer: np.ndarray[Any, Any] | None = None
        self.got = 0
        self.parts = 0
        self.refuse = ""
        self.has_all = False  # and accepts every part before its bytes come
        self.calls = 0
        self.replies: list[str] = []  # the reasons of the next replies to uploads, instead of the true ones
        self.break_part = -1  # the number of the part of an upload that breaks, once
        self.break_at = 0  # after so many bytes the next download breaks
        self.stored: Any = b""
        self.lie = 0
        self.change = ""
        self.failure: Exception | None = None  # of each download, before its first byte
        self.sent = Progress()
        self.downloads = StoredDownloads(lambda request: self.stored, self.sent)
        self.as_the_product = False  # downloads are served
        self.asked: list[tuple[int, int]] = []  # offsets and bytes of downloads
        self.refused = Counter[str]()

    async def upload(
        self, header: sync_pb2.UploadHeader, source: bulk.Source, peer: Peer, called: str
    ) -> sync_pb2.UploadReply:
        if self.parts == self.break_part:
            self.break_part = -1
            raise RESET
        self.calls += 1
        if self.has_all:
            return sync_pb2.UploadReply(accepted=True)
        if self.refuse:
            return sync_pb2.UploadReply(accepted=False, reason=self.refuse)
        if self.buffer is None:
            self.buffer = np.zeros(header.total_bytes, np.uint8)
        target = memoryview(self.buffer)[header.offset : header.offset + header.bytes]
        assert await bulk.receive_into(source, target) == header.checksum
        self.got += header.bytes
        self.parts += 1
        if self.replies:
            return sync_pb2.UploadReply(accepted=True, reason=self.replies.pop(0))
        done = self.got == header.total_bytes
        return sync_pb2.UploadReply(accepted=True, reason="" if done else TransferRefusal.PARTIAL)

    async def serve(self, request: sync_pb2.DownloadRequest, call: ServedCall, peer: Peer, called: str) -> None:
        if self.as_the_product:
            await self.downloads.serve(request, call, peer, called)
            return
        if request.what == sync_pb2.DownloadRequest.FROZEN:
            missing = sync_pb2.DownloadHeader(found=False, reason="superseded")
            await call.reply(sync_pb2.BulkReply(download=missing))
            return
        self.asked.append((request.offset, request.bytes))
        if self.failure is not None:
            raise self.failure
        if self.change == "total" and request.offset:
            self.stored = random_bytes(1501)
        count = request.bytes - 1 if self.change == "part" and request.offset else request.bytes
        header, part = bulk.cut_part(self.stored, request.offset, count)
        header.checksum ^= self.lie
        await call.reply(sync_pb2.BulkReply(download=header))
        if 0 < self.break_at <= len(part):
            await call.write(part[: self.break_at])
            self.break_at = 0
            raise RESET
        await call.write(part)


Connections = list[BulkConnection]


def served(test: Callable[[Receiver, Connections], Awaitable[None]], connections: int = 3) -> None:
    async def run() -> None:
        receiver = Receiver()
        async with BulkPort(receiver, receiver).listening() as address:
            made = [bulk_connection(Credentials(), address) for _ in range(connections)]
            try:
                async with asyncio.timeout(20):
                    await test(receiver, made)
            finally:
                for one in made:
                    one.drop()

    asyncio.run(run())


def random_bytes(size: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(7).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize(("size", "parts"), [(0, 1), (5, 1), (3 * limits.MIN_PART_BYTES + 17, 3)])
def test_upload_arrives_whole_and_in_parts(size: int, parts: int) -> None:
    async def test(receiver: Receiver, connections: Connections) -> None:
        payload = random_bytes(size)
        reply = await bulk.upload(connections, sync_pb2.UploadHeader(job="j"), payload)
        assert reply.accepted and reply.reason == ""
        assert receiver.parts == parts
        assert receiver.buffer is not None and np.array_equal(receiver.buffer, payload)

    served(test)


def test_refusal_is_a_reply_even_before_the_bytes_are_read() -> None:
    async def test(receiver: Receiver, connections: Connections) -> None:
        receiver.refuse = "fenced"
        reply = await bulk.upload(connections, sync_pb2.UploadHeader(job="j"), random_bytes(24 << 20))
        assert not reply.accepted and reply.reason == "fenced"

    served(test)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("size", [0, 100, 3 * limits.MIN_PART_BYTES + 3])
def test_download(known: bool, size: int) -> None:
    async def test(receiver: Receiver, connections: Connections) -> None:
        receiver.stored = random_bytes(size)
        header, data = await bulk.download(connections, sync_pb2.DownloadRequest(job="j"), size=size if known else None)
        assert header.found and header.total_bytes == size
        assert np.array_equal(data, receiver.stored)

    served(test)


def test_download_beyond_one_part_of_unknown_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PART_BYTES", 1 << 20)

    async def test(receiver: Receiver, connections: Connections) -> None:
        receiver.stored = random_bytes((5 << 20) + 1)
        into = np.empty((5 << 20) + 1, np.uint8)
        _, data = await bulk.download(
            connections, sync_pb2.DownloadRequest(job="j"), allocate=lambda total: into[:total]
        )
        assert np.array_equal(data, receiver.stored) and np.shares_memory(data, into)

    served(test)


def test_download_that_is_not_there_or_not_right() -> None:
    async def test(receiver: Receiver, connections: Connections) -> None:
        frozen = sync_pb2.DownloadRequest(job="j", what=sync_pb2.DownloadRequest.FROZEN)
        header, data = await bulk.download(connections, frozen)
        assert not header.found and header.reason == "superseded" and data.size == 0
        receiver.stored = random_bytes(1000)
        request = sync_pb2.DownloadRequest(job="j")
        with pytest.raises(limits.WireError, match="1000 bytes are offered, 999 were announced"):
            await bulk.download(connections, request, size=999)
        with pytest.raises(limits.WireError, match="at most 10 are allowed"):
            await bulk.download(connections, request, limit=10)
        receiver.lie = 1
        with pytest.raises(bulk.TransferError, match="checksum") as caught:
            await bulk.download(connections, request)
        assert caught.value.retry, "a bit has turned on the way"

    served(test)


@pytest.mark.promise("What has come of a download is kept: it goes on where it broke, in the next session too")
@pytest.mark.parametrize("known", [True, False])
def test_a_download_that_breaks_goes_on_at_the_byte_where_it_broke(known: bool) -> None:
    async def test(receiver: Receiver, connections: Connections) -> None:
        receiver.stored, receiver.break_at = random_bytes(3 << 20), 1 << 20
        kept, size = bulk.PartialDownload(), receiver.stored.nbytes if known else None
        request = sync_pb2.DownloadRequest(job="j")
        with pytest.raises(bulk.TransferError, match="download: the syncer ended the connection"):
            await bulk.download(connections, request, size=size, kept=kept)
        here = kept.received
        assert here == 1 << 20, "all that was sent"
        receiver.asked.clear()
        header, data = await bulk.download(connections, request, size=size, kept=kept)
        assert header.found and np.array_equal(data, receiver.stored)
        assert receiver.asked == [(here, receiver.stored.nbytes - here)]

    served(test)


@pytest.mark.parametrize("others", [True, False])
def test_a_download_that_goes_on_with_other_bytes_is_noticed_and_begins_anew(others: bool) -> None:
    """The checksum of the first header is that of the whole part."""

    async def test(receiver: Receiver, connections: Connections) -> None:
        receiver.stored, receiver.break_at = random_bytes(3 << 20), 1 << 20
        kept, request = bulk.PartialDownload(), sync_pb2.DownloadRequest(job="j")
        with pytest.raises(bulk.TransferError):
            await bulk.download(connections, request, kept=kept)
        receiver.stored = random_bytes(3 << 20) + 1 if others else random_bytes((3 << 20) + 1)
        error, words = (bulk.TransferError, "checksum") if others else (limits.WireError, "changed under way")
        with pytest.raises(error, match=words):
            await bulk.download(connections, request, kept=kept)
        if others:
            _, data = await bulk.download(connections, request, kept=kept)
            assert np.array_equal(data, receiver.stored)

    served(test)


def test_an_upload_that_breaks_sends_only_the_parts_that_had_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_UPLOAD_PART_BYTES", 1000)

    async def test(receiver: Receiver, connections: Connections) -> None:
        payload, sent = random_bytes(3500), bulk.SentParts()
        receiver.break_part = 2
        with pytest.raises(bulk.TransferError, match="upload: ") as caught:
            await bulk.upload(connections[:1], sync_pb2.UploadHeader(job="j"), payload, sent=sent)
        assert caught.value.retry and sent.done == 2
        reply = await bulk.upload(connections[1:], sync_pb2.UploadHeader(job="j"), payload, sent=sent)
        assert reply.accepted and receiver.parts == 4
        assert receiver.buffer is not None and np.array_equal(receiver.buffer, payload)

    served(test)


def test_of_a_payload_that_is_there_already_no_further_part_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_UPLOAD_PART_BYTES", 1000)

    async def test(receiver: Receiver, connections: Connections) -> None:
        receiver.has_all = True
        reply = await bulk.upload(connections[:1], sync_pb2.UploadHeader(job="j"), random_bytes(3500))
        assert reply.accepted and (receiver.calls, receiver.got) == (1, 0)

    served(test)


def test_the_verdict_of_an_upload_is_not_the_answer_that_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part that completes a payload may be answered first; without any verdict all of it is sent again."""
    monkeypatch.setattr(limits, "MAX_UPLOAD_PART_BYTES", 1000)

    async def test(receiver: Receiver, connections: Connections) -> None:
        receiver.replies = ["done", TransferRefusal.PARTIAL]
        reply = await bulk.upload(connections[:1], sync_pb2.UploadHeader(job="j"), random_bytes(2000))
        assert reply.reason == "done"
        receiver.replies = [TransferRefusal.PARTIAL] * 2
        sent = bulk.SentParts()
        with pytest.raises(bulk.TransferError, match="no verdict came") as caught:
            await bulk.upload(connections[:1], sync_pb2.UploadHeader(job="j"), random_bytes(2000), sent=sent)
        assert caught.value.retry and sent.done == 0 and not sent.parts

    served(test)


async def pieces(*sizes: int, then: Awaitable[None] | None = None) -> AsyncIterator[bytes]:
    for size in sizes:
        yield bytes(size)
    if then is not None:
        await then


async def test_fewer_bytes_than_announced_are_no_payload_and_more_are_left_alone() -> None:
    target = memoryview(bytearray(10))
    with pytest.raises(limits.WireError, match="9 bytes came, 10 were announced"):
        await bulk.receive_into(ByteSource(pieces(5, 4)), target)
    source = ByteSource(pieces(5, 6))
    assert await bulk.receive_into(source, target) == bulk.checksum(bytes(10))
    assert await source.read_into(target) == 1


async def test_each_piece_is_checked_before_it_is_written_and_heard_of_afterwards() -> None:
    target, heard = bytearray(b"." * 10), list[tuple[str, bytes]]()

    def check() -> None:
        if len(heard) == 4:
            raise limits.WireError("the upload was overtaken")
        heard.append(("check", bytes(target)))

    source = ByteSource(pieces(4, 4, 2))
    with pytest.raises(limits.WireError, match="overtaken"):
        await bulk.receive_into(
            source, memoryview(target), check, lambda count: heard.append((str(count), bytes(target)))
        )
    once, twice = bytes(4) + b"." * 6, bytes(8) + b".."
    assert heard == [("check", b"." * 10), ("4", once), ("check", once), ("4", twice)] and target == twice


@pytest.mark.promise("A sender that stalls is given up")
def test_a_sender_that_stalls_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STALL_SECONDS", 0.05)

    async def forever() -> None:
        await asyncio.Event().wait()

    async def test() -> None:
        stalling = ByteSource(pieces(3, then=forever()))
        with pytest.raises(limits.WireError, match=r"no bytes for .*, 3 of 10 received"):
            await asyncio.wait_for(bulk.receive_into(stalling, memoryview(bytearray(10))), 10)

    asyncio.run(test())


@pytest.mark.parametrize(("offset", "count"), [(11, 0), (0, 11), (5, 6), (0, limits.MAX_PART_BYTES + 1)])
def test_a_part_that_is_not_there_is_not_sent(offset: int, count: int) -> None:
    with pytest.raises(limits.WireError, match=f"bytes {offset} to {offset + count} of 10"):
        bulk.cut_part(bytes(10), offset, count)


def test_a_part_is_never_larger_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PART_BYTES", 4)
    header, part = bulk.cut_part(b"0123456789", 2, 0)
    assert (header.total_bytes, header.bytes, bytes(part)) == (10, 4, b"2345") and header.checksum == bulk.checksum(
        part
    )
    with pytest.raises(limits.WireError, match="a part has at most 4 bytes"):
        bulk.cut_part(bytes(10), 2, 5)


@pytest.mark.parametrize("change", ["total", "part"])
def test_a_download_that_changes_under_way_is_refused(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first part and the others are of different things, or one is of another length than was asked for."""
    monkeypatch.setattr(limits, "MAX_PART_BYTES", 1000)

    async def test(receiver: Receiver, connections: Connections) -> None:
        receiver.stored = random_bytes(1500)
        receiver.change = change
        with pytest.raises(limits.WireError, match="changed under way" if change == "total" else "were asked for"):
            await bulk.download(connections, sync_pb2.DownloadRequest(job="j"))

    served(test)


@pytest.mark.parametrize(
    ("failure", "retry"), [(CallFailed("no", True), False), (CallFailed("no", False), True), (RESET, True)], ids=repr
)
def test_what_will_fail_again_is_not_tried_again(failure: Exception, retry: bool) -> None:
    async def test(receiver: Receiver, connections: Connections) -> None:
        receiver.failure = failure
        with pytest.raises(bulk.TransferError) as caught:
            await bulk.download(connections, sync_pb2.DownloadRequest(job="j"))
        assert caught.value.retry == retry
        words = "the syncer ended the connection" if failure is RESET else "no"
        assert str(caught.value) == f"download: {words}"

    served(test)


@pytest.mark.parametrize("final", [True, False])
async def test_a_certificate_that_never_passes_is_not_tried_again(final: bool) -> None:
    async def connect() -> Any:
        raise CallFailed("the syncer's certificate is not trusted", True) if final else StreamBroken("refused")

    for transfer in (
        bulk.upload(BulkConnection(connect), sync_pb2.UploadHeader(), b"x"),
        bulk.download(BulkConnection(connect), sync_pb2.DownloadRequest()),
    ):
        with pytest.raises(bulk.TransferError) as caught:
            await transfer
        assert caught.value.retry is not final


class Recorded:
    """A connection, and its call: what is written, and an answer that comes after ``after`` chunks."""

    def __init__(self, after: int, accepted: bool = True) -> None:
        self.after, self.accepted = after, accepted
        self.did: list[Any] = []
        self.is_time = asyncio.Event()

    async def begin(self, **what: Any) -> Any:
        return self

    async def write(self, part: memoryview, note: Callable[[int], None]) -> None:
        self.did.append(len(part))
        note(len(part))
        if len(self.did) == self.after:
            self.is_time.set()
            await asyncio.sleep(0)

    async def read_reply(self) -> sync_pb2.BulkReply:
        await self.is_time.wait()
        return sync_pb2.BulkReply(upload=sync_pb2.UploadReply(accepted=self.accepted))

    async def give_up_upload(self) -> None:
        self.did.append("give up")

    def end(self) -> None:
        self.did.append("end")


async def test_an_upload_goes_in_chunks_each_of_which_is_heard_of() -> None:
    one, progress, chunks = Recorded(3), Progress(), list[None]()
    size = 2 * limits.CHUNK_BYTES + 5
    channel: Any = one
    await bulk.upload(
        channel, sync_pb2.UploadHeader(), bytes(size), note_chunk=lambda: chunks.append(None), progress=progress
    )
    assert one.did == [limits.CHUNK_BYTES, limits.CHUNK_BYTES, 5, "give up", "end"]
    assert len(chunks) == 3 and progress.moved == size


@pytest.mark.parametrize("accepted", [True, False])
async def test_once_an_upload_is_answered_no_more_of_it_is_sent(accepted: bool) -> None:
    one = Recorded(2, accepted)
    channel: Any = one
    reply = await bulk.upload(channel, sync_pb2.UploadHeader(), bytes(4 << 20))
    assert reply.accepted is accepted and one.did == [limits.CHUNK_BYTES] * 2 + ["give up", "end"]


def test_an_answer_is_waited_for_by_the_size_of_its_part() -> None:
    """Its last bytes may still be under way, in the buffers of both sides and of all between."""
    assert limits.transfer_seconds(0) == limits.STALL_SECONDS
    assert limits.transfer_seconds(64 << 20) == limits.STALL_SECONDS + 256


def test_a_channel_carries_one_part_at_a_time_and_rests_after_a_break() -> None:
    async def test() -> None:
        lanes: Any = bulk.Lanes(["a", "b"])  # type: ignore[list-item]
        loop = asyncio.get_running_loop()

        async def use(seconds: float, breaks: bool = False) -> str:
            async with lanes.borrow_channel() as channel:
                await asyncio.sleep(seconds)
                if breaks:
                    raise bulk.TransferError("it broke", retry=True)
                return str(channel)

        assert await asyncio.gather(use(1.0), use(3.0), use(1.0), use(1.0)) == ["a", "b", "a", "a"]
        holding = asyncio.ensure_future(use(1e6))  # so that there is one channel
        await asyncio.sleep(0)
        broken_at = []
        for _ in range(6):
            with pytest.raises(bulk.TransferError):
                await use(0.0, breaks=True)
            broken_at.append(loop.time())
        rests = [after - before for before, after in itertools.pairwise(broken_at)]
        assert rests == [2.0, 4.0, 8.0, 15.0, 15.0]
        await use(0.0)
        with pytest.raises(bulk.TransferError):
            await use(0.0, breaks=True)
        begun = loop.time()
        await use(0.0)
        assert loop.time() - begun == 2.0, "one that went well ends it"
        holding.cancel()

    virtual_time.run(test())


def test_retired_lanes_end_what_they_carry_and_begin_nothing() -> None:
    """One carries a part, one rests after a break, and one is free."""

    class Dropped:
        drops = 0

        def drop(self) -> None:
            self.drops += 1

    async def test() -> None:
        made = [Dropped() for _ in range(3)]
        lanes: Any = bulk.Lanes(made)  # type: ignore[arg-type]

        async def use(seconds: float, breaks: bool = False) -> None:
            async with lanes.borrow_channel():
                await asyncio.sleep(seconds)
                if breaks:
                    raise bulk.TransferError("it broke", retry=True)

        carried = asyncio.ensure_future(use(50.0))
        with pytest.raises(bulk.TransferError, match="broke"):
            await use(1.0, breaks=True)
        lanes.retire()
        assert sorted(one.drops for one in made) == [0, 1, 1]
        holders = [asyncio.ensure_future(use(1.0)) for _ in range(5)]
        assert [str(error) for error in await asyncio.gather(*holders, return_exceptions=True)] == [
            "nothing goes there any more"
        ] * 5
        await carried
        assert all(one.drops == 1 for one in made)

        lanes = bulk.Lanes([Dropped()])  # type: ignore[list-item]
        carried = asyncio.ensure_future(use(50.0))
        holders = [asyncio.ensure_future(use(1.0)) for _ in range(5)]
        await asyncio.sleep(1.0)
        lanes.retire()
        assert len((await asyncio.wait(holders, timeout=1.0))[0]) == 5, "they do not wait for what is carried"
        assert all(isinstance(one.exception(), bulk.TransferError) for one in holders)
        await carried

    virtual_time.run(test())


async def test_nobody_there_is_an_error_that_may_be_retried() -> None:
    with pytest.raises(bulk.TransferError, match=r"upload: nothing listens on 127\.0\.0\.1:1;") as caught:
        await bulk.upload(bulk_connection(Credentials(), "127.0.0.1:1"), sync_pb2.UploadHeader(), b"x")
    assert caught.value.retry


def test_a_port_in_use_is_an_error() -> None:
    async def test() -> None:
        first, second = (aio.server(options=wire_channels.server_options()) for _ in range(2))
        port = Credentials().bind(first, "127.0.0.1:0")
        await first.start()
        try:
            with pytest.raises(CredentialsError, match=f"cannot listen on 127.0.0.1:{port}"):
                Credentials().bind(second, f"127.0.0.1:{port}")
        finally:
            await first.stop(0)

    asyncio.run(test())


@given(st.integers(0, 1 << 33), st.integers(1, 16))
@settings(max_examples=share_of(100), deadline=None)
def test_parts_cover_the_payload_once_and_are_bounded(total: int, channels: int) -> None:
    parts = bulk.split(total, channels)
    position = 0
    for offset, size in parts:
        assert offset == position and size <= limits.MAX_PART_BYTES
        position += size
    assert position == total
    if total >= channels * limits.MIN_PART_BYTES:
        assert len(parts) >= channels
    if len(parts) > 1 and total < limits.MAX_PART_BYTES:
        assert min(size for _, size in parts) >= limits.MIN_PART_BYTES


@given(st.binary(max_size=200))
@settings(max_examples=share_of(200), deadline=None)
def test_garbage_is_an_error_of_the_wire_and_of_nothing_else(data: bytes) -> None:
    for kind in (sync_pb2.LearnerMessage, sync_pb2.UploadHeader, sync_pb2.DownloadRequest):
        try:
            convert.parse(kind, data)
        except limits.WireError as error:
            assert kind.__name__ in str(error)


def test_limits() -> None:
    with pytest.raises(limits.WireError, match="LearnerMessage has 1048577 bytes; at most 1048576"):
        convert.parse(sync_pb2.LearnerMessage, bytes(limits.MAX_CONTROL_BYTES + 1))
    for wrong in (0, limits.FORMAT + 1):
        with pytest.raises(limits.WireError, match=f"format {wrong} is not understood"):
            limits.check_format(wrong)
    limits.check_format(limits.FORMAT)


def test_the_largest_report_fits_a_header() -> None:
    most = (1 << 64) - 1
    row = sync_pb2.FragmentReport(
        epoch=most,
        base_version=most,
        steps=most,
        tokens=most,
        confirmed_tokens=most,
        dropped_overlap=most,
        dropped_stale=most,
    )
    report = sync_pb2.Report(
        slot_step=most,
        trained_steps=most,
        trained_tokens=most,
        loss=1.0,
        compute_seconds=1.0,
        fragments=[row] * MAX_FRAGMENTS,
        cursors=[sync_pb2.LeaseCursor(lease=most, position=most)] * limits.MAX_CURSORS,
    )
    push = sync_pb2.Push(
        fragment=511,
        sequence=most,
        round=most,
        epoch=most,
        base_version=most,
        oldest_version=most,
        first_step=most,
        last_step=most,
        steps=most,
        tokens=most,
        compute_seconds=1.0,
        encoding="bfloat16",
        layout_digest="f" * 64,
        report=report,
    )
    header = sync_pb2.UploadHeader(
        format=limits.FORMAT,
        job="j" * 30,
        slot=(1 << 32) - 1,
        incarnation=most,
        process="f" * 64,
        total_bytes=most,
        offset=most,
        bytes=most,
        checksum=most,
        push=push,
    )
    assert header.ByteSize() <= limits.MAX_HEADER_BYTES


class Patience(Progress):
    """Of a session whose transfers are given up when ``over`` is set, and not before."""

    over = False

    def seconds_left(self, now: float, begun: float, moved: int, patience: float) -> float:
        assert patience == limits.STALL_SECONDS
        return 0.0 if self.over else 0.05


@pytest.mark.promise(
    "A download that its client does not read is given up, with the version that it holds; a process gets "
    "few downloads at a time"
)
def test_a_download_that_nobody_reads_is_given_up() -> None:
    """And with it what it would send. One that is read meanwhile comes whole."""

    async def test(receiver: Receiver, connections: Connections) -> None:
        patience, nothing = Patience(), memoryview(bytearray(1 << 20))
        receiver.stored = random_bytes(48 << 20)
        receiver.downloads = StoredDownloads(lambda request: receiver.stored, patience)
        receiver.as_the_product = True
        calls = [
            await one.begin(download=sync_pb2.DownloadRequest(job="j", format=limits.FORMAT)) for one in connections[1:]
        ]
        for call in calls:
            assert (await call.read_reply()).download.found
        assert len(receiver.downloads.queue) == 4
        _, data = await bulk.download(connections[:1], sync_pb2.DownloadRequest(job="j"))
        assert np.array_equal(data, receiver.stored)
        await until(lambda: len(receiver.downloads.queue) == 4)  # the last byte comes before the server has seen it off
        patience.over = True
        await until(lambda: not len(receiver.downloads.queue))
        for call in calls:
            with pytest.raises(StreamBroken):
                while await call.read_into(nothing):
                    pass  # what had come before

    served(test, connections=5)
