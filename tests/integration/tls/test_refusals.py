"""The syncer as a process with certificates, against whoever may come: raw gRPC and raw TCP.

Floods are the test's own threads; what is asserted is that those who may come in do, and go on."""

from __future__ import annotations

import os
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from hostile_client import Learners
from syncer_client import SyncerProcess, behind_length, raw_job, send_call, turn

from diloco_protocol.security.credentials import Credentials
from diloco_protocol.vocabulary import TrustFailure
from diloco_protocol.wire import bulk, channels, sync_pb2
from diloco_protocol.wire.control_auth import sign_call
from diloco_protocol.wire.verify_server import ServerNotTrusted, verify_syncer
from diloco_syncer.server.tls import connection_limits
from floods import Flood
from parties import DAY, TOKEN, Parties
from patience import until, wait_until

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]
REGIONS = "regions=[{name: eu-1, learners: 1}, {name: us-2, learners: 1}]"


@pytest.fixture
def parties(tmp_path: Path) -> Parties:
    return Parties(tmp_path / "pki", "raw")


@pytest.fixture
def syncer(tmp_path: Path, parties: Parties) -> Iterator[SyncerProcess]:
    folder = parties.syncer()
    made = SyncerProcess(tmp_path / "syncer", raw_job(REGIONS)).start("--credentials", str(folder))
    yield made
    made.stop()
    secrets = [TOKEN, "PRIVATE KEY", made.key.decode()]
    secrets += [line for line in (folder / "tls.key").read_text().splitlines() if "-" not in line]
    assert not any(secret in made.text() for secret in secrets)


def refused(syncer: SyncerProcess) -> dict[str, int]:
    return dict(syncer.status()["tls"]["refused"])


async def code_of(call: Any) -> str:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    return caught.value.code().name


async def test_every_refusal_has_its_name(syncer: SyncerProcess, parties: Parties) -> None:
    europe, america = parties.learner("eu", "eu-1"), parties.learner("us", "us-2")
    async with Learners(syncer) as learners:
        honest = learners(europe)
        said = honest.said()
        assert (await honest.join(said)).HasField("welcome")
        # The same bytes again, on a connection of the same and of another certificate.
        assert await learners(europe).refused(said) == ("replayed", False)
        assert await learners(america).refused(said) == ("wrong-region", True)
        # Somebody else's region, and somebody else's process.
        assert await learners(america).refused(region="eu-1") == ("wrong-region", True)
        assert await learners(america, "us-2", honest.process).refused() == ("wrong-process", False)
        assert await learners(europe).refused(job="other") == ("bad-join", True)
        assert await learners(europe).refused(process="!") == ("bad-join", True)
        drifted = {"training.model": "other"}
        assert await learners(america, "us-2").refused(digests=drifted) == ("spec-drift", True)
        # An evaluator has no region of its own.
        evaluator = learners(america)
        first = await evaluator.join(role=sync_pb2.ROLE_EVALUATOR, region="eu-1")
        assert first.welcome.observer
        # Bulk calls in another's name.
        other = learners(america, "us-2")
        request = sync_pb2.DownloadRequest(job="raw", process=honest.process)
        with pytest.raises(bulk.TransferError, match="a process with another certificate has this id"):
            await other.download(request)
        part = sync_pb2.Initial(part=sync_pb2.Initial.LAYOUT)
        header = sync_pb2.UploadHeader(job="raw", process=honest.process, initial=part)
        reply = await other.upload(header, b"{}")
        assert (reply.accepted, reply.reason) == (False, "wrong-process")
        # The join token, at every service.
        stolen = parties.learner("thief", "eu-1", token="b6" * 32)
        thief, another = learners(stolen), learners(stolen)  # a call that is refused costs its connection
        assert await code_of(thief.join()) == "UNAUTHENTICATED"
        for made_call in (thief.upload(header, b"{}"), another.download(request)):
            with pytest.raises(bulk.TransferError, match="the join token is missing or wrong"):
                await made_call
        # At the gate. A try that took too long is made again; it may be counted late, as what it is or as broken off.
        late = Counter[str]()
        old, other_job = parties.learner("old", "eu-1", since=-30 * DAY, days=10), parties.learner("x", job="x")
        for folder, reason in ((old, "expired"), (other_job, "wrong-job")):
            made = Credentials.from_directory(folder)
            while True:
                with pytest.raises(ServerNotTrusted) as caught:  # with others' names: it would see its mistake itself
                    await verify_syncer(made, syncer.addresses["sync"], honest.credentials.names())
                if caught.value.reason == TrustFailure.CERTIFICATE_REFUSED:
                    break
                late[reason] += 1
        expected = {"expired": 1, "replayed": 1, "wrong-job": 2, "wrong-process": 3, "wrong-region": 2}
        expected |= {"wrong-token": 3, "bad-join": 1, "spec-drift": 1}
        await until(lambda: all(refused(syncer).get(reason, 0) >= count for reason, count in expected.items()))
        found = refused(syncer)
        assert found.keys() - {"broken-off"} == expected.keys()
        assert all(count <= found[reason] <= count + late[reason] for reason, count in expected.items()), found
        row = 'diloco_refused_connections_total{job="raw",reason="%s"} %d.0'
        await until(lambda: all(row % one in syncer.get("/metrics").decode() for one in refused(syncer).items()))
        page = syncer.get("/metrics").decode()
        for whose in ("certificate", "peer_certificate"):
            (when,) = re.findall(rf"^diloco_{whose}_expires_timestamp_seconds.* (\S+)$", page, re.M)
            assert 80_000 < float(when) - time.time() < 90_000
        assert re.search(r'diloco_connections\{job="raw"\} [1-9]', page)
        # Who was there first has noticed nothing.
        assert honest.ended == "" and syncer.status()["sessions"] == 2
        await honest.initialise()
        log = syncer.text()
        for reason in expected:
            assert f": {reason}: " in log, reason


