"""Receipts: what the ledger says of a fragment's version, kept by whoever holds its bytes.

Theory of operation. A store may lose its newest records, and the state documents
that go with them; a learner still has the bytes of a version that was merged
since. The bytes alone are not enough to go on from. Some of the work that other
learners have above their bases may be in them: merged again it would count twice;
and the ledger would not know what it says it merged. So every version travels
with a receipt: per slot, the tokens merged so far, and the newest push that was
merged. Learners keep it unread and give it back with the bytes.

``take_over`` puts a version and its receipt on top of a restored state. A slot's
tenure is one of two:

- it is still the tenure that the receipt tells of: the ledger learns what was
  merged of it. If that is more than its learner had told in that state, it must have
  trained at least so much; its next report will say how much.
- it is another: the state is older than the tenure. The tenure that it knows is
  over (``foresee`` closes it, before any record is applied), and tokens of tenures
  that it never heard of are counted trained as far as they are merged.

For the latter the drops for ``died`` serve as the account between fragments: what was merged
after all is taken from them, and ``Ledger.balance`` evens them out at the end. So
trained = merged + pending + dropped holds to the token, and merged is exactly what is in Θ.

Plain code, driven by ``core``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from diloco_protocol.vocabulary import SlotState
from diloco_syncer.core.events import FragmentCounts, MergedPush, PushHeader, ReportCounts
from diloco_syncer.core.members.slots import Slot
from diloco_syncer.core.merging.ledger import Cell, Ledger
from diloco_syncer.core.state import JobState

MOST_SLOTS = 4096  # more than a receipt has room for


@dataclass(frozen=True, slots=True)
class SlotRow:
    """One slot's row of a receipt (sync.proto SlotReceipt)."""

    slot: int
    tenure: int  # 64 bits; 0: none is open
    merged_tokens: int
    tenure_tokens: int
    sequence: int
    version: int
    last_step: int
    compute_seconds: float


Rows = tuple[SlotRow, ...]


def tenure_of(job: JobState, slot: Slot) -> int:
    """The slot's open tenure in 64 bits, the same for no other process or seat; 0: none."""
    assert job.ledger
    first = job.ledger.books[slot.index].first_incarnation
    if not first:
        return 0
    digest = hashlib.sha256(f"{first}:{slot.process}".encode()).digest()
    return int.from_bytes(digest[:8], "big") | 1


def receipt(job: JobState, fragment: int) -> Rows:
    """The receipt of the fragment's present version."""
    assert job.ledger
    rows = []
    for slot in job.members.slots:
        cell = job.ledger.books[slot.index].cells[fragment]
        # A state may be older than a slot's first process, whose merges are in records after it.
        if not slot.incarnation and not cell.merged:
            continue
        newest = slot.merged.get(fragment, MergedPush())
        rows.append(
            SlotRow(
                slot.index,
                tenure_of(job, slot),
                cell.merged,
                cell.tenure_merged,
                newest.sequence,
                newest.version,
                slot.merged_last_step.get(fragment, 0),
                cell.compute_seconds,
            )
        )
    return tuple(rows)


def contradiction(job: JobState, fragment: int, version: int, rows: Sequence[SlotRow]) -> str:
    """Why this cannot be the receipt of a later version in this store's history; empty: it can."""
    assert job.ledger
    if not rows:
        return "it has no receipt"
    seen: set[int] = set()
    for row in rows:
        # Not only of this store's slots: the job may have been scaled in the time that was lost.
        if row.slot >= MOST_SLOTS or row.slot in seen:
            return f"the receipt tells of a slot {row.slot} that cannot exist, or twice of it"
        seen.add(row.slot)
        if row.version > version:
            return f"the receipt contradicts itself about slot {row.slot}"
    told = {row.slot: row for row in rows}
    for slot in job.members.slots:
        cell, row_ = job.ledger.books[slot.index].cells[fragment], told.get(slot.index)
        if cell.merged > (row_.merged_tokens if row_ else 0):
            return f"the receipt has fewer merged tokens of slot {slot.index} than this store"
    return ""


