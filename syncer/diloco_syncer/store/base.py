"""The store's contract: whole objects by name, created exclusively or replaced.

A store is a flat space of names such as ``records/f0003-v00000017.rec`` in a local directory (directory.py)
or a bucket (bucket.py). Everything that the syncer must not lose lies in it. Its rules rest on two
promises of every implementation:

- an object has its whole content or does not exist, also after a crash;
- ``create`` is exclusive: of several syncers that create one name exactly one succeeds, and the others get
  ``ObjectExists``. It is one operation (a hard link, or a conditional put), never a check and then a write.

All calls block; the syncer makes them in a thread. Errors of the medium are ``OSError`` (``DiskFull``,
``NotWritable`` where it is known which).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from pathlib import Path

from diloco_protocol.common.files import Buffer

_NAME = re.compile(r"^[a-z0-9][a-z0-9._-]*(/[a-z0-9][a-z0-9._-]*)*$")


class ObjectExists(Exception):
    """An object has this name already; ``name`` says which."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} exists already")
        self.name = name


class ObjectNotFound(Exception):
    """No object has this name."""


class HigherEpoch(Exception):
    """Another syncer has taken over this store; this one must stop (exit code 3)."""


class Store(ABC):
    """Whole objects by name. Names are relative, lower case, with ``/`` between levels."""

    most_created: int | None = None  # bytes of an object that is created, at the most; None: no bound is known

    @abstractmethod
    def create(self, name: str, *parts: Buffer) -> None:
        """Make ``name`` hold the concatenated parts, durably. Raises ``ObjectExists``."""

    @abstractmethod
    def replace(self, name: str, *parts: Buffer) -> None:
        """Make ``name`` hold the parts, durably, whatever it held."""

    @abstractmethod
    def read(self, name: str, limit: int) -> bytes:
        """The object's bytes. Raises ``ObjectNotFound``, and ``TooLarge`` beyond ``limit`` bytes."""

    def read_large(self, name: str, limit: int, mapped: bool = True) -> Buffer:
        """As ``read``, where one request may be too little. ``mapped``: what is too large for memory comes as mapped
        memory, where it is not mapped from ``local_path``."""
        return self.read(name, limit)

    @abstractmethod
    def read_start(self, name: str, count: int) -> bytes:
        """The first ``count`` bytes (fewer if the object is shorter). Raises ``ObjectNotFound``."""

    @abstractmethod
    def list(self, folder: str) -> list[str]:
        """The names directly in ``folder``, sorted; empty if there is no such folder."""

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
