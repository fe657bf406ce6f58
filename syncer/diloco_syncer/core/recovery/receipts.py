"""Receipts: what the ledger says of a fragment's version, kept by everybody who holds its bytes.

Theory of operation. A store may lose its newest records, and the state documents that go with them; a learner
still has the bytes of a version that was merged since. The bytes alone are not enough to go on from. They may
contain work that other learners still have above their bases: merged again it would count twice. And the ledger
would not know what it says it merged. So every version travels with a receipt: per slot, the tokens merged so
far and the newest push that was merged. Learners keep it unread and give it back with the bytes.

``apply_recovered_version`` puts a version and its receipt on top of a restored state. A slot is in one of two cases:

- Its open tenure is the one that the receipt names. The ledger learns what was merged of it. If that is more
  than the learner had reported in the restored state, the learner must have trained at least so much; its next
  report says how much.
- Its open tenure is another one: the restored state is older than the tenure. Then the tenure that the state
  knows is over, and ``close_superseded_tenures`` has closed it before any record was applied. Tokens of tenures
  that the state never saw count as trained as far as they are merged.

In the second case ``dropped["died"]`` may go negative while records are applied: tokens that were written off, or never
heard of, and then found merged are subtracted from it. ``count_unreported_tokens`` finally counts them as trained, so
that trained = merged + pending + dropped holds to the token, and merged is exactly what is in the parameters.

*The other way.* The store may lose the record of the very version that its state tells of, and go on from the record
before it. So of each fragment the state has the rows of that version, of the slots that the newest changed
(``remember_version``), and ``take_back_version`` puts the books there. A learner that holds the lost version brings
it back as any other; without one its tokens are pending or rolled back in tenures that are open, and ``died`` in those
that are over.

Example. The state knows slot 1 with 300 trained tokens, 200 of them merged in fragment 0. The receipt of the
recovered version says 500 merged, of the same tenure. The ledger then has merged 500 and trained 500; the
learner's next report says that it trained 520, and 20 are pending.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

from diloco_protocol.vocabulary import SlotState
from diloco_protocol.wire.records import FragmentReport, PushHeader, Receipt, SlotReceipt, StepReport
from diloco_syncer.core.books.ledger import Cell, Ledger
from diloco_syncer.core.books.slots import MergedPush, Slot
from diloco_syncer.core.state import JobState, VersionBefore

MOST_SLOTS = 4096  # more than a receipt has room for


def tenure_hash(state: JobState, slot: Slot) -> int:
    """The slot's open tenure in 64 bits: its first incarnation and its process, hashed; 0: none is open."""
    assert state.ledger
    first = state.ledger.books[slot.index].first_incarnation
    if not first:
        return 0
    digest = hashlib.sha256(f"{first}:{slot.holder.process}".encode()).digest()
    return int.from_bytes(digest[:8], "big") | 1


def make_receipt(state: JobState, fragment: int) -> Receipt:
    """Make the receipt of the fragment's present version: a row for every slot that was ever held or merged."""
    assert state.ledger
    cells = [(slot, state.ledger.books[slot.index].cells[fragment]) for slot in state.members.slots]
    # The restored state may be older than the slot's first process, whose merges are in records after it.
    return tuple(_row(state, slot, fragment) for slot, cell in cells if slot.holder.incarnation or cell.merged)


def _row(state: JobState, slot: Slot, fragment: int) -> SlotReceipt:
    assert state.ledger
    cell, newest = state.ledger.books[slot.index].cells[fragment], slot.pushes.merged.get(fragment, MergedPush())
    return SlotReceipt(
        slot.index,
        tenure_hash(state, slot),
        cell.merged,
        cell.tenure_merged,
        sequence=newest.sequence,
        version=newest.version,
        last_step=slot.merged_last_step.get(fragment, 0),
        compute_seconds=cell.compute_seconds,
    )


def remember_version(state: JobState, fragment: int, slots: Iterable[int]) -> None:
    """Keep what the books say of the fragment, before a later version changes it for these slots."""
    changed = [slot for index in sorted(set(slots)) if (slot := state.slot(index)) is not None]
    rows = tuple(_row(state, slot, fragment) for slot in changed)
    state.before[fragment] = VersionBefore(state.versions[fragment], rows)


