"""TLS both ways, the join token, and signed calls, over real connections and real certificates."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_protocol.security.credentials import Credentials, CredentialsError
from diloco_protocol.wire import sync_pb2
from diloco_protocol.wire.control_auth import (
    NONCE_BYTES,
    WINDOW_MS,
    CallRefused,
    NonceCache,
    _signature,
    make_key,
    read_key,
    sign_call,
    sign_reply,
    verify_call,
    verify_reply,
)
from example_counts import share_of

KEY = b"k" * 32


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=30)


def authority(folder: Path) -> Path:
    folder.mkdir()
    openssl(
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=test authority",
        "-keyout",
        folder / "ca.key",
        "-out",
        folder / "ca.crt",
    )
    return folder


def party(folder: Path, ca: Path, name: str, token: str = "") -> Path:
    """A directory of credentials signed by ``ca``, as a secret would hold them."""
    folder.mkdir()
    (folder / "ext").write_text(f"subjectAltName=DNS:{name}\n")
    openssl(
        "req",
        "-new",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-subj",
        f"/CN={name}",
        "-keyout",
        folder / "tls.key",
        "-out",
        folder / "csr",
    )
    openssl(
        "x509",
        "-req",
        "-in",
        folder / "csr",
        "-CA",
        ca / "ca.crt",
        "-CAkey",
        ca / "ca.key",
        "-CAcreateserial",
        "-days",
        "1",
        "-extfile",
        folder / "ext",
        "-out",
        folder / "tls.crt",
    )
    (folder / "ca.crt").write_bytes((ca / "ca.crt").read_bytes())
    if token:
        (folder / "join-token").write_text(token + "\n")
    return folder


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("secrets")
    ca, foreign = authority(root / "ca"), authority(root / "foreign-ca")
    party(root / "syncer", ca, "diloco-syncer", "word")
    party(root / "learner", ca, "learner", "word")
    party(root / "tokenless", ca, "learner")
    party(root / "foreign", foreign, "learner", "word")
    party(root / "impostor", ca, "learner", "word")
    return root


def calls(server_from: Credentials, clients: list[Credentials]) -> list[str]:
    """What each client's call to the server gives: ``ok``, ``no token``, or a status name."""

    async def run() -> list[str]:
        async def ping(raw: bytes, context: Any) -> bytes:
            return b"ok" if server_from.admits(context.invocation_metadata()) else b"no token"

        server = aio.server()
        method = grpc.unary_unary_rpc_method_handler(ping)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("T", {"Ping": method})])
        port = server_from.bind(server, "127.0.0.1:0")
        await server.start()
        results = []
        for client in clients:
            async with client.aio_channel(f"127.0.0.1:{port}") as channel:
                try:
                    call = channel.unary_unary("/T/Ping")(b"", metadata=client.metadata(), timeout=60)
                    results.append((await call).decode())
                except aio.AioRpcError as error:
                    results.append(error.code().name)
        await server.stop(0)
        return results

    return asyncio.run(run())


def test_tls_and_token(secrets: Path) -> None:
    made = [Credentials.from_directory(secrets / n) for n in ("learner", "tokenless", "foreign")]
    assert calls(Credentials.from_directory(secrets / "syncer"), [*made, Credentials()]) == [
        "ok",
        "no token",
        "UNAVAILABLE",
        "UNAVAILABLE",
    ]


@pytest.mark.promise(
    "The authority's certificate and the join token do not admit a client without a certificate of its own",
    section="Hostile callers",
)
def test_who_has_the_authority_and_the_token_but_no_certificate_is_refused(secrets: Path) -> None:
    learner = Credentials.from_directory(secrets / "learner")

    class Bare(Credentials):
        secure = True

    bare = Bare(authority=learner.authority, token=learner.token)
    assert calls(Credentials.from_directory(secrets / "syncer"), [bare, learner]) == ["UNAVAILABLE", "ok"]


def test_a_learner_cannot_pose_as_the_syncer(secrets: Path) -> None:
    learner = Credentials.from_directory(secrets / "learner")
    assert calls(Credentials.from_directory(secrets / "impostor"), [learner]) == ["UNAVAILABLE"]


