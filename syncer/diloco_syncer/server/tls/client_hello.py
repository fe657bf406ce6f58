"""What a peer's first message of TLS asks for, before any of TLS is done: the protocols that it names (ALPN).

The bytes are a stranger's. They are read strictly, and only as the learners of this release send them: a ClientHello
(RFC 8446, 4.1.2) that is alone, whole and in one record, of at most ``MAX_BYTES``. Of anything else TLS itself has to
judge. Each length is compared with what is there, and nothing is read twice: the cost is that of one walk.
"""

from __future__ import annotations

MAX_BYTES = 16 << 10  # of a record, as TLS has it
_HEAD = 5  # of a record: its type, version and length
_RECORD, _CLIENT_HELLO, _ALPN = 22, 1, 16


class _Other(Exception):
    """It is no such message."""


class _Reader:
    """Walks over bytes."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take_bytes(self, count: int) -> bytes:
        """The next bytes, so many."""
        end = self._at + count
        if end > len(self._data):
            raise _Other
        taken, self._at = self._data[self._at : end], end
        return taken

    def read_number(self, size: int) -> int:
        return int.from_bytes(self.take_bytes(size), "big")

    def read_vector(self, size: int) -> bytes:
        """Bytes behind their length, which has ``size`` bytes."""
        return self.take_bytes(self.read_number(size))

    def has_more(self) -> bool:
        return self._at < len(self._data)


def find_protocols(data: bytes) -> tuple[bytes, ...] | None:
    """The protocols that the ClientHello ``data`` names; none where it names none, or is no ClientHello as read here.
    None: it is not whole, and more has to come."""
    size = int.from_bytes(data[3:_HEAD], "big")
    if data[:1] not in (b"", bytes([_RECORD])) or (len(data) >= _HEAD and size > MAX_BYTES):
        return ()
    if len(data) < _HEAD + size:
        return None
    try:
        return _read_hello(data[_HEAD:], size)
    except _Other:
        return ()


def _read_hello(data: bytes, size: int) -> tuple[bytes, ...]:
    record = _Reader(data)
    if len(data) != size or record.read_number(1) != _CLIENT_HELLO:
        raise _Other
    hello = _Reader(record.read_vector(3))
    hello.take_bytes(2 + 32)  # version and random
    hello.read_vector(1)  # session id
    hello.read_vector(2)  # cipher suites
    hello.read_vector(1)  # compression methods
    extensions = _Reader(hello.read_vector(2))
    if record.has_more() or hello.has_more():
        raise _Other
    found: tuple[bytes, ...] = ()
    while extensions.has_more():
        kind, body = extensions.read_number(2), extensions.read_vector(2)
        if kind == _ALPN:
            if found:
                raise _Other
            found = _read_names(body)
    return found


def _read_names(body: bytes) -> tuple[bytes, ...]:
    outer = _Reader(body)
    names = _Reader(outer.read_vector(2))
    found = []
    while names.has_more():
        found.append(names.read_vector(1))
    if outer.has_more() or not all(found):
        raise _Other
    return tuple(found)
