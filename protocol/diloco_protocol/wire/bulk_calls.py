"""The calls on a bulk connection, at their two ends.

Theory of operation. Bulk bytes have connections of their own, at the address of the gRPC server: there is no HTTP/2
between a socket and the array that its bytes belong to (byte_stream.py). The TLS handshake names ``BULK_PROTOCOL``;
in plain text a connection begins with ``PREFACE``. For a shard of the syncer both have its number (``bulk_protocol``,
``bulk_preface``). Then one call follows another:

    client   BulkRequest, and of an upload its bytes in chunks, each behind its length; the length 0 gives it up
    server   BulkReply, and of a download so many bytes as its header says

Messages stand behind their length, 4 bytes, the highest first. A refused upload is answered before its bytes are there:
then the client gives it up, and the connection stays. A call that breaks, or is given up on the other way, costs its
connection. The next call connects anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from diloco_protocol.common.reach import connect_first, unreachable_text
from diloco_protocol.security.credentials import BULK_PROTOCOL, Credentials, CredentialsError
from diloco_protocol.wire import convert, limits, sync_pb2
from diloco_protocol.wire.byte_stream import ByteStream, StreamBroken, TlsState, set_options
from diloco_protocol.wire.limits import WireError

PREFACE = b"diloco-bulk\n"
MESSAGE_BYTES = limits.MAX_HEADER_BYTES + 4096  # of a message: a header, the join token, and the names of fields
_LENGTH = 4


class CallFailed(Exception):
    """The syncer did not carry out a call. ``final``: it would not the next time."""

    def __init__(self, message: str, final: bool) -> None:
        super().__init__(message)
        self.final = final


def frame(message: Any) -> bytes:
    """A message behind its length. Raises WireError for one that is too large."""
    body = message.SerializeToString()
    if len(body) > MESSAGE_BYTES:
        raise WireError(f"the message has {len(body)} bytes; at most {MESSAGE_BYTES} are allowed")
    return len(body).to_bytes(_LENGTH, "big") + bytes(body)


async def read_frame(stream: ByteStream, seconds: float | None = None) -> bytes:
    """The next message; empty: the other side has ended. ``seconds``: for the rest of it, once its length is there.
    Raises WireError, StreamBroken."""
    head = await stream.read_exactly(_LENGTH)
    size = int.from_bytes(head, "big")
    if size > MESSAGE_BYTES or (head and not size):
        raise WireError(f"a message of {size} bytes; at most {MESSAGE_BYTES} are allowed")
    if not head:
        return b""
    try:
        async with asyncio.timeout(seconds):
            return await stream.read_exactly(size)
    except TimeoutError:
        raise StreamBroken(f"no whole message within {seconds:.0f} s") from None


def bulk_protocol(shard: int | None = None) -> str:
    """What the TLS handshake names (ALPN); ``shard`` None: the syncer itself."""
    return BULK_PROTOCOL if shard is None else f"{BULK_PROTOCOL}-{shard}"


def bulk_preface(shard: int | None = None) -> bytes:
    """What a connection in plain text begins with; ``shard`` None: the syncer itself."""
    return PREFACE if shard is None else b"diloco-s%03d\n" % shard


async def connect_bulk(credentials: Credentials, address: str, shard: int | None = None) -> ByteStream:
    """A bulk connection to the syncer at ``address`` (host:port), or to its shard of this number. Raises StreamBroken;
    CallFailed where the syncer's certificate is not trusted, which is final, or the credentials cannot be used."""
    made = None
    try:
        context = credentials.client_context([bulk_protocol(shard)]) if credentials.secure else None
        made = await connect_first(address, limits.CONNECT_SECONDS)
        set_options(made)
        tls = None if context is None else TlsState.begin(context, credentials.server_name)
        stream, made = ByteStream(made, tls), None
        try:
            async with asyncio.timeout(limits.CONNECT_SECONDS):
                await (stream.write(bulk_preface(shard)) if tls is None else stream.shake_hands())
        except BaseException:
            stream.close()
            raise
        return stream
    except CredentialsError as error:  # they may be about to be replaced, file by file
        raise CallFailed(str(error), False) from error
    except ssl.SSLCertVerificationError as error:
        raise CallFailed(f"the syncer's certificate is not trusted: {error.verify_message}", True) from error
    except ssl.SSLError as error:
        raise StreamBroken(f"no TLS with {address}: {error.reason or error}") from error
    except OSError as error:  # of which a timeout is one
        raise StreamBroken(unreachable_text(address, error)) from error
    finally:
        if made is not None:
            made.close()


def bulk_connection(credentials: Credentials, address: str, shard: int | None = None) -> BulkConnection:
    """A connection to the syncer at ``address`` (host:port), or to its shard of this number, not made yet."""
    return BulkConnection(lambda: connect_bulk(credentials, address, shard), credentials.token)


