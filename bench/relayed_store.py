"""Gloo's connections through relays: a store that tells each process its peers' addresses as those of relays.

Gloo's processes find each other by what each puts into the store: its host's name, the address where it listens, and
numbers for its peers (torch 2.13). Of two processes the one with the greater address (IP, then port) connects and the
other listens. This store hands the one that connects the address of a relay instead, which leads to the other; the
bytes of everything that the two then say pass both parties' links (relay.py). The relay's address is written as
0.0.0.0, which Linux takes for this machine and which is less than every address, so that both sides still agree on
who connects.

Loads torch: for the processes that train.
"""

from __future__ import annotations

import json
import socket
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # it is there all the same

from gloo_address import GlooAddress, gloo_address, with_address

WAIT_SECONDS = 10.0


class RelayedStore(Store):
    """``inner``, with gloo's addresses replaced. Links are named by rank ("0", "1", …); ``requests_address``: where the
    relays are asked for."""

    def __init__(self, inner: Store, rank: int, requests_address: str) -> None:
        super().__init__()
        self._inner: Any = inner  # its methods have no types of their own
        self._rank, self._requests = rank, requests_address
        self._own: dict[str, GlooAddress] = {}  # by the key's prefix: of each group

    def set(self, key: str, value: bytes | str) -> None:
        raw = value.encode() if isinstance(value, str) else value
        prefix, _, last = key.rpartition("/")
        found = gloo_address(raw)
        if found is not None and last == str(self._rank):
            self._own[prefix] = found
        self._inner.set(key, raw)

    def get(self, key: str) -> bytes:
        value = bytes(self._inner.get(key))
        prefix, _, last = key.rpartition("/")
        found, own = gloo_address(value), self._own.get(prefix)
        if found is None or own is None or last == str(self._rank) or own.order < found.order:
            return value
        return with_address(value, found, self._ask_relay(last, found.target))

    def _ask_relay(self, rank: str, target: str) -> int:
        """The port of a relay to that rank."""
        host, _, port = self._requests.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=WAIT_SECONDS) as asking:
            wanted = {"near": str(self._rank), "far": rank, "target": target}
            asking.sendall(json.dumps(wanted).encode() + b"\n")
            answer = asking.makefile().readline()
        if not answer:
            raise RuntimeError(f"no relay from rank {self._rank} to rank {rank}")
        return int(answer.strip().rpartition(":")[2])

    def add(self, key: str, value: int) -> int:
        return int(self._inner.add(key, value))

    def check(self, keys: list[str]) -> bool:
        return bool(self._inner.check(keys))

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return bytes(self._inner.compare_set(key, expected_value, desired_value))

    def delete_key(self, key: str) -> bool:
        return bool(self._inner.delete_key(key))

    def num_keys(self) -> int:
        return int(self._inner.num_keys())

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._inner.wait(keys)
        else:
            self._inner.wait(keys, timeout)

    def has_extended_api(self) -> bool:
        return False
