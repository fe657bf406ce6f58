"""Whose inner optimizer state a newcomer gets (algorithm.md section 8).

A newcomer requests a state once. The healthy learner with the most steps in its tenure is asked to upload its state,
for all who wait; if that fails or nothing moves for too long, the next one is asked; if there is none left, the
newcomer is told so. An upload goes on though the newcomer's session breaks, and whoever requests next shares it. One
that breaks with its donor's session goes on too: if bytes of it have come in that session and the donor's process is
back before nothing has moved for too long, it is asked for the rest, under the same number. No slot is asked for more
than ``MOST_TRIES`` others. One whose optimizer began fresh within the job is not asked before it is beyond its warm-up.

Where all learners ended at once, some find their own state on a disk, and are healthy after their first step. A
newcomer that found none requests again, *patient*. It waits for ``rejoin_seconds`` at most: for learners that were
heard within that time and are not back yet, and for those that are back and have not trained. When no better one can
come any more it gets a young state rather than none.

When all leave, the state of one learner goes into the job's checkpoint in the same way.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from diloco_protocol.vocabulary import SlotState
from diloco_syncer.core import events as ev
from diloco_syncer.core.actions import Actions
from diloco_syncer.core.state import JobState

CHECKPOINT = -1  # in the place of a newcomer's connection: the state is for the job's checkpoint
MOST_TRIES = 3  # of one slot, for one request


@dataclass(slots=True)
class DonorRequest:
    """A newcomer's request, or the checkpoint's; ``transfer`` 0: no donor is asked at the moment."""

    connection: int
    patient: bool = False  # no disk had one
    until: float = 0.0  # when those that may bring one are waited for no more
    transfer: int = 0
    donor: int = -1  # a connection
    process: str = ""  # the donor's
    came: bool = False  # bytes have, since the donor was asked
    is_away: bool = False  # the donor's session broke, and it may go on in another
    deadline: float = 0.0
    tried: set[int] = field(default_factory=set)
    tries: Counter[int] = field(default_factory=Counter)  # by slot


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
        until = now + self.state.config.rejoin_seconds
        self._requests.setdefault(event.connection, DonorRequest(event.connection, event.patient, until))

    def forget_connection(self, connection: int) -> None:
        """The connection is closed: it will not upload a state. One that is under way to it goes on, as nobody's
        request, for its newcomer may be back."""
        broken = self._requests.pop(connection, None)
        for request in self._requests.values():
            if request.donor == connection:
                if request.came:
                    request.is_away = True
                else:
                    request.transfer = 0
        if broken is not None and broken.transfer and broken.donor != connection:
            nobody = CHECKPOINT - broken.transfer
            self._requests[nobody] = replace(broken, connection=nobody)

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
                request.came = True

    def failed(self, donor: int, transfer: int) -> None:
        """The donor (a connection) has no state, or its upload broke: the next one is asked. What others say of the
        transfer changes nothing."""
        for request in self._requests.values():
            if transfer and (request.donor, request.transfer) == (donor, transfer):
                request.transfer = 0

    def request_for_checkpoint(self, now: float) -> None:
        """Ask one healthy learner for the state that the job's checkpoint keeps: one, once."""
        donor = self._find_donor(set(), young=True)
        if donor is not None:
            self._requests[CHECKPOINT] = DonorRequest(CHECKPOINT)
            self._ask(self._requests[CHECKPOINT], donor, now + self.state.config.checkpoint_seconds)

    def advance(self, now: float) -> None:
        """Ask the next donor wherever none is asked or the one that was has let its time pass."""
        another_may_come = self._another_may_come(now)
        for request in list(self._requests.values()):
            if request.transfer and request.is_away:
                self._await_donor(request, now)
            if request.transfer and now < request.deadline:
                continue
            if request.connection < CHECKPOINT:
                del self._requests[request.connection]
                continue
            if not self.state.is_ending and self._share_transfer(request, now):
                continue
            waits = request.patient and now < request.until and another_may_come
            excluded = request.tried | set(self._requests) | self._tried_often(request)
            donor = None if self.state.is_ending else self._find_donor(excluded, young=request.patient and not waits)
            if donor is not None:
                self._ask(request, donor, now + self.state.config.peer_seconds)
            elif waits and not self.state.is_ending:
                request.transfer = 0
            else:
                self._answer(request.connection, 0)

    def _await_donor(self, request: DonorRequest, now: float) -> None:
        """Have a donor whose session broke go on in its next one; one whose process has ended is given up."""
        slots = self.state.members.slots
        slot = next((one for one in slots if one.holder.process == request.process and one.occupied), None)
        if slot is None or self.state.is_ending:
            request.transfer = 0
        elif slot.holder.connection is not None and slot.holder.ready:
            self.actions.add(ev.RequestPeerState(slot.holder.connection, request.transfer))
            for each in self._requests.values():
                if each.transfer == request.transfer:
                    each.tried.add(slot.holder.connection)
                    each.donor, each.came, each.is_away = slot.holder.connection, False, False
                    each.deadline = now + self.state.config.peer_seconds

    def _share_transfer(self, request: DonorRequest, now: float) -> bool:
        """Have the newcomer wait for the state that another one waits for; False: there is none for it."""
        for other in self._requests.values():
            asked = other.transfer and now < other.deadline and other.donor not in request.tried
            asked = asked and (request.patient or not self._is_young(other.donor))
            if asked and other.donor not in self._requests and CHECKPOINT not in (other.connection, request.connection):
                request.tried.add(other.donor)
                request.transfer, request.donor, request.deadline = other.transfer, other.donor, other.deadline
                request.process, request.came, request.is_away = other.process, other.came, other.is_away
                return True
        return False

    def _ask(self, request: DonorRequest, donor: int, deadline: float) -> None:
        request.tried.add(donor)
        request.process, request.came, request.is_away = "", False, False
        if (slot := self.state.members.by_connection(donor)) is not None:
            request.tries[slot.index] += 1
            request.process = slot.holder.process
        request.transfer, request.donor, request.deadline = self._next_transfer, donor, deadline
        self._next_transfer += 1
        checkpoint = request.connection == CHECKPOINT
        self.actions.add(ev.RequestPeerState(donor, request.transfer, checkpoint))

    def _answer(self, connection: int, transfer: int) -> None:
        """The request is over: its newcomer is told what to download, 0: nothing."""
        del self._requests[connection]
        if connection > CHECKPOINT:
            self.actions.add(ev.OfferPeerState(connection, transfer))

    def _tried_often(self, request: DonorRequest) -> set[int]:
        """The connections of slots that are asked no more, whatever session they are in."""
        slots = [self.state.members.slots[index] for index, tries in request.tries.items() if tries >= MOST_TRIES]
        return {slot.holder.connection for slot in slots if slot.holder.connection is not None}

    def _is_young(self, connection: int) -> bool:
        slot = self.state.members.by_connection(connection)
        return slot is not None and slot.reported.young_optimizer

    def _another_may_come(self, now: float) -> bool:
        """Whether a learner has yet to make its first step that may find its own state, or one that trained and did
        not leave has yet to come back."""
        away = (SlotState.SUSPECT, SlotState.LOST)
        without = {connection for connection, request in self._requests.items() if request.patient}
        for slot in self.state.members.current:
            if slot.holder.connection is not None:
                may_come = slot.occupied and slot.holder.connection not in without and not slot.reported.advanced
            else:
                recent = now - slot.holder.heard_at < self.state.config.rejoin_seconds
                may_come = slot.state in away and recent and slot.step > 0 and not slot.reported.young_optimizer
            if may_come:
                return True
        return False

    def _find_donor(self, excluded: set[int], *, young: bool) -> int | None:
        """The connection of the active learner with the most steps in its tenure; if ``young``, rather than none one
        whose optimizer began fresh a while ago."""
        healthy = [
            (
                not slot.reported.young_optimizer,
                slot.step - slot.reported.step_at_seat,
                -slot.index,
                slot.holder.connection,
            )
            for slot in self.state.members.slots
            if slot.state in (SlotState.ACTIVE, SlotState.DRAINING)
            and slot.holder.ready
            and slot.reported.advanced
            and slot.holder.connection is not None
            and slot.holder.connection not in excluded
            and (young or not slot.reported.young_optimizer)
        ]
        return max(healthy)[3] if healthy else None
