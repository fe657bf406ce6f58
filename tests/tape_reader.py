"""Reads a run's event tape, and checks that it is intact."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from diloco_syncer.store.base import Store
from diloco_syncer.store.tape import RECOVERED, TapeError, decode_line, line_digest, raw_lines


def read(store: Store) -> Iterator[dict[str, Any]]:
    """The tape's lines in order. Raises ``TapeError``, ``FormatRefused``."""
    for number, raw in enumerate(raw_lines(store), 1):
        yield decode_line(raw, number)


def verify(store: Store) -> int:
    """Check the chain of digests and that every fragment's versions rise, by one if merged; returns the lines.

    Raises ``TapeError`` naming the first line that is wrong.
    """
    previous, count = "", 0
    newest: dict[int, int] = {}
    for raw in raw_lines(store):
        count += 1
        if not raw.endswith(b"\n"):
            raise TapeError(f"tape line {count} is torn")
        line = decode_line(raw, count)
        if line.get("previous") != previous:
            raise TapeError(f"tape line {count} does not follow line {count - 1}: a line was changed or left out")
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
        previous = line_digest(raw)
    return count
