"""Reads a store: the newest version of everything that fits together. Nothing here writes.

Two readers share it: a restart (checkpoint.py), which goes on from what is found here, and ``diloco export``, which
only wants the model and may run beside a running syncer. The names of objects are those of checkpoint.py.

The newest valid state says where each fragment was; the records after it say where it is now. A gap ends them, unless
the version after the gap came from a learner and says which version it follows. A damaged newest record takes its
fragment back one version. A damaged state, or one whose records are gone, gives way to the state before it.

A record above the state's version and of a lower epoch than the state's ends them too. A syncer that had been succeeded
made it after its successor had read the store. It told nobody, and the successor may have acknowledged offers of the
same steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from diloco_protocol.arrays.layout import Layout, LayoutError
from diloco_syncer.store import records
from diloco_syncer.store.base import ObjectNotFound, Store
from diloco_syncer.store.documents import read_document
from diloco_syncer.store.records import Array, Damaged, MergeRecord, parse_record_name, record_name

_EPOCH = re.compile(r"/e(\d{10})-")


class StoreUnusable(Exception):
    """The store is of another job, or nothing in it fits together; the message says what to do."""


def epoch_of(name: str) -> int:
    """The epoch in which an object was made, by its name; 0 where the name has none (records, offers)."""
    found = _EPOCH.search(name)
    return int(found.group(1)) if found else 0


@dataclass(slots=True)
class Chain:
    """One fragment's newest usable record, and the records from the state's version to it, without arrays.

    ``unusable``: the versions above, which ``why`` explains. ``late``: of them one that a succeeded syncer made, if
    it is that which ends the chain.
    """

    newest: MergeRecord
    newer: list[MergeRecord]
    unusable: list[int] = field(default_factory=list)
    why: str = ""
    late: bool = False


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
    verified."""

    store: Store
    job: str
    with_arrays: bool = True
    initial: dict[str, Any] | None = None  # initial.json: version 0's objects

    def layout(self) -> Layout | None:
        """The layout of version 0; None: there is none yet. Raises ``StoreUnusable``."""
        if not self.store.exists("initial.json"):
            return None
        try:
            self.initial = read_document(self.store, "initial.json")
            return Layout.from_json(self.blob(self.initial["layout"]).tobytes())
        except (Damaged, ObjectNotFound, LayoutError) as error:
            raise StoreUnusable(f"version 0's layout cannot be read: {error}; restore the store") from error

    def blob(self, name: str) -> Array:
        """A stored blob's bytes, verified. Raises ``ObjectNotFound``, ``Damaged``."""
        return records.unpack(self.store.read(name, records.MAX_FILE), "blob", name)[1]["blob"]

    def name_of(self, fragment: int, version: int) -> str:
        if version == 0 and self.initial is not None:
            return str(self.initial["fragments"][fragment])
        return record_name(fragment, version)

    def record(self, fragment: int, version: int) -> MergeRecord:
        """One version of a fragment, verified. Raises ``ObjectNotFound``, ``Damaged``."""
        name = self.name_of(fragment, version)
        if self.with_arrays:
            record = MergeRecord.unpack(self.store.read(name, records.MAX_FILE), name)
        else:
            record = self.header(fragment, version)
        if (record.job, record.fragment, record.version) != (self.job, fragment, version):
            raise Damaged(f"{name} holds {record.job!r} fragment {record.fragment} version {record.version}")
        return record

    def header(self, fragment: int, version: int) -> MergeRecord:
        """One version's record without its arrays, which are not verified. Raises ``ObjectNotFound``, ``Damaged``."""
        body = records.read_body(self.store, self.name_of(fragment, version), "merge")
        return MergeRecord.from_body(body, np.empty(0, np.float32))

    def merges(self) -> Iterator[tuple[int, int]]:
        """(fragment, version) of every merge record in the store."""
        for name in self.store.list("records"):
            parsed = parse_record_name(name)
            if parsed:
                yield parsed

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
                    found.chains = self.chains(versions, epoch_of(name))
                elif versions:
                    raise StoreUnusable("there are merges but no initial.json in the store: restore it from a copy")
            except (Damaged, ObjectNotFound) as error:
                found.problems.append(f"{error}; going back to an older state")
                continue
            found.name, found.core, found.versions = name, body["core"], versions
            return found
        if names:
            raise StoreUnusable(
                "no state in the store can be used: "
                + "; ".join(found.problems[-3:])
                + ": restore the store from a copy, or use another"
            )
        if layout is not None:  # stopped between version 0 and the first state
            found.chains = [Chain(self.record(fragment, 0), []) for fragment in range(len(layout))]
        return found

    def chains(self, versions: Sequence[int], epoch: int = 0) -> list[Chain]:
        """The chain of each fragment from these versions on, which a syncer of ``epoch`` had. Raises
        ``ObjectNotFound`` or ``Damaged`` if one of ``versions`` itself cannot be read."""
        there: dict[int, set[int]] = {}
        for fragment, version in self.merges():
            there.setdefault(fragment, set()).add(version)
        return [self._chain(f, begun, epoch, there.get(f, set())) for f, begun in enumerate(versions)]

    def _chain(self, fragment: int, begun: int, epoch: int, there: set[int]) -> Chain:
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
                if version == begun:
                    raise
                problems.append(str(error))
                newer.pop()
        above = sorted(v for v in there if v > version)
        why = ""
        if above:
            why = f"versions {above[0]} to {above[-1]} cannot be used: {'; '.join(problems) or 'a gap'}"
        return Chain(newest, newer, above, why, late=bool(made_late) and len(problems) == 1)

    def _newer(self, fragment: int, begun: int, there: set[int], problems: list[str]) -> list[MergeRecord]:
        """The records that follow version ``begun``, without arrays; what ends them goes to ``problems``."""
        newer: list[MergeRecord] = []
        version, bridges = begun, dict[int, MergeRecord]()
        for start in (v for v in sorted(there) if v > begun + 1 and v - 1 not in there):
            try:
                after_gap = self.header(fragment, start)
            except (Damaged, ObjectNotFound) as error:
                problems.append(str(error))
                continue
            if after_gap.recovered is not None:
                bridges[after_gap.follows] = after_gap
        try:
            while version in bridges or version + 1 in there:
                newer.append(bridges.get(version) or self.header(fragment, version + 1))
                version = newer[-1].version
        except (Damaged, ObjectNotFound) as error:
            problems.append(str(error))
        return newer
