"""The syncer's state machine: everything that decides anything.

Theory of operation
-------------------
The shell (server, runtime, store) turns what happens into an event and calls ``handle(event, now)``. The event first
changes what is known: a learner joined, a report told of more steps, a push is here, a record is durable. Then
``_advance`` does whatever is due: give up silent learners, seat standbys, move the phase, open rounds, start
merges. It is level-triggered: it does not matter which event woke it, a lost wake-up is made good by the next one,
and running it twice changes nothing.

What is to be done outside comes back as a list of actions, in the order in which they are to be carried out. Every
part adds to the one collector (``actions.py``) when it decides, so the list is the order of the decisions.
Nothing in this package touches a socket, a thread, a clock or a file; time is an argument.

A merge counts when its record is durable: the shell says ``MergeDurable``, and only then does the version rise
here. ``Persist`` asks for the state document before the actions behind it are carried out. What happened after
the newest document is known again from records (``apply_record``), spooled offers (``restore_offer``) and the
learners' cumulative reports. ``start`` is called once after these.

Example. K = 1, one learner. ``Join`` gives ``Persist`` and ``Admit``. Its ``Reported`` makes the slot ready, and the
phase moves: ``Persist``, ``SetPhase``. A later report reaches H steps: ``Pull``. ``PushReceived`` gives
``AnswerPush`` and ``Merge``; ``MergeDurable`` gives ``ReleasePush`` and ``Announce``.

An event goes down the stack of parts that ``__init__.py`` names, and what is decided comes back as actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, assert_never

from diloco_protocol.documents import Report, StatusDocument
from diloco_protocol.vocabulary import ENDED_PHASES, EventKind, JobPhase, PushRefusal, SlotState
from diloco_protocol.wire.records import Evaluation, PushHeader, Receipt, StepReport
from diloco_syncer.core import documents
from diloco_syncer.core import events as ev
from diloco_syncer.core.actions import Actions
from diloco_syncer.core.books.ledger import Ledger
from diloco_syncer.core.books.rounds import Round
from diloco_syncer.core.books.slots import Slot
from diloco_syncer.core.config import CoreConfig
from diloco_syncer.core.documents import ShellFigures
from diloco_syncer.core.events import Action
from diloco_syncer.core.members.admission import Admission
from diloco_syncer.core.members.first_steps import FirstSteps
from diloco_syncer.core.members.initial_model_request import InitialModelRequest
from diloco_syncer.core.members.state_donors import StateDonors
from diloco_syncer.core.merging.aggregation import Aggregator
from diloco_syncer.core.phases import Phases
from diloco_syncer.core.recovery import receipts
from diloco_syncer.core.recovery.joins import JoinRecovery
from diloco_syncer.core.recovery.lost_versions import VersionRecovery
from diloco_syncer.core.recovery.nonsense import repair_state
from diloco_syncer.core.reports import apply_report, find_nonsense
from diloco_syncer.core.state import JobState


class Core:
    """One job's decisions. ``saved``: a document from ``state()``, or None for a new job; ``epoch``: the one that
    this process claimed; ``now``: monotonic seconds; ``wall``: seconds since 1970, only compared with those of
    the document."""

    def __init__(
        self, config: CoreConfig, saved: dict[str, Any] | None, epoch: int, now: float, wall: float = 0.0
    ) -> None:
        self.config = config
        self.epoch = epoch
        self._state = JobState(config, epoch)
        self._actions = Actions()
        self._donors = StateDonors(self._state, self._actions)
        self._recovery = VersionRecovery(self._state, self._actions)
        self._aggregator = Aggregator(self._state, self._actions)
        self._initial_model = InitialModelRequest(self._state, self._actions, self._recovery)
        self._admission = Admission(
            self._state,
            self._actions,
            self._initial_model,
            judge_join=JoinRecovery(self._state, self._recovery).on_join,
            forget_connection=self._forget_connection,
            accepted_headers=self._aggregator.accepted_headers,
        )
        self._phases = Phases(
            self._state,
            self._actions,
            self._aggregator,
            self._donors,
            begin_training=self._recovery.begin_training,
            begin_last_merges=self._recovery.begin_last_merges,
        )
        self._first_steps = FirstSteps(self._state, self._actions)
        self._next_check = now
        if saved is not None:
            self._state.load(saved["job"], now, wall)
            self._phases.load(saved["phases"])

    def _forget_connection(self, connection: int) -> None:
        """A connection is closed: whoever waited for something from it waits no longer."""
        self._donors.forget_connection(connection)
        self._recovery.forget_connection(connection)
        self._initial_model.mark_failed(connection)

    # ================================================================ what the shell reads

    @property
    def phase(self) -> JobPhase:
        return self._state.phase

    @property
    def phase_message(self) -> str:
        return self._state.phase_message

    @property
    def versions(self) -> list[int]:
        """The newest durable version of every fragment; empty before version 0."""
        return self._state.versions

    @property
    def initialised(self) -> bool:
        return self._state.initialised

    @property
    def initialiser(self) -> int | None:
        """The connection that uploads version 0; None: none does."""
        return self._initial_model.connection

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
        return self._state.leases.count_of(slot.index) if slot is not None and self._state.leases is not None else 0

    @property
    def open_rounds(self) -> Mapping[int, Round]:
        return self._state.rounds.open if self._state.rounds else {}

    @property
    def ledger(self) -> Ledger | None:
        """What became of every token; None before version 0. To be read only."""
        return self._state.ledger

    @property
    def merges(self) -> int:
        return self._state.merges

    @property
    def trained_tokens(self) -> int:
        return self._state.ledger.total_trained() if self._state.ledger else 0

    @property
    def wake_at(self) -> float:
        """When a Tick is due at the latest (monotonic seconds)."""
        # In other phases no round closes because of its grace window, so none needs waking for.
        waits = self._state.phase in (JobPhase.WAITING, JobPhase.TRAINING, JobPhase.HOLDING)
        grace = self._state.rounds.wake_at() if self._state.rounds and waits else None
        return self._next_check if grace is None else min(grace, self._next_check)

    def check_push(self, header: PushHeader, process: str | None = None) -> tuple[PushRefusal, str] | None:
        """Judge a push before its bytes are read: the refusal, or None if they may come. ``process``: see
        ``PushChecks.check_header``."""
        return self._aggregator.checks.check_header(header, process)

    # ---------------------------------------------------------------- recovery of lost versions

    def stop_progress(self, now: float) -> float:
        """How much of the job's stop is reached, 0 to 1."""
        return documents.stop_progress(self._state, now)

    @property
    def newest_settled_epoch(self) -> int:
        """What announcements say of the store's lineage (books/lineage.py)."""
        return self._state.lineage.newest_settled

    @property
    def is_recovering(self) -> bool:
        """Whether no push is accepted until it is decided what the store has lost."""
        return self._recovery.is_pending

    def receipt(self, fragment: int) -> Receipt:
        """The receipt that travels with the bytes of the fragment's present version (recovery/receipts.py)."""
        return receipts.make_receipt(self._state, fragment)

    def check_version_upload(self, connection: int, fragment: int, epoch: int, version: int, rows: Receipt) -> str:
        """Whether a lost version may come from this connection, before its bytes are read: empty, or why not."""
        return self._recovery.check_upload(connection, fragment, epoch, version, rows)

    def version_0_origins(self, connection: int) -> Sequence[int]:
        """What this connection uploads as version 0, per fragment: the epoch that its record names as the one in
        which it was made. Empty: the job is new, and version 0 is made now."""
        return self._recovery.origins(connection)

    # ---------------------------------------------------------------- documents

    def status(self, now: float, shell: ShellFigures) -> StatusDocument:
        return documents.status_document(self._state, now, shell)

    def report(self, now: float, shell: ShellFigures, spec_digest: str, peak_rss_bytes: int) -> Report:
        return documents.report(self._state, now, shell, spec_digest, peak_rss_bytes=peak_rss_bytes)

    def state(self, now: float, wall: float = 0.0) -> dict[str, Any]:
        """The durable document (JSON). Accepted pushes that are not offers are not in it: their learners still have
        the work."""
        return {"job": self._state.to_json(now, wall), "phases": self._phases.to_json()}

    # ================================================================ start

    def take_back_version(self, fragment: int, version: int) -> bool:
        """The store has lost the version that the state tells of, and goes on from ``version``. Call it before anything
        else. False: nothing is known of that one, and the fragment is to be stood in for."""
        self._recovery.mark_taken_back()
        return receipts.take_back_version(self._state, fragment, version)

    def close_superseded_tenures(self, headers: Iterable[PushHeader], rows: Iterable[Receipt]) -> None:
        """Call next, with the headers of all records and offers that are newer than the state, and the receipts of
        versions that came from learners."""
        receipts.close_superseded_tenures(self._state, headers, rows)

    def apply_recovered_version(self, fragment: int, version: int, origin: int, rows: Receipt, epoch: int) -> None:
        """Apply a record of ``epoch``, newer than the state, of a version that came from a learner, which held it in
        epoch ``origin``; call in the order of the records."""
        receipts.apply_recovered_version(self._state, fragment, version, origin, rows=rows, epoch=epoch)
        self.record_event(EventKind.RECOVERED, f"fragment {fragment} continues from a learner's version {version}")

    def apply_record(self, fragment: int, version: int, headers: Iterable[PushHeader], epoch: int) -> None:
        """Apply a merge record of ``epoch``, newer than the state; call in version order."""
        self._aggregator.apply_record(fragment, version, headers, epoch)

    def restore_offer(self, header: PushHeader, handle: int, norm: float) -> bool:
        """Take back a spooled offer that the store has; False: it was merged, or makes no sense, and may go."""
        return self._aggregator.restore_offer(header, handle, norm)

    def record_event(self, kind: EventKind, message: str) -> None:
        """Record an event of the job as a whole; it comes out with the next actions."""
        self._actions.record_event(kind, None, message)

    def start(self, now: float, made: Sequence[int] = (), behind: bool = False) -> list[Action]:
        """Begin this epoch, when everything in the store was applied: what did not survive is written off.
        ``made``: the epoch of each fragment's newest version (of one from a learner: the epoch in which it held
        it); ``behind``: whether the tape tells of merges that the store has not."""
        state = self._state
        if state.ledger:
            offers = {header.id for header in self._aggregator.accepted_headers() if header.round == 0}
            for slot, tokens in zip(state.members.slots, state.ledger.write_off_held(offers), strict=True):
                self._actions.record_dropped(slot, tokens // len(state.versions), "died")
            receipts.count_unreported_tokens(state.ledger)
        for repair in repair_state(state):
            self.record_event(EventKind.REPAIRED, repair)
        if state.ledger:
            state.clock.assume(state.ledger.seconds_of_a_slot())
        if state.ledger and state.epochs[-1][0] != self.epoch:
            state.epochs.append((self.epoch, list(state.versions)))
        self._phases.restart(now)
        self._recovery.start(made, behind)
        self._actions.add(ev.Persist())
        self._advance(now)
        return self._actions.drain()

    def write_off_learners(self) -> None:
        """Take every learner of the restored state for gone: drop what it has neither in a merge nor in an offer."""
        if self._state.ledger:
            offers = self._aggregator.accepted_headers()
            for slot in self._state.members.slots:
                self._state.ledger.close_tenure(slot.index, "died", offers)

    # ================================================================ events

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """Take in one event; returns the actions that follow, in the order in which they are to be carried out.

        Raises ``ev.BadMessage``, and has changed nothing, for what a caller cannot truly have said."""
        return self.handle_together((event,), now)

    def handle_together(self, events: Iterable[ev.Event], now: float) -> list[Action]:
        """Take in events of one moment, and only then do what is due. For simulations of many learners, whose reports
        come together. Raises ``ev.BadMessage`` at the first that cannot be true, those before it taken in."""
        for event in events:
            self._take_in(event, now)
        self._advance(now)
        return self._actions.drain()

    def _take_in(self, event: ev.Event, now: float) -> None:
        """Change what is known by an event, and do nothing that is due."""
        match event:
            case ev.Join():
                self._admission.join(event, now)
            case ev.ConnectionLost():
                self._admission.connection_lost(event.connection)
            case ev.Reported():
                self._reported(event.connection, event.report, now)
            case ev.PushReceived():
                if self._aggregator.receive_push(event, now):
                    self._phases.record_progress(now)
            case ev.PushAdvanced():
                self._phases.record_bytes(now)
            case ev.InitialModelStored():
                self._initial_model_stored(event, now)
            case ev.InitialModelFailed():
                self._recovery.disbelieve(event.connection, event.not_believed)
                self._initial_model.mark_failed(event.connection)
            case ev.MergeDurable():
                self._aggregator.complete_merge(event, now)
            case ev.VersionSent():
                self._aggregator.record_arrival(event, now)
            case ev.LeaseRequested():
                self._grant_lease(event.connection)
            case ev.DrainRequested():
                slot = self._state.members.by_connection(event.connection)
                if slot is not None and slot.occupied:
                    slot.state = SlotState.DRAINING
            case ev.Drained():
                self._admission.drained(event.connection)
                self._phases.record_progress(now)
            case ev.ProcessEnded():
                self._admission.process_ended(event)
            case ev.Evaluated():
                self._evaluated(event.connection, event.evaluation)
            case ev.EvaluationAdvanced():
                if event.connection in self._state.members.evaluators:
                    self._phases.record_score_progress(event.connection, event.share, now)
            case ev.EndRequested():
                self._phases.request_end(event.phase, event.message)
            case ev.PeerStateRequested():
                self._donors.request(event, now)
            case ev.PeerStateReceived():
                self._donors.received(event.transfer)
            case ev.PeerStateAdvanced():
                self._donors.advanced(event.transfer, now)
            case ev.PeerStateFailed():
                self._donors.failed(event.connection, event.transfer)
            case ev.LostVersionAdvanced():
                self._recovery.mark_advanced(event.connection, event.fragment, event.whole, now)
            case ev.LostVersionAccepted():
                self._recovery.mark_accepted(event.fragment)
            case ev.LostVersionStored():
                self._recovery.mark_stored(event.fragment)
            case ev.LostVersionFailed():
                self._recovery.mark_failed(event.connection, event.fragment, now, event.not_believed)
            case ev.ShardLost():
                self._aggregator.shards.mark_lost(event.shard, event.why, now)
            case ev.ShardReady():
                self._aggregator.shards.mark_ready(event.shard, event.handles, now)
                self._phases.record_bytes(now)
            case ev.Tick():
                pass
            case _:
                assert_never(event)

    def _reported(self, connection: int, report: StepReport, now: float) -> None:
        slot = self._state.members.by_connection(connection)
        if slot is None:
            return
        if nonsense := find_nonsense(self._state, slot, report):
            raise ev.BadMessage(f"report: {nonsense}")
        slot.holder.heard_at = now
        slot.reported.batches, slot.reported.ranks = report.batches, report.ranks
        if apply_report(self._state, self._actions, slot, report, now=now):
            slot.holder.ready = True

    def _evaluated(self, connection: int, score: Evaluation) -> None:
        state = self._state
        if connection not in state.members.evaluators:
            return
        if score.sum_versions > sum(self.versions):
            merges = f"{score.sum_versions} merges, where the job has had {sum(self.versions)}"
            raise ev.BadMessage(f"evaluation: of {merges}")
        # The syncer before this one may have known, and told, of more tokens: learners tell of them again, if they can.
        score = replace(score, tokens=min(score.tokens, self.trained_tokens))
        state.scores.apply(score, may_be_final=state.phase is JobPhase.EVALUATING)

    def _grant_lease(self, connection: int) -> None:
        state = self._state
        slot = state.members.by_connection(connection)
        if slot is None or state.leases is None or state.is_ending or state.phase in ENDED_PHASES:
            return
        lost = [s.index for s in state.members.slots if s.state is SlotState.LOST]
        grant = self.config.mode.grant_lease(state.leases, slot.index, lost)
        self._actions.add(ev.Persist(), ev.GrantLease(connection, grant))

    def _initial_model_stored(self, event: ev.InitialModelStored, now: float) -> None:
        state = self._state
        if state.initialised or self._recovery.hold_back_version_0():
            return
        state.make_books(event.layout_digest, event.fragment_elements)
        assert state.ledger and state.rounds
        for slot in state.members.slots:
            if slot.occupied:
                state.ledger.open_tenure(slot.index, slot.tenure or slot.holder.incarnation)
                state.rounds.begin_progress(slot.index, slot.step)
        self._initial_model.complete()
        self._admission.refuse_other_models(now)  # before anything is announced to them
        self._actions.add(ev.Persist())
        self._actions.add(*(state.announcement(fragment) for fragment in range(state.rounds.fragments)))
        self.record_event(EventKind.INITIALISED, f"version 0 is durable (fragments: {state.rounds.fragments})")

    def _advance(self, now: float) -> None:
        """Do whatever is due, from what is known. Idempotent."""
        state = self._state
        self._admission.lose_silent_slots(now)
        self._admission.seat_standbys(now)
        if state.members.open_places:
            state.clock.set_slots(len(state.members.current), now)
        self._initial_model.advance(now)
        self._recovery.advance(now)
        self._donors.advance(now)
        self._phases.advance(now)
        self._first_steps.advance(now)
        if state.rounds and state.phase in (JobPhase.TRAINING, JobPhase.HOLDING):
            self._aggregator.open_rounds(now)
        if state.rounds and state.phase not in ENDED_PHASES:
            self._aggregator.start_ready_merges(now)
        self._next_check = now + min(1.0, self.config.heartbeat_timeout / 4)
