"""What whoever holds a learner's certificate, or none, can do to a syncer and to the other learners: nothing.

One syncer process for all tests of this file, with TLS; each test leaves it serving. ``hostile_client.py`` is the
caller: it can say anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from documents import conforming
from grpc import aio
from hostile_client import Learner, Learners
from syncer_client import SyncerProcess, behind_length, raw_job

from diloco_protocol.documents import StatusDocument
from diloco_protocol.security.credentials import BULK_PROTOCOL
from diloco_protocol.security.identity import SERVER_NAME
from diloco_protocol.wire import bulk, channels, limits, sync_pb2
from diloco_syncer.server.tls import connection_limits
from parties import TOKEN, Parties
from patience import WaitFailed, until

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]
REGIONS = "regions=[{name: eu-1, learners: 1}, {name: us-2, learners: 1}, {name: asia-3, learners: 1}]"


async def status_of(syncer: SyncerProcess) -> dict[str, Any]:
    """The status as it is now: a signed call makes it anew. The page is kept for a moment, and may be older than what a
    test has done since."""
    return conforming(StatusDocument, json.loads((await syncer.call("status")).body))


async def until_status(syncer: SyncerProcess, holds: Callable[[dict[str, Any]], Any]) -> None:
    last: dict[str, Any] = {}

    async def check() -> Any:
        last.update(await status_of(syncer))
        return holds(last)

    try:
        await until(check)
    except WaitFailed as error:
        raise WaitFailed(f"{error}\n{last}") from None


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory) -> Parties:
    made = Parties(tmp_path_factory.mktemp("pki"), "raw")
    for name, region in (("eu", "eu-1"), ("us", "us-2"), ("asia", "asia-3"), ("gone", "zz")):
        made.learner(name, region)
    return made


@pytest.fixture(scope="module")
def syncer(tmp_path_factory: pytest.TempPathFactory, parties: Parties) -> Iterator[SyncerProcess]:
    made = SyncerProcess(tmp_path_factory.mktemp("syncer"), raw_job(REGIONS))
    made.start("--credentials", str(parties.syncer()))
    yield made
    assert not made.exited, made.text()
    made.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def learners(syncer: SyncerProcess) -> AsyncIterator[Learners]:
    async with Learners(syncer) as made:
        yield made
    await until_status(syncer, lambda now: now["sessions"] == 0)


@pytest.fixture
def folders(parties: Parties) -> dict[str, Path]:
    return {name: parties.folder / name for name in ("eu", "us", "asia", "gone")}


async def ended(learner: Learner) -> str:
    """The reason of the refusal that ended a session."""
    await until(lambda: learner.of_kind("refusal"))
    return str(learner.of_kind("refusal")[0].reason)


def bytes_down_of(status: dict[str, Any], region: str) -> int:
    """Payload sent to a region since the job began."""
    return next(int(row["bytes_down"]) for row in status["regions"] if row["name"] == region)


# ------------------------------------------------------------------ whose slot an upload is for


@pytest.mark.promise(
    "Only the process that holds a slot uploads for it, and a download needs a session, whatever process, "
    "slot and incarnation a caller names",
    section="Hostile callers",
)
async def test_only_the_process_that_holds_a_slot_uploads_for_it(
    syncer: SyncerProcess, learners: Learners, folders: dict[str, Path]
) -> None:
    """An empty process id, one without a session, another's: under one's own certificate and another region's."""
    victim = learners(folders["eu"])
    await victim.take_part()
    await victim.train(2)
    seated = learners(folders["us"], "us-2")
    await seated.take_part()
    before = (await status_of(syncer))["versions"]
    for folder in (folders["us"], folders["eu"]):
        nobody = learners(folder)
        assert (await nobody.push_as(victim, "")).reason == "not-joined"
        assert (await nobody.push_as(victim, nobody.process)).reason == "not-joined"
        assert (await nobody.push_as(victim, "!")).reason == "not-joined"
    thief = learners(folders["us"], "us-2")
    assert (await thief.push_as(victim, victim.process)).reason == "wrong-process"
    assert (await seated.push_as(victim, seated.process)).reason == "fenced"
    # Every other kind of upload, and every download but that of the job.
    peer, part, base = sync_pb2.PeerState(transfer=1), sync_pb2.Initial(), sync_pb2.Base(epoch=1)
    for kind, process in itertools.product(({"peer_state": peer}, {"initial": part}, {"base": base}), ("", "ab")):
        header = sync_pb2.UploadHeader(job="raw", process=process, **kind)
        assert (await thief.upload(header, b"{}")).reason == "not-joined", kind
    kinds = sync_pb2.DownloadRequest
    for what in (kinds.FULL, kinds.DELTA, kinds.FROZEN, kinds.LAYOUT, kinds.PEER_STATE, kinds.OPTIMIZER):
        request = kinds(job="raw", what=what, epoch=1)
        with pytest.raises(bulk.TransferError, match="has no session: join first"):
            await thief.download(request)
    sent = bytes_down_of(await status_of(syncer), "us-2")
    header, job = await thief.download(kinds(what=kinds.JOB))
    assert header.found and job.size
    await until_status(syncer, lambda now: bytes_down_of(now, "us-2") == sent + job.size)  # of its certificate's region
    assert (await status_of(syncer))["versions"] == before
    # What the victim itself pushes still counts: nobody has used up its numbers.
    assert (await victim.send(victim.push(0, 0))).accepted


