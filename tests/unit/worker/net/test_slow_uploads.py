"""Uploads over a slow or breaking link, in virtual time: the worker's bulk channels, whose parts share the link."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from diloco_protocol.vocabulary import TransferRefusal
from diloco_protocol.wire import bulk, limits, sync_pb2
from diloco_protocol.wire.byte_stream import StreamBroken
from diloco_worker.fragments import build_layout
from diloco_worker.net import bulk_channels, inbox
from diloco_worker.net.bulk_channels import BulkChannels, ByteCounts
from diloco_worker.net.error_feedback import ErrorFeedback
from diloco_worker.net.fragment_cache import FragmentCache
from diloco_worker.net.routes import Routes
from diloco_worker.net.session import Outbox
from diloco_worker.net.transfers import TransferContext, Transfers
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


class States:
    """A learner's sessions, in which its optimizer state goes up one link. ``made``: how often it was serialised."""

    def __init__(self, link: Uplink, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made, self.said = 0, Outbox()
        self._connect: Any = lambda address, shard: link
        layout = build_layout(torch.nn.Linear(4, 2), 1)
        cache, feedback = FragmentCache(1), ErrorFeedback(1, False)
        self.context = TransferContext(layout, inbox.Inbox(), self.said, cache, feedback=feedback)

        async def run(channels: BulkChannels, work: Callable[..., Any], *arguments: Any) -> Any:
            await asyncio.sleep(0)
            return work(*arguments)  # virtual time waits for no thread

        monkeypatch.setattr(BulkChannels, "run", run)
        monkeypatch.setattr(bulk_channels, "_TRIES", 1)

    def encode(self) -> Any:
        self.made += 1
        return np.full(PAYLOAD, self.made, np.uint8)

    async def session(self, seconds: float, again: bool, transfer: int = 7) -> None:
        """One that lasts so long at the most, and begins with the request for the state. ``again``: it was begun."""
        channels = BulkChannels(
            Routes(self._connect, "a:1"), "a", "b" * 32, executor=ThreadPoolExecutor(1), counts=ByteCounts()
        )
        one = Transfers(self.context, channels, "float32", lambda *work: None, end_session=lambda reason: None)
        assert ((2, transfer) in self.context.states) == again
        work = one.resume_state(transfer, 2) if again else one.send_state(transfer, self.encode, [(1, 3)], 2)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await work
        one.close()

    def declined(self) -> list[str]:
        return [key for key, _ in self.said.begin_sending()[1:]]


@pytest.mark.promise("A peer's optimizer state goes on where its sender's session broke, also again and again")
def test_a_state_goes_on_in_the_next_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight parts of 8 MiB, four at a time: four have come after 34 s, and what was under way goes again."""
    monkeypatch.setitem(globals(), "PAYLOAD", 64 << 20)

    async def test() -> None:
        link = Uplink(1e6)
        states = States(link, monkeypatch)
        await states.session(40, again=False)
        assert len(link.taken) == 4
        await states.session(20, again=True)
        await asyncio.sleep(59)
        await states.session(1e6, again=True)
        assert len(link.taken) == 8 and link.carried < PAYLOAD + 27e6
        assert states.made == 1 and not states.declined() and not states.context.states

    virtual_time.run(test())


@pytest.mark.promise("A peer's optimizer state goes on where its sender's session broke, also again and again")
def test_a_state_that_nobody_asks_for_again_is_kept_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """And then it is declined: the syncer may have parts of it, and would join them with those of a newer one."""

    async def test() -> None:
        states = States(Uplink(1e6), monkeypatch)
        await states.session(10, again=False)
        await states.session(1, again=False, transfer=8)
        await asyncio.sleep(61)
        assert all(upload.data is None for upload in states.context.states.values())
        await states.session(1e6, again=True)
        assert states.declined() == ["no-state-7"] and states.made == 2

    virtual_time.run(test())


def test_a_state_that_is_asked_for_twice_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the training thread makes a long step, and reads the requests of two sessions after it."""

    async def test() -> None:
        link = Uplink(1e6)
        states = States(link, monkeypatch)
        await asyncio.gather(states.session(1e6, again=False), states.session(1e6, again=False))
        assert link.carried == PAYLOAD and not states.declined()

    virtual_time.run(test())


def test_of_states_that_were_begun_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        states = States(Uplink(1e6), monkeypatch)
        for transfer in range(12):
            await states.session(1, again=False, transfer=transfer)
        assert [transfer for _, transfer in states.context.states] == list(range(4, 12))

    virtual_time.run(test())


class SharedUplink(Uplink):
    """It carries several payloads. ``come``: the bytes of each that have come, by what it is."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self.come: dict[str, int] = {}

    async def begin(self, *, upload: sync_pb2.UploadHeader) -> Any:
        return OneOfSeveral(self, upload)


class OneOfSeveral(Upload):
    async def read_reply(self) -> sync_pb2.BulkReply:
        await self._whole
        link, head = self._link, self._head
        assert isinstance(link, SharedUplink)
        what = head.WhichOneof("what") or ""
        link.come[what] = link.come.get(what, 0) + head.bytes
        reason = "" if link.come[what] == head.total_bytes else TransferRefusal.PARTIAL
        return sync_pb2.BulkReply(upload=sync_pb2.UploadReply(accepted=True, reason=reason))


@pytest.mark.promise(
    "Newcomers, however many join at once, make rounds at most a tenth longer; those that joined first come first"
)
def test_a_push_goes_before_a_state_that_is_given_to_a_newcomer() -> None:
    """The state has a share of what the push moves, and what the push leaves: the link is never idle."""

    async def test() -> None:
        link, loop = SharedUplink(1e6), asyncio.get_running_loop()
        connect: Any = lambda address, shard: link  # noqa: E731
        made = BulkChannels(Routes(connect, "a:1"), "a", "b" * 32, executor=ThreadPoolExecutor(1), counts=ByteCounts())
        state = asyncio.ensure_future(
            made.upload(np.zeros(2 * PAYLOAD, np.uint8), peer_state=sync_pb2.PeerState(transfer=1))
        )
        await asyncio.sleep(10.0)
        carried = link.carried
        assert carried == pytest.approx(10.0 * link.rate, rel=0.1)
        await made.upload(np.zeros(PAYLOAD, np.uint8), push=sync_pb2.Push(sequence=7))
        seconds = loop.time() - 10.0
        assert seconds < 1.1 * PAYLOAD / link.rate
        assert 0 < link.carried - carried - PAYLOAD < 0.1 * PAYLOAD
        assert (await state).accepted
        assert loop.time() == pytest.approx(3 * PAYLOAD / link.rate, rel=0.01)

    virtual_time.run(test())
