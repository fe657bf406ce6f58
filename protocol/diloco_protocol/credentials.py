"""Who may talk to whom: TLS, the join token, and signed control calls.

A party is given a directory (in a cluster: a mounted secret) with

- ``tls.crt``, ``tls.key``, ``ca.crt``: its certificate chain, key, and the
  authority that both sides trust. TLS is mutual: the syncer refuses a client
  without a certificate of that authority;
- ``join-token`` (optional): a shared word that a learner sends as call metadata
  and the syncer compares in constant time;
- ``server-name`` (optional): the name in the syncer's certificate, where it is
  not ``diloco-syncer``. The certificate is checked against this name and not
  against the address, because the address of a syncer behind a load balancer or
  a node port is not known when the certificate is made.

Without a directory everything is plaintext: that is for one machine. A directory
in which a TLS file is missing is an error, never a silent fall back to plaintext.

Control calls (``process-gone``, ``announce`` ...) go to a port of their own and
are signed with a key that learners do not have: HMAC-SHA256 over the method, the
body, the time and a nonce, each length-prefixed. A call is refused when its
signature is wrong, its time is more than ``WINDOW_MS`` off, or its nonce was
seen. Nonces are remembered for as long as their call could be replayed, at most
``NonceCache.capacity`` of them; when that many fresh ones are held, calls are
refused rather than nonces forgotten.

Replies are signed with the same key, over the call's nonce and all that they say. So
the control port is plaintext even where everything else is TLS: who makes a call needs
the key and nothing else (an operator may not read its users' certificates), nobody
without it can make a call, alter one or answer in the syncer's place, and no secret is
in any of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from . import sync_pb2
from .files import create_whole, read_bounded
from .identity import NOBODY, Names

TOKEN_KEY = "diloco-join-token"
SERVER_NAME = "diloco-syncer"
WINDOW_MS = 60_000
NONCE_BYTES = 16
MIN_KEY_BYTES = 16
_TLS_FILES = ("tls.crt", "tls.key", "ca.crt")
_MAX_FILE = 256 * 1024

Option = tuple[str, Any]


class CredentialsError(Exception):
    """Credentials are missing or unusable; the message names the file and the cure."""


class ListenError(CredentialsError):
    """An address cannot be listened on, for whatever reason."""


class CallRefused(Exception):
    """A control call is not believed; the message says why."""


def _read(path: Path) -> bytes:
    try:
        data = read_bounded(path, _MAX_FILE)
    except OSError as error:
        raise CredentialsError(f"cannot read {path}: {error.strerror or error}") from error
    if not data.strip():
        raise CredentialsError(f"{path} is empty")
    return data


@dataclass(frozen=True)
class Credentials:
    """One party's credentials; without any (``Credentials()``) channels are plaintext."""

    certificate: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    authority: bytes = field(default=b"", repr=False)
    token: str = field(default="", repr=False)
    server_name: str = SERVER_NAME
    directory: Path | None = None  # where they were read from

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str] | None) -> Credentials:
        """Read the directory; ``None`` means plaintext. Raises ``CredentialsError``."""
        if path is None:
            return cls()
        directory = Path(path)
        if not directory.is_dir():
            raise CredentialsError(f"credentials: {directory} is not a directory")
        missing = [name for name in _TLS_FILES if not (directory / name).is_file()]
        if missing:
            raise CredentialsError(
                f"credentials: {directory} lacks {', '.join(missing)}; give all of {', '.join(_TLS_FILES)}, "
                "or no credentials directory at all for plaintext on one machine"
            )
        certificate, key, authority = (_read(directory / name) for name in _TLS_FILES)
        token = ""
        if (directory / "join-token").exists():
            token = _text(directory / "join-token")
        name = SERVER_NAME
        if (directory / "server-name").exists():
            name = _text(directory / "server-name")
        return cls(certificate, key, authority, token, name, directory)

    @property
    def secure(self) -> bool:
        """Whether channels are mutual TLS."""
        return bool(self.certificate)

    def names(self) -> Names:
        """Which job and role the own certificate names. Raises ``CredentialsError``."""
        if not self.secure:
            return NOBODY
        from .certificates import CertificateError, describe  # late: plaintext needs no X.509

        try:
            return describe(self.certificate).names
        except CertificateError as error:
            raise CredentialsError(f"{self.directory or 'credentials'}: tls.crt: {error}") from error

    def expires(self) -> float:
        """When the own certificate does, wall-clock seconds. Raises ``CredentialsError``."""
        from .certificates import CertificateError, describe

        try:
            return describe(self.certificate).not_after.timestamp()
        except CertificateError as error:
            raise CredentialsError(f"{self.directory or 'credentials'}: tls.crt: {error}") from error

    def signature(self) -> tuple[tuple[int, ...], ...]:
        """Changes when a file of the directory does; empty: a file that is needed is not there."""
        found = []
        for name in (*_TLS_FILES, "join-token", "server-name"):
            try:
                stat = os.stat((self.directory or Path()) / name)
            except OSError:
                if name in _TLS_FILES:
                    return ()
                continue
            found.append((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns))
        return tuple(found)

    def pinned(self, server: bytes) -> Credentials:
        """The same, but only the server with this very certificate (PEM) is believed."""
        return replace(self, authority=server)

    def aio_channel(self, address: str, options: Sequence[Option] = ()) -> aio.Channel:
        """A ``grpc.aio`` channel to ``address`` (host:port)."""
        if not self.secure:
            return aio.insecure_channel(address, options=list(options))
        return aio.secure_channel(address, self._client(), options=self._named(options))

    def blocking_channel(self, address: str, options: Sequence[Option] = ()) -> grpc.Channel:
        """A blocking channel to ``address``, for tools without an event loop."""
        if not self.secure:
            return grpc.insecure_channel(address, options=list(options))
        return grpc.secure_channel(address, self._client(), options=self._named(options))

    def channel(self, address: str, options: Sequence[Option] = (), aio: bool = True) -> Any:
        """``aio_channel`` or, with ``aio=False``, ``blocking_channel``."""
        return self.aio_channel(address, options) if aio else self.blocking_channel(address, options)

    def bind(self, server: Any, address: str) -> int:
        """Make a server listen on ``address`` (host:port, port 0: any); returns the port.

        Raises ``ListenError`` when the address cannot be had, e.g. the port is in use.
        """
        try:
            if not self.secure:
                port = int(server.add_insecure_port(address))
            else:
                made = grpc.ssl_server_credentials(
                    [(self.key, self.certificate)], root_certificates=self.authority, require_client_auth=True
                )
                port = int(server.add_secure_port(address, made))
        except (RuntimeError, ValueError) as error:
            raise ListenError(_cannot_listen(address)) from error
        if port == 0:
            raise ListenError(_cannot_listen(address))
        return port

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Call metadata that carries the join token, if there is one."""
        return ((TOKEN_KEY, self.token),) if self.token else ()

    def admits(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
        """Whether a call with this metadata knows the join token (constant-time comparison)."""
        if not self.token:
            return True
        given = next((value for name, value in metadata or () if name == TOKEN_KEY), "")
        raw = given if isinstance(given, bytes) else given.encode()
        return hmac.compare_digest(raw, self.token.encode())

    def _client(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)

    def _named(self, options: Sequence[Option]) -> list[Option]:
        return [*options, ("grpc.ssl_target_name_override", self.server_name)]


def _text(path: Path) -> str:
    try:
        text = _read(path).decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise CredentialsError(f"{path} must be plain ASCII text") from error
    if not text.isprintable() or len(text) > 1024:
        raise CredentialsError(f"{path} must be one printable line of at most 1024 characters")
    return text


def _cannot_listen(address: str) -> str:
    return (
        f"cannot listen on {address}: the port is in use, or this machine has no such address, "
        "or the TLS files are not a certificate and its key"
    )


# ------------------------------------------------------------------ control calls


def make_key(path: str | os.PathLike[str]) -> bytes:
    """Create a control key file (0600, 64 hex digits), or read the one that is there."""
    with contextlib.suppress(FileExistsError):  # an earlier run of the same job made it
        create_whole(path, secrets.token_hex(32).encode() + b"\n", mode=0o600)
    return read_key(path)


def read_key(path: str | os.PathLike[str]) -> bytes:
    """The control key. Raises ``CredentialsError`` if it is missing or too short."""
    key = _read(Path(path)).strip()
    if len(key) < MIN_KEY_BYTES:
        raise CredentialsError(f"{path} must hold at least {MIN_KEY_BYTES} bytes of key")
    return key


def _signature(key: bytes, method: str, body: bytes, time_ms: int, nonce: bytes) -> bytes:
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in (method.encode(), body, str(time_ms).encode(), nonce):
        mac.update(len(part).to_bytes(8, "big"))
        mac.update(part)
    return mac.digest()


def sign_call(key: bytes, method: str, body: bytes, time_ms: int | None = None) -> sync_pb2.SignedCall:
    """A control call signed with ``key``; ``body`` is JSON; ``time_ms`` is wall-clock, now if None."""
    stamp = time.time_ns() // 1_000_000 if time_ms is None else time_ms
    nonce = secrets.token_bytes(NONCE_BYTES)
    return sync_pb2.SignedCall(
        method=method,
        body=body,
        time_ms=stamp,
        nonce=nonce,
        signature=_signature(key, method, body, stamp, nonce),
    )


def sign_reply(key: bytes, nonce: bytes, reply: sync_pb2.CallReply) -> None:
    """Sign the reply to the call with this nonce, in place."""
    reply.signature = _reply_signature(key, nonce, reply)


def verify_reply(key: bytes, nonce: bytes, reply: sync_pb2.CallReply) -> None:
    """Return if the reply is the syncer's to the call with this nonce. Raises ``CallRefused``."""
    if not hmac.compare_digest(_reply_signature(key, nonce, reply), reply.signature):
        raise CallRefused("the reply is not signed with the control key: something else answered")


