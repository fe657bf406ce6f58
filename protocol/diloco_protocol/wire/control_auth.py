"""Signed control calls: who may tell a syncer what to do.

Control calls (``process-ended``, ``announce`` ...) go to a port of their own and are signed with a key that learners do
not have: HMAC-SHA256 over the method, the body, the time and a nonce, each length-prefixed. A call is refused when its
signature is wrong, its time is more than ``WINDOW_MS`` off, or its nonce was seen. Nonces are remembered for as long as
their call could be replayed, at most ``NonceCache.capacity`` of them; when that many fresh ones are held, calls are
refused rather than nonces forgotten. A process that begins knows no nonces, so it refuses calls that were made before.

Replies are signed with the same key, over the call's nonce and all that they say. So the control port is plaintext even
where everything else is TLS: who makes a call needs the key and nothing else (an operator may not read its users'
certificates), nobody without it can make a call, alter one or answer in the syncer's place, and no secret is in any of
them.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from diloco_protocol.common.files import create_whole
from diloco_protocol.security.credentials import CredentialsError, read_secret
from diloco_protocol.wire import sync_pb2

WINDOW_MS = 60_000
NONCE_BYTES = 16
MIN_KEY_BYTES = 16


class CallRefused(Exception):
    """A control call is not believed; the message says why."""


def make_key(path: str | os.PathLike[str]) -> bytes:
    """Create the file of a control key or of a machine's join token (0600, 64 hex digits), or read the one that is
    there."""
    with contextlib.suppress(FileExistsError):  # an earlier run of the same job made it
        create_whole(path, secrets.token_hex(32).encode() + b"\n", mode=0o600)
    return read_key(path)


def read_key(path: str | os.PathLike[str]) -> bytes:
    """The control key. Raises ``CredentialsError`` if it is missing or too short."""
    key = read_secret(Path(path)).strip()
    if len(key) < MIN_KEY_BYTES:
        raise CredentialsError(f"{path} must hold at least {MIN_KEY_BYTES} bytes of key")
    return key


def _sign_parts(key: bytes, parts: Iterable[bytes]) -> bytes:
    """HMAC-SHA256 over the parts, each behind its length."""
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(len(part).to_bytes(8, "big"))
        mac.update(part)
    return mac.digest()


def _signature(key: bytes, call: sync_pb2.SignedCall) -> bytes:
    return _sign_parts(key, (call.method.encode(), call.body, str(call.time_ms).encode(), call.nonce))


def sign_call(key: bytes, method: str, body: bytes, time_ms: int | None = None) -> sync_pb2.SignedCall:
    """A control call signed with ``key``; ``body`` is JSON; ``time_ms`` is wall-clock, now if None."""
    stamp = time.time_ns() // 1_000_000 if time_ms is None else time_ms
    call = sync_pb2.SignedCall(method=method, body=body, time_ms=stamp, nonce=secrets.token_bytes(NONCE_BYTES))
    call.signature = _signature(key, call)
    return call


def sign_reply(key: bytes, nonce: bytes, reply: sync_pb2.CallReply) -> None:
    """Sign the reply to the call with this nonce, in place."""
    reply.signature = _reply_signature(key, nonce, reply)


def verify_reply(key: bytes, nonce: bytes, reply: sync_pb2.CallReply) -> None:
    """Return if the reply is the syncer's to the call with this nonce. Raises ``CallRefused``."""
    if not hmac.compare_digest(_reply_signature(key, nonce, reply), reply.signature):
        raise CallRefused("the reply is not signed with the control key: something else answered")


def _reply_signature(key: bytes, nonce: bytes, reply: sync_pb2.CallReply) -> bytes:
    return _sign_parts(key, (b"reply", nonce, b"1" if reply.ok else b"0", reply.message.encode(), reply.body))


class NonceCache:
    """Nonces of believed calls, each kept until its call is too old to be believed again. ``since_ms``: the wall clock
    when they began to be kept; calls made before are refused."""

    def __init__(self, capacity: int = 4096, since_ms: int = 0) -> None:
        self.capacity = capacity
        self.since_ms = since_ms
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


def verify_call(key: bytes, call: sync_pb2.SignedCall, nonces: NonceCache, now_ms: int | None = None) -> None:
    """Return if the call is believed, raise ``CallRefused`` otherwise.

    The signature is checked first, so that only holders of the key can fill the nonce cache.
    """
    now = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    if not hmac.compare_digest(_signature(key, call), call.signature):
        raise CallRefused("wrong signature: the control keys differ")
    if len(call.nonce) != NONCE_BYTES:
        raise CallRefused(f"the nonce must have {NONCE_BYTES} bytes")
    if abs(now - call.time_ms) > WINDOW_MS:
        off = abs(now - call.time_ms) / 1000
        raise CallRefused(f"the call's time is {off:.0f} s off; set the clocks ({WINDOW_MS // 1000} s allowed)")
    if call.time_ms < nonces.since_ms:
        early = (nonces.since_ms - call.time_ms) / 1000
        raise CallRefused(
            f"the call was made {early:.1f} s before this process began: make it again, or set the clocks"
        )
    nonces.remember(bytes(call.nonce), now)
