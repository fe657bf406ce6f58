"""Why an address is not reached: real sockets, real names, and the words for each."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator

import pytest

from diloco_protocol.common import reach
from free_ports import closed_port


def test_why_an_address_is_not_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert reach.unreachable(address) == ""
    with closed_port() as port:
        address = f"127.0.0.1:{port}"
        assert f"nothing listens on {address}" in reach.unreachable(address)
    assert "the host name nosuch.invalid does not resolve" in reach.unreachable("nosuch.invalid:7700")
    assert "does not resolve" in reach.unreachable(f"{'a' * 64}.invalid:7700"), "a label that is too long"
    assert reach.unreachable("[::1]:1")


@contextlib.contextmanager
def silence(host: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """A port at which connections get no answer, as a firewall leaves them: of a listener whose queue is full."""
    with socket.create_server((host, port), backlog=0) as server, contextlib.ExitStack() as stack:
        for _ in range(3):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(server.getsockname())
        yield server.getsockname()[1]


def test_a_host_that_does_not_answer_is_given_up() -> None:
    with silence() as port, pytest.raises(TimeoutError) as failed:
        reach.connect(f"127.0.0.1:{port}", seconds=0.2)
    assert "does not answer; is that the right host" in reach.unreachable_text("10.0.0.1:7700", failed.value)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "closed the connection"),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), "cannot be reached (Network is unreachable)"),
    ],
)
def test_other_failures_have_words_too(error: OSError, words: str) -> None:
    said = reach.unreachable_text("hub.example.org:7700", error)
    assert words in said and "Errno" not in said


@pytest.fixture
def two_addresses(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port of ``two.test``, whose first address is silent and whose second one listens."""
    monkeypatch.setattr(reach, "resolve_name", lambda host, port: ["127.0.0.2", "127.0.0.1"])
    with socket.create_server(("127.0.0.1", 0)) as server, silence("127.0.0.2", server.getsockname()[1]) as port:
        yield port


@pytest.mark.promise(
    "A learner connects to a host whose first address is dead: addresses are tried side by side",
    section="Connections and job files",
)
def test_a_dead_first_address_costs_a_quarter_of_a_second(two_addresses: int) -> None:
    async def test() -> None:
        with await reach.connect_first(f"two.test:{two_addresses}", 60.0) as made:
            assert made.getpeername() == ("127.0.0.1", two_addresses)
        assert await reach.first_answering(f"two.test:{two_addresses}", 60.0) == f"127.0.0.1:{two_addresses}"

    asyncio.run(test())


def test_of_several_addresses_that_fail_each_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "resolve_name", lambda host, port: ["127.0.0.2", "127.0.0.1"])

    async def test(port: int) -> None:
        with pytest.raises(reach.NoAddressAnswers, match=r"127.0.0.2: no answer, 127.0.0.1: connect") as failed:
            await reach.connect_first(f"two.test:{port}", 0.6)
        said = reach.unreachable_text(f"two.test:{port}", failed.value)
        assert said.startswith("no address of two.test answers (127.0.0.2: no answer, 127.0.0.1: connect")
        assert await reach.first_answering(f"two.test:{port}", 0.6) == f"two.test:{port}"

    with closed_port() as port, silence("127.0.0.2", port):  # so no other program has it at 127.0.0.1
        asyncio.run(test(port))


def test_a_name_with_one_address_is_left_to_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which resolves it again whenever it connects."""
    monkeypatch.setattr(reach, "resolve_name", lambda host, port: ["127.0.0.1"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"one.test:{server.getsockname()[1]}"
        assert asyncio.run(reach.first_answering(address, 1.0)) == address
    monkeypatch.setattr(reach, "resolve_name", lambda host, port: pytest.fail("it is a number"))
    assert asyncio.run(reach.first_answering("[::1]:1", 1.0)) == "[::1]:1"


def test_kinds_of_addresses_take_turns() -> None:
    assert reach._by_turns(["::1", "::2", "::3", "1.1.1.1"]) == ["::1", "1.1.1.1", "::2", "::3"]
    assert reach._by_turns(["1.1.1.1", "::1"]) == ["1.1.1.1", "::1"]
    assert reach._by_turns([]) == []
