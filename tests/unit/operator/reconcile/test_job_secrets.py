"""A job's keys and certificates: the same when made again, and good for real gRPC."""

from __future__ import annotations

import base64
import datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from diloco_operator.model import SecretWanted
from diloco_operator.reconcile.job_secrets import RootKey, certificates, manifest
from diloco_protocol.security.credentials import Credentials
from diloco_protocol.wire.control_auth import read_key

UID = "0b0a7f3e-3c5e-4c57-9a35-6b8f3f1d2c4e"
ROOT = RootKey(b"0123456789abcdef0123456789abcdef")
CONTROL = "3093faf1e36307d6a79253d6aa9ec2e809355f281ec109797f6996a50638b59c"
JOIN = "f6867059825a7e045dbb4cd1ed98a4dea622cfa2a2c7d26c6bc4dc08a6ca7ac0"
AUTHORITY = 0xC737CAA6A49BA9EA4C2D83661069362A3D22AAC6068C304E24543078C0AC37E1


def wanted(role: Any, tls: bool = True) -> SecretWanted:
    owner = {"apiVersion": "diloco.io/v1alpha1", "kind": "DiLoCoJob", "name": "tiny", "uid": UID}
    head = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"tiny-{role}-0b0a7f3e", "namespace": "ns", "ownerReferences": [owner]},
    }
    return SecretWanted(head["metadata"]["name"], role, head, tls, control_key=role == "syncer")


def directory(path: Path, role: str, root: RootKey = ROOT) -> Path:
    """The Secret as a pod has it mounted."""
    path.mkdir()
    for name, value in manifest(wanted(role), root)["data"].items():
        (path / name).write_bytes(base64.b64decode(value))
    return path


def test_keys_are_the_same_when_they_are_made_again_and_no_two_are_alike() -> None:
    again = RootKey(b"0123456789abcdef0123456789abcdef")
    assert ROOT.control_key(UID) == again.control_key(UID)
    # Pinned: an operator of a later release must make the same.
    assert ROOT.control_key(UID).decode() == CONTROL
    assert ROOT.join_token(UID) == JOIN
    assert ROOT.private_key("authority", UID).private_numbers().private_value == AUTHORITY
    known = {
        ROOT.control_key(UID),
        ROOT.join_token(UID).encode(),
        ROOT.control_key("other"),
        RootKey(b"another root key, long enough....").control_key(UID),
        *(
            str(ROOT.private_key(role, UID).private_numbers().private_value).encode()
            for role in ("authority", "syncer", "learner")
        ),
    }
    assert len(known) == 7


def test_a_short_root_key_is_none_and_a_key_shows_itself_to_nobody() -> None:
    with pytest.raises(ValueError, match="at least 32 bytes"):
        RootKey(b"short")
    assert "0123" not in repr(ROOT) + str(ROOT) + f"{ROOT!r}"


def test_what_is_in_a_secret_goes_by_who_has_it() -> None:
    syncer, learner = manifest(wanted("syncer"), ROOT), manifest(wanted("learner"), ROOT)
    assert set(syncer["data"]) == {"tls.crt", "tls.key", "ca.crt", "join-token", "control-key"}
    assert set(learner["data"]) == {"tls.crt", "tls.key", "ca.crt", "join-token"}
    assert set(manifest(wanted("syncer", tls=False), ROOT)["data"]) == {"join-token", "control-key"}
    assert learner["metadata"] == wanted("learner").manifest_head["metadata"]
    assert learner["data"]["join-token"] == syncer["data"]["join-token"]
    assert learner["data"]["tls.key"] != syncer["data"]["tls.key"]


def test_the_control_key_is_one_as_the_syncer_reads_it(tmp_path: Path) -> None:
    assert read_key(directory(tmp_path / "s", "syncer") / "control-key") == ROOT.control_key(UID)


