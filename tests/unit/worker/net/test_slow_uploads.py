"""Uploads over a slow or breaking link, in virtual time: the worker's bulk channels, whose parts share the link."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from diloco_protocol.vocabulary import TransferRefusal
from diloco_protocol.wire import bulk, limits, sync_pb2
from diloco_protocol.wire.byte_stream import StreamBroken
from diloco_worker.net import bulk_channels
from diloco_worker.net.bulk_channels import BulkChannels, ByteCounts
from diloco_worker.net.routes import Routes
from operator_simulation import virtual_time

PAYLOAD = 32 << 20


class Uplink:
    """A bulk connection, one of several that share ``rate`` bytes a second: what is written goes in the order of the
    writes. ``breaks``: parts that break, by the number of the call."""

    def __init__(self, rate: float) -> None:
        self.rate, self.turn = rate, asyncio.Lock()
        self.carried = 0
        self.taken: set[int] = set()  # offsets of parts that have come whole
        self.breaks: set[int] = set()
        self.calls = 0

    async def begin(self, *, upload: sync_pb2.UploadHeader) -> Any:
        return Upload(self, upload)


class Upload:
    """One call, as its caller has it (``BulkCall``)."""

    def __init__(self, link: Uplink, head: sync_pb2.UploadHeader) -> None:
        self._link, self._head = link, head
        self._left = head.bytes
        self._whole: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._number = link.calls
        link.calls += 1

    async def write(self, part: memoryview, note: Callable[[int], None] = lambda count: None) -> None:
        link = self._link
        async with link.turn:
            await asyncio.sleep(len(part) / link.rate)
            link.carried += len(part)
        note(len(part))
        self._left -= len(part)
        if self._number in link.breaks:
            if not self._whole.done():
                self._whole.set_exception(StreamBroken("connection reset by peer"))
            raise StreamBroken("broken pipe")
        if not self._left:
            self._whole.set_result(None)

    async def read_reply(self) -> sync_pb2.BulkReply:
        await self._whole
        self._link.taken.add(self._head.offset)
        done = len(self._link.taken) == len(bulk.split(PAYLOAD, 4, limits.MAX_UPLOAD_PART_BYTES))
        reason = "" if done else TransferRefusal.PARTIAL
        return sync_pb2.BulkReply(upload=sync_pb2.UploadReply(accepted=True, reason=reason))

    async def give_up_upload(self) -> None:
        pass

    def end(self) -> None:
        pass


class CutOff(Upload):
    """A call whose connection breaks while a write waits."""

    async def write(self, part: memoryview, note: Callable[[int], None] = lambda count: None) -> None:
        await asyncio.sleep(1e6)

    async def read_reply(self) -> sync_pb2.BulkReply:
        try:
            await asyncio.sleep(1e6)
        except asyncio.CancelledError:  # as where the stream was closed meanwhile
            raise StreamBroken("the connection was closed") from None
        raise AssertionError


async def upload(link: Uplink) -> float:
    """Seconds that it took, once it was accepted."""
    connect: Any = lambda address, shard: link  # noqa: E731
    made = BulkChannels(Routes(connect, "a:1"), "a", "b" * 32, executor=ThreadPoolExecutor(1), counts=ByteCounts())
    reply = await made.upload(np.zeros(PAYLOAD, np.uint8), push=sync_pb2.Push(sequence=7))
    assert reply.accepted and not reply.reason
    return asyncio.get_running_loop().time()


@pytest.fixture(autouse=True)
def in_virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "time", virtual_time.Clock())
    monkeypatch.setattr(bulk_channels.random, "uniform", lambda low, high: high)


@pytest.mark.promise("A push comes through on any link: its parts have no deadline while bytes of its session move")
@pytest.mark.parametrize("rate", [1e6, 10e3])
def test_a_push_takes_what_its_bytes_take(rate: float) -> None:
    """At 10 kB/s four parts of 8 MiB take almost an hour, and each waits longer than a stall for its first chunk."""

    async def test() -> None:
        link = Uplink(rate)
        assert await upload(link) == pytest.approx(PAYLOAD / rate, rel=0.01)
        assert link.carried == PAYLOAD and link.calls == 4

    virtual_time.run(test())


@pytest.mark.promise("Of an upload that breaks only the parts that had no answer are sent again")
def test_a_push_that_breaks_sends_the_rest_again() -> None:
    """The fourth part breaks with its first chunk, and with it the try."""

    async def test() -> None:
        link = Uplink(1e6)
        link.breaks = {3}
        assert await upload(link) < 1.4 * PAYLOAD / 1e6
        assert link.carried < 1.3 * PAYLOAD

    virtual_time.run(test())


def test_a_push_that_comes_to_nothing_is_given_up() -> None:
    async def test() -> None:
        link = Uplink(1e6)
        link.breaks = set(range(100))
        with pytest.raises(bulk.TransferError, match="reset"):
            await upload(link)
        assert not link.taken

    virtual_time.run(test())


def test_of_an_upload_that_is_cancelled_no_error_is_left_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with its session: asyncio would tell a traceback of each of its parts."""
    told = list[str]()

    async def begin(link: Uplink, *, upload: sync_pb2.UploadHeader) -> CutOff:
        return CutOff(link, upload)

    monkeypatch.setattr(Uplink, "begin", begin)

    async def test() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
        sending = asyncio.create_task(upload(Uplink(1e6)))
        await asyncio.sleep(1)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)

    virtual_time.run(test())
    gc.collect()
    assert told == []
