"""A syncer whose fragments are shared by shards, processes of their own, under kills of each and of the syncer."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from sharded_syncer import PATIENT, TWO, be_patient, check_books, digests, first_learner, rejoin, said
from syncer_client import LAYOUT, Client, SyncerProcess, raw_job, turn

from diloco.doctor.links import check_links
from diloco_protocol.vocabulary import SyncerExit
from diloco_protocol.wire import sync_pb2
from diloco_protocol.wire.bulk import TransferError
from diloco_syncer.audit.store_audit import audit_store
from diloco_syncer.store.directory import DirectoryStore
from diloco_syncer.store.records import MergeRecord, record_name
from parties import Parties
from patience import until

# One event loop for all: gRPC's poller does not outlive the loop that it was made in.
pytestmark = [pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


def shard_process(syncer: SyncerProcess, index: int) -> psutil.Process:
    assert syncer.process is not None
    for child in psutil.Process(syncer.process.pid).children():
        words = child.cmdline()
        if "--shard" in words and words[words.index("--shard") + 1] == str(index):
            return child
    raise LookupError(index)


def kill_shard(syncer: SyncerProcess, index: int) -> None:
    process = shard_process(syncer, index)
    process.kill()
    process.wait()


async def keep_killing(syncer: SyncerProcess, index: int) -> None:
    while True:
        with suppress(LookupError, psutil.Error):
            shard_process(syncer, index).kill()
        await asyncio.sleep(0.05)


async def send_again(client: Client, push: sync_pb2.Push) -> sync_pb2.UploadReply:
    """Send a push until its shard answers."""
    while True:
        try:
            return await client.send(push)
        except TransferError:
            await asyncio.sleep(0.05)


@pytest.mark.promise("The same pushes give the same bits with any number of shards")
async def test_two_shards_make_the_bits_of_one_and_their_number_may_change_at_any_start(tmp_path: Path) -> None:
    made: dict[str, list[str]] = {}
    for name, counts in {"one": (1, 1, 1), "two": (2, 1, 2)}.items():
        syncer = SyncerProcess(tmp_path / name, raw_job())
        client: Client | None = None
        try:
            for life, shards in enumerate(counts):
                syncer = SyncerProcess(tmp_path / name, raw_job(f"syncer.shards={shards}"), syncer.store).start()
                if client is None:
                    client = await first_learner(syncer)
                else:
                    client = await rejoin(client, syncer)
                assert len(client.shards()) == (0 if shards == 1 else shards)
                await turn(client, 2 * life)
                await turn(client, 2 * life + 1)
                tokens = syncer.status()["tokens"]
                await client.close()
                if life == 1:
                    syncer.kill()
                else:
                    assert syncer.terminate() == 0
        finally:
            syncer.stop()
        check_books(syncer, tokens)
        made[name] = digests(syncer.store)
    assert made["one"] == made["two"] and len(made["one"]) == 12


@pytest.mark.promise("A lost shard stops the merges of its fragments only, is told by name, and costs no token")
async def test_a_killed_shard_stops_its_fragments_alone_and_is_made_good(tmp_path: Path) -> None:
    syncer = SyncerProcess(tmp_path / "syncer", raw_job(TWO, "sync.quorum=2")).start()
    clients: list[Any] = []
    try:
        first = await first_learner(syncer)
        clients.append(first)
        second = Client(syncer, 1)
        clients.append(second)
        await second.join()
        await second.ready()
        for fragment in range(len(LAYOUT)):
            await both(clients, fragment, 0)
        # A push of one of them is taken, and lost with the shard that has it.
        await both(clients, 0, 1)
        await train(clients)
        pull = await first.pulled(1, 1)
        assert (await first.send(first.push(1, pull.round))).accepted
        pulls = len(first.of_kind("pull"))
        held = next(index for index, shard in enumerate(first.shards()) if 1 in shard.fragments)
        kill_shard(syncer, held)
        await until(lambda: said(syncer, f"shard {held} is lost"))
        for version in (2, 3):  # the other fragment goes on
            await both(clients, 0, version)
            await train(clients)
        await until(lambda: said(syncer, f"shard {held} is ready; of the updates that it had 1 are lost"))
        await until(lambda: any(p.fragment == 1 for p in first.of_kind("pull")[pulls:]))
        for client in clients:
            asked = [p for p in client.of_kind("pull") if p.fragment == 1][-1]
            assert (await send_again(client, client.push(1, asked.round))).accepted
        for client in clients:
            await client.adopt(1, 2)
            await client.report()
        await until(lambda: syncer.status()["versions"] == [4, 2])
        await until(lambda: syncer.status()["tokens"]["dropped"] == 0)
        tokens = syncer.status()["tokens"]
    finally:
        for client in clients:
            await client.close()
        syncer.stop()
    check_books(syncer, tokens)


async def train(clients: list[Client]) -> None:
    for client in clients:
        await client.train(1)


async def both(clients: list[Client], fragment: int, version: int) -> None:
    """One merge of a fragment, with a push of each."""
    await train(clients)
    for client in clients:
        pull = await client.pulled(fragment, version)
        reply = await client.send(client.push(fragment, pull.round))
        assert reply.accepted, reply
    for client in clients:
        await client.adopt(fragment, version + 1)


@pytest.mark.promise("An accepted offer survives the loss of its shard")
async def test_an_offer_outlives_its_shard(tmp_path: Path) -> None:
    syncer = SyncerProcess(tmp_path / "syncer", raw_job(TWO, "sync.quorum=1")).start()
    client = None
    try:
        client = await first_learner(syncer)
        await turn(client, 0)
        await client.train(2)
        assert (await syncer.call("announce", phase="suspended", message="for a test")).ok
        await until(lambda: client.of_kind("peer_state_request"))
        asked = client.of_kind("peer_state_request")[0].transfer
        await client.say(peer_state_unavailable=sync_pb2.PeerStateUnavailable(transfer=asked))
        for fragment in range(len(LAYOUT)):
            assert (await client.send(client.push(fragment, 0))).accepted
        for index in range(2):
            kill_shard(syncer, index)
        await until(lambda: said(syncer, "is ready; of the updates that it had 0 are lost") == 2)
        await client.say(drained=sync_pb2.Drained())
        await until(lambda: client.of_kind("phase")[-1].name == sync_pb2.PHASE_SUSPENDED)
        await client.close()
        await until(lambda: syncer.exited)
        assert syncer.wait() == 0
        assert (syncer.store / record_name(0, 2)).exists() and (syncer.store / record_name(1, 2)).exists()
    finally:
        if client is not None:
            await client.close()
        syncer.stop()
    assert audit_store(DirectoryStore(syncer.store), "raw").holds


@pytest.mark.promise("A fault that no restart mends ends a syncer with the same words and status with any shards")
async def test_an_outer_state_that_does_not_fit_ends_the_syncer_as_it_does_without_shards(tmp_path: Path) -> None:
    nesterov = "sync.outer.optimizer=nesterov"
    syncer = SyncerProcess(tmp_path / "syncer", raw_job(nesterov)).start()
    client = None
    try:
        client = await first_learner(syncer)
        await turn(client, 0)
        await client.close()
        assert syncer.terminate() == 0
    finally:
        if client is not None:
            await client.close()
        syncer.stop()
    for fragment in range(len(LAYOUT)):
        name = record_name(fragment, 1)
        record = MergeRecord.unpack((syncer.store / name).read_bytes(), name)
        record.outer["momentum"] = np.zeros(3, np.float32)
        DirectoryStore(syncer.store).replace(name, *record.pack())
    ends: dict[int, str] = {}
    for shards in (1, 2, 3):  # the third has no fragment
        job = raw_job(nesterov, f"syncer.shards={shards}")
        wrong = SyncerProcess(tmp_path / str(shards), job, syncer.store)
        wrong.launch()
        try:
            await asyncio.to_thread(wrong.wait)
            assert wrong.wait() == SyncerExit.CONFIGURATION
            ends[shards] = wrong.text().splitlines()[-1].partition("outer optimizer")[2]
        finally:
            wrong.stop()
    assert ends[1].startswith(" nesterov: momentum: float32 of shape (3,)")
    assert len(set(ends.values())) == 1, ends


async def test_a_shard_that_fails_again_and_again_is_named_with_why_and_serves_when_it_can(tmp_path: Path) -> None:
    syncer = SyncerProcess(tmp_path / "syncer", raw_job(TWO, PATIENT)).start()
    client = None
    try:
        client = await first_learner(syncer)
        words = "shard 1 of the syncer has failed 3 times in a row: signal 9 ended its process; it is tried again"
        while words not in syncer.text():
            await until(lambda: syncer.status()["shards"][1]["serving"])
            kill_shard(syncer, 1)
            await until(lambda: not syncer.status()["shards"][1]["serving"])
        row = syncer.status()["shards"][1]
        assert row["failures"] >= 3 and row["message"] == "signal 9 ended its process"
        assert [event["message"] for event in syncer.status()["events"] if words in event["message"]]
        await until(lambda: syncer.status()["shards"][1]["serving"])
        await turn(client, 0)
    finally:
        if client is not None:
            await client.close()
        syncer.stop()
    assert "Traceback" not in syncer.text()


@pytest.mark.promise("`diloco doctor` measures round trip and rate to the syncer and each of its shards")
async def test_the_doctor_measures_the_way_to_each_shard(tmp_path: Path) -> None:
    parties = Parties(tmp_path / "pki", "raw")
    syncer = SyncerProcess(tmp_path / "syncer", raw_job(TWO, PATIENT)).start()
    try:
        await (await first_learner(syncer)).close()
        assert syncer.terminate() == 0
        syncer.start("--credentials", str(parties.syncer()))
        overrides = [
            "regions=[{name: local, cluster: eu, learners: 2}]",
            "syncer.cluster=hub",
            f"syncer.endpoint={{type: External, address: '{syncer.addresses['sync']}'}}",
            "syncer.tls={secretName: a}",
            "learners.credentials={secretName: b}",
        ]
        job, mine = syncer.folder / "job.json", parties.learner()

        def look() -> dict[str, Any]:
            return {one.about: one for one in check_links(job, overrides, mine, None)}

        found = await asyncio.to_thread(look)
        assert found["TLS"].level == "ok", found
        for about in ("way to the syncer", "way to shard 0", "way to shard 1"):
            assert found[about].level == "ok", found[about]
            assert re.fullmatch(
                "round trip [0-9.]+ m?s; one connection carries [0-9.]+ [kMG]?bit/s up and [0-9.]+ [kMG]?bit/s down,"
                " and a learner has four for each direction",
                found[about].said,
            ), found[about].said
        kill_shard(syncer, 1)
        killer = asyncio.create_task(keep_killing(syncer, 1))  # else it may be back before its turn
        found = await asyncio.to_thread(look)
        killer.cancel()
        assert found["way to the syncer"].level == found["way to shard 0"].level == "ok"
        assert found["way to shard 1"].level == "warning" and "a shard has to be there" in found["way to shard 1"].fix
    finally:
        syncer.stop()
    assert "Traceback" not in syncer.text()
