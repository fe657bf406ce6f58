"""Audits a run's store: the tape, the newest state's books and the records, each by itself and against the others.

Reads the store beside whoever writes it. The state is read first, then the names of the records, then the tape, so a
run that goes on meanwhile only makes the tape longer; a record that is removed meanwhile is not missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from diloco_syncer.audit.tape_audit import CHAIN, STEPS, VERSIONS, WEIGHTS, TapeAudit
from diloco_syncer.core.books.ledger import Ledger
from diloco_syncer.store.base import ObjectNotFound, Store
from diloco_syncer.store.documents import read_document
from diloco_syncer.store.records import Damaged, theta_digest
from diloco_syncer.store.restore import StoreReader, StoreUnusable
from diloco_syncer.store.tape import MAX_SEGMENT, first_line_of, segment_names

RECORDS, BOOKS = "records", "books"


@dataclass(frozen=True, slots=True)
class Check:
    """What was checked. ``holds`` None: it could not be; ``said``: in words, what was seen; ``wrong``: each fault."""

    name: str
    holds: bool | None
    said: str
    wrong: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Audit:
    """An audit's outcome. ``events``: transitions on the tape, by kind; ``refused``: uploads, by reason."""

    job: str
    merges: int
    epochs: tuple[int, int] | None
    checks: tuple[Check, ...]
    events: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        return not any(check.wrong for check in self.checks)


def tape_lines(store: Store) -> Iterator[tuple[int, bytes, bool]]:
    """(number of the segment's first line, line, whether it is the segment's first) of the whole tape, in order. A last
    line that is being written is left out."""
    names = segment_names(store)
    for name in names:
        lines = store.read(name, MAX_SEGMENT).splitlines(keepends=True)
        if name == names[-1] and lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        for place, raw in enumerate(lines):
            yield first_line_of(name), raw, place == 0


def audit_tape(store: Store, audit: TapeAudit) -> TapeAudit:
    """Let ``audit`` read the store's tape."""
    for first, raw, is_head in tape_lines(store):
        if is_head:
            audit.begin_segment(first)
        audit.read_line(raw, is_head)
    return audit


def audit_store(store: Store, job: str, progress: Callable[[str], None] = lambda doing: None) -> Audit:
    """Audit the store of the job ``job``; blocks. ``progress`` is told what is being read. Raises OSError,
    ``FormatRefused``."""
    records: list[str] = []
    reader = StoreReader(store, job)
    try:
        layout = reader.layout()
    except StoreUnusable as error:
        layout = None
        records.append(str(error))
    state = _newest_state(store, records)
    versions = list(state["versions"]) if state is not None else []
    there = frozenset(reader.merges())
    progress("the tape")
    tape = audit_tape(store, TapeAudit(versions, there))
    read = _audit_records(reader, there, tape, wrong=records, progress=progress)
    if layout is not None:
        for fragment in range(len(layout)):
            _read_version_0(reader, fragment, records)
    checks = [*_tape_checks(tape), _check(RECORDS, f"{read} are whole, and are what the tape says", records)]
    checks.append(_audit_books(state, tape))
    events = dict(sorted(tape.events.items()))
    return Audit(job, tape.merges, tape.epochs, tuple(checks), events=events, refused=tape.refused)


def _check(name: str, said: str, wrong: list[str]) -> Check:
    return Check(name, not wrong, f"{len(wrong)} wrong" if wrong else said, tuple(wrong))


def _tape_checks(tape: TapeAudit) -> list[Check]:
    begins = f", from line {tape.first} on" if tape.first > 1 else ""
    lost = ""
    if tape.discarded or tape.taken_back:
        lost = f"; {tape.discarded} were lost, {tape.taken_back} times a learner gave a version back"
    unweighed = f", but of {tape.unweighed} merges the settings are not known" if tape.unweighed else ""
    said = {
        CHAIN: f"{tape.lines - tape.first + 1} lines in {tape.segments} segments{begins}",
        VERSIONS: f"{tape.merges} merges without a gap{lost}",
        WEIGHTS: f"they follow from tokens and steps{unweighed}",
        STEPS: "no learner's step is twice in a fragment",
    }
    return [_check(name, words, [why for check, why in tape.wrong if check == name]) for name, words in said.items()]


def _newest_state(store: Store, wrong: list[str]) -> dict[str, Any] | None:
    """The newest state that can be read, as a restart would take it."""
    for name in reversed(store.list("state")):
        try:
            return read_document(store, name)
        except Damaged as error:
            wrong.append(str(error))
        except ObjectNotFound:  # a running syncer removed it
            continue
    return None


def _audit_records(
    reader: StoreReader,
    there: frozenset[tuple[int, int]],
    tape: TapeAudit,
    wrong: list[str],
    progress: Callable[[str], None],
) -> int:
    """Verify every merge's record; returns how many there were."""
    read = 0
    for fragment, version in sorted(there):
        name = reader.name_of(fragment, version)
        progress(name)
        try:
            record = reader.record(fragment, version)
        except ObjectNotFound:
            continue
        except Damaged as error:
            wrong.append(str(error))
            continue
        read += 1
        if theta_digest(record.theta) != record.digest:
            wrong.append(f"{name}: its parameters are not those of its digest")
        result = tape.results.get((fragment, version))
        # What is above the tape's end is a merge whose line a crash took; what is below it and lacks, was discarded.
        if result not in (None, record.digest):
            wrong.append(f"{name}: the tape has another digest of this version")
    return read


def _read_version_0(reader: StoreReader, fragment: int, wrong: list[str]) -> None:
    try:
        reader.record(fragment, 0)
    except Damaged as error:
        wrong.append(str(error))
    except ObjectNotFound:  # of use until the first merge, and removed then
        pass


def _audit_books(state: dict[str, Any] | None, tape: TapeAudit) -> Check:
    """The newest state's ledger: trained = merged + pending + dropped, and merged as the tape says."""
    if state is None or state["core"]["core"]["job"]["ledger"] is None:
        return Check(BOOKS, None, "there is no state with books yet")
    ledger = Ledger.from_json(len(state["versions"]), state["core"]["core"]["job"]["ledger"])
    wrong, uncompared = list[str](), 0
    for slot in range(len(ledger.books)):
        wrong += ledger.imbalances(slot)
    for fragment in range(ledger.fragments):
        merged = tape.merged_tokens(fragment)
        if merged is None or tape.version(fragment) < state["versions"][fragment]:  # in a bucket lines come later
            uncompared += 1
            continue
        for slot in range(max([len(ledger.books), *(slot + 1 for slot in merged)])):
            booked = ledger.merged(slot, fragment) if slot < len(ledger.books) else 0
            taped = merged.get(slot, 0)
            if booked != taped:
                wrong.append(f"slot {slot} fragment {fragment}: {booked} tokens merged, and {taped} by the tape")
    words = f"{ledger.total_trained():,} tokens trained = merged + pending + dropped in each fragment"
    if uncompared:
        words += f"; of {uncompared} fragments the tape does not know all merges, so merged is not compared"
    else:
        words += ", and merged as on the tape"
    return _check(BOOKS, words, wrong)
