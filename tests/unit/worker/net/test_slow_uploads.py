"""Uploads over a slow or breaking link, in virtual time: the worker's bulk channels, whose parts share the link."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio

from diloco_protocol.vocabulary import TransferRefusal
from diloco_protocol.wire import bulk, limits, sync_pb2
from diloco_worker.net import bulk_channels
from diloco_worker.net.bulk_channels import BulkChannels, ByteCounts
from operator_simulation import virtual_time

PAYLOAD = 32 << 20


class Uplink:
    """A channel, one of several that share ``rate`` bytes a second: what is written goes in the order of the writes.
    ``breaks``: parts that break, by the number of the call."""

    def __init__(self, rate: float) -> None:
        self.rate, self.turn = rate, asyncio.Lock()
        self.carried = 0
        self.taken: set[int] = set()  # offsets of parts that have come whole
        self.breaks: set[int] = set()
        self.calls = 0

    def stream_stream(self, *_: Any, **__: Any) -> Any:
        return lambda **_: Upload(self)


class Upload:
    """One call, as gRPC shows it to its caller."""

    def __init__(self, link: Uplink) -> None:
        self._link = link
        self._head: sync_pb2.UploadHeader | None = None
        self._whole: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._number = link.calls
        link.calls += 1

    async def write(self, message: bytes) -> None:
        link = self._link
        if self._head is None:
            self._head = sync_pb2.UploadHeader.FromString(message)
            return
        async with link.turn:
            await asyncio.sleep(len(message) / link.rate)
            link.carried += len(message)
        if self._number in link.breaks and not self._whole.done():
            metadata = aio.Metadata()
            self._whole.set_exception(aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata, "reset"))

    async def done_writing(self) -> None:
        if not self._whole.done():
            self._whole.set_result(None)

    async def read(self) -> bytes:
        await self._whole
        assert self._head is not None
        self._link.taken.add(self._head.offset)
        done = len(self._link.taken) == len(bulk.split(PAYLOAD, 4, limits.MAX_UPLOAD_PART_BYTES))
        return sync_pb2.UploadReply(accepted=True, reason="" if done else TransferRefusal.PARTIAL).SerializeToString()

    async def details(self) -> str:
        return "reset"

    def cancel(self) -> None:
        pass


class CutOff(Upload):
    """A call whose connection breaks while a write waits."""

    async def write(self, message: bytes) -> None:
        await asyncio.sleep(1e6)

    async def read(self) -> bytes:
        metadata = aio.Metadata()
        try:
            await asyncio.sleep(1e6)
        except asyncio.CancelledError:  # as gRPC does where the call has ended meanwhile
            raise aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata, "reset") from None
        raise AssertionError


async def upload(link: Uplink) -> float:
    """Seconds that it took, once it was accepted."""
    made = BulkChannels(
        [link] * 4,  # type: ignore[list-item]
        (),
        "a",
        "b" * 32,
        executor=ThreadPoolExecutor(1),
        counts=ByteCounts(),
    )
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
    monkeypatch.setattr(Uplink, "stream_stream", lambda link, *_, **__: lambda **_: CutOff(link))

    async def test() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
        sending = asyncio.create_task(upload(Uplink(1e6)))
        await asyncio.sleep(1)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)

    virtual_time.run(test())
    gc.collect()
    assert told == []