@pytest.mark.promise("A client that is refused before its first message receives the reason")
async def test_who_speaks_late_still_hears_why(syncer: SyncerProcess, parties: Parties) -> None:
    """A first write on a call that has ended already is INTERNAL to a gRPC client, whatever the server said."""
    async with Learners(syncer) as learners:
        thief = learners(parties.learner("thief", "eu-1", token="b6" * 32))
        call: Any = thief.channel.stream_stream(channels.SESSION)(metadata=thief.metadata)
        await until(lambda: refused(syncer).get("wrong-token", 0) == 1)
        await call.write(thief.said())
        assert await code_of(call.read()) == "UNAUTHENTICATED"
        # And an upload before its first byte, which is not waited for.
        raw = await thief.raw_bulk()
        await raw.request("b6" * 32, upload=sync_pb2.UploadHeader(job="raw", bytes=1 << 20))
        await until(lambda: refused(syncer).get("wrong-token", 0) == 2)
        await raw.send(behind_length(bytes(1000)), behind_length(b""))
        assert await raw.failure() == ("the join token is missing or wrong", True)
        await raw.close()


async def test_limits_are_a_certificates_own(syncer: SyncerProcess, parties: Parties) -> None:
    europe, america = parties.learner("eu", "eu-1"), parties.learner("us", "us-2")
    allowed = connection_limits.allowance_of({"eu-1": 1, "us-2": 1}, Credentials.from_directory(europe).names())
    async with Learners(syncer) as learners:
        one = learners(europe)

        async def session(process: str) -> tuple[Any, str]:
            call = one.channel.stream_stream(channels.SESSION)(metadata=one.metadata)
            try:
                await call.write(one.said(process=process, ordinal=one.attempt))
                raw = await call.read()
            except aio.AioRpcError as error:
                return call, error.details() or ""
            if raw is aio.EOF:
                return call, await call.details()
            return call, str(sync_pb2.SyncerMessage.FromString(raw).WhichOneof("kind"))

        made = [await session(f"{number:x}") for number in range(1, allowed.sessions + 1)]
        assert {what for _, what in made} == {"welcome"}
        assert "too many sessions" in (await session("ffff"))[1]
        assert (await learners(america, "us-2").join()).HasField("welcome")
        for call, _ in made:
            call.cancel()
        await until(lambda: syncer.status()["sessions"] <= 1)  # the other's ends, for it shall make version 0 now
        assert (await session("fffe"))[1] == "welcome"
        # Joins: many at once, of one that is refused each time; another region's are not held up.
        results = [""]
        while "too many joins" not in results[-1]:
            assert len(results) < 2000  # on a slow machine more are allowed meanwhile
            results.append((await session("not hex"))[1])
        assert "refusal" in results
        assert (await learners(america, "us-2").join()).HasField("welcome")
        counts = refused(syncer)
        assert counts["too-many-sessions"] == 1 and counts["too-many-joins"] >= 1


