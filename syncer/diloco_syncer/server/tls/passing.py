"""Passes an accepted connection to another process: its socket, its address, and what was read of it.

The two processes have the ends of a pair of sockets that keep messages apart. One message is one connection. It is not
waited for room: where the other process does not take what was passed before, the connection is refused.
"""

from __future__ import annotations

import errno
import os
import socket

from diloco_syncer.server.tls.client_hello import MAX_BYTES

_MESSAGE_BYTES = MAX_BYTES + 1024  # what is read of a ClientHello, and the address
_ENDED = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ECONNREFUSED})


class LinkEnded(Exception):
    """The other process has gone."""


def make_link() -> tuple[socket.socket, socket.socket]:
    """Two ends, of which a process that is started may have one."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_connection(link: socket.socket, front: socket.socket, address: str, first: bytes) -> None:
    """Pass a connection on; this process has still to close its own ``front``. Raises OSError, LinkEnded."""
    called = address.encode()
    try:
        socket.send_fds(link, [len(called).to_bytes(2, "big"), called, first], [front.fileno()])
    except OSError as error:
        if error.errno in _ENDED:
            raise LinkEnded from error
        raise


def receive_connection(link: socket.socket) -> tuple[socket.socket, str, bytes]:
    """The next connection that was passed. Raises OSError: also where no descriptor is free, for then it is lost; and
    LinkEnded."""
    data, handles, _, _ = socket.recv_fds(link, _MESSAGE_BYTES, 1)
    if not data:
        raise LinkEnded
    if not handles:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    front = socket.socket(fileno=handles[0])
    front.set_inheritable(False)
    end = 2 + int.from_bytes(data[:2], "big")
    return front, data[2:end].decode(), data[end:]
