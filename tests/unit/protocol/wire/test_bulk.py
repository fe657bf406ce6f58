"""Bulk transfers over a real gRPC connection on loopback, and the rules for messages."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_protocol.security.credentials import Credentials, CredentialsError
from diloco_protocol.vocabulary import MAX_FRAGMENTS, TransferRefusal
from diloco_protocol.wire import bulk, convert, limits, services, sync_pb2
from diloco_protocol.wire import channels as wire_channels
from diloco_protocol.wire.progress import Progress
from example_counts import share_of
from operator_simulation import virtual_time
from patience import until


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
        self.abort: grpc.StatusCode | None = None
        self.downloads = 0  # that are being sent
        self.sent = Progress()
        self.asked: list[tuple[int, int]] = []  # offsets and bytes of downloads

    async def upload(self, stream: AsyncIterator[bytes], context: Any) -> bytes:
        header = convert.parse(sync_pb2.UploadHeader, await anext(stream), limits.MAX_HEADER_BYTES)
        if self.parts == self.break_part:
            self.break_part = -1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "reset")
        self.calls += 1
        if self.has_all:
            return sync_pb2.UploadReply(accepted=True).SerializeToString()
        if self.refuse:
            return sync_pb2.UploadReply(accepted=False, reason=self.refuse).SerializeToString()
        if self.buffer is None:
            self.buffer = np.zeros(header.total_bytes, np.uint8)
        target = memoryview(self.buffer)[header.offset : header.offset + header.bytes]
        try:
            digest = await bulk.receive_into(stream, target)
        except limits.WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        assert digest == header.checksum
        self.got += header.bytes
        self.parts += 1
        if self.replies:
            reason = self.replies.pop(0)
            return sync_pb2.UploadReply(accepted=True, reason=reason).SerializeToString()
        done = self.got == header.total_bytes
        return sync_pb2.UploadReply(accepted=True, reason="" if done else TransferRefusal.PARTIAL).SerializeToString()

    async def serve(self, raw: bytes, context: Any) -> None:
        await services.write_download(self.download(raw, context), context, self.sent)

    async def download(self, raw: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        request = convert.parse(sync_pb2.DownloadRequest, raw, limits.MAX_HEADER_BYTES)
        if request.what == sync_pb2.DownloadRequest.FROZEN:
            async for message in bulk.not_found("superseded"):
                yield message
            return
        self.asked.append((request.offset, request.bytes))
        if self.abort is not None:
            await context.abort(self.abort, "no")
        if self.change == "total" and request.offset:
            self.stored = random_bytes(1501)
        count = request.bytes - 1 if self.change == "part" and request.offset else request.bytes
        first, sent = True, 0
        self.downloads += 1
        try:
            async for message in bulk.send_part(self.stored, request.offset, count):
                if first and self.lie:
                    header = sync_pb2.DownloadHeader.FromString(message)
                    header.checksum ^= self.lie
                    message = header.SerializeToString()
                sent += 0 if first else len(message)
                first = False
                yield message
                if 0 < self.break_at <= sent:
                    self.break_at = 0
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "reset")
        finally:
            self.downloads -= 1


def served(test: Callable[[Receiver, list[aio.Channel]], Awaitable[None]], channels: int = 3) -> None:
    async def run() -> None:
        receiver = Receiver()
        server = aio.server(options=wire_channels.server_options())
        server.add_generic_rpc_handlers([services.bulk_handlers(receiver.upload, receiver.serve)])
        credentials = Credentials()
        port = credentials.bind(server, "127.0.0.1:0")
        await server.start()
        options = wire_channels.channel_options(bulk=True)
        made = [credentials.aio_channel(f"127.0.0.1:{port}", options) for _ in range(channels)]
        try:
            async with asyncio.timeout(20):
                await test(receiver, made)
        finally:
            for channel in made:
                await channel.close()
            await server.stop(0)

    asyncio.run(run())


def random_bytes(size: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(7).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize(("size", "parts"), [(0, 1), (5, 1), (3 * limits.MIN_PART_BYTES + 17, 3)])
def test_upload_arrives_whole_and_in_parts(size: int, parts: int) -> None:
    async def test(receiver: Receiver, channels: list[aio.Channel]) -> None:
        payload = random_bytes(size)
        reply = await bulk.upload(channels, sync_pb2.UploadHeader(job="j"), payload)
        assert reply.accepted and reply.reason == ""
        assert receiver.parts == parts
        assert receiver.buffer is not None and np.array_equal(receiver.buffer, payload)

    served(test)


def test_refusal_is_a_reply_even_before_the_bytes_are_read() -> None:
    async def test(receiver: Receiver, channels: list[aio.Channel]) -> None:
        receiver.refuse = "fenced"
        reply = await bulk.upload(channels, sync_pb2.UploadHeader(job="j"), random_bytes(24 << 20))
        assert not reply.accepted and reply.reason == "fenced"

    served(test)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("size", [0, 100, 3 * limits.MIN_PART_BYTES + 3])
def test_download(known: bool, size: int) -> None:
    async def test(receiver: Receiver, channels: list[aio.Channel]) -> None:
        receiver.stored = random_bytes(size)
        header, data = await bulk.download(channels, sync_pb2.DownloadRequest(job="j"), size=size if known else None)
        assert header.found and header.total_bytes == size
        assert np.array_equal(data, receiver.stored)

    served(test)


def test_download_beyond_one_part_of_unknown_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PART_BYTES", 1 << 20)

    async def test(receiver: Receiver, channels: list[aio.Channel]) -> None:
        receiver.stored = random_bytes((5 << 20) + 1)
        into = np.empty((5 << 20) + 1, np.uint8)
        _, data = await bulk.download(channels, sync_pb2.DownloadRequest(job="j"), allocate=lambda total: into[:total])
        assert np.array_equal(data, receiver.stored) and np.shares_memory(data, into)

    served(test)


def test_download_that_is_not_there_or_not_right() -> None:
    async def test(receiver: Receiver, channels: list[aio.Channel]) -> None:
        frozen = sync_pb2.DownloadRequest(job="j", what=sync_pb2.DownloadRequest.FROZEN)
        header, data = await bulk.download(channels, frozen)
        assert not header.found and header.reason == "superseded" and data.size == 0
        receiver.stored = random_bytes(1000)
        request = sync_pb2.DownloadRequest(job="j")
        with pytest.raises(limits.WireError, match="1000 bytes are offered, 999 were announced"):
            await bulk.download(channels, request, size=999)
        with pytest.raises(limits.WireError, match="at most 10 are allowed"):
            await bulk.download(channels, request, limit=10)
        receiver.lie = 1
        with pytest.raises(limits.WireError, match="checksum"):
            await bulk.download(channels, request)

    served(test)


@pytest.mark.promise("What has come of a download is kept: it goes on where it broke, in the next session too")
@pytest.mark.parametrize("known", [True, False])
def test_a_download_that_breaks_goes_on_at_the_byte_where_it_broke(known: bool) -> None:
    async def test(receiver: Receiver, channels: list[aio.Channel]) -> None:
        receiver.stored, receiver.break_at = random_bytes(3 << 20), 1 << 20
        kept, size = bulk.PartialDownload(), receiver.stored.nbytes if known else None
        request = sync_pb2.DownloadRequest(job="j")
        with pytest.raises(bulk.TransferError, match="unavailable: reset"):
            await bulk.download(channels, request, size=size, kept=kept)
        here = kept.received
        assert 0 < here < receiver.stored.nbytes
        receiver.asked.clear()
        header, data = await bulk.download(channels, request, size=size, kept=kept)
        assert header.found and np.array_equal(data, receiver.stored)
        assert receiver.asked == [(here, receiver.stored.nbytes - here)]

    served(test)


@pytest.mark.parametrize("others", [True, False])
def test_a_download_that_goes_on_with_other_bytes_is_noticed_and_begins_anew(others: bool) -> None:
    """The checksum of the first header is that of the whole part."""

    async def test(receiver: Receiver, channels: list[aio.Channel]) -> None:
        receiver.stored, receiver.break_at = random_bytes(3 << 20), 1 << 20
        kept, request = bulk.PartialDownload(), sync_pb2.DownloadRequest(job="j")
        with pytest.raises(bulk.TransferError):
            await bulk.download(channels, request, kept=kept)
        receiver.stored = random_bytes(3 << 20) + 1 if others else random_bytes((3 << 20) + 1)
        with pytest.raises(limits.WireError, match="checksum" if others else "changed under way"):
            await bulk.download(channels, request, kept=kept)
        if others:
            _, data = await bulk.download(channels, request, kept=kept)
            assert np.array_equal(data, receiver.stored)

    served(test)


def test_an_upload_that_breaks_sends_only_the_parts_that_had_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_UPLOAD_PART_BYTES", 1000)

    async def test(receiver: Receiver, channels: list[aio.Channel]) -> None:
        payload, sent = random_bytes(3500), bulk.SentParts()
        receiver.break_part = 2
        with pytest.raises(bulk.TransferError, match="reset"):
            await bulk.upload(channels[:1], sync_pb2.UploadHeader(job="j"), payload, sent=sent)
        assert sent.done == 2
        reply = await bulk.upload(channels[1:], sync_pb2.UploadHeader(job="j"), payload, sent=sent)
        assert reply.accepted and receiver.parts == 4
        assert receiver.buffer is not None and np.array_equal(receiver.buffer, payload)

    served(test)


def test_of_a_payload_that_is_there_already_no_further_part_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_UPLOAD_PART_BYTES", 1000)

    async def test(receiver: Receiver, channels: list[aio.Channel]) -> None:
        receiver.has_all = True
        reply = await bulk.upload(channels[:1], sync_pb2.UploadHeader(job="j"), random_bytes(3500))
        assert reply.accepted and (receiver.calls, receiver.got) == (1, 0)

    served(test)


def test_the_verdict_of_an_upload_is_not_the_answer_that_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part that completes a payload may be answered first; without any verdict all of it is sent again."""
    monkeypatch.setattr(limits, "MAX_UPLOAD_PART_BYTES", 1000)

    async def test(receiver: Receiver, channels: list[aio.Channel]) -> None:
        receiver.replies = ["done", TransferRefusal.PARTIAL]
        reply = await bulk.upload(channels[:1], sync_pb2.UploadHeader(job="j"), random_bytes(2000))
        assert reply.reason == "done"
        receiver.replies = [TransferRefusal.PARTIAL] * 2
        sent = bulk.SentParts()
        with pytest.raises(bulk.TransferError, match="no verdict came") as caught:
            await bulk.upload(channels[:1], sync_pb2.UploadHeader(job="j"), random_bytes(2000), sent=sent)
        assert caught.value.retry and sent.done == 0 and not sent.parts

    served(test)


