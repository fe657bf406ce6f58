"""What a piece of code asks of the disk, in order: what a power cut would leave can be read from it.

Bytes that were written stay in memory until they are flushed, and so does a new name until its folder is.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

Event = tuple[str, str, Any]


class RecordedDisk:
    """From its making on records, of paths below ``root``, each flush, with what was flushed, and each new name.

    - ``("flush", name, bytes)``: of a file, with what it holds then;
    - ``("flush", name, [names])``: of a folder, with what is in it then;
    - ``("name", name, "")``: a file or folder got its name by ``link``, ``replace`` or ``rename``.

    Names are relative; the random middle of a temporary one is ``*``.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.events: list[Event] = []
        self._root = root.resolve()
        for call in ("link", "replace", "rename"):
            monkeypatch.setattr(os, call, self._named(getattr(os, call)))
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._flush)

    def _relative(self, path: str | os.PathLike[str]) -> str:
        try:
            name = Path(path).absolute().relative_to(self._root)
        except ValueError:
            return ""
        return "/".join(self._stable(part) for part in name.parts) or "."

    @staticmethod
    def _stable(name: str) -> str:
        """Hidden names and those that end in .tmp are temporary."""
        if name.endswith(".tmp"):
            return "*.tmp"
        return "*" if name.startswith(".") else name

    def _named(self, real: Any) -> Any:
        def call(source: Any, target: Any, **options: Any) -> None:
            real(source, target, **options)
            if name := self._relative(target):
                self.events.append(("name", name, ""))

        return call

    def _flush(self, file: Any) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        self._fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if not (name := self._relative(path)):
            return
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        held = sorted(map(self._stable, os.listdir(path))) if is_folder else path.read_bytes()
        self.events.append(("flush", name, held))
