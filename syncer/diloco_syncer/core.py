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

The parts: ``membership`` (slots, incarnations), ``rounds`` (when a fragment is
merged), ``intake`` (which pushes count), ``ledger`` (what became of every token),
``leases`` (who trains which data), ``clock`` (elapsed, uptime, holds),
``phases`` (start, hold, drain, end) and ``peers`` (a newcomer's optimizer state).

Durability. A merge counts when its record is durable: the wall says ``Merged``,
and only then does the version rise here. ``Persist`` asks for the state document
before the actions behind it are carried out; what happened after the last one is
told again by records (``recover``), by spooled offers (``restore_offer``) and by
the learners' cumulative reports. ``start`` is called once after these.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

from diloco_syncer import events as ev
from diloco_syncer.clock import JobClock
from diloco_syncer.config import CoreConfig
from diloco_syncer.events import ENDED, Action, MergedPush, PhaseName, PushHeader, Reason
from diloco_syncer.intake import IntakeRules, NormGate, check_header
from diloco_syncer.leases import LeaseBook
from diloco_syncer.ledger import Ledger, PushId
from diloco_syncer.membership import Membership, Slot, SlotState
from diloco_syncer.peers import PeerBook
from diloco_syncer.phases import Phases
from diloco_syncer.rounds import Accepted, Progress, Round, RoundBook, superseded
from diloco_syncer.summary import core_report, core_status
from diloco_syncer.weights import weights as merge_weights

LATE_ROUNDS = 3  # late in so many rounds running: starved


class Core:
    """One job's (shard's) decisions. ``state``: a document from ``state()``, or None
    for a new job; ``epoch``: the one that this process claimed; ``now``: monotonic
    seconds; ``wall``: seconds since 1970, only compared with the state's own."""

    def __init__(
        self, config: CoreConfig, state: dict[str, Any] | None, epoch: int, now: float, wall: float = 0.0
    ) -> None:
        self.config = config
        self.epoch = epoch
        self.members = Membership(list(config.places))
        self.clock = JobClock()
        self.phases = Phases(config)
        self.peers = PeerBook(config.peer_seconds, config.checkpoint_seconds)
        self.leases: LeaseBook | None = None
        self.layout_digest = ""
        self.fragment_elements: tuple[int, ...] = ()
        self.rounds: RoundBook | None = None
        self.ledger: Ledger | None = None
        self.gate = NormGate(config.norm_gate, 0)
        self.offers: list[list[Accepted]] = []
        self.epochs: list[tuple[int, list[int]]] = []  # (epoch, versions when it began)
        self.merges = 0
        self.eval_loss: list[tuple[int, float]] = []
        self.initial_loss: float | None = None
        self.final_loss: float | None = None
        self.initialiser: int | None = None
        self.intake = IntakeRules(config.encoding, config.max_versions, config.rules.deterministic)
        self._out: list[Action] = []
        self._next_check = now
        if state is not None:
            self._load(state, now, wall)

    # ================================================================ start

    @property
    def phase(self) -> PhaseName:
        return self.phases.name

    @property
    def versions(self) -> list[int]:
        return self.rounds.versions if self.rounds else []

    @property
    def initialised(self) -> bool:
        return self.rounds is not None

    def _make_books(self, layout_digest: str, fragment_elements: tuple[int, ...]) -> None:
        fragments = len(fragment_elements)
        self.layout_digest, self.fragment_elements = layout_digest, fragment_elements
        self.rounds = RoundBook(fragments, self.config.rules)
        self.ledger = Ledger(fragments, len(self.members.slots))
        self.gate = NormGate(self.config.norm_gate, fragments)
        self.offers = [[] for _ in range(fragments)]
        self.epochs = [(self.epoch, [0] * fragments)]

    def recover(self, fragment: int, version: int, headers: Iterable[PushHeader]) -> None:
        """A merge record newer than the state, found in the store; call in version order."""
        assert self.rounds and self.ledger
        if version <= self.rounds.versions[fragment]:
            return
        headers = list(headers)
        for header in headers:
            slot = self._slot(header.slot)
            if slot is None:
                continue
            slot.step = max(slot.step, header.report.slot_step)
            if self.ledger.of_open_tenure(header):
                self.ledger.tell(slot.index, header.report)
            self._count_merged(slot, header, version)
        self.rounds.recovered(fragment, version, headers)
        self.merges += 1

    def restore_offer(self, header: PushHeader, handle: int, norm: float) -> bool:
        """A spooled offer found in the store; False: it was merged (or makes no sense) and may go."""
        assert self.rounds and self.ledger
        slot = self._slot(header.slot)
        if slot is None or header.fragment >= self.rounds.fragments:
            return False
        if header.first_step <= slot.merged_last_step.get(header.fragment, 0):
            return False
        cell = self.ledger.books[slot.index].cells[header.fragment]
        if not self.ledger.of_open_tenure(header) and header.id not in cell.held:
            return False
        if self.ledger.of_open_tenure(header):
            self.ledger.tell(slot.index, header.report)
            slot.accepted_sequence[header.fragment] = max(
                header.sequence, slot.accepted_sequence.get(header.fragment, 0)
            )
        slot.step = max(slot.step, header.report.slot_step)
        self.offers[header.fragment].append(Accepted(header, handle, norm))
        return True

    def start(self, now: float) -> list[Action]:
        """Recovery is over: settle what did not survive, and begin this epoch."""
        if self.rounds and self.ledger:
            self.ledger.write_off_held({o.header.id for waiting in self.offers for o in waiting})
            if self.epochs[-1][0] != self.epoch:
                self.epochs.append((self.epoch, list(self.rounds.versions)))
            if self.rounds.versions and self.phase in (PhaseName.TRAINING, PhaseName.HOLDING):
                self.phases.name = PhaseName.WAITING
            if self.phase is PhaseName.EVALUATING:
                self.phases.since = now
        self._out = [ev.Persist()]
        self._advance(now)
        return self._take_out()

    # ================================================================ events

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """One event in, the actions that follow out, in order."""
        self._out = []
        match event:
            case ev.Join():
                self._join(event, now)
            case ev.ConnectionLost():
                self._connection_lost(event.connection, now)
            case ev.Reported():
                self._reported(event.connection, event.report, now)
            case ev.PushReceived():
                self._push(event, now)
            case ev.InitialStored():
                self._initial_stored(event)
            case ev.InitialFailed():
                if self.initialiser == event.connection:
                    self.initialiser = None
            case ev.Merged():
                self._merged(event, now)
            case ev.LeaseRequested():
                self._lease(event.connection)
            case ev.DrainRequested():
                slot = self.members.by_connection(event.connection)
                if slot is not None and slot.occupied:
                    slot.state = SlotState.DRAINING
            case ev.DrainedEvent():
                self._drained(event.connection)
            case ev.ProcessGone():
                self._process_gone(event)
            case ev.Evaluated():
                self._evaluated(event)
            case ev.EndRequested():
                self.phases.request_end(event.phase, event.message)
            case ev.PeerStateWanted():
                self.peers.want(event.connection, now)
            case ev.PeerStateArrived():
                self._out += self.peers.arrived(event.transfer)
            case ev.PeerStateFailed():
                self.peers.failed(event.transfer)
            case ev.Tick():
                pass
        self._advance(now)
        return self._take_out()

    @property
    def wake_at(self) -> float:
        """When a Tick is due at the latest (monotonic seconds)."""
        ends = [self._next_check]
        if self.rounds and (grace := self.rounds.wake_at()) is not None:
            ends.append(grace)
        return min(ends)

    def _take_out(self) -> list[Action]:
        out, self._out = self._out, []
        return out

    def _note(self, kind: str, slot: Slot | None, message: str, **details: object) -> None:
        index, incarnation = (-1, 0) if slot is None else (slot.index, slot.incarnation)
        self._out.append(ev.Note(kind, index, incarnation, message, dict(details)))

    def _slot(self, index: int) -> Slot | None:
        return self.members.slots[index] if 0 <= index < len(self.members.slots) else None

    # ---------------------------------------------------------------- joining

    def _join(self, join: ev.Join, now: float) -> None:
        if self.layout_digest and join.layout_digest != self.layout_digest:
            self._refuse(
                join, "other-layout",
                f"its model's layout is {join.layout_digest[:12]}, the job's is {self.layout_digest[:12]}: "
                "give every learner the same model and sync.fragments",
            )  # fmt: skip
            return
        differing = sorted(k for k, v in join.digests.items() if self.config.digests.get(k, v) != v)
        if differing:
            fields = ", ".join(differing)
            self._refuse(join, "spec-drift", f"{fields} differ from the job's: apply the same job everywhere")
            return
        if not join.evaluator and join.sequences and self.leases and join.sequences != self.leases.sequences:
            self._refuse(
                join, "other-data",
                f"its data set has {join.sequences} sequences, the job's has {self.leases.sequences}: "
                "give every learner the same data",
            )  # fmt: skip
            return
        if join.evaluator:
            self.members.evaluators.add(join.connection)
            self._admit(join, None)
            return
        if join.sequences and self.leases is None:
            places = len(self.config.places)
            self.leases = LeaseBook(self.config.seed, join.sequences, places, self.config.rules.deterministic)
        slot = self.members.own(join)
        if self.phase not in ENDED and slot is not None:
            self._seat(slot, join, now, continuing=True)
            return
        if self.phase in ENDED or self.phases.closing:
            self._admit(join, None)
            return
        slot = self.members.choose(join, self.config.rules.deterministic)
        if slot is None:
            if self.config.rules.deterministic:
                self._refuse(
                    join, "no-such-place", f"deterministic mode has no slot for {join.region}-{join.ordinal}"
                )
                return
            self.members.standby[join.connection] = join
            self._admit(join, None)
            self._note("spare", None, f"{join.region}-{join.ordinal} stands by")
            return
        self._seat(slot, join, now, continuing=False)

    def _refuse(self, join: ev.Join, reason: str, message: str) -> None:
        self._out.append(ev.Refuse(join.connection, reason, message, True))

    def _admit(self, join: ev.Join, seat: ev.Seat | None, merged: tuple[MergedPush, ...] = ()) -> None:
        self._out.append(
            ev.Admit(
                connection=join.connection,
                observer=join.evaluator,
                seat=seat,
                initialise=self.initialiser == join.connection,
                phase=self.phase,
                message=self.phases.message,
                merged=merged,
            )
        )

    def _seat(
        self, slot: Slot, join: ev.Join, now: float, *, continuing: bool, promote: bool = False
    ) -> None:
        """Give the slot to the process; fence and write off whoever had it."""
        old = slot.connection
        if old is not None and old != join.connection:
            self._out.append(
                ev.Refuse(
                    old, "superseded", f"slot {slot.index} was taken by a newer process", not continuing
                )
            )
            slot.connection = None
        if not continuing and slot.incarnation:
            self._vacate(slot, "died")
        first_taken = not slot.incarnation
        incarnation = self.members.sit(slot, join, now)
        if not continuing:
            slot.clear_tenure()
            if first_taken and self.clock.elapsed(now) > 0 and not self.config.rules.deterministic:
                slot.step = max(s.step for s in self.members.slots)
            slot.step_at_seat = slot.step
            if self.rounds and self.ledger:
                self.ledger.open_tenure(slot.index, incarnation)
                self.rounds.seat(slot.index, slot.step)
        slot.ready = False
        if (
            not self.initialised
            and self.initialiser is None
            and not (self.config.rules.deterministic and slot.index != 0)
        ):
            self.initialiser = join.connection
        leases = self.leases.of(slot.index) if self.leases else ()
        tokens = self.ledger.trained(slot.index) if self.ledger else 0
        seat = ev.Seat(slot.index, incarnation, continuing, slot.step, tokens, leases)
        self._out.append(ev.Persist())
        if promote:
            self._out.append(ev.Promote(join.connection, seat, self._merged_of(slot)))
        else:
            self._admit(join, seat, self._merged_of(slot))
        self._note(
            "joined", slot,
            f"{join.region}-{join.ordinal} {'came back to' if continuing else 'took'} slot {slot.index} "
            f"at step {slot.step}",
            region=join.region, ordinal=join.ordinal, process=join.process, continuing=continuing,
        )  # fmt: skip

    def _merged_of(self, slot: Slot) -> tuple[MergedPush, ...]:
        return tuple(slot.merged.get(p, MergedPush()) for p in range(len(self.versions)))

    def _vacate(self, slot: Slot, reason: str) -> None:
        """The tenure ends: write off what is pending, keep what was accepted."""
        if self.ledger is None:
            return
        dropped = self.ledger.close_tenure(slot.index, reason, self._accepted_headers())
        if dropped:
            self._note("dropped", slot, f"{dropped // max(1, len(self.versions))} tokens dropped ({reason})")

    def _accepted_headers(self) -> list[PushHeader]:
        assert self.rounds
        waiting = [offer.header for offers in self.offers for offer in offers]
        return waiting + [push.header for r in self.rounds.open.values() for push in r.pushes]

    # ---------------------------------------------------------------- leaving

    def _connection_lost(self, connection: int, now: float) -> None:
        self.members.standby.pop(connection, None)
        self.members.evaluators.discard(connection)
        if self.initialiser == connection:
            self.initialiser = None
        self.peers.forget(connection)
        slot = self.members.by_connection(connection)
        if slot is None:
            return
        slot.connection = None
        if slot.occupied:
            # A broken stream alone proves nothing: the timeout, or somebody who knows, decides.
            slot.state = SlotState.SUSPECT
            self._note("suspect", slot, f"slot {slot.index}: connection lost")

    def _process_gone(self, event: ev.ProcessGone) -> None:
        for slot in self.members.slots:
            if (slot.region, slot.ordinal) != (event.region, event.ordinal) or not slot.occupied:
                continue
            if event.process and event.process != slot.process:
                continue
            self._lose(slot, "gone", f"slot {slot.index}: its process is gone ({event.reason})")

    def _lose(self, slot: Slot, kind: str, message: str) -> None:
        slot.state = SlotState.LOST
        if slot.connection is not None:
            self._out.append(ev.Refuse(slot.connection, "lost", "not heard in time: join again", False))
            self.peers.forget(slot.connection)
            if self.initialiser == slot.connection:
                self.initialiser = None
            slot.connection = None
        self._out.append(ev.Persist())
        self._note(kind, slot, message)

    def _drained(self, connection: int) -> None:
        slot = self.members.by_connection(connection)
        if slot is None or not slot.occupied:
            return
        self._vacate(slot, "drain")
        slot.state = SlotState.DRAINED
        slot.connection = None
        slot.process = ""
        if self.leases:
            self.leases.give_back(slot.index)
        self._out.append(ev.Persist())
        self._note("drained", slot, f"slot {slot.index} left with its work offered, at step {slot.step}")

    # ---------------------------------------------------------------- reports

    def _reported(self, connection: int, report: ev.ReportCounts, now: float) -> None:
        slot = self.members.by_connection(connection)
        if slot is None or not self.ledger or not self.rounds:
            if slot is not None:
                slot.heard_at = now
            return
        slot.heard_at = now
        if slot.state is SlotState.SUSPECT:
            slot.state = SlotState.ACTIVE
        if len(report.fragments) != self.rounds.fragments:
            return
        if self._tell(slot, report, now) and not slot.ready:
            slot.ready = True
            self._pull_open_rounds(slot)

    def _tell(self, slot: Slot, report: ev.ReportCounts, now: float) -> bool:
        assert self.ledger
        before = self.ledger.trained(slot.index)
        if not self.ledger.tell(slot.index, report):
            return False
        slot.step = max(slot.step, report.slot_step)
        slot.step_seconds = report.step_seconds
        slot.paused = report.paused
        if report.loss == report.loss:
            slot.loss = report.loss
        if self.leases:
            self.leases.move(slot.index, report.cursors)
        if report.trained_steps and not slot.advanced:
            slot.advanced = True
            self._note("first-step", slot, f"slot {slot.index} made its first step, {slot.step}")
        trained = self.ledger.trained(slot.index)
        if trained > before:
            self.clock.start(now)
            self.clock.advance(now, slot.step_seconds, self.ledger.total_trained())
        return True

    def _lease(self, connection: int) -> None:
        slot = self.members.by_connection(connection)
        if slot is None or self.leases is None or self.phases.closing or self.phase in ENDED:
            return
        lost = [s.index for s in self.members.slots if s.state is SlotState.LOST]
        grant = self.leases.grant(slot.index, lost)
        self._out += [ev.Persist(), ev.GrantLease(connection, grant)]

    # ---------------------------------------------------------------- pushes

    def admit_push(self, header: PushHeader) -> tuple[Reason, str] | None:
        """The verdict on a header before its bytes are read; None: send them."""
        if self.phase in ENDED:
            return Reason.ENDED, f"the job is {self.phase.value}"
        if not self.rounds:
            return Reason.OTHER_LAYOUT, "version 0 does not exist yet"
        if not 0 <= header.fragment < self.rounds.fragments:
            return Reason.INCONSISTENT, f"there is no fragment {header.fragment}"
        return check_header(
            header,
            rules=self.intake,
            slot=self._slot(header.slot),
            version=self.rounds.versions[header.fragment],
            opened=self.rounds.open.get(header.fragment),
            layout_digest=self.layout_digest,
            base_known=self._base_known(header),
        )

    def _base_known(self, header: PushHeader) -> bool:
        """Is (epoch, version) a version that this store has had? A store that lost
        data began its epoch below what learners saw before."""
        if header.epoch > self.epoch:
            return False
        later = [versions for epoch, versions in self.epochs if epoch > header.epoch]
        return not later or header.base_version <= later[0][header.fragment]

    def _push(self, event: ev.PushReceived, now: float) -> None:
        header = event.header
        verdict = self.admit_push(header)
        if verdict is None and not event.finite:
            verdict = (Reason.NOT_FINITE, "the outer gradient has NaN or infinite values")
        if verdict is None:
            verdict = self.gate.check(header.fragment, event.norm)
        if verdict is not None:
            self._out.append(ev.PushVerdict(event.handle, *verdict))
            return
        assert self.rounds
        slot = self.members.slots[header.slot]
        self._tell(slot, header.report, now)
        slot.accepted_sequence[header.fragment] = header.sequence
        push = Accepted(header, event.handle, event.norm)
        opened = self.rounds.open.get(header.fragment)
        if opened is None and header.round:
            opened = self.rounds.open_round(header.fragment, now, self._progress())
        self._out.append(ev.PushVerdict(event.handle, None, "", offer=not header.round))
        if (
            opened is not None
            and not opened.merging
            and not (header.round == 0 and self.config.rules.deterministic)
        ):
            replaced = self.rounds.accept(opened, push, now)
        else:
            waiting = self.offers[header.fragment]
            replaced = superseded(waiting, header)
            self.offers[header.fragment] = [o for o in waiting if o not in replaced] + [push]
        self._out += [ev.DropPayload(old.handle) for old in replaced]

    # ---------------------------------------------------------------- merging

    def _merged(self, event: ev.Merged, now: float) -> None:
        assert self.rounds and self.ledger
        closed = self.rounds.merged(event.fragment, event.version, event.merge_seconds)
        self.merges += 1
        self.gate.add(event.fragment, event.norms)
        for push in closed.pushes:
            slot = self.members.slots[push.header.slot]
            self._count_merged(slot, push.header, event.version)
            if not slot.merged_in_tenure and push.header.incarnation == slot.incarnation:
                slot.merged_in_tenure = True
                self._note(
                    "first-merge", slot, f"slot {slot.index} is in a merge (fragment {event.fragment})"
                )
            self._out.append(ev.DropPayload(push.handle))
        self._judge_lateness(closed)
        merged = {
            slot.connection: slot.merged.get(event.fragment, MergedPush())
            for slot in self.members.slots
            if slot.connection is not None
        }
        self._out.append(ev.Announce(event.fragment, event.version, merged, self.ledger.total_trained()))

    def _count_merged(self, slot: Slot, header: PushHeader, version: int) -> None:
        assert self.ledger
        current = self.ledger.of_open_tenure(header)
        self.ledger.merge(header)
        slot.merged_pushes += 1
        slot.merged_last_step[header.fragment] = max(
            header.last_step, slot.merged_last_step.get(header.fragment, 0)
        )
        if current:
            slot.merged[header.fragment] = MergedPush(header.sequence, version)
            accepted = slot.accepted_sequence.get(header.fragment, 0)
            slot.accepted_sequence[header.fragment] = max(accepted, header.sequence)

    def _judge_lateness(self, closed: Round) -> None:
        """A slot late in three rounds running shows as starved."""
        responded = closed.slots()
        for index in closed.pulled:
            slot = self.members.slots[index]
            if index in responded or not slot.occupied:
                slot.late_rounds, slot.starved = 0, False
                continue
            slot.late_rounds += 1
            if slot.late_rounds >= LATE_ROUNDS and not slot.starved:
                slot.starved = True
                self._note("starved", slot, f"slot {index} was late in {slot.late_rounds} rounds running")

    def _progress(self) -> list[Progress]:
        """The active learners, as the opening rule sees them."""
        assert self.ledger
        learners = []
        for slot in self.members.slots:
            report = self.ledger.books[slot.index].report
            if (
                slot.state is SlotState.ACTIVE
                and slot.connection is not None
                and slot.ready
                and report is not None
            ):
                bases = tuple(f.base_version for f in report.fragments)
                learners.append(Progress(slot.index, slot.step, bases))
        return learners

    def _pull_open_rounds(self, slot: Slot) -> None:
        """A newcomer is asked to take part in what is open."""
        assert self.rounds
        if self.config.rules.deterministic or slot.connection is None:
            return
        for opened in self.rounds.open.values():
            if not opened.merging and slot.index not in opened.slots():
                opened.pulled.add(slot.index)
                self._out.append(ev.Pull(slot.connection, opened.id, opened.fragment, opened.version))

    def _open_rounds(self, now: float) -> None:
        assert self.rounds
        active = self._progress()
        while (fragment := self.rounds.due(active)) is not None:
            opened = self.rounds.open_round(fragment, now, active)
            for index in sorted(opened.pulled):
                connection = self.members.slots[index].connection
                if connection is not None:
                    self._out.append(ev.Pull(connection, opened.id, fragment, opened.version))
            self._take_offers(opened, now)

    def _take_offers(self, opened: Round, now: float) -> None:
        """Waiting offers count in this round, unless they have aged out."""
        assert self.rounds
        waiting, self.offers[opened.fragment] = self.offers[opened.fragment], []
        for offer in waiting:
            self.rounds.accept(opened, offer, now)

    def _take_ready_rounds(self, now: float) -> None:
        assert self.rounds
        if self.phases.name is PhaseName.DRAINING and not self.config.rules.deterministic:
            return  # one last merge of everything, when all have offered
        reachable = self.members.reachable()
        for opened in list(self.rounds.open.values()):
            if self.rounds.ready(opened, now, reachable):
                self._out.append(self._take(opened, now))

    def _take(self, opened: Round, now: float) -> ev.Merge:
        """Close the round to further pushes; the merge that it asks for."""
        assert self.rounds and self.ledger
        times = [
            s.step_seconds for s in self.members.slots if s.state is SlotState.ACTIVE and s.step_seconds > 0
        ]
        pushes = self.rounds.take(opened, median(times) if times else None)
        headers = [push.header for push in pushes]
        shares = merge_weights(self.config.weights, [h.tokens for h in headers], [h.steps for h in headers])
        responders = tuple(
            ev.Responder(push.header, push.handle, float(share), opened.version - push.header.oldest_version)
            for push, share in zip(pushes, shares, strict=True)
        )
        quorum_at = opened.quorum_at if opened.quorum_at is not None else now
        return ev.Merge(
            fragment=opened.fragment,
            version=opened.version + 1,
            round=opened.id,
            responders=responders,
            quorum_seconds=quorum_at - opened.opened_at,
            waited_seconds=now - opened.opened_at,
            job_tokens=self.ledger.total_trained(),
        )

    # ---------------------------------------------------------------- the rest

    def _initial_stored(self, event: ev.InitialStored) -> None:
        if self.initialised:
            return
        self._make_books(event.layout_digest, event.fragment_elements)
        assert self.ledger and self.rounds
        for slot in self.members.slots:
            if slot.occupied:
                self.ledger.open_tenure(slot.index, slot.incarnation)
                self.rounds.seat(slot.index, slot.step)
        self.initialiser = None
        self._out.append(ev.Persist())
        for fragment in range(self.rounds.fragments):
            self._out.append(ev.Announce(fragment, 0, {}, 0))
        self._note("initialised", None, f"version 0 is durable: {self.rounds.fragments} fragments")

    def _evaluated(self, event: ev.Evaluated) -> None:
        if event.sum_versions == 0 and self.initial_loss is None:
            self.initial_loss = event.loss
        if not self.eval_loss or event.tokens >= self.eval_loss[-1][0]:
            self.eval_loss.append((event.tokens, event.loss))
        if event.final and self.phase is PhaseName.EVALUATING:
            self.final_loss = event.loss

    def _advance(self, now: float) -> None:
        """Whatever is due, from what is known. Idempotent."""
        self._lose_silent(now)
        self._seat_standbys(now)
        if not self.initialised and self.initialiser is None:
            self._ask_initial()
        self._out += self.peers.advance(self.members, self.phases.closing, now)
        self._out += self.phases.advance(self, now)
        if self.rounds and self.phase in (PhaseName.TRAINING, PhaseName.HOLDING):
            self._open_rounds(now)
        if self.rounds and self.phase not in ENDED:
            self._take_ready_rounds(now)
        self._next_check = now + min(1.0, self.config.heartbeat_timeout / 4)

    def _lose_silent(self, now: float) -> None:
        if self.phase in ENDED:
            return
        for slot in self.members.slots:
            if slot.occupied and now - slot.heard_at > self.config.heartbeat_timeout:
                silent = now - slot.heard_at
                self._lose(slot, "lost", f"slot {slot.index}: nothing heard for {silent:.1f} s")

    def _seat_standbys(self, now: float) -> None:
        if self.phase in ENDED or self.phases.closing:
            return
        for connection, join in list(self.members.standby.items()):
            slot = self.members.free_for(join)
            if slot is None:
                return
            del self.members.standby[connection]
            self._seat(slot, join, now, continuing=False, promote=True)

    def _ask_initial(self) -> None:
        for slot in self.members.slots:
            if slot.connection is None or (self.config.rules.deterministic and slot.index != 0):
                continue
            self.initialiser = slot.connection
            self._out.append(ev.AskInitial(slot.connection))
            return

    def finish_rounds(self, now: float) -> tuple[bool, list[Action]]:
        """The last merges, when everybody has left: whether none is under way any
        more, and the actions that start those which are due."""
        assert self.rounds
        out: list[Action] = []
        for fragment in range(self.rounds.fragments):
            opened = self.rounds.open.get(fragment)
            if opened is not None and opened.merging:
                continue
            if opened is None and self.offers[fragment]:
                if len({o.header.slot for o in self.offers[fragment]}) < self.config.rules.quorum:
                    continue  # short of K: they stay, and merge after a resume
                opened = self.rounds.open_round(fragment, now, ())
            if opened is None:
                continue
            self._take_offers(opened, now)
            if len(opened.slots()) >= self.config.rules.quorum:
                out.append(self._take(opened, now))
        return not any(r.merging for r in self.rounds.open.values()), out

    # ================================================================ to tell

    def status(self, now: float) -> dict[str, Any]:
        """The core's part of the status document (docs/design.md)."""
        return core_status(self, now)

    def report(self, now: float) -> dict[str, Any]:
        """The core's part of report.json."""
        return core_report(self, now)

    # ================================================================ durable

    def state(self, now: float, wall: float = 0.0) -> dict[str, Any]:
        """The durable document (JSON). Accepted pushes that are not offers are not
        in it: their learners still have the work."""
        return {
            "members": self.members.to_json(),
            "clock": self.clock.to_json(now, wall),
            "phase": self.phases.to_json(),
            "leases": self.leases.to_json() if self.leases else None,
            "layout_digest": self.layout_digest,
            "fragment_elements": list(self.fragment_elements),
            "rounds": self.rounds.to_json() if self.rounds else None,
            "ledger": self.ledger.to_json() if self.ledger else None,
            "epochs": self.epochs,
            "merges": self.merges,
            "eval_loss": self.eval_loss,
            "initial_loss": self.initial_loss,
            "final_loss": self.final_loss,
        }

    def _load(self, state: dict[str, Any], now: float, wall: float) -> None:
        self.members.load(state["members"], now)
        if state["rounds"] is not None:
            self._make_books(state["layout_digest"], tuple(state["fragment_elements"]))
            assert self.rounds
            self.rounds.load(state["rounds"])
            self.ledger = Ledger.from_json(self.rounds.fragments, state["ledger"])
            self.ledger.grow(len(self.members.slots))
            self.epochs = [(epoch, list(versions)) for epoch, versions in state["epochs"]]
        if state["leases"] is not None:
            self.leases = LeaseBook.from_json(
                self.config.seed, self.config.rules.deterministic, state["leases"]
            )
        self.clock.load(state["clock"], now, wall)
        self.phases.load(state["phase"], self)
        self.merges = state["merges"]
        self.eval_loss = [(tokens, loss) for tokens, loss in state["eval_loss"]]
        self.initial_loss, self.final_loss = state["initial_loss"], state["final_loss"]

    def held_offers(self) -> set[PushId]:
        """Ids of offers that wait for a merge: their spooled bytes are still needed."""
        waiting = {o.header.id for offers in self.offers for o in offers}
        if self.rounds:
            waiting |= {
                p.header.id for r in self.rounds.open.values() for p in r.pushes if p.header.round == 0
            }
        return waiting
