"""Whose inner optimizer state a newcomer gets (algorithm.md section 8).

A newcomer requests a state once. The healthy learner with the most steps in its tenure is asked to upload its state,
for all who wait; if that fails or nothing of it comes for too long, the next one is asked; if there is none left, the
newcomer is told so. Where all learners were lost at once, some find their own state on a disk, and are healthy after
their first step. A newcomer that found none requests again, *patient*, and these are waited for. When all leave, the
state of one learner goes into the job's checkpoint in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco_protocol.vocabulary import SlotState
from diloco_syncer.core import events as ev
from diloco_syncer.core.actions import Actions
from diloco_syncer.core.state import JobState

CHECKPOINT = -1  # in the place of a newcomer's connection: the state is for the job's checkpoint


@dataclass(slots=True)
class DonorRequest:
    """A newcomer's request, or the checkpoint's; ``transfer`` 0: no donor is asked at the moment."""

    connection: int
    patience: float = 0.0  # until when those that are about to train are waited for
    transfer: int = 0
    donor: int = -1  # a connection
    deadline: float = 0.0
    tried: set[int] = field(default_factory=set)


@dataclass
class StateDonors:
    """Open requests for an inner optimizer state."""

    state: JobState
    actions: Actions
    _requests: dict[int, DonorRequest] = field(default_factory=dict)  # by the newcomer's connection
    _next_transfer: int = 1

    @property
    def checkpoint_pending(self) -> bool:
        """Whether a state for the job's checkpoint is still awaited."""
        return CHECKPOINT in self._requests

    def request(self, event: ev.PeerStateRequested, now: float) -> None:
        patience = now + self.state.config.peer_seconds if event.patient else now
        self._requests.setdefault(event.connection, DonorRequest(event.connection, patience))

    def forget_connection(self, connection: int) -> None:
        """The connection is closed: it needs no state, and will not upload one."""
        self._requests.pop(connection, None)
        for request in self._requests.values():
            if request.donor == connection:
                request.transfer = 0

    def received(self, transfer: int) -> None:
        for request in list(self._requests.values()):
            if transfer and request.transfer == transfer:
                self._answer(request.connection, transfer)

    def advanced(self, transfer: int, now: float) -> None:
        """Bytes of a state have come: those who wait for it wait on."""
        config = self.state.config
        for request in self._requests.values():
            if transfer and request.transfer == transfer:
                checkpoint = request.connection == CHECKPOINT
                patience = config.checkpoint_seconds if checkpoint else config.peer_seconds
                request.deadline = max(request.deadline, now + patience)

    def failed(self, donor: int, transfer: int) -> None:
        """The donor (a connection) has no state, or its upload broke: the next one is asked. What others say of the
        transfer changes nothing."""
        for request in self._requests.values():
            if transfer and (request.donor, request.transfer) == (donor, transfer):
                request.transfer = 0

    def request_for_checkpoint(self, now: float) -> None:
        """Ask one healthy learner for the state that the job's checkpoint keeps: one, once."""
        donor = self._healthiest(set())
        if donor is not None:
            self._requests[CHECKPOINT] = DonorRequest(CHECKPOINT)
            self._ask(self._requests[CHECKPOINT], donor, now + self.state.config.checkpoint_seconds)

    def advance(self, now: float) -> None:
        """Ask the next donor wherever none is asked or the one that was has let its time pass."""
        somebody_begins = self._somebody_begins()
        for request in list(self._requests.values()):
            if request.transfer and now < request.deadline:
                continue
            if not self.state.is_ending and self._share_transfer(request, now):
                continue
            donor = None if self.state.is_ending else self._healthiest(request.tried | set(self._requests))
            if donor is None and now < request.patience and somebody_begins:
                request.transfer = 0
            elif donor is None:
                self._answer(request.connection, 0)
            else:
                self._ask(request, donor, now + self.state.config.peer_seconds)

    def _share_transfer(self, request: DonorRequest, now: float) -> bool:
        """Have the newcomer wait for the state that another one waits for; False: there is none for it."""
        for other in self._requests.values():
            asked = other.transfer and now < other.deadline and other.donor not in request.tried
            if asked and other.donor not in self._requests and CHECKPOINT not in (other.connection, request.connection):
                request.tried.add(other.donor)
                request.transfer, request.donor, request.deadline = other.transfer, other.donor, other.deadline
                return True
        return False

    def _ask(self, request: DonorRequest, donor: int, deadline: float) -> None:
        request.tried.add(donor)
        request.transfer, request.donor, request.deadline = self._next_transfer, donor, deadline
        self._next_transfer += 1
        checkpoint = request.connection == CHECKPOINT
        self.actions.add(ev.RequestPeerState(donor, request.transfer, checkpoint))

    def _answer(self, connection: int, transfer: int) -> None:
        """The request is over: its newcomer is told what to download, 0: nothing."""
        del self._requests[connection]
        if connection != CHECKPOINT:
            self.actions.add(ev.OfferPeerState(connection, transfer))

    def _somebody_begins(self) -> bool:
        """Whether a learner that asks for no state is about to make its first step."""
        return any(
            slot.occupied and slot.connection not in (None, *self._requests) and not slot.advanced
            for slot in self.state.members.slots
        )

    def _healthiest(self, excluded: set[int]) -> int | None:
        """The connection of the active learner with the most steps in its tenure."""
        healthy = [
            (slot.step - slot.step_at_seat, -slot.index, slot.connection)
            for slot in self.state.members.slots
            if slot.state in (SlotState.ACTIVE, SlotState.DRAINING)
            and slot.ready
            and slot.advanced
            and slot.connection is not None
            and slot.connection not in excluded
        ]
        return max(healthy)[2] if healthy else None
