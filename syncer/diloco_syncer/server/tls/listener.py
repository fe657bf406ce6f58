"""The gate: where mutual TLS ends, and who comes in is known.

Theory of operation
-------------------
gRPC's own TLS tells nobody why a handshake failed, bounds no handshakes, and shows no
reason in metrics. So where credentials are given the syncer's sync port is the gate's: a
thread with a loop of its own accepts, makes the TLS handshake (``link``), judges the
certificate (``diloco_protocol.security.identity``) and only then connects to the gRPC server,
which listens on a unix socket in a directory of this process' user alone. Each such
connection is bound to a name that nobody can guess; gRPC shows it as the call's peer, and
``peer`` says whose certificate it was. A handshake costs the training job nothing but this
thread's time.

- **Rotation.** The files are looked at when somebody connects, at most once a second.
  If they have changed, new connections get the new certificate, authority and join token;
  those that are open stay. What cannot be used (half of a change, a key that does not fit)
  leaves the old in force, and is said. A join token that was replaced is accepted for
  ``TOKEN_SECONDS`` more, since a learner shows the one that it connected with.
- **Bounds.** ``MAX_HANDSHAKES`` connections that have not proven anything yet, each for
  ``HANDSHAKE_SECONDS``; one more pushes out the oldest. So while somebody floods the port a
  handshake has that many arrivals' time, which is enough for an honest one, whatever
  address it comes from. A certificate has its share of connections (``guards``), and all
  together ``MAX_CONNECTIONS``.
- **Bytes** of those who were let in are summed up by place, a region mostly (``traffic``): each
  link counts its own, and they are added where somebody asks or a link ends.
- **Refusals** are counted by reason and logged, not more often than one a reason and ten
  seconds. The peer gets TLS's alert where there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import math
import secrets
import socket
import ssl
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from diloco_protocol.common.http_server import listening_socket, split_address
from diloco_protocol.security import identity
from diloco_protocol.security.credentials import Credentials, CredentialsError, ListenError
from diloco_syncer.server.tls.connection import Buffers, Link, Refused
from diloco_syncer.server.tls.connection_limits import TOO_MANY_CONNECTIONS, Peer, Refusals, limits

log = logging.getLogger(__name__)

MAX_HANDSHAKES = 256
HANDSHAKE_SECONDS = 10.0
MAX_CONNECTIONS = 8192
TOKEN_SECONDS = 600.0
_LOOK_SECONDS = 1.0
_BACKLOG = 1024
_AT_ONCE = 64  # accepted before others have their turn


class Keeper:
    """The credentials in force: those of the files, as they are now."""

    def __init__(self, credentials: Credentials, job: str) -> None:
        """Raises ``CredentialsError`` if they are not this job's syncer's."""
        self.credentials = credentials
        self._job = job
        self.mine, self.context = self._made(credentials)
        self.expires = credentials.expires()  # wall-clock seconds
        self._seen = credentials.signature()
        self._looked = time.monotonic()
        self._before: tuple[Credentials, float] | None = None
        self._problem = ""

    def look(self, now: float) -> None:
        """Take what has changed in the files. Never fails."""
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        seen = self.credentials.signature()
        if seen == self._seen or not seen:
            return
        try:
            fresh = Credentials.from_directory(self.credentials.directory)
            mine, context = self._made(fresh)
        except CredentialsError as error:
            if str(error) != self._problem:
                log.error("the credentials have changed and cannot be used, the old ones stay: %s", error)
            self._problem = str(error)
            return
        if fresh.token != self.credentials.token:
            self._before = self.credentials, now + TOKEN_SECONDS
        self._seen = seen
        self._problem = ""
        self.credentials = fresh
        self.mine = mine
        self.context = context
        self.expires = fresh.expires()
        log.info("the credentials have changed: new connections get the new ones")

    def admits(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
        """Whether a call knows the join token, or the one before it."""
        shown = tuple(metadata or ())
        if self.credentials.admits(shown):
            return True
        before = self._before
        return before is not None and time.monotonic() < before[1] and before[0].admits(shown)

    def _made(self, credentials: Credentials) -> tuple[identity.Names, ssl.SSLContext]:
        try:
            mine = identity.own_syncer(credentials.names(), self._job)
        except identity.IdentityError as error:
            raise CredentialsError(f"{credentials.directory}/tls.crt: {error}") from error
        return mine, _context(credentials)


def _context(credentials: Credentials) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    # A resumed session would bring a certificate that nobody has looked at today.
    context.num_tickets = 0
    context.set_alpn_protocols(["h2"])
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


class Gate:
    """The sync port of a syncer with credentials."""

    def __init__(self, credentials: Credentials, job: str, regions: Mapping[str, int]) -> None:
        """``regions``: learners and spares of each. Raises ``CredentialsError``."""
        self.keeper = Keeper(credentials, job)
        self.buffers = Buffers()
        self.refusals = Refusals()
        self._job = job
        self._regions = dict(regions)
        self._folder = tempfile.TemporaryDirectory(prefix="diloco-")  # 0700
        self._inside = str(Path(self._folder.name) / "sync")
        self._listening: socket.socket | None = None
        self._handshakes: dict[Link, float] = {}  # until when; in order
        self._open: dict[Link, Peer] = {}
        self._links: dict[str, Link] = {}  # by gRPC's name of the connection
        self._carried: dict[str, tuple[int, int]] = {}  # by place, bytes in and out of links that are closed
        # Links end in the gate's thread while the syncer's adds up: none may be counted twice or not at all.
        self._counting = threading.Lock()
        self._by_certificate: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="diloco-gate", daemon=True)
        self._stopping = asyncio.Event()

    # ------------------------------------------------------------- from the syncer's loop

    @property
    def inside(self) -> str:
        """Where the gRPC server shall listen."""
        return f"unix:{self._inside}"

    @property
    def handshakes(self) -> int:
        return len(self._handshakes)

    @property
    def connections(self) -> int:
        return len(self._open)

    @property
    def earliest_expiry(self) -> float | None:
        """When the first certificate of those that are connected expires, wall-clock seconds; None: nobody
        is connected."""
        return min((peer.expires for peer in list(self._open.values())), default=None)

    def bind(self, address: str) -> int:
        """Listen; who connects waits until ``start``. Returns the port. Raises ``ListenError``."""
        try:
            self._listening = listening_socket(*split_address(address, "--listen"))
        except OSError as error:
            raise ListenError(f"cannot listen on {address}: {error.strerror or error}") from error
        self._listening.listen(_BACKLOG)
        self._listening.setblocking(False)
        return int(self._listening.getsockname()[1])

    def start(self) -> None:
        """Let people in; the gRPC server serves."""
        self._thread.start()

    def peer(self, called: str) -> Peer | None:
        """Who makes a call, by gRPC's word for the peer; None: it is gone, or never came through here."""
        link = self._links.get(called)
        return None if link is None else self._open.get(link)

    def belongs(self, called: str, place: str) -> None:
        """The connection on which a call comes is of that place from now on. What it has carried stays
        where it was counted: a counter never falls."""
        link = self._links.get(called)
        if link is None or link.place == place:
            return
        with self._counting:
            counted = link.received, link.sent
            _add(self._carried, link)
            link.counted, link.place = counted, place

    def carried(self) -> dict[str, tuple[int, int]]:
        """By place, bytes that came in and went out since this gate was made, as TLS has them."""
        with self._counting:
            sums = dict(self._carried)
            for link in self._open:
                _add(sums, link)
        return sums

    def stop(self) -> None:
        """Close everything; blocks for a moment."""
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
                log.exception("a fault of this program, at the gate")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await self._stopping.wait()
        self._loop.remove_reader(self._listening)
        self._listening.close()
        for link in [*self._handshakes, *self._open]:
            link.close()

    def _expire(self, now: float) -> None:
        while self._handshakes and (oldest := next(iter(self._handshakes))):
            if self._handshakes[oldest] > now:
                return
            refused = Refused("handshake-timeout", f"no handshake within {HANDSHAKE_SECONDS:.0f} s")
            self.left(oldest, refused)
            oldest.close()

    def _accept(self) -> None:
        assert self._listening is not None
        for _ in range(_AT_ONCE):
            try:
                front, where = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._short(error)
                    return
                continue  # that one has left already
            now = time.monotonic()
            if len(self._handshakes) >= MAX_HANDSHAKES:
                oldest = next(iter(self._handshakes))
                self.left(oldest, Refused("handshake-flood", f"{MAX_HANDSHAKES} others at once"))
                oldest.close()
            self.keeper.look(now)
            front.setblocking(False)
            front.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            address = f"{where[0]}:{where[1]}"
            self._handshakes[Link(self, front, self.keeper.context, address)] = now + HANDSHAKE_SECONDS

    def _short(self, error: OSError) -> None:
        """Of file descriptors, most likely: those who wait longest go, and others wait a little."""
        for link in list(self._handshakes)[:_AT_ONCE]:
            self.left(link, Refused("no-room", f"this process has no room: {error.strerror}"))
            link.close()
        listening = self._listening
        assert listening is not None
        self._loop.remove_reader(listening)
        self._loop.call_later(0.2, lambda: self._stopping.is_set() or self._loop.add_reader(listening, self._accept))

    # ------------------------------------------------------------- from links

    def admit(self, link: Link, tls: ssl.SSLObject) -> tuple[str, socket.socket]:
        """The handshake is done: judge the certificate, and connect. Raises ``Refused``."""
        if tls.selected_alpn_protocol() != "h2":
            raise Refused("other-tls", "TLS 1.3 with HTTP/2 is spoken here")
        shown, raw = tls.getpeercert() or {}, tls.getpeercert(binary_form=True) or b""
        alternatives: Any = shown.get("subjectAltName", ())
        try:
            names = identity.names_in(str(value) for kind, value in alternatives if kind == "URI")
        except identity.IdentityError as error:
            raise Refused("bad-certificate", str(error)) from error
        expires = ssl.cert_time_to_seconds(str(shown["notAfter"])) if "notAfter" in shown else math.inf
        peer = Peer(hashlib.sha256(raw).hexdigest(), names, link.address, expires)
        objection = identity.objection_to_learner(self.keeper.mine, names, self._job)
        if objection is not None:
            raise Refused(objection.reason, objection.message)
        allowed = limits(self._regions, names).connections
        if self._by_certificate[peer.fingerprint] >= allowed or len(self._open) >= MAX_CONNECTIONS:
            raise Refused(TOO_MANY_CONNECTIONS, f"{peer}: more than {allowed} connections of one certificate")
        name = f"diloco-{secrets.token_hex(16)}"
        back = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            back.setblocking(False)
            back.bind(f"\0{name}")
            back.connect(self._inside)  # of this machine: at once, or its queue is full
        except OSError as error:
            back.close()
            raise Refused("no-room", f"the server inside takes nobody: {error.strerror or error}") from error
        self._handshakes.pop(link, None)
        named = {one.region for one in names if one.region in self._regions}
        link.place = named.pop() if len(named) == 1 else ""
        with self._counting:
            self._open[link] = peer
        self._links[f"unix-abstract:{name}"] = link
        self._by_certificate[peer.fingerprint] += 1
        return f"unix-abstract:{name}", back

    def left(self, link: Link, refused: Refused | None) -> None:
        """A handshake ended without being let in."""
        self._handshakes.pop(link, None)
        if refused is None:
            return
        unsaid = self.refusals.note(refused.reason, time.monotonic())
        if unsaid is not None:
            more = f" ({unsaid} like it before, not logged)" if unsaid else ""
            log.warning("refused %s: %s: %s%s", link.address, refused.reason, refused, more)

    def gone(self, link: Link) -> None:
        """A link is closed."""
        self._handshakes.pop(link, None)
        with self._counting:
            peer = self._open.pop(link, None)
            if peer is not None:
                _add(self._carried, link)
        if peer is not None:
            self._links.pop(link.key, None)
            self._by_certificate[peer.fingerprint] -= 1
            if not self._by_certificate[peer.fingerprint]:
                del self._by_certificate[peer.fingerprint]


def _add(sums: dict[str, tuple[int, int]], link: Link) -> None:
    received, sent = sums.get(link.place, (0, 0))
    sums[link.place] = received + link.received - link.counted[0], sent + link.sent - link.counted[1]
