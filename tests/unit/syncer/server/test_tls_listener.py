"""The listener before a gRPC server: real certificates, real sockets, and everything that may knock."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import ssl
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc import aio

from diloco_operator.reconcile.job_secrets import RootKey, certificates
from diloco_protocol.common import reach
from diloco_protocol.security.credentials import Credentials, CredentialsError
from diloco_protocol.wire import channels, limits, verify_server
from diloco_protocol.wire.verify_server import ServerNotTrusted, verify_syncer
from diloco_syncer.server.tls import connection_limits
from diloco_syncer.server.tls import listener as listeners
from diloco_syncer.server.tls.listener import PortListener
from parties import DAY, Parties
from patience import until
from repository import ROOT

sys.path.insert(0, str(ROOT / "bench"))

from relay import Link, Relays

pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio(loop_scope="module")]


class Place:
    """A listener, and behind it a server that says who called, and echoes."""

    def __init__(
        self,
        parties: Parties,
        credentials: Path,
        regions: dict[str, int] | None = None,
        options: Sequence[channels.Option] = (),
    ) -> None:
        self.parties = parties
        self.listener = PortListener(Credentials.from_directory(credentials), parties.job, regions or {"local": 2})
        self.server = aio.server(options=[*channels.server_options(), *options])
        self.held = asyncio.Event()  # until it is set `Hold` does not read

    async def start(self, port: int = 0) -> Place:
        self.port = self.listener.bind(f"127.0.0.1:{port}")
        self.server.add_insecure_port(self.listener.server_address)

        async def who(raw: bytes, context: Any) -> bytes:
            peer = self.listener.find_peer(context.peer())
            return str(peer).encode()

        async def echo(stream: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for chunk in stream:
                yield chunk

        async def hold(stream: AsyncIterator[bytes], context: Any) -> bytes:
            await self.held.wait()
            digest = hashlib.sha256()
            async for chunk in stream:
                digest.update(chunk)
            return digest.digest()

        methods = {
            "Who": grpc.unary_unary_rpc_method_handler(who),
            "Echo": grpc.stream_stream_rpc_method_handler(echo),
            "Hold": grpc.stream_unary_rpc_method_handler(hold),
        }
        self.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("T", methods)])
        await self.server.start()
        self.listener.start()
        return self

    async def stop(self) -> None:
        await self.server.stop(0)
        await asyncio.to_thread(self.listener.stop)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def refused(self) -> dict[str, int]:
        return dict(self.listener.refusals.counts)

    def tcp(self) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        made.settimeout(10)
        return made

    async def call(self, credentials: Path | Credentials) -> str:
        """What ``Who`` answers, through a plain channel: gRPC's own checks and nothing more."""
        made = credentials if isinstance(credentials, Credentials) else Credentials.from_directory(credentials)
        async with made.aio_channel(self.address, channels.channel_options()) as channel:
            try:
                return (await channel.unary_unary("/T/Who")(b"", timeout=5)).decode()
            except aio.AioRpcError as error:
                return error.code().name

    async def vouch(self, credentials: Path) -> str:
        """How a learner looks at it first: ``ok``, or what it says."""
        made = Credentials.from_directory(credentials)
        try:
            await verify_syncer(made, self.address, made.names())
        except ServerNotTrusted as error:
            return str(error)
        return "ok"

    async def refuses(self, credentials: Path, reason: str) -> str:
        """Assert that this certificate is refused for that reason, also over gRPC; what its holder hears."""
        before = self.refused.get(reason, 0)
        said = await self.vouch(credentials)
        assert said != "ok"
        assert await self.call(credentials) == "UNAVAILABLE"
        await until(lambda: self.refused.get(reason, 0) >= before + 2, f"{reason}: {self.refused}")
        await until(lambda: self.listener.connections == 0, "closed connections to be forgotten")
        return said


@pytest.fixture
async def parties(tmp_path: Path) -> Parties:
    return Parties(tmp_path / "pki", "tiny")


@contextlib.asynccontextmanager
async def place(parties: Parties, **more: Any) -> AsyncIterator[Place]:
    made = await Place(parties, parties.syncer(), **more).start()
    try:
        yield made
    finally:
        await made.stop()


