"""What can be said on a bulk connection, by whoever may connect: it costs at most that connection.

One syncer process for all tests of this file, in plain text, with a join token. One honest learner takes part all the
time: after each test it merges again, the syncer has reported no fault, and has ended every bulk connection that the
test closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from hostile_client import Learner, Learners
from syncer_client import PREFACE, RawBulk, SyncerProcess, behind_length, raw_job, turn

from diloco_protocol.security.credentials import Credentials
from diloco_protocol.wire import bulk, limits, sync_pb2
from diloco_syncer.server.tls.listener import MAX_HANDSHAKES
from patience import until

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]
TOKEN = "5e" * 32
ALLOWED = Credentials(token=TOKEN)
NOBODY = "the join token is missing or wrong"
JOB = sync_pb2.DownloadRequest(format=limits.FORMAT, what=sync_pb2.DownloadRequest.JOB)
Connect = Callable[..., Awaitable[RawBulk]]


@pytest.fixture(scope="module")
def syncer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncerProcess]:
    folder = tmp_path_factory.mktemp("syncer")
    (folder / "token").write_text(TOKEN)
    made = SyncerProcess(folder / "syncer", raw_job()).start("--join-token-file", str(folder / "token"))
    yield made
    assert not made.exited, made.text()
    made.stop()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def honest(syncer: SyncerProcess) -> AsyncIterator[Learner]:
    learner = Learner(syncer, ALLOWED, "local")
    await learner.take_part()
    await merge(learner)
    yield learner
    await learner.close()


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def merges_on(syncer: SyncerProcess, honest: Learner) -> AsyncIterator[None]:
    yield
    await merge(honest)
    assert honest.ended == "" and "a fault of this program" not in syncer.text(), syncer.text()


@pytest_asyncio.fixture(loop_scope="module")
async def learners(syncer: SyncerProcess) -> AsyncIterator[Learners]:
    async with Learners(syncer) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def connect(syncer: SyncerProcess) -> AsyncIterator[Connect]:
    """Makes bulk connections, which are closed at the end of the test."""
    made: list[RawBulk] = []

    async def connect(first: bytes = PREFACE) -> RawBulk:
        made.append(await RawBulk.connect(syncer.addresses["sync"], first=first))
        return made[-1]

    yield connect
    ports = {each.port for each in made}
    for each in made:
        await each.close()
    await until(lambda: not ports & callers(syncer), "the syncer to end the connections", lambda: callers(syncer))


async def merge(learner: Learner) -> None:
    """One step and one merge for each fragment."""
    await turn(learner, learner.base[0][1])


async def second(learners: Learners) -> Learner:
    """Another learner, which holds a slot and has trained a step."""
    made = learners(ALLOWED, "local")
    assert (await made.join(ordinal=1)).welcome.HasField("seat")
    await made.ready()
    await made.train(1)
    return made


def offer(learner: Learner) -> tuple[sync_pb2.UploadHeader, bytes]:
    """The header and the bytes of an upload that the syncer takes."""
    data = learner.delta(0).tobytes()
    header = learner.header(push=learner.push(0, 0))
    header.format, header.total_bytes = limits.FORMAT, len(data)
    header.bytes, header.checksum = len(data), bulk.checksum(data)
    return header, data


def peak_mib(syncer: SyncerProcess) -> float:
    assert syncer.process is not None
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{syncer.process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def callers(syncer: SyncerProcess) -> set[int]:
    """The other ends' ports of the connections that the syncer has open at its sync port."""
    assert syncer.process is not None
    port = int(syncer.addresses["sync"].rpartition(":")[2])
    rows = psutil.Process(syncer.process.pid).net_connections("tcp")
    return {row.raddr.port for row in rows if row.raddr and row.laddr.port == port}


def refused(syncer: SyncerProcess, reason: str) -> int:
    return int(syncer.status()["tls"]["refused"].get(reason, 0))


@pytest.mark.promise("Whatever is said on a bulk connection costs at most that connection", section="Hostile callers")
async def test_garbage_costs_its_connection(connect: Connect) -> None:
    """Behind the preface; of any length that a message may have, and of others."""
    seeded = random.Random(5)
    for _ in range(40):
        no_length = seeded.randrange(1 << 17, 1 << 32).to_bytes(4, "big")
        no_message = behind_length(b"\xff" + seeded.randbytes(seeded.randrange(3000)))  # a field of no known kind
        for said in (no_length + seeded.randbytes(seeded.randrange(3000)), no_message):
            raw = await connect()
            await raw.send(said)
            assert await raw.until_ended() == b""


