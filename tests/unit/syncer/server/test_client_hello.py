"""What is read of a ClientHello before TLS: of real ones what OpenSSL wrote, and of any other bytes nothing worse."""

from __future__ import annotations

import contextlib
import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_syncer.server.tls.client_hello import MAX_BYTES, find_protocols


def hello(protocols: list[str], server: str = "diloco-syncer") -> bytes:
    """The first bytes of a client of OpenSSL that names these."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if protocols:
        context.set_alpn_protocols(protocols)
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=server).do_handshake()
    return outgoing.read()


NAMES = st.lists(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=255), max_size=20)
REAL = hello(["h2", "diloco-bulk", "diloco-bulk-12"])


@given(NAMES)
def test_the_protocols_found_are_those_that_were_given(names: list[str]) -> None:
    assert find_protocols(hello(names)) == tuple(name.encode() for name in names)


@given(st.binary(min_size=1, max_size=40))
def test_a_hello_is_read_when_it_is_whole_and_alone(more: bytes) -> None:
    assert all(find_protocols(REAL[:size]) is None for size in range(len(REAL)))
    assert find_protocols(REAL) == (b"h2", b"diloco-bulk", b"diloco-bulk-12")
    assert find_protocols(REAL + more) == ()


@given(st.one_of(st.binary(max_size=2000), st.binary(max_size=2000).map(lambda rest: REAL[:11] + rest)))
def test_bytes_of_any_kind_are_no_fault(data: bytes) -> None:
    found = find_protocols(data)
    assert found is None or all(isinstance(name, bytes) for name in found)


@given(st.data())
def test_a_hello_that_was_changed_is_no_fault(data: st.DataObject) -> None:
    changed = bytearray(REAL)
    for at in data.draw(st.lists(st.integers(0, len(REAL) - 1), min_size=1, max_size=8)):
        changed[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.lists(st.integers(0, len(REAL)), min_size=2, max_size=2).map(sorted))
    for each in (changed, changed[: cut[0]] + changed[cut[1] :], changed[: cut[1]] + changed[cut[0] :]):
        found = find_protocols(bytes(each))
        assert found is None or all(isinstance(name, bytes) for name in found)


def record(*extensions: bytes, kind: int = 1, after: bytes = b"", behind: bytes = b"") -> bytes:
    """A ClientHello of these extensions, in a record; ``after`` in it, ``behind`` it."""
    every = b"".join(extensions)
    body = bytes(34) + b"\0" + b"\0\2\x13\1" + b"\1\0" + len(every).to_bytes(2, "big") + every + after
    message = bytes([kind]) + len(body).to_bytes(3, "big") + body + behind
    return b"\x16\3\1" + len(message).to_bytes(2, "big") + message


def alpn(names: bytes, after: bytes = b"") -> bytes:
    body = len(names).to_bytes(2, "big") + names + after
    return b"\0\x10" + len(body).to_bytes(2, "big") + body


def test_a_hello_of_our_own_is_read() -> None:
    whole = record(alpn(b"\2h2"))
    assert find_protocols(whole[:3] + (len(whole) - 9).to_bytes(2, "big") + whole[5:]) == ()  # it goes on in another
    assert find_protocols(record(alpn(b"\2h2"))) == (b"h2",)
    assert find_protocols(record(b"\0\1\0\0", alpn(b"\1a\1b"), b"\0\2\0\1x")) == (b"a", b"b")
    assert find_protocols(record()) == ()


@pytest.mark.parametrize(
    "data",
    [
        b"\x15",
        b"GET / HTTP/1.1",
        b"\x16\3\1" + (MAX_BYTES + 1).to_bytes(2, "big"),
        b"\x16\3\1\0\0",
        record(alpn(b"\2h2"), kind=2),
        record(alpn(b"\2h2"), after=b"x"),
        record(alpn(b"\2h2"), behind=b"x"),
        record(alpn(b"\2h2"), alpn(b"\2h2")),
        record(alpn(b"\2h2", after=b"x")),
        record(alpn(b"\3h2")),
        record(alpn(b"\2h2\0")),
        record(alpn(b"")),
        record(alpn(b"\2h2"), b"\0\1\0"),
    ],
)
def test_what_is_no_hello_as_read_here_names_nothing(data: bytes) -> None:
    assert find_protocols(data) == ()
    assert find_protocols(b"\x16\3\1" + MAX_BYTES.to_bytes(2, "big")) is None
