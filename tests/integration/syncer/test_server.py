"""The syncer as a process, against a scripted client: what it takes, what it refuses, what it survives."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio
from syncer_client import (
    LAYOUT,
    TOKENS,
    Client,
    RawBulk,
    SyncerProcess,
    behind_length,
    first_values,
    raw_job,
    send_call,
    turn,
)

import tape_reader
from diloco_protocol.vocabulary import TransferRefusal
from diloco_protocol.wire import bulk, channels, limits, sync_pb2
from diloco_protocol.wire.control_auth import sign_call
from diloco_syncer.store.directory import DirectoryStore
from diloco_syncer.store.epochs import Epoch
from diloco_syncer.store.tape import segment_name
from patience import until

# One event loop for all: gRPC's poller does not outlive the loop that it was made in.
pytestmark = [pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture
def syncer(tmp_path: Path) -> Iterator[SyncerProcess]:
    made = SyncerProcess(tmp_path / "syncer", raw_job()).start()
    yield made
    made.stop()


class Clients:
    """Clients that are closed at the end."""

    def __init__(self, syncer: SyncerProcess) -> None:
        self.syncer = syncer
        self.all: list[Client] = []

    def __call__(self, ordinal: int = 0, process: str = "") -> Client:
        self.all.append(Client(self.syncer, ordinal, process))
        return self.all[-1]

    async def first(self) -> Client:
        """A learner that has initialised the job and is ready."""
        client = self()
        assert (await client.join()).welcome.initialise
        await client.initialise()
        await client.ready()
        return client

    async def __aenter__(self) -> Clients:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self.all:
            await client.close()


async def test_a_round_from_join_to_merge(syncer: SyncerProcess) -> None:
    async def run() -> None:
        async with Clients(syncer) as clients:
            a = await clients.first()
            assert json.loads(a.welcome.settings)["sync"]["every"] == 2
            for p in range(len(LAYOUT)):
                assert np.array_equal(a.bases[p], first_values(p))
            await a.train(2)
            news = await a.merge_once(0, 0)
            assert (news.version, news.merged_sequence, news.merged_version) == (1, 1, 1)
            # Plain SGD with lr 1 on the only push: Θ' = Θ - Δ.
            expected = first_values(0) - np.full(LAYOUT.elements(0), 0.02, np.float32)
            assert np.array_equal(a.bases[0], expected)
            await a.train(1)
            await a.merge_once(1, 0)
            await a.report()
            # Fragment 0 holds 2 of 3 steps merged, fragment 1 all 3: whole tokens are rounded down.
            await until(lambda: syncer.status()["tokens"]["trained"] == 3 * TOKENS)
            status = syncer.status()
            assert status["tokens"] == {"trained": 300, "merged": 250, "pending": 50, "dropped": 0}
            assert (status["merges"], status["versions"], status["phase"]) == (2, [1, 1], "training")
            assert status["bytes_up"] > 2 * 4 * LAYOUT.total_elements - 100 and status["bytes_down"] > 0
            kinds = [event["kind"] for event in status["events"]]
            assert [k for k in kinds if k in ("joined", "initialised", "first-step", "first-merge")] == [
                "joined",
                "initialised",
                "first-step",
                "first-merge",
            ]
            # Frozen parameters, the layout, and what is not there.
            what = sync_pb2.DownloadRequest
            for kind, expected_bytes in ((what.FROZEN, b"frozen bytes"), (what.LAYOUT, LAYOUT.to_json().encode())):
                _, data = await a.download(what(job="raw", process=a.process, what=kind))
                assert data.tobytes() == expected_bytes
            for request, word in (
                (what(job="raw", process=a.process, what=what.OPTIMIZER), "none"),
                (what(job="raw", process=a.process, what=what.FULL, fragment=9, epoch=1), "superseded"),
                (what(job="raw", process=a.process, what=what.PEER_STATE, transfer=9), "unknown-transfer"),
                (what(job="other", process=a.process, what=what.LAYOUT), "other-job"),
            ):
                header, _ = await a.download(request)
                assert not header.found and header.reason == word

    await run()
    report = json.loads(syncer.get("/report"))
    assert report["schema"] == 1 and report["merges"] == 2
    assert all(r["merged"] + r["pending"] + r["dropped"] == report["tokens"]["trained"] for r in report["ledger"])
    metrics = syncer.get("/metrics").decode()
    assert 'diloco_merges_total{job="raw"} 2.0' in metrics
    assert 'diloco_slot_tokens{job="raw",region="local",slot="0"} 300.0' in metrics
    assert syncer.get("/healthz") == b"ok\n"
    assert syncer.terminate() == 0
    assert tape_reader.verify(DirectoryStore(syncer.store)) == 2


async def test_pushes_that_are_refused_lose_nothing(syncer: SyncerProcess) -> None:
    async def run() -> None:
        async with Clients(syncer) as clients:
            a = await clients.first()
            await a.train(2)
            pull = await a.pulled(0, 0)
            good = a.push(0, pull.round)
            n = LAYOUT.elements(0)
            nan = np.full(n, np.nan, np.float32)

            def wrong(**changes: Any) -> sync_pb2.Push:
                made = sync_pb2.Push()
                made.CopyFrom(good)
                for name, value in changes.items():
                    setattr(made, name, value)
                return made

            cases: list[tuple[str, sync_pb2.Push, Any]] = [
                ("wrong-size", good, bytes(4 * n - 4)),
                ("wrong-size", good, bytes(4 * n + 4)),
                ("not-finite", good, nan),
                ("not-finite", good, np.where(np.arange(n) == n - 1, np.inf, 0).astype(np.float32)),
                ("other-layout", wrong(layout_digest="f" * 64), None),
                ("wrong-encoding", wrong(encoding="int4"), None),
                ("wrong-encoding", wrong(encoding="pickle"), None),
                ("other-round", wrong(round=pull.round + 7), None),
                ("future-base", wrong(base_version=5, oldest_version=5), None),
                ("other-epoch", wrong(epoch=99), None),
                ("no-steps", wrong(steps=0, tokens=0, first_step=3), None),
                ("inconsistent", wrong(steps=7), None),
                ("inconsistent", wrong(fragment=77), bytes(8)),
                ("bad-transfer", wrong(tokens=1 << 63), None),
                ("bad-transfer", wrong(compute_seconds=float("nan")), None),
            ]
            for reason, push, payload in cases:
                reply = await a.send(push, payload)
                assert (reply.accepted, reply.reason) == (False, reason), reply
                assert reply.message
            fenced = a.header(push=good)
            fenced.incarnation = 77
            assert (await a.upload(fenced, a.delta(0))).reason == "fenced"
            nobody = a.header(push=good)
            nobody.slot = 1
            assert (await a.upload(nobody, a.delta(0))).reason == "no-slot"
            other = a.header(push=good)
            other.job = "another"
            assert (await a.upload(other, a.delta(0))).reason == "other-job"
            # Nothing of that was counted; the push itself is good, once.
            assert (await a.send(good)).accepted
            assert (await a.send(good)).reason in ("repeated", "other-round", "already-merged")
            assert (await a.adopt(0, 1)).merged_sequence == 1
            status = syncer.status()
            assert status["tokens"]["dropped"] == 0 and status["tokens"]["trained"] == 200
            assert status["refused"]["wrong-size"] == 2 and status["refused"]["not-finite"] == 2

    await run()


async def part(raw: RawBulk, header: sync_pb2.UploadHeader, chunks: list[bytes]) -> sync_pb2.UploadReply:
    """One upload call, made by hand; what is left of its bytes is given up."""
    await raw.request(upload=header)
    await raw.send(*map(behind_length, chunks))
    if sum(map(len, chunks)) < header.bytes:
        await raw.send(behind_length(b""))
    return (await raw.reply()).upload


async def test_broken_transfers_are_refused_and_the_next_one_is_taken(syncer: SyncerProcess) -> None:
    async def run() -> None:
        async with Clients(syncer) as clients:
            a = await clients.first()
            await a.train(2)
            pull = await a.pulled(0, 0)
            push = a.push(0, pull.round)
            data = a.delta(0).tobytes()
            half = len(data) // 8 * 4

            def header(offset: int, size: int, checksum: int, total: int = len(data)) -> sync_pb2.UploadHeader:
                made = a.header(push=push)
                made.format, made.total_bytes, made.offset = limits.FORMAT, total, offset
                made.bytes, made.checksum = size, checksum
                return made

            whole = bulk.checksum(data)
            raw = await a.raw_bulk()  # a part that is refused costs no connection
            assert (await part(raw, header(0, len(data), whole ^ 1), [data])).reason == "bad-checksum"
            assert (await part(raw, header(0, len(data), whole), [data[:-1]])).reason == "bad-transfer"
            assert (await part(raw, header(0, len(data), whole), [])).reason == "bad-transfer"
            assert (await part(raw, header(4, len(data), whole), [data])).reason == "bad-transfer"
            assert (await part(raw, header(4, len(data), whole), [data[:9]])).reason == "bad-transfer"
            assert (await part(raw, header(0, 0, 0), [])).reason == "bad-transfer"
            future = header(0, len(data), whole)
            future.format = 99
            assert "format 99" in (await part(raw, future, [data])).message
            # Where its end cannot be told, its connection ends: a chunk is too long, or the sender has gone.
            for last in (behind_length(data + b"x"), b"\xff" * 4):
                broken = await a.raw_bulk()
                await broken.request(upload=header(0, len(data), whole))
                await broken.send(last)
                assert await broken.until_ended() == b""
                await broken.close()
            # Two parts, the second one wrong: it alone is sent again.
            first = header(0, half, bulk.checksum(data[:half]))
            second = header(half, len(data) - half, bulk.checksum(data[half:]))
            bad = header(half, len(data) - half, 1)
            assert (await part(raw, first, [data[:half]])).reason == TransferRefusal.PARTIAL
            assert (await part(raw, bad, [data[half:]])).reason == "bad-checksum"
            assert (await part(raw, second, [data[half:]])).accepted
            await raw.close()
            assert (await a.adopt(0, 1)).merged_sequence == 1

    await run()


async def test_garbage_and_oversized_messages_end_only_their_own_call(syncer: SyncerProcess) -> None:
    async def run() -> None:
        async with Clients(syncer) as clients:
            a = await clients.first()
            stream: Any = a.channel.stream_stream

            async def session(*messages: bytes) -> sync_pb2.SyncerMessage:
                call = stream(channels.SESSION)(timeout=10)
                for message in messages:
                    await call.write(message)
                return sync_pb2.SyncerMessage.FromString(await call.read())

            for first in (b"\xff" * 100, bytes(limits.MAX_CONTROL_BYTES + 1), b""):
                refusal = (await session(first)).refusal
                assert (refusal.reason, refusal.fatal) == ("bad-join", True)
            report = sync_pb2.LearnerMessage(report=sync_pb2.Report())
            assert "must be Join" in (await session(report.SerializeToString())).refusal.message
            for size in (2 * limits.MAX_CONTROL_BYTES + 1, 8 << 20):
                too_large = stream(channels.SESSION)(timeout=10)
                with pytest.raises((aio.AioRpcError, asyncio.InvalidStateError)):
                    await too_large.write(bytes(size))
                    await too_large.read()
            # On a bulk connection it ends the connection. A request that is none is answered, and so is the next one.
            for said in (behind_length(b"\xff" * 1000), bytes(4), bytes([255] * 4), b"GET / HTTP/1.1\r\n\r\n"):
                broken = await a.raw_bulk()
                await broken.send(said)
                assert await broken.until_ended() == b"", said
                await broken.close()
            raw = await a.raw_bulk()
            await raw.request(token="of no use where there is none")
            assert await raw.failure() == ("the request does not say what is to be moved", True)
            await raw.request(download=sync_pb2.DownloadRequest(format=99))
            message, final = await raw.failure()
            assert "format 99" in message and final
            await raw.request(
                download=sync_pb2.DownloadRequest(format=limits.FORMAT, what=sync_pb2.DownloadRequest.JOB)
            )
            assert (await raw.reply()).download.found
            await raw.close()
            # A member that talks nonsense is told so, and may come back.
            b = clients(1)
            await b.join()
            await b.say(report=sync_pb2.Report(compute_seconds=-1))
            await until(lambda: b.ended)
            refusal = b.of_kind("refusal")[-1]
            assert refusal.reason == "bad-message" and "compute_seconds" in refusal.message and not refusal.fatal
            # The first learner noticed nothing.
            await a.train(2)
            await a.merge_once(0, 0)

    await run()


async def test_joins_that_are_refused(syncer: SyncerProcess) -> None:
    async def run() -> None:
        async with Clients(syncer) as clients:
            await clients.first()
            for reason, changes in (
                ("bad-join", {"job": "another"}),
                ("bad-join", {"format": 99}),
                ("bad-join", {"process": "not hex"}),
                ("bad-join", {"role": 0}),
                ("bad-join", {"region": "../x"}),
                ("other-layout", {"layout_digest": "0" * 64}),
                ("spec-drift", {"digests": {"seed": "0"}}),
            ):
                refusal = (await clients(1).join(**changes)).refusal
                assert (refusal.reason, refusal.fatal) == (reason, True), refusal
                assert refusal.message

    await run()


async def test_an_old_incarnation_is_fenced_and_a_second_process_supersedes(syncer: SyncerProcess) -> None:
    async def run() -> None:
        async with Clients(syncer) as clients:
            a = await clients.first()
            await a.train(2)
            pull = await a.pulled(0, 0)
            push = a.push(0, pull.round)
            newcomer = clients(0)
            seat = (await newcomer.join()).welcome.seat
            assert (seat.slot, seat.continuing) == (0, False) and seat.incarnation > a.welcome.seat.incarnation
            assert (await a.send(push)).reason in ("fenced", "not-joined")  # its session may have ended by now
            await until(lambda: a.ended)
            assert a.of_kind("refusal")[-1].reason == "superseded"

    await run()


async def test_killed_and_restarted_nothing_acknowledged_is_lost(syncer: SyncerProcess) -> None:
    async def before() -> tuple[list[Any], str]:
        async with Clients(syncer) as clients:
            a = await clients.first()
            for version in range(3):
                await turn(a, version)
            # An offer: durable when it is acknowledged, merged by nobody yet (it is fragment 0's turn).
            await a.train(1)
            await a.pulled(0, 3)
            await a.say(drain_request=sync_pb2.DrainRequest())
            assert (await a.send(a.push(1, 0))).accepted
            syncer.kill()
            return a.bases, a.process

    bases, process = await before()
    records = sorted(path.name for path in (syncer.store / "records").iterdir())
    with open(syncer.store / segment_name(1), "r+b") as file:  # a line torn in two, as by a power cut
        file.truncate(file.seek(0, 2) - 20)
    (syncer.store / "records" / ".half.rec.0123456789ab.tmp").write_bytes(b"half")
    syncer.start()
    assert syncer.addresses["epoch"] == 2
    status = syncer.status()
    assert status["versions"] == [3, 3] and status["merges"] == 6
    assert sorted(path.name for path in (syncer.store / "records").iterdir()) == records

    async def after() -> None:
        async with Clients(syncer) as clients:
            a = clients(0, process)
            first = await a.join(held=[sync_pb2.Held(epoch=1, version=3)] * 2, previous_incarnation=1)
            assert first.welcome.seat.continuing and first.welcome.epoch == 2
            assert first.welcome.fragments[0].merged_sequence == 3
            for p in range(len(LAYOUT)):
                await a.adopt(p, 3)
                assert np.array_equal(a.bases[p], bases[p])  # bit for bit
            # The offer waited in the store and is merged with the next round of its fragment.
            a.steps, a.sequence, a.merged_steps, a.confirmed = 7, [3, 4], [5, 6], [500, 600]
            await a.train(1)
            await a.merge_once(0, 3)
            await a.train(1)
            assert (await a.adopt(1, 4)).merged_sequence == 4
            assert np.array_equal(a.bases[1], bases[1] - np.float32(0.01))  # one step was offered

    await after()
    assert syncer.terminate() == 0
    assert tape_reader.verify(DirectoryStore(syncer.store)) == 8
    assert not list((syncer.store / "offers").iterdir())


async def test_a_syncer_that_was_succeeded_stops_with_3(syncer: SyncerProcess) -> None:
    async def run() -> None:
        async with Clients(syncer) as clients:
            a = await clients.first()
            await a.train(2)
            pull = await a.pulled(0, 0)
            Epoch.claim(DirectoryStore(syncer.store))
            with contextlib.suppress(aio.AioRpcError, bulk.TransferError):  # it may stop before it has answered
                await a.send(a.push(0, pull.round))
            await asyncio.to_thread(syncer.wait)

    await run()
    assert syncer.wait() == 3
    assert "claimed epoch 2" in syncer.text() and "Traceback" not in syncer.text()


async def test_control_calls(syncer: SyncerProcess) -> None:
    async def run() -> None:
        async with Clients(syncer) as clients:
            a = await clients.first()
            await a.train(1)
            assert json.loads((await syncer.call("checkpoint")).body)["versions"] == [0, 0]
            for method, body, message in (
                ("nonsense", {}, "none of process-ended"),
                ("process-ended", {"region": 3, "ordinal": 0}, "region: expected a text"),
                ("process-ended", {"region": "local", "ordinal": -1}, "ordinal"),
                ("announce", {"phase": "complete"}, "none of suspended"),
            ):
                reply = await syncer.call(method, **body)
                assert not reply.ok and message in reply.message
            async with aio.insecure_channel(syncer.addresses["control"]) as channel:
                call = sign_call(syncer.key, "report", b"{}")
                assert (await send_call(channel, call)).ok
                for wrong in (call, sign_call(b"k" * 64, "report", b"{}"), sign_call(syncer.key, "report", b"", 0)):
                    with pytest.raises(aio.AioRpcError) as caught:
                        await send_call(channel, wrong)
                    assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
            await syncer.call("process-ended", region="local", ordinal=0, process=a.process, reason="SIGKILL")
            await until(lambda: syncer.status()["slots"][0]["state"] == "lost")
            assert (await syncer.call("announce", phase="failed", message="enough")).ok
            async with asyncio.timeout(60):
                while not (reply := await syncer.call("report")).ok:
                    assert "is not made yet: call again" in reply.message
            report = json.loads(reply.body)
            assert (report["outcome"], report["message"]) == ("failed", "enough")

    await run()
    assert syncer.wait() == 1
    written = json.loads((syncer.store / "report.json").read_text())
    assert (written["outcome"], written["message"]) == ("failed", "enough")


async def test_a_newcomer_gets_a_peers_optimizer_state(syncer: SyncerProcess) -> None:
    async def run() -> None:
        async with Clients(syncer) as clients:
            a = await clients.first()
            await a.train(1)
            b = clients(1)
            await b.join()
            await b.ready()
            await b.say(peer_state_wanted=sync_pb2.PeerStateWanted())
            await until(lambda: a.of_kind("peer_state_request"))
            transfer = a.of_kind("peer_state_request")[0].transfer
            state = np.random.default_rng(1).integers(0, 256, 200_000, np.uint8)
            what = sync_pb2.PeerState(transfer=transfer, versions=[sync_pb2.Held(epoch=1, version=0)] * 2)
            assert (await b.upload(b.header(peer_state=what), state)).reason == "not-asked"
            assert (await a.upload(a.header(peer_state=what), bytes(70 << 20))).reason == "too-large"
            assert (await a.upload(a.header(peer_state=what), state)).accepted
            await until(lambda: b.of_kind("peer_state_ready"))
            request = sync_pb2.DownloadRequest(
                job="raw",
                process=b.process,
                what=sync_pb2.DownloadRequest.PEER_STATE,
                transfer=b.of_kind("peer_state_ready")[0].transfer,
            )
            header, data = await b.download(request)
            assert np.array_equal(data, state) and len(header.versions) == 2

    await run()


async def test_a_reader_that_does_not_read_is_disconnected_and_nobody_waits(syncer: SyncerProcess) -> None:
    async def run() -> None:
        async with Clients(syncer) as clients:
            a = await clients.first()
            deaf: Any = a.channel.stream_stream(channels.SESSION)()
            join = sync_pb2.Join(
                format=limits.FORMAT,
                job="raw",
                process="dead",
                role=sync_pb2.ROLE_EVALUATOR,
                region="local",
                layout_digest=LAYOUT.digest,
            )
            await deaf.write(sync_pb2.LearnerMessage(join=join).SerializeToString())
            await until(lambda: syncer.status()["sessions"] == 2)
            for version in range(5):
                await turn(a, version)
            deaf.cancel()
            await until(lambda: syncer.status()["sessions"] == 1)

    await run()


async def test_what_a_learner_took_that_left_meanwhile_is_its_regions(syncer: SyncerProcess) -> None:
    """Bytes are counted once a download was sent whole; its learner may have ended by then."""
    size = 1 << 25  # more than sockets take ahead of a reader
    async with Clients(syncer) as clients:
        a = clients(0)
        await a.join()
        await a.initialise(frozen=bytes(size))
        await a.ready()
        b = clients(1)
        await b.join()
        wanted = sync_pb2.DownloadRequest
        raw = await b.raw_bulk()
        await raw.request(download=wanted(format=limits.FORMAT, job="raw", process=b.process, what=wanted.FROZEN))
        assert (await raw.reply()).download.bytes == size
        before = syncer.status()
        b.call.cancel()
        await until(lambda: syncer.status()["sessions"] == before["sessions"] - 1)
        assert syncer.status()["bytes_down"] == before["bytes_down"]
        assert await raw.read(size) == bytes(size)
        await raw.close()
        await until(lambda: syncer.status()["bytes_down"] == before["bytes_down"] + size)
        document = syncer.status()
        assert [(row["name"], row["bytes_down"]) for row in document["regions"]] == [("local", document["bytes_down"])]
        slots = [sum(row["bytes_down"] for row in status["slots"]) for status in (before, document)]
        assert slots[1] == slots[0] + size


async def test_welcome_comes_first_whatever_is_said_to_all_meanwhile(syncer: SyncerProcess) -> None:
    async with Clients(syncer) as clients:
        a = await clients.first()
        # Version 0, phases and merges are announced while others join; join() checks what comes first.
        for round_ in range(3):
            joining = [asyncio.create_task(clients(1).join()) for _ in range(5)]
            await turn(a, round_)
            for first in await asyncio.gather(*joining):
                assert first.HasField("welcome") and len(first.welcome.fragments) == len(LAYOUT)
