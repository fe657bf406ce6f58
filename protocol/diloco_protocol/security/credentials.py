"""Who may talk to whom: TLS, the join token, and signed control calls.

A party is given a directory (in a cluster: a mounted secret) with

- ``tls.crt``, ``tls.key``, ``ca.crt``: its certificate chain, key, and the authority that both sides trust. TLS is
  mutual: the syncer refuses a client without a certificate of that authority;
- ``join-token`` (optional): a shared word that a learner sends as call metadata
  and the syncer compares in constant time;
- ``server-name`` (optional): the name in the syncer's certificate, where it is not ``diloco-syncer``. The certificate
  is checked against this name and not against the address, because the address of a syncer behind a load balancer or a
  node port is not known when the certificate is made.

Without a directory everything is plaintext: that is for one machine. There a file with the join token alone keeps other
users of the machine out. A directory in which a TLS file is missing is an error, never a silent fall back to plaintext.
"""

from __future__ import annotations

import hmac
import os
import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from diloco_protocol.common.files import read_bounded
from diloco_protocol.security.identity import NO_NAMES, SERVER_NAME, Names

TOKEN_KEY = "diloco-join-token"
GRPC_PROTOCOL, BULK_PROTOCOL = "h2", "diloco-bulk"  # as the TLS handshake names them (ALPN)
_TLS_FILES = ("tls.crt", "tls.key", "ca.crt")
_MAX_FILE = 256 * 1024

Option = tuple[str, Any]


class CredentialsError(Exception):
    """Credentials are missing or unusable; the message names the file and the cure."""


class ListenError(CredentialsError):
    """An address cannot be listened on, for whatever reason."""


def read_secret(path: Path) -> bytes:
    """A file of credentials: not empty, and of bounded size. Raises ``CredentialsError``."""
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
    is_pinned: bool = False  # ``authority`` is the one server certificate that is believed

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
        certificate, key, authority = (read_secret(directory / name) for name in _TLS_FILES)
        token = _optional_text(directory / "join-token", "")
        name = _optional_text(directory / "server-name", SERVER_NAME)
        return cls(certificate, key, authority, token, server_name=name, directory=directory)

    @classmethod
    def from_token_file(cls, path: str | os.PathLike[str]) -> Credentials:
        """Plaintext with the join token in a file. Raises ``CredentialsError``."""
        return cls(token=_text(Path(path)))

    @property
    def secure(self) -> bool:
        """Whether channels are mutual TLS."""
        return bool(self.certificate)

    def names(self) -> Names:
        """Which job and role the own certificate names. Raises ``CredentialsError``."""
        return self._names_and_end()[0] if self.secure else NO_NAMES

    def expires(self) -> float:
        """When the own certificate does, wall-clock seconds. Raises ``CredentialsError``."""
        return self._names_and_end()[1]

    def _names_and_end(self) -> tuple[Names, float]:
        from diloco_protocol.security.certificates import CertificateError, describe  # late: plaintext needs no X.509

        try:
            described = describe(self.certificate)
        except CertificateError as error:
            raise CredentialsError(f"{self.directory or 'credentials'}: tls.crt: {error}") from error
        return described.names, described.not_after.timestamp()

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
        return replace(self, authority=server, is_pinned=True)

    def aio_channel(self, address: str, options: Sequence[Option] = ()) -> aio.Channel:
        """A ``grpc.aio`` channel to ``address`` (host:port)."""
        if not self.secure:
            return aio.insecure_channel(address, options=list(options))
        made = grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)
        named = ("grpc.ssl_target_name_override", self.server_name)
        return aio.secure_channel(address, made, options=[*options, named])

    def client_context(self, protocols: list[str]) -> ssl.SSLContext:
        """What TLS needs at the client's side, for connections of these protocols. Raises ``CredentialsError``."""
        folder = self.directory or Path()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.set_alpn_protocols(protocols)
        if self.is_pinned:  # it is no authority, and trusted all the same
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            context.load_verify_locations(cadata=self.authority.decode("ascii"))
            context.load_cert_chain(folder / "tls.crt", folder / "tls.key", password=lambda: "")
        except (OSError, ValueError) as error:  # SSLError is an OSError, UnicodeDecodeError a ValueError
            raise CredentialsError(
                f"{folder}: ca.crt, tls.crt and tls.key are not an authority, a certificate and its key in PEM"
            ) from error
        return context

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
        except (RuntimeError, ValueError):  # they say no more than that it failed
            port = 0
        if port == 0:
            raise ListenError(
                f"cannot listen on {address}: the port is in use, or this machine has no such address, "
                "or the TLS files are not a certificate and its key"
            )
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


def _optional_text(path: Path, absent: str) -> str:
    return _text(path) if path.exists() else absent


def _text(path: Path) -> str:
    try:
        text = read_secret(path).decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise CredentialsError(f"{path} must be plain ASCII text") from error
    if not text.isprintable() or len(text) > 1024:
        raise CredentialsError(f"{path} must be one printable line of at most 1024 characters")
    return text
