"""One connection of the sync port: the handshake, then bytes between the peer and the gRPC server behind the listener.

A connection has two sockets: ``front`` towards the peer, with TLS or without, and ``back`` towards the gRPC server, in
plain text. It uses no transports and no tasks, only an ``ssl.SSLObject`` over memory and callbacks of the event loop.
All connections of a listener share the buffers for reading, because a callback leaves nothing in them. A peer that
wants to move bulk bytes says so in the handshake, in plain text by its first bytes: its socket, with the state of TLS,
goes to whoever serves those (``hand_over``), and this object only counts its bytes. One that is for a shard says so in
its first message: it goes to the shard's process with what was read of it (``pass_on``).

Back-pressure: while one side does not take what the other sent, the other is not read. So a connection holds at most a
buffer's worth in each direction.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from diloco_protocol.vocabulary import ConnectionRefusal
from diloco_protocol.wire.byte_stream import ByteCount, TlsState
from diloco_syncer.runtime.traffic import NOBODY
from diloco_syncer.server.tls.client_hello import find_protocols

log = logging.getLogger(__name__)

BUFFER = 256 << 10
_LINGER_SECONDS = 5.0  # for what is still to be sent when one side has ended
_TLS_HANDSHAKE = 22  # the first byte of everything that begins as TLS
_UNFIT = {  # by OpenSSL's number for why a certificate was not accepted
    9: (ConnectionRefusal.NOT_YET_VALID, "the certificate is not valid yet: look at both clocks"),
    10: (ConnectionRefusal.EXPIRED, "the certificate has expired: renew it"),
    26: (ConnectionRefusal.WRONG_ROLE, "the certificate is not for a client (extended key usage)"),
}
_STRANGER = frozenset({2, 18, 19, 20, 21, 24})  # no chain to our authority; 24: its issuer is no authority


class HandshakeRefused(Exception):
    """A handshake failed, or its certificate is not accepted; ``reason`` is a fixed word, the message a sentence."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ConnectionOwner(Protocol):
    """What a connection asks of the listener that accepted it (``PortListener``)."""

    wire: memoryview  # for reading, of BUFFER bytes, shared by all of its connections
    plain: memoryview  # another, for what is decrypted
    protocol: str  # of its bulk connections, with TLS
    preface: bytes  # and in plain text
    shards: dict[bytes, int]  # by what a connection for one says first

    def accept_connection(self, connection: PortConnection, bulk: bool) -> tuple[str, socket.socket | None]: ...
    def hand_over(self, connection: PortConnection, front: socket.socket) -> None: ...
    def pass_on(self, front: socket.socket, shard: int, address: str, first: bytes) -> None: ...
    def handshake_ended(self, connection: PortConnection, refused: HandshakeRefused | None) -> None: ...
    def connection_closed(self, connection: PortConnection) -> None: ...


