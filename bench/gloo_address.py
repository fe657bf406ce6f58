"""Addresses as gloo's processes put them into their store (torch 2.13): read, compared, replaced.

A value is the host's name (its length in 64 bits before it), a ``struct sockaddr_storage`` with a sequence number
(136 in 64 bits before them), and numbers for the peers.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

_ADDRESS_BYTES = 136  # struct sockaddr_storage and a sequence number of 64 bits
_MOST_HOST_BYTES = 255
_INET = struct.Struct("=H2s4s")  # family in the machine's order, port and IP in the network's


@dataclass(frozen=True, slots=True)
class GlooAddress:
    """Where a gloo process listens, and where in its store's value that stands."""

    ip: bytes
    port: bytes
    offset: int

    @property
    def target(self) -> str:
        return f"{socket.inet_ntoa(self.ip)}:{int.from_bytes(self.port, 'big')}"

    @property
    def order(self) -> tuple[bytes, int]:
        """By which gloo compares; it subtracts ports as they lie in memory."""
        return self.ip, struct.unpack("=H", self.port)[0]


def gloo_address(value: bytes) -> GlooAddress | None:
    """Of what a gloo process has put into the store; None: it is something else."""
    if len(value) < 16:
        return None
    (host,) = struct.unpack_from("=Q", value)
    offset = 16 + host
    if host > _MOST_HOST_BYTES or len(value) < offset + _ADDRESS_BYTES:
        return None
    (size,) = struct.unpack_from("=Q", value, offset - 8)
    family, port, ip = _INET.unpack_from(value, offset)
    return GlooAddress(ip, port, offset) if size == _ADDRESS_BYTES and family == socket.AF_INET else None


def with_address(value: bytes, found: GlooAddress, port: int) -> bytes:
    """The same value, saying 0.0.0.0 and ``port``."""
    changed = bytearray(value)
    _INET.pack_into(changed, found.offset, socket.AF_INET, port.to_bytes(2, "big"), bytes(4))
    return bytes(changed)
