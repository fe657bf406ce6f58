"""A syncer on a disk that fills up, one that is suspended and resumed, one whose predecessor wrote last."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpc import aio
from syncer_client import LAYOUT, Client, SyncerProcess, first_values, raw_job, turn

import tape_reader
from diloco_protocol.wire import bulk, sync_pb2
from diloco_syncer.store.directory import DirectoryStore
from diloco_syncer.store.records import MergeRecord, record_name
from patience import until

# One event loop for all: gRPC's poller does not outlive the loop that it was made in.
pytestmark = [pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mount], capture_output=True, timeout=10)
    if made.returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", mount], check=True, timeout=10)


async def first_learner(syncer: SyncerProcess) -> Client:
    client = Client(syncer)
    await client.join()
    await client.initialise()
    await client.ready()
    return client


def fill(disk: Path) -> Path:
    """Take all space that is left; returns the file that holds it."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file:
        for size in (4096, 512, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return filler


async def test_a_full_disk_makes_merges_wait_and_loses_nothing(tmp_path: Path, small_disk: Path) -> None:
    syncer = SyncerProcess(tmp_path / "syncer", raw_job(), store=small_disk / "store").start()
    client = await first_learner(syncer)
    try:
        await turn(client, 0)
        filler = fill(small_disk)
        await client.train(1)
        pull = await client.pulled(0, 1)
        assert (await client.send(client.push(0, pull.round))).accepted
        await until(lambda: syncer.status()["store_problem"])
        # It goes on serving, says what is wrong, and nothing half-written lies about.
        status = syncer.status()
        assert "disk full" in status["message"] and "merges wait" in status["message"]
        assert status["versions"] == [1, 1]
        # Nothing to kill it for: learners need it, and it goes on by itself.
        assert b"disk full" in syncer.get("/healthz") and b"disk full" in syncer.get("/readyz")
        await until(lambda: "disk full" in client.of_kind("phase")[-1].message)
        await client.report()
        assert not (syncer.store / record_name(0, 2)).exists()
        await until(lambda: not list((syncer.store / "records").glob(".*")))  # but for the moment of a try
        filler.unlink()
        assert (await client.adopt(0, 2)).merged_sequence == 2
        await until(lambda: not syncer.status()["store_problem"])
        assert "disk full" not in syncer.status()["message"]
        await client.train(1)
        await client.merge_once(1, 1)
        assert syncer.get("/healthz") == b"ok\n"
        # Full again in the middle of a checkpoint: it waits, and the store stays whole.
        filler = fill(small_disk)
        waiting = asyncio.create_task(syncer.call("checkpoint"))
        await until(lambda: syncer.status()["store_problem"])
        assert syncer.status()["phase"] == "training"
        filler.unlink()
        assert (await waiting).ok
        await client.report()
        tokens = syncer.status()["tokens"]
        assert tokens["dropped"] == 0 and tokens["trained"] == tokens["merged"] + tokens["pending"]
    finally:
        await client.close()
        syncer.stop()
    assert tape_reader.verify(DirectoryStore(syncer.store)) == 4
    assert "Traceback" not in syncer.text()


async def test_a_disk_that_is_full_from_the_start_is_exit_4(tmp_path: Path, small_disk: Path) -> None:
    fill(small_disk)
    syncer = SyncerProcess(tmp_path / "syncer", raw_job(), store=small_disk / "store")
    syncer.launch()
    try:
        assert syncer.wait() == 4
    finally:
        syncer.stop()
    assert "disk full" in syncer.text() or "No space left" in syncer.text()
    assert "Traceback" not in syncer.text()


async def test_suspended_with_offers_and_an_optimizer_state_and_resumed(tmp_path: Path) -> None:
    job = raw_job("sync.quorum=2")
    syncer = SyncerProcess(tmp_path / "syncer", job).start()
    a = await first_learner(syncer)
    b = Client(syncer, 1)
    state = np.arange(1000, dtype=np.uint8)
    try:
        await b.join()
        await b.ready()
        await a.train(1)
        await b.train(1)
        assert (await syncer.call("announce", phase="suspended", message="for the night")).ok
        await until(lambda: a.of_kind("peer_state_request") or b.of_kind("peer_state_request"))
        giver = a if a.of_kind("peer_state_request") else b
        transfer = giver.of_kind("peer_state_request")[0].transfer
        what = sync_pb2.PeerState(transfer=transfer, versions=[sync_pb2.Held(epoch=1, version=0)] * 2)
        assert (await giver.upload(giver.header(peer_state=what), state)).accepted
        # Only one of them offers: short of K, its work stays pending in the store.
        for fragment in range(len(LAYOUT)):
            assert (await a.send(a.push(fragment, 0))).accepted
        for client in (a, b):
            await client.say(drained=sync_pb2.Drained())
        await until(lambda: a.of_kind("phase")[-1].name == sync_pb2.PHASE_SUSPENDED)
        for client in (a, b):
            await client.close()
        assert syncer.wait() == 0
        report = json.loads((syncer.store / "report.json").read_text())
        assert report["outcome"] == "interrupted"
        assert report["tokens"] == {"trained": 200, "merged": 0, "pending": 100, "dropped": 100}
        assert len(list((syncer.store / "offers").iterdir())) == 2

        syncer.start()
        assert syncer.addresses["epoch"] == 2
        a, b = Client(syncer, 0), Client(syncer, 1)
        for client in (a, b):
            welcome = (await client.join()).welcome
            assert welcome.phase.name == sync_pb2.PHASE_WAITING and welcome.optimizer_bytes == 1000
            await client.ready()
        what = sync_pb2.DownloadRequest.OPTIMIZER
        request = sync_pb2.DownloadRequest(job="raw", process=a.process, what=what)
        _, data = await a.download(request)
        assert np.array_equal(data, state)
        # The offer of the earlier life and the newcomer's push are merged together.
        await b.train(2)
        await a.train(2)
        pull = await b.pulled(0, 0)
        assert (await b.send(b.push(0, pull.round))).accepted
        await until(lambda: syncer.status()["versions"][0] == 1)
        newest = DirectoryStore(syncer.store)
        record = MergeRecord.unpack(newest.read(record_name(0, 1), 1 << 20), "x")
        assert [r.header.round == 0 for r in record.responders].count(True) == 1
        tokens = syncer.status()["tokens"]
        assert tokens["trained"] == tokens["merged"] + tokens["pending"] + tokens["dropped"]
    finally:
        for client in (a, b):
            await client.close()
        syncer.stop()


async def test_a_record_that_a_predecessor_wrote_late_is_set_aside(tmp_path: Path) -> None:
    syncer = SyncerProcess(tmp_path / "syncer", raw_job()).start()
    client = await first_learner(syncer)
    try:
        syncer.terminate()
        await client.close()
        syncer.start()
        client = Client(syncer)
        assert (await client.join()).welcome.epoch == 2
        await client.ready()
        store = DirectoryStore(syncer.store)
        await until(lambda: any("/e0000000002-" in name for name in store.list("state")))
        # What the syncer of epoch 1 was still writing arrives in the store only now.
        late = first_values(0) + 1
        record = MergeRecord(job="raw", epoch=1, fragment=0, version=1, theta=late, number=1)
        record.outer = {"merges": np.array([1], np.int64)}
        store.create(record_name(0, 1), *record.pack())
        await client.train(1)
        pull = await client.pulled(0, 0)
        with contextlib.suppress(aio.AioRpcError, bulk.TransferError):  # it may begin again before it has answered
            assert (await client.send(client.push(0, pull.round))).accepted
        # It finds the record, begins again from the store under a higher epoch, on the same ports.
        await until(lambda: client.ended)
        await client.close()
        assert syncer.process is not None and syncer.process.poll() is None
        client = Client(syncer)
        async with asyncio.timeout(20):
            while True:
                try:
                    welcome = (await client.join()).welcome
                    break
                except Exception:
                    await asyncio.sleep(0.1)
        assert welcome.epoch == 3
        await client.ready()
        assert client.base[0] == (3, 0) and np.array_equal(client.bases[0], first_values(0))
        assert len(store.list("discarded")) == 1
        await client.train(1)
        pull = await client.pulled(0, 0)
        assert (await client.send(client.push(0, pull.round))).accepted
        assert (await client.adopt(0, 1)).merged_sequence and not np.array_equal(client.bases[0], late)
    finally:
        await client.close()
        syncer.stop()
    assert "Traceback" not in syncer.text()


async def test_another_job_in_the_store_and_a_port_in_use_are_exit_2(tmp_path: Path) -> None:
    first = SyncerProcess(tmp_path / "one", raw_job()).start()
    try:
        second = SyncerProcess(tmp_path / "two", raw_job(), store=first.store)
        text = (second.folder / "job.json").read_text()
        (second.folder / "job.json").write_text(text.replace('"raw"', '"other"'))
        second.launch()
        assert second.wait() == 2
        assert "holds the job 'raw', not 'other'" in second.text() and "Traceback" not in second.text()
        third = SyncerProcess(tmp_path / "three", raw_job("seed=7"), store=first.store)
        third.launch()
        assert third.wait() == 2
        assert "seed may not change" in third.text() and "Traceback" not in third.text()
        for option, name in (("--listen", "sync"), ("--control", "control"), ("--http", "http")):
            fourth = SyncerProcess(tmp_path / name, raw_job())
            fourth.launch(option, first.addresses[name])
            assert fourth.wait() == 2
            assert first.addresses[name] in fourth.text() and "Traceback" not in fourth.text()
    finally:
        first.stop()


async def test_a_base_is_taken_only_as_it_was_asked_for(tmp_path: Path) -> None:
    syncer = SyncerProcess(tmp_path / "syncer", raw_job()).start()
    client = await first_learner(syncer)
    try:
        await turn(client, 0)
        await client.train(1)
        await client.merge_once(0, 1)
        request = sync_pb2.DownloadRequest(
            job="raw", process=client.process, what=sync_pb2.DownloadRequest.FULL, fragment=0, epoch=1, version=2
        )
        header, values = await client.download(request)
        syncer.kill()
        await client.close()
        (syncer.store / record_name(0, 2)).unlink()
        syncer.start()

        async def back() -> Client:
            again = Client(syncer, process=client.process)
            held = [sync_pb2.Held(epoch=1, version=2), sync_pb2.Held(epoch=1, version=1)]
            await again.join(held=held, previous_incarnation=1)
            return again

        def base(**changes: Any) -> sync_pb2.Base:
            fields: dict[str, Any] = {
                "fragment": 0,
                "epoch": 1,
                "version": 2,
                "encoding": "float32",
                "receipt": header.receipt,
            }
            return sync_pb2.Base(**(fields | changes))

        client = await back()
        assert [a.fragment for a in client.welcome.fragments] == [1], "it holds a newer version of the other"
        await until(lambda: client.of_kind("base_request"))
        asked = client.of_kind("base_request")[0]
        assert (asked.fragment, asked.epoch, asked.version) == (0, 1, 2)
        assert "lost data" in syncer.status()["message"]
        for what, payload, word in (
            (base(fragment=1), values, "its tag is wrong"),
            (base(fragment=9), values, "fragment 9"),
            (base(), values[:-4], "as float32 it has"),
        ):
            reply = await client.upload(client.header(base=what), payload)
            assert (reply.accepted, reply.reason) == (False, "base") and word in reply.message
        # What cannot be used is given up, and the older version is announced.
        await until(lambda: [a for a in client.of_kind("announcement") if (a.fragment, a.version) == (0, 1)])
        reply = await client.upload(client.header(base=base()), values)
        assert (reply.accepted, reply.reason) == (False, "base")
        assert not (syncer.store / record_name(0, 2)).exists()
        await client.close()
        # Given up once, it is another history's, also in the next life.
        syncer.kill()
        syncer.start()
        client = await back()
        assert [a.fragment for a in client.welcome.fragments] == [0, 1]
        assert not client.of_kind("base_request")
    finally:
        await client.close()
        syncer.stop()
    assert "Traceback" not in syncer.text()
