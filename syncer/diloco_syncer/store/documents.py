"""JSON documents of the store: two lines, the first with format and checksum of the second.

What a job cannot do without, and is written once, is kept twice: under its name and under its ``copy_name``. Whoever
starts from the store writes the one anew where it is damaged or gone and the other is whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from diloco_protocol.common.files import Buffer
from diloco_syncer.store.base import ObjectExists, ObjectNotFound, Store
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


def copy_name(name: str) -> str:
    """The name of an object's copy."""
    stem, dot, kind = name.rpartition(".")
    return f"{stem}.copy{dot}{kind}"


def create_copied(store: Store, name: str, body: dict[str, Any]) -> dict[str, Any]:
    """Keep a document twice, unless it is there; returns what is in force. Raises ``Damaged``."""
    found = read_copied(store, name, repair=True)
    if found is not None:
        return found
    try:
        store.create(name, *pack_document(body))
    except ObjectExists:  # another syncer has created it just now
        body = read_document(store, name)
    store.replace(copy_name(name), *pack_document(body))
    return body


def read_copied(store: Store, name: str, repair: bool) -> dict[str, Any] | None:
    """A document that is kept twice; None: it was never made. ``repair``: write the one anew from the other. Raises
    ``Damaged`` if neither can be read."""
    found, wrong, damage = None, list[str](), list[Damaged]()
    for each in (name, copy_name(name)):
        try:
            body = read_document(store, each)
        except ObjectNotFound:
            wrong.append(each)
        except Damaged as error:
            wrong.append(each)
            damage.append(error)
        else:
            found = found or body
    if found is None and damage:
        raise damage[0]
    if repair and found is not None:
        for each in wrong:
            store.replace(each, *pack_document(found))
    return found
