"""Reads a run's event tape, and checks that it is intact."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from diloco_syncer.store.base import Store
from diloco_syncer.store.tape import RECOVERED, SEGMENT, TapeError, decode_line, line_digest, newest_of, segment_names

_MAX_SEGMENT = 1 << 32


def raw_lines(store: Store) -> Iterator[bytes]:
    """The tape's lines in order, as they are in the store, heads of segments among them."""
    for name in segment_names(store):
        yield from store.read(name, _MAX_SEGMENT).splitlines(keepends=True)


def read(store: Store) -> Iterator[dict[str, Any]]:
    """The tape's lines in order, without heads of segments. Raises ``TapeError``, ``FormatRefused``."""
    for number, raw in enumerate(raw_lines(store), 1):
        if (line := decode_line(raw, number))["kind"] != SEGMENT:
            yield line


def verify(store: Store) -> int:
    """Check the chain of digests and that every fragment's versions rise, by one if merged; returns the lines, heads
    of segments not counted. Where a segment tells that the one before was damaged, it begins anew.

    Raises ``TapeError`` naming the first line that is wrong.
    """
    previous, count, heads = "", 0, 0
    newest: dict[int, int] = {}
    for raw in raw_lines(store):
        count += 1
        if not raw.endswith(b"\n"):
            raise TapeError(f"tape line {count} is torn")
        line = decode_line(raw, count)
        if line["kind"] == SEGMENT:
            heads += 1
            if "damaged" in line:
                newest, previous = newest_of(line), line["previous"]
            if newest != newest_of(line):
                raise TapeError(f"tape line {count}: {newest} were the newest versions, and not {line['newest']}")
        if line["previous"] != previous:
            raise TapeError(f"tape line {count} does not follow line {count - 1}: a line was changed or left out")
        previous = line_digest(raw)
        if line["kind"] == SEGMENT:
            continue
        fragment, version = line["fragment"], line["version"]
        if line["kind"] == "merge" and version != newest.get(fragment, 0) + 1:
            before = newest.get(fragment, 0)
            raise TapeError(f"tape line {count}: fragment {fragment} goes from version {before} to {version}")
        if line["kind"] == RECOVERED and version <= newest.get(fragment, 0):
            raise TapeError(
                f"tape line {count}: fragment {fragment} is recovered at version {version}, "
                f"and had {newest.get(fragment, 0)}"
            )
        newest[fragment] = version
    return count - heads
