"""Bulk bytes of fragments that are at shards of the syncer, over connections on loopback."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from bulk_port import BulkPort
from diloco_protocol.arrays.layout import Layout, Tensor
from diloco_protocol.security.credentials import Credentials
from diloco_protocol.vocabulary import TransferRefusal
from diloco_protocol.wire import bulk, limits, sync_pb2
from diloco_protocol.wire.bulk_calls import CallFailed, ServedCall, bulk_connection
from diloco_protocol.wire.records import Announcement, Payload, PushPlan, Shard, StepReport
from diloco_syncer.server.tls.connection_limits import Peer
from diloco_worker.fragments import Vector
from diloco_worker.net import bulk_channels, transfers
from diloco_worker.net.bulk_channels import BulkChannels, ByteCounts
from diloco_worker.net.error_feedback import ErrorFeedback
from diloco_worker.net.fragment_cache import FragmentCache
from diloco_worker.net.inbox import Downloaded, Inbox, PushAnswered
from diloco_worker.net.routes import Routes
from diloco_worker.net.session import Outbox
from diloco_worker.net.transfers import Push, TransferContext, Transfers
from free_ports import closed_port
from patience import until

P = 8
ELEMENTS = 1000
DATA = np.zeros(ELEMENTS, np.float32)
PAYLOAD = Payload("float32", DATA.nbytes, bulk.checksum(DATA))


@pytest.fixture(autouse=True)
def without_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "FIRST_REST_SECONDS", 0.001)
    for module in (bulk_channels, transfers):
        monkeypatch.setattr(module, "pause", lambda attempt: 0.001)


class Process:
    """The syncer, or a shard. ``calls``: what it was asked for, with the fragment. ``goes_on``: clear, its answers
    wait. ``failure``: of all calls. ``lacks``: so often it does not have what is downloaded."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.offsets: list[int] = []
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.failure: CallFailed | None = None
        self.lacks = 0
        self.half = False  # only the first half of a download, and the first part of an upload, go through, for now
        self.got = 0  # bytes of an upload in parts
        self.port = 0
        self.listener = BulkPort(self, self)

    async def upload(
        self, header: sync_pb2.UploadHeader, source: bulk.Source, peer: Peer, called: str
    ) -> sync_pb2.UploadReply:
        self.calls.append((str(header.WhichOneof("what")), header.push.fragment))
        if self.failure is not None:
            raise self.failure
        await bulk.receive_into(source, memoryview(bytearray(header.bytes)))
        is_part = header.bytes < header.total_bytes
        if not (self.half and is_part and header.offset == 0):
            await self.goes_on.wait()
        self.got += header.bytes if is_part else 0
        reason = TransferRefusal.PARTIAL if is_part and self.got < header.total_bytes else ""
        return sync_pb2.UploadReply(accepted=True, reason=reason)

    async def serve(self, request: sync_pb2.DownloadRequest, call: ServedCall, peer: Peer, called: str) -> None:
        self.calls.append((sync_pb2.DownloadRequest.What.Name(request.what), request.fragment))
        self.offsets.append(request.offset)
        if self.failure is not None:
            raise self.failure
        if self.lacks:
            self.lacks -= 1
            await call.reply(sync_pb2.BulkReply(download=sync_pb2.DownloadHeader(found=False)))
            return
        header, part = bulk.cut_part(DATA, request.offset, request.bytes)
        await call.reply(sync_pb2.BulkReply(download=header))
        half = len(part) // 2 if self.half else 0
        await call.write(part[:half])
        await self.goes_on.wait()
        await call.write(part[half:])

    @property
    def ended(self) -> list[bool]:
        """Of each connection that was made, whether it is over."""
        return [stream.has_ended() for stream in self.listener.connections]


