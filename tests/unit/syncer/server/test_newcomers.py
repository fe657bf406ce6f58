"""What newcomers' downloads do to rounds at the paper's size, in virtual time: the syncer's own side of downloads, on a
hub's link that all calls share by turns.

Five billion parameters in 24 fragments, in bfloat16; eight learners, each of which takes a version over four
connections, one each second; the hub sends 5 GB (40 Gbit) a second. So a version, 417 MB for each of eight, takes 0.67
s. A newcomer takes 10 GB, and its peer's state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from diloco_protocol.common.tasks import cancel_tasks
from diloco_protocol.wire import bulk, limits, sync_pb2
from diloco_protocol.wire.progress import Progress
from diloco_protocol.wire.records import Payload
from diloco_syncer.runtime.active_downloads import ActiveDownloads
from diloco_syncer.runtime.global_model import Broadcast
from diloco_syncer.server import downloads
from diloco_syncer.server.callers import Caller
from diloco_syncer.server.downloads import Downloads
from diloco_syncer.server.tls.connection_limits import Peer
from operator_simulation import virtual_time
from virtual_link import Link

pytestmark = pytest.mark.promise(
    "Newcomers, however many join at once, make rounds at most a tenth longer; those that joined first come first"
)
P, LEARNERS, LANES = 24, 8, 4
FRAGMENT = 2 * 5_000_000_000 // P  # bytes
STATE_BYTES = 4 << 30
RATE = 5e9
ALONE = LEARNERS * FRAGMENT / RATE  # seconds of a version's downloads
FULL, STATE = sync_pb2.DownloadRequest.FULL, sync_pb2.DownloadRequest.PEER_STATE


class Sink:
    """A call's way to its reader, a piece at a time."""

    is_over = is_silent = False

    def __init__(self, link: Link) -> None:
        self._link = link

    async def reply(self, reply: sync_pb2.BulkReply) -> None:
        assert reply.download.found

    async def write(self, part: memoryview, note: Callable[[int], None]) -> None:
        await self._link.carry(self, len(part))  # type: ignore[arg-type]
        note(len(part))


