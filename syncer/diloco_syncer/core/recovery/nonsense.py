"""Repairs a restored state that holds what no learner can truly have said.

Such numbers are refused where they come in (``reports.py``, ``merging/push_checks.py``). A state that took them
in before would end the syncer at each start, or keep honest learners out for good. What is repaired loses its
history and nothing else: the parameters are what they are.
"""

from __future__ import annotations

from dataclasses import astuple

from diloco_protocol.wire import limits
from diloco_syncer.core.books.ledger import SlotBook
from diloco_syncer.core.books.slots import PushHistory
from diloco_syncer.core.state import JobState

SANE_STEP = 1 << 48  # of a slot; far from where steps stop counting, and far beyond any job


def repair_state(state: JobState) -> list[str]:
    """Repair a state to which all records were applied; returns a sentence for each repair."""
    repairs = []
    if state.ledger is not None:
        for index, book in enumerate(state.ledger.books):
            if _is_nonsense(book):
                _repair_book(book)
                repairs.append(f"slot {index}: its ledger held impossible numbers of tokens, which are dropped")
    repairs += _repair_steps(state)
    members = state.members
    if members.next_incarnation > SANE_STEP:
        members.next_incarnation = 1 + max(
            (s.holder.incarnation for s in members.slots if s.holder.incarnation < SANE_STEP), default=0
        )
        repairs.append(f"the next incarnation is {members.next_incarnation}: the one before was impossible")
    if state.leases is not None and state.leases.sequences > limits.MAX_SEQUENCES:
        repairs.append(f"the data set had {state.leases.sequences} sequences: the next learner says how many it has")
        state.leases = None
    if state.scores.drop_impossible(state.ledger.total_trained() if state.ledger is not None else 0):
        repairs.append("the curve of losses had impossible points, or too many")
    return repairs


def _is_nonsense(book: SlotBook) -> bool:
    counts = [book.trained]
    if book.report is not None:
        counts.append(book.report.trained_tokens)
        counts += [count for row in book.report.fragments for count in astuple(row)]
    for cell in book.cells:
        counts += [cell.merged, cell.tenure_merged, *cell.dropped.values(), *cell.held.values()]
    return any(abs(count) > limits.MAX_SLOT_TOKENS for count in counts)


def _repair_book(book: SlotBook) -> None:
    """Forget what is open, keep what is sane of what was merged, and count the rest of the trained as dropped: so that
    trained = merged + pending + dropped."""
    book.report = None
    for cell in book.cells:
        cell.merged = cell.merged if 0 <= cell.merged <= limits.MAX_SLOT_TOKENS else 0
        cell.tenure_merged = 0
        cell.held.clear()
    merged = max((cell.merged for cell in book.cells), default=0)
    book.trained = max(merged, book.trained if book.trained <= limits.MAX_SLOT_TOKENS else 0)
    for cell in book.cells:
        cell.dropped.clear()
        cell.dropped["died"] = book.trained - cell.merged


def _repair_steps(state: JobState) -> list[str]:
    slots = state.members.slots
    sane = max((slot.step for slot in slots if slot.step <= SANE_STEP), default=0)
    repairs = []
    for slot in slots:
        numbers = [slot.step, slot.reported.step_at_seat, *slot.merged_last_step.values()]
        numbers += [push.sequence for push in slot.pushes.merged.values()]
        if max(map(abs, numbers)) <= SANE_STEP:
            continue
        slot.step = slot.reported.step_at_seat = sane
        slot.uncounted_steps = slot.unmerged_parts = 0
        if state.rounds is not None:
            state.rounds.begin_progress(slot.index, sane)
        slot.merged_last_step = {p: min(step, sane) for p, step in slot.merged_last_step.items()}
        slot.pushes = PushHistory()
        repairs.append(f"slot {slot.index}: its steps were impossible; it continues at step {sane}")
    return repairs
