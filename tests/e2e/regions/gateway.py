"""A gateway in front of the hub that passes TLS through by its SNI: it opens nothing.

Not a test. It stands on this machine, beside the clusters, as a load balancer or an ingress
with TLS passthrough stands in front of one.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections import Counter


class Gateway:
    """Connections that ask for ``name`` lead to ``target`` (host:port), all others nowhere. Without a
    name it looks at nothing: a load balancer of layer 4. ``asked`` counts the names; closed at exit."""

    def __init__(self, host: str, target: str, name: str = "", port: int = 0) -> None:
        there, _, its_port = target.rpartition(":")
        self._target, self._name = (there, int(its_port)), name
        self._listening = socket.create_server((host, port))
        self.address = f"{host}:{self._listening.getsockname()[1]}"
        self.asked: Counter[str] = Counter()
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._lead, args=(client,), daemon=True).start()

    def _lead(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            client.settimeout(10)
            first = b""
            if self._name:
                asked, first = hello(client)
                self.asked[asked] += 1
                if asked != self._name:
                    return
            client.settimeout(None)
            with socket.create_connection(self._target, timeout=10) as server:
                server.settimeout(None)
                server.sendall(first)
                both = {client, server}
                self._open |= both
                back = threading.Thread(target=pass_on, args=(server, client), daemon=True)
                back.start()
                pass_on(client, server)
                back.join()
                self._open -= both


def hello(client: socket.socket) -> tuple[str, bytes]:
    """The name that a ClientHello asks for (empty: none), and the bytes read for it."""
    asked: list[str] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sni_callback = lambda _, name, __: asked.append(name or "")
    fed = ssl.MemoryBIO()
    reader = context.wrap_bio(fed, ssl.MemoryBIO(), server_side=True)
    read = b""
    while not asked and len(read) < 1 << 14 and (some := client.recv(1 << 12)):
        read += some
        fed.write(some)
        with contextlib.suppress(ssl.SSLError):  # it wants more, or a certificate, of which there is none
            reader.do_handshake()
    return "".join(asked), read


def pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for each in (source, sink):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
