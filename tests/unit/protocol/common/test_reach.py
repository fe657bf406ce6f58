"""Why an address is not reached: real sockets, real names, and the words for each."""

from __future__ import annotations

import errno
import socket

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


def test_a_host_that_does_not_answer_is_given_up() -> None:
    """A listener whose queue is full leaves new connections without an answer, as a firewall does."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        address = server.getsockname()
        waiting = []
        for _ in range(3):
            waiting.append(one := socket.socket())
            one.setblocking(False)
            one.connect_ex(address)
        with pytest.raises(TimeoutError) as failed:
            reach.connect(f"127.0.0.1:{address[1]}", seconds=0.2)
        for one in waiting:
            one.close()
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
