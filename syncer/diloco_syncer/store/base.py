"""The durable store: whole objects by name, created exclusively or replaced.

A store is a flat space of names such as ``records/f0003-v00000017.rec`` in a local
directory or an object store (bucket.py; others through fsspec). Everything that the syncer must
not lose lies in it, and its rules rest on two promises of every implementation:

- an object has its whole content or does not exist, also after a crash;
- ``create`` is exclusive: of several syncers that create one name exactly one
  succeeds, and the others get ``AlreadyThere``. It is one operation (a hard link,
  or a conditional put), never a check and then a write.

**Epochs.** A syncer that starts claims the epoch after the newest by creating
``epochs/<n>``; whoever loses the race tries the next. Epochs have no gaps, so a
syncer finds out that it was succeeded by asking for the name after its own
(``Epoch.check``), which it does before and after it makes a record. Between the
check and the write a successor may appear; then the exclusive name decides: the
record is there once, and the successor takes over what it finds.

**Succeeded pods.** On a node that a cluster has lost a syncer may live on, and be started
again by a kubelet that nobody reaches, with its store still within reach. It would claim
epoch after epoch in turn with its successor. Pods come one after another and never come
back, so a pod that has claimed an epoch leaves the store to one that came after it
(``successor``), while that one claimed its last epoch less than ``LEAVE_SECONDS`` ago.

All calls block; the syncer makes them in a thread. Errors of the medium are
``OSError`` (``DiskFull``, ``NotWritable`` where it is known which).
"""

from __future__ import annotations

import errno
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco_protocol.common.files import (
    Buffer,
    NotWritable,
    TooLarge,
    create_whole,
    read_bounded,
    remove_leftovers,
    sync_directory,
    write_whole,
)

_NAME = re.compile(r"^[a-z0-9][a-z0-9._-]*(/[a-z0-9][a-z0-9._-]*)*$")
_MAX_EPOCHS_TRIED = 1000
_CLAIMS_READ = 200  # the newest
_MAX_CLAIM_BYTES = 4096
LEAVE_SECONDS = 600.0
"""So long after its last claim a successor is given the store. Not for ever: of two pods the one that came
first may have claimed last, and the other is gone."""


class AlreadyThere(Exception):
    """The name exists; ``name`` says which."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} exists already")
        self.name = name


class NotThere(Exception):
    """No object has this name."""


class HigherEpoch(Exception):
    """Another syncer has taken over this store; this one must stop (exit code 3)."""


class Store(ABC):
    """Whole objects by name. Names are relative, lower case, with ``/`` between levels."""

    @abstractmethod
    def create(self, name: str, *parts: Buffer) -> None:
        """Make ``name`` hold the concatenated parts, durably. Raises ``AlreadyThere``."""

    @abstractmethod
    def replace(self, name: str, *parts: Buffer) -> None:
        """Make ``name`` hold the parts, durably, whatever it held."""

    @abstractmethod
    def read(self, name: str, limit: int) -> bytes:
        """The object's bytes. Raises ``NotThere``, and ``TooLarge`` beyond ``limit`` bytes."""

    @abstractmethod
    def read_start(self, name: str, count: int) -> bytes:
        """The first ``count`` bytes (fewer if the object is shorter). Raises ``NotThere``."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Names directly in ``folder``, sorted; empty if there is no such folder."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether the name exists."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove the object; nothing happens if it does not exist."""

    @abstractmethod
    def local_path(self, name: str) -> Path | None:
        """The object's file, where the store has files; for reading large objects without copies."""


def checked(name: str) -> str:
    """The name, if it is one. Raises ``ValueError``."""
    if not _NAME.match(name) or ".." in name:
        raise ValueError(f"not a name for a stored object: {name!r}")
    return name