async def test_garbage_in_place_of_the_preface_costs_its_connection(connect: Connect) -> None:
    """Then it is for gRPC, which knows no such thing either; or it is only the beginning of one."""
    for first in (b"\0", PREFACE[:-1] + b"\r", PREFACE.upper(), b"\x16\x03\x01" + bytes(500)):
        raw = await connect(first)
        await raw.until_ended()  # gRPC may say good-bye
    for size in range(1, len(PREFACE)):
        await (await connect(PREFACE[:size])).close()


@pytest.mark.promise("Whatever is said on a bulk connection costs at most that connection", section="Hostile callers")
async def test_lengths_of_four_gigabytes_take_no_memory(
    syncer: SyncerProcess, learners: Learners, connect: Connect
) -> None:
    before, liar = peak_mib(syncer), await second(learners)
    header, data = offer(liar)
    for _ in range(20):
        raw = await connect()
        await raw.send(b"\xff" * 4, bytes(1000))  # of a message
        assert await raw.until_ended() == b""
        raw = await connect()
        await raw.request(TOKEN, upload=header)
        await raw.send(b"\xff" * 4, bytes(1000))  # of a chunk
        assert await raw.until_ended() == b""
    large = sync_pb2.UploadHeader()
    large.CopyFrom(header)
    for size in (1 << 32, 1 << 40, (1 << 64) - 1):
        large.total_bytes = large.bytes = size
        raw = await connect()
        await raw.request(TOKEN, upload=large)
        reply = (await raw.reply()).upload
        assert not reply.accepted and reply.reason in ("wrong-size", "bad-transfer"), reply
    assert peak_mib(syncer) - before < 32
    # None of them has begun an upload that is in the way of the true one.
    raw = await connect()
    await raw.request(TOKEN, upload=header)
    await raw.send(behind_length(data))
    assert (await raw.reply()).upload.accepted