async def test_who_calls_is_known(parties: Parties) -> None:
    async with place(parties) as there:
        learner = parties.learner()
        assert await there.vouch(learner) == "ok"
        said = await there.call(learner)
        assert said.startswith("the learner of region local of job ns/tiny (") and "127.0.0.1:" in said
        # cert-manager's: no usages but the URI.
        made = parties.other("manager", ["diloco://job/ns/tiny/learner"])
        assert (await there.call(made)).startswith("the learner of job ns/tiny (")
        assert there.refused == {} and there.listener.find_peer("unix-abstract:diloco-guessed") is None
        await until(lambda: there.listener.connections == 0, "closed connections to be forgotten")
        assert not there.listener._by_peer and not there.listener._by_certificate
        folder = Path(there.listener.server_address.removeprefix("unix:")).parent
        assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()


async def test_secrets_that_the_operator_makes_are_good_for_all_regions(parties: Parties, tmp_path: Path) -> None:
    root = RootKey(b"0123456789abcdef0123456789abcdef")
    folders = {}
    for role in ("syncer", "learner"):
        folders[role] = tmp_path / role
        folders[role].mkdir()
        for file, content in certificates(root, "ns", "tiny", "0b0a7f3e", role=role).items():
            (folders[role] / file).write_bytes(content)
    there = await Place(parties, folders["syncer"]).start()
    assert await there.vouch(folders["learner"]) == "ok"
    assert (await there.call(folders["learner"])).startswith("the learner of job ns/tiny (")
    await there.refuses(folders["syncer"], "wrong-role")
    await there.stop()


async def test_strangers_and_others_are_refused_with_the_reason(parties: Parties, tmp_path: Path) -> None:
    foreign = Parties(tmp_path / "foreign", "tiny", title="theirs")
    stranger = foreign.learner("stranger")
    (stranger / "ca.crt").write_bytes(parties.authority.certificate)  # it trusts us; we do not trust it
    server_only, client_only = ["1.3.6.1.5.5.7.3.1"], ["1.3.6.1.5.5.7.3.2"]
    learner = ["diloco://job/ns/tiny/learner"]
    async with place(parties) as there:
        assert "unknown ca" in await there.refuses(stranger, "stranger")
        expired = parties.learner("expired", since=-30 * DAY, days=10)
        assert "refuses our certificate: certificate expired" in await there.refuses(expired, "expired")
        early = parties.learner("early", since=30 * DAY)
        await there.refuses(early, "not-yet-valid")
        # What TLS lets in and its names do not.
        for folder, reason in (
            (parties.learner("other-job", job="other"), "wrong-job"),
            (parties.learner("other-space", namespace="else"), "wrong-job"),
            (parties.other("syncers", ["diloco://job/ns/tiny/syncer"]), "wrong-role"),
            (parties.other("both", [*learner, "diloco://job/ns/tiny/syncer"]), "bad-certificate"),
            (parties.other("odd", ["diloco://job/ns/tiny/king"]), "bad-certificate"),
            (parties.other("nobody", [], ["learner"]), "unnamed"),
            (parties.other("servers", learner, usages=server_only), "wrong-role"),
            (parties.syncer("a-syncer"), "wrong-role"),
        ):
            before = there.refused.get(reason, 0)
            assert await there.call(folder) == "UNAVAILABLE", folder
            await until(lambda r=reason, b=before: there.refused.get(r, 0) > b, f"{folder}: {there.refused}")
        assert (await there.call(parties.other("clients", learner, usages=client_only))).startswith("the learner")
        # Without a certificate, and without TLS.
        context = ssl.create_default_context(cadata=parties.authority.certificate.decode())
        context.set_alpn_protocols(["h2"])
        with (
            there.tcp() as raw,
            context.wrap_socket(raw, server_hostname="diloco-syncer") as tls,
            pytest.raises(ssl.SSLError, match=r"(?i)certificate_required|certificate required"),
        ):
            tls.read(1)
        await until(lambda: there.refused.get("no-certificate") == 1, "no-certificate")
        assert await there.call(Credentials()) == "UNAVAILABLE"
        await until(lambda: there.refused.get("not-tls", 0) >= 1, "not-tls")
        # Old TLS, and TLS for something else than HTTP/2.
        made = Credentials.from_directory(parties.learner())
        for spoil in ("version", "protocol"):
            context = ssl.create_default_context(cadata=parties.authority.certificate.decode())
            context.load_cert_chain(parties.folder / "learner/tls.crt", parties.folder / "learner/tls.key")
            if spoil == "version":
                context.maximum_version = ssl.TLSVersion.TLSv1_2
            before = there.refused.get("other-tls", 0)
            with (
                there.tcp() as raw,
                contextlib.suppress(OSError),  # ssl.SSLError is one
                context.wrap_socket(raw, server_hostname="diloco-syncer") as tls,
            ):
                assert tls.recv(1) == b""
            await until(lambda b=before: there.refused.get("other-tls", 0) == b + 1, spoil)
        assert (await there.call(made)).startswith("the learner")


