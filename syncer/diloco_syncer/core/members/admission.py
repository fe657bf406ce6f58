"""Admission: who joins, who is seated, who is given up.

``membership`` knows the slots; here is what follows from an arrival or a loss for
the ledger, the leases, the rounds and the others. Plain code, driven by ``core``.
"""

from __future__ import annotations

from diloco_protocol.vocabulary import ENDED_PHASES, EventKind, JobPhase, JoinRefusal, SlotState
from diloco_syncer.core import events as ev
from diloco_syncer.core.events import MergedPush
from diloco_syncer.core.members.leases import LeaseBook
from diloco_syncer.core.members.slots import Slot
from diloco_syncer.core.members.state_donors import StateDonors
from diloco_syncer.core.recovery.lost_versions import EPOCHS_ABOVE, VersionRecovery
from diloco_syncer.core.state import JobState

FURTHEST = 1 << 32  # incarnations that a lost state may have given


class Admission:
    def __init__(self, job: JobState, peers: StateDonors, lost: VersionRecovery) -> None:
        self.job = job
        self.peers = peers
        self.lost = lost
        self._withheld: frozenset[int] = frozenset()  # of whoever joins at the moment

    def join(self, join: ev.Join, now: float) -> None:
        """A process wants in: refuse it, or give it a slot, or let it stand by."""
        if join.idle:
            self._withheld = frozenset()
            self._admit(join, None)
            return
        # First, for a model or fragments that differ make another layout too.
        differing = sorted(k for k, v in join.digests.items() if self.job.config.digests.get(k, v) != v)
        if differing:
            fields = ", ".join(differing)
            verb = "differs" if len(differing) == 1 else "differ"
            words = f"{fields} {verb} from the job's: apply the same job everywhere"
            self._refuse(join, JoinRefusal.SPEC_DRIFT, words, now, tuple(differing))
            return
        layout = self.job.layout_digest
        if layout and join.layout_digest != layout:
            self._refuse(
                join,
                JoinRefusal.OTHER_LAYOUT,
                f"its model's layout is {join.layout_digest[:12]}, the job's is {layout[:12]}: "
                "give every learner the same model and sync.fragments",
                now,
            )
            return
        if not join.evaluator and join.sequences and self.job.leases and join.sequences != self.job.leases.sequences:
            self._refuse(
                join,
                JoinRefusal.OTHER_DATA,
                f"its data set has {join.sequences} sequences, the job's has {self.job.leases.sequences}: "
                "give every learner the same data",
                now,
            )
            return
        if not join.evaluator and self.job.members.superseded(join):
            self._refuse(
                join,
                JoinRefusal.SUPERSEDED,
                f"{join.region}-{join.ordinal} belongs to a newer process; this one was given up",
                now,
            )
            return
        if self._other_history(join, now):
            return
        self._withheld = self.lost.joined(join)
        given = max(join.previous_incarnation, join.tenure)
        if given < self.job.members.next_incarnation + FURTHEST:
            # Numbers that a lost state gave are not given again.
            self.job.members.next_incarnation = max(self.job.members.next_incarnation, given + 1)
        if join.evaluator:
            self.job.members.evaluators.add(join.connection)
            self._admit(join, None)
            return
        if join.sequences and self.job.leases is None:
            places = len(self.job.config.places)
            self.job.leases = LeaseBook(
                self.job.config.seed, join.sequences, places, self.job.config.rules.deterministic
            )
        slot = self.job.members.own(join)
        if self.job.phase not in ENDED_PHASES and slot is not None:
            self._seat(slot, join, now, continuing=self._same_tenure(slot, join))
            return
        if self.job.phase in ENDED_PHASES or self.job.closing:
            self._admit(join, None)
            return
        self._end_predecessor(join)
        slot = self.job.members.choose(join, self.job.config.rules.deterministic)
        if slot is None:
            if self.job.config.rules.deterministic:
                words = f"deterministic mode has no slot for {join.region}-{join.ordinal}"
                self._refuse(join, JoinRefusal.NO_SUCH_PLACE, words, now)
                return
            self.job.members.standby[join.connection] = join
            self._admit(join, None)
            self.job.note(EventKind.SPARE, None, f"{join.region}-{join.ordinal} stands by")
            return
        self._seat(slot, join, now, continuing=False)

    def _same_tenure(self, slot: Slot, join: ev.Join) -> bool:
        """Whether the open tenure of its slot is the one that it counts in. A state that was lost may
        have begun another for it, or a syncer that ended before it could say so; and what it was told
        in another history is void."""
        if self.lost.foreign(join):
            return False
        ledger = self.job.ledger
        return ledger is None or join.tenure in (0, ledger.books[slot.index].first_incarnation)

    def _other_history(self, join: ev.Join, now: float) -> bool:
        """Whether it holds what this store has never had, and was answered so."""
        if not self.job.initialised:
            if all(version == 0 for _, version in join.held):
                return False
            self.job.out.append(
                ev.Refuse(
                    join.connection,
                    JoinRefusal.EMPTY_STORE,
                    "the syncer's store is empty and you hold merged versions: give it its store back "
                    "(or a copy of it); to begin the job anew, restart its learners",
                    False,
                )
            )
            return True
        above = self.lost.strange_epoch(join)
        if not above:
            return False
        # First of all: if another syncer has the store, this one must stop, and not judge anybody.
        self.job.out.append(ev.Persist())
        if not self.lost.open or above - self.job.epoch > EPOCHS_ABOVE:
            self._refuse(
                join,
                JoinRefusal.OTHER_HISTORY,
                f"it holds versions of epoch {above}, and the job went on from an older copy of its store in "
                f"epoch {self.job.epoch}: start this process anew",
                now,
            )
            return True
        self.job.out.append(ev.RestartFromStore(f"{join.region}-{join.ordinal} has heard of epoch {above}", above))
        return True

    def _refuse(self, join: ev.Join, reason: str, message: str, now: float, fields: tuple[str, ...] = ()) -> None:
        if reason != JoinRefusal.SUPERSEDED:  # that is told of a process; its place is a newer one's
            self.job.refusals.note(join, reason, message, fields, now)
        self.job.out.append(ev.Refuse(join.connection, reason, message, True))

    def _admit(self, join: ev.Join, seat: ev.Seat | None, merged: tuple[MergedPush, ...] = ()) -> None:
        self.job.refusals.admitted(join)
        self.job.out.append(
            ev.Admit(
                connection=join.connection,
                observer=join.evaluator,
                seat=seat,
                initialise=self.job.initialiser == join.connection,
                phase=self.job.phase,
                message=self.job.phase_message,
                merged=merged,
                withheld=self._withheld,
            )
        )

    def _seat(self, slot: Slot, join: ev.Join, now: float, *, continuing: bool, promote: bool = False) -> None:
        """Give the slot to the process; fence and write off whoever had it."""
        old = slot.connection
        if old is not None and old != join.connection:
            # The same program may begin anew: its broken session must not end it.
            another = not (join.previous_incarnation and join.process == slot.process)
            words = f"slot {slot.index} was taken by a newer process"
            self.job.out.append(ev.Refuse(old, JoinRefusal.SUPERSEDED, words, another))
            slot.connection = None
        if not continuing and slot.incarnation:
            self._vacate(slot, "died")
        first_taken = not slot.incarnation
        incarnation = self.job.members.sit(slot, join, now)
        slot.tenure = join.tenure if continuing else incarnation
        if not continuing:
            slot.clear_tenure()
            # A slot first taken later starts where the job is. In deterministic mode that goes for
            # everybody who begins anew after a pause: slots at different steps would be due for
            # different fragments, and wait for each other.
            together = self.job.config.rules.deterministic and self.job.phase is JobPhase.WAITING
            if together or (first_taken and self.job.clock.elapsed(now) > 0):
                slot.step = max(s.step for s in self.job.members.slots)
            slot.step_at_seat = slot.step
            if self.job.rounds and self.job.ledger:
                self.job.ledger.open_tenure(slot.index, incarnation)
                self.job.rounds.seat(slot.index, slot.step)
        slot.ready = False
        self._may_initialise(slot, now)
        leases = self.job.leases.of(slot.index) if self.job.leases else ()
        tokens = self.job.ledger.trained(slot.index) if self.job.ledger else 0
        seat = ev.Seat(slot.index, incarnation, continuing, slot.step, tokens, leases)
        self.job.out.append(ev.Persist())
        if promote:
            self.job.out.append(ev.Promote(join.connection, seat, self._merged_of(slot)))
        else:
            self._admit(join, seat, self._merged_of(slot))
        self.job.note(
            EventKind.JOINED,
            slot,
            f"{join.region}-{join.ordinal} {'came back to' if continuing else 'took'} slot {slot.index} "
            f"at step {slot.step}",
            region=join.region,
            ordinal=join.ordinal,
            process=join.process,
            continuing=continuing,
        )

    def _end_predecessor(self, join: ev.Join) -> None:
        """A place runs one process: who had a retired slot there is gone, and nobody else will take it."""
        for slot in self.job.members.slots:
            if slot.retired and slot.process and (slot.region, slot.ordinal) == (join.region, join.ordinal):
                if slot.connection is not None:
                    words = f"{join.region}-{join.ordinal} belongs to a newer process"
                    self.job.out.append(ev.Refuse(slot.connection, JoinRefusal.SUPERSEDED, words, True))
                self._close(slot, "died")

    def _close(self, slot: Slot, reason: str) -> None:
        """The slot's process has left for good, and what it had is settled."""
        self._vacate(slot, reason)
        slot.state = SlotState.DRAINED
        slot.connection = None
        slot.process = ""
        if self.job.leases:
            self.job.leases.give_back(slot.index)
        self.job.out.append(ev.Persist())

    def _merged_of(self, slot: Slot) -> tuple[MergedPush, ...]:
        return tuple(slot.merged.get(p, MergedPush()) for p in range(len(self.job.versions)))

    def _vacate(self, slot: Slot, reason: str) -> None:
        """The tenure ends: write off what is pending, keep what was accepted."""
        if self.job.ledger is None:
            return
        dropped = self.job.ledger.close_tenure(slot.index, reason, self.job.accepted_headers())
        if dropped:
            self.job.note(
                EventKind.DROPPED, slot, f"{dropped // max(1, len(self.job.versions))} tokens dropped ({reason})"
            )

    def connection_lost(self, connection: int, now: float) -> None:
        self.job.members.standby.pop(connection, None)
        self.job.members.evaluators.discard(connection)
        self.initial_failed(connection)
        self.peers.forget(connection)
        self.lost.gone(connection)
        slot = self.job.members.by_connection(connection)
        if slot is None:
            return
        slot.connection = None
        if slot.occupied:
            # A broken stream alone proves nothing: the timeout, or somebody who knows, decides.
            slot.state = SlotState.SUSPECT
            self.job.note(EventKind.SUSPECT, slot, f"slot {slot.index}: connection lost")

    def process_gone(self, event: ev.ProcessEnded) -> None:
        """Somebody who knows says so. A process that neither holds a slot nor stands by is old news."""
        for connection, join in list(self.job.members.standby.items()):
            if (join.process, join.region, join.ordinal) == (event.process, event.region, event.ordinal):
                # It would be given a slot, and be lost again only after a heartbeat timeout.
                del self.job.members.standby[connection]
                self.job.out.append(ev.Refuse(connection, JoinRefusal.LOST, f"gone: {event.reason}", False))
        for slot in self.job.members.slots:
            if (slot.region, slot.ordinal) != (event.region, event.ordinal) or not slot.occupied:
                continue
            if event.process and event.process != slot.process:
                continue
            self._lose(slot, EventKind.GONE, f"slot {slot.index}: its process is gone ({event.reason})")
            if slot.retired:
                self._close(slot, "died")

    def _lose(self, slot: Slot, kind: str, message: str) -> None:
        slot.state = SlotState.LOST
        if slot.connection is not None:
            self.job.out.append(ev.Refuse(slot.connection, JoinRefusal.LOST, "not heard in time: join again", False))
            self.peers.forget(slot.connection)
            self.lost.gone(slot.connection)
            self.initial_failed(slot.connection)
            slot.connection = None
        self.job.out.append(ev.Persist())
        self.job.note(kind, slot, message)

    def drained(self, connection: int) -> None:
        slot = self.job.members.by_connection(connection)
        if slot is None or not slot.occupied:
            return
        self._close(slot, "drain")
        self.job.note(EventKind.DRAINED, slot, f"slot {slot.index} left with its work offered, at step {slot.step}")

    def lose_silent(self, now: float) -> None:
        if self.job.phase in ENDED_PHASES:
            return
        for slot in self.job.members.slots:
            if slot.occupied and now - slot.heard_at > self.job.config.heartbeat_timeout:
                silent = now - slot.heard_at
                self._lose(slot, EventKind.LOST, f"slot {slot.index}: nothing heard for {silent:.1f} s")

    def seat_standbys(self, now: float) -> None:
        if self.job.phase in ENDED_PHASES or self.job.closing:
            return
        for connection, join in list(self.job.members.standby.items()):
            slot = self.job.members.free_for(join)
            if slot is None:
                return
            del self.job.members.standby[connection]
            self._seat(slot, join, now, continuing=False, promote=True)

    # ---------------------------------------------------------------- version 0

    def initial_failed(self, connection: int) -> None:
        """Version 0 does not come from there: whoever failed less often is asked before it."""
        if self.job.initialiser != connection:
            return
        self.job.initialiser = None
        slot = self.job.members.by_connection(connection)
        if slot is not None:
            self.job.initial_failures[slot.process] += 1

    def ask_initial(self, now: float) -> None:
        """Version 0 is missing and nobody is making it: invite the next member. Only a Welcome can ask
        for it, so its session ends, and until it is back nobody else is invited."""
        job = self.job
        if job.initialised or job.initialiser is not None or job.phase in ENDED_PHASES or self._invited(now):
            return
        if job.invited[0]:
            job.initial_failures[job.invited[0]] += 1  # it did not come back
            job.invited = ("", 0.0)
        here = [slot for slot in job.members.slots if slot.connection is not None]
        seated = [slot for slot in here if self._initialises(slot)]
        if not seated:
            return
        slot = min(seated, key=lambda slot: job.initial_failures[slot.process])
        assert slot.connection is not None
        job.invited = (slot.process, now + job.config.heartbeat_timeout)
        job.out.append(ev.RequestInitialModel(slot.connection))

    def _initialises(self, slot: Slot) -> bool:
        return slot.index == 0 or not self.job.config.rules.deterministic

    def _invited(self, now: float) -> str:
        """The process that is expected back to upload version 0; empty: none is."""
        process, until = self.job.invited
        if now < until and any(s.occupied and s.process == process for s in self.job.members.slots):
            return process
        return ""

    def _may_initialise(self, slot: Slot, now: float) -> None:
        """Who is seated while version 0 is missing makes it, unless a better one is expected back."""
        job = self.job
        if job.initialised or job.initialiser is not None or not self._initialises(slot):
            return
        invited, failures = self._invited(now), job.initial_failures
        if invited in ("", slot.process) or failures[slot.process] < failures[invited]:
            job.initialiser = slot.connection
            job.invited = ("", 0.0)