def _reply_signature(key: bytes, nonce: bytes, reply: sync_pb2.CallReply) -> bytes:
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in (b"reply", nonce, b"1" if reply.ok else b"0", reply.message.encode(), reply.body):
        mac.update(len(part).to_bytes(8, "big"))
        mac.update(part)
    return mac.digest()


class NonceCache:
    """Nonces of believed calls, each kept until its call is too old to be believed again."""

    def __init__(self, capacity: int = 4096) -> None:
        self.capacity = capacity
        self._seen: OrderedDict[bytes, int] = OrderedDict()  # nonce -> forget at, ms; rising

    def remember(self, nonce: bytes, now_ms: int) -> None:
        """Raises ``CallRefused`` if the nonce was seen, or no more can be remembered."""
        while self._seen and next(iter(self._seen.values())) < now_ms:
            self._seen.popitem(last=False)
        if nonce in self._seen:
            raise CallRefused("replayed: this call was made before")
        if len(self._seen) >= self.capacity:
            raise CallRefused("too many control calls in the last two minutes; try again later")
        self._seen[nonce] = now_ms + 2 * WINDOW_MS

    def __len__(self) -> int:
        return len(self._seen)


def verify_call(key: bytes, call: sync_pb2.SignedCall, nonces: NonceCache, now_ms: int | None = None) -> None:
    """Return if the call is believed, raise ``CallRefused`` otherwise.

    The signature is checked first, so that only holders of the key can fill the nonce cache.
    """
    now = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    expected = _signature(key, call.method, call.body, call.time_ms, call.nonce)
    if not hmac.compare_digest(expected, call.signature):
        raise CallRefused("wrong signature: the control keys differ")
    if len(call.nonce) != NONCE_BYTES:
        raise CallRefused(f"the nonce must have {NONCE_BYTES} bytes")
    if abs(now - call.time_ms) > WINDOW_MS:
        off = abs(now - call.time_ms) / 1000
        raise CallRefused(
            f"the call's time is {off:.0f} s off; set the clocks ({WINDOW_MS // 1000} s allowed)"
        )
    nonces.remember(bytes(call.nonce), now)
