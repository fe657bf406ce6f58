"""Certificates of every kind that may come to a syncer's port, in folders as parties are given them.

Not a test: what tests of TLS need. Honest ones are made as `diloco certs` makes them; the
others as somebody else's tool might.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from diloco_protocol.security.certificates import Issued, issue, load_authority, new_authority
from diloco_protocol.security.identity import Name, name

TOKEN = "5e" * 32
DAY = datetime.timedelta(days=1)


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class Parties:
    """An authority, and the folders of those whom it vouches for."""

    def __init__(self, folder: Path, job: str, namespace: str = "ns", title: str = "ours") -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.job, self.namespace = folder, job, namespace
        self.authority = new_authority(title, now() - 400 * DAY)

    def named(self, region: str | None, job: str = "", namespace: str = "") -> Name:
        """``region`` None: the syncer; empty: learners of all regions."""
        role = "syncer" if region is None else "learner"
        return name(namespace or self.namespace, job or self.job, role, region or "")  # type: ignore[arg-type]

    def put(self, who: str, made: Issued, trusts: Issued | None = None, token: str = TOKEN) -> Path:
        """A party's folder; files that are there are replaced, one after the other."""
        folder = self.folder / who
        folder.mkdir(exist_ok=True)
        content = {
            "ca.crt": (trusts or self.authority).certificate,
            "tls.key": made.key,
            "tls.crt": made.certificate,
            "join-token": token.encode(),
        }
        for file, value in content.items():
            fresh = folder / f".{file}"
            fresh.write_bytes(value)
            fresh.replace(folder / file)
        return folder

    def syncer(self, who: str = "syncer", days: int = 1) -> Path:
        return self.put(who, issue(self.authority, [self.named(None)], (), now(), days=days))

    def learner(
        self,
        who: str = "learner",
        region: str = "local",
        *,
        job: str = "",
        namespace: str = "",
        since: datetime.timedelta = datetime.timedelta(0),
        days: int = 1,
        token: str = TOKEN,
    ) -> Path:
        """``since``: made so long after now (before, if negative)."""
        names = [self.named(region, job, namespace)]
        return self.put(who, issue(self.authority, names, (), now() + since, days=days), token=token)

    def other(self, who: str, uris: Iterable[str], hosts: Iterable[str] = (), usages: Iterable[str] = ()) -> Path:
        """As a tool that knows nothing of our roles makes them. ``usages``: extended, by OID; none: good
        for everything."""
        signer, key = load_authority(self.authority)
        own = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in uris]
        names += [x509.DNSName(host) for host in hosts]
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(signer.subject)
            .public_key(own.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now() - DAY)
            .not_valid_after(now() + DAY)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=True)
        if usages := list(usages):
            known = x509.ExtendedKeyUsage([x509.ObjectIdentifier(each) for each in usages])
            builder = builder.add_extension(known, critical=False)
        pem = serialization.Encoding.PEM
        private = own.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        signed = builder.sign(key, hashes.SHA256())
        return self.put(who, Issued(signed.public_bytes(pem), private))
