"""Secrets as cert-manager makes them: keys and chains in forms that `diloco certs` does not write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from pods import Hub, Pod, make_job

from parties import DAY, TOKEN, now

pytestmark = pytest.mark.timeout(180)
Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
PEM = serialization.Encoding.PEM


class Issuer:
    """A root, an intermediate that it has signed, and leaves of that one."""

    def __init__(self) -> None:
        self.root_key, self.key = self.new_key("ec"), self.new_key("rsa")
        self.root = self._authority("root", self.root_key, "root", self.root_key)
        self.intermediate = self._authority("intermediate", self.key, "root", self.root_key)

    @staticmethod
    def new_key(kind: str) -> Key:
        if kind == "ec":
            return ec.generate_private_key(ec.SECP256R1())
        return rsa.generate_private_key(65537, 2048)

    @staticmethod
    def _begun(subject: x509.Name, key: Key, issuer: str) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(named(issuer))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now() - DAY)
            .not_valid_after(now() + 90 * DAY)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )

    def _authority(self, title: str, key: Key, issuer: str, signer: Key) -> x509.Certificate:
        begun = self._begun(named(title), key, issuer)
        begun = begun.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        begun = begun.add_extension(usages(signs=True), critical=True)
        return begun.sign(signer, hashes.SHA256())

    def secret(self, folder: Path, kind: str, uri: str, hosts: tuple[str, ...], purpose: str) -> Path:
        """The folder that a Secret is mounted as: tls.crt with the chain but for the root, tls.key in the
        key's traditional form (PKCS#1, SEC1), ca.crt, and the join token that somebody has added."""
        key = self.new_key(kind)
        begun = self._begun(x509.Name([]), key, "intermediate")
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri)]
        names += [x509.DNSName(host) for host in hosts]
        begun = begun.add_extension(x509.SubjectAlternativeName(names), critical=True)
        begun = begun.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        begun = begun.add_extension(usages(signs=False), critical=True)
        for_what = getattr(ExtendedKeyUsageOID, purpose)
        begun = begun.add_extension(x509.ExtendedKeyUsage([for_what]), critical=False)
        leaf = begun.sign(self.key, hashes.SHA256())
        folder.mkdir()
        (folder / "tls.crt").write_bytes(leaf.public_bytes(PEM) + self.intermediate.public_bytes(PEM))
        traditional, plain = serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        (folder / "tls.key").write_bytes(key.private_bytes(PEM, traditional, plain))
        (folder / "ca.crt").write_bytes(self.root.public_bytes(PEM))
        (folder / "join-token").write_text(TOKEN)
        return folder


def named(title: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, title)])


def usages(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=not signs,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


@pytest.fixture
def made() -> Iterator[list[Hub | Pod]]:
    everything: list[Hub | Pod] = []
    yield everything
    for one in everything:
        one.kill()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ec", "rsa"])
def test_a_job_with_certificates_of_an_intermediate(tmp_path: Path, made: list[Hub | Pod], kind: str) -> None:
    issuer = Issuer()
    syncer = issuer.secret(tmp_path / "syncer", kind, "diloco://job/ns/pods/syncer", ("diloco-syncer",), "SERVER_AUTH")
    learner = issuer.secret(tmp_path / "learner", kind, "diloco://job/ns/pods/learner/eu-1", (), "CLIENT_AUTH")
    hub = Hub(tmp_path, make_job(learners={"eu-1": 1}), credentials=syncer)
    made.append(hub)
    hub.start().serves()
    pod = Pod(hub, 0, "eu-1", credentials=learner).start()
    made.append(pod)
    hub.waits_until(lambda s: s["merges"] > 3, "merges")
    # A handshake that takes too long on a busy machine is broken off, and tried again.
    assert hub.status()["tls"]["refused"].keys() <= {"broken-off"}
    # Another's certificate of the same authority and intermediate is refused as ever.
    other = issuer.secret(tmp_path / "other", kind, "diloco://job/ns/other/learner/eu-1", (), "CLIENT_AUTH")
    stranger = Pod(hub, 1, "eu-1", credentials=other).start()
    made.append(stranger)
    told = stranger.waits_until(lambda s: s["refused"] and s, "its own certificate to be looked at")
    assert told["refused"]["reason"] == "credentials-unusable" and not told["joined"]