def take_back_version(state: JobState, fragment: int, version: int) -> bool:
    """Put the books back to ``version`` of the fragment, which the store goes on from. False: they do not know that
    one. They are then as before the fragment's first merge, as with a store that came back empty."""
    assert state.rounds and state.ledger
    before = state.before[fragment]
    known = before.version == version < state.versions[fragment]
    rows = {row.slot: row for row in before.rows}
    nothing = SlotReceipt(0, 0, 0, 0, sequence=0, version=0, last_step=0, compute_seconds=0.0)
    for slot in state.members.slots:
        if not known or slot.index in rows:
            _take_back(state, slot, fragment, rows[slot.index] if known else nothing)
    state.merges -= state.versions[fragment] - (version if known else 0)
    # The marks stay: nobody is asked sooner for it.
    state.rounds.set_version(fragment, version if known else 0, ())
    state.before[fragment] = VersionBefore(-1, ())
    return known


def _take_back(state: JobState, slot: Slot, fragment: int, row: SlotReceipt) -> None:
    """Put one slot's books of a fragment back to a row that is older. What was merged since in the open tenure is
    pending again, or its learner says otherwise; what was in tenures that are over is dropped."""
    assert state.ledger
    book, cell = state.ledger.books[slot.index], state.ledger.books[slot.index].cells[fragment]
    tenure_tokens = row.tenure_tokens if row.tenure == tenure_hash(state, slot) else 0
    elsewhere = (cell.merged - row.merged_tokens) - (cell.tenure_merged - tenure_tokens)
    cell.dropped["died"] += elsewhere
    state.taken_back[slot.index, fragment] = elsewhere
    cell.merged, cell.tenure_merged, cell.compute_seconds = row.merged_tokens, tenure_tokens, row.compute_seconds
    book.forget_sums()
    slot.merged_last_step[fragment] = row.last_step
    slot.pushes.merged[fragment] = MergedPush(row.sequence, row.version) if tenure_tokens else MergedPush()


def hold_taken_back_offer(state: JobState, header: PushHeader) -> bool:
    """Hold an offer that was in a version which the store has lost, and that the store has again. False: it was not."""
    assert state.ledger
    place = header.slot, header.fragment
    if header.tokens > state.taken_back.get(place, 0):
        return False
    state.taken_back[place] -= header.tokens
    hold_unknown_offer(state.ledger, header)
    return True


def validate_receipt(state: JobState, fragment: int, version: int, rows: Receipt) -> str:
    """Why this cannot be the receipt of a later version in this store's lineage; empty: it can."""
    assert state.ledger
    if not rows:
        return "it has no receipt"
    seen: set[int] = set()
    for row in rows:
        # Slots that this store does not know are right: the job may have been scaled in the time that was lost.
        if row.slot >= MOST_SLOTS or row.slot in seen:
            return f"the receipt has a slot {row.slot} that cannot exist, or has it twice"
        seen.add(row.slot)
        if row.version > version:
            return f"the receipt contradicts itself about slot {row.slot}"
    by_slot = {row.slot: row for row in rows}
    for slot in state.members.slots:
        cell, row_ = state.ledger.books[slot.index].cells[fragment], by_slot.get(slot.index)
        if cell.merged > (row_.merged_tokens if row_ else 0):
            return f"the receipt has fewer merged tokens of slot {slot.index} than this store"
    return ""


def close_superseded_tenures(state: JobState, headers: Iterable[PushHeader], receipts: Iterable[Receipt]) -> None:
    """Close the tenures of the restored state that are over, as the headers of newer records and offers and the
    receipts of recovered versions show, and add the slots that these name. Call before any of them is applied;
    it changes nothing after a restart whose state is the newest."""
    if state.ledger is None:
        return
    headers, receipts = list(headers), list(receipts)
    named = [header.slot for header in headers] + [row.slot for rows in receipts for row in rows]
    state.members.add_retired_slots(1 + max(named, default=-1))
    state.ledger.add_slots(len(state.members.slots))
    over: dict[int, Slot] = {}
    for header in headers:
        slot = state.slot(header.slot)
        if slot is None or header.incarnation <= slot.holder.incarnation:
            continue
        state.members.next_incarnation = max(state.members.next_incarnation, header.incarnation + 1)
        if not _is_of_tenure(header, slot, state.ledger.books[slot.index].first_incarnation):
            over[slot.index] = slot
    for rows in receipts:
        for row in rows:
            slot = state.slot(row.slot)
            if slot is not None and row.tenure != tenure_hash(state, slot):
                over[slot.index] = slot
    for slot in over.values():
        state.ledger.close_tenure(slot.index, "died", ())
        state.slots_with_unknown_tenure.add(slot.index)
        # The slot is free: its former process is refused, and its leases go to others.
        slot.state = SlotState.EMPTY
        slot.holder.process = ""
        if state.leases:
            state.leases.return_leases(slot.index)


