"""A newcomer on a slow link, in virtual time: the worker's transfers against the syncer's side of downloads."""

from __future__ import annotations

import asyncio
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from bulk_port import StoredDownloads
from diloco.bandwidth_plan import Conditions, document
from diloco_protocol.arrays.layout import Layout, Tensor
from diloco_protocol.bandwidth import links
from diloco_protocol.spec.load import load_job
from diloco_protocol.wire import bulk, limits, sync_pb2
from diloco_protocol.wire.progress import Progress
from diloco_protocol.wire.records import Announcement, Payload
from diloco_syncer.server.tls.connection_limits import Peer
from diloco_worker.net import bulk_channels, transfers
from diloco_worker.net.bulk_channels import BulkChannels, ByteCounts, KeptDownloads
from diloco_worker.net.error_feedback import ErrorFeedback
from diloco_worker.net.fragment_cache import FragmentCache
from diloco_worker.net.inbox import Inbox
from diloco_worker.net.routes import Routes
from diloco_worker.net.session import Outbox
from diloco_worker.net.transfers import TransferContext, Transfers
from operator_simulation import virtual_time
from repository import ROOT
from virtual_link import FRAME, Channel, Link

P = 24
SECONDS = 10.0  # of a step


@pytest.fixture(autouse=True)
def in_virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bulk, transfers):
        monkeypatch.setattr(module, "time", virtual_time.Clock())
    monkeypatch.setattr(bulk_channels.random, "uniform", lambda low, high: high)


