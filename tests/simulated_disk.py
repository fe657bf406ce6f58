"""A disk under real files, which loses in a power cut what was not flushed. Not a test.

What a program writes stays in memory until the file is flushed, and a new, changed or removed name until its folder is.
A power cut leaves of every file what was flushed, or any beginning of what came since, and of every name either what
was flushed or what came since, each by itself. A killed program loses nothing: what it left may be lost later.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

CALLS = ("fsync", "link", "replace", "unlink", "mkdir", "write")


def _caller() -> str:
    """Who flushes, as module and function."""
    frame = sys._getframe(2)
    while frame.f_code.co_name.startswith("flush_") and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_globals['__name__']}.{frame.f_code.co_name}"


class Killed(BaseException):
    """The program ends here."""


class SimulatedDisk:
    """Everything below ``base``, an empty directory, is on the disk. After ``kill_after`` more calls the program is
    killed; until then each call fails with the probability ``faults``, of a full or broken disk or one that is
    read-only. ``unflushed``: what becomes of it in a power cut, "lost", "kept" or "any"."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, base: Path, chance: random.Random) -> None:
        self.base, self.chance = base, chance
        self.faults, self.kill_after = 0.0, -1
        self.seen: set[str] = set()
        self.flushed_by: set[str] = set()  # module and function
        self.left_out = ""  # whose flushes do nothing
        self._kept = base.with_name(f"{base.name}-inodes")  # so that no inode's number comes again
        self._kept.mkdir()
        self._content: dict[int, bytes] = {}  # by inode: what is flushed of a file
        self._names: dict[int, dict[str, int]] = {}  # by inode: what is flushed of a folder
        self._real = {call: getattr(os, call) for call in CALLS}
        for call in CALLS:
            monkeypatch.setattr(os, call, self._hooked(call))

    def _hooked(self, call: str) -> Any:
        def hooked(*arguments: Any, **options: Any) -> Any:
            if not self._is_here(arguments[0]):
                return self._real[call](*arguments, **options)
            self.kill_after -= 1
            if self.kill_after < 0:
                if call == "write" and self.kill_after == -1:
                    self._real[call](arguments[0], arguments[1][: len(arguments[1]) // 2])
                raise Killed
            if self.faults and call != "unlink" and self.chance.random() < self.faults:
                self.seen.add("fault")
                raise OSError(self.chance.choice([errno.ENOSPC, errno.EIO, errno.EROFS]), "simulated")
            if call == "fsync":
                return self._flush(arguments[0], _caller())
            return self._real[call](*arguments, **options)

        return hooked

    def _is_here(self, file: Any) -> bool:
        """``file``: a path, a descriptor, or what has one."""
        descriptor = file.fileno() if hasattr(file, "fileno") else file
        path = (
            os.readlink(f"/proc/self/fd/{descriptor}") if isinstance(descriptor, int) else os.path.abspath(descriptor)
        )
        return f"{path}/".startswith(f"{self.base}/")

    def _flush(self, file: Any, caller: str) -> None:
        self.flushed_by.add(caller)
        if caller == self.left_out:
            return
        descriptor = file if isinstance(file, int) else file.fileno()
        path, found = Path(os.readlink(f"/proc/self/fd/{descriptor}")), os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            self._names[found.st_ino] = self._list(path)
        else:
            self._content[found.st_ino] = path.read_bytes()

    def _list(self, folder: Path) -> dict[str, int]:
        names = {}
        for entry in os.scandir(folder):
            names[entry.name] = entry.inode()
            if entry.is_file() and not (kept := self._kept / str(entry.inode())).exists():
                self._real["link"](entry.path, kept)
        return names

    def is_flushed(self, path: Path) -> bool:
        """Whether the path is there after a power cut, whatever becomes of the rest: its name, and each above it."""
        places = [each for each in (path, *path.parents) if self.base in each.parents]
        return all(self._names.get(os.stat(p.parent).st_ino, {}).get(p.name) == os.stat(p).st_ino for p in places)

    def spoil(self, path: Path, content: bytes) -> None:
        """The medium holds something else from now on."""
        path.write_bytes(content)
        self._content[path.stat().st_ino] = content

    # ------------------------------------------------------------- what becomes of it

    def power_cut(self, unflushed: str) -> None:
        """Nothing is left in memory. The program must have been killed."""
        left = self.base.with_name(f"{self.base.name}-left")
        self.faults, self.kill_after = 0.0, 1 << 30
        left.mkdir()
        self._leave(self.base, left, unflushed)
        shutil.rmtree(self.base)
        left.rename(self.base)
        self._content, self._names = {}, {}
        for folder, _, files in os.walk(self.base):
            self._names[os.stat(folder).st_ino] = self._list(Path(folder))
            self._content |= {os.stat(p).st_ino: p.read_bytes() for p in (Path(folder, name) for name in files)}

    def _leave(self, now: Path, left: Path, unflushed: str) -> None:
        flushed, current = self._names.get(os.stat(now).st_ino, {}), self._list(now)
        for name in sorted(flushed.keys() | current.keys()):
            options = [flushed.get(name), current.get(name)]
            inode = options[0 if unflushed == "lost" else 1 if unflushed == "kept" else self.chance.randrange(2)]
            if inode is None:
                continue
            if (now / name).is_dir():
                (left / name).mkdir()
                self._leave(now / name, left / name, unflushed)
            else:
                (left / name).write_bytes(self._left_of(inode, unflushed))

    def _left_of(self, inode: int, unflushed: str) -> bytes:
        flushed, current = self._content.get(inode, b""), (self._kept / str(inode)).read_bytes()
        if unflushed == "lost" or flushed == current:
            return flushed
        differs = (place for place, (one, other) in enumerate(zip(flushed, current, strict=False)) if one != other)
        same = next(differs, min(len(flushed), len(current)))
        return current if unflushed == "kept" else current[: self.chance.randint(same, len(current))]