def test_plaintext_only_without_a_directory(secrets: Path, tmp_path: Path) -> None:
    assert not Credentials.from_directory(None).secure
    assert calls(Credentials(), [Credentials()]) == ["ok"]
    with pytest.raises(CredentialsError, match="is not a directory"):
        Credentials.from_directory(tmp_path / "no")
    (tmp_path / "join-token").write_text("word")
    with pytest.raises(CredentialsError, match=r"lacks tls.crt, tls.key, ca.crt"):
        Credentials.from_directory(tmp_path)
    for name in ("tls.crt", "tls.key"):
        (tmp_path / name).write_bytes((secrets / "syncer" / name).read_bytes())
    with pytest.raises(CredentialsError, match=r"lacks ca.crt;"):
        Credentials.from_directory(tmp_path)
    (tmp_path / "ca.crt").write_text(" \n")
    with pytest.raises(CredentialsError, match=r"ca.crt is empty"):
        Credentials.from_directory(tmp_path)


def connects(client: Credentials, server: Path) -> str:
    """What TLS says of a connection with ``client_context``, up to the end of the client's handshake: empty, it is
    made and speaks ``first`` of ``first`` and ``second``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server / "tls.crt", server / "tls.key")
    context.load_verify_locations(server / "ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["first", "second"])
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = client.client_context(["second", "first"]).wrap_bio(to_client, to_server, server_hostname=client.server_name)
    there = context.wrap_bio(to_server, to_client, server_side=True)
    try:
        for one in (here, there, here, there):
            with contextlib.suppress(ssl.SSLWantReadError):
                one.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    assert here.selected_alpn_protocol() == there.selected_alpn_protocol() == "first"
    assert there.getpeercert(), "mutual"
    return ""


def test_the_context_of_a_client_trusts_the_authority_and_checks_the_name(secrets: Path) -> None:
    learner = Credentials.from_directory(secrets / "learner")
    assert connects(learner, secrets / "syncer") == ""
    assert "certificate" in connects(learner, secrets / "foreign")
    assert "Hostname mismatch" in connects(learner, secrets / "impostor"), "a learner cannot pose as the syncer"


def test_a_pinned_certificate_is_trusted_and_no_other_of_its_authority(secrets: Path) -> None:
    learner = Credentials.from_directory(secrets / "learner")
    assert connects(learner.pinned((secrets / "syncer" / "tls.crt").read_bytes()), secrets / "syncer") == ""
    assert connects(learner.pinned((secrets / "impostor" / "tls.crt").read_bytes()), secrets / "syncer")
    # As an authority, in ca.crt, it is none.
    unpinned = replace(learner, authority=(secrets / "syncer" / "tls.crt").read_bytes())
    assert connects(unpinned, secrets / "syncer")


@pytest.mark.parametrize("file", ["ca.crt", "tls.crt", "tls.key", "another's key", "gone"])
def test_a_context_of_files_that_are_none_is_an_error_that_names_the_folder(
    secrets: Path, tmp_path: Path, file: str
) -> None:
    folder = tmp_path / "spoilt"
    shutil.copytree(secrets / "learner", folder)
    if file == "another's key":
        shutil.copy(secrets / "syncer" / "tls.key", folder)
    elif file != "gone":
        (folder / file).write_text("hello é")
    made = Credentials.from_directory(folder)
    if file == "gone":
        shutil.rmtree(folder)
    with pytest.raises(CredentialsError, match=f"^{folder}: ca.crt, tls.crt and tls.key are not") as caught:
        made.client_context(["second"])
    assert "hello" not in str(caught.value)


def test_secrets_are_not_shown(secrets: Path) -> None:
    shown = repr(Credentials.from_directory(secrets / "syncer"))
    assert "word" not in shown and "PRIVATE" not in shown


def test_control_keys(tmp_path: Path) -> None:
    key = make_key(tmp_path / "key")
    assert make_key(tmp_path / "key") == key == read_key(tmp_path / "key") and len(key) == 64
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    (tmp_path / "short").write_text("short")
    with pytest.raises(CredentialsError, match="at least 16 bytes"):
        read_key(tmp_path / "short")
    with pytest.raises(CredentialsError, match="cannot read"):
        read_key(tmp_path / "none")


@given(
    st.sampled_from(["method", "body", "time_ms", "nonce", "signature"]),
    st.binary(min_size=1, max_size=20),
    st.integers(-WINDOW_MS, WINDOW_MS),
)
@settings(max_examples=share_of(100), deadline=None)
def test_a_signed_call_is_believed_once_and_any_change_is_found(field: str, other: bytes, off: int) -> None:
    now = 1_700_000_000_000
    call = sign_call(KEY, "announce", b'{"phase": "failed"}', now)
    nonces = NonceCache()
    changed = sync_pb2.SignedCall()
    changed.CopyFrom(call)
    value: Any = call.time_ms + 1 if field == "time_ms" else other.hex() if field == "method" else other
    setattr(changed, field, value)
    with pytest.raises(CallRefused, match="wrong signature"):
        verify_call(KEY, changed, nonces, now)
    verify_call(KEY, call, nonces, now + off)
    with pytest.raises(CallRefused, match="replayed"):
        verify_call(KEY, call, nonces, now + off)


def test_old_and_future_calls_are_refused() -> None:
    now = 1_700_000_000_000
    for off in (-WINDOW_MS - 1, WINDOW_MS + 1):
        with pytest.raises(CallRefused, match="60 s off; set the clocks"):
            verify_call(KEY, sign_call(KEY, "report", b"", now + off), NonceCache(), now)


def test_a_call_with_a_short_nonce_is_refused_though_it_is_signed() -> None:
    """Its few values would be taken by somebody else's call."""
    call = sign_call(KEY, "report", b"", 1000)
    call.nonce = call.nonce[:-1]
    call.signature = _signature(KEY, call)
    with pytest.raises(CallRefused, match=f"must have {NONCE_BYTES} bytes"):
        verify_call(KEY, call, NonceCache(), 1000)