class DirectoryStore(Store):
    """Objects are files below a directory, which this syncer and its successors alone write."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe = self.root / f".probe-{os.getpid()}"
            write_whole(probe, b"")
            probe.unlink()
        except FileExistsError as error:
            raise NotWritable(errno.ENOTDIR, f"store {self.root} is not a directory") from error
        except PermissionError as error:
            raise NotWritable(error.errno, f"cannot make the store {self.root}: permission denied") from error

    def _path(self, name: str) -> Path:
        return self.root / checked(name)

    def _folder(self, path: Path) -> None:
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            sync_directory(path.parent.parent)

    def create(self, name: str, *parts: Buffer) -> None:
        path = self._path(name)
        self._folder(path)
        try:
            create_whole(path, *parts)
        except FileExistsError as error:
            raise AlreadyThere(name) from error

    def replace(self, name: str, *parts: Buffer) -> None:
        path = self._path(name)
        self._folder(path)
        write_whole(path, *parts)

    def read(self, name: str, limit: int) -> bytes:
        try:
            return read_bounded(self._path(name), limit)
        except FileNotFoundError as error:
            raise NotThere(name) from error

    def read_start(self, name: str, count: int) -> bytes:
        try:
            with open(self._path(name), "rb") as file:
                return file.read(count)
        except FileNotFoundError as error:
            raise NotThere(name) from error

    def names(self, folder: str) -> list[str]:
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
        folders = [self.root, *(path for path in self.root.iterdir() if path.is_dir())]
        return sum(remove_leftovers(folder) for folder in folders)


class ObjectStore(Store):
    """Objects through an fsspec file system that puts whole objects atomically; for what bucket.py
    does not speak.

    ``create`` is a conditional put (``pipe_file(mode="create")``); a file system that
    does not know the mode is refused when the store is opened.
    """

    def __init__(self, filesystem: Any, root: str) -> None:
        self._fs = filesystem
        self._root = root.rstrip("/")
        self._check_conditional_put()

    def _check_conditional_put(self) -> None:
        probe = f"{self._root}/probe-{os.getpid()}-{os.urandom(4).hex()}"
        try:
            self._fs.pipe_file(probe, b"", mode="create")
            try:
                self._fs.pipe_file(probe, b"", mode="create")
            except FileExistsError:
                return
            raise NotWritable(
                errno.EOPNOTSUPP,
                f"the object store at {self._root} does not refuse to overwrite (conditional put); "
                "use one that does, or a volume",
            )
        except (TypeError, ValueError, NotImplementedError) as error:
            raise NotWritable(
                errno.EOPNOTSUPP,
                f"the file system of {self._root} has no conditional put (mode='create'); "
                "use a newer fsspec implementation, another store, or a volume",
            ) from error
        finally:
            if self._fs.exists(probe):
                self._fs.rm_file(probe)

    def _path(self, name: str) -> str:
        return f"{self._root}/{checked(name)}"

    def create(self, name: str, *parts: Buffer) -> None:
        try:
            self._fs.pipe_file(self._path(name), _joined(parts), mode="create")
        except FileExistsError as error:
            raise AlreadyThere(name) from error

    def replace(self, name: str, *parts: Buffer) -> None:
        self._fs.pipe_file(self._path(name), _joined(parts), mode="overwrite")

    def read(self, name: str, limit: int) -> bytes:
        path = self._path(name)
        try:
            size = int(self._fs.size(path) or 0)
            if size > limit:
                raise TooLarge(errno.EFBIG, f"{path} has {size} bytes; at most {limit} are allowed")
            return bytes(self._fs.cat_file(path))
        except FileNotFoundError as error:
            raise NotThere(name) from error

    def read_start(self, name: str, count: int) -> bytes:
        try:
            return bytes(self._fs.cat_file(self._path(name), start=0, end=count))
        except FileNotFoundError as error:
            raise NotThere(name) from error

    def names(self, folder: str) -> list[str]:
        path = self._path(folder)
        self._fs.invalidate_cache(path)
        try:
            entries = self._fs.ls(path, detail=True)
        except FileNotFoundError:
            return []
        return sorted(f"{folder}/{e['name'].rsplit('/', 1)[-1]}" for e in entries if e["type"] == "file")

    def exists(self, name: str) -> bool:
        path = self._path(name)
        self._fs.invalidate_cache(path)
        return bool(self._fs.exists(path))

    def delete(self, name: str) -> None:
        try:
            self._fs.rm_file(self._path(name))
        except FileNotFoundError:
            return

    def local_path(self, name: str) -> Path | None:
        return None


def _joined(parts: Sequence[Buffer]) -> bytes:
    if len(parts) == 1 and isinstance(parts[0], bytes):
        return parts[0]
    return b"".join(parts)


def open_store(where: str) -> Store:
    """A directory, a bucket such as ``s3://bucket/folder``, or another fsspec URI. Raises ``OSError`` with
    the cure."""
    scheme, separator, _ = where.partition("://")
    if not separator:
        return DirectoryStore(where)
    if scheme in ("file", "local"):
        return DirectoryStore(where.partition("://")[2])
    from diloco_syncer.store.bucket import SCHEMES, BucketStore

    if scheme in SCHEMES:
        return BucketStore(where)
    import fsspec

    try:
        filesystem, root = fsspec.core.url_to_fs(where)
    except (ImportError, ValueError) as error:
        raise NotWritable(errno.EINVAL, f"store {where}: {error}") from error
    return ObjectStore(filesystem, root)


class Epoch:
    """This syncer's claim on the store."""

    def __init__(self, store: Store, number: int) -> None:
        self.store = store
        self.number = number

    @classmethod
    def claim(cls, store: Store, claimant: bytes = b"", above: int = 0) -> Epoch:
        """Claim the epoch after the newest, and all those up to ``above`` + 1, for there are no gaps;
        ``claimant`` is kept in it for people to read."""
        newest = max((int(name.rsplit("/", 1)[1]) for name in store.names("epochs")), default=0)
        for number in range(newest + 1, newest + 1 + _MAX_EPOCHS_TRIED):
            try:
                store.create(_epoch_name(number), claimant)
            except AlreadyThere:
                continue  # another syncer starts at the same time
            if number > above:
                return cls(store, number)
        raise HigherEpoch(f"{_MAX_EPOCHS_TRIED} epochs were claimed by others while this syncer tried")

    def check(self) -> None:
        """Raises ``HigherEpoch`` if another syncer has claimed a higher one."""
        if self.store.exists(_epoch_name(self.number + 1)):
            raise HigherEpoch(
                f"another syncer has claimed epoch {self.number + 1} of this store; this one has epoch "
                f"{self.number} and stops"
            )


def successor(store: Store, pod: str, now: float) -> str:
    """The pod that has taken the store over from ``pod``, in words; empty: none has, lately. ``now``: unix
    seconds. Claims that name no pod say nothing. Raises OSError."""
    first: dict[str, int] = {}
    last: dict[str, tuple[int, float]] = {}
    for name in store.names("epochs")[-_CLAIMS_READ:]:
        try:
            claim = json.loads(store.read(name, _MAX_CLAIM_BYTES))
            who, at = str(claim["pod"]), float(claim["time"])
        except (NotThere, TooLarge, ValueError, TypeError, KeyError):
            continue
        number = int(name.rsplit("/", 1)[1])
        first.setdefault(who, number)
        last[who] = number, at
    if not pod or pod not in first:
        return ""
    came_later = [(*last[who], who) for who in first if first[who] > first[pod]]
    number, at, who = max(came_later, default=(0, 0.0, ""))
    if not who or abs(now - at) > LEAVE_SECONDS:
        return ""
    return f"pod {who}, which came after this one, has claimed epoch {number} of this store"


def _epoch_name(number: int) -> str:
    return f"epochs/{number:010d}"