async def test_a_learner_is_no_server(parties: Parties) -> None:
    """Whatever its certificate can do: the DNS name, an authority that set no usages."""
    learner = parties.learner()
    names = Credentials.from_directory(learner).names()
    for who, uris, usages, said in (
        ("with usages", ["diloco://job/ns/tiny/learner/local"], ["1.3.6.1.5.5.7.3.2"], "unsuitable"),
        ("without", ["diloco://job/ns/tiny/learner/local"], [], "it is no syncer"),
        ("unnamed", [], [], "names no job"),
        ("another's", ["diloco://job/ns/other/syncer"], [], "not of job ns/"),
    ):
        posing = Credentials.from_directory(parties.other(who, uris, ["diloco-syncer"], usages))
        server = aio.server()
        port = posing.bind(server, "127.0.0.1:0")
        await server.start()
        try:
            with pytest.raises(ServerNotTrusted, match=said) as caught:
                await verify_syncer(Credentials.from_directory(learner), f"127.0.0.1:{port}", names)
            assert caught.value.reason == "untrusted-syncer"
        finally:
            await server.stop(0)


async def test_whom_a_learner_looked_at_nobody_else_can_be(parties: Parties) -> None:
    """Another server, with a certificate as good, takes the address over: the channels do not believe it."""
    made = Credentials.from_directory(parties.learner())
    async with place(parties) as there:
        pinned = await verify_syncer(made, there.address, made.names())
        assert (await there.call(pinned)).startswith("the learner")
        another = await Place(parties, parties.syncer("another")).start()
        assert (await another.call(made)).startswith("the learner")
        assert await another.call(pinned) == "UNAVAILABLE"
        await another.stop()


