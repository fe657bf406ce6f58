"""An S3 to test against: moto in a process of its own, and a way to it that can be cut.

Not a test. ``S3Service`` is tests/s3/server.py in the environment that ``make setup`` made for it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from patience import WaitFailed, wait_until

PYTHON = Path(sys.prefix) / "s3-service" / "bin" / "python"
SERVER = Path(__file__).parent / "s3" / "server.py"
SECRET = "the-secret-that-nobody-may-read"
TOKEN = "the-token-that-nobody-may-read"
OURS = ("AWS_", "GOOGLE_", "AZURE_")


class S3Service:
    """Serves at ``url`` until ``stop``; with ``rights``, only to those who have a key; with ``tls``, the
    files of a certificate and its key, at https://."""

    def __init__(self, folder: Path, rights: bool = False, tls: tuple[Path, ...] = ()) -> None:
        if not PYTHON.exists():
            pytest.skip(f"no S3 to test against: {PYTHON.parent.parent} is not there (make setup)")
        port = folder / "s3-port"
        self._log = open(folder / "s3-log", "ab")  # noqa: SIM115
        env = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
        self._process = subprocess.Popen(
            [PYTHON, SERVER, port, *tls],
            stdout=self._log,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
            env=env | {"DILOCO_S3_IAM": "1" if rights else "0"},
        )
        try:
            wait_until(port.exists, "the S3 to serve", self._process, folder / "s3-log")
        except WaitFailed:
            self.stop()
            raise
        self.port = int(port.read_text())
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.port}"

    def make_bucket(self, name: str) -> str:
        request = urllib.request.Request(f"{self.url}/{name}", method="PUT")
        urllib.request.urlopen(request, timeout=10).close()
        return name

    def stop(self) -> None:
        self._process.kill()
        self._process.wait(10)
        self._log.close()


def answers(port: int) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def environment(endpoint: str) -> dict[str, str]:
    """What a syncer is given."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "anybody",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": TOKEN,
    }


@contextlib.contextmanager
def given(env: dict[str, str]) -> Iterator[None]:
    """This process's environment, for as long."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(OURS):
                patch.delenv(name)
        for name, value in env.items():
            patch.setenv(name, value)
        yield


class Relay:
    """Passes bytes between ``url``, at ``host``'s address, and a service, and fails as networks do."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._target = port
        self._server = socket.create_server((host, 0))
        self.port = self._server.getsockname()[1]
        self.url = f"http://{host}:{self.port}"
        self._open: set[socket.socket] = set()
        self._flowing = threading.Event()
        self._flowing.set()
        self._cut = self._lose = self._lose_all = False
        self._rate = 0.0
        self._refuse = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Reset every connection, and new ones as they come, until ``mend``."""
        self._cut = True
        self._reset_all()

    def stall(self) -> None:
        """Let nothing through and say nothing, until ``mend``."""
        self._flowing.clear()

    def throttle(self, rate: float) -> None:
        """Let no more than ``rate`` bytes a second through on a connection, each way, until ``mend``."""
        self._rate = rate

    def mend(self) -> None:
        self._cut = False
        self._rate = 0.0
        self._flowing.set()

    def refuse_next(self, count: int) -> None:
        """Answer the next ``count`` requests, which come in plaintext, as a service does that is asked too often."""
        self._reset_all()
        self._refuse = count

    def lose_next_answer(self, and_cut: bool = False) -> None:
        """The service carries the next request out, and who asked never hears of it; with ``and_cut`` the
        way stays cut, so that nobody can ask again."""
        self._reset_all()  # the next request comes on a connection of its own
        self._lose, self._lose_all = True, and_cut

    def close(self) -> None:
        self.mend()
        self._server.close()
        self._reset_all()

    def _reset_all(self) -> None:
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.shutdown(socket.SHUT_RDWR)
                connection.close()
        self._open.clear()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
                self._open.add(client)
                if self._cut:
                    self._reset_all()
                    continue
                if self._refuse:
                    self._refuse -= 1
                    self._say_slow_down(client)
                    continue
                service = socket.create_connection(("127.0.0.1", self._target), 5)
            except OSError:
                if self._server.fileno() < 0:
                    return
                continue
            service.settimeout(None)
            self._open.add(service)
            for pair in ((client, service, False), (service, client, True)):
                threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _say_slow_down(self, client: socket.socket) -> None:
        client.settimeout(10)
        with contextlib.suppress(OSError), client, client.makefile("rb") as request:
            length = 0
            while (line := request.readline()) not in (b"\r\n", b""):
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            request.read(length)
            body = b"<Error><Code>SlowDown</Code></Error>"
            client.sendall(
                b"HTTP/1.1 503 Slow Down\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            )
        self._open.discard(client)

    def _pump(self, source: socket.socket, sink: socket.socket, answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._flowing.wait(120)
                if self._rate:
                    time.sleep(len(data) / self._rate)
                if answer and self._lose:
                    self._lose = False
                    self._cut = self._lose_all
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
                end.close()
            self._open.discard(end)