class BulkConnection:
    """A connection to the syncer, made when it is first used and again after it broke. It carries one call at a time.
    ``token``: the join token."""

    def __init__(self, connect: Callable[[], Awaitable[ByteStream]], token: str = "") -> None:
        self._connect, self._token = connect, token
        self._stream: ByteStream | None = None

    async def begin(self, **what: Any) -> BulkCall:
        """Begin the call of a BulkRequest: ``upload``, ``download`` or ``probe``. Raises StreamBroken, CallFailed."""
        request = frame(sync_pb2.BulkRequest(token=self._token, **what))
        if self._stream is None or self._stream.has_ended():
            self.drop()
            self._stream = await self._connect()
        unsent = what["upload"].bytes if "upload" in what else what["probe"].up if "probe" in what else 0
        call = BulkCall(self._stream, unsent)
        try:
            await self._stream.write(request)
        except BaseException:
            self.drop()
            raise
        return call

    def drop(self) -> None:
        """End the connection, if there is one."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class BulkCall:
    """A call as its caller has it. ``unsent``: bytes of an upload."""

    def __init__(self, stream: ByteStream, unsent: int) -> None:
        self._stream = stream
        self._unsent = unsent
        self._unread = 0  # bytes of a download
        self._answered = self._broken = False

    async def write(self, part: memoryview, note: Callable[[int], None] = lambda count: None) -> None:
        """Send a chunk of an upload. ``note`` hears of the bytes as they go. Raises StreamBroken."""
        self._broken = True
        await self._stream.write(len(part).to_bytes(_LENGTH, "big"), part, note=note)
        self._unsent -= len(part)
        self._broken = False

    async def read_reply(self) -> sync_pb2.BulkReply:
        """The answer. Raises CallFailed, StreamBroken, WireError."""
        raw = await read_frame(self._stream)
        if not raw:
            raise StreamBroken("the syncer ended the connection")
        reply = convert.parse(sync_pb2.BulkReply, raw, MESSAGE_BYTES)
        self._unread = reply.download.bytes
        self._answered = True
        if reply.HasField("failure"):
            raise CallFailed(reply.failure.message[: limits.MAX_TEXT], reply.failure.final)
        return reply

    async def read_into(self, view: memoryview, check: Callable[[], None] = lambda: None) -> int:
        """Bytes of a download into ``view``, as ``ByteStream.read_into``; 0: there are no more. Raises StreamBroken."""
        if not self._unread:
            return 0
        count = await self._stream.read_into(view[: self._unread], check)
        if not count:
            raise StreamBroken("the syncer ended the connection")
        self._unread -= count
        return count

    async def give_up_upload(self) -> None:
        """Send no more of an upload that was answered before all of it was sent."""
        if self._answered and self._unsent and not self._broken:
            self._broken = True
            await self._stream.write(bytes(_LENGTH))
            self._unsent, self._broken = 0, False

    def end(self) -> None:
        """The call is over; unless it came to its end, the connection is too."""
        if not self._answered or self._unsent or self._unread:
            self._stream.close()


class ServedCall:
    """A call as the syncer has it. ``request``: checked for its size, and parsed."""

    def __init__(self, stream: ByteStream, request: sync_pb2.BulkRequest) -> None:
        self._stream = stream
        self.request = request
        self._left = request.upload.bytes or request.probe.up
        self._chunk = 0  # bytes that are left of the present one

    async def read_into(self, view: memoryview, check: Callable[[], None] = lambda: None) -> int:
        """Bytes of an upload into ``view``, as ``ByteStream.read_into``; 0: there are no more. Raises WireError where
        the sender gave it up; StreamBroken, also where it sends too much."""
        if not self._left:
            return 0
        if not self._chunk:
            head = await self._stream.read_exactly(_LENGTH)
            if not head:
                raise StreamBroken("the sender ended the connection")
            self._chunk = int.from_bytes(head, "big")
            if self._chunk > self._left:
                raise StreamBroken(f"a chunk of {self._chunk} bytes, where {self._left} are left")
            if not self._chunk:
                left, self._left = self._left, 0
                raise WireError(f"the sender gave the part up, {left} bytes before its end")
        count = await self._stream.read_into(view[: self._chunk], check)
        if not count:
            raise StreamBroken("the sender ended the connection")
        self._chunk -= count
        self._left -= count
        return count

    async def reply(self, reply: sync_pb2.BulkReply) -> None:
        """Send the answer. Raises StreamBroken."""
        await self._stream.write(frame(reply))

    async def write(self, part: memoryview, note: Callable[[int], None] = lambda count: None) -> None:
        """Send bytes of a download. Raises StreamBroken."""
        await self._stream.write(part, note=note)

    async def drain(self) -> None:
        """Read what is left of an upload that was answered before its end, at most ``STALL_SECONDS`` long. Raises
        StreamBroken."""
        if not self._left:
            return
        nothing = memoryview(bytearray(limits.CHUNK_BYTES))
        with contextlib.suppress(WireError):
            try:
                async with asyncio.timeout(limits.STALL_SECONDS):
                    while await self.read_into(nothing):
                        pass
            except TimeoutError:
                raise StreamBroken("what is left of a refused upload is not given up") from None
