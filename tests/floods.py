"""Floods of a port that faces the network.

Not a test: what tests of the gate need."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import threading
import time
from pathlib import Path

from parties import Parties


class Flood:
    """Threads that do one thing each to a port until they are stopped: open a connection and say nothing,
    send garbage, come with a stranger's certificate (``strangers``: its folder), or begin a handshake."""

    def __init__(self, address: str, parties: Parties, strangers: Path) -> None:
        host, _, port = address.rpartition(":")
        self.where = (host, int(port))
        self.stopping = threading.Event()
        self.counts = dict.fromkeys(("silent", "garbage", "strangers", "hello"), 0)
        self.context = ssl.create_default_context(cadata=parties.authority.certificate.decode())
        self.context.load_cert_chain(strangers / "tls.crt", strangers / "tls.key")
        self.context.set_alpn_protocols(["h2"])
        hello = ssl.MemoryBIO()
        half = self.context.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="diloco-syncer")
        with contextlib.suppress(ssl.SSLWantReadError):
            half.do_handshake()
        self.first = hello.read()
        self.threads = [threading.Thread(target=self._run, args=(kind,), daemon=True) for kind in self.counts]

    def __enter__(self) -> Flood:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join(10)

    def _run(self, kind: str) -> None:
        held: list[socket.socket] = []
        seeded = random.Random(kind)
        while not self.stopping.is_set():
            with contextlib.suppress(OSError):
                made = socket.create_connection(self.where, timeout=2)
                self.counts[kind] += 1
                if kind == "garbage":
                    with made:
                        made.sendall(seeded.randbytes(seeded.randrange(1, 4000)))
                        made.recv(100)
                elif kind == "strangers":
                    with made, self.context.wrap_socket(made, server_hostname="diloco-syncer") as tls:
                        tls.recv(100)
                else:  # held open, having said nothing, or half of a handshake
                    made.sendall(self.first if kind == "hello" else b"")
                    held.append(made)
                    if len(held) > 400:
                        held.pop(0).close()
            time.sleep(0.002)
        for made in held:
            made.close()
