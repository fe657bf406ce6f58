"""The collector of the core's actions.

Every part of the core is given the same ``Actions`` and adds to it what is to be done outside. ``Core``
hands the collected actions out after each event. Their order is the order of the calls of ``add``: the
shell carries them out one after the other, so whoever adds ``Persist`` before an answer makes sure that
the answer is sent only when the state behind it is durable.
"""

from __future__ import annotations

from diloco_protocol.vocabulary import EventKind
from diloco_syncer.core.books.slots import Slot
from diloco_syncer.core.events import Action, RecordEvent


class Actions:
    """Actions in the order in which they are to be carried out."""

    def __init__(self) -> None:
        self._collected: list[Action] = []

    def add(self, *actions: Action) -> None:
        self._collected += actions

    def record_event(self, kind: EventKind, slot: Slot | None, message: str, **details: object) -> None:
        """Record a transition for people; ``slot`` None: of the job as a whole."""
        index, incarnation = (-1, 0) if slot is None else (slot.index, slot.holder.incarnation)
        self.add(RecordEvent(kind, index, incarnation, message, details=dict(details)))

    def record_dropped(self, slot: Slot, tokens: int, reason: str) -> None:
        """Record that tokens of a slot are in no version and never will be; nothing where there are none."""
        if tokens:
            self.record_event(EventKind.DROPPED, slot, f"{tokens} tokens of {slot.learner} dropped ({reason})")

    def drain(self) -> list[Action]:
        """Hand over what was collected, and begin anew."""
        collected, self._collected = self._collected, []
        return collected
