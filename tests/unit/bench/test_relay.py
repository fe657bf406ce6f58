"""Shaped ways between programs: how much passes when, what is counted, and gloo's addresses."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import sys
import threading
import time
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repository import ROOT

sys.path.insert(0, str(ROOT / "bench"))

from gloo_address import gloo_address, with_address
from relay import BURST_SECONDS, Link, Relays, TokenBucket, Way

GAPS = st.lists(st.tuples(st.floats(0, 2), st.integers(1, 100_000)), min_size=1, max_size=40)


@given(rate=st.floats(1000, 1e8), asked=GAPS)
def test_no_interval_carries_more_than_its_rate_and_a_burst(rate: float, asked: list[tuple[float, int]]) -> None:
    bucket = TokenBucket(rate, BURST_SECONDS)
    times = list(accumulate(gap for gap, _ in asked))
    gone = [now + bucket.reserve(count, now) for now, (_, count) in zip(times, asked, strict=True)]
    totals = list(accumulate((count for _, count in asked), initial=0))
    assert gone == sorted(gone), "bytes go in the order in which they were asked for"
    for i in range(len(gone)):
        for j in range(i + 1, len(gone)):
            least = (totals[j + 1] - totals[i + 1]) / rate - BURST_SECONDS
            assert gone[j] - gone[i] >= least - 1e-6


@given(rate=st.floats(1000, 1e8), counts=st.lists(st.integers(1, 100_000), min_size=1, max_size=40))
def test_a_link_that_is_asked_all_the_time_is_never_idle(rate: float, counts: list[int]) -> None:
    bucket, begun = TokenBucket(rate, BURST_SECONDS), 5.0
    ends = [bucket.reserve(count, begun) for count in counts]
    assert ends[-1] == pytest.approx(max(0.0, sum(counts) / rate - BURST_SECONDS), abs=1e-6)


def test_a_pause_saves_up_no_more_than_a_burst() -> None:
    bucket = TokenBucket(1000.0, 0.5)
    assert bucket.reserve(500, 100.0) == 0.0
    assert bucket.reserve(500, 100.0) == pytest.approx(0.5)
    assert bucket.reserve(1000, 200.0) == pytest.approx(0.5)


def exchange(relays: Relays, address: str, target: socket.socket, sent: bytes, answer: bytes) -> bytes:
    """Through the relay: ``sent`` one way, then ``answer`` back."""

    def serve() -> None:
        connection, _ = target.accept()
        with connection:
            while connection.recv(1 << 16):
                pass
            connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        got = connection.makefile("rb").read()
    thread.join(30)
    return got


@pytest.mark.parametrize("latency", [0.0, 0.05])
def test_bytes_pass_both_links_no_faster_than_they_carry(latency: float) -> None:
    near, far, count = Link(latency=latency), Link(400_000), 100_000
    with socket.create_server(("127.0.0.1", 0)) as target, Relays({"0": near, "1": far}) as relays:
        at = f"127.0.0.1:{target.getsockname()[1]}"
        with socket.create_connection(tuple(relays.requests_address.split(":")), timeout=30) as asking:  # type: ignore[arg-type]
            asking.sendall(json.dumps({"near": "0", "far": "1", "target": at}).encode() + b"\n")
            address = asking.makefile().readline().strip()
        begun = time.monotonic()
        assert exchange(relays, address, target, b"x" * count, answer=b"yes") == b"yes"
        assert time.monotonic() - begun >= count / 400_000 - BURST_SECONDS + 2 * latency
    assert (near.carried.up, near.carried.down) == (far.carried.down, far.carried.up) == (count, 3)


def test_a_link_is_shaped_while_it_is_in_use() -> None:
    link = Link()
    assert link.send(10**9, 0.0) == 0.0
    link.shape(1000.0)
    assert link.send(1000, 0.0) == pytest.approx(1.0 - BURST_SECONDS)
    assert link.carried.up == 10**9 + 1000


def test_a_request_for_a_link_that_is_none_gets_no_answer() -> None:
    with Relays({"0": Link()}) as relays:
        for line in (b'{"near": "0", "far": "7", "target": "127.0.0.1:1"}\n', b"{}\n", b"torn\n"):
            host, _, port = relays.requests_address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=30) as asking:
                asking.sendall(line)
                assert asking.makefile().readline() == ""


def gloo_value(ip: str, port: int, host: bytes = b"machine") -> bytes:
    address = struct.pack("=H", socket.AF_INET) + struct.pack(">H", port) + socket.inet_aton(ip)
    whole = address.ljust(128, b"\0") + struct.pack("=q", 3)
    return struct.pack("=Q", len(host)) + host + struct.pack("=Q", len(whole)) + whole + struct.pack("=2q", 4, 5)


def test_gloos_address_is_found_and_replaced_alone() -> None:
    value = gloo_value("127.0.0.1", 40_001)
    found = gloo_address(value)
    assert found is not None and found.target == "127.0.0.1:40001"
    changed = with_address(value, found, 50_002)
    assert changed == gloo_value("0.0.0.0", 50_002)
    again = gloo_address(changed)
    assert again is not None and again.order < found.order


def test_addresses_are_compared_as_gloo_does_it() -> None:
    """By IP, then by the port's two bytes as this machine reads them."""
    values = [gloo_address(gloo_value(ip, port)) for ip, port in (("127.0.0.1", 0x0201), ("127.0.0.1", 0x0102))]
    assert values[0] is not None and values[1] is not None
    assert (values[0].order < values[1].order) == (sys.byteorder == "little")
    later = gloo_address(gloo_value("127.0.0.2", 1))
    assert later is not None and later.order > values[0].order


@pytest.mark.parametrize("value", [b"", b"\0" * 15, b"\xff" * 400, b"\0" * 400, gloo_value("127.0.0.1", 1)[:100]])
def test_other_values_are_left_alone(value: bytes) -> None:
    assert gloo_address(value) is None


def test_a_way_that_was_idle_for_too_long_falls_silent() -> None:
    way = Way()
    for now in (0.0, 5.0, 24.9):
        way.note(10, now, 20.0)
        assert not way.silent
    way.note(10, 50.0, None)
    assert not way.silent, "a link with all the patience"
    way.note(10, 70.1, 20.0)
    assert way.silent and way.carried == 50


@pytest.mark.parametrize("how", ["silent", "reset"])
def test_a_way_can_stop_and_can_break(how: str) -> None:
    link = Link()
    with Relays() as relays, socket.create_server(("127.0.0.1", 0)) as target:
        address = relays.open(f"127.0.0.1:{target.getsockname()[1]}", near=link)
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port))) as near, target.accept()[0] as far:
            near.sendall(b"heard")
            assert far.recv(16) == b"heard"
            (way,) = link.ways
            far.settimeout(0.3 if how == "silent" else 30.0)
            if how == "silent":
                way.silent = True
                near.sendall(b"lost")
            else:
                relays.do(way.reset)
                with contextlib.suppress(ConnectionError):
                    assert far.recv(16) == b""
                return
            with pytest.raises(TimeoutError):
                far.recv(16)
