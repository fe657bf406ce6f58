"""Learners that train, and never finish a first step: what is the matter with their loop, told once and in the status.

A loop that is given one batch after the other and never calls ``learner.after_step`` looks healthy: it holds its slot,
its heartbeats come, and nothing hangs. Its reports count the batches that it was given since its last step, which tell
it from a slow first step: compiling a model takes minutes, and one batch. Where there is no such count to go by, only
time tells, and what is said leaves room for either.

Nothing is done about it: the learner's own watchdog ends what hangs (``learners.stallSeconds``).

Example. A loop asks for its ninth batch within half a minute, and slot 0 has made no step: the event ``no-steps`` says
so, and ``slots[0].problem`` until the first step.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco_protocol.common.first_step import BATCHES_SECONDS, MANY_BATCHES, no_step_text
from diloco_protocol.vocabulary import EventKind, JobPhase, SlotState
from diloco_syncer.core.actions import Actions
from diloco_syncer.core.books.slots import Slot
from diloco_syncer.core.state import JobState

LONG_SECONDS = 300.0
"""Longer than most first steps take. Half of the least time after which a learner's watchdog ends it."""


@dataclass
class FirstSteps:
    """Watches over slots whose learner could train and has not made a step since it was given the slot."""

    state: JobState
    actions: Actions

    def advance(self, now: float) -> None:
        training = self.state.phase in (JobPhase.TRAINING, JobPhase.HOLDING)
        for slot in self.state.members.slots:
            can_step = training and slot.state is SlotState.ACTIVE and slot.holder.ready
            if not can_step or slot.holder.stepped:
                slot.told.stepless_since, slot.told.problem = None, ""
                continue
            if slot.told.stepless_since is None:
                slot.told.stepless_since = now
            problem = _problem(slot, now - slot.told.stepless_since)
            if problem and not slot.told.problem:
                self.actions.record_event(EventKind.NO_STEPS, slot, f"{slot.learner}: {problem}")
            slot.told.problem = slot.told.problem or problem


def _problem(slot: Slot, seconds: float) -> str:
    if slot.reported.batches >= MANY_BATCHES and seconds >= BATCHES_SECONDS:
        return no_step_text(slot.reported.batches)
    if seconds >= LONG_SECONDS:
        return (
            f"no step was finished for {seconds:.0f} s: a slow first step, or a loop that hangs or never calls "
            "learner.after_step()"
        )
    return ""