def _is_of_tenure(header: PushHeader, slot: Slot, tenure: int) -> bool:
    """Whether a push of an incarnation that the state lacks is of the slot's tenure in the state; 0: none is open."""
    if header.report.tenure and tenure:
        return header.report.tenure == tenure
    return bool(tenure) and header.report.slot_step - header.report.trained_steps == slot.reported.step_at_seat


def apply_recovered_version(
    state: JobState, fragment: int, version: int, origin: int, rows: Receipt, epoch: int
) -> None:
    """Go on from a version that came from a learner, which held it in epoch ``origin``; the store took it in
    ``epoch``. Call in the order of the records, after ``close_superseded_tenures``."""
    assert state.rounds and state.ledger
    before = state.rounds.versions[fragment]
    if version <= before:
        return
    state.lineage.mark_recovered(epoch)
    remember_version(state, fragment, (row.slot for row in rows))
    for row in rows:
        slot = state.slot(row.slot)
        if slot is None:
            continue
        same = row.tenure != 0 and row.tenure == tenure_hash(state, slot)
        _count_merged(state.ledger.books[slot.index].cells[fragment], row, same)
        state.ledger.books[slot.index].forget_sums()
        slot.step = max(slot.step, row.last_step)
        slot.mark_merged(fragment, row.last_step, state.config.max_steps)
        if same and row.sequence:
            slot.pushes.mark_merged(fragment, MergedPush(row.sequence, row.version))
    state.rounds.set_version(fragment, version, ((row.slot, row.last_step) for row in rows))
    state.merges += version - before
    for begun, versions in state.epochs:
        if begun > origin:  # epochs that began below this version are of one lineage with it now
            versions[fragment] = max(versions[fragment], version)


def _count_merged(cell: Cell, row: SlotReceipt, same: bool) -> None:
    """Count what the receipt says is merged. Tokens of other tenures than the open one were written off or never
    heard of: ``count_unreported_tokens`` makes that good."""
    of_tenure = max(0, row.tenure_tokens - cell.tenure_merged) if same else 0
    elsewhere = max(0, row.merged_tokens - cell.merged) - of_tenure
    # Negative: some of the open tenure's tokens were merged in versions that were given up since.
    cell.dropped["died" if elsewhere > 0 else "rolled-back"] -= elsewhere
    cell.merged = max(row.merged_tokens, cell.merged)
    cell.tenure_merged += of_tenure
    cell.compute_seconds = max(row.compute_seconds, cell.compute_seconds)


def hold_unknown_offer(ledger: Ledger, header: PushHeader) -> None:
    """Hold a spooled offer whose tokens the restored state never saw, or wrote off."""
    cell = ledger.books[header.slot].cells[header.fragment]
    cell.held[header.id] = header.tokens
    cell.dropped["died"] -= header.tokens
    ledger.books[header.slot].forget_sums()


def count_unreported_tokens(ledger: Ledger) -> None:
    """Count as trained what is merged, reported or not; call when all records are applied."""
    for book in ledger.books:
        unreported = max((-cell.dropped["died"] for cell in book.cells), default=0)
        if unreported > 0:
            book.trained += unreported
            for cell in book.cells:
                cell.dropped["died"] += unreported
            book.forget_sums()
        if not book.first_incarnation:
            continue
        nothing = StepReport(0, 0, 0, (FragmentReport(0, 0, 0, 0),) * ledger.fragments)
        report = book.report or nothing
        beyond = max(
            cell.tenure_merged - counts.confirmed_tokens - counts.tokens
            for cell, counts in zip(book.cells, report.fragments, strict=True)
        )
        if beyond > 0:
            rows = tuple(replace(counts, tokens=counts.tokens + beyond) for counts in report.fragments)
            book.report = replace(report, trained_tokens=report.trained_tokens + beyond, fragments=rows)