@pytest.mark.parametrize(("sent", "message"), [(9, "9 bytes came, 10"), (11, "more than the 10 bytes")])
def test_an_upload_of_another_length_than_announced_is_refused(sent: int, message: str) -> None:
    async def test(receiver: Receiver, channels: list[aio.Channel]) -> None:
        call = channels[0].stream_unary(services.UPLOAD)()
        header = sync_pb2.UploadHeader(format=1, total_bytes=10, bytes=10)
        await call.write(header.SerializeToString())
        await call.write(bytes(sent))
        await call.done_writing()
        with pytest.raises(aio.AioRpcError, match=message):
            await call

    served(test)


@pytest.mark.promise("A sender that stalls is given up")
def test_a_sender_that_stalls_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STALL_SECONDS", 0.05)

    async def stalling() -> AsyncIterator[bytes]:
        yield b"abc"
        await asyncio.Event().wait()

    async def test() -> None:
        with pytest.raises(limits.WireError, match=r"no bytes for .*, 3 of 10 received"):
            await asyncio.wait_for(bulk.receive_into(stalling(), memoryview(bytearray(10))), 10)

    asyncio.run(test())


async def first_of(part: AsyncIterator[bytes]) -> sync_pb2.DownloadHeader:
    async for message in part:
        return sync_pb2.DownloadHeader.FromString(message)
    raise AssertionError("nothing was sent")