@pytest.mark.promise(
    "Under a flood of silent, half-open, garbage and foreign connections learners join, and the job merges",
    section="Hostile callers",
)
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.ci
async def test_the_job_goes_on_under_a_flood(syncer: SyncerProcess, parties: Parties, tmp_path: Path) -> None:
    foreign = Parties(tmp_path / "foreign", "raw", title="theirs")
    (stranger := foreign.learner("stranger")).joinpath("ca.crt").write_bytes(parties.authority.certificate)
    europe, america = parties.learner("eu", "eu-1"), parties.learner("us", "us-2")
    async with Learners(syncer) as learners:
        with Flood(syncer.addresses["sync"], parties, stranger) as flood:
            await until(lambda: syncer.status()["tls"]["handshakes"] > 200)
            # Somebody comes in meanwhile, by a look first as a learner does, makes version 0, and trains.
            made = Credentials.from_directory(europe)
            await verify_syncer(made, syncer.addresses["sync"], made.names())
            honest = learners(europe)
            assert (await honest.join()).welcome.initialise
            await honest.initialise()
            await honest.ready()
            for version in range(4):
                await turn(honest, version)
            assert (await learners(america, "us-2").join()).HasField("welcome")
            status = syncer.status()
            assert status["versions"] == [4, 4] and status["sessions"] == 2
            assert status["tls"]["handshakes"] <= 256
            assert honest.ended == "" and min(flood.counts.values()) > 20, flood.counts
        counts = refused(syncer)
        assert {"stranger", "not-tls"} <= set(counts) and counts["stranger"] > 10, counts
        # A flood fills no disk: a line per reason and ten seconds.
        assert syncer.text().count('"message": "refused ') < 40
        await until(lambda: syncer.status()["tls"]["handshakes"] == 0)


@pytest.mark.slow
async def test_the_other_ports_survive_too(syncer: SyncerProcess, parties: Parties) -> None:
    """Control and pages: plaintext, for those who may reach them at all."""
    held = []
    for name in ("control", "http"):
        host, _, port = syncer.addresses[name].rpartition(":")
        for number in range(350):
            made = socket.create_connection((host, int(port)), timeout=5)
            made.settimeout(5)
            if number % 4 > 1:
                made.sendall(os.urandom(number * 20) if number % 4 == 2 else b"PRI * HTTP/2.0\r\n")
            held.append(made)
    # Unsigned, wrongly signed, replayed.
    async with aio.insecure_channel(syncer.addresses["control"]) as channel:

        async def answered() -> sync_pb2.SignedCall | None:
            call = sign_call(syncer.key, "status", b"{}")
            try:
                assert (await send_call(channel, call)).ok
            except aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                return None
            return call

        # Its places are taken by those who say nothing, for as long as HTTP/2 may take to begin.
        call = await until(answered, "an answer", every=0.1)
        for bad in (call, sign_call(b"k" * 32, "status", b"{}"), sync_pb2.SignedCall(method="status")):
            with pytest.raises(aio.AioRpcError) as caught:
                await send_call(channel, bad)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    for made in held:
        made.close()

    def answers() -> bool:
        try:
            return bool(syncer.status()["phase"] == "waiting")
        except ConnectionError:  # it has not heard yet of those that left
            return False

    wait_until(answers)
    async with Learners(syncer) as learners:
        assert (await learners(parties.learner("eu", "eu-1")).join()).HasField("welcome")


async def test_a_syncer_with_anothers_certificate_does_not_start(tmp_path: Path, parties: Parties) -> None:
    other = parties.other("other", ["diloco://job/ns/else/syncer"], ["diloco-syncer"])
    made = SyncerProcess(tmp_path / "syncer", raw_job(REGIONS))
    made.launch("--credentials", str(other))
    assert made.wait() == 5
    assert "the certificate is for the syncer of job ns/else, and this is the syncer of job 'raw'" in made.text()