class PortConnection:
    """One accepted connection until it ends. ``context`` None: plain text. ``tls``: its state."""

    def __init__(
        self, owner: ConnectionOwner, front: socket.socket, context: ssl.SSLContext | None, address: str
    ) -> None:
        self._owner = owner
        self._front = front
        self.address = address
        self._loop = asyncio.get_running_loop()
        self.tls = None if context is None else TlsState.begin(context)
        self._first = b""  # of what came: until it is known whom it is for
        self._is_routed = not owner.shards  # whether that is known, with TLS
        self._back: socket.socket | None = None
        self._up = b""  # not taken by the gRPC server yet
        self._down = b""  # not taken by the peer yet
        self._heard = self._ending = self._closed = self._handed_over = False
        self.key = ""  # gRPC's name for this connection, once it is accepted
        self.count = ByteCount()  # at the outer socket
        self.place = NOBODY  # where they are counted: a region mostly (traffic.py)
        self.counted = (0, 0)  # of them, those that were counted for another place before
        self._loop.add_reader(front, self._safely, self._handshake)

    def _safely(self, what: Callable[[], None]) -> None:
        """A fault of ours costs this connection, and no other."""
        try:
            what()
        except Exception:
            log.exception("a fault of this program, at the connection of %s", self.address)
            self.close()

    def _receive(self, end: socket.socket) -> int | None:
        """Read into the shared buffer; returns the bytes, 0 if that side has ended, None if nothing is there."""
        try:
            return end.recv_into(self._owner.wire)
        except BlockingIOError:
            return None
        except OSError:
            return 0

    def _send(self, end: socket.socket, data: memoryview | bytes) -> int | None:
        """Send what the socket takes; returns the bytes, or None if it is broken: then all is closed."""
        try:
            return end.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self.close()
            return None

    # ------------------------------------------------------------- the handshake

    def _handshake(self) -> None:
        if self.tls is None:
            self._read_preface()
            return
        wire = self._owner.wire
        count = self._receive(self._front)
        if count is None:
            return
        if not count:
            # A probe that only connects is no refusal; a peer that began and left may have refused us.
            left = HandshakeRefused(ConnectionRefusal.BROKEN_OFF, "the peer left in the handshake")
            self._give_up(left if self._heard else None)
            return
        self._hear(wire[:count])

    def hear_passed(self, first: bytes) -> None:
        """Take what the process that passed this connection on has read of it."""
        self._safely(partial(self._hear, first))

    def _hear(self, data: memoryview | bytes) -> None:
        self.count.received += len(data)
        try:
            if self.tls is None:
                self._hear_preface(bytes(data))
            else:
                self._hear_tls(self.tls, data)
        except HandshakeRefused as refused:
            self._give_up(refused)

    def _hear_tls(self, tls: TlsState, data: memoryview | bytes) -> None:
        if not self._heard and data[0] != _TLS_HANDSHAKE:
            raise HandshakeRefused(ConnectionRefusal.NOT_TLS, "what came is not TLS")
        self._heard = True
        tls.incoming.write(data)
        if not self._is_routed:
            self._first += data
            protocols = find_protocols(self._first)
            if protocols is None:
                return
            self._is_routed = True
            if (shard := self._find_shard(protocols)) is not None:
                self._pass_on(shard)
                return
        self._first = b""
        try:
            tls.tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush_out()
            return
        except ssl.SSLError as error:
            raise _explain_failure(error) from error
        self._flush_out()
        self._begin(tls.tls.selected_alpn_protocol() == self._owner.protocol)

    def _read_preface(self) -> None:
        """In plain text the first bytes say what a connection is for. No more of them is read than that needs."""
        try:
            data = self._front.recv(len(self._owner.preface) - len(self._first))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._hear(data)
        else:
            self._give_up(None)

    def _hear_preface(self, data: bytes) -> None:
        self._first += data
        if (shard := self._find_shard([self._first])) is not None:
            self._pass_on(shard)
        elif self._first == self._owner.preface:
            self._begin(True)
        elif not any(each.startswith(self._first) for each in (self._owner.preface, *self._owner.shards)):
            self._begin(False)

    def _find_shard(self, said: Iterable[bytes]) -> int | None:
        return next((self._owner.shards[each] for each in said if each in self._owner.shards), None)

    def _pass_on(self, shard: int) -> None:
        """Leave the connection to a shard's process. Raises HandshakeRefused."""
        self._owner.pass_on(self._front, shard, self.address, self._first)
        self.close()

    def _begin(self, bulk: bool) -> None:
        """The handshake is over. Raises HandshakeRefused."""
        self.key, self._back = self._owner.accept_connection(self, bulk)
        self._loop.remove_reader(self._front)
        if self._back is None:
            self._owner.hand_over(self, self._front)
            self._handed_over = True
            return
        self._loop.add_reader(self._front, self._safely, self._front_readable)
        self._loop.add_reader(self._back, self._safely, self._back_readable)
        if self.tls is None:
            self._send_up(self._first)
        else:
            self._decrypt()

    def _give_up(self, refused: HandshakeRefused | None) -> None:
        self._flush_out()  # the alert, which tells the peer why
        self._owner.handshake_ended(self, refused)
        self.close()

    # ------------------------------------------------------------- the peer's bytes, in

    def _front_readable(self) -> None:
        count = self._receive(self._front)
        if count is None:
            return
        if not count:
            self._end()
            return
        self.count.received += count
        if self.tls is None:
            self._send_up(self._owner.wire[:count])
            return
        self.tls.incoming.write(self._owner.wire[:count])
        self._decrypt()

    def _decrypt(self) -> None:
        """Pass on what can be decrypted; stops at what the gRPC server does not take."""
        if self.tls is None:
            return
        plain, ended = self._owner.plain, False
        while not (self._up or ended or self._closed):
            filled = 0
            try:
                while filled < BUFFER:
                    count = self.tls.tls.read(BUFFER - filled, plain[filled:])  # type: ignore[arg-type]
                    if not count:
                        ended = True
                        break
                    filled += int(count)
            except ssl.SSLWantReadError:
                if not filled:
                    break
            except ssl.SSLError:  # the peer said good-bye, or what came is no TLS
                ended = True
            if filled:
                self._send_up(plain[:filled])
        if self._closed:
            return
        if self.tls.outgoing.pending:  # an answer of TLS itself
            self._send_down(b"")
        if ended:
            self._end()

    def _send_up(self, data: memoryview | bytes) -> None:
        assert self._back is not None
        sent = self._send(self._back, data)
        if sent is None:
            return
        waited, self._up = bool(self._up), bytes(data[sent:])
        if self._up and not waited:
            self._loop.remove_reader(self._front)
            self._loop.add_writer(self._back, self._safely, self._back_writable)

    def _back_writable(self) -> None:
        self._send_up(self._up)
        if self._up or self._closed:
            return
        assert self._back is not None
        self._loop.remove_writer(self._back)
        if self._ending:
            self.close()
            return
        self._loop.add_reader(self._front, self._safely, self._front_readable)
        self._decrypt()

    # ------------------------------------------------------------- the server's bytes, out

    def _back_readable(self) -> None:
        assert self._back is not None
        count = self._receive(self._back)
        if count is None:
            return
        if not count:
            with contextlib.suppress(ssl.SSLError):
                if self.tls is not None:
                    self.tls.tls.unwrap()  # says good-bye; nobody waits for the answer
            self._send_down(b"")
            self._end()
            return
        self._send_down(self._owner.wire[:count])

    def _send_down(self, data: memoryview | bytes) -> None:
        try:
            position = 0
            while self.tls is not None and position < len(data):
                position += self.tls.tls.write(data[position:])
        except ssl.SSLError:
            self.close()
            return
        waited = bool(self._down)
        if len(self._down) > 4 * BUFFER:  # TLS's own answers to a peer that asks and does not read
            self.close()
            return
        self._flush(self._down + (bytes(data) if self.tls is None else self.tls.outgoing.read()))
        if self._closed or self._back is None:
            return
        if self._down and not waited:
            self._loop.remove_reader(self._back)
            self._loop.add_writer(self._front, self._safely, self._front_writable)

    def _front_writable(self) -> None:
        self._flush(self._down)
        if self._down or self._closed:
            return
        self._loop.remove_writer(self._front)
        if self._ending:
            self.close()
        elif self._back is not None:
            self._loop.add_reader(self._back, self._safely, self._back_readable)

    def _flush(self, data: bytes) -> None:
        sent = self._send(self._front, data) if data else 0
        if sent is None:
            return
        self.count.sent += sent
        self._down = data[sent:]

    def _flush_out(self) -> None:
        """Send the handshake's answer. It is small: a peer that does not take it at once loses it."""
        with contextlib.suppress(OSError):
            while self.tls is not None and self.tls.outgoing.pending:
                self.count.sent += self._front.send(self.tls.outgoing.read())

    # ------------------------------------------------------------- the end

    def _end(self) -> None:
        """One side has ended: go on sending what the other has not taken yet, for at most 5 s."""
        if self._ending or self._closed:
            return
        self._ending = True
        for each in (self._front, self._back):
            if each is not None:
                self._loop.remove_reader(each)
        if self._up or self._down:
            self._loop.call_later(_LINGER_SECONDS, self.close)
        else:
            self.close()

    def close(self) -> None:
        """End it. One that was handed over is closed by who has it now."""
        if self._closed or self._handed_over:
            return
        self._closed = True
        for each in (self._front, self._back):
            if each is not None:
                self._loop.remove_reader(each)
                self._loop.remove_writer(each)
                each.close()
        self._owner.connection_closed(self)