@pytest.mark.promise(
    "A learner connects to a host whose first address is dead: addresses are tried side by side",
    section="Connections and job files",
)
async def test_a_syncer_with_a_dead_address_is_looked_at_over_the_other(
    parties: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TLS too. Where none answers, each is named with what it does."""
    made = Credentials.from_directory(parties.learner())
    numbers = ["127.0.0.2", "127.0.0.1"]
    monkeypatch.setattr(reach, "resolve_name", lambda host, port: numbers)
    async with place(parties) as there:
        with socket.create_server(("127.0.0.2", there.port), backlog=0) as silent, contextlib.ExitStack() as stack:
            for _ in range(3):
                one = stack.enter_context(socket.socket())
                one.setblocking(False)
                one.connect_ex(silent.getsockname())
            assert await verify_syncer(made, f"two.test:{there.port}", made.names()) is not made
            numbers[1] = "127.0.0.3"
            monkeypatch.setattr(verify_server, "CONNECT_SECONDS", 1)
            with pytest.raises(ServerNotTrusted, match=r"127.0.0.2: no answer, 127.0.0.3: connect"):
                await verify_syncer(made, f"two.test:{there.port}", made.names())


@pytest.mark.slow
@pytest.mark.promise("A learner connects over a link whose round trip takes two seconds, with TLS")
async def test_a_round_trip_of_two_seconds_is_no_reason_to_give_up(parties: Parties) -> None:
    """TCP, TLS and HTTP/2 take one each, and a call another."""
    made = Credentials.from_directory(parties.learner())
    async with place(parties) as there:
        with Relays() as relays:
            address = relays.open(there.address, near=Link(latency=1.0))
            pinned = await verify_syncer(made, address, made.names())
            async with pinned.aio_channel(address, channels.channel_options()) as channel:
                answer = await channel.unary_unary("/T/Who")(b"", timeout=60)
            assert answer.decode().startswith("the learner")


async def test_certificates_are_replaced_while_it_serves(
    parties: Parties, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listeners, "_RELOAD_SECONDS", 0.0)
    learner = parties.learner()
    made = Credentials.from_directory(learner)
    async with place(parties) as there:
        first = await verify_syncer(made, there.address, made.names())
        async with first.aio_channel(there.address, channels.channel_options()) as channel:
            call = channel.stream_stream("/T/Echo")()
            await call.write(b"before")
            assert await call.read() == b"before"
            # Half of a change: the new key, the old certificate. And garbage. The old ones stay.
            folder = parties.folder / "syncer"
            kept = {each: (folder / each).read_bytes() for each in ("tls.crt", "tls.key", "ca.crt")}
            fresh = parties.syncer("fresh")
            for file, content in (
                ("tls.key", (fresh / "tls.key").read_bytes()),
                ("tls.crt", b"garbage"),
                ("ca.crt", b"\xff"),
            ):
                (folder / file).write_bytes(content)
                assert (await there.call(first)).startswith("the learner"), file
                (folder / file).write_bytes(kept[file])
            (folder / "ca.crt").unlink()
            assert (await there.call(first)).startswith("the learner")
            (folder / "ca.crt").write_bytes(kept["ca.crt"])
            assert any("the old ones stay" in line for line in caplog.messages)
            assert not any("PRIVATE" in line for line in caplog.messages)
            # The whole of it.
            parties.syncer()
            await until(lambda: True)
            second = await verify_syncer(made, there.address, made.names())
            assert second.authority != first.authority
            assert await there.call(first) == "UNAVAILABLE"  # pinned to what is there no more
            assert (await there.call(second)).startswith("the learner")
            await call.write(b"after")  # who was in stays
            assert await call.read() == b"after"
            await call.done_writing()
        # A learner's side: the folder is read anew at each try.
        parties.learner(since=-30 * DAY, days=10)
        assert "certificate expired" in await there.vouch(learner)
        parties.learner()
        assert await there.vouch(learner) == "ok"
        # Another authority: strangers of yesterday are let in, and those of before no longer.
        old, parties.authority = learner, Parties(parties.folder / "next", "tiny").authority
        parties.syncer()
        assert await there.call(parties.learner("newcomer")) != "UNAVAILABLE"
        assert await there.call(old) == "UNAVAILABLE"


async def test_a_gate_begins_again_on_the_same_port(parties: Parties) -> None:
    """As a syncer does that begins again from its store; a learner's channel finds it by itself."""
    learner = parties.learner()
    first = await Place(parties, parties.syncer()).start()
    made = Credentials.from_directory(learner)
    async with made.aio_channel(first.address, channels.channel_options()) as channel:
        assert (await channel.unary_unary("/T/Who")(b"", timeout=5)).startswith(b"the learner")
        idle = first.tcp()
        with pytest.raises(CredentialsError, match="Address already in use"):
            PortListener(Credentials.from_directory(parties.syncer()), "tiny", {}).bind(first.address)
        await first.stop()
        assert idle.recv(1) == b""
        second = await Place(parties, parties.folder / "syncer").start(first.port)
        call = channel.unary_unary("/T/Who")(b"", timeout=10, wait_for_ready=True)
        assert (await call).startswith(b"the learner")
        await second.stop()


async def test_a_join_token_is_replaced_with_time_to_follow(parties: Parties, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "_RELOAD_SECONDS", 0.0)
    reloader = listeners.CredentialReloader(Credentials.from_directory(parties.syncer()), "tiny", ["h2"])

    def admits(token: str) -> bool:
        return reloader.accepts_token([("diloco-join-token", token)])

    old = "5e" * 32
    assert admits(old) and not admits("new") and not reloader.accepts_token(None)
    (parties.folder / "syncer" / "join-token").write_text("new")
    reloader.reload_if_changed(time.monotonic())
    assert admits("new") and admits(old) and not admits("older")
    monkeypatch.setattr(listeners, "TOKEN_SECONDS", 0.0)
    (parties.folder / "syncer" / "join-token").write_text("newest")
    reloader.reload_if_changed(time.monotonic())
    assert admits("newest") and not admits("new") and not admits(old)


async def test_a_syncers_own_certificate_must_be_its_jobs(parties: Parties, tmp_path: Path) -> None:
    for folder in (parties.learner(), parties.other("x", ["diloco://job/ns/other/syncer"])):
        with pytest.raises(CredentialsError, match="the certificate is for"):
            PortListener(Credentials.from_directory(folder), "tiny", {})
    spoilt = parties.syncer("spoilt")
    (spoilt / "tls.key").write_bytes((parties.syncer("whole") / "tls.key").read_bytes())
    with pytest.raises(CredentialsError, match="are not a certificate and its key"):
        PortListener(Credentials.from_directory(spoilt), "tiny", {})


WINDOW = 65_535  # bytes of a stream that may be under way until they are read, where the window does not grow


async def test_bytes_come_through_whole_and_no_more_than_a_window_before_a_slow_reader(parties: Parties) -> None:
    # Else gRPC widens the window to 16 MiB, and to twice of what it estimates to be under way.
    async with place(parties, options=[("grpc.http2.bdp_probe", 0)]) as there:
        made = Credentials.from_directory(parties.learner())
        async with made.aio_channel(there.address, channels.channel_options()) as channel:
            call = channel.stream_stream("/T/Echo")()
            sent, heard = hashlib.sha256(), hashlib.sha256()
            chunks = [os.urandom(size) for size in (1, 16383, 16385, limits.CHUNK_BYTES, 3, 262144, 262145)] * 3

            async def speak() -> None:
                for chunk in chunks:
                    sent.update(chunk)
                    await call.write(chunk)
                await call.done_writing()

            speaking = asyncio.create_task(speak())
            count = 0
            while (chunk := await call.read()) is not aio.EOF:
                heard.update(chunk)
                count += 1
            await speaking
            assert count == len(chunks) and sent.digest() == heard.digest()
            # A server that does not read: what is under way is bounded, and comes whole afterwards.
            message = os.urandom(4096 - 5)  # gRPC adds five bytes
            fit = WINDOW // 4096
            written = 0

            async def flood() -> AsyncIterator[bytes]:
                nonlocal written
                for _ in range(3 * fit):
                    yield message
                    written += 1

            call = channel.stream_unary("/T/Hold")(flood())
            await until(lambda: written >= fit, "the window to be full")
            for _ in range(20):  # others have their turn meanwhile
                assert (await channel.unary_unary("/T/Who")(b"", timeout=5)).startswith(b"the learner")
            assert written == fit
            there.held.set()
            assert await call == hashlib.sha256(message * (3 * fit)).digest()


class PassedThrough:
    """A connection through a listener, below HTTP/2, which has windows of its own: both its ends, in TLS and inside,
    and on the way buffers of the kernel that are small and do not grow."""

    BUFFER = 64 << 10

    def __init__(self, parties: Parties) -> None:
        folder = parties.learner()
        self.listener = PortListener(Credentials.from_directory(parties.syncer()), "tiny", {"local": 2})
        port = self.listener.bind("127.0.0.1:0")
        assert self.listener._listening is not None
        context = ssl.create_default_context(cadata=parties.authority.certificate.decode())
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        context.set_alpn_protocols(["h2"])
        with socket.socket(socket.AF_UNIX) as inside, socket.socket() as raw:
            for each in (self.listener._listening, raw, inside):  # whom they accept has the same
                self._bound(each)
            inside.bind(self.listener.server_address.removeprefix("unix:"))
            inside.listen()
            self.listener.start()
            raw.settimeout(10)
            raw.connect(("127.0.0.1", port))
            self.outer = context.wrap_socket(raw, server_hostname="diloco-syncer")
            self.inner = inside.accept()[0]
        self._bound(self.inner)
        self.inner.settimeout(10)
        while not self.listener._open:  # it is connected inside before it is counted
            time.sleep(0.001)
        (self.link,) = self.listener._open

    def _bound(self, end: socket.socket) -> None:
        for name in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, name, self.BUFFER)

    def kernel_bytes(self, up: bool) -> int:
        """What the kernel may hold of what goes up, or down; on a unix socket the sender's buffer is all there is."""
        front, back = self.link._front, self.link._back
        assert back is not None
        senders, receiver = ((self.outer, back), front) if up else ((self.inner, front), self.outer)
        sizes = [end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for end in senders]
        return sum(sizes) + receiver.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)


