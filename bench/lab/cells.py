"""Results that take long, kept by a digest of what made them: a command that was interrupted goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diloco.console import CommandError
from diloco_protocol.common.files import write_whole
from lab.sources import source_digest


class CellCache:
    """A folder of results (JSON objects). ``code``: files and folders of Python that decide them; where any of it
    changes, everything is made anew."""

    def __init__(self, folder: Path, code: list[Path]) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommandError(f"--cache {folder}: {error.strerror or error}; name a folder") from None
        self._folder = folder
        self._code = source_digest(code)

    def find_or_make(self, what: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of ``what``, made now if it is not there."""
        text = json.dumps([self._code, what], sort_keys=True)
        path = self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return found
        except (OSError, ValueError):
            pass
        result = make()
        write_whole(path, json.dumps(result).encode())
        return result
