"""Carries messages between the syncer and a shard, over a stream.

A shard in a pod of its own connects over the network, and both ends have the syncer's certificate and key. That
certificate is for a server only. So the shard believes a server that shows this very certificate, and no other, and
shows by a digest of the key that it has the key too (``make_proof``).
"""

from __future__ import annotations

import asyncio
import hmac
import ssl
from collections.abc import AsyncIterator
from typing import Any

from diloco_protocol.common.reach import connect_first, unreachable_text
from diloco_protocol.security.credentials import Credentials, CredentialsError
from diloco_protocol.wire.byte_stream import StreamBroken, set_options
from diloco_protocol.wire.limits import CONNECT_SECONDS, WireError
from diloco_syncer.shards import messages as ms

PROTOCOL = "diloco-shards"  # as the TLS handshake names it (ALPN)
PROOF_BYTES = 32
_LENGTH = 4
MAX_WAITING = 256 << 20  # bytes that the other end has not taken: it stands still


class MessageStream:
    """One end of a stream of messages."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, message: ms.FromShard | ms.ToShard) -> None:
        """Send a message, in order. Nothing happens once the stream has ended; it ends where the other end does not
        take what is sent."""
        if self._writer.is_closing():
            return
        data = ms.write_message(message)
        self._writer.write(len(data).to_bytes(_LENGTH, "big") + data)
        if self._writer.transport.get_write_buffer_size() > MAX_WAITING:
            self._writer.transport.abort()

    async def read_messages(self) -> AsyncIterator[Any]:
        """What comes, until the other end ends. Raises ``WireError``."""
        while True:
            try:
                size = int.from_bytes(await self._reader.readexactly(_LENGTH), "big")
                if size > ms.MAX_MESSAGE:
                    raise WireError(f"a message of {size} bytes between the syncer and a shard")
                data = await self._reader.readexactly(size)
            except (asyncio.IncompleteReadError, OSError):
                return
            yield ms.read_message(data)

    def close(self) -> None:
        self._writer.close()


def make_proof(credentials: Credentials) -> bytes:
    """What a shard says first. Only the syncer hears it."""
    return hmac.digest(credentials.key, b"diloco shard", "sha256")


async def connect_syncer(credentials: Credentials, address: str) -> MessageStream:
    """A stream to the syncer at ``address`` (host:port), which shows the certificate of ``credentials``. Raises
    StreamBroken."""
    own, end, _ = credentials.certificate.partition(b"-----END CERTIFICATE-----")
    try:
        context = credentials.pinned(own + end).client_context([PROTOCOL])
        context.check_hostname = False  # whatever names it has, it is this one
        made = await connect_first(address, CONNECT_SECONDS)
        set_options(made)
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(
                sock=made, ssl=context, server_hostname=credentials.server_name
            )
    except ssl.SSLCertVerificationError as error:
        raise StreamBroken(
            f"{address} shows another certificate than this shard has: {error.verify_message}"
        ) from error
    except (OSError, ValueError, CredentialsError) as error:
        words = unreachable_text(address, error) if isinstance(error, OSError) else str(error)
        raise StreamBroken(words) from error
    writer.write(make_proof(credentials))
    return MessageStream(reader, writer)
