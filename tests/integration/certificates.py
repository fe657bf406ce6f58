"""Certificates for tests, made as an operator would, and Secrets as a kubelet mounts them."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass
class Authority:
    """A certificate authority of P-256 keys."""

    name: str

    def __post_init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = _certificate(self.name, self.name, self.key.public_key(), self.key, authority=True)

    def secret(self, name: str, token: str = "", trusts: Authority | None = None) -> dict[str, bytes]:
        """The content of a Secret for a party of this name, which trusts ``trusts`` (this authority)."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate(name, self.name, key.public_key(), self.key)
        pem = serialization.Encoding.PEM
        private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        content = {
            "tls.crt": certificate.public_bytes(pem),
            "tls.key": private,
            "ca.crt": (trusts or self).certificate.public_bytes(pem),
        }
        return content | ({"join-token": token.encode()} if token else {})


def _certificate(
    subject: str, issuer: str, key: ec.EllipticCurvePublicKey, by: ec.EllipticCurvePrivateKey, authority: bool = False
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(subject)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .sign(by, hashes.SHA256())
    )


def mount(folder: Path, content: dict[str, bytes], version: str = "..2026_01_01") -> Path:
    """A folder as a kubelet fills it: links into a hidden folder, which a change swaps as a whole."""
    data = folder / version
    data.mkdir(parents=True)
    for name, value in content.items():
        (data / name).write_bytes(value)
        (data / name).chmod(0o440)
    fresh = folder / "..data_tmp"
    fresh.symlink_to(version)
    fresh.replace(folder / "..data")
    for name in content:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")
    return folder
