"""Whose inner optimizer state a newcomer gets (algorithm.md section 8).

A newcomer asks once. The healthy learner with the longest tenure is asked to
upload its state; if it does not in time, the next; if there is none, the
newcomer is told so and starts afresh. When all leave, one learner's state goes
into the job's checkpoint in the same way. Plain code.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco_protocol.vocabulary import SlotState
from diloco_syncer.core import events as ev
from diloco_syncer.core.events import Action
from diloco_syncer.core.members.slots import SlotTable


@dataclass(slots=True)
class DonorRequest:
    """A newcomer's request; ``transfer`` 0: nobody is asked at the moment."""

    connection: int
    transfer: int = 0
    source: int = -1
    deadline: float = 0.0
    tried: set[int] = field(default_factory=set)


class StateDonors:
    """Open requests. ``patience`` and ``checkpoint_patience``: seconds for one answer."""

    def __init__(self, patience: float, checkpoint_patience: float) -> None:
        self.patience = patience
        self.checkpoint_patience = checkpoint_patience
        self.wants: dict[int, DonorRequest] = {}
        self.next_transfer = 1
        self.checkpoint_transfer = 0
        self.checkpoint_source = -1
        self.checkpoint_deadline = 0.0

    @property
    def checkpoint_pending(self) -> bool:
        return self.checkpoint_transfer != 0

    def want(self, connection: int, now: float) -> None:
        self.wants.setdefault(connection, DonorRequest(connection))

    def forget(self, connection: int) -> None:
        """The connection is gone: it wants nothing, and will not answer."""
        self.wants.pop(connection, None)
        for want in self.wants.values():
            if want.source == connection:
                want.transfer = 0
        if self.checkpoint_source == connection:
            self.checkpoint_transfer = 0

    def arrived(self, transfer: int) -> list[Action]:
        if transfer == self.checkpoint_transfer:
            self.checkpoint_transfer = 0
            return []
        for want in list(self.wants.values()):
            if transfer and want.transfer == transfer:
                del self.wants[want.connection]
                return [ev.OfferPeerState(want.connection, transfer)]
        return []

    def failed(self, transfer: int) -> None:
        """That peer has none, or its upload broke: ask the next."""
        if transfer == self.checkpoint_transfer:
            self.checkpoint_transfer = 0
        for want in self.wants.values():
            if want.transfer == transfer:
                want.transfer = 0

    def checkpoint(self, members: SlotTable, now: float) -> list[Action]:
        """Ask one healthy learner for the state that the job's checkpoint keeps."""
        source = self._healthiest(members, set())
        if source is None:
            return []
        self.checkpoint_transfer, self.checkpoint_source = self._number(), source
        self.checkpoint_deadline = now + self.checkpoint_patience
        return [ev.RequestPeerState(source, self.checkpoint_transfer, checkpoint=True)]

    def advance(self, members: SlotTable, closing: bool, now: float) -> list[Action]:
        out: list[Action] = []
        if self.checkpoint_pending and now >= self.checkpoint_deadline:
            self.checkpoint_transfer = 0
        for want in list(self.wants.values()):
            if want.transfer and now < want.deadline:
                continue
            source = None if closing else self._healthiest(members, want.tried | set(self.wants))
            if source is None:
                del self.wants[want.connection]
                out.append(ev.OfferPeerState(want.connection, 0))
                continue
            want.tried.add(source)
            want.transfer, want.source, want.deadline = self._number(), source, now + self.patience
            out.append(ev.RequestPeerState(source, want.transfer))
        return out

    def _number(self) -> int:
        self.next_transfer += 1
        return self.next_transfer - 1

    def _healthiest(self, members: SlotTable, but: set[int]) -> int | None:
        """The connection of the active learner with the most steps in its tenure."""
        healthy = [
            (slot.step - slot.step_at_seat, -slot.index, slot.connection)
            for slot in members.slots
            if slot.state in (SlotState.ACTIVE, SlotState.DRAINING)
            and slot.ready
            and slot.advanced
            and slot.connection is not None
            and slot.connection not in but
        ]
        return max(healthy)[2] if healthy else None
