"""What memory a syncer takes, by its own ``peak_rss_bytes``, while eight learners leave, and after a restart."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import syncer_client
from syncer_client import Client, SyncerProcess, raw_job, serve_in_process

from diloco_protocol.arrays import codec
from diloco_protocol.arrays.layout import Layout, Tensor
from diloco_protocol.wire import sync_pb2
from diloco_syncer import startup
from diloco_syncer.runtime.driver import RESTART
from diloco_syncer.runtime.global_model import GlobalModel
from patience import until

pytestmark = [pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

LEARNERS, FRAGMENTS = 8, 16
LARGE = Layout.build([Tensor(f"w{i}", (1024, 1024), "float32", False) for i in range(FRAGMENTS)], FRAGMENTS)
FLOAT32 = 4 * LARGE.total_elements
PUSH = FLOAT32 // FRAGMENTS  # one learner's, decoded
BOUND = 3 * FLOAT32 + LEARNERS * PUSH
BESIDE = 64 << 20  # whatever the model's size: eight callers' connections and chunks, one fragment's merge
JOB = (
    f"sync.fragments={FRAGMENTS}",
    f"sync.every={FRAGMENTS}",
    f"sync.quorum={LEARNERS}",
    "sync.compression.up=int4",
    "sync.compression.down=bfloat16",
    "sync.outer.optimizer=nesterov",
    "sync.outer.lr=0.7",
    f"regions.0.learners={LEARNERS}",
    "sync.heartbeat.timeoutSeconds=600",  # these clients report, and say nothing while others push for long
)


class Learner(Client):
    """A client that keeps no parameters: what it pushes depends on its place and the fragment only."""

    def delta(self, fragment: int) -> np.ndarray[Any, Any]:
        values = np.random.default_rng([self.ordinal, fragment]).standard_normal(LARGE.elements(fragment), np.float32)
        return codec.encode(values.astype(np.float32), "int4")

    async def adopt(self, fragment: int, version: int) -> sync_pb2.Announcement:
        news = await super().adopt(fragment, version)
        self.bases[fragment] = np.zeros(0, np.float32)
        return news

    def push(self, fragment: int, round_id: int, **changes: Any) -> sync_pb2.Push:
        return super().push(fragment, round_id, **({"encoding": "int4"} | changes))

    async def offer(self, fragment: int) -> None:
        reply = await self.send(self.push(fragment, 0))
        assert reply.accepted, reply


@pytest_asyncio.fixture(loop_scope="module")
async def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[SyncerProcess, list[Learner]]]:
    """A job whose learners have version 0 and have merged every fragment once, and its syncer."""
    monkeypatch.setattr(syncer_client, "LAYOUT", LARGE)
    syncer = SyncerProcess(tmp_path / "syncer", raw_job(*JOB)).start()
    learners = [Learner(syncer, ordinal) for ordinal in range(LEARNERS)]
    try:
        for learner in learners:
            await learner.join()
        await learners[0].initialise()
        for learner in learners:
            await learner.ready()
        for fragment in range(FRAGMENTS):
            for learner in learners:
                await learner.train(1)
            await asyncio.gather(*(learner.merge_once(fragment, 0) for learner in learners))
        yield syncer, learners
    finally:
        for learner in learners:
            await learner.close()
        syncer.stop()


def peak(report: bytes | str) -> int:
    return int(json.loads(report)["syncer"]["peak_rss_bytes"])


async def suspend(syncer: SyncerProcess, learners: list[Learner]) -> None:
    """Have the job suspended; nobody has an optimizer state to give."""
    assert (await syncer.call("announce", phase="suspended", message="for the night")).ok
    await until(lambda: any(learner.of_kind("peer_state_request") for learner in learners))
    for learner in learners:
        for asked in learner.of_kind("peer_state_request"):
            await learner.say(peer_state_unavailable=sync_pb2.PeerStateUnavailable(transfer=asked.transfer))


async def leave(learners: list[Learner]) -> None:
    for learner in learners:
        await learner.say(drained=sync_pb2.Drained())
    await until(lambda: learners[-1].of_kind("phase")[-1].name == sync_pb2.PHASE_SUSPENDED)
    for learner in learners:
        await learner.close()


async def bare_process(folder: Path) -> int:
    """The memory of a syncer that has no model yet."""
    other = SyncerProcess(folder / "bare", raw_job(*JOB)).start()
    try:
        return peak(other.get("/report"))
    finally:
        other.stop()


def verify_end(syncer: SyncerProcess) -> int:
    """Everything that was offered is in the merged model, once; returns the syncer's peak."""
    assert syncer.wait() == 0
    report = (syncer.store / "report.json").read_text()
    tokens = json.loads(report)["tokens"]
    assert tokens["merged"] == tokens["trained"] == LEARNERS * (FRAGMENTS + 1) * syncer_client.TOKENS
    assert not list((syncer.store / "offers").iterdir())
    return peak(report)


