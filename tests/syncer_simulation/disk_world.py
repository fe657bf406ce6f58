"""The world of shell_world.py on a real ``DirectoryStore``, over a disk that forgets what was not flushed.

A syncer is killed within an operation of its store too, wherever a call of the disk is. Where no other lives, a power
cut may follow: the disk keeps what was flushed, and any part of the rest. Whatever the store said was durable has to be
there. The disk is full, broken or read-only for some calls. With ``flips`` a bit of one object turns between two lives:
that costs its fragment one version at most, and no other anything.
"""

from __future__ import annotations

import errno
import os
import random
import secrets
import tempfile
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest

from diloco_protocol.common.files import Buffer
from diloco_protocol.vocabulary import ENDED_PHASES
from diloco_syncer.store.checkpoint import Checkpoints, Restored, offer_name
from diloco_syncer.store.directory import DirectoryStore
from diloco_syncer.store.tape import Tape
from simulated_disk import Killed, SimulatedDisk
from syncer_simulation.processes import present_work
from syncer_simulation.shell_sessions import ShellWorld
from syncer_simulation.shell_world import Life, ShellSetup

NEVER = 1 << 40
T = TypeVar("T")


@dataclass
class DiskSetup(ShellSetup):
    kills: float = 0.0  # share of the store's writes within which the syncer is killed
    flips: float = 0.0  # share of the ends of lives after which a bit of one object has turned
    left_out: str = ""  # whose flushes do nothing


class Files(MutableMapping[str, bytes]):
    """The objects as they lie on the disk. Not those that nobody has given their name yet."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def _path(self, name: str) -> Path:
        return self.root / name

    def __getitem__(self, name: str) -> bytes:
        try:
            return self._path(name).read_bytes()
        except FileNotFoundError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, data: bytes) -> None:
        self._path(name).write_bytes(data)

    def __delitem__(self, name: str) -> None:
        self._path(name).unlink()

    def __contains__(self, name: object) -> bool:
        return self._path(str(name)).is_file()

    def __iter__(self) -> Iterator[str]:
        names = (path.relative_to(self.root) for path in self.root.rglob("*") if path.is_file())
        return iter(sorted(str(name) for name in names if not name.name.startswith(".")))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class DiskStore(DirectoryStore):
    """One process's view of the disk; its operations take virtual time."""

    def __init__(self, world: DiskWorld) -> None:
        self.world = world
        world.disk.faults = 0.0
        super().__init__(world.objects.root)
        world.disk.faults = world.disk_faults()
        # What is here now was flushed, or has been just now: learners are told of it before anything else is written.
        at_risk = [name for name in world.objects if not world.disk.is_flushed(world.objects.root / name)]
        assert present_work() is None or not at_risk, f"{at_risk[0]} is gone on from, and a power cut may take it"
        world.promised = {name: {data} for name, data in world.objects.items()}

    def _begin(self) -> None:
        work, world = present_work(), self.world
        if work is not None:
            work.park(world.random.uniform(0.0, world.setup.store_seconds))
            if world.out[0] <= world.now < world.out[1]:
                raise OSError(errno.EIO, "the disk is away")

    def _write(self, name: str, call: Callable[[], None], after: bytes | None) -> None:
        """``after``: what the object is then; None: it is gone."""
        self._begin()
        work, world = present_work(), self.world
        before = world.objects.get(name)
        allowed = world.promised.get(name, {before})
        world.promised[name] = {*allowed, before, after}
        if work is not None and world.chance(world.setup.kills):
            world.disk.kill_after = world.random.randrange(8)
        try:
            call()
            if after is not None:
                world.promised[name] = {after}  # that an object is gone is not flushed
        except Killed:
            assert work is not None
            world.disk.kill_after = NEVER
            world.seen["killed within"] += 1
            world.at(0.0, lambda: world.crash_process(work.loop))
            self._tell(name, before)
            work.park(None)
        finally:
            world.disk.kill_after = NEVER
            if work is None or work.loop.alive:
                self._tell(name, before)

    def _tell(self, name: str, before: bytes | None) -> None:
        if (name in self.world.objects) != (before is not None):
            self.world.oracle.read_object(self.world.objects, name)

    def create(self, name: str, *parts: Buffer) -> None:
        there = self.world.objects.get(name)
        self._write(name, lambda: DirectoryStore.create(self, name, *parts), there or b"".join(parts))

    def replace(self, name: str, *parts: Buffer) -> None:
        self._write(name, lambda: DirectoryStore.replace(self, name, *parts), b"".join(parts))

    def delete(self, name: str) -> None:
        self._write(name, lambda: DirectoryStore.delete(self, name), None)

    def _read(self, call: Callable[[], T]) -> T:
        self._begin()
        return call()

    def read(self, name: str, limit: int) -> bytes:
        return self._read(lambda: DirectoryStore.read(self, name, limit))

    def read_start(self, name: str, count: int) -> bytes:
        return self._read(lambda: DirectoryStore.read_start(self, name, count))

    def list(self, folder: str) -> list[str]:
        return self._read(lambda: DirectoryStore.list(self, folder))

    def exists(self, name: str) -> bool:
        return self._read(lambda: DirectoryStore.exists(self, name))