@pytest.mark.promise("Knowing a process's id does not give a client its slot", section="Hostile callers")
async def test_a_process_id_is_no_key_to_its_slot(
    syncer: SyncerProcess, learners: Learners, folders: dict[str, Path]
) -> None:
    """Somebody of another region comes back as a process whose session is broken."""
    victim = learners(folders["eu"])
    await victim.take_part()
    await victim.train(1)
    slot, incarnation = victim.welcome.seat.slot, victim.welcome.seat.incarnation
    victim.call.cancel()
    await until_status(syncer, lambda now: now["slots"][slot]["state"] == "suspect")
    thief = learners(folders["us"], "us-2", victim.process)
    first = await thief.join(previous_incarnation=incarnation, tenure=incarnation, slot=slot)
    assert not (first.welcome.HasField("seat") and first.welcome.seat.slot == slot), first
    assert (await victim.join(previous_incarnation=incarnation)).HasField("refusal")  # its id is in use
    thief.call.cancel()
    await until_status(syncer, lambda now: now["sessions"] == 0)
    back = (await victim.join(previous_incarnation=incarnation, tenure=incarnation, slot=slot)).welcome
    assert back.seat.slot == slot and back.seat.continuing


@pytest.mark.promise("A region holds no more slots than its learners and spares in the job", section="Hostile callers")
async def test_a_region_holds_no_more_slots_than_the_job_gives_it(
    syncer: SyncerProcess, learners: Learners, folders: dict[str, Path]
) -> None:
    greedy = [learners(folders["us"], "us-2") for _ in range(6)]
    firsts = [await each.join(ordinal=ordinal) for ordinal, each in enumerate(greedy)]
    assert [first.welcome.standby for first in firsts] == [False] + [True] * 5, firsts
    rows = (await status_of(syncer))["slots"]
    assert [row["region"] for row in rows if row["state"] == "active"] == ["us-2"]
    # The others find their own slots free.
    for name, region in (("eu", "eu-1"), ("asia", "asia-3")):
        first = await learners(folders[name], region).join()
        assert first.welcome.HasField("seat"), first
    # Its own slot goes to one of those that stand by.
    assert (await syncer.call("process-ended", region="us-2", ordinal=0, process=greedy[0].process, reason="")).ok
    await until(lambda: greedy[1].of_kind("promotion"))
    assert not any(each.of_kind("promotion") for each in greedy[2:])
    for each in greedy[2:]:
        await each.close()
    # The slot would go to one of these, and stay its own for the whole of a heartbeat's timeout.
    await until_status(syncer, lambda now: now["standby"] == 0)
    await greedy[1].close()
    assert (await syncer.call("process-ended", region="us-2", ordinal=1, process=greedy[1].process, reason="")).ok


@pytest.mark.promise("A region that the job does not have gets no session and no model", section="Hostile callers")
async def test_a_region_that_the_job_lacks_gets_nothing(
    syncer: SyncerProcess, learners: Learners, folders: dict[str, Path]
) -> None:
    """A region that was removed keeps its certificates."""
    assert await learners(folders["gone"], "zz").refused() == ("no-such-region", False)
    assert await learners(folders["gone"], "zz").refused(idle=True) == ("no-such-region", False)
    evaluator = learners(folders["gone"], "zz")
    assert await evaluator.refused(role=sync_pb2.ROLE_EVALUATOR) == ("wrong-region", True)
    request = sync_pb2.DownloadRequest(job="raw", process=evaluator.process, what=sync_pb2.DownloadRequest.LAYOUT)
    with pytest.raises(bulk.TransferError, match="has no session: join first"):
        await evaluator.download(request)