@pytest.mark.promise(
    "Offers are not kept in memory: an end with eight learners, and a restart in the middle of it, stay "
    "within 3 × the parameters and one push per learner"
)
@pytest.mark.slow
async def test_a_drain_of_eight_learners_takes_no_more_memory_than_training(
    job: tuple[SyncerProcess, list[Learner]], tmp_path: Path
) -> None:
    """All but one offer everything before the last one begins: no fragment can be merged meanwhile."""
    syncer, learners = job
    bare = await bare_process(tmp_path)
    for learner in learners:
        await learner.train(1)
    await suspend(syncer, learners)
    for learner in learners:
        for fragment in range(FRAGMENTS):
            await learner.offer(fragment)
    await leave(learners)
    assert verify_end(syncer) - bare <= BOUND + BESIDE


@pytest.mark.promise(
    "Offers are not kept in memory: an end with eight learners, and a restart in the middle of it, stay "
    "within 3 × the parameters and one push per learner"
)
@pytest.mark.slow
async def test_a_restart_in_the_middle_of_a_drain_reads_no_offer_into_memory(
    job: tuple[SyncerProcess, list[Learner]], tmp_path: Path
) -> None:
    syncer, learners = job
    bare = await bare_process(tmp_path)
    for learner in learners:
        await learner.train(1)
    await suspend(syncer, learners)
    for learner in learners[:-1]:
        for fragment in range(FRAGMENTS):
            await learner.offer(fragment)
    syncer.kill()
    syncer.start()
    assert len(list((syncer.store / "offers").iterdir())) == (LEARNERS - 1) * FRAGMENTS
    assert peak(syncer.get("/report")) - bare <= 2 * FLOAT32 + BESIDE
    for index, learner in enumerate(learners):
        learners[index] = await come_back(syncer, learner)
    await suspend(syncer, learners)
    for fragment in range(FRAGMENTS):
        await learners[-1].offer(fragment)
    await leave(learners)
    assert verify_end(syncer) - bare <= BOUND + BESIDE


async def come_back(syncer: SyncerProcess, before: Learner) -> Learner:
    """The same process in a new session."""
    after = Learner(syncer, before.ordinal, before.process)
    held = [sync_pb2.Held(epoch=epoch, version=version) for epoch, version in before.base]
    seat = before.welcome.seat
    welcome = (await after.join(held=held, previous_incarnation=seat.incarnation, tenure=seat.incarnation)).welcome
    assert welcome.seat.continuing
    welcome.seat.slot_step = 0  # this client counts from its tenure's begin
    for name in ("steps", "sequence", "merged_steps", "confirmed", "base", "pushed"):
        setattr(after, name, getattr(before, name))
    await before.close()
    await after.report()
    return after


@pytest.mark.promise("A restarting syncer holds one model, not two")
async def test_a_syncer_that_begins_again_holds_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The life that is over is gone before the next one reads the store."""
    models: list[weakref.ref[GlobalModel]] = []
    alive: list[int] = []
    restore = startup.restore

    def restored(options: startup.Options, loop: asyncio.AbstractEventLoop, *others: Any) -> Any:
        alive.append(sum(model() is not None for model in models))
        made = restore(options, loop, *others)
        models.append(weakref.ref(made[0].model))
        again = len(models) < 3
        loop.call_soon_threadsafe(loop.call_later, 0.1, made[0].driver.stop, RESTART if again else 0, "a test")
        return made

    monkeypatch.setattr(startup, "restore", restored)
    assert await serve_in_process(tmp_path / "store") == 0
    assert alive == [0, 0, 0]