@pytest.mark.parametrize(("offset", "count"), [(11, 0), (0, 11), (5, 6), (0, limits.MAX_PART_BYTES + 1)])
def test_a_part_that_is_not_there_is_not_sent(offset: int, count: int) -> None:
    with pytest.raises(limits.WireError, match=f"bytes {offset} to {offset + count} of 10"):
        asyncio.run(first_of(bulk.send_part(bytes(10), offset, count)))


def test_a_part_is_never_larger_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PART_BYTES", 4)
    assert asyncio.run(first_of(bulk.send_part(bytes(10), 2, 0))).bytes == 4
    with pytest.raises(limits.WireError, match="a part has at most 4 bytes"):
        asyncio.run(first_of(bulk.send_part(bytes(10), 2, 5)))


@pytest.mark.parametrize("change", ["total", "part"])
def test_a_download_that_changes_under_way_is_refused(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first part and the others are of different things, or one is of another length than was asked for."""
    monkeypatch.setattr(limits, "MAX_PART_BYTES", 1000)

    async def test(receiver: Receiver, channels: list[aio.Channel]) -> None:
        receiver.stored = random_bytes(1500)
        receiver.change = change
        with pytest.raises(limits.WireError, match="changed under way" if change == "total" else "were asked for"):
            await bulk.download(channels, sync_pb2.DownloadRequest(job="j"))

    served(test)


@pytest.mark.parametrize(
    ("code", "retry"),
    [(grpc.StatusCode.PERMISSION_DENIED, False), (grpc.StatusCode.UNAVAILABLE, True)],
    ids=lambda value: str(value),
)
def test_what_will_fail_again_is_not_tried_again(code: grpc.StatusCode, retry: bool) -> None:
    async def test(receiver: Receiver, channels: list[aio.Channel]) -> None:
        receiver.abort = code
        with pytest.raises(bulk.TransferError) as caught:
            await bulk.download(channels, sync_pb2.DownloadRequest(job="j"))
        assert caught.value.retry == retry

    served(test)


def test_a_certificate_that_never_passes_is_not_tried_again() -> None:
    metadata = aio.Metadata()
    for details, retry in (("handshake failed: CERTIFICATE_VERIFY_FAILED", False), ("connection refused", True)):
        error = aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata, details=details)
        assert bulk._failed(error, "upload").retry is retry


def test_an_answer_is_waited_for_by_the_size_of_its_part() -> None:
    """Its last bytes may still be under way, in the buffers of both sides and of all between."""
    assert limits.transfer_seconds(0) == limits.STALL_SECONDS
    assert limits.transfer_seconds(64 << 20) == limits.STALL_SECONDS + 256


def test_chunks_take_half_a_second_of_their_link() -> None:
    size = limits.FIRST_CHUNK_BYTES
    assert bulk.next_chunk(size, 0.0) == 4 * size and bulk.next_chunk(size, 0.5) == size
    assert bulk.next_chunk(limits.CHUNK_BYTES, 0.001) == limits.CHUNK_BYTES
    assert bulk.next_chunk(limits.CHUNK_BYTES, 2.0) == limits.CHUNK_BYTES // 4
    assert bulk.next_chunk(size, 60.0) == limits.LEAST_CHUNK_BYTES


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


def test_nobody_there_is_an_error_that_may_be_retried() -> None:
    async def test() -> None:
        async with aio.insecure_channel("127.0.0.1:1", options=wire_channels.channel_options(bulk=True)) as channel:
            with pytest.raises(bulk.TransferError) as caught:
                await bulk.upload(channel, sync_pb2.UploadHeader(), b"x", timeout=5)
            assert caught.value.retry

    asyncio.run(test())


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

    async def test(receiver: Receiver, channels: list[aio.Channel]) -> None:
        receiver.stored = random_bytes(48 << 20)
        receiver.sent = patience = Patience()
        request = sync_pb2.DownloadRequest(job="j").SerializeToString()
        stalled = []
        for _ in range(4):
            method: Any = channels[0].unary_stream(services.DOWNLOAD)
            call = method(request)
            assert sync_pb2.DownloadHeader.FromString(await call.read()).found
            stalled.append(call)
        assert receiver.downloads == 4
        _, data = await bulk.download(channels[1:], sync_pb2.DownloadRequest(job="j"))
        assert np.array_equal(data, receiver.stored)
        await until(lambda: receiver.downloads == 4)  # the last byte has come before the server has seen it off
        patience.over = True
        await until(lambda: not receiver.downloads)
        for call in stalled:
            with contextlib.suppress(aio.AioRpcError):
                while await call.read() is not aio.EOF:
                    pass  # what had come before
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    served(test)
