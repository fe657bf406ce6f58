"""The objects that the syncer keeps in its store: how they are written, and restored at a start.

Names in the store::

    job.json, job.copy.json         which job this is, and digests of what may not change
    epochs/<n>                      one per syncer that ran (epochs.Epoch)
    initial/e<epoch>-a<attempt>-... version 0, staged: layout, one record per fragment, frozen blob
    initial.json, initial.copy.json   created once, exclusively: version 0 is these objects
    records/f<p>-v<version>.rec     one merge (records.MergeRecord), created exclusively
    state/e<epoch>-n<n>.json        the core's state document, each written once
    manifests/e<epoch>-n<n>.json    a checkpoint: a state and the record of every fragment that goes with it
    offers/s<slot>-i<..>-f<..>-q<..>.rec   spooled offers that no merge has taken yet
    optimizer/e<epoch>-n<n>.rec     a learner's inner optimizer state
    discarded/...                   what a restart could not use, kept for people
    tape/<n>.jsonl                  the event tape (tape.py)

What a restart takes of it is in restore.py. Records are kept from the older of the two newest states on, so one
damaged state loses nothing. Of each fragment the record before the newest is kept too, and each tells of the one before
it. So one damaged record costs its fragment one version at most, which a learner that holds it gives back. What is
written once for the whole job is there twice (``copy_name``): its identity, and all of version 0, whose fragments'
copies go with the first merge. So no damage of one object makes a store unusable. The scrub (runtime/durability.py)
finds a damaged newest record while the syncer has its content, and one of two copies while the other is whole. Nothing
is begun anew over a store that fits nowhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from diloco_protocol import documents
from diloco_protocol.arrays.kernels import Float64s
from diloco_protocol.arrays.layout import Layout
from diloco_protocol.common.files import Buffer
from diloco_protocol.documents import Report
from diloco_protocol.resources import STATES_KEPT
from diloco_protocol.wire.records import PushHeader
from diloco_syncer.core.books.ledger import header_from_json, header_to_json
from diloco_syncer.store import records
from diloco_syncer.store.base import HigherEpoch, ObjectExists, ObjectNotFound, Store
from diloco_syncer.store.documents import copy_name, create_copied, pack_document, read_document
from diloco_syncer.store.epochs import Epoch, epoch_of
from diloco_syncer.store.records import Array, Damaged, MergeRecord, record_name
from diloco_syncer.store.restore import StoreReader, StoreUnusable

log = logging.getLogger(__name__)

REPORT = "report.json"
MAX_REPORT = 64 << 20


class RecordMadeMeanwhile(Exception):
    """A predecessor has made what was to be made here; begin again from the store."""


# ------------------------------------------------------------------ what is restored


@dataclass(slots=True)
class SpooledOffer:
    """A durable offer without its values: its header, and of the decoded values the L2 norm and the ``squares`` of
    the fragment's pieces, float64[pieces] (merge.piece_squares). ``encoded_bytes``: of its values as received."""

    header: PushHeader
    norm: float
    squares: Float64s
    encoded_bytes: int


@dataclass(slots=True)
class Restored:
    """A store's content at start. ``core`` None: no state yet; ``layout`` None: no version 0 yet.

    ``newest``: per fragment the record to go on from, or a stand-in. ``newer``: records after the
    state, without arrays, in the order of their merges.
    """

    core: dict[str, Any] | None = None
    layout: Layout | None = None
    newest: list[MergeRecord] = field(default_factory=list)
    newer: list[MergeRecord] = field(default_factory=list)
    offers: list[SpooledOffer] = field(default_factory=list)
    frozen: str = ""
    frozen_digest: str = ""
    optimizer: str = ""
    optimizer_bytes: int = 0
    number: int = 0  # merges of the job
    problems: list[str] = field(default_factory=list)
    discarded: list[tuple[int, int, str]] = field(default_factory=list)  # fragment, version gone on from, why
    behind: bool = False  # the tape tells of merges that are not here


def offer_name(header: PushHeader) -> str:
    slot, incarnation, fragment, sequence = header.id
    return f"offers/s{slot:05d}-i{incarnation:010d}-f{fragment:05d}-q{sequence:010d}.rec"


