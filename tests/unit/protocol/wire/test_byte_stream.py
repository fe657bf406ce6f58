"""A connection's bytes, in plain text and by TLS, over pairs of connected sockets."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_protocol.security.credentials import Credentials
from diloco_protocol.wire import byte_stream
from diloco_protocol.wire.byte_stream import ByteCount, ByteStream, StreamBroken, TlsState, set_options
from parties import Parties
from patience import until

LARGE = (3 << 20) + 17


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory) -> Parties:
    made = Parties(tmp_path_factory.mktemp("pki"), "job")
    made.syncer()
    made.learner()
    return made


def server_context(folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    context.load_verify_locations(folder / "ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # as the syncer's
    return context


def sockets() -> tuple[socket.socket, socket.socket]:
    ends = socket.socketpair()
    for one in ends:
        one.setblocking(False)
    return ends


def tls_streams(learner: Path, syncer: Path) -> tuple[ByteStream, ByteStream]:
    """The client's end and the server's, before the handshake, with the credentials of these folders."""
    here, there = sockets()
    client = Credentials.from_directory(learner)
    return (
        ByteStream(here, TlsState.begin(client.client_context(["x"]), client.server_name)),
        ByteStream(there, TlsState.begin(server_context(syncer))),
    )


async def connected(parties: Parties | None) -> tuple[ByteStream, ByteStream]:
    """The same, after the handshake. ``parties`` None: in plain text."""
    if parties is None:
        here, there = sockets()
        return ByteStream(here), ByteStream(there)
    ends = tls_streams(parties.folder / "learner", parties.folder / "syncer")
    await asyncio.gather(*(one.shake_hands() for one in ends))
    return ends


def vanish(stream: ByteStream) -> None:
    """Close its socket, as the system does for a process that ends: by TLS without a good-bye."""
    stream.closed = True
    stream._socket.close()


Pair = tuple[ByteStream, ByteStream]


@pytest.fixture(params=["plain", "tls"])
async def pair(request: pytest.FixtureRequest, parties: Parties) -> AsyncIterator[Pair]:
    here, there = await connected(parties if request.param == "tls" else None)
    yield here, there
    here.close()
    there.close()


def random_bytes(size: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


async def read_all(stream: ByteStream, size: int) -> bytearray:
    data, filled = bytearray(size), 0
    while filled < size:
        count = await stream.read_into(memoryview(data)[filled : filled + byte_stream.WIRE_BYTES])
        assert count, f"it ended after {filled} bytes"
        filled += count
    return data


def is_tls(stream: ByteStream) -> bool:
    return stream._state is not None


def waits(stream: ByteStream) -> Callable[[], bool]:
    return lambda: bool(stream._waiting)


# ------------------------------------------------------------------ bytes


async def test_large_payloads_both_ways_at_once_come_whole_and_are_counted(pair: Pair) -> None:
    here, there = pair
    up, down = random_bytes(LARGE, 1), random_bytes(LARGE + 1, 2)
    before = [(one.count.sent, one.count.received) for one in pair]
    noted = list[int]()
    *_, at_there, at_here = await asyncio.gather(
        here.write(b"head", memoryview(up), note=noted.append),
        there.write(memoryview(down)),
        read_all(there, 4 + LARGE),
        read_all(here, LARGE + 1),
    )
    assert at_there == b"head" + up.tobytes() and at_here == down.tobytes()
    sent = here.count.sent - before[0][0]
    assert sent == there.count.received - before[1][1] == sum(noted)
    assert there.count.sent - before[1][0] == here.count.received - before[0][1]
    assert sent > LARGE + 4 if is_tls(here) else sent == LARGE + 4
    assert sent < 1.01 * LARGE, "a record has 16 KiB"


async def test_what_is_asked_for_is_read_and_no_more(pair: Pair) -> None:
    here, there = pair
    await here.write(b"0123456789")
    target = bytearray(b"." * 8)
    assert await there.read_into(memoryview(target)[:4]) == 4
    assert target == b"0123....", "and what is behind is another's"
    assert await there.read_exactly(5) == b"45678"
    assert await there.read_into(memoryview(target)) == 1 and target == b"9123...."


async def test_bytes_that_come_one_by_one_are_put_together(pair: Pair) -> None:
    here, there = pair
    reading = asyncio.ensure_future(there.read_exactly(3))
    for byte in (b"a", b"b", b"c"):
        await until(waits(there))
        assert not reading.done()
        await here.write(byte)
    assert await reading == b"abc"


async def test_while_nobody_reads_nothing_is_read_and_the_sender_waits(pair: Pair) -> None:
    here, there = pair
    before = there.count.received
    writing = asyncio.ensure_future(here.write(bytes(LARGE)))
    await until(waits(here))
    assert here.count.sent < LARGE and not writing.done() and there.count.received == before
    assert await read_all(there, LARGE) == bytes(LARGE)
    await writing


async def test_what_is_sent_is_taken_as_it_goes(pair: Pair) -> None:
    """Nothing of a payload is copied before its turn comes, and by TLS encrypted."""
    here, there = pair
    payload = bytearray(LARGE)
    writing = asyncio.ensure_future(here.write(memoryview(payload)))
    await until(waits(here))
    payload[-1] = 7
    assert (await read_all(there, LARGE))[-1] == 7
    await writing


async def test_one_stream_leaves_others_their_turn(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that are there already are read without a wait, and could be so for ever, few at a time too."""
    here, there = pair
    monkeypatch.setattr(byte_stream, "_TURN_BYTES", 10 * byte_stream._LEAST_BYTES)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    await here.write(bytes(10_000))
    asking = asyncio.ensure_future(others())
    await asyncio.sleep(0)
    for _ in range(100):
        assert await there.read_into(memoryview(bytearray(100))) == 100
    assert 9 <= turns <= 15
    asking.cancel()