@pytest.fixture
def passed_through(parties: Parties) -> Iterator[PassedThrough]:
    made = PassedThrough(parties)
    yield made
    made.outer.close()
    made.inner.close()
    made.listener.stop()


@pytest.mark.parametrize("up", [True, False], ids=["up", "down"])
async def test_a_peer_that_does_not_read_holds_little_and_gets_all_of_it(
    passed_through: PassedThrough, up: bool
) -> None:
    through, blob = passed_through, os.urandom(8 << 20)
    source, sink = (through.outer, through.inner) if up else (through.inner, through.outer)
    poured = 0

    def pour() -> None:
        nonlocal poured
        while poured < len(blob):
            poured += source.send(blob[poured : poured + (1 << 18)])

    pouring = threading.Thread(target=pour, daemon=True)
    pouring.start()
    await until(lambda: through.link._up if up else through.link._down, "the listener to be held up")
    before = -1
    while poured != before:  # now only the kernel's buffers still fill
        before = poured
        await asyncio.sleep(0.1)
    held = len(through.link._up) + len(through.link._down)
    assert 0 < held <= 2 * (256 << 10)
    most = 2 * (256 << 10) + through.kernel_bytes(up)
    assert poured <= most, (poured, most)

    def read() -> bytes:
        found = bytearray()
        while len(found) < len(blob):
            found += sink.recv(1 << 18)
        return bytes(found)

    assert await asyncio.to_thread(read) == blob
    await asyncio.to_thread(pouring.join, 10)