class Hub:
    """Who has joined, and what they have. ``size``: of a fragment; ``came``: the newcomers that have their models, in
    the order in which they had them."""

    def __init__(self, elements: np.ndarray[Any, Any], state: np.ndarray[Any, Any]) -> None:
        self.link = Link(RATE)
        self.size = FRAGMENT
        self.came: list[str] = []
        broadcast = Broadcast(0, 0, elements, Payload("bfloat16", elements.nbytes, 0))
        self._sessions: dict[str, Caller] = {}

        async def find_reader(request: sync_pb2.DownloadRequest, peer: Peer, called: str) -> Caller:
            return self._sessions[request.process]

        async def find_other(request: sync_pb2.DownloadRequest) -> Any:
            return state, (), ""

        callers: Any = SimpleNamespace(
            find_reader=find_reader, count_sent=lambda caller, count: None, note_sent=lambda request: None
        )
        model: Any = SimpleNamespace(downloads=ActiveDownloads(), find_broadcast=lambda fragment, version: broadcast)
        self.downloads = Downloads(callers, model, epoch=1, find_other=find_other)
        self._lanes: dict[str, asyncio.Semaphore] = {}
        self.learners = [f"learner-{n}" for n in range(LEARNERS)]
        for name in self.learners:
            self.join(name)

    def join(self, process: str) -> None:
        self._sessions[process] = Caller(len(self._sessions) + 1, "", sent=Progress())
        self._lanes[process] = asyncio.Semaphore(LANES)

    async def fetch(self, process: str, fragment: int, version: int, what: Any = FULL) -> None:
        """Download one payload as the worker does."""

        async def fetch_part(offset: int, count: int) -> None:
            async with self._lanes[process]:
                request = sync_pb2.DownloadRequest(
                    format=limits.FORMAT,
                    process=process,
                    what=what,
                    epoch=1,
                    fragment=fragment,
                    version=version,
                    offset=offset,
                    bytes=count,
                    catching_up=what == FULL and version == 0,
                )
                await self.downloads.serve(request, Sink(self.link), Peer())  # type: ignore[arg-type]

        await asyncio.gather(
            *(fetch_part(*part) for part in bulk.split(STATE_BYTES if what == STATE else self.size, LANES))
        )

    async def make_rounds(self, until: Callable[[], bool]) -> list[float]:
        """A version each second, or when the one before is everywhere; the seconds that each took."""
        loop, took = asyncio.get_running_loop(), list[float]()
        while not until():
            began, number = loop.time(), len(took)
            await asyncio.gather(*(self.fetch(name, number % P, 1 + number // P) for name in self.learners))
            took.append(loop.time() - began)
            await asyncio.sleep(max(0.0, 1.0 - took[-1]))
        return took

    async def bring_model(self, process: str) -> None:
        """A newcomer's whole model: four fragments at a time."""
        at_once = asyncio.Semaphore(LANES)

        async def fetch(fragment: int) -> None:
            async with at_once:
                await self.fetch(process, fragment, 0)

        await asyncio.gather(*map(fetch, range(P)))
        self.came.append(process)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setattr(downloads, "time", virtual_time.Clock())
    for name in ("PIECE_BYTES", "NEWCOMERS_PIECE_BYTES"):  # a sixteenth as many, for the test's own time
        monkeypatch.setattr(downloads, name, 16 * getattr(downloads, name))
    return Hub(np.zeros(FRAGMENT, np.uint8), np.zeros(STATE_BYTES, np.uint8))


def measure_rounds(hub: Hub, bring: Callable[[], Any], newcomers: int) -> list[float]:
    """How long rounds take, over what they take alone, while ``bring()`` goes on, at most until so many ``came``."""

    async def measure() -> list[float]:
        bringing = asyncio.ensure_future(bring())
        took = await hub.make_rounds(lambda: bringing.done() or len(hub.came) >= newcomers)
        await cancel_tasks([bringing])
        return [seconds / ALONE for seconds in took]

    took: list[float] = virtual_time.run(measure())
    return took


def test_rounds_alone(hub: Hub) -> None:
    took = measure_rounds(hub, lambda: asyncio.sleep(4.9), 1)
    assert took == pytest.approx([1.0] * 5, rel=1e-3)


def test_a_newcomers_model_costs_rounds_less_than_a_tenth(hub: Hub) -> None:
    """Of the link's third that rounds leave, and its share of theirs, it has 10 GB within seven of them."""
    hub.join("newcomer")
    took = measure_rounds(hub, lambda: hub.bring_model("newcomer"), 1)
    assert max(took) < 1.1 and len(took) <= 7


def test_a_peers_state_costs_rounds_less_than_a_tenth(hub: Hub) -> None:
    hub.join("newcomer")
    took = measure_rounds(hub, lambda: hub.fetch("newcomer", 0, 0, STATE), 1)
    assert max(took) < 1.1 and len(took) <= 4


def join_many(hub: Hub) -> list[str]:
    """64 newcomers, the oldest first."""
    names = [f"newcomer-{n}" for n in range(64)]
    for name in names:
        hub.join(name)
    return names


def test_a_storm_costs_rounds_less_than_a_tenth(hub: Hub) -> None:
    """Of 64 that ask at once, the youngest first, until the first four have their models."""
    names = join_many(hub)
    took = measure_rounds(hub, lambda: asyncio.gather(*map(hub.bring_model, reversed(names))), 4)
    assert max(took) < 1.1
    assert set(hub.came) == set(names[:4])


def test_those_that_joined_first_have_their_models_first(hub: Hub) -> None:
    """Four at a time, although the youngest ask first."""
    names, hub.size = join_many(hub), 64 << 20

    async def bring() -> None:
        await asyncio.gather(*map(hub.bring_model, reversed(names)))

    virtual_time.run(bring())
    assert len(hub.came) == 64
    assert all(abs(place - names.index(name)) < 4 for place, name in enumerate(hub.came))