@pytest.mark.promise(
    "There is at most one evaluator, beside the broken session of the previous one", section="Hostile callers"
)
async def test_there_are_no_more_evaluators_than_one_and_a_broken_one(
    syncer: SyncerProcess, learners: Learners, folders: dict[str, Path]
) -> None:
    made = [learners(folders["us"], "us-2") for _ in range(4)]
    for each in made:
        assert (await each.join(role=sync_pb2.ROLE_EVALUATOR)).welcome.observer
    for each in made[:2]:
        assert await ended(each) == "superseded"
    await until_status(syncer, lambda now: now["evaluators"] == 2)


@pytest.mark.promise(
    "A relayed optimizer state goes only to the learners that it was offered to", section="Hostile callers"
)
async def test_an_optimizer_state_is_for_those_that_it_was_offered_to(
    syncer: SyncerProcess, learners: Learners, folders: dict[str, Path]
) -> None:
    donor, newcomer, thief = (
        learners(folders["eu"]),
        learners(folders["us"], "us-2"),
        learners(folders["asia"], "asia-3"),
    )
    for each in (donor, newcomer, thief):
        await each.take_part()
    await donor.train(1)
    step = donor.welcome.seat.slot_step + donor.steps
    await until_status(
        syncer, lambda now: any(slot["region"] == "eu-1" and slot["step"] >= step for slot in now["slots"])
    )
    await newcomer.say(peer_state_wanted=sync_pb2.PeerStateWanted())
    await until(lambda: donor.of_kind("peer_state_request"))
    transfer, state = donor.of_kind("peer_state_request")[0].transfer, random.Random(3).randbytes(1000)
    what = sync_pb2.PeerState(transfer=transfer, versions=[sync_pb2.Held(epoch=1)] * 2)
    assert (await donor.upload(donor.header(peer_state=what), state)).accepted
    await until(lambda: newcomer.of_kind("peer_state_ready"))

    def asking(learner: Learner) -> sync_pb2.DownloadRequest:
        kind = sync_pb2.DownloadRequest.PEER_STATE
        return sync_pb2.DownloadRequest(job="raw", process=learner.process, what=kind, transfer=transfer)

    header, _ = await thief.download(asking(thief))
    assert (header.found, header.reason) == (False, "unknown-transfer")
    header, data = await newcomer.download(asking(newcomer))
    assert header.found and bytes(data) == state


@pytest.mark.promise(
    "Empty calls of one certificate are limited, and a session's messages and uploads are limited in "
    "rate: other clients are not held up",
    section="Hostile callers",
)
async def test_calls_that_say_nothing_are_few_and_hold_up_nobody_else(
    syncer: SyncerProcess, learners: Learners, folders: dict[str, Path]
) -> None:
    silent = learners(folders["asia"], "asia-3")
    most = connection_limits.allowance_of({"asia-3": 1}, silent.credentials.names()).silent
    session = silent.channel.stream_stream(channels.SESSION)
    calls: list[Any] = [session(metadata=silent.metadata) for _ in range(most + 20)]
    await until_status(
        syncer, lambda now: sum(call.done() for call in calls) >= 20 or refusals(now, "too-many-calls") >= 20
    )
    other = learners(folders["eu"])
    await other.take_part()
    await other.train(1)
    assert (await other.send(other.push(0, 0))).accepted
    for call in calls:
        call.cancel()
    async with asyncio.timeout(60):
        while True:  # until the syncer has heard that those calls are over
            again = learners(folders["asia"], "asia-3")
            try:
                await again.take_part()
                break
            except aio.AioRpcError as error:
                # INTERNAL: the refusal came while the first message was being written.
                assert error.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL)
                await asyncio.sleep(0.05)
    await until_status(syncer, lambda now: now["sessions"] == 2)


