"""A store in memory that simulated processes share. Its operations take virtual time, fail, or lose their answer."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, MutableMapping
from pathlib import Path

from diloco_protocol.common.files import Buffer
from diloco_syncer.store.base import ObjectExists, ObjectNotFound, Store, checked
from syncer_simulation.processes import present_work


class MemoryStore(Store):
    """One process's view of ``objects``, which the processes share. In a ``ThreadWork`` each operation takes up to
    ``seconds``, and one that writes fails with the probability ``faults``: half of the time it was carried out. Between
    ``out[0]`` and ``out[1]`` all fail. ``on_change(objects, name)`` hears of each object that is created or deleted.
    ``interrupt(name)`` says for how many seconds more a write stands still before it takes place."""

    def __init__(
        self,
        objects: MutableMapping[str, bytes],
        chance: random.Random,
        seconds: float,
        faults: float,
        out: list[float],
        on_change: Callable[[MutableMapping[str, bytes], str], None],
        interrupt: Callable[[str], float] = lambda name: 0.0,
    ) -> None:
        self.objects, self.chance, self.seconds, self.faults, self.out = objects, chance, seconds, faults, out
        self.on_change, self.interrupt = on_change, interrupt

    def _begin(self) -> None:
        work = present_work()
        if work is not None:
            work.park(self.chance.uniform(0.0, self.seconds))
            if self.out[0] <= work.loop.time() < self.out[1]:
                raise OSError(errno.EIO, "the store is away")

    def _begin_write(self, name: str) -> bool:
        """Whether the answer is lost: the write is carried out, and fails."""
        self._begin()
        work = present_work()
        if work is not None and (seconds := self.interrupt(name)):
            work.park(seconds)
        if self.faults and self.chance.random() < self.faults:
            if self.chance.random() < 0.5:
                raise OSError(errno.EIO, "the store failed")
            return True
        return False

    @staticmethod
    def _end_write(lost: bool) -> None:
        if lost:
            raise OSError(errno.ETIMEDOUT, "the store did not answer")

    def create(self, name: str, *parts: Buffer) -> None:
        lost = self._begin_write(name)
        if checked(name) in self.objects:
            raise ObjectExists(name)
        self.objects[name] = b"".join(parts)
        self.on_change(self.objects, name)
        self._end_write(lost)

    def replace(self, name: str, *parts: Buffer) -> None:
        lost = self._begin_write(name)
        self.objects[checked(name)] = b"".join(parts)
        self._end_write(lost)

    def delete(self, name: str) -> None:
        lost = self._begin_write(name)
        self.objects.pop(checked(name), None)
        self.on_change(self.objects, name)
        self._end_write(lost)

    def read(self, name: str, limit: int) -> bytes:
        return self.read_start(name, limit)

    def read_start(self, name: str, count: int) -> bytes:
        self._begin()
        try:
            return self.objects[checked(name)][:count]
        except KeyError:
            raise ObjectNotFound(name) from None

    def list(self, folder: str) -> list[str]:
        self._begin()
        return sorted(n for n in self.objects if n.startswith(f"{folder}/") and "/" not in n[len(folder) + 1 :])

    def exists(self, name: str) -> bool:
        self._begin()
        return checked(name) in self.objects

    def local_path(self, name: str) -> Path | None:
        return None