# ------------------------------------------------------------------ the check before bytes are written


async def test_the_check_comes_before_bytes_are_written_and_may_forbid_it(pair: Pair) -> None:
    """Also after a wait: whose the memory is may have changed meanwhile."""
    here, there = pair
    target, seen, forbidden = bytearray(4), list[bytes](), False

    def check() -> None:
        seen.append(bytes(target))
        if forbidden:
            raise ValueError("it is another's now")

    reading = asyncio.ensure_future(there.read_into(memoryview(target), check))
    await until(waits(there))
    await here.write(b"abcd")
    assert await reading == 4 and set(seen) == {bytes(4)} and target == b"abcd"
    reading = asyncio.ensure_future(there.read_into(memoryview(target), check))
    await until(waits(there))
    forbidden = True
    await here.write(b"efgh")
    with pytest.raises(ValueError, match="another's"):
        await reading
    assert target == b"abcd"
    assert await there.read_exactly(4) == b"efgh", "who may have it reads it"


# ------------------------------------------------------------------ the end


async def test_the_end_is_told_after_all_that_was_sent(pair: Pair) -> None:
    here, there = pair
    await here.write(b"abc")
    here.close()
    target = memoryview(bytearray(8))
    assert await there.read_into(target) == 3
    assert [await there.read_into(target) for _ in range(2)] == [0, 0]
    assert await there.read_exactly(4) == b""


async def test_an_end_within_what_is_awaited_is_a_break(pair: Pair) -> None:
    here, there = pair
    await here.write(b"abc")
    here.close()
    with pytest.raises(StreamBroken, match="ended after 3 of 4 bytes"):
        await there.read_exactly(4)


async def test_an_end_comes_to_who_waits_for_bytes(pair: Pair) -> None:
    here, there = pair
    reading = asyncio.ensure_future(there.read_exactly(4))
    await until(waits(there))
    vanish(here)
    assert await reading == b""


async def test_a_connection_that_is_broken_off_says_so(pair: Pair) -> None:
    here, there = pair
    await there.write(b"is not read")
    vanish(here)  # with bytes that nobody has read: it is reset
    with pytest.raises(StreamBroken, match="connection reset by peer"):
        await there.read_exactly(4)
    with pytest.raises(StreamBroken, match="broken pipe"):
        await there.write(b"more")


async def test_a_writer_hears_that_the_other_side_has_gone(pair: Pair) -> None:
    here, there = pair
    writing = asyncio.ensure_future(here.write(bytes(LARGE)))
    await until(waits(here))
    there.close()
    with pytest.raises(StreamBroken, match=r"broken pipe|connection reset by peer"):
        await writing


async def test_closing_ends_the_waits_on_both_ways(pair: Pair) -> None:
    here, _ = pair
    closed = list[int]()
    here.when_closed(lambda: closed.append(1))
    tasks = [asyncio.ensure_future(here.read_exactly(1)), asyncio.ensure_future(here.write(bytes(LARGE)))]
    await until(lambda: len(here._waiting) == 2)
    here.close()
    for task in tasks:
        with pytest.raises(StreamBroken, match="the connection was closed"):
            await task
    here.close()
    assert closed == [1] and here.closed


async def test_on_a_closed_connection_nothing_is_read_or_written(pair: Pair) -> None:
    here, there = pair
    await there.write(b"abc")
    here.close()
    with pytest.raises(StreamBroken, match="the connection was closed"):
        await here.read_into(memoryview(bytearray(3)))
    with pytest.raises(StreamBroken):
        await here.write(b"x")


