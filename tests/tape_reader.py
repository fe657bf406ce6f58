"""Reads a run's event tape, and checks that it is intact."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from diloco_syncer.audit.store_audit import audit_tape, tape_lines
from diloco_syncer.audit.tape_audit import CHAIN, VERSIONS, TapeAudit
from diloco_syncer.store.base import Store
from diloco_syncer.store.tape import EVENT, REFUSED, SEGMENT, SETTINGS, TapeError, decode_line


def raw_lines(store: Store) -> Iterator[bytes]:
    """The tape's lines in order, as they are in the store."""
    return (raw for _, raw, _ in tape_lines(store))


def read(store: Store) -> Iterator[dict[str, Any]]:
    """The tape's lines about fragments' versions, in order. Raises ``TapeError``, ``FormatRefused``."""
    for number, raw in enumerate(raw_lines(store), 1):
        if (line := decode_line(raw, number))["kind"] not in (SEGMENT, SETTINGS, EVENT, REFUSED):
            yield line


def verify(store: Store) -> int:
    """Check the chain of digests and the versions' order; returns how many lines ``read`` yields. A segment may tell
    that the one before was damaged. Raises ``TapeError`` naming the first line that is wrong."""
    for check, why in audit_tape(store, TapeAudit()).wrong:
        if check in (CHAIN, VERSIONS) and "was damaged" not in why:
            raise TapeError(why)
    return sum(1 for _ in read(store))
