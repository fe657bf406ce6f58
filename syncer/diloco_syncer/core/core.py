"""The syncer's state machine. Everything that decides anything is here or in the
plain modules that it holds together; nothing here touches a socket, a thread, a
clock or a file.

Theory of operation. The walls turn what happens into an event (events.py) and
call ``handle(event, now)``. Each event first changes what is known: a member
joined, a report told more steps, a push is here, a record is durable. Then
``_advance`` runs, which looks at what is known and does whatever is due: give up
on silent members, seat standbys, move the phase, open rounds, take rounds that
have waited long enough. It is level-triggered: it does not matter which event
woke it, a lost wake-up is made good by the next, and running it twice changes
nothing. What is to be done outside comes back as a list of actions, to be
carried out in order.

The parts: ``job`` is what is known. ``reception`` seats and gives up members,
``merging`` takes pushes and opens and closes rounds, ``phases`` starts, holds,
drains and ends, ``peers`` finds a newcomer's optimizer state, ``lost`` takes from
learners what the store has lost. Below them are the rules: ``membership`` (slots,
incarnations), ``receipts`` (what a lost version says of them), ``rounds`` (when a fragment is merged),
``intake`` (which pushes count), ``ledger`` (what became of every token), ``leases``
(who trains which data), ``clock`` (elapsed, uptime, holds).

Durability. A merge counts when its record is durable: the wall says ``Merged``,
and only then does the version rise here. ``Persist`` asks for the state document
before the actions behind it are carried out; what happened after the last one is
told again by records (``recover``), by spooled offers (``restore_offer``) and by
the learners' cumulative reports. ``start`` is called once after these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from diloco_protocol.vocabulary import ENDED_PHASES, EventKind, JobPhase, PushRefusal, SlotState
from diloco_syncer.core import events as ev
from diloco_syncer.core.config import CoreConfig
from diloco_syncer.core.events import Action, PushHeader
from diloco_syncer.core.members.admission import Admission
from diloco_syncer.core.members.slots import Slot
from diloco_syncer.core.members.state_donors import StateDonors
from diloco_syncer.core.merging.aggregation import Aggregator
from diloco_syncer.core.merging.ledger import Ledger
from diloco_syncer.core.merging.rounds import RoundBook
from diloco_syncer.core.phases import Phases
from diloco_syncer.core.recovery.lost_versions import VersionRecovery
from diloco_syncer.core.recovery.receipts import Rows, balance, foresee, receipt, take_over
from diloco_syncer.core.state import JobState
from diloco_syncer.core.status import core_report, core_status


class Core:
    """One job's (shard's) decisions. ``state``: a document from ``state()``, or None
    for a new job; ``epoch``: the one that this process claimed; ``now``: monotonic
    seconds; ``wall``: seconds since 1970, only compared with the state's own."""

    def __init__(
        self, config: CoreConfig, state: dict[str, Any] | None, epoch: int, now: float, wall: float = 0.0
    ) -> None:
        self.config = config
        self.epoch = epoch
        self._state = JobState(config, epoch)
        self.peers = StateDonors(config.peer_seconds, config.checkpoint_seconds)
        self.lost = VersionRecovery(self._state)
        self.reception = Admission(self._state, self.peers, self.lost)
        self.merging = Aggregator(self._state)
        self.phases = Phases(self._state, self.merging, self.peers, self.lost)
        self._next_check = now
        if state is not None:
            self._state.load(state["job"], now, wall)
            self.phases.load(state["phases"])

    # ================================================================ what the walls read

    @property
    def phase(self) -> JobPhase:
        return self._state.phase

    @property
    def phase_message(self) -> str:
        return self._state.phase_message

    @property
    def versions(self) -> list[int]:
        return self._state.versions

    @property
    def initialised(self) -> bool:
        return self._state.initialised

    @property
    def initialiser(self) -> int | None:
        """The connection that uploads version 0."""
        return self._state.initialiser

    @property
    def slots(self) -> Sequence[Slot]:
        """All slots by index, retired ones included. To be read only."""
        return self._state.members.slots

    def slot_by_connection(self, connection: int) -> Slot | None:
        """The slot that this connection's process holds. To be read only."""
        return self._state.members.by_connection(connection)

    def leased_blocks(self, connection: int) -> int:
        """How many data leases this connection's slot has; 0 without a slot."""
        slot = self.slot_by_connection(connection)
        return self._state.leases.out(slot.index) if slot is not None and self._state.leases is not None else 0

    @property
    def merges(self) -> int:
        """Durable merges of all fragments."""
        return self._state.merges

    @property
    def trained_tokens(self) -> int:
        """Tokens that all slots reported as trained."""
        return self._state.ledger.total_trained() if self._state.ledger else 0

    def record_event(self, kind: str, message: str) -> None:
        """Record an event of the job as a whole; it comes out with the next actions."""
        self._state.note(kind, None, message)

    @property
    def rounds(self) -> RoundBook | None:
        return self._state.rounds

    @property
    def ledger(self) -> Ledger | None:
        return self._state.ledger

    @property
    def wake_at(self) -> float:
        """When a Tick is due at the latest (monotonic seconds)."""
        # Where no round is taken because of its grace window, none needs waking for.
        waits = self._state.phase in (JobPhase.WAITING, JobPhase.TRAINING, JobPhase.HOLDING)
        grace = self._state.rounds.wake_at() if self._state.rounds and waits else None
        return self._next_check if grace is None else min(grace, self._next_check)

    def check_push(self, header: PushHeader, process: str = "") -> tuple[PushRefusal, str] | None:
        """The verdict on a header before its bytes are read; None: send them. ``process``:
        who sends it, where that is known."""
        return self.merging.check_push(header, process)

    @property
    def newest_settled_epoch(self) -> int:
        """What announcements say of the store's history (lineage.py)."""
        return self._state.history.settled

    @property
    def is_recovering(self) -> bool:
        """Whether no push is taken until it is settled what the store has lost."""
        return self.lost.settling

    def receipt(self, fragment: int) -> Rows:
        """What goes with the bytes of the fragment's present version (receipts.py)."""
        return receipt(self._state, fragment)

    def check_version_upload(self, connection: int, fragment: int, epoch: int, version: int, rows: Rows) -> str:
        """Whether this base may come now, before its bytes are read: empty, or why not."""
        return self.lost.admit(connection, fragment, epoch, version, rows)

    def status(self, now: float) -> dict[str, Any]:
        """The core's part of the status document (docs/contracts.md)."""
        return core_status(self._state, now)

    def report(self, now: float) -> dict[str, Any]:
        """The core's part of report.json."""
        return core_report(self._state, now)

    def state(self, now: float, wall: float = 0.0) -> dict[str, Any]:
        """The durable document (JSON). Accepted pushes that are not offers are not
        in it: their learners still have the work."""
        return {"job": self._state.to_json(now, wall), "phases": self.phases.to_json()}

    # ================================================================ start

    def close_superseded_tenures(self, headers: Iterable[PushHeader], receipts: Iterable[Rows]) -> None:
        """First: headers of all records and offers that are newer than the state, and the receipts
        of versions that came from learners."""
        foresee(self._state, headers, receipts)

    def apply_recovered_version(self, fragment: int, version: int, origin: int, rows: Rows, epoch: int) -> None:
        """A record of ``epoch``, newer than the state, that came from a learner, which held it in epoch
        ``origin``; call in the order of the records."""
        take_over(self._state, fragment, version, origin, rows, epoch)
        self._state.note(EventKind.RECOVERED, None, f"fragment {fragment} goes on from version {version}, a learner's")

    def apply_record(self, fragment: int, version: int, headers: Iterable[PushHeader], epoch: int) -> None:
        """A merge record of ``epoch``, newer than the state; call in version order."""
        self.merging.recover(fragment, version, headers, epoch)

    def restore_offer(self, header: PushHeader, handle: int, norm: float) -> bool:
        """A spooled offer found in the store; False: it was merged (or makes no sense) and may go."""
        return self.merging.restore_offer(header, handle, norm)

    def start(self, now: float, made: Sequence[int] = (), behind: bool = False) -> list[Action]:
        """Recovery is over: settle what did not survive, and begin this epoch. ``made``: the epoch of
        each fragment's newest version (of one from a learner: the epoch in which it held it);
        ``behind``: whether the tape tells of merges that the store has not."""
        job = self._state
        if job.ledger:
            job.ledger.write_off_held(job.held_offers())
            balance(job.ledger)
            if job.epochs[-1][0] != self.epoch:
                job.epochs.append((self.epoch, list(job.versions)))
        self.phases.restart(now)
        self.lost.start(made, behind)
        job.out.append(ev.Persist())
        self._advance(now)
        return self._take_out()

    # ================================================================ events

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """One event in, the actions that follow out, in order."""
        match event:
            case ev.Join():
                self.reception.join(event, now)
            case ev.ConnectionLost():
                self.reception.connection_lost(event.connection, now)
            case ev.Reported():
                self._reported(event.connection, event.report, now)
            case ev.PushReceived():
                self.merging.push(event, now)
                self.phases.moved_at = now
            case ev.InitialModelStored():
                self._initial_stored(event)
            case ev.InitialModelFailed():
                self.reception.initial_failed(event.connection)
            case ev.MergeDurable():
                self.merging.merged(event, now)
            case ev.LeaseRequested():
                self._lease(event.connection)
            case ev.DrainRequested():
                slot = self._state.members.by_connection(event.connection)
                if slot is not None and slot.occupied:
                    slot.state = SlotState.DRAINING
            case ev.Drained():
                self.reception.drained(event.connection)
                self.phases.moved_at = now
            case ev.ProcessEnded():
                self.reception.process_gone(event)
            case ev.Evaluated():
                self._evaluated(event)
            case ev.EndRequested():
                self.phases.request_end(event.phase, event.message)
            case ev.PeerStateRequested():
                self.peers.want(event.connection, now)
            case ev.PeerStateReceived():
                self._state.out += self.peers.arrived(event.transfer)
            case ev.PeerStateFailed():
                self.peers.failed(event.transfer)
            case ev.LostVersionStored():
                self.lost.stored(event.fragment)
            case ev.LostVersionFailed():
                self.lost.failed(event.connection, event.fragment)
            case ev.Tick():
                pass
        self._advance(now)
        return self._take_out()

    def _take_out(self) -> list[Action]:
        out = list(self._state.out)
        self._state.out.clear()
        return out

    def _reported(self, connection: int, report: ev.ReportCounts, now: float) -> None:
        job = self._state
        slot = job.members.by_connection(connection)
        if slot is None:
            return
        slot.heard_at = now
        if slot.state is SlotState.SUSPECT:
            slot.state = SlotState.ACTIVE
        if job.tell(slot, report, now) and not slot.ready:
            slot.ready = True
            self.merging.pull_open_rounds(slot)

    def _lease(self, connection: int) -> None:
        job = self._state
        slot = job.members.by_connection(connection)
        if slot is None or job.leases is None or job.closing or job.phase in ENDED_PHASES:
            return
        lost = [s.index for s in job.members.slots if s.state is SlotState.LOST]
        grant = job.leases.grant(slot.index, lost)
        job.out += [ev.Persist(), ev.GrantLease(connection, grant)]

    def _initial_stored(self, event: ev.InitialModelStored) -> None:
        job = self._state
        if job.initialised:
            return
        job.make_books(event.layout_digest, event.fragment_elements)
        assert job.ledger and job.rounds
        for slot in job.members.slots:
            if slot.occupied:
                job.ledger.open_tenure(slot.index, slot.tenure or slot.incarnation)
                job.rounds.seat(slot.index, slot.step)
        job.initialiser = None
        job.out.append(ev.Persist())
        for fragment in range(job.rounds.fragments):
            job.out.append(ev.Announce(fragment, 0, {}, 0))
        job.note(EventKind.INITIALISED, None, f"version 0 is durable: {job.rounds.fragments} fragments")

    def _evaluated(self, event: ev.Evaluated) -> None:
        job = self._state
        if event.connection not in job.members.evaluators:
            return
        if event.sum_versions == 0 and job.initial_loss is None:
            job.initial_loss = event.loss
        # One row per measured version, though an evaluator that begins again or scores the end
        # measures one that it had measured.
        newest = job.eval_loss[-1][0] if job.eval_loss else 0
        if event.tokens >= newest:
            if job.eval_loss and (event.tokens, event.sum_versions) == (newest, job.scored_merges):
                job.eval_loss.pop()
            job.eval_loss.append((event.tokens, event.loss))
            job.scored_merges = event.sum_versions
        if event.final and job.phase is JobPhase.EVALUATING:
            job.final_loss = event.loss

    def _advance(self, now: float) -> None:
        """Whatever is due, from what is known. Idempotent."""
        job = self._state
        self.reception.lose_silent(now)
        self.reception.seat_standbys(now)
        self.reception.ask_initial(now)
        job.out += self.lost.advance(now)
        job.out += self.peers.advance(job.members, job.closing, now)
        job.out += self.phases.advance(now)
        if job.rounds and job.phase in (JobPhase.TRAINING, JobPhase.HOLDING):
            self.merging.open_rounds(now)
        if job.rounds and job.phase not in ENDED_PHASES:
            self.merging.take_ready_rounds(now)
        self._next_check = now + min(1.0, self.config.heartbeat_timeout / 4)
