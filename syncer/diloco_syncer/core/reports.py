"""What a learner's report changes: the ledger, its slot, its leases' cursors and the job's clock."""

from __future__ import annotations

from diloco_protocol.vocabulary import EventKind
from diloco_protocol.wire import limits
from diloco_protocol.wire.records import StepReport
from diloco_syncer.core.actions import Actions
from diloco_syncer.core.books.leases import MAX_BLOCK
from diloco_syncer.core.books.slots import Slot
from diloco_syncer.core.state import JobState


def find_nonsense(state: JobState, slot: Slot, report: StepReport) -> str:
    """What of a report cannot be true, whatever its learner did; empty: nothing.

    These bounds keep sums within 64 bits and every book of the ledger non-negative. They do not tell a learner that
    exaggerates from one that is fast.
    """
    if state.ledger is None:
        return ""
    trained = report.trained_tokens
    if report.trained_steps > limits.MAX_STEPS or report.slot_step - slot.step > limits.MAX_STEPS:
        return f"step {report.slot_step} after step {slot.step}: no slot gets so far"
    if report.trained_steps > report.slot_step:
        return f"{report.trained_steps} steps trained, in a slot at step {report.slot_step}"
    most = report.trained_steps * state.config.step_tokens
    if trained > most:
        return f"{trained} tokens in {report.trained_steps} steps: at most {most} are possible"
    if state.ledger.books[slot.index].trained + trained > limits.MAX_SLOT_TOKENS:
        return f"{trained} tokens: no slot trains so many"
    for fragment, row in enumerate(report.fragments):
        dropped = row.dropped_overlap + row.dropped_stale
        if row.tokens + row.confirmed_tokens + dropped > trained:
            return f"fragment {fragment}: the row tells of more tokens than the {trained} that were trained"
    return _find_unread(state, slot, report)


def _find_unread(state: JobState, slot: Slot, report: StepReport) -> str:
    """Why its cursors cannot be where the report says: a sequence has a token at least. A block more is let pass: what
    a tenure began with may be known late, and loops may count no tokens for a while."""
    if state.leases is None or report.tenure not in (0, slot.tenure):
        return ""
    read = slot.reported.sequences + state.leases.count_read(slot.index, report.cursors)
    if read <= report.trained_tokens + MAX_BLOCK:
        return ""
    return f"cursors: {read} sequences read, and {report.trained_tokens} tokens trained"


def apply_report(state: JobState, actions: Actions, slot: Slot, report: StepReport, now: float) -> bool:
    """Apply a report of the slot's process; False: it is older than the newest, or of another layout.

    A report is cumulative over the tenure, so a repeated or late one changes nothing.
    """
    ledger = state.ledger
    if ledger is None:
        return False
    trained, computed = ledger.trained(slot.index), ledger.compute_seconds(slot.index)
    if not ledger.apply_report(slot.index, report):
        return False
    ledger.drop_rolled_back(slot.index, state.epoch)
    moved = report.slot_step > slot.step or not slot.reported.advanced
    slot.advance(report.slot_step, len(state.versions), state.config.max_steps)
    slot.reported.step_at_seat = report.slot_step - report.trained_steps
    slot.step_seconds = report.step_seconds
    slot.reported.paused = report.paused
    slot.reported.diverged = report.diverged
    slot.reported.young_optimizer = report.young_optimizer
    if report.fresh_optimizer and not slot.reported.fresh_optimizer:
        slot.reported.fresh_optimizer = report.fresh_optimizer
        said = f"{slot.learner}: its optimizer begins fresh, with warm-up: {report.fresh_optimizer}"
        actions.record_event(EventKind.OPTIMIZER_FRESH, slot, said)
    if report.diverged:
        slot.loss = None
    elif report.loss == report.loss:  # NaN: the process has none yet
        slot.loss = report.loss
        slot.first_loss = report.loss if slot.first_loss is None else slot.first_loss
    state.advance_cursors(slot, report.cursors)
    if report.trained_steps:
        slot.reported.advanced = True
        slot.pushes.pace.begin(report.slot_step, now)
    if report.trained_steps and moved and not slot.holder.stepped:
        slot.holder.stepped = True
        actions.record_event(EventKind.FIRST_STEP, slot, f"{slot.learner} made its first step, {slot.step}")
    if ledger.trained(slot.index) > trained:
        state.clock.start(now)
        computed = ledger.compute_seconds(slot.index) - computed
        state.clock.advance(now, slot.step_seconds, computed, ledger.total_trained())
    return True