class Checkpoints:
    """Reads and writes one job's objects under one epoch. All methods block."""

    def __init__(self, store: Store, epoch: Epoch, job: str, keep: int, forget_arrays: bool = False) -> None:
        """``forget_arrays``: see ``StoreReader``."""
        self.store = store
        self.reader = StoreReader(store, job, restart=True, forget_arrays=forget_arrays)
        self.epoch = epoch
        self.job = job
        self.keep = max(1, keep)
        self._number = 0
        self._states: list[tuple[str, list[int]]] = []  # newest last

    # ------------------------------------------------------------- identity

    def identify(self, digests: Mapping[str, str]) -> None:
        """Write job.json at the job's first start, compare it at every other.

        Raises ``StoreUnusable`` if this is another job's store, or a field changed that may not.
        """
        try:
            found = create_copied(self.store, "job.json", {"job": self.job, "digests": dict(digests)})
        except Damaged as error:
            raise StoreUnusable(f"whose store this is cannot be read: {error}; restore the file from a copy") from error
        if found["job"] != self.job:
            raise StoreUnusable(f"this store holds the job {found['job']!r}, not {self.job!r}: use another store")
        changed = sorted(k for k, v in found["digests"].items() if digests.get(k, v) != v)
        if changed:
            raise StoreUnusable(
                f"{', '.join(changed)} may not change once a job has begun, and differs from what this store "
                "was begun with: undo the change, or use another store"
            )

    # ------------------------------------------------------------- version 0

    def stage(self, attempt: int, part: str, *data: Buffer) -> str:
        """Keep a part of version 0 durably, not yet in force, and a copy of it; returns its name."""
        name = f"initial/e{self.epoch.number:010d}-a{attempt:04d}-{part}"
        for each in (name, copy_name(name)):
            self.store.replace(each, *data)
        return name

    def commit_initial(self, layout: str, fragments: Sequence[str], frozen: str, frozen_digest: str = "") -> None:
        """Put the staged version 0 in force; ``frozen_digest``: of the frozen parameters, by the learner. Raises
        ``HigherEpoch``, and ``RecordMadeMeanwhile`` if a predecessor did it at the last moment."""
        self.epoch.check()
        body = {"job": self.job, "layout": layout, "fragments": list(fragments), "frozen": frozen}
        body["frozen_digest"] = frozen_digest
        if create_copied(self.store, "initial.json", body) != body:
            self.epoch.check()
            raise RecordMadeMeanwhile("a syncer before this one has stored version 0 meanwhile")
        self.reader.initial = body

    # ------------------------------------------------------------- records

    def write_record(self, record: MergeRecord) -> None:
        """Make a merge durable, exclusively. Raises ``HigherEpoch``, ``RecordMadeMeanwhile``, OSError."""
        self.epoch.check()
        name = record_name(record.fragment, record.version)
        parts = record.pack()
        for _ in range(2):
            try:
                self.store.create(name, *parts)
                break
            except ObjectExists:
                try:
                    found = MergeRecord.unpack(self.store.read_large(name, records.MAX_FILE, mapped=False), name)
                except Damaged:
                    self._set_aside(name)
                    continue
                if found.epoch > record.epoch:
                    raise HigherEpoch(f"{name} was made in epoch {found.epoch}; this syncer stops") from None
                if found.epoch < record.epoch:
                    raise RecordMadeMeanwhile(f"{name} was made in epoch {found.epoch} meanwhile") from None
                if found.digest != record.digest:
                    raise StoreUnusable(f"{name} was made twice in epoch {record.epoch}, differently") from None
                break  # a put whose answer was lost
        self.epoch.check()

    def read_record(self, fragment: int, version: int) -> MergeRecord:
        """A version with all of its arrays. Raises ``ObjectNotFound``, ``Damaged``."""
        return replace(self.reader, forget_arrays=False).record(fragment, version)

    def find_damage(self, name: str, kind: str) -> str:
        """Why an object of records' format is not what was written, in words; empty: it is whole. Raises OSError."""
        try:
            self.reader.map_file(name, kind)
        except ObjectNotFound:
            return f"{name} is gone"
        except Damaged as error:
            return str(error)
        return ""

    def write_record_again(self, record: MergeRecord) -> None:
        """Put a whole record in the place of a damaged one. Raises ``HigherEpoch``, OSError."""
        self.epoch.check()
        self.store.replace(self.reader.name_of(record.fragment, record.version), *record.pack())
        self.epoch.check()

    @property
    def fragments(self) -> int:
        """Of the job; 0: there is no version 0."""
        return len(self.reader.initial["fragments"]) if self.reader.initial else 0

    def copied_blobs(self) -> list[tuple[str, str]]:
        """The objects that are there twice for as long as the job is, each with the other of its kind."""
        initial = self.reader.initial or {"layout": "", "frozen": ""}
        pairs = [(name, copy_name(name)) for name in (initial["layout"], initial["frozen"]) if name]
        return [each for pair in pairs for each in (pair, pair[::-1])]

    def copy_blob(self, source: str, name: str) -> None:
        """Put what is kept as ``source`` in the place of ``name``. Raises ``HigherEpoch``, ``ObjectNotFound``,
        ``Damaged``, OSError."""
        data = self.store.read_large(source, records.MAX_FILE)
        records.unpack(data, "blob", source)
        self.epoch.check()
        self.store.replace(name, data)
        self.epoch.check()

    def _set_aside(self, name: str) -> None:
        """Move an object that cannot be used to ``discarded/``, where people find it."""
        try:
            data = self.store.read_large(name, records.MAX_FILE)
        except ObjectNotFound:
            return
        self.store.replace(f"discarded/e{self.epoch.number:010d}-{name.replace('/', '-')}", data)
        self.epoch.check()
        self.store.delete(name)

    # ------------------------------------------------------------- states

    def write_state(self, core: Mapping[str, Any], versions: Sequence[int]) -> str:
        """Make the core's state durable; returns the object's name. Raises ``HigherEpoch``, also where another syncer
        may not have seen the state, of which learners are then told nothing."""
        self.epoch.check()
        self._number += 1
        name = f"state/e{self.epoch.number:010d}-n{self._number:010d}.json"
        body = {"job": self.job, "epoch": self.epoch.number, "versions": list(versions), "core": core}
        self.store.replace(name, *pack_document(body))
        self.epoch.check()
        self._states.append((name, list(versions)))
        return name

    def write_manifest(self, core: Mapping[str, Any], versions: Sequence[int], optimizer: str) -> str:
        """A checkpoint: a state, and the records that go with it; returns the manifest's name."""
        state = self.write_state(core, versions)
        name = f"manifests/e{self.epoch.number:010d}-n{self._number:010d}.json"
        body = {
            "job": self.job,
            "time": time.time(),
            "epoch": self.epoch.number,
            "state": state,
            "versions": list(versions),
            "records": [self.reader.name_of(fragment, version) for fragment, version in enumerate(versions)],
            "initial": self.reader.initial,
            "optimizer": optimizer,
            "offers": self.store.list("offers"),
        }
        self.store.replace(name, *pack_document(body))
        return name

    # ------------------------------------------------------------- blobs and offers

    def spool_offer(self, header: PushHeader, norm: float, squares: Float64s, encoded: Array) -> None:
        """Make an offer durable, before it is acknowledged. ``encoded``: uint8, its values as they were received; the
        rest as in ``SpooledOffer``. Raises ``HigherEpoch``: a successor may have read the store before the offer was
        there, and then only the learner's next try brings it."""
        self.epoch.check()
        body = {"header": header_to_json(header), "norm": norm}
        arrays = {"squares": squares, "encoded": encoded}
        self.store.replace(offer_name(header), *records.pack("offer", body, arrays))
        self.epoch.check()

    def read_offer(self, header: PushHeader) -> Array:
        """A spooled offer's encoded values, uint8, verified; mapped from the disk where the store has files.

        Raises ``StoreUnusable`` if the store has lost or damaged it since.
        """
        name = offer_name(header)
        try:
            return self.reader.map_file(name, "offer")[1]["encoded"]
        except (ObjectNotFound, Damaged) as error:
            raise StoreUnusable(f"an offer that was acknowledged cannot be read: {name}: {error}") from error

    def write_blob(self, kind: str, blob: Array) -> str:
        """Keep bytes (uint8) as they are, e.g. an optimizer state; returns the name."""
        self._number += 1
        name = f"{kind}/e{self.epoch.number:010d}-n{self._number:010d}.rec"
        self.store.replace(name, *records.pack("blob", {}, {"blob": blob}))
        return name

    def write_report(self, text: bytes) -> None:
        """Keep the report of the job's end. Raises ``HigherEpoch``."""
        self.epoch.check()
        self.store.replace(REPORT, text)

    def read_report(self, outcome: str) -> Report | None:
        """The report of an end with this outcome; None: the store has none that can be read."""
        try:
            found = documents.read_document(Report, self.store.read(REPORT, MAX_REPORT))
        except (ObjectNotFound, OSError, ValueError):
            return None  # it is written anew, and a store that fails says so then
        return found if found.outcome == outcome else None

    # ------------------------------------------------------------- garbage

    def collect(self, optimizer: str) -> int:
        """Remove objects that no restart needs any more; returns how many. The tape must be flushed before.

        Raises ``HigherEpoch``, and never removes what a higher epoch has made: this syncer may have stood still since
        its last check.
        """
        self.epoch.check()
        manifests = self.store.list("manifests")
        kept_manifests: list[dict[str, Any]] = []
        doomed = manifests[: -self.keep] if len(manifests) > self.keep else []
        for name in manifests[-self.keep :]:
            try:
                kept_manifests.append(read_document(self.store, name))
            except Damaged:
                doomed.append(name)
        newest = self._states[-STATES_KEPT:]
        states = {name for name, _ in newest} | {m["state"] for m in kept_manifests}
        self._states = [s for s in self._states if s[0] in states]
        if len(newest) == STATES_KEPT:
            doomed += [name for name in self.store.list("state") if name not in states]
            floor = [min(versions) for versions in zip(*(v for _, v in newest), strict=False)]
            named = {name for m in kept_manifests for name in m["records"]}
            records_there = self.reader.versions()
            for fragment, least in enumerate(floor):
                # The newest stays, and the one before it.
                older = [v for v in records_there[fragment][:-2] if v < least]
                doomed += [name for v in older if (name := record_name(fragment, v)) not in named]
            doomed += self._doomed_initial(floor, records_there, named)
        optimizers = {optimizer, *(m["optimizer"] for m in kept_manifests)}
        doomed += [name for name in self.store.list("optimizer") if name not in optimizers]
        doomed = [name for name in doomed if epoch_of(name) <= self.epoch.number]
        for name in doomed:
            self.epoch.check()
            self.store.delete(name)
        return len(doomed)

    def _doomed_initial(self, floor: Sequence[int], there: Mapping[int, Sequence[int]], named: set[str]) -> list[str]:
        initial = self.reader.initial
        if initial is None:
            return []
        keep = {initial["layout"], initial["frozen"]}
        keep |= {copy_name(name) for name in keep if name} | named
        for fragment, name in enumerate(initial["fragments"]):
            # A state from before version 0 has no versions: one that had to wait may come after version 0.
            merges = len(there[fragment]) if fragment < len(floor) else 0
            if merges < 2 or floor[fragment] == 0:
                keep.add(name)
            if not merges:
                keep.add(copy_name(name))
        return [name for name in self.store.list("initial") if name not in keep]

    # ------------------------------------------------------------- restart

    def load(self) -> Restored:
        """Read everything that a start needs. Raises ``StoreUnusable``, ``FormatRefused``, OSError."""
        restored = Restored(layout=self.reader.layout())
        if self.reader.initial is not None:
            restored.frozen = self.reader.initial["frozen"]
            restored.frozen_digest = self.reader.initial["frozen_digest"]
        found = self.reader.newest(restored.layout)
        restored.core, restored.problems = found.core, found.problems
        if found.name:
            self._states = [(found.name, found.versions)]
            restored.problems += self._missing_state(found.name)
        restored.newest = [chain.newest for chain in found.chains]
        restored.newer = sorted((r for chain in found.chains for r in chain.newer), key=lambda r: r.number)
        restored.number = max((record.number for record in restored.newest), default=0)
        for fragment, chain in enumerate(found.chains):
            if chain.why:
                version = chain.newest.version
                message = f"fragment {fragment} continues from version {version}: {chain.why}"
                if chain.late:
                    log.warning("restoring: %s", message)  # as it should be: nobody was told of it
                else:
                    restored.problems.append(message)
                restored.discarded.append((fragment, version, chain.why))
                for above in chain.unusable:
                    self._set_aside(record_name(fragment, above))
        self._load_offers(restored)
        for name in reversed(self.store.list("optimizer")):
            try:
                restored.optimizer, restored.optimizer_bytes = name, records.blob_bytes(self.store, name)
                break
            except Damaged as error:  # newcomers can do without it
                restored.problems.append(f"{error}; no newcomer gets this optimizer state")
                self._set_aside(name)
        return restored

    def _missing_state(self, found: str) -> list[str]:
        """What there is to say if a manifest names a newer state than was found; a damaged one was told of."""
        for name in reversed(self.store.list("manifests")):
            try:
                state = read_document(self.store, name)["state"]
            except (Damaged, ObjectNotFound):
                continue
            if state > found and not self.store.exists(state):
                return [f"{state} is gone, which {name} names: going back to an older state"]
            break
        return []

    def newer_than(self, versions: Mapping[int, int], upto: Sequence[int]) -> list[MergeRecord]:
        """Records without arrays that are still there, above ``versions`` and up to ``upto``, by fragment, in the order
        of their merges. Of those that are damaged no restart needs any."""
        newer = []
        for fragment, version in self.reader.merges():
            if fragment < len(upto) and versions.get(fragment, 0) < version <= upto[fragment]:
                try:
                    newer.append(self.reader.header(fragment, version))
                except (Damaged, ObjectNotFound) as error:
                    log.error("the tape gets no line of a merge: %s", error)
        return sorted(newer, key=lambda record: record.number)

    def _load_offers(self, restored: Restored) -> None:
        """Verify every offer, one after the other, and keep all but its values."""
        for name in self.store.list("offers"):
            try:
                body, arrays = self.reader.map_file(name, "offer")
                header, norm = header_from_json(body["header"]), float(body["norm"])
                squares, size = arrays["squares"].copy(), arrays["encoded"].nbytes
            except ObjectNotFound:
                continue  # merged or replaced before this epoch began; the syncer before has removed it just now
            except (Damaged, KeyError, TypeError, ValueError) as error:
                restored.problems.append(f"{name}: {error}; the offer is lost")
                self._set_aside(name)
                continue
            restored.offers.append(SpooledOffer(header, norm, squares, size))