def test_certificates_say_who_and_for_what() -> None:
    made = {
        role: x509.load_pem_x509_certificate(certificates(ROOT, "ns", "tiny", UID, role=role)["tls.crt"])
        for role in ("syncer", "learner")
    }
    names = {
        role: cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value for role, cert in made.items()
    }
    assert names["syncer"].get_values_for_type(x509.DNSName) == [
        "diloco-syncer",
        "tiny-syncer",
        "tiny-syncer.ns",
        "tiny-syncer.ns.svc",
        "tiny-syncer.ns.svc.cluster.local",
    ]
    uri = x509.UniformResourceIdentifier
    assert names["syncer"].get_values_for_type(uri) == ["diloco://job/ns/tiny/syncer"]
    assert names["learner"].get_values_for_type(uri) == ["diloco://job/ns/tiny/learner"]
    assert names["learner"].get_values_for_type(x509.DNSName) == []
    usage = {
        role: list(cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) for role, cert in made.items()
    }
    assert usage == {"syncer": [ExtendedKeyUsageOID.SERVER_AUTH], "learner": [ExtendedKeyUsageOID.CLIENT_AUTH]}
    now = datetime.datetime.now(datetime.UTC)
    for cert in made.values():
        assert now + datetime.timedelta(days=3650) < cert.not_valid_after_utc
        assert cert.not_valid_before_utc < now - datetime.timedelta(hours=12)
        assert isinstance(cert.public_key(), ec.EllipticCurvePublicKey)
    again = x509.load_pem_x509_certificate(certificates(ROOT, "ns", "tiny", UID, role="syncer")["tls.crt"])
    assert again.serial_number != made["syncer"].serial_number


async def handshake(server: Credentials, client: Credentials) -> str:
    """A call over real mutual TLS; what the server answered. Raises AioRpcError."""

    async def echo(raw: bytes, context: Any) -> bytes:
        if not server.admits(context.invocation_metadata()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the join token is wrong")
        return b"hello " + raw

    serving = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(echo)
    serving.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"E": method}),))
    port = server.bind(serving, "127.0.0.1:0")
    await serving.start()
    channel = client.aio_channel(f"127.0.0.1:{port}")
    try:
        answer = await channel.unary_unary("/t.T/E")(b"you", timeout=5, metadata=client.metadata())
        return bytes(answer).decode()
    finally:
        await channel.close()
        await serving.stop(0)


async def test_secrets_that_were_made_at_different_times_fit(tmp_path: Path) -> None:
    """The syncer's was deleted by hand and made again; learners keep theirs, and the other way round."""
    old = {
        role: Credentials.from_directory(directory(tmp_path / f"old-{role}", role)) for role in ("syncer", "learner")
    }
    new = {
        role: Credentials.from_directory(directory(tmp_path / f"new-{role}", role)) for role in ("syncer", "learner")
    }
    assert old["syncer"].certificate != new["syncer"].certificate
    assert old["learner"].authority != new["learner"].authority
    assert await handshake(new["syncer"], old["learner"]) == "hello you"
    assert await handshake(old["syncer"], new["learner"]) == "hello you"


async def test_another_jobs_or_roles_certificate_opens_nothing(tmp_path: Path) -> None:
    syncer = Credentials.from_directory(directory(tmp_path / "s", "syncer"))
    learner = Credentials.from_directory(directory(tmp_path / "l", "learner"))
    stranger = Credentials.from_directory(
        directory(tmp_path / "x", "learner", RootKey(b"another root key, long enough...."))
    )
    with pytest.raises(grpc.aio.AioRpcError):
        await handshake(syncer, stranger)
    with pytest.raises(grpc.aio.AioRpcError):  # a learner that plays the syncer
        await handshake(learner, learner)
    forged = Credentials(learner.certificate, learner.key, learner.authority, token="0" * 64)
    with pytest.raises(grpc.aio.AioRpcError, match="join token"):
        await handshake(syncer, forged)