@pytest.mark.promise(
    "Only the process that holds a slot uploads for it, and a download needs a session, whatever process, "
    "slot and incarnation a caller names",
    section="Hostile callers",
)
async def test_a_bulk_connection_acts_for_its_own_certificates_processes(
    syncer: SyncerProcess, learners: Learners, folders: dict[str, Path]
) -> None:
    """Another's process is refused before a byte is read, and for who may speak the connection stays."""
    victim, thief = learners(folders["eu"]), learners(folders["us"], "us-2")
    await victim.take_part()
    await thief.take_part()
    await victim.train(1)
    data, header = victim.delta(0), victim.header(push=victim.push(0, 0))
    header.format, header.total_bytes = limits.FORMAT, data.nbytes
    header.bytes, header.checksum = data.nbytes, bulk.checksum(data)
    what = sync_pb2.DownloadRequest
    theirs = what(format=limits.FORMAT, job="raw", process=victim.process, what=what.LAYOUT)
    own = what(format=limits.FORMAT, job="raw", process=thief.process, what=what.LAYOUT)
    before = bytes_down_of(await status_of(syncer), "eu-1")
    raw = await thief.raw_bulk()
    for _ in range(2):
        await raw.request(TOKEN, upload=header)
        reply = (await raw.reply()).upload
        assert (reply.accepted, reply.reason) == (False, "wrong-process")
        await raw.send(behind_length(b""))
        await raw.request(TOKEN, download=theirs)
        assert await raw.failure() == ("a process with another certificate has this id", True)
        await raw.request(TOKEN, download=own)
        found = (await raw.reply()).download
        assert found.found and len(await raw.read(found.bytes)) == found.total_bytes
    await raw.close()
    assert bytes_down_of(await status_of(syncer), "eu-1") == before
    raw = await victim.raw_bulk()
    await raw.request(TOKEN, upload=header)
    await raw.send(behind_length(data.tobytes()))
    assert (await raw.reply()).upload.accepted
    await raw.close()
    # The thief's own session is not ended for it, and the victim's has noticed nothing.
    assert thief.ended == victim.ended == ""


async def test_a_bulk_connection_that_breaks_tls_or_says_nothing_costs_itself(
    syncer: SyncerProcess, learners: Learners, folders: dict[str, Path]
) -> None:
    """Of one certificate there are no more than it may have."""
    honest, idle = learners(folders["eu"]), learners(folders["asia"], "asia-3")
    await honest.take_part()
    context = idle.credentials.client_context([BULK_PROTOCOL])
    host, _, port = syncer.addresses["sync"].rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=60) as made,
        context.wrap_socket(made, server_hostname=SERVER_NAME) as tls,
    ):
        os.write(tls.fileno(), b"no record of TLS")
        with contextlib.suppress(ssl.SSLError, ConnectionError):  # TLS's alert, or a reset
            assert tls.recv(1) == b""
    most = connection_limits.allowance_of({"asia-3": 1}, idle.credentials.names()).connections
    async with contextlib.AsyncExitStack() as held:
        raws = []
        for _ in range(most + 5):
            with contextlib.suppress(OSError):  # refused at the handshake's end
                raws.append(await idle.raw_bulk())
                held.push_async_callback(raws[-1].close)
        await until_status(syncer, lambda now: refusals(now, "too-many-connections") >= 5)
        await honest.train(1)
        assert (await honest.send(honest.push(0, 0))).accepted
        others = learners(folders["us"], "us-2")
        await others.take_part()
    # Those that have ended count no more.
    async with asyncio.timeout(60):
        while True:
            try:
                assert (await idle.download(sync_pb2.DownloadRequest(what=sync_pb2.DownloadRequest.JOB)))[0].found
                break
            except bulk.TransferError:
                await asyncio.sleep(0.05)


def refusals(status: dict[str, Any], reason: str) -> int:
    return int(status["tls"]["refused"].get(reason, 0))


# ------------------------------------------------------------------ impossible numbers

MOST = limits.MAX_COUNT
NONSENSE: dict[str, dict[str, Any]] = {
    "tokens": {"trained_tokens": MOST, "trained_steps": MOST, "slot_step": MOST},
    "steps": {"slot_step": MOST},
    "tokens in no step": {"trained_tokens": 1 << 40},
    "confirmed": {"fragments": [{"epoch": 1, "confirmed_tokens": MOST}] * 2},
    "dropped": {"fragments": [{"epoch": 1, "dropped_stale": MOST}] * 2},
    "above the base": {"fragments": [{"epoch": 1, "tokens": MOST, "steps": MOST}] * 2},
}


