"""A store in a local directory, for example a volume.

What a killed syncer left may be in the memory of the machine alone: a name of which the folder was not flushed. The
next one goes on from all that it finds, and tells learners of it. So it flushes every folder first.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from diloco_protocol.common.files import (
    PUBLIC,
    Buffer,
    NotWritable,
    create_whole,
    flush_name,
    flush_to_device,
    make_directory,
    read_bounded,
    remove_leftovers,
    write_whole,
)
from diloco_syncer.store.base import ObjectExists, ObjectNotFound, Store, checked


class DirectoryStore(Store):
    """Objects are files below a directory, which this syncer and its successors alone write."""

    def __init__(self, root: str | os.PathLike[str], public: bool = False) -> None:
        """``public``: who may read the objects is decided by the umask, and not by us (common/files.py)."""
        self.root = Path(root)
        self._mode = PUBLIC if public else None
        try:
            self._make_directory(self.root)
            probe = self.root / f".probe-{os.getpid()}"
            write_whole(probe, b"")
            probe.unlink()
            flush_name(self.root)
            for folder in self._folders():
                flush_to_device(folder)
            self._flushed = set(self._folders())  # whose names are
        except FileExistsError as error:
            raise NotWritable(errno.ENOTDIR, f"store {self.root} is not a directory") from error
        except PermissionError as error:
            raise NotWritable(error.errno, f"cannot make the store {self.root}: permission denied") from error

    def _path(self, name: str) -> Path:
        return self.root / checked(name)

    def _make_directory(self, path: Path) -> None:
        if self._mode is None:
            make_directory(path)
        else:
            path.mkdir(parents=True, exist_ok=True)
            flush_name(path)

    def _folder(self, path: Path) -> None:
        if path.parent not in self._flushed:
            if path.parent.is_dir():
                flush_name(path.parent)  # it may be there since a try that failed at this very point
            else:
                self._make_directory(path.parent)
            self._flushed.add(path.parent)

    def _folders(self) -> list[Path]:
        return [self.root, *(path for path in self.root.iterdir() if path.is_dir())]

    def create(self, name: str, *parts: Buffer) -> None:
        path = self._path(name)
        self._folder(path)
        try:
            create_whole(path, *parts, mode=self._mode)
        except FileExistsError as error:
            flush_to_device(path.parent)  # it may be there since a try that failed at this very point
            raise ObjectExists(name) from error

    def replace(self, name: str, *parts: Buffer) -> None:
        path = self._path(name)
        self._folder(path)
        write_whole(path, *parts, mode=self._mode)

    def read(self, name: str, limit: int) -> bytes:
        try:
            return read_bounded(self._path(name), limit)
        except FileNotFoundError as error:
            raise ObjectNotFound(name) from error

    def read_start(self, name: str, count: int) -> bytes:
        try:
            with open(self._path(name), "rb") as file:
                return file.read(count)
        except FileNotFoundError as error:
            raise ObjectNotFound(name) from error

    def list(self, folder: str) -> list[str]:
        try:
            entries = os.scandir(self.root / checked(folder))
        except FileNotFoundError:
            return []
        with entries:
            return sorted(f"{folder}/{e.name}" for e in entries if not e.name.startswith(".") and e.is_file())

    def exists(self, name: str) -> bool:
        return self._path(name).exists()

    def delete(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def local_path(self, name: str) -> Path | None:
        return self._path(name)

    def remove_leftovers(self) -> int:
        """Remove half-written temporary files of killed syncers; returns how many."""
        return sum(remove_leftovers(folder) for folder in self._folders())
