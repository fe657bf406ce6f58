"""Makes certificates: an authority, and leaves that name a job and a role.

Nothing here touches a file or a clock; times and keys are handed in. Keys are ECDSA on P-256: fast to verify, and
understood everywhere. A syncer's certificate is good for a server only and a learner's for a client only (extended key
usage), so that one can never stand in for the other, whatever names it carries.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from diloco_protocol.security.identity import SERVER_NAME, IdentityError, Name, Names, names_in

BACKDATED = datetime.timedelta(days=1)  # clocks differ
LEAF_DAYS, AUTHORITY_DAYS = 90, 3650


class CertificateError(ValueError):
    """A certificate or key cannot be used, or not be made so; the message says which and the cure."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its private key, PEM."""

    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Described:
    names: Names
    hosts: tuple[str, ...]  # DNS names and addresses
    not_after: datetime.datetime

    def days_left(self, now: datetime.datetime) -> int:
        """Days until it expires, rounded; negative: it has."""
        return round((self.not_after - now) / datetime.timedelta(days=1))


def new_authority(title: str, now: datetime.datetime, days: int = AUTHORITY_DAYS) -> Issued:
    """A self-signed authority. Raises ``CertificateError``."""
    key = ec.generate_private_key(ec.SECP256R1())
    return _issued(authority_of(key, title, now, now + _days(days)), key)


def issue(
    authority: Issued, names: Sequence[Name], hosts: Iterable[str], now: datetime.datetime, days: int = LEAF_DAYS
) -> Issued:
    """A leaf with a new key. ``hosts``: more DNS names of a syncer. It never outlives its authority.

    Raises ``CertificateError``.
    """
    signer, key_of_signer = load_authority(authority)
    if len({one.role for one in names}) != 1:
        raise CertificateError("a certificate names one role: a syncer's or a learner's")
    if signer.not_valid_after_utc <= now:
        raise CertificateError("the authority has expired: make a new one with `diloco certs init`")
    until = min(now + _days(days), signer.not_valid_after_utc)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = f"{names[0].role} {names[0].namespace}/{names[0].job}"
    return _issued(
        leaf_of(key, subject, names, hosts, issuer=signer.subject, key_of_issuer=key_of_signer, now=now, until=until),
        key,
    )


def authority_of(
    key: ec.EllipticCurvePrivateKey, title: str, now: datetime.datetime, until: datetime.datetime
) -> x509.Certificate:
    """The self-signed certificate of an authority that has this key."""
    return (
        _begun(title, common_name(title), key.public_key(), now, until=until)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(True), critical=True)
        .sign(key, hashes.SHA256())
    )


def leaf_of(
    key: ec.EllipticCurvePrivateKey,
    subject: str,
    names: Sequence[Name],
    hosts: Iterable[str],
    issuer: x509.Name,
    key_of_issuer: ec.EllipticCurvePrivateKey,
    now: datetime.datetime,
    until: datetime.datetime,
) -> x509.Certificate:
    """The certificate of a party that has this key. ``names``: of one role; ``hosts``: more DNS names
    of a syncer. Raises ``CertificateError``."""
    alternatives: list[x509.GeneralName] = [x509.UniformResourceIdentifier(one.uri) for one in sorted(names)]
    alternatives += [x509.DNSName(host) for host in dict.fromkeys(_hosts(names, hosts))]
    syncer = names[0].role == "syncer"
    usage = ExtendedKeyUsageOID.SERVER_AUTH if syncer else ExtendedKeyUsageOID.CLIENT_AUTH
    return (
        _begun(subject, issuer, key.public_key(), now, until=until)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key_of_issuer.public_key()), critical=False)
        .sign(key_of_issuer, hashes.SHA256())
    )


def load_authority(authority: Issued) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The authority's certificate and key. Raises ``CertificateError`` if they are not such a pair."""
    try:
        certificate = x509.load_pem_x509_certificate(authority.certificate)
        key = serialization.load_pem_private_key(authority.key, None)
    except (ValueError, TypeError) as error:
        raise CertificateError("the authority's ca.crt or ca.key is not PEM, or has a password") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise CertificateError("ca.key is not the (elliptic curve) key of ca.crt")
    return certificate, key


def describe(certificate: bytes) -> Described:
    """What the first certificate of a PEM text says. Raises ``CertificateError``."""
    try:
        found = x509.load_pem_x509_certificate(certificate)
        alternatives = _alternative_names(found)
        uris = alternatives.get_values_for_type(x509.UniformResourceIdentifier)
        hosts = alternatives.get_values_for_type(x509.DNSName)
        addresses = alternatives.get_values_for_type(x509.IPAddress)
        names = names_in(uris)
    except IdentityError as error:
        raise CertificateError(str(error)) from error
    except (ValueError, x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise CertificateError("it is no certificate in PEM") from error
    return Described(names, (*hosts, *map(str, addresses)), found.not_valid_after_utc)


def server_hosts(namespace: str, job: str) -> tuple[str, ...]:
    """The DNS names of every syncer: the one that learners check, and those of its Service."""
    service = f"{job}-syncer"
    return (SERVER_NAME, service, f"{service}.{namespace}", f"{service}.{namespace}.svc")


def _hosts(names: Sequence[Name], more: Iterable[str]) -> list[str]:
    hosts = list(more)
    if names[0].role == "learner":
        if hosts:
            raise CertificateError("a learner's certificate has no DNS names: it is nobody's server")
        return []
    for one in names:
        hosts = [*server_hosts(one.namespace, one.job), *hosts]
    for host in hosts:
        if not host.isascii() or not 0 < len(host) <= 253 or any(c in host for c in " /:@"):
            raise CertificateError(f"DNS name {host[:80]!r}: expected a host's name, without port or scheme")
    return hosts


def _alternative_names(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return x509.SubjectAlternativeName([])


def _days(days: int) -> datetime.timedelta:
    if not 1 <= days <= 36500:
        raise CertificateError(f"days is {days}: expected 1 to 36500")
    return datetime.timedelta(days=days)


def common_name(text: str) -> x509.Name:
    """Of a subject or an issuer; cut at the 64 characters that a common name may have."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _begun(
    subject: str, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime.datetime, until: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(common_name(subject))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _issued(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Issued:
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    return Issued(certificate.public_bytes(pem), key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