async def test_a_wait_that_is_given_up_leaves_nothing_behind(pair: Pair) -> None:
    here, there = pair
    for _ in range(2):
        reading = asyncio.ensure_future(there.read_exactly(4))
        await until(waits(there))
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert not there._waiting
        assert not asyncio.get_running_loop().remove_reader(there._socket), "the loop watches it no longer"
    await here.write(b"abcd")
    assert await there.read_exactly(4) == b"abcd"


# ------------------------------------------------------------------ a connection that lies idle


async def nothing(here: ByteStream, there: ByteStream) -> None:
    pass


async def bytes_come(here: ByteStream, there: ByteStream) -> None:
    await there.write(b"x")


async def other_side_closes(here: ByteStream, there: ByteStream) -> None:
    there.close()


async def it_is_reset(here: ByteStream, there: ByteStream) -> None:
    await here.write(b"is not read")
    vanish(there)


async def closed_here(here: ByteStream, there: ByteStream) -> None:
    here.close()


@pytest.mark.parametrize(
    ("what", "ended"),
    [(nothing, False), (bytes_come, True), (other_side_closes, True), (it_is_reset, True), (closed_here, True)],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_whether_an_idle_connection_is_of_use(
    pair: Pair, what: Callable[[ByteStream, ByteStream], Awaitable[None]], ended: bool
) -> None:
    here, there = pair
    await asyncio.gather(here.write(b"used before"), there.read_exactly(11))
    await asyncio.gather(there.write(b"and answered"), here.read_exactly(12))
    await what(here, there)
    assert here.has_ended() is ended


async def test_a_look_takes_nothing_away(pair: Pair) -> None:
    here, there = pair
    await there.write(b"abc")
    assert here.has_ended() and await here.read_exactly(3) == b"abc"


# ------------------------------------------------------------------ TLS


async def test_a_handshake_in_which_the_other_side_leaves_is_a_break(parties: Parties) -> None:
    here, there = tls_streams(parties.folder / "learner", parties.folder / "syncer")
    shaking = asyncio.ensure_future(here.shake_hands())
    await until(waits(here))
    there._socket.recv(1 << 16)
    vanish(there)
    with pytest.raises(StreamBroken, match="hung up in the handshake"):
        await shaking
    here.close()


async def test_a_server_of_another_authority_is_not_trusted(parties: Parties, tmp_path: Path) -> None:
    others = Parties(tmp_path / "others", "job")
    here, there = tls_streams(parties.folder / "learner", others.syncer())
    shaking = asyncio.ensure_future(there.shake_hands())
    with pytest.raises(ssl.SSLCertVerificationError):
        await here.shake_hands()
    here.close()
    with pytest.raises((ssl.SSLError, StreamBroken)):
        await shaking
    there.close()


async def test_by_tls_a_good_bye_is_said(parties: Parties) -> None:
    here, there = await connected(parties)
    here.close()
    assert there._socket.recv(100) and there._socket.recv(100) == b""
    there.close()


async def test_bytes_that_are_no_tls_are_a_break(parties: Parties) -> None:
    here, there = await connected(parties)
    here._socket.send(b"\0" * 100)
    with pytest.raises(StreamBroken, match="TLS: "):
        await there.read_exactly(1)
    here.close()
    there.close()


async def test_streams_share_their_buffer_and_nothing_is_left_in_it(parties: Parties) -> None:
    """Of each stream TLS has all that came before another one reads."""
    pairs = [await connected(parties) for _ in range(3)]
    data = [random_bytes(LARGE // 3, n) for n in range(3)]
    writing = [here.write(memoryview(sent)) for (here, _), sent in zip(pairs, data, strict=True)]
    found = await asyncio.gather(*(read_all(there, LARGE // 3) for _, there in pairs), *writing)
    assert [bytes(one) for one in found[:3]] == [one.tobytes() for one in data]
    for pair in pairs:
        for one in pair:
            one.close()


# ------------------------------------------------------------------ sockets


async def test_bytes_are_counted_where_somebody_else_has_begun_to() -> None:
    ends = sockets()
    count = ByteCount(received=1000, sent=2000)  # the handshake's, of a listener
    here, there = ByteStream(ends[0], None, count), ByteStream(ends[1])
    await here.write(b"abc")
    await there.write(b"defg")
    await asyncio.gather(here.read_exactly(4), there.read_exactly(3))
    assert (count.received, count.sent) == (1004, 2003)
    here.close()
    there.close()


def test_a_peer_that_is_dead_is_noticed_within_50_s() -> None:
    with socket.socket() as made:
        set_options(made)
        assert not made.getblocking() and made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        idle, every, times, unanswered = (
            made.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        )
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert idle + every * times == 50 and unanswered == 50_000