async def test_a_flood_of_silent_connections_keeps_nobody_out(
    parties: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the bound, all from one address: the oldest go, and an honest learner comes in."""
    monkeypatch.setattr(listeners, "MAX_HANDSHAKES", 20)
    learner = parties.learner()
    async with place(parties) as there:
        silent = [there.tcp() for _ in range(50)]
        # Both: the oldest is refused just before the newest is counted.
        await until(
            lambda: there.refused.get("handshake-flood") == 30 and there.listener.handshakes == 20,
            "the oldest 30 to go",
        )
        assert (await there.call(learner)).startswith("the learner")
        assert there.refused["handshake-flood"] == 31
        gone = sum(each.recv(1) == b"" for each in silent[:30])
        assert gone == 30
        for each in silent:
            each.close()
        await until(lambda: there.listener.handshakes == 0, "those who left to be forgotten")


@pytest.mark.promise(
    "A fault at a new connection costs that connection only, and one log line in ten seconds", section="Hostile callers"
)
async def test_a_fault_at_a_connection_that_comes_costs_that_one_and_one_line(
    parties: Parties, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever fails before the handshake begins: its socket is closed, and the log is not filled."""
    learner = parties.learner()

    def fail(now: float) -> None:
        raise RuntimeError("of any kind")

    async with place(parties) as there:
        with monkeypatch.context() as patched:
            patched.setattr(there.listener.reloader, "reload_if_changed", fail)
            made = [there.tcp() for _ in range(20)]
            for each in made:
                assert await asyncio.to_thread(each.recv, 1) == b""
            here = psutil.Process().net_connections("tcp")
            assert not [one for one in here if one.laddr.port == there.port and one.status != psutil.CONN_LISTEN]
            for each in made:
                each.close()
        name = "diloco_syncer.server.tls.listener"
        assert sum(record.levelname == "ERROR" and record.name == name for record in caplog.records) == 1
        assert there.refused == {"no-room": 20}
        assert (await there.call(learner)).startswith("the learner")


async def test_slow_loris_garbage_and_probes(parties: Parties, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "HANDSHAKE_SECONDS", 1.0)
    learner = parties.learner()
    hello = ssl.MemoryBIO()
    client = ssl.create_default_context(cadata=parties.authority.certificate.decode())
    half = client.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="diloco-syncer")
    with contextlib.suppress(ssl.SSLWantReadError):
        half.do_handshake()
    first = hello.read()
    async with place(parties) as there:
        # A byte now and then: the time is for the whole handshake, not for each byte.
        slow = there.tcp()
        with contextlib.suppress(OSError):
            for byte in first:
                slow.send(bytes([byte]))
                await asyncio.sleep(0.05)
        assert there.refused == {"handshake-timeout": 1}
        monkeypatch.setattr(listeners, "HANDSHAKE_SECONDS", 30.0)  # nothing of what follows takes so long
        # Garbage: at once, and with no time of anybody's.
        for garbage in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            os.urandom(5000),
            b"\x00",
            b"\x16\x03\x01\xff\xff" + os.urandom(20000),
            b"\x16" + bytes(600),
            first[:50] + os.urandom(2000),
        ):
            with there.tcp() as raw, contextlib.suppress(OSError):
                raw.sendall(garbage)
                while raw.recv(1000):
                    pass
        refused = there.refused
        assert refused["not-tls"] >= 5 and sum(refused.values()) == 8, refused
        # A kubelet's probe: connects and leaves. No refusal, no line in the log.
        for _ in range(10):
            there.tcp().close()
        await until(lambda: there.listener.handshakes == 0)
        assert there.refused == refused
        # In the middle of a handshake somebody leaves.
        with there.tcp() as raw:
            raw.sendall(first)
            raw.recv(10)
        await until(lambda: there.refused.get("broken-off") == 1, "broken-off")
        assert (await there.call(learner)).startswith("the learner")


