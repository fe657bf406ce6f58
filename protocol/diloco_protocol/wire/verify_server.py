"""Before a learner speaks to a syncer: is it the job's, and does it take us?

Theory of operation
-------------------
gRPC compares a server's certificate with one host name, and shows its caller neither the certificate nor TLS's alerts.
So a party whose own certificate names its job first makes a TLS handshake of its own: chain, time, purpose and host
name are checked as gRPC checks them, and then the URIs (``identity``). The certificate seen is *pinned*: the channels
made afterwards believe no other, so nobody can be somebody else on the next connection. A syncer that has got a new
certificate meanwhile is unreachable for such a channel; whoever made it connects anew and looks again.

The handshake ends with the server's first bytes or its alert. So a refusal is told in
words: ``certificate expired`` and the like, where gRPC says ``unavailable``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl

from diloco_protocol.common.reach import connect_first, unreachable_text
from diloco_protocol.security.credentials import GRPC_PROTOCOL, Credentials, CredentialsError
from diloco_protocol.security.identity import IdentityError, Names, check_syncer, names_in
from diloco_protocol.vocabulary import TrustFailure
from diloco_protocol.wire.limits import CONNECT_SECONDS


class ServerNotTrusted(Exception):
    """The server is not to be spoken to, or does not take us; the message says why and the cure.

    ``reason`` is a ``TrustFailure``, or empty where there was
    nothing to judge (it is away, or no TLS), which is nobody's mistake.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


async def verify_syncer(credentials: Credentials, address: str, mine: Names) -> Credentials:
    """``credentials`` that believe the syncer at ``address`` (host:port) alone, after a look at it.

    ``mine``: what the own certificate says of the job; nothing: gRPC's own checks are all there
    are, and ``credentials`` come back as they are. Raises ``ServerNotTrusted``.
    """
    if not credentials.secure or not mine or credentials.directory is None:
        return credentials
    try:
        context = credentials.client_context([GRPC_PROTOCOL])
    except CredentialsError as error:
        raise ServerNotTrusted(str(error), TrustFailure.CREDENTIALS_UNUSABLE) from error
    made = None
    try:
        made = await connect_first(address, CONNECT_SECONDS)
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(
                sock=made, ssl=context, server_hostname=credentials.server_name
            )
    except TimeoutError as error:
        words = f"no TLS handshake with {address} within {CONNECT_SECONDS} s"
        raise ServerNotTrusted(words if made else unreachable_text(address, error)) from error
    except ssl.SSLCertVerificationError as error:
        raise ServerNotTrusted(
            f"the certificate that {address} shows is not trusted: {error.verify_message.rstrip('.')}",
            TrustFailure.UNTRUSTED_SYNCER,
        ) from error
    except ssl.SSLError as error:
        raise ServerNotTrusted(f"no TLS with {address}: {tls_words(error)}") from error
    except OSError as error:
        raise ServerNotTrusted(f"cannot connect to {address}: {unreachable_text(address, error)}") from error
    except ValueError as error:
        raise ServerNotTrusted(f"cannot connect to {address}: {error}") from error
    try:
        server = _judged(writer, mine)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                first = await reader.read(1)
        except TimeoutError as error:
            raise ServerNotTrusted(f"{address} accepted the handshake, but sends nothing") from error
        except ssl.SSLError as error:
            raise ServerNotTrusted(
                f"{address} refuses our certificate: {tls_words(error)}", TrustFailure.CERTIFICATE_REFUSED
            ) from error
        except OSError as error:
            raise ServerNotTrusted(f"the connection to {address} broke: {error}") from error
        if not first:
            raise ServerNotTrusted(
                f"{address} hung up after the handshake: the syncer's log says why", TrustFailure.CERTIFICATE_REFUSED
            )
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return credentials.pinned(ssl.DER_cert_to_PEM_cert(server).encode())


def _judged(writer: asyncio.StreamWriter, mine: Names) -> bytes:
    """The server's certificate (DER), if it is the job's syncer's. Raises ``ServerNotTrusted``."""
    shown = writer.get_extra_info("peercert") or {}
    try:
        theirs = names_in(str(value) for kind, value in shown.get("subjectAltName", ()) if kind == "URI")
    except IdentityError as error:
        raise ServerNotTrusted(f"the server's certificate: {error}", TrustFailure.UNTRUSTED_SYNCER) from error
    objection = check_syncer(mine, theirs)
    if objection is not None:
        raise ServerNotTrusted(objection.message, TrustFailure.UNTRUSTED_SYNCER)
    return bytes(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))


def tls_words(error: ssl.SSLError) -> str:
    """OpenSSL's reason in lower case, without its marks: ``certificate expired``."""
    reason = (error.reason or str(error)).lower().replace("_", " ")
    for mark in ("tlsv13 alert ", "tlsv1 alert ", "sslv3 alert "):
        reason = reason.removeprefix(mark)
    return reason