@contextlib.asynccontextmanager
async def serving(count: int) -> AsyncIterator[list[Process]]:
    processes = [Process() for _ in range(count)]
    async with contextlib.AsyncExitStack() as stack:
        for one in processes:
            address = await stack.enter_async_context(one.listener.listening())
            one.port = int(address.rpartition(":")[2])
        yield processes
        for one in processes:
            one.goes_on.set()


class Session:
    """A learner's transfers with the syncer at ``port``."""

    def __init__(self, port: int, pushes_again: bool = False, pinned: bool = False) -> None:
        self.reason, self.box, self.tasks = "", Inbox(), list[asyncio.Task[Any]]()
        layout = Layout.build([Tensor(f"t{p}", (ELEMENTS,), "float32", False) for p in range(P)], fragments=P)
        context = TransferContext(
            layout, self.box, Outbox(), FragmentCache(P), feedback=ErrorFeedback(P, False), pushes_again=pushes_again
        )
        self.routes = Routes(lambda address, shard: bulk_connection(Credentials(), address), f"127.0.0.1:{port}")
        channels = BulkChannels(self.routes, "a", "b" * 32, executor=ThreadPoolExecutor(1), counts=ByteCounts())
        self.one = Transfers(context, channels, "float32", self.spawn, end_session=self.end, pinned_server=pinned)

    def spawn(self, work: Any, *arguments: Any) -> None:
        self.tasks.append(asyncio.ensure_future(work(*arguments)))

    def end(self, reason: str) -> None:
        self.reason = self.reason or reason

    def push(self, fragment: int, sequence: int = 1) -> None:
        plan = PushPlan(
            fragment,
            sequence,
            1,
            1,
            base_version=0,
            oldest_version=0,
            first_step=1,
            last_step=4,
            steps=4,
            tokens=128,
            compute_seconds=0.1,
        )
        self.one.push(Push(plan, Vector.from_array(DATA), Vector.from_array(DATA), StepReport()))

    def announce(self, fragment: int, version: int = 0, delta: bool = False) -> None:
        self.one.on_announcement(Announcement(fragment, 1, version, PAYLOAD, delta=PAYLOAD if delta else None))

    async def hear(self, count: int) -> list[Any]:
        """Wait for so many answers to pushes, and versions that have come."""
        heard: list[Any] = []

        def is_enough() -> bool:
            heard.extend(one for one in self.box.take_all() if isinstance(one, PushAnswered | Downloaded))
            return len(heard) >= count

        await until(is_enough)
        return heard

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.routes.close()


def test_shards_are_where_they_are_named_and_share_the_connections() -> None:
    class Idle:
        drop = staticmethod(lambda: None)

    made = Counter[tuple[str, int | None]]()

    def connect(address: str, shard: int | None) -> Any:
        made[address, shard] += 1
        return Idle()

    for syncer, host in (("syncer.ns:7000", "syncer.ns"), ("[fd00::1]:7000", "[fd00::1]")):
        made.clear()
        routes = Routes(connect, syncer)
        assert made == {(syncer, None): 10}, "two are for states"
        shards = [Shard(7001, "", (0, 2)), Shard(0, "10.0.0.9", (1,)), Shard(7002, "fd00::2", ())]
        for count, lanes in ((1, 8), (2, 4), (3, 2)):
            made.clear()
            routes.set_shards(shards[:count])
            places = ((f"{host}:7001", 0), ("10.0.0.9:7000", 1), ("[fd00::2]:7002", 2))
            assert made == dict.fromkeys(places[:count], lanes)
        assert routes.find(0) is routes.find(2) is not routes.find(1)
        assert routes.find(3) is routes.find(-1) and not routes.has_shard(3)
        made.clear()
        routes.set_shards(shards)
        assert not made, "they are there"
        routes.set_shards([Shard(7000 + n, "", (n,)) for n in range(6)])
        assert set(made.values()) == {2}, "one for each direction at least"
    made.clear()
    routes.set_shards([Shard(0, "", (0,)), Shard(0, "", (1,))])
    assert made == {("[fd00::1]:7000", 0): 4, ("[fd00::1]:7000", 1): 4}, "behind the syncer's port by their numbers"


