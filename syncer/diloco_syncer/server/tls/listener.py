"""The sync port: with credentials mutual TLS ends here, and the peer becomes known.

Theory of operation. gRPC's own TLS does not say why a handshake failed, bounds no handshakes, and shows no reason in
metrics; and it would stand between the bulk bytes and their arrays. So this listener owns the sync port. A thread with
its own event loop accepts, makes the TLS handshake (connection.py), and judges the certificate
(``diloco_protocol.security.identity``). Then a bulk connection goes to the syncer's loop (``serve_bulk``), and every
other one is connected to the gRPC server, which listens on a unix socket in a directory that only this user may enter.
Each of these inner connections is bound to a random name. gRPC reports that name as the call's peer, and ``find_peer``
maps it to the certificate of the connection. In plain text there is no handshake, and no certificate.

The syncer's shards (``diloco_syncer.shards``) have no ports. A connection for one names it in its first message: in the
ClientHello (client_hello.py), in plain text by its preface. Its socket goes to the shard's process with that message
(passing.py). There another such listener makes the handshake and all that follows.

- **Rotation.** When a peer connects the credential files are looked at, at most once a second. If they have changed,
  new connections get the new certificate, authority and join token; open ones stay. Files that cannot be used leave
  the old ones in force and are logged. A join token that was replaced is accepted for ``TOKEN_SECONDS`` more, since a
  learner shows the token that it connected with.
- **Bounds.** ``MAX_HANDSHAKES`` connections that have proven nothing yet, each for ``HANDSHAKE_SECONDS``; one more
  pushes out the oldest. So while the port is flooded a handshake has the time of that many arrivals, enough for an
  honest peer. A certificate has its share of connections (connection_limits.py), all together ``MAX_CONNECTIONS``, or
  fewer where descriptors are few.
- **Bytes** are summed up by place (traffic.py): each connection counts its own, and they are added up when they are
  asked for or a connection closes.
- **Refusals** are counted by reason, and logged at most once a reason and ten seconds. The peer gets TLS's alert where
  there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import math
import resource
import secrets
import socket
import ssl
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from diloco_protocol.common.http_server import listening_socket, split_address
from diloco_protocol.security import identity
from diloco_protocol.security.credentials import GRPC_PROTOCOL, Credentials, CredentialsError, ListenError
from diloco_protocol.vocabulary import ConnectionRefusal
from diloco_protocol.wire.bulk_calls import bulk_preface, bulk_protocol
from diloco_protocol.wire.byte_stream import ByteStream, set_options
from diloco_syncer.runtime.traffic import NOBODY
from diloco_syncer.server.tls.connection import BUFFER, HandshakeRefused, PortConnection
from diloco_syncer.server.tls.connection_limits import Peer, RefusalCounter, allowance_of
from diloco_syncer.server.tls.passing import LinkEnded, receive_connection, send_connection

log = logging.getLogger(__name__)

MAX_HANDSHAKES = 256
HANDSHAKE_SECONDS = 10.0
MAX_CONNECTIONS = 8192
TOKEN_SECONDS = 600.0
_RELOAD_SECONDS = 1.0
RESERVED_FILES = 640  # descriptors for handshakes, pages, control calls and the store
_BACKLOG = 1024
_AT_ONCE = 64  # accepted before others have their turn


AcceptBulk = Callable[[ByteStream, Peer, str], None]


class CredentialReloader:
    """The credentials in force; follows changes of their files."""

    def __init__(self, credentials: Credentials, job: str, protocols: list[str]) -> None:
        """``protocols``: that are spoken. Raises ``CredentialsError`` if they are not this job's syncer's."""
        self._job, self._protocols = job, protocols
        self._adopt(credentials)
        self._seen = credentials.signature()
        self._checked = time.monotonic()
        self._before: tuple[Credentials, float] | None = None
        self._problem = ""

    def reload_if_changed(self, now: float) -> None:
        """Load the files again if they have changed; raises nothing. ``now``: monotonic seconds."""
        if now - self._checked < _RELOAD_SECONDS:
            return
        self._checked = now
        seen = self.credentials.signature()
        if seen == self._seen or not seen:
            return
        try:
            former, fresh = self.credentials, Credentials.from_directory(self.credentials.directory)
            self._adopt(fresh)
        except Exception as error:  # of whatever kind: the files are somebody else's
            if str(error) != self._problem:
                log.error("the credentials have changed and cannot be used, the old ones stay: %s", error)
            self._problem = str(error)
            return
        if fresh.token != former.token:
            self._before = former, now + TOKEN_SECONDS
        self._seen = seen
        self._problem = ""
        log.info("the credentials have changed: new connections get the new ones")

    def accepts_token(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
        """Whether a call knows the join token, or the one before it."""
        shown = tuple(metadata or ())
        if self.credentials.admits(shown):
            return True
        before = self._before
        return before is not None and time.monotonic() < before[1] and before[0].admits(shown)

    def _adopt(self, credentials: Credentials) -> None:
        """Put these in force. Raises ``CredentialsError``, and then nothing has changed."""
        try:
            mine = identity.own_syncer(credentials.names(), self._job)
        except identity.IdentityError as error:
            raise CredentialsError(f"{credentials.directory}/tls.crt: {error}") from error
        expires, context = credentials.expires(), _context(credentials, self._protocols)  # wall-clock seconds
        self.credentials, self.own_names, self.expires, self.context = credentials, mine, expires, context


def _context(credentials: Credentials, protocols: list[str]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    # A resumed session would bring a certificate that was not checked today.
    context.num_tickets = 0
    context.set_alpn_protocols(protocols)
    folder = credentials.directory
    assert folder is not None
    try:
        context.load_verify_locations(cadata=credentials.authority.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise CredentialsError(f"{folder}/ca.crt is no certificate in PEM") from error
    try:
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key", password=lambda: "")
    except (ssl.SSLError, OSError, ValueError) as error:
        raise CredentialsError(
            f"{folder}: tls.crt and tls.key are not a certificate and its key in PEM, without a password"
        ) from error
    return context


def connections_for(files: int) -> int:
    """How many connections a process may hold that may have so many open files: each has two, the peer's and that to
    the gRPC server, which has its other end (a third)."""
    return MAX_CONNECTIONS if files < 0 else max(16, min(MAX_CONNECTIONS, (files - RESERVED_FILES) // 3))


class PortListener:
    """Accepts TLS connections in a thread of its own and passes their bytes to the gRPC server."""

    def __init__(
        self, credentials: Credentials, job: str, regions: Mapping[str, int], shard: int | None = None
    ) -> None:
        """``credentials`` without a certificate: plain text. ``regions``: learners and spares of each. ``shard``: whose
        process this is; None: the syncer's. Raises ``CredentialsError``."""
        self.protocol, self.preface = bulk_protocol(shard), bulk_preface(shard)
        self._protocols = [GRPC_PROTOCOL, self.protocol]
        self.reloader = CredentialReloader(credentials, job, self._protocols) if credentials.secure else None
        self.shards: dict[bytes, int] = {}
        self._links: dict[int, socket.socket] = {}  # to shards
        self._link: socket.socket | None = None  # of a shard, to the syncer
        self._bulk: tuple[asyncio.AbstractEventLoop, AcceptBulk] | None = None
        self.most_connections = connections_for(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self.wire, self.plain = memoryview(bytearray(BUFFER)), memoryview(bytearray(BUFFER))
        self.refusals = RefusalCounter()
        self._job = job
        self._regions = dict(regions)
        self._folder = tempfile.TemporaryDirectory(prefix="diloco-")  # 0700
        self._server_path = str(Path(self._folder.name) / "sync")
        self._listening: socket.socket | None = None
        self._handshakes: dict[PortConnection, float] = {}  # until when; in order
        self._open: dict[PortConnection, Peer] = {}
        self._by_peer: dict[str, PortConnection] = {}  # by gRPC's name of the connection
        self._closed_bytes: dict[str, tuple[int, int]] = {}  # by place, bytes in and out of connections that are closed
        # Connections close in the listener's thread while the syncer's sums up: each is counted exactly once.
        self._counting = threading.Lock()
        self._by_certificate: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="diloco-tls", daemon=True)
        self._stopping = asyncio.Event()

    # ------------------------------------------------------------- from the syncer's loop

    @property
    def server_address(self) -> str:
        """The address at which the gRPC server must listen."""
        return f"unix:{self._server_path}"

    @property
    def secure(self) -> bool:
        """Whether its connections are TLS."""
        return self.reloader is not None

    @property
    def handshakes(self) -> int:
        return len(self._handshakes)

    @property
    def connections(self) -> int:
        return len(self._open)

    @property
    def earliest_expiry(self) -> float | None:
        """When the first certificate of the connected peers expires, wall-clock seconds; None: no peer is connected."""
        return min((peer.expires for peer in list(self._open.values())), default=None)

    def bind(self, address: str) -> int:
        """Bind and listen; peers wait until ``start``. Returns the port. Raises ``ListenError``."""
        try:
            listening = listening_socket(*split_address(address, "--listen"))
        except OSError as error:
            raise ListenError(f"cannot listen on {address}: {error.strerror or error}") from error
        listening.listen(_BACKLOG)
        self.accept_at(listening)
        return int(listening.getsockname()[1])

    def accept_at(self, listening: socket.socket) -> None:
        """Instead of ``bind``: accept at this socket."""
        listening.setblocking(False)
        self._listening = listening

    def accept_passed(self, link: socket.socket) -> None:
        """Instead of ``bind``: take the connections that the syncer passes on."""
        self.accept_at(link)
        self._link = link

    def begin_shards(self, count: int) -> None:
        """Before ``start``: there are so many shards, which are away."""
        self.shards = {
            bulk_preface(shard) if self.reloader is None else bulk_protocol(shard).encode(): shard
            for shard in range(count)
        }

    def connect_shard(self, shard: int, link: socket.socket) -> None:
        """Pass connections for a shard on to ``link`` from now on, until its other end is closed."""
        link.setblocking(False)
        try:
            self._loop.call_soon_threadsafe(self._set_link, shard, link)
        except RuntimeError:  # the listener has stopped
            link.close()

    def start(self) -> None:
        """Start to accept. The gRPC server must be serving."""
        self._thread.start()

    def serve_bulk(self, accept: AcceptBulk) -> None:
        """Have ``accept`` called for each bulk connection, in the running loop: with its stream, its peer, and this
        listener's name for it."""
        self._bulk = asyncio.get_running_loop(), accept

    def find_peer(self, called: str) -> Peer | None:
        """The peer of a call, by gRPC's name for it; None: its connection is closed, or never came through here."""
        connection = self._by_peer.get(called)
        return None if connection is None else self._open.get(connection)

    def assign_place(self, called: str, place: str) -> None:
        """Count the bytes of a call's connection for ``place`` from now on; ``called``: gRPC's name of the peer.

        What the connection has carried before stays where it was counted: counters never decrease.
        """
        connection = self._by_peer.get(called)
        if connection is None or connection.place == place:
            return
        with self._counting:
            counted = connection.count.received, connection.count.sent
            _add(self._closed_bytes, connection)
            connection.counted, connection.place = counted, place

    def find_place(self, called: str) -> str:
        """For which place the bytes of a call's connection are counted now; ``called``: gRPC's name of the peer."""
        connection = self._by_peer.get(called)
        return NOBODY if connection is None else connection.place

    def bytes_by_place(self) -> dict[str, tuple[int, int]]:
        """By place, (bytes received, bytes sent) since this listener was made, TLS included."""
        with self._counting:
            sums = dict(self._closed_bytes)
            for connection in self._open:
                _add(sums, connection)
        return sums

    def stop(self) -> None:
        """Close all connections and end the thread; blocks for a moment."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(5.0)
        elif self._listening is not None:
            self._listening.close()
        self._folder.cleanup()

    # ------------------------------------------------------------- the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        assert self._listening is not None
        self._loop.add_reader(self._listening, self._accept)
        while not self._stopping.is_set():
            try:
                self._expire(time.monotonic())
            except Exception:
                log.exception("a fault of this program, in the TLS listener")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await self._stopping.wait()
        self._loop.remove_reader(self._listening)
        self._listening.close()
        for connection in [*self._handshakes, *self._open]:
            connection.close()
        for shard in list(self._links):
            self._set_link(shard, None)

    def _set_link(self, shard: int, link: socket.socket | None) -> None:
        if (former := self._links.pop(shard, None)) is not None:
            former.close()
        if link is not None:
            self._links[shard] = link

    def _expire(self, now: float) -> None:
        while self._handshakes and (oldest := next(iter(self._handshakes))):
            if self._handshakes[oldest] > now:
                return
            message = f"no handshake within {HANDSHAKE_SECONDS:.0f} s"
            self._end_handshake(oldest, ConnectionRefusal.HANDSHAKE_TIMEOUT, message)

    def _accept(self) -> None:
        assert self._listening is not None
        for _ in range(_AT_ONCE):
            try:
                front, address, first = self._take_next(self._listening)
            except BlockingIOError:
                return
            except LinkEnded:
                self._loop.remove_reader(self._listening)
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._shed_load(error)
                    return
                continue  # the peer has left already
            begun = False
            try:
                self._begin_handshake(front, address, first)
                begun = True
            except Exception:  # the next one that waits is another's
                if self.refusals.count_refusal(ConnectionRefusal.NO_ROOM, time.monotonic()) is not None:
                    log.exception("a fault of this program, at a connection that has just come")
            finally:
                if not begun:
                    front.close()

    def _take_next(self, listening: socket.socket) -> tuple[socket.socket, str, bytes]:
        """The next connection, its address, and what was read of it already. Raises OSError, LinkEnded."""
        if listening is self._link:
            return receive_connection(listening)
        front, where = listening.accept()
        return front, f"{where[0]}:{where[1]}", b""

    def _begin_handshake(self, front: socket.socket, address: str, first: bytes) -> None:
        """Make a connection of an accepted socket, which is its own then; on an error it is still the caller's."""
        now = time.monotonic()
        if len(self._handshakes) >= MAX_HANDSHAKES:
            oldest = next(iter(self._handshakes))
            self._end_handshake(oldest, ConnectionRefusal.HANDSHAKE_FLOOD, f"{MAX_HANDSHAKES} others at once")
        if self.reloader is not None:
            self.reloader.reload_if_changed(now)
        set_options(front)
        context = None if self.reloader is None else self.reloader.context
        connection = PortConnection(self, front, context, address)
        self._handshakes[connection] = now + HANDSHAKE_SECONDS
        if first:
            connection.hear_passed(first)

    def _shed_load(self, error: OSError) -> None:
        """File descriptors or memory ran out: end the oldest handshakes, and pause accepting for 0.2 s."""
        for connection in list(self._handshakes)[:_AT_ONCE]:
            self._end_handshake(connection, ConnectionRefusal.NO_ROOM, f"this process has no room: {error.strerror}")
        listening = self._listening
        assert listening is not None
        self._loop.remove_reader(listening)
        self._loop.call_later(0.2, lambda: self._stopping.is_set() or self._loop.add_reader(listening, self._accept))

    def _end_handshake(self, connection: PortConnection, reason: str, message: str) -> None:
        self.handshake_ended(connection, HandshakeRefused(reason, message))
        connection.close()

    # ------------------------------------------------------------- called by connections

    def accept_connection(self, connection: PortConnection, bulk: bool) -> tuple[str, socket.socket | None]:
        """Judge the certificate of a finished handshake, and connect to the gRPC server, unless it is for ``bulk``.

        Returns gRPC's name for the connection, or ours, and the socket. Raises ``HandshakeRefused``.
        """
        peer = Peer(address=connection.address)
        allowed = self.most_connections
        if connection.tls is not None:
            peer = self._judge_certificate(connection.tls.tls, connection.address)
            allowed = allowance_of(self._regions, peer.names).connections
        if len(self._open) >= self.most_connections:
            raise HandshakeRefused(
                ConnectionRefusal.NO_ROOM,
                f"{self.most_connections} connections are open: raise the limit of open files",
            )
        if self._by_certificate[peer.fingerprint] >= allowed:
            raise HandshakeRefused(
                ConnectionRefusal.TOO_MANY_CONNECTIONS, f"{peer}: more than {allowed} connections of one certificate"
            )
        name = f"diloco-{secrets.token_hex(16)}"
        back = None if bulk else self._connect_server(name)
        self._handshakes.pop(connection, None)
        named = {one.region for one in peer.names if one.region in self._regions}
        connection.place = named.pop() if len(named) == 1 else NOBODY
        key = name if bulk else f"unix-abstract:{name}"
        with self._counting:
            self._open[connection] = peer
        self._by_peer[key] = connection
        self._by_certificate[peer.fingerprint] += 1
        return key, back

    def hand_over(self, connection: PortConnection, front: socket.socket) -> None:
        """Give a bulk connection to the loop that serves it."""
        peer = self._open[connection]

        def forget() -> None:  # in the syncer's loop
            with contextlib.suppress(RuntimeError):  # the listener has stopped
                self._loop.call_soon_threadsafe(self.connection_closed, connection)

        def begin() -> None:
            stream = ByteStream(front, connection.tls, connection.count)
            stream.when_closed(forget)
            accept(stream, peer, connection.key)

        if self._bulk is None:
            raise HandshakeRefused(ConnectionRefusal.NO_ROOM, "nobody serves bulk connections here")
        loop, accept = self._bulk
        loop.call_soon_threadsafe(begin)

    def pass_on(self, front: socket.socket, shard: int, address: str, first: bytes) -> None:
        """Pass a connection on to a shard; ``first``: what was read of it. That of a shard which is away ends, and the
        peer tries again. Raises ``HandshakeRefused``."""
        link = self._links.get(shard)
        if link is None:
            return
        try:
            send_connection(link, front, address, first)
        except LinkEnded:
            self._set_link(shard, None)
        except OSError as error:
            raise HandshakeRefused(
                ConnectionRefusal.NO_ROOM, f"shard {shard} takes no connection: {error.strerror or error}"
            ) from error

    def _judge_certificate(self, tls: ssl.SSLObject, address: str) -> Peer:
        """Raises ``HandshakeRefused``."""
        assert self.reloader is not None
        if tls.selected_alpn_protocol() not in self._protocols:
            raise HandshakeRefused(ConnectionRefusal.OTHER_TLS, "TLS 1.3 with HTTP/2 is spoken here")
        shown, raw = tls.getpeercert() or {}, tls.getpeercert(binary_form=True) or b""
        alternatives: Any = shown.get("subjectAltName", ())
        try:
            names = identity.names_in(str(value) for kind, value in alternatives if kind == "URI")
        except identity.IdentityError as error:
            raise HandshakeRefused(ConnectionRefusal.BAD_CERTIFICATE, str(error)) from error
        expires = ssl.cert_time_to_seconds(str(shown["notAfter"])) if "notAfter" in shown else math.inf
        peer = Peer(hashlib.sha256(raw).hexdigest(), names, address, expires)
        objection = identity.check_learner(self.reloader.own_names, names, self._job)
        if objection is not None:
            raise HandshakeRefused(objection.reason, objection.message)
        return peer

    def _connect_server(self, name: str) -> socket.socket:
        """A connection to the gRPC server, which sees it under this name. Raises ``HandshakeRefused``."""
        back = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            back.setblocking(False)
            back.bind(f"\0{name}")
            back.connect(self._server_path)  # of this machine: at once, or its queue is full
        except OSError as error:
            back.close()
            raise HandshakeRefused(
                ConnectionRefusal.NO_ROOM, f"the gRPC server accepts no connection: {error.strerror or error}"
            ) from error
        return back

    def handshake_ended(self, connection: PortConnection, refused: HandshakeRefused | None) -> None:
        """A handshake ended and the connection was not accepted; ``refused`` None: there is nothing to count."""
        self._handshakes.pop(connection, None)
        if refused is None:
            return
        unsaid = self.refusals.count_refusal(refused.reason, time.monotonic())
        if unsaid is not None:
            more = f" ({unsaid} like it before, not logged)" if unsaid else ""
            log.warning("refused %s: %s: %s%s", connection.address, refused.reason, refused, more)

    def connection_closed(self, connection: PortConnection) -> None:
        """Forget a closed connection; its bytes stay counted."""
        self._handshakes.pop(connection, None)
        with self._counting:
            peer = self._open.pop(connection, None)
            if peer is not None:
                _add(self._closed_bytes, connection)
        if peer is not None:
            self._by_peer.pop(connection.key, None)
            self._by_certificate[peer.fingerprint] -= 1
            if not self._by_certificate[peer.fingerprint]:
                del self._by_certificate[peer.fingerprint]


def _add(sums: dict[str, tuple[int, int]], connection: PortConnection) -> None:
    up, down = sums.get(connection.place, (0, 0))
    up += connection.count.received - connection.counted[0]
    sums[connection.place] = up, down + connection.count.sent - connection.counted[1]