class World:
    """A model of ``P`` fragments of ``elements`` each, in bfloat16, and a newcomer behind a link of ``rate`` bytes a
    second. The syncer's side is that of the product, but for where its bytes come from."""

    def __init__(self, elements: int, rate: float, latency: float = 0.05, by_turns: bool = True) -> None:
        self.link = Link(rate, latency, by_turns)
        self.data = np.zeros(2 * elements, np.uint8)
        self.payload = Payload("bfloat16", 2 * elements, bulk.checksum(self.data))
        self.cache, self.kept = FragmentCache(P), KeptDownloads()
        tensors = [Tensor(f"t{p:02}", (elements // 1000, 1000), "float32", False) for p in range(P)]
        layout = Layout.build(tensors, fragments=P)
        assert len(layout) == P
        feedback = ErrorFeedback(P, False)
        self.context = TransferContext(layout, Inbox(), Outbox(), self.cache, feedback=feedback)
        self.asked: list[tuple[int, int, int]] = []  # fragment, version or transfer, and offset of each download
        self.catching_up: list[bool] = []  # of each
        self.reason = ""
        self.versions = [0] * P
        self.begin_session()

    @property
    def bytes_needed(self) -> int:
        return P * self.data.nbytes

    def begin_session(self) -> None:
        self.tasks: list[asyncio.Task[Any]] = []
        self.downloads = StoredDownloads(lambda request: self.data, Progress())
        connect: Any = lambda address, shard: Channel(self.link, self.serve)  # noqa: E731
        routes = Routes(connect, "a:1")
        self.channels: list[Any] = routes.find(-1).down._channels
        made = BulkChannels(routes, "a", "b" * 32, executor=ThreadPoolExecutor(1), counts=ByteCounts(), kept=self.kept)
        self.transfers = Transfers(self.context, made, "int4", self.spawn, end_session=self.end)

    async def end_session(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def spawn(self, work: Any, *arguments: Any) -> None:
        self.tasks.append(asyncio.ensure_future(work(*arguments)))

    def end(self, reason: str) -> None:
        self.reason = reason

    async def serve(self, request: sync_pb2.DownloadRequest, sink: Any) -> None:
        self.asked.append((request.fragment, request.version or request.transfer, request.offset))
        self.catching_up.append(request.catching_up)
        await self.downloads.serve(request, sink, Peer())

    def announce(self, fragment: int, version: int = 0) -> None:
        self.versions[fragment] = version
        self.transfers.on_announcement(Announcement(fragment, 1, version, self.payload))

    def announce_all(self) -> None:
        for fragment in range(P):
            self.announce(fragment, self.versions[fragment])

    async def arrive(self, seconds: float) -> float:
        """Wait until all fragments are here, at most so long; after how many seconds they were."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while self.transfers.missing_fragments and not self.reason and loop.time() < begun + seconds:
            await asyncio.sleep(0.25)
        assert not self.reason, self.reason
        assert not self.transfers.missing_fragments, f"{P - self.transfers.missing_fragments} of {P} fragments"
        return loop.time() - begun


@pytest.mark.promise(
    "A newcomer's model arrives in the time that its bytes need on its link, a few fragments at a time, none twice"
)
@pytest.mark.parametrize(("rate", "latency"), [(250e3, 0.05), (30e3, 0.05), (250e3, 1.0), (8e6, 0.05)])
def test_a_newcomer_needs_what_its_bytes_need(rate: float, latency: float) -> None:
    """A few at a time: of sixteen fragments at once, 1 MB each at 250 kB/s, none would be whole within a minute."""

    async def test() -> None:
        world = World(500_000, rate, latency)
        world.announce_all()
        seconds = await world.arrive(1e5)
        assert seconds < 1.1 * world.bytes_needed / rate + 2 * P * latency
        assert world.link.carried < 1.01 * world.bytes_needed
        assert len(world.asked) == P and world.link.most_calls <= 4
        places = enumerate(fragment for fragment, _, _ in world.asked)
        assert all(abs(place - fragment) < 4 for place, fragment in places), "the oldest announcement first"

    virtual_time.run(test())


def test_downloads_that_wait_for_others_of_their_session_have_not_stalled() -> None:
    """On a link that serves one after the other the fourth has its first byte after 100 s."""

    async def test() -> None:
        world = World(500_000, 30e3, by_turns=False)
        world.announce_all()
        assert await world.arrive(1e5) < 1.01 * world.bytes_needed / 30e3
        assert len(world.asked) == P and world.link.most_calls == 4

    virtual_time.run(test())


@pytest.mark.promise("A link that `diloco plan` calls enough is enough for a newcomer too, while the others merge on")
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_link_of_the_plan_lets_a_newcomer_in(share: float) -> None:
    """While it downloads, the others merge a fragment every H/P steps, and each merge is announced to it too."""
    job = load_job(ROOT / "examples" / "minimal.yaml", [f"sync.fragments={P}"])
    elements = 500_000
    found = document(job, [elements] * P, "", Conditions(SECONDS))
    rate = share * found["queued"]["link"]["down"] / 8 / links.FRAMING

    async def test() -> None:
        world = World(elements, rate)
        world.announce_all()

        async def merge() -> None:
            for number in itertools.count():
                await asyncio.sleep(SECONDS * job.spec.sync.every / P)
                world.announce(number % P, number // P + 1)

        merging = asyncio.ensure_future(merge())
        seconds = await world.arrive(1e5)
        merging.cancel()
        assert seconds < 1.25 * world.bytes_needed / rate, "the newest of each is downloaded, and nothing twice"

    virtual_time.run(test())


@pytest.mark.promise("What has come of a download is kept: it goes on where it broke, in the next session too")
def test_resets_cost_what_was_under_way_and_no_more() -> None:
    """All connections are reset every 7 s, and the session's own with them every 21 s."""

    async def test() -> None:
        world = World(500_000, 250e3)
        world.announce_all()
        arriving = asyncio.ensure_future(world.arrive(1e5))
        for number in itertools.count():
            await asyncio.sleep(7.0)
            if arriving.done():
                break
            if number % 3 == 2:
                await world.end_session()
                world.begin_session()
                world.announce_all()
            else:
                for channel in world.channels:
                    channel.break_connection()
        # A frame of each of four calls is lost with each reset, and two seconds of rest.
        assert await arriving < 1.55 * world.bytes_needed / 250e3
        assert world.link.carried < 1.05 * world.bytes_needed
        assert any(offset for _, _, offset in world.asked)

    virtual_time.run(test())


@pytest.mark.promise(
    "A new learner takes over an optimizer state over a link of any speed: while bytes come, and while the syncer "
    "still has to answer, it begins with no fresh one"
)
def test_an_optimizer_state_on_a_slow_link_goes_on_in_the_next_session() -> None:
    """At 0.24 Mbit/s, with a session that breaks every 15 s, and another life of the syncer at the end."""

    async def test() -> None:
        world = World(1_000_000, 30e3)
        what, sessions = sync_pb2.DownloadRequest.PEER_STATE, 0

        async def fetch(epoch: int, seconds: float) -> bool:
            fetching = asyncio.ensure_future(world.transfers.download_state(what, 1 << 30, 7, epoch))
            world.tasks.append(fetching)
            await asyncio.wait([fetching], timeout=seconds)
            data = fetching.result().data if fetching.done() else None
            return data is not None and data.nbytes == world.data.nbytes

        while not await fetch(1, 15.0):
            sessions += 1
            await world.end_session()
            world.begin_session()
        assert sessions > 3 and all(one[:2] == (0, 7) for one in world.asked)
        assert world.link.carried < 1.1 * world.data.nbytes
        world.asked.clear()
        assert not await fetch(1, 15.0)
        await world.end_session()
        world.begin_session()
        assert await fetch(2, 1e5)
        assert [offset for _, _, offset in world.asked] == [0, 0], "of another life's syncer nothing goes on"

    virtual_time.run(test())


def test_a_download_of_which_bytes_come_is_not_given_up_however_often_it_breaks() -> None:
    async def test() -> None:
        world, breaks = World(1_000_000, 30e3), 0
        what = sync_pb2.DownloadRequest.PEER_STATE
        fetching = asyncio.ensure_future(world.transfers.download_state(what, 1 << 30, 7, 1))
        while not (await asyncio.wait([fetching], timeout=5.0))[0]:
            for channel in world.channels:
                channel.break_connection()
            breaks += 1
        data = fetching.result().data
        assert breaks > 10 and data is not None and data.nbytes == world.data.nbytes
        assert world.link.carried < world.data.nbytes + 1.1 * breaks * FRAME, "a frame of it is lost with each"

    virtual_time.run(test())


@pytest.mark.promise("A bulk connection that stops beside others that go on costs the delay of what was on it")
def test_a_connection_that_stops_holds_up_its_own_part_only() -> None:
    async def test() -> None:
        world = World(500_000, 250e3)
        world.announce_all()
        await asyncio.sleep(6.0)
        world.channels[1].stop()
        assert await world.arrive(1e5) < 1.1 * world.bytes_needed / 250e3 + 2 * limits.STALL_SECONDS
        assert world.link.carried < 1.05 * world.bytes_needed

    virtual_time.run(test())


def test_a_version_that_was_overtaken_while_it_waited_is_never_asked_for() -> None:
    async def test() -> None:
        world = World(500_000, 250e3)
        world.announce_all()
        for version in (1, 2, 3):
            await asyncio.sleep(0.5)
            world.announce(P - 1, version)
        await world.arrive(1e5)
        assert [asked for asked in world.asked if asked[0] == P - 1] == [(P - 1, 3, 0)]

    virtual_time.run(test())


def test_a_newcomer_says_which_downloads_are_of_no_round() -> None:
    """Its first version of each fragment."""

    async def test() -> None:
        world = World(500_000, 8e6)
        world.announce_all()
        await world.arrive(1e5)
        assert world.catching_up == [True] * P
        world.announce(3, 1)
        await asyncio.sleep(5.0)
        assert world.asked[P:] == [(3, 1, 0)] and world.catching_up[P:] == [False]

    virtual_time.run(test())
