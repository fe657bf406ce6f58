"""Reads a store: the newest version of everything that fits together. Nothing here writes.

Two readers share it: a restart (checkpoint.py), which goes on from what is found here, and ``diloco export``, which
only wants the model and may run beside a running syncer. The names of objects are those of checkpoint.py.

The newest valid state says where each fragment was; the records after it where it is now, and each what the one before
it was. A gap of two ends them, unless a learner gave the version after it, which says what it follows. A damaged newest
record takes its fragment back one version, also below the state's. Where none is left, a *stand-in* takes its place,
from which the job never goes on. A damaged state gives way to the one before. What is there once has a copy
(documents.py).

A record above the state's version and of a lower epoch than the state's ends them too. A syncer that had been succeeded
made it after its successor had read the store. It told nobody, and the successor may have acknowledged offers of the
same steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from diloco_protocol.arrays.layout import Layout, LayoutError
from diloco_syncer.core.recovery.lost_versions import STAND_IN
from diloco_syncer.store import records
from diloco_syncer.store.base import ObjectNotFound, Store
from diloco_syncer.store.documents import copy_name, read_copied, read_document
from diloco_syncer.store.epochs import epoch_of
from diloco_syncer.store.records import Array, Damaged, MergeRecord, Recovered, parse_record_name, record_name

READERS = 4  # records that are read at a time, and in memory twice
T = TypeVar("T")


class StoreUnusable(Exception):
    """The store is of another job, or nothing in it fits together; the message says what to do."""


@dataclass(slots=True)
class Chain:
    """One fragment's newest usable record, and the records from the state's version ``begun`` to it, without arrays.

    ``newest``: where the record of ``begun`` and all after it are lost, an earlier one, or a stand-in for it.
    ``unusable``: the versions above, which ``why`` explains. ``late``: of them one that a succeeded syncer made, if
    it is that which ends the chain.
    """

    newest: MergeRecord
    newer: list[MergeRecord]
    begun: int
    unusable: list[int] = field(default_factory=list)
    why: str = ""
    late: bool = False

    @property
    def is_stand_in(self) -> bool:
        """Whether no record of the fragment is left."""
        return self.newest.made_in == STAND_IN

    @property
    def is_behind(self) -> bool:
        """Whether the fragment has less than the state says."""
        return self.newest.version < self.begun


@dataclass(slots=True)
class FoundState:
    """A store's newest state: its name, the core's document, the versions at it, and each fragment's chain.

    ``name`` empty: there is version 0 (or nothing) and no state yet.
    """

    name: str = ""
    core: dict[str, Any] | None = None
    versions: list[int] = field(default_factory=list)
    chains: list[Chain] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class StoreReader:
    """Reads one job's store. All methods block. ``with_arrays`` False: of records the arrays are neither read nor
    verified. ``forget_arrays``: they are verified, and not kept. ``restart``: what is read is gone on from; what is
    damaged is written anew from its copy, and fragments of which nothing is left get stand-ins."""

    store: Store
    job: str
    with_arrays: bool = True
    forget_arrays: bool = False
    restart: bool = False
    initial: dict[str, Any] | None = None  # initial.json: version 0's objects

    def layout(self) -> Layout | None:
        """The layout of version 0; None: there is none yet. Raises ``StoreUnusable``."""
        try:
            self.initial = read_copied(self.store, "initial.json", repair=self.restart)
            if self.initial is None:
                return None
            return Layout.from_json(self.blob(self.initial["layout"]).tobytes())
        except (Damaged, ObjectNotFound, LayoutError) as error:
            raise StoreUnusable(f"version 0's layout cannot be read: {error}; restore the store") from error

    def blob(self, name: str) -> Array:
        """A stored blob's bytes, verified; mapped from the disk where the store has files. Raises ``ObjectNotFound``,
        ``Damaged``."""
        return self.read_either(name, lambda each: self.map_file(each, "blob")[1]["blob"])

    def map_file(self, name: str, kind: str) -> tuple[dict[str, Any], dict[str, Array]]:
        """A stored file's body and arrays, verified; the arrays are mapped where the store has files. Raises
        ``ObjectNotFound``, ``Damaged``, ``FormatRefused``."""
        path = self.store.local_path(name)
        if path is None:
            return records.unpack(self.store.read_large(name, records.MAX_FILE), kind, name)
        if not path.is_file():
            raise ObjectNotFound(name)
        if not path.stat().st_size:  # cannot be mapped
            raise Damaged(f"{name} is empty")
        mapped = np.memmap(path, np.uint8, "r")
        return records.unpack(memoryview(mapped), kind, name)  # type: ignore[arg-type]

    def read_either(self, name: str, read: Callable[[str], T]) -> T:
        """What ``read`` makes of an object, or of its copy where the object is damaged or gone and has one. Raises
        ``ObjectNotFound``, ``Damaged``."""
        try:
            return read(name)
        except (Damaged, ObjectNotFound):
            if not self.store.exists(copy_name(name)):
                raise
            found = read(copy_name(name))
        if self.restart:
            self.store.replace(name, self.store.read_large(copy_name(name), records.MAX_FILE))
        return found

    def name_of(self, fragment: int, version: int) -> str:
        if version == 0 and self.initial is not None:
            return str(self.initial["fragments"][fragment])
        return record_name(fragment, version)

    def record(self, fragment: int, version: int) -> MergeRecord:
        """One version of a fragment, verified. Raises ``ObjectNotFound``, ``Damaged``."""
        name = self.name_of(fragment, version)
        if self.with_arrays:
            record = self.read_either(
                name, lambda each: MergeRecord.unpack(self.store.read_large(each, records.MAX_FILE, mapped=False), each)
            )
            record = record.without_arrays() if self.forget_arrays else record
        else:
            record = self.header(fragment, version)
        if (record.job, record.fragment, record.version) != (self.job, fragment, version):
            raise Damaged(f"{name} holds {record.job!r} fragment {record.fragment} version {record.version}")
        return record

    def header(self, fragment: int, version: int) -> MergeRecord:
        """One version's record without its arrays, which are not verified. Raises ``ObjectNotFound``, ``Damaged``."""
        name = self.name_of(fragment, version)
        body = self.read_either(name, lambda each: records.read_body(self.store, each, "merge"))
        return MergeRecord.from_body(body, np.empty(0, np.float32))

    def merges(self) -> Iterator[tuple[int, int]]:
        """(fragment, version) of every merge record in the store."""
        for name in self.store.list("records"):
            if parsed := parse_record_name(name):
                yield parsed

    def versions(self) -> defaultdict[int, list[int]]:
        """By fragment, the versions that have merge records, ascending; empty where there are none."""
        there = defaultdict[int, list[int]](list)
        for fragment, version in sorted(self.merges()):
            there[fragment].append(version)
        return there

    def newest(self, layout: Layout | None) -> FoundState:
        """Find the state to continue from. Raises ``StoreUnusable`` if there are states and none can be used."""
        found = FoundState()
        names = list(reversed(self.store.list("state")))
        for name in names:
            try:
                body = read_document(self.store, name)
                if body["job"] != self.job:
                    raise StoreUnusable(f"{name} is of the job {body['job']!r}, not {self.job!r}: use another store")
                versions: list[int] = body["versions"]
                if layout is not None:
                    versions = versions or [0] * len(layout)
                    found.chains = self.chains(layout, versions, epoch_of(name))
                elif versions:
                    raise StoreUnusable("there are merges but no initial.json in the store: restore it from a copy")
            except (Damaged, ObjectNotFound) as error:
                found.problems.append(f"{error}; going back to an older state")
                continue
            found.name, found.core, found.versions = name, body["core"], versions
            return found
        if names and any(True for _ in self.merges()):
            raise StoreUnusable(
                "no state in the store can be used: "
                + "; ".join(found.problems[-3:])
                + ": restore the store from a copy, or use another"
            )
        if layout is not None:  # there is version 0, and no state yet
            found.chains = self.chains(layout, [0] * len(layout), 0)
        return found

    def chains(self, layout: Layout, versions: Sequence[int], epoch: int) -> list[Chain]:
        """The chain of each fragment from these versions on, which a syncer of ``epoch`` had. Raises ``StoreUnusable``
        where nothing is left of a fragment, and no restart goes on with a stand-in."""
        there = self.versions()

        def read(fragment: int) -> Chain:
            return self._chain(layout, fragment, versions[fragment], epoch, there=set(there[fragment]))

        # Several streams at a time: a bucket gives one no more than a part of the link.
        with ThreadPoolExecutor(READERS, "restore") as readers:
            chains = list(readers.map(read, range(len(versions))))
        lost = [chain for chain in chains if chain.is_stand_in]
        if lost and not self.restart:
            raise StoreUnusable(f"no whole version is left of fragment {lost[0].newest.fragment}: {lost[0].why}")
        return chains

    def _chain(self, layout: Layout, fragment: int, begun: int, epoch: int, there: set[int]) -> Chain:
        problems: list[str] = []
        newer = self._newer(fragment, begun, there, problems)
        made_late = [place for place, record in enumerate(newer) if record.epoch < epoch]
        if made_late:
            late = newer[made_late[0]]
            problems.append(f"{late.version} was made in epoch {late.epoch}, which epoch {epoch} had succeeded")
            del newer[made_late[0] :]
        while True:
            version = newer[-1].version if newer else begun
            try:
                newest = self.record(fragment, version)
                break
            except (Damaged, ObjectNotFound) as error:
                problems.append(f"{error or type(error).__name__}")
                if not newer:
                    newest = self._below(fragment, begun, there) or stand_in(
                        self.job, fragment, layout.elements(fragment)
                    )
                    break
                newer.pop()
        version = newest.version
        above = sorted(v for v in there if v > version)
        chain = Chain(newest, newer, begun, above, late=bool(made_late) and len(problems) == 1)
        if above or chain.is_behind or (chain.is_stand_in and problems):
            lost = [*above, begun] if chain.is_behind else above or [begun]
            chain.why = f"versions {min(lost)} to {max(lost)} cannot be used: {'; '.join(problems) or 'a gap'}"
        return chain

    def _below(self, fragment: int, begun: int, there: set[int]) -> MergeRecord | None:
        """The newest record below ``begun`` that can be read; None: there is none."""
        for version in sorted({v for v in there if v < begun} | ({0} if begun else set()), reverse=True):
            try:
                return self.record(fragment, version)
            except (Damaged, ObjectNotFound):
                continue
        return None

    def _newer(self, fragment: int, begun: int, there: set[int], problems: list[str]) -> list[MergeRecord]:
        """The records that follow version ``begun``, without arrays; what ends them goes to ``problems``. One that is
        damaged or gone is known from the record after it."""
        found: dict[int, MergeRecord] = {}
        for version in sorted(v for v in there if v > begun):
            try:
                found[version] = self.header(fragment, version)
            except (Damaged, ObjectNotFound) as error:
                problems.append(str(error))
        for body in [r.before for r in found.values() if r.before is not None and r.before["version"] > begun]:
            found.setdefault(body["version"], MergeRecord.from_body(body, np.empty(0, np.float32)))
        follows = {v - 1 if v - 1 in {begun, *found} else found[v].follows: found[v] for v in sorted(found)}
        newer: list[MergeRecord] = []
        while after := follows.get(newer[-1].version if newer else begun):
            newer.append(after)
        return newer


def stand_in(job: str, fragment: int, elements: int) -> MergeRecord:
    """A version 0 in the place of versions of which none is left."""
    theta = np.zeros(elements, np.float32)
    return MergeRecord(job, 0, fragment, 0, theta=theta, recovered=Recovered(0, STAND_IN, ()))
