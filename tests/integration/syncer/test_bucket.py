"""Syncer processes on a store in a bucket: killed, succeeded, and cut off from it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from grpc import aio
from syncer_client import LAYOUT, Client, SyncerProcess, first_values, raw_job, turn

import tape_reader
from diloco_protocol.wire import bulk, sync_pb2
from diloco_syncer.store.open import open_store
from diloco_syncer.store.records import MAX_FILE, MergeRecord, record_name
from patience import until
from s3_service import SECRET, TOKEN, Relay, S3Service, environment, given

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture
def relay(s3: S3Service) -> Iterator[Relay]:
    relay = Relay(s3.port)
    try:
        with given(environment(relay.url)):
            yield relay
    finally:
        relay.close()


@pytest.fixture
def where() -> str:
    return f"s3://bucket/{uuid.uuid4().hex}/raw"


def a_syncer(folder: Path, where: str, pod: str, *changes: str) -> SyncerProcess:
    return SyncerProcess(folder / pod, raw_job(*changes), uri=where, env={"DILOCO_POD": pod})


async def first_learner(syncer: SyncerProcess) -> Client:
    client = Client(syncer)
    await client.join()
    await client.initialise()
    await client.ready()
    return client


async def back(before: Client, syncer: SyncerProcess) -> Client:
    """The same process, come to the next syncer with all that it holds."""
    await before.close()
    client = Client(syncer, process=before.process)
    for name in ("sequence", "base", "bases", "steps", "merged_steps", "pushed", "confirmed"):
        setattr(client, name, getattr(before, name))
    held = [sync_pb2.Held(epoch=epoch, version=version) for epoch, version in client.base]
    incarnation = before.welcome.seat.incarnation
    welcome = (await client.join(held=held, previous_incarnation=incarnation)).welcome
    assert welcome.seat.continuing, welcome
    for fragment, (_, version) in enumerate(client.base):
        await client.adopt(fragment, version)
    await client.report()
    return client


def well_behaved(*syncers: SyncerProcess) -> None:
    for syncer in syncers:
        text = syncer.text()
        assert "Traceback" not in text and SECRET not in text and TOKEN not in text


async def test_a_killed_syncer_has_a_successor_and_no_merge_is_lost(tmp_path: Path, relay: Relay, where: str) -> None:
    one, two = a_syncer(tmp_path, where, "one").start(), a_syncer(tmp_path, where, "two")
    client = await first_learner(one)
    try:
        for version in range(3):
            await turn(client, version)
        assert (await one.call("checkpoint")).ok
        await turn(client, 3)  # after the newest state: from the records alone
        await client.report()
        bases = [values.copy() for values in client.bases]
        one.kill()
        two.start()
        assert two.addresses["epoch"] == 2
        assert two.status()["versions"] == [4, 4]
        client = await back(client, two)
        assert client.base == [(2, 4), (2, 4)]
        for fragment in range(len(LAYOUT)):
            assert np.array_equal(client.bases[fragment], bases[fragment])
        await turn(client, 4)
        await client.report()
        # Two steps a turn; of the first fragment the last one is not merged yet, half of a step's tokens.
        expected = {"trained": 1000, "merged": 950, "pending": 50, "dropped": 0}
        await until(lambda: two.status()["tokens"] == expected)  # the report is on its way
        assert two.terminate() == 0
    finally:
        await client.close()
        one.stop()
        two.stop()
    store = open_store(where)
    assert tape_reader.verify(store) == 10
    assert [(line["fragment"], line["version"]) for line in tape_reader.read(store)] == [
        (fragment, version) for version in range(1, 6) for fragment in range(2)
    ]
    for fragment in range(len(LAYOUT)):
        name = record_name(fragment, 5)
        record = MergeRecord.unpack(store.read(name, MAX_FILE), name)
        assert np.isfinite(record.theta).all() and record.theta.shape == first_values(fragment).shape
    well_behaved(one, two)


async def test_the_older_of_two_syncers_gives_way(tmp_path: Path, relay: Relay, where: str) -> None:
    one, two = a_syncer(tmp_path, where, "one").start(), a_syncer(tmp_path, where, "two")
    client = await first_learner(one)
    try:
        await turn(client, 0)
        two.start()
        assert two.addresses["epoch"] == 2
        # The older one finds out when it would make a merge durable, and makes none.
        await client.train(1)
        pull = await client.pulled(0, 1)
        with contextlib.suppress(aio.AioRpcError, bulk.TransferError):  # it may stop before it has answered
            await client.send(client.push(0, pull.round))
        assert await asyncio.to_thread(one.wait) == 3
        assert two.status()["versions"] == [1, 1]
        # Started again, as a kubelet does that nobody reaches, it leaves the store alone.
        one.launch()
        assert await asyncio.to_thread(one.wait) == 3
        assert "pod two, which came after this one" in one.text()
        client = await back(client, two)
        await turn(client, 1)
        await client.report()
        status = two.status()
        assert status["versions"] == [2, 2] and status["epoch"] == 2
        # Five steps; the work that the older one did not merge was merged by the newer.
        assert status["tokens"] == {"trained": 500, "merged": 450, "pending": 50, "dropped": 0}
        assert two.terminate() == 0
    finally:
        await client.close()
        one.stop()
        two.stop()
    store = open_store(where)
    assert tape_reader.verify(store) == 4
    assert len(store.list("epochs")) == 2
    well_behaved(one, two)


async def test_many_that_start_at_once_have_one_winner(tmp_path: Path, relay: Relay, where: str) -> None:
    syncers = [a_syncer(tmp_path, where, f"pod-{n}") for n in range(3)]
    try:
        for syncer in syncers:
            syncer.launch()
        await asyncio.to_thread(lambda: [syncer.await_serving() for syncer in syncers])
        epochs = [syncer.addresses["epoch"] for syncer in syncers]
        assert sorted(epochs) == [1, 2, 3]
        newest = syncers[epochs.index(3)]
        client = await first_learner(newest)
        await turn(client, 0)
        assert newest.status()["versions"] == [1, 1]
        await client.close()
    finally:
        for syncer in syncers:
            syncer.stop()
    well_behaved(*syncers)


async def test_merges_wait_while_the_bucket_is_away_and_go_on(tmp_path: Path, relay: Relay, where: str) -> None:
    syncer = a_syncer(tmp_path, where, "one").start()
    client = await first_learner(syncer)
    try:
        await turn(client, 0)
        relay.cut()
        await client.train(1)
        pull = await client.pulled(0, 1)
        assert (await client.send(client.push(0, pull.round))).accepted
        await until(lambda: syncer.status()["store_problem"])
        began = time.monotonic()
        status = syncer.status()
        assert f"127.0.0.1:{relay.port} cannot be reached" in status["message"], status["message"]
        assert "merges wait" in status["message"] and where in status["message"]
        assert status["versions"] == [1, 1] and status["phase"] == "training"
        assert b"cannot be reached" in syncer.get("/healthz")
        await until(lambda: "cannot be reached" in client.of_kind("phase")[-1].message)
        await asyncio.sleep(1)
        assert syncer.status()["versions"] == [1, 1]
        relay.mend()
        assert (await asyncio.wait_for(client.adopt(0, 2), 30)).merged_sequence == 2
        await until(lambda: not syncer.status()["store_problem"])
        print(f"went on {time.monotonic() - began:.1f} s after it said so")
        # The answer to a merge's record is lost: it is there, and counts once.
        await client.train(1)
        pull = await client.pulled(1, 1)
        relay.lose_next_answer(and_cut=True)
        assert (await client.send(client.push(1, pull.round))).accepted
        await until(lambda: syncer.status()["store_problem"])
        relay.mend()
        await asyncio.wait_for(client.adopt(1, 2), 30)
        await turn(client, 2)
        await client.report()
        tokens = syncer.status()["tokens"]
        assert tokens["dropped"] == 0 and tokens["trained"] == tokens["merged"] + tokens["pending"]
        assert syncer.terminate() == 0
    finally:
        await client.close()
        syncer.stop()
    assert tape_reader.verify(open_store(where)) == 6
    well_behaved(syncer)


async def test_a_bucket_that_stays_away_is_exit_4(tmp_path: Path, relay: Relay, where: str) -> None:
    syncer = a_syncer(tmp_path, where, "one")
    relay.cut()
    syncer.launch()
    try:
        assert await asyncio.to_thread(syncer.wait) == 4
    finally:
        syncer.stop()
    last = json.loads(syncer.text().splitlines()[-1])["message"]
    assert f"the store cannot be used: store {where}: 127.0.0.1:{relay.port} cannot be reached" in last
    well_behaved(syncer)