def foresee(job: JobState, headers: Iterable[PushHeader], receipts: Iterable[Rows]) -> None:
    """Before records and offers that are newer than the state are applied: end the tenures that
    are over by what they tell, and know of all slots that they tell of. Nothing of it is left to do
    after a restart whose state is the newest."""
    if job.ledger is None:
        return
    headers, receipts = list(headers), list(receipts)
    told = [header.slot for header in headers] + [row.slot for rows in receipts for row in rows]
    job.members.grow(1 + max(told, default=-1))
    job.ledger.grow(len(job.members.slots))
    over: dict[int, Slot] = {}
    for header in headers:
        slot = job.slot(header.slot)
        if slot is None or header.incarnation <= slot.incarnation:
            continue
        job.members.next_incarnation = max(job.members.next_incarnation, header.incarnation + 1)
        began = header.report.slot_step - header.report.trained_steps
        if began != slot.step_at_seat or not job.ledger.books[slot.index].first_incarnation:
            over[slot.index] = slot
    for rows in receipts:
        for row in rows:
            slot = job.slot(row.slot)
            if slot is not None and row.tenure != tenure_of(job, slot):
                over[slot.index] = slot
    for slot in over.values():
        job.ledger.close_tenure(slot.index, "died", ())
        job.forgotten.add(slot.index)
        # Nobody has it, so that whoever had it is refused, and what it had is leased on.
        slot.state, slot.process = SlotState.EMPTY, ""
        if job.leases:
            job.leases.give_back(slot.index)


def take_over(job: JobState, fragment: int, version: int, origin: int, rows: Rows, epoch: int) -> None:
    """The store has this version from a learner, which had it in epoch ``origin``, and took it in
    ``epoch``; go on from it.

    Call in the order of the records, after ``foresee``."""
    assert job.rounds and job.ledger
    before = job.rounds.versions[fragment]
    if version <= before:
        return
    job.history.take(epoch)
    for row in rows:
        slot = job.slot(row.slot)
        if slot is None:
            continue
        same = row.tenure != 0 and row.tenure == tenure_of(job, slot)
        _count(job.ledger.books[slot.index].cells[fragment], row, same)
        slot.step = max(slot.step, row.last_step)
        slot.merged_last_step[fragment] = max(row.last_step, slot.merged_last_step.get(fragment, 0))
        if same and row.sequence:
            slot.merged[fragment] = MergedPush(row.sequence, row.version)
            accepted = slot.accepted_sequence.get(fragment, 0)
            slot.accepted_sequence[fragment] = max(accepted, row.sequence)
    job.rounds.took_over(fragment, version, {row.slot: row.last_step for row in rows})
    job.merges += version - before
    for epoch, versions in job.epochs:
        if epoch > origin:  # what was begun below it is one history with it now
            versions[fragment] = max(versions[fragment], version)


def _count(cell: Cell, row: SlotRow, same: bool) -> None:
    """The ledger learns what is merged. What is not of the open tenure was written off, or never
    heard of: ``balance`` makes that good."""
    of_tenure = max(0, row.tenure_tokens - cell.tenure_merged) if same else 0
    elsewhere = max(0, row.merged_tokens - cell.merged) - of_tenure
    # Less than nothing: of the open tenure's some were merged in versions that were given up since.
    cell.dropped["died" if elsewhere > 0 else "rolled-back"] -= elsewhere
    cell.merged = max(row.merged_tokens, cell.merged)
    cell.tenure_merged += of_tenure
    cell.compute_seconds = max(row.compute_seconds, cell.compute_seconds)


def hold(ledger: Ledger, header: PushHeader) -> None:
    """A spooled offer of a tenure that the restored state has not heard of."""
    cell = ledger.books[header.slot].cells[header.fragment]
    cell.held[header.id] = header.tokens
    cell.dropped["died"] -= header.tokens


def balance(ledger: Ledger) -> None:
    """When all is applied: what is merged was trained, told or not."""
    for book in ledger.books:
        unheard = max((-cell.dropped["died"] for cell in book.cells), default=0)
        if unheard > 0:
            book.trained += unheard
            for cell in book.cells:
                cell.dropped["died"] += unheard
        if not book.first_incarnation:
            continue
        nothing = ReportCounts(0, 0, 0, (FragmentCounts(0, 0, 0, 0),) * ledger.fragments)
        told = book.report or nothing
        beyond = max(
            cell.tenure_merged - counts.confirmed_tokens - counts.tokens
            for cell, counts in zip(book.cells, told.fragments, strict=True)
        )
        if beyond > 0:
            rows = tuple(replace(counts, tokens=counts.tokens + beyond) for counts in told.fragments)
            book.report = replace(told, trained_tokens=told.trained_tokens + beyond, fragments=rows)