def _explain_failure(error: ssl.SSLError) -> HandshakeRefused:
    """The refusal for what OpenSSL says of a failed handshake."""
    reason = (error.reason or "").upper()
    if isinstance(error, ssl.SSLCertVerificationError):
        words = error.verify_message
        if error.verify_code in _UNFIT:
            return HandshakeRefused(*_UNFIT[error.verify_code])
        if error.verify_code in _STRANGER:
            return HandshakeRefused(ConnectionRefusal.STRANGER, f"the certificate is of another authority: {words}")
        return HandshakeRefused(ConnectionRefusal.BAD_CERTIFICATE, f"the certificate is not trusted: {words}")
    if "PEER_DID_NOT_RETURN_A_CERTIFICATE" in reason:
        return HandshakeRefused(ConnectionRefusal.NO_CERTIFICATE, "a client without a certificate")
    if "ALERT" in reason:
        return HandshakeRefused(
            ConnectionRefusal.DISTRUSTED, f"the peer does not believe this syncer's certificate: {reason.lower()}"
        )
    if reason in ("UNSUPPORTED_PROTOCOL", "NO_SHARED_CIPHER", "NO_APPLICATION_PROTOCOL", "VERSION_TOO_LOW"):
        return HandshakeRefused(ConnectionRefusal.OTHER_TLS, f"TLS 1.3 with HTTP/2 is spoken here: {reason.lower()}")
    return HandshakeRefused(
        ConnectionRefusal.NOT_TLS, f"what came is not a TLS handshake: {(reason or str(error)).lower()[:120]}"
    )
