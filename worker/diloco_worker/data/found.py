"""What a job's data turned out to be: files, records, tokens, and what looks wrong with them.

It is counted by whoever reads the data, kept beside the token file, and told by every process that uses it: one line
in its log, and one file in the run's directory, which `diloco run` shows once.
"""

from __future__ import annotations

import json
import logging
import posixpath
from dataclasses import asdict, dataclass, field
from pathlib import Path

from diloco_protocol.common import files

log = logging.getLogger(__name__)

TOLD = "data.json"
"""The file for `diloco run`, in the cache directory: ``line`` and ``warnings``, text for people."""


@dataclass(slots=True)
class Found:
    """``files``: how many there are; of them ``record_files`` hold ``records``. ``looks``: what plain files look like
    instead of text, with how many and the first of them; ``left_out``: the same of files that hold no text."""

    files: int = 0
    record_files: int = 0
    records: int = 0
    looks: dict[str, tuple[int, str]] = field(default_factory=dict)
    left_out: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add_look(self, what: str, uri: str) -> None:
        """A plain file that looks like ``what`` (empty: like text)."""
        if what:
            _count(self.looks, what, uri)

    def leave_out(self, what: str, uri: str) -> None:
        """A file that is ``what`` instead of text is not read."""
        _count(self.left_out, what, uri)

    @property
    def left_out_text(self) -> str:
        """``1 left out: pic.png (not text)``; empty: none was."""
        kinds = [
            f"{posixpath.basename(first)}{f' and {count - 1} more' if count > 1 else ''} ({what})"
            for what, (count, first) in self.left_out.items()
        ]
        return f"{sum(count for count, _ in self.left_out.values()):,} left out: {', '.join(kinds)}" if kinds else ""

    def warnings(self) -> list[str]:
        """One for each kind of look."""
        return [
            f"{first}{f' and {count - 1} more files' if count > 1 else ''} "
            f"{'look' if count > 1 else 'looks'} like something else and "
            f"{'are' if count > 1 else 'is'} read as plain bytes: {what}"
            for what, (count, first) in self.looks.items()
        ]

    def line(self, tokens: int, length: int) -> str:
        """The whole in one line."""
        read = f"{self.files:,} file{'s' * (self.files != 1)}" if self.files else ""
        if self.records:
            records = f"{self.records:,} record{'s' * (self.records != 1)}"
            beside = self.files - self.record_files
            if not read:
                read = records
            elif beside == 0:
                read = f"{read}, {records}"
            else:
                read = f"{read}, {self.record_files:,} of them with {records}"
        left_out = f", {self.left_out_text};" if self.left_out else ","
        return f"{read}{left_out} {tokens:,} tokens: {tokens // length:,} sequences of {length}"

    def save(self, path: Path) -> None:
        """Raises OSError."""
        files.write_whole(path, json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, path: Path) -> Found | None:
        """None: it is not there, or no longer of this form."""
        try:
            kept = json.loads(path.read_bytes())
            for name in ("looks", "left_out"):
                kept[name] = {str(what): (int(n), str(first)) for what, (n, first) in kept.get(name, {}).items()}
            return cls(**kept)
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _count(kinds: dict[str, tuple[int, str]], what: str, uri: str) -> None:
    count, first = kinds.get(what, (0, uri))
    kinds[what] = (count + 1, first)


def report(line: str, warnings: list[str], cache_directory: Path | None) -> None:
    """Tell the log, and whoever looks at the run's directory."""
    log.info("data: %s", line)
    for warning in warnings:
        log.warning("data: %s", warning)
    if cache_directory is None:
        return
    try:
        cache_directory.mkdir(parents=True, exist_ok=True)
        files.write_whole(cache_directory / TOLD, json.dumps({"line": line, "warnings": warnings}).encode())
    except OSError as e:  # only the screen lacks a line
        log.warning("%s cannot be written: %s", cache_directory / TOLD, e)