async def test_one_certificate_has_its_share_of_connections(parties: Parties, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "SPARE_CONNECTIONS", -40)
    async with place(parties, regions={"eu-1": 1, "us-2": 3}) as there:
        europe, america = parties.learner("eu", "eu-1"), parties.learner("us", "us-2")
        names = Credentials.from_directory(europe).names()
        assert connection_limits.allowance_of({"eu-1": 1, "us-2": 3}, names).connections == 0
        assert await there.call(europe) == "UNAVAILABLE" and there.refused["too-many-connections"] >= 1
        assert (await there.call(america)).startswith("the learner of region us-2")


@pytest.mark.promise("The sync port accepts no more connections than there are descriptors", section="Hostile callers")
async def test_there_are_no_more_connections_than_descriptors_for_them(
    parties: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three a connection, and some are kept for the store, pages and control calls."""
    for files, most in ((1024, 128), (65_536, listeners.MAX_CONNECTIONS), (-1, listeners.MAX_CONNECTIONS), (64, 16)):
        assert listeners.connections_for(files) == most
    monkeypatch.setattr(listeners, "connections_for", lambda files: 1)
    learner = parties.learner()
    async with place(parties) as there:
        made = Credentials.from_directory(learner)
        async with made.aio_channel(there.address, channels.channel_options()) as channel:
            assert (await channel.unary_unary("/T/Who")(b"", timeout=5)).startswith(b"the learner")
            assert await there.call(learner) == "UNAVAILABLE" and there.refused["no-room"] >= 1
            assert there.listener.connections == 1
        await until(lambda: there.listener.connections == 0)
        assert (await there.call(learner)).startswith("the learner")


async def test_after_tls_a_silent_peer_is_left_too(parties: Parties, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate and then nothing: gRPC wants HTTP/2 to begin in time."""
    monkeypatch.setattr(limits, "JOIN_SECONDS", 1.0)
    folder = parties.learner()
    async with place(parties) as there:
        context = ssl.create_default_context(cadata=parties.authority.certificate.decode())
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        context.set_alpn_protocols(["h2"])
        with there.tcp() as raw, context.wrap_socket(raw, server_hostname="diloco-syncer") as tls:

            def hung_up() -> bool:
                while tls.recv(1000):
                    pass
                return True

            async with asyncio.timeout(8):
                assert await asyncio.to_thread(hung_up)
        await until(lambda: there.listener.connections == 0)