async def test_bytes_of_a_fragment_go_to_its_shard_and_all_else_to_the_syncer() -> None:
    async with serving(3) as (syncer, a, b):
        session = Session(syncer.port)
        session.one.set_shards([Shard(a.port, "", (0,)), Shard(b.port, "localhost", (1,))])
        for fragment in range(3):
            session.push(fragment)
            session.announce(fragment)
        await session.hear(6)
        session.announce(0, 1, delta=True)
        await session.hear(1)
        versions = [("push", 0), ("FULL", 0)]
        assert sorted(a.calls) == sorted([*versions, ("DELTA", 0)])
        assert sorted(b.calls) == [("FULL", 1), ("push", 1)] and sorted(syncer.calls) == [("FULL", 2), ("push", 2)]
        syncer.calls.clear()
        await session.one.upload_initial([Vector.from_array(DATA)], b"")
        await session.one.fetch_optimizer(1 << 20, 1)
        await session.one.fetch_frozen(1 << 20, str)
        await session.one.send_state(1, lambda: DATA.view(np.uint8), (), 1)
        cached = session.one.context.cache.get(0)
        assert cached is not None
        session.one.context.cache.put(transfers.replace(cached, receipt=b"receipt"))
        await session.one.return_version(sync_pb2.BaseRequest(fragment=0, epoch=1, version=1))
        assert {kind for kind, _ in syncer.calls} == {
            *("initial", "OPTIMIZER", "FROZEN_DIGEST", "FROZEN", "peer_state", "base")
        }
        session.one.set_shards(())
        session.push(0, 2)
        await session.hear(1)
        assert syncer.calls[-1] == ("push", 0) and len(a.calls) == 3 and not session.reason
        await session.close()