class DiskWorld(ShellWorld):
    """Several syncers on one disk."""

    setup: DiskSetup
    objects: Files

    def __init__(self, setup: DiskSetup) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="disk-")
        self.promised: dict[str, set[bytes | None]] = {}  # what an object may be after a power cut
        self.flipped: list[int] = []  # of each fragment, its version when a bit turned
        self.flip_at = [0, 0, 0]  # versions from which on another one may
        super().__init__(setup)
        self.objects = Files(Path(self.folder.name) / "disk" / "volume" / "store")

    def run(self, limit: float = 3000.0) -> None:
        base = Path(self.folder.name) / "disk"
        base.mkdir()
        chance, names = random.Random(self.setup.seed), random.Random(self.setup.seed + 1)
        listdir: Callable[..., list[str]] = os.listdir
        with pytest.MonkeyPatch.context() as patch, mock.patch.object(secrets, "token_hex", token_of(names)):
            patch.setattr(os, "listdir", lambda *path: sorted(listdir(*path)))
            self.disk = SimulatedDisk(patch, base, chance)
            self.disk.kill_after = NEVER
            self.disk.left_out = self.setup.left_out
            super().run(limit)
        self.disk.faults = 0.0

    def disk_faults(self) -> float:
        return self.setup.faults * self.setup.chaos * (self.now < 60.0)

    def open_store(self) -> DiskStore:
        return DiskStore(self)

    def load(self) -> tuple[Checkpoints, Restored, Tape]:
        DirectoryStore(self.objects.root).remove_leftovers()
        loaded = super().load()
        newest = [record.version for record in loaded[1].newest]
        if self.flipped:
            behind = [was - now for was, now in zip(self.flipped, newest, strict=True)]
            assert max(behind) <= 1 and sum(behind) <= 1, f"one bit took {behind} versions of the fragments back"
            self.flipped = []
        return loaded

    def lose_content(self, whole: bool) -> None:
        raise AssertionError("a store that lost nothing, or one bit, cannot be used")

    # ------------------------------------------------------------ the end of a process

    def crash_process(self, loop: object) -> None:
        for life in self.lives:
            if life.loop is loop:
                self.crash(life)

    def crash(self, life: Life) -> None:
        alive = life.loop.alive
        super().crash(life)
        if not alive or any(one.loop.alive for one in self.lives):
            return
        if self.random.random() < 0.6:
            self.cut_power()
        if self.random.random() < self.setup.flips:
            self.flip_a_bit()

    def cut_power(self) -> None:
        self.seen["power cuts"] += 1
        before = set(self.objects)
        self.disk.power_cut(self.random.choice(["lost", "kept", "any", "any"]))
        self.disk.kill_after = NEVER
        there = dict(self.objects)
        for name, allowed in sorted(self.promised.items()):
            # A line of the tape is durable with the record that it tells of; ``settle_shell`` reads the whole tape.
            assert name.startswith("tape/") or there.get(name) in allowed, f"{name} was durable, and is lost"
        for name in sorted(before - there.keys()):
            self.oracle.forget(name)

    def flip_a_bit(self) -> None:
        versions = self.core.versions
        if self.core.phase in ENDED_PHASES:  # nobody holds a version any more
            return
        if len(versions) < 3 or any(now < least for now, least in zip(versions, self.flip_at, strict=True)):
            return
        before = dict(self.objects)
        name = self.random.choice([name for name, data in before.items() if data and not name.startswith("discarded/")])
        data = bytearray(before[name])
        data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        self.disk.spoil(self.objects.root / name, bytes(data))
        self.promised[name] = {bytes(data)}
        self.seen["flips"] += 1
        self.flip_at = [version + 2 for version in versions]
        newest = {p: v for p, v in sorted(self.oracle.records)}
        self.flipped = [newest[p] for p in range(len(versions))]
        self.oracle.go_back(before, dict(self.objects))
        # What was removed once it was merged is there again by chance alone.
        removed = {name for name, allowed in self.promised.items() if None in allowed}
        kept = {i: one for i, one in self.oracle.acknowledged.items() if offer_name(one[0]) not in removed}
        self.oracle.acknowledged = kept


def token_of(chance: random.Random) -> Callable[[Any], str]:
    return lambda count=32: chance.randbytes(count).hex()
