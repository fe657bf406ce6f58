"""Ports for programs that are told theirs before they start.

They are not of the range from which the system gives ports to whoever asks for any (from 32768, on some systems from
49152): between the choice and the program's start another test's program would be given the same one.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager

_RANGE = range(15_000, 30_000)  # below the NodePorts of a cluster on this machine, too
_given: set[int] = set()


def free_port() -> int:
    """A port of this machine where nobody listens, and that this process has not been given before."""
    choose = random.SystemRandom()
    while True:
        port = choose.choice(_RANGE)
        if port in _given:
            continue
        _given.add(port)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port


@contextmanager
def closed_port() -> Iterator[int]:
    """A port of this machine that is bound and not listened at: connections are refused, and no other program can have
    it meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