@pytest.mark.promise("Impossible numbers end their session, and enter no count and no state", section="Hostile callers")
async def test_impossible_reports_end_their_session_and_nothing_else(
    syncer: SyncerProcess, learners: Learners, folders: dict[str, Path]
) -> None:
    honest = learners(folders["eu"])
    await honest.take_part()
    tokens = (await status_of(syncer))["tokens"]["trained"]
    for name, fields in NONSENSE.items():
        liar = learners(folders["us"], "us-2")
        assert (await liar.take_part()).HasField("seat"), name
        report = liar.counts()
        report.ClearField("fragments")
        rows = {"fragments": [{"epoch": 1}] * 2}
        await liar.say(report=sync_pb2.Report(**(rows | fields)))
        assert await ended(liar) == "bad-message", name
        await liar.close()
    assert honest.ended == "" and (await status_of(syncer))["tokens"]["trained"] == tokens
    # What a push says of itself.
    liar = learners(folders["us"], "us-2")
    await liar.take_part()
    await liar.train(1)
    for changes in ({"tokens": MOST}, {"steps": MOST, "last_step": MOST}, {"tokens": 5 * 100}):
        push = liar.push(0, 0, **changes)
        push.report.fragments[0].tokens = push.tokens
        push.report.slot_step = max(push.last_step, push.report.slot_step)
        reply = await liar.send(push)
        assert (reply.accepted, reply.reason) == (False, "inconsistent"), (changes, reply)
    # It is not in the state: the job goes on, and so does a restarted syncer.
    await honest.train(2)
    assert (await honest.send(honest.push(1, 0))).accepted
    assert (await status_of(syncer))["tokens"]["pending"] >= 0


@pytest.mark.promise(
    "Messages of a session end at most that session; a syncer that received them all restarts",
    section="Hostile callers",
)
async def test_whatever_is_said_in_a_session_ends_at_most_that_session(
    syncer: SyncerProcess, learners: Learners, folders: dict[str, Path]
) -> None:
    """Messages of valid form with any values, and garbage."""
    seeded = random.Random(7)
    honest = learners(folders["eu"])
    await honest.take_part()
    values = [0, 1, 2, 255, 1 << 31, (1 << 32) - 1, MOST, (1 << 63) - 1, (1 << 64) - 1]

    def number() -> int:
        return seeded.choice(values)

    def report() -> sync_pb2.Report:
        row = {"epoch": number() % 3, "base_version": number(), "steps": number(), "tokens": number()}
        cursors = [{"lease": number(), "position": number()} for _ in range(seeded.randrange(4))]
        seconds = seeded.choice([0.0, -1.0, 1e300, float("nan"), float("inf")])
        return sync_pb2.Report(
            slot_step=number(),
            trained_steps=number(),
            trained_tokens=number(),
            fragments=[row] * seeded.randrange(4),
            cursors=cursors,
            compute_seconds=seconds,
            loss=seconds,
        )

    said: list[Any] = [
        lambda: {"report": report()},
        lambda: {"lease_request": {}},
        lambda: {"evaluation": {"tokens": number(), "sum_versions": number(), "loss": -1e300}},
        lambda: {"evaluation_progress": {"share": seeded.choice([2.0, -1.0, float("nan")])}},
        lambda: {"peer_state_wanted": {"patient": True}},
        lambda: {"peer_state_unavailable": {"transfer": number()}},
        lambda: {"base_unavailable": {"fragment": number() & 0x7FFFFFFF}},
        lambda: {"drain_request": {}},
        lambda: {"drained": {}},
        lambda: {"join": {"process": "ab"}},
    ]
    for turn in range(60):
        role = sync_pb2.ROLE_EVALUATOR if turn % 3 == 0 else sync_pb2.ROLE_LEARNER
        liar = learners(folders["us"], "us-2")
        sequences, tenure = seeded.choice([0, 5, MOST]), seeded.choice([0, 1, MOST])
        await liar.join(role=role, tenure=tenure, previous_incarnation=tenure, sequences=sequences)
        try:
            for _ in range(4):
                await liar.say(**seeded.choice(said)())
            await liar.call.write(seeded.randbytes(seeded.randrange(200)))
        except (aio.AioRpcError, asyncio.InvalidStateError):
            pass  # it has been shown out
        await liar.close()
        if turn % 10 == 0:
            await honest.report()  # its heartbeat
        assert not syncer.exited, syncer.text()
    status = await status_of(syncer)
    assert status["phase"] == "training" and all(row["tokens"] < 1 << 53 for row in status["slots"])
    assert honest.ended == "" and "a fault of this program" not in syncer.text(), syncer.text()
    await honest.train(1)
    await until_status(syncer, lambda now: now["slots"][honest.welcome.seat.slot]["steps"] >= 1)


@pytest.mark.promise(
    "Messages of a session end at most that session; a syncer that received them all restarts",
    section="Hostile callers",
)
async def test_a_syncer_that_heard_all_that_starts_again(
    syncer: SyncerProcess, learners: Learners, folders: dict[str, Path]
) -> None:
    assert syncer.terminate() == 0
    syncer.start("--credentials", str(folders["eu"].parent / "syncer"))
    again = Learners(syncer)
    async with again:
        honest = again(folders["eu"])
        await honest.take_part()
        assert (await status_of(syncer))["phase"] in ("training", "waiting")