async def test_what_is_under_way_goes_on_at_the_new_address() -> None:
    async with serving(3) as (syncer, a, b):
        session = Session(syncer.port)
        session.one.set_shards([Shard(a.port, "", (0, 1))])
        a.half = True
        a.goes_on.clear()
        session.announce(0)
        for sequence in (1, 2, 3):  # of which the third waits for its turn
            session.push(1, sequence)
        kept = session.one.channels.kept._kept
        await until(lambda: [one.received for _, one in kept.values()] == [DATA.nbytes // 2])
        await until(lambda: len(a.calls) == 3)
        session.one.set_shards([Shard(b.port, "", (0, 1))])
        (answer,) = await session.hear(1)
        assert answer.sequence == 3 and b.calls == [("push", 1)]
        await asyncio.sleep(0.05)
        assert a.ended == [False] * 3, "what is under way there may come to its end"
        for connection in a.listener.connections:
            connection.close()
        heard = await session.hear(3)
        assert {one.sequence for one in heard if isinstance(one, PushAnswered) and one.accepted} == {1, 2}
        assert b.offsets == [DATA.nbytes // 2] and len(b.calls) == 4 and not session.reason
        await session.close()


async def test_a_shard_gets_all_parts_of_a_push_that_was_begun_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_UPLOAD_PART_BYTES", DATA.nbytes // 2)
    async with serving(3) as (syncer, a, b):
        session = Session(syncer.port)
        session.one.set_shards([Shard(a.port, "", (0,))])
        a.half = True
        a.goes_on.clear()
        session.push(0)
        await until(lambda: a.got and len(a.calls) == 2)
        await asyncio.sleep(0.05)
        session.one.set_shards([Shard(b.port, "", (0,))])
        for connection in a.listener.connections:
            connection.close()
        (answer,) = await session.hear(1)
        assert answer.accepted and b.got == DATA.nbytes and len(b.calls) == 2
        await session.close()


async def test_idle_connections_to_a_former_address_are_closed() -> None:
    async with serving(3) as (syncer, a, b):
        session = Session(syncer.port)
        session.one.set_shards([Shard(a.port, "", (0,))])
        session.push(0)
        session.announce(0)
        await session.hear(2)
        a.goes_on.clear()
        session.push(0, 2)
        await until(lambda: len(a.calls) == 3)
        session.one.set_shards([Shard(b.port, "", (0,))])
        await until(lambda: sorted(a.ended) == [False, True])
        a.goes_on.set()
        (answer,) = await session.hear(1)
        assert answer.accepted, "it came to its end where it was begun"
        await until(lambda: all(a.ended))
        assert not b.calls
        await session.close()


async def test_a_shard_that_is_away_ends_no_session() -> None:
    with closed_port() as closed:
        async with serving(2) as (syncer, shard):
            session = Session(syncer.port)
            session.one.set_shards([Shard(closed, "", (0, 1))])
            for sequence in range(1, 4):
                session.push(0, sequence)
            session.announce(1)
            answers = await session.hear(3)
            assert [(one.sequence, one.accepted, one.message) for one in answers] == [
                (sequence, None, "no answer came") for sequence in (1, 2, 3)
            ]
            await asyncio.sleep(0.2)
            assert not session.reason and not syncer.calls and session.one.missing_fragments == 1
            session.one.set_shards([Shard(shard.port, "", (0, 1))])
            (downloaded,) = await session.hear(1)
            assert isinstance(downloaded, Downloaded) and shard.calls == [("FULL", 1)]
            await session.close()


async def test_where_pushes_are_sent_again_in_the_next_session_only_it_ends() -> None:
    """In deterministic mode nobody would ask for the push."""
    with closed_port() as closed:
        async with serving(1) as (syncer,):
            session = Session(syncer.port, pushes_again=True)
            session.one.set_shards([Shard(closed, "", (0,))])
            session.push(0)
            await session.hear(1)
            await until(lambda: session.reason.startswith("pushes do not come through"))
            await session.close()


@pytest.mark.parametrize("pinned", [True, False])
async def test_a_shard_that_refuses_for_good_may_have_another_certificate(pinned: bool) -> None:
    async with serving(2) as (syncer, shard):
        for what in ("push", "announce"):
            session = Session(syncer.port, pinned=pinned)
            session.one.set_shards([Shard(shard.port, "", (0,))])
            shard.failure = CallFailed("who are you?", final=True)
            shard.calls.clear()
            getattr(session, what)(0)
            if pinned:
                await until(lambda: "who are you?" in session.reason)  # noqa: B023
            elif what == "push":
                await session.hear(1)
                assert not session.reason
            else:
                await until(lambda: session.reason == "fragment 0 does not arrive in 4 tries")  # noqa: B023
            await session.close()


async def test_a_version_that_its_shard_has_no_more_ends_the_session() -> None:
    async with serving(2) as (syncer, shard):
        session = Session(syncer.port)
        session.one.set_shards([Shard(shard.port, "", (0,))])
        for version in range(2):
            shard.lacks = 3
            session.announce(0, version)
            await session.hear(1)
        assert not session.reason
        shard.lacks = 100
        session.announce(0, 2)
        await until(lambda: session.reason == "fragment 0 does not arrive in 4 tries")
        await session.close()


async def test_transfers_with_a_shard_do_not_wait_for_those_with_another() -> None:
    async with serving(3) as (syncer, a, b):
        session = Session(syncer.port)
        a.goes_on.clear()
        session.one.set_shards([Shard(a.port, "", (0, 2, 3, 4, 5)), Shard(b.port, "", (1,))])
        for fragment in range(6):
            session.push(fragment)
        for fragment in (0, 2, 3, 4, 5, 1):
            session.announce(fragment)
        heard = await session.hear(2)
        assert {type(one) for one in heard} == {PushAnswered, Downloaded} and len(b.calls) == 2
        assert len(a.calls) == 3, "one push at a time, and two downloads"
        a.goes_on.set()
        await session.hear(10)
        await session.close()