async def test_an_upload_that_is_silent_is_in_nobodys_way(
    honest: Learner, learners: Learners, connect: Connect
) -> None:
    """A header, and then nothing; a header, half of the bytes, and then nothing."""
    silent = await second(learners)
    header, data = offer(silent)
    nothing, half = await connect(), await connect()
    await nothing.request(TOKEN, upload=header)
    await half.request(TOKEN, upload=header)
    await half.send(behind_length(data)[: len(data) // 2])
    await merge(honest)
    # The same again over a third connection: the one that comes takes the place of those that do not.
    raw = await connect()
    await raw.request(TOKEN, upload=header)
    await raw.send(behind_length(data))
    assert (await raw.reply()).upload.accepted
    await half.send(behind_length(data)[len(data) // 2 :])
    reply = (await half.reply()).upload
    assert (reply.accepted, reply.reason) == (False, "bad-transfer") and "sent again" in reply.message


@pytest.mark.slow
async def test_who_says_no_more_is_given_up(honest: Learner, learners: Learners, connect: Connect) -> None:
    """After ``STALL_SECONDS``: half a message; an upload without its bytes; one that was refused, without an end."""
    silent = await second(learners)
    header, data = offer(silent)
    message, upload, unended = await connect(), await connect(), await connect()
    await message.send(behind_length(JOB.SerializeToString())[:-1])
    await upload.request(TOKEN, upload=header)
    await unended.request("wrong", upload=header)
    assert (await unended.failure())[0] == NOBODY
    ends = [asyncio.create_task(each.until_ended(100)) for each in (message, unended)]
    answer = asyncio.create_task(upload.reply(100))
    waiting: set[asyncio.Task[Any]] = {*ends, answer}
    while waiting:
        await merge(honest)
        await silent.report()
        _, waiting = await asyncio.wait(waiting, timeout=5)  # so that what is held back does not become too old
    assert [await each for each in ends] == [b"", b""]
    reply = (await answer).upload
    assert (reply.accepted, reply.reason) == (False, "bad-transfer") and "no bytes for" in reply.message
    await upload.send(behind_length(b""))  # it has heard it: the connection serves on
    await upload.request(TOKEN, upload=header)
    await upload.send(behind_length(data))
    assert (await upload.reply()).upload.accepted


async def test_what_comes_byte_by_byte_is_taken(honest: Learner, learners: Learners, connect: Connect) -> None:
    """The preface, the request, and each byte of the payload behind a length of its own."""
    slow = await second(learners)
    header, data = offer(slow)
    request = sync_pb2.BulkRequest(token=TOKEN, upload=header).SerializeToString()
    chunks = b"".join(behind_length(data[at : at + 1]) for at in range(len(data)))
    raw = await connect(b"")
    said = PREFACE + behind_length(request) + chunks
    for at in range(len(said)):
        if at in (5, len(PREFACE) + 2, len(said) // 2):
            await merge(honest)
        await raw.send(said[at : at + 1])
        await asyncio.sleep(0)
    assert (await raw.reply()).upload.accepted


@pytest.mark.promise("Whatever is said on a bulk connection costs at most that connection", section="Hostile callers")
@pytest.mark.parametrize("what", ["requests of who has no session", "chunks of one byte, refused"])
async def test_small_things_that_pour_in_hold_up_nobody(honest: Learner, connect: Connect, what: str) -> None:
    """Whatever one connection has to say, others have their turn. Each of these takes seconds to be worked through."""
    raws = [await connect() for _ in range(3)]
    last = behind_length(sync_pb2.BulkRequest(token=TOKEN).SerializeToString())
    if what == "requests of who has no session":
        asked = sync_pb2.DownloadRequest(format=limits.FORMAT, job="raw", process="ab")
        poured = behind_length(sync_pb2.BulkRequest(token=TOKEN, download=asked).SerializeToString()) * 60_000 + last
    else:
        header = sync_pb2.UploadHeader(format=limits.FORMAT, job="raw", process="ab", bytes=1 << 30)
        for raw in raws:
            await raw.request(TOKEN, upload=header)
            assert (await raw.reply()).upload.reason == "not-joined"
        poured = behind_length(b"x") * 60_000 + behind_length(b"") + last
    pouring = [asyncio.create_task(raw.send(poured)) for raw in raws]
    answered = [asyncio.create_task(raw.until_heard(b"the request does not say what")) for raw in raws]
    try:
        await merge(honest)
        await merge(honest)
        assert not any(task.done() for task in answered), "the job stood still meanwhile"
    finally:
        for task in (*pouring, *answered):
            task.cancel()
        await asyncio.gather(*pouring, *answered, return_exceptions=True)
        for raw in raws:
            raw.abort()


async def test_who_hears_no_answer_holds_up_nobody(connect: Connect, honest: Learner, syncer: SyncerProcess) -> None:
    """Requests without end, of answers that nobody reads."""
    before, raw = peak_mib(syncer), await connect()
    poured = behind_length(sync_pb2.BulkRequest(token=TOKEN, download=JOB).SerializeToString()) * 100_000
    pouring = asyncio.create_task(raw.send(poured))
    await merge(honest)
    await merge(honest)
    assert not pouring.done()  # the answers have filled the sockets, and no more is read
    pouring.cancel()
    await asyncio.gather(pouring, return_exceptions=True)
    raw.abort()
    assert peak_mib(syncer) - before < 32


async def test_thousands_of_connections_that_say_nothing_keep_nobody_out(
    syncer: SyncerProcess, honest: Learner, learners: Learners
) -> None:
    most = 3000
    before, held = refused(syncer, "handshake-flood") + refused(syncer, "handshake-timeout"), len(callers(syncer))
    with idle_connections(syncer, most // 2, b""):
        await merge(honest)
        newcomer = learners(ALLOWED, "local")
        with idle_connections(syncer, most // 2, b""):
            assert (await newcomer.join(ordinal=1)).HasField("welcome")
            await newcomer.ready()  # over a bulk connection of its own
            await merge(honest)
            assert len(callers(syncer)) <= held + 2 + MAX_HANDSHAKES
            pushed_out = refused(syncer, "handshake-flood") + refused(syncer, "handshake-timeout") - before
            assert pushed_out >= most - MAX_HANDSHAKES
    await until(lambda: len(callers(syncer)) <= held + 2)
    assert syncer.text().count(": handshake-flood: ") < 20  # a flood fills no disk


async def test_thousands_of_bulk_connections_that_ask_for_nothing_keep_nobody_out(
    syncer: SyncerProcess, honest: Learner, learners: Learners
) -> None:
    held = len(callers(syncer))
    with idle_connections(syncer, 2000, PREFACE):
        await until(lambda: len(callers(syncer)) > 2000)
        await merge(honest)
        newcomer = learners(ALLOWED, "local")
        assert (await newcomer.join(ordinal=1)).HasField("welcome")
        await newcomer.ready()
        await merge(honest)
    await until(lambda: len(callers(syncer)) <= held + 2)


@contextlib.contextmanager
def idle_connections(syncer: SyncerProcess, count: int, said: bytes) -> Iterator[None]:
    host, _, port = syncer.addresses["sync"].rpartition(":")
    with contextlib.ExitStack() as held:
        for _ in range(count):
            held.enter_context(socket.create_connection((host, int(port)), timeout=10)).sendall(said)
        yield


async def test_a_bulk_call_needs_the_join_token(
    syncer: SyncerProcess, honest: Learner, learners: Learners, connect: Connect
) -> None:
    """It is refused before its bytes are read, and its connection ends."""
    before, sequence = refused(syncer, "wrong-token"), honest.sequence[0]
    header, _ = offer(honest)
    honest.sequence[0] = sequence
    for token in ("", TOKEN[:-1], TOKEN + "x", "\N{GREEK SMALL LETTER EPSILON}"):
        for what in ({"upload": header}, {"download": JOB}):
            raw = await connect()
            await raw.request(token, **what)
            assert await raw.failure() == (NOBODY, True)
            await raw.send(behind_length(b""))
            assert await raw.until_ended() == b""
    raw = await connect()
    await raw.request(TOKEN, download=JOB)
    found = (await raw.reply()).download
    assert found.found and len(await raw.read(found.bytes)) == found.total_bytes
    # One for each call: the next call on a connection that is about to end may see its end and no answer.
    strangers = [learners(Credentials(token=TOKEN[:-1]), "local") for _ in range(2)]
    for call in (strangers[0].download(JOB), strangers[1].upload(header, honest.delta(0))):
        with pytest.raises(bulk.TransferError, match="join token") as caught:
            await call
        assert not caught.value.retry
    assert refused(syncer, "wrong-token") == before + 10
    assert 1 <= syncer.text().count(": wrong-token: ") <= 10


@pytest.mark.promise("Whatever is said on a bulk connection costs at most that connection", section="Hostile callers")
async def test_any_request_that_can_be_read_costs_at_most_its_connection(learners: Learners, connect: Connect) -> None:
    """Requests of valid form with any values."""
    seeded, liar = random.Random(11), await second(learners)
    values = [0, 1, 2, 255, 1 << 20, (1 << 32) - 1]
    large = [*values, 1 << 32, 1 << 62, (1 << 64) - 1]
    kinds = sync_pb2.DownloadRequest

    def anything() -> dict[str, Any]:
        named = {
            "format": seeded.choice([limits.FORMAT, limits.FORMAT, 0, 99]),
            "job": seeded.choice(["raw", "raw", "", "other", "x" * 9000]),
            "process": seeded.choice([liar.process, liar.process, "", "!", "x" * 9000]),
            "offset": seeded.choice(large),
            "bytes": seeded.choice(large),
        }
        if seeded.random() < 0.5:
            what = seeded.choice([kinds.FULL, kinds.DELTA, kinds.LAYOUT, kinds.FROZEN, kinds.PEER_STATE, 77])
            wanted = {
                "fragment": seeded.choice(values),
                "epoch": seeded.choice([0, 1]),
                "version": seeded.choice(large),
            }
            return {"download": kinds(what=what, **wanted, **named)}
        kind = seeded.choice(
            [
                {"push": liar.push(seeded.randrange(2), 0, steps=seeded.choice(large))},
                {"initial": sync_pb2.Initial(part=seeded.randrange(9), fragment=seeded.choice(values))},
                {"peer_state": sync_pb2.PeerState(transfer=seeded.choice(large))},
                {"base": sync_pb2.Base(fragment=seeded.choice(values), epoch=1, version=seeded.choice(large))},
                {},
            ]
        )
        total, slot = seeded.choice(large), seeded.choice([liar.welcome.seat.slot, *values])
        return {"upload": sync_pb2.UploadHeader(total_bytes=total, slot=slot, checksum=1, **kind, **named)}

    for _ in range(150):
        raw = await connect()
        asked = anything()
        await raw.request(TOKEN, **asked)
        await raw.send(behind_length(b""), seeded.randbytes(seeded.randrange(50)))
        reply = await raw.reply()
        assert not reply.upload.accepted, (asked, reply)
        raw.abort()
