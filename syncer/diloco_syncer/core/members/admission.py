"""Admission: which process is refused, gets a slot or stands by, and what follows when it leaves.

``slots`` knows the slots; here is what an arrival or a loss means for the ledger, the leases, the rounds and the
other parts. A process that joins goes through these steps:

1. It is refused for good if its job, layout or data differ from the syncer's, or its place is a newer process's.
2. It may get an answer because of what the store has lost, which ``recovery/joins.py`` decides.
3. It goes on in its own slot, or gets another one, or stands by.

A slot ends in one of two ways. A *lost* slot keeps its open tenure, for its process may come back. A *released*
slot (drained, or its place is over) has its tenure closed, and its leases go to others.

What is still wrong with it: ``join`` has eleven ways out, and their order is a rule that only tests keep. An evaluator
must leave before slots are looked at. A process that had a slot must be seated before its place's retired slot is
released, which may be that very slot. ``_objection`` also registers the pod, so it cannot be asked twice. ``_seat``
serves four cases by two booleans. Evaluators are only a set of connections: one whose session broke unnoticed counts
until a third joins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from diloco_protocol.vocabulary import ENDED_PHASES, EventKind, JobPhase, JoinRefusal, SlotState
from diloco_protocol.wire.records import PushHeader, Seat
from diloco_syncer.core import events as ev
from diloco_syncer.core.actions import Actions
from diloco_syncer.core.books.leases import LeaseBook
from diloco_syncer.core.books.slots import MergedPush, Slot
from diloco_syncer.core.members.initial_model_request import InitialModelRequest
from diloco_syncer.core.recovery.joins import Verdict
from diloco_syncer.core.state import JobState

MAX_EVALUATORS = 2

_OTHER_MODEL = "its model is not the job's; its log names the first tensor that differs"

Objection = tuple[str, str, tuple[str, ...]]  # reason, words, and the fields in which the jobs differ


@dataclass
class Admission:
    """Arrivals and losses. ``initial_model``: who uploads version 0; ``judge_join``: what a Join gets because of what
    the store has lost; ``forget_connection``: tells the other parts that a connection is closed; ``accepted_headers``:
    the pushes that are accepted and not merged."""

    state: JobState
    actions: Actions
    initial_model: InitialModelRequest
    judge_join: Callable[[ev.Join, float], Verdict]
    forget_connection: Callable[[int], None]
    accepted_headers: Callable[[], list[PushHeader]]

    def __post_init__(self) -> None:
        self._mode = self.state.config.mode
        self._unchecked: dict[int, ev.Join] = {}  # by connection, of those who joined before the job had a layout

    # ---------------------------------------------------------------- joins

    def join(self, join: ev.Join, now: float) -> None:
        """A process wants to take part: refuse it, give it a slot, or let it stand by."""
        state = self.state
        if not self._is_of_the_job(join):
            words = f"region {join.region!r} is none of the job's: add it to spec.regions, at the hub"
            self.actions.add(ev.Refuse(join.connection, JoinRefusal.NO_SUCH_REGION, words, False))
            return
        if join.idle:
            self._admit(join, None)
            return
        objection = self._objection(join)
        if objection is not None:
            self._refuse(join, now, *objection)
            return
        if not state.layout_digest:
            self._unchecked[join.connection] = join
        verdict = self.judge_join(join, now)
        if verdict.answer is not None:
            # Persist first: if another syncer has the store, this one must stop, and not judge anybody.
            self.actions.add(ev.Persist(), verdict.answer)
            return
        withheld, continuing = verdict.withheld, verdict.continuing_slot
        if join.evaluator:
            self._take_evaluator(join.connection)
            self._admit(join, None, withheld=withheld)
            return
        if join.sequences and state.leases is None:
            state.leases = LeaseBook(state.config.seed, join.sequences, len(state.config.places))
        if state.leases is not None and not state.leases.samples:
            state.leases.samples = join.data_samples
        slot = state.members.slot_of_process(join)
        if state.phase not in ENDED_PHASES and slot is not None:
            self._seat(slot, join, now, continuing=slot is continuing, withheld=withheld)
            return
        if state.phase in ENDED_PHASES or state.is_ending:
            self._admit(join, None, withheld=withheld)
            return
        self._end_predecessor(join)
        if continuing is not None:
            self._seat(continuing, join, now, continuing=True, withheld=withheld)
            return
        slot = self._mode.choose_slot(state.members, join) or self._open_slot(join)
        if slot is not None:
            self._seat(slot, join, now, continuing=False, withheld=withheld)
        elif words := self._mode.standby_objection(join):
            self._refuse(join, now, JoinRefusal.NO_SUCH_PLACE, words)
        else:
            state.members.standby[join.connection] = join
            self.initial_model.offer_standby(join, now)
            self._admit(join, None, withheld=withheld)
            self.actions.record_event(EventKind.SPARE, None, f"{join.region}-{join.ordinal} stands by")

    def _open_slot(self, join: ev.Join) -> Slot | None:
        """A slot for a process beyond its region's places; None: the job has none for it."""
        state = self.state
        if join.region not in state.members.open_places:
            return None
        slot = state.members.open_slot_for(join)
        if state.ledger is not None:
            state.ledger.add_slots(len(state.members.slots))
        return slot

    def _balance_region(self, slot: Slot) -> None:
        """The slot was taken or left: see ``SlotTable.balance_region``. Nobody is waited for in what is retired, so
        its leases go to others."""
        members, leases = self.state.members, self.state.leases
        for retired in members.balance_region(members.region_of(slot)) if members.open_places else ():
            if leases is not None:
                leases.return_leases(retired.index)

    def _is_of_the_job(self, join: ev.Join) -> bool:
        """Whether a process may take part at all: its region is the job's, or it still has a slot from when it was."""
        members = self.state.members
        return join.evaluator or members.is_known_region(join.region) or members.slot_of_process(join) is not None

    def _take_evaluator(self, connection: int) -> None:
        """Let an evaluator in. There is one, and for a while the broken session of the one before."""
        evaluators = self.state.members.evaluators
        while len(evaluators) >= MAX_EVALUATORS:
            oldest = min(evaluators)
            evaluators.remove(oldest)
            self.actions.add(ev.Refuse(oldest, JoinRefusal.SUPERSEDED, "a newer evaluator has joined", False))
        evaluators.add(connection)

    def _objection(self, join: ev.Join) -> Objection | None:
        """Why this process is refused for good; None: nothing speaks against it."""
        state = self.state
        # Differing fields come first, for a model or fragments that differ make another layout too.
        differing = tuple(sorted(k for k, v in join.digests.items() if state.config.digests.get(k, v) != v))
        if differing:
            verb = "differs" if len(differing) == 1 else "differ"
            words = f"{', '.join(differing)} {verb} from the job's: apply the same job everywhere"
            return JoinRefusal.SPEC_DRIFT, words, differing
        if (other := self._layout_objection(join)) is not None:
            return other
        if join.evaluator:
            return None
        if join.sequences and state.leases and join.sequences != state.leases.sequences:
            words = (
                f"its data set has {join.sequences} sequences, the job's has {state.leases.sequences}: "
                "give every learner the same data"
            )
            return JoinRefusal.OTHER_DATA, words, ()
        if join.sequences and state.leases and (sample := state.leases.find_other(join.data_samples)) is not None:
            last = sample.first + sample.items - 1
            which = f"items {sample.first} to {last} are the first that differ"
            if sample.items == 1:
                which = f"item {sample.first} is the first that differs"
            words = (
                f"its data set has as many sequences as the job's, and other content ({which}): "
                "give every learner the same data"
            )
            return JoinRefusal.OTHER_DATA, words, ()
        if not state.members.register_pod(join):
            words = f"{join.region}-{join.ordinal} belongs to a newer process, which replaced this one"
            return JoinRefusal.SUPERSEDED, words, ()
        return None

    def _layout_objection(self, join: ev.Join) -> Objection | None:
        layout = self.state.layout_digest
        if not layout or join.layout_digest == layout:
            return None
        words = (
            f"its model's layout is {join.layout_digest[:12]}, the job's is {layout[:12]}: "
            "give every learner the same model and sync.fragments"
        )
        return JoinRefusal.OTHER_LAYOUT, words, ()

    def refuse_other_models(self, now: float) -> None:
        """The job has a layout: refuse those who joined before it had, with another model."""
        for connection, join in list(self._unchecked.items()):
            objection = self._layout_objection(join)
            if objection is None:
                continue
            self._refuse(join, now, *objection)
            self.state.members.standby.pop(connection, None)
            self.state.members.evaluators.discard(connection)
            self.forget_connection(connection)
            slot = self.state.members.by_connection(connection)
            if slot is not None:
                slot.holder.connection = None
                self._lose_slot(slot, EventKind.LOST, f"{slot.learner}: refused: {_OTHER_MODEL}")
        self._unchecked.clear()

    # ---------------------------------------------------------------- answers

    def _refuse(self, join: ev.Join, now: float, reason: str, message: str, fields: tuple[str, ...] = ()) -> None:
        # A superseded process is refused, and not its place.
        if reason != JoinRefusal.SUPERSEDED and self.state.refusals.add(join, reason, message, fields, now):
            place = f"{join.region}-{join.ordinal}"
            self.actions.record_event(EventKind.REFUSED, None, f"{place} is refused ({reason}): {message}")
        self.actions.add(ev.Refuse(join.connection, reason, message, True))

    def _admit(
        self,
        join: ev.Join,
        seat: Seat | None,
        merged: tuple[MergedPush, ...] = (),
        withheld: frozenset[int] = frozenset(),
    ) -> None:
        self.state.refusals.remove(join)
        self.actions.add(
            ev.Admit(
                connection=join.connection,
                observer=join.evaluator,
                seat=seat,
                initialise=self.initial_model.connection == join.connection,
                phase=self.state.phase,
                message=self.state.phase_message,
                merged=merged,
                withheld=withheld,
            )
        )

    def _seat(
        self,
        slot: Slot,
        join: ev.Join,
        now: float,
        *,
        continuing: bool,
        promote: bool = False,
        withheld: frozenset[int] = frozenset(),
    ) -> None:
        """Give the slot to the process, and fence the one that had it. ``continuing``: its tenure goes on; else the
        slot's tenure is closed and a new one begins. ``promote``: it stood by, and has had its Welcome."""
        state = self.state
        old = slot.holder.connection
        if old is not None and old != join.connection:
            # The same program may begin anew: its broken session must not end it.
            another = not (join.previous_incarnation and join.process == slot.holder.process)
            words = f"slot {slot.index} was taken by a newer process"
            self.actions.add(ev.Refuse(old, JoinRefusal.SUPERSEDED, words, another))
            slot.holder.connection = None
        if not continuing and slot.holder.incarnation:
            self._close_tenure(slot, "died")
        first_taken = not slot.holder.incarnation
        incarnation = state.members.give_slot(slot, join, now)
        self._balance_region(slot)
        slot.tenure = (join.tenure or slot.tenure) if continuing else incarnation
        if not continuing:
            self._begin_tenure(slot, incarnation, first_taken, now)
        elif first_taken and state.ledger:
            state.ledger.open_tenure(slot.index, slot.tenure)
        self.initial_model.offer(slot, now, is_welcome=not promote)
        leases = state.leases.leases_of(slot.index) if state.leases else ()
        tokens = state.ledger.trained(slot.index) if state.ledger else 0
        seat = Seat(
            slot.index, incarnation, continuing, slot.step, slot_tokens=tokens, leases=leases, tenure=slot.tenure
        )
        self.actions.add(ev.Persist())
        if promote:
            self.actions.add(ev.Promote(join.connection, seat))
        else:
            merged = tuple(slot.pushes.merged.get(p, MergedPush()) for p in range(len(state.versions)))
            self._admit(join, seat, merged, withheld)
        verb = "came back to" if continuing else "took"
        self.actions.record_event(
            EventKind.JOINED,
            slot,
            f"{join.region}-{join.ordinal} {verb} slot {slot.index} at step {slot.step}",
            region=join.region,
            ordinal=join.ordinal,
            process=join.process,
            continuing=continuing,
        )

    def _begin_tenure(self, slot: Slot, incarnation: int, first_taken: bool, now: float) -> None:
        state = self.state
        # A slot first taken later starts where the job is.
        together = self._mode.begins_together and state.phase is JobPhase.WAITING
        if together or (first_taken and state.clock.elapsed(now) > 0):
            slot.begin_at(state.members.furthest)
        slot.begin_tenure()
        if state.rounds and state.ledger:
            state.ledger.open_tenure(slot.index, incarnation)
            state.rounds.begin_progress(slot.index, slot.step)

    # ---------------------------------------------------------------- leaving

    def _end_predecessor(self, join: ev.Join) -> None:
        """Release the retired slot of the place's former process: a place runs one process, so that one is over,
        and nobody else will take the slot."""
        for slot in self.state.members.slots:
            if slot.retired and slot.holder.process and slot.holder.place == (join.region, join.ordinal):
                if slot.holder.connection is not None:
                    words = f"{join.region}-{join.ordinal} belongs to a newer process"
                    self.actions.add(ev.Refuse(slot.holder.connection, JoinRefusal.SUPERSEDED, words, True))
                self._release_slot(slot, "died")

    def _release_slot(self, slot: Slot, reason: str) -> None:
        """The slot's process has left for good: close its tenure and free its leases."""
        self._close_tenure(slot, reason)
        slot.state = SlotState.DRAINED
        slot.holder.connection = None
        slot.holder.process = ""
        if self.state.leases:
            self.state.leases.return_leases(slot.index)
        self._balance_region(slot)
        self.actions.add(ev.Persist())

    def _close_tenure(self, slot: Slot, reason: str) -> None:
        """Drop what is pending of the slot's tenure; pushes that were accepted still count."""
        if self.state.ledger is None:
            return
        dropped = self.state.ledger.close_tenure(slot.index, reason, self.accepted_headers())
        self.actions.record_dropped(slot, dropped // max(1, len(self.state.versions)), reason)

    def connection_lost(self, connection: int) -> None:
        """A session ended. A broken stream alone proves nothing: the slot is suspect, and the timeout, or a party
        that knows the process's end, decides."""
        members = self.state.members
        self._unchecked.pop(connection, None)
        members.standby.pop(connection, None)
        members.evaluators.discard(connection)
        self.forget_connection(connection)
        slot = members.by_connection(connection)
        if slot is None:
            return
        slot.holder.connection = None
        if slot.occupied:
            slot.state = SlotState.SUSPECT
            self.actions.record_event(EventKind.SUSPECT, slot, f"{slot.learner}: connection lost")

    def process_ended(self, event: ev.ProcessEnded) -> None:
        """A process is known to have ended. One that neither has a slot nor stands by changes nothing."""
        members = self.state.members
        for connection, join in list(members.standby.items()):
            if (join.process, join.region, join.ordinal) == (event.process, event.region, event.ordinal):
                # It would be given a slot, and be lost again only after a heartbeat timeout.
                del members.standby[connection]
                self.actions.add(ev.Refuse(connection, JoinRefusal.LOST, f"process ended: {event.reason}", False))
        for slot in members.slots:
            if slot.holder.place != (event.region, event.ordinal):
                continue
            if event.process and event.process != slot.holder.process:
                continue
            slot.holder.gone = True
            if not slot.occupied:
                continue
            self._lose_slot(slot, EventKind.PROCESS_ENDED, f"{slot.learner}: its process ended ({event.reason})")
            if slot.retired:
                self._release_slot(slot, "died")

    def _lose_slot(self, slot: Slot, kind: EventKind, message: str) -> None:
        """Rounds go on without the slot; its tenure stays open for its process to come back."""
        slot.state = SlotState.LOST
        if slot.holder.connection is not None:
            self.actions.add(
                ev.Refuse(slot.holder.connection, JoinRefusal.LOST, "not heard in time: join again", False)
            )
            self.forget_connection(slot.holder.connection)
            slot.holder.connection = None
        self._balance_region(slot)
        self.actions.add(ev.Persist())
        self.actions.record_event(kind, slot, message)

    def drained(self, connection: int) -> None:
        """A learner has offered everything and leaves."""
        slot = self.state.members.by_connection(connection)
        if slot is None or not slot.occupied:
            return
        self._release_slot(slot, "drain")
        message = f"{slot.learner} left with its work offered, at step {slot.step}"
        self.actions.record_event(EventKind.DRAINED, slot, message)

    # ---------------------------------------------------------------- what time brings

    def lose_silent_slots(self, now: float) -> None:
        """Give up slots of which nothing was heard for the heartbeat timeout."""
        if self.state.phase in ENDED_PHASES:
            return
        for slot in self.state.members.slots:
            silent = now - slot.holder.heard_at
            if slot.occupied and silent > self.state.config.heartbeat_timeout:
                self._lose_slot(slot, EventKind.LOST, f"{slot.learner}: nothing heard for {silent:.1f} s")

    def seat_standbys(self, now: float) -> None:
        """Give free slots to processes that stand by, in the order in which they came."""
        if self.state.phase in ENDED_PHASES or self.state.is_ending:
            return
        members = self.state.members
        for connection, join in list(members.standby.items()):
            slot = members.free_slot_for(join) or self._open_slot(join)
            if slot is None:
                continue
            del members.standby[connection]
            self._seat(slot, join, now, continuing=False, promote=True)
