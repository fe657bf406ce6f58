"""JSON documents of the store: two lines, the first with format and checksum of the second."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from diloco_protocol.common.files import Buffer
from diloco_syncer.store.base import Store
from diloco_syncer.store.records import FORMAT, Damaged, check_format

MAX_DOCUMENT = 1 << 30


def pack_document(body: Mapping[str, Any]) -> list[Buffer]:
    """A JSON document of two lines: format and SHA-256, then the body."""
    raw = json.dumps(body, separators=(",", ":")).encode() + b"\n"  # a loss may be NaN
    head = {"format": FORMAT, "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    return [json.dumps(head, separators=(",", ":")).encode() + b"\n", raw]


def unpack_document(data: bytes, name: str) -> dict[str, Any]:
    """The body. Raises ``Damaged``, ``FormatRefused``."""
    first, newline, raw = data.partition(b"\n")
    try:
        head = json.loads(first)
        check_format(head["format"], name)
        digest = head["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{name}: its first line is not understood") from error
    if not newline or hashlib.sha256(raw).hexdigest() != digest:
        raise Damaged(f"{name} is cut off or changed: its SHA-256 differs")
    body: dict[str, Any] = json.loads(raw)
    return body


def read_document(store: Store, name: str) -> dict[str, Any]:
    return unpack_document(store.read(name, MAX_DOCUMENT), name)