def test_a_reply_is_of_its_call_and_as_it_was_sent() -> None:
    nonce = sign_call(KEY, "report", b"", 1000).nonce
    reply = sync_pb2.CallReply(ok=True, message="m", body=b"b")
    sign_reply(KEY, nonce, reply)
    verify_reply(KEY, nonce, reply)
    with pytest.raises(CallRefused, match="something else answered"):
        verify_reply(KEY, nonce[::-1], reply)
    for field, value in (("ok", False), ("message", "n"), ("body", b"c")):
        changed = sync_pb2.CallReply()
        changed.CopyFrom(reply)
        setattr(changed, field, value)
        with pytest.raises(CallRefused, match="something else answered"):
            verify_reply(KEY, nonce, changed)


@pytest.mark.promise("A signed control call cannot be replayed to the next syncer")
def test_a_call_made_before_this_process_began_is_refused() -> None:
    """It knows no nonces of the time before: the call may have been made to the process that it follows."""
    now = 1_700_000_000_000
    call = sign_call(KEY, "process-ended", b"{}", now - 1000)
    verify_call(KEY, call, NonceCache(), now)
    with pytest.raises(CallRefused, match=r"1\.0 s before this process began"):
        verify_call(KEY, call, NonceCache(since_ms=now), now + 500)
    verify_call(KEY, sign_call(KEY, "process-ended", b"{}", now), NonceCache(since_ms=now), now + 500)


def test_parts_of_a_call_cannot_be_shifted_into_each_other() -> None:
    call = sign_call(KEY, "ab", b"c", 1)
    call.method, call.body = "a", b"bc"
    with pytest.raises(CallRefused, match="wrong signature"):
        verify_call(KEY, call, NonceCache(), 1)


def test_nonces_are_bounded_and_none_is_forgotten_in_its_window() -> None:
    nonces = NonceCache(capacity=3)
    calls = [sign_call(KEY, "report", b"", 1000 + i) for i in range(4)]
    for call in calls[:3]:
        verify_call(KEY, call, nonces, 1000)
    with pytest.raises(CallRefused, match="too many"):
        verify_call(KEY, calls[3], nonces, 1000)
    with pytest.raises(CallRefused, match="replayed"):
        verify_call(KEY, calls[0], nonces, 1000 + WINDOW_MS)
    later = 1001 + 2 * WINDOW_MS
    verify_call(KEY, sign_call(KEY, "report", b"", later), nonces, later)
    assert len(nonces._seen) == 1
