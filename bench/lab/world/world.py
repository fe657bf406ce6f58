"""A job in virtual time: the syncer's real core, learners with the real adoption rule, and everything between them.

Theory of operation
-------------------
Between the syncer's core (``diloco_syncer.core``) and the learners (``learner.py``) lie messages. A message takes its
link's latency; a payload (a push, a version, an optimizer's state) takes its bytes' time as well, behind those that
the same link carries already. Nothing is lost and nothing is repeated: what breaks is what ``kill``, ``cut`` and
``stall`` break. The syncer does not fail here; ``tests/syncer_simulation`` is about that. A world may begin with the
core of a job that goes on, and with the learners that outlived its syncer (``continue_learner``).

A learner makes a step in ``step_seconds``, and at its end does what the worker does between two steps: adopts what was
downloaded, answers pulls, reports. Steps that end at the same moment are made in one call (``Training.train``), so
that a trainer may compute them together. What arrives at the syncer at the same moment reaches the core together.

The job ends as a real one does: its stop is reached, all offer what they have, the last merges are made.

Two runs of one world are the same, bit for bit: the only randomness is what ``Training`` and the caller bring. Not
simulated: leases of data (a slot's step says what it trains), spares' disks, lost and repeated messages, evaluators.

Example. Two learners, step 1 s, latency 0.05 s, one fragment, H = 4, K = 1. Both report their fourth step at 4.05 s; a
round opens, the pulls arrive at 4.1 s, and the snapshots are taken at the next boundary, 5 s. Both pushes are there at
5.05 s; the merge takes ``merge_seconds``, and the version arrives within 5.3 s and is adopted at 6 s, one step after
the snapshot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import count

from diloco_protocol.arrays import codec
from diloco_protocol.arrays.kernels import Bytes
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.vocabulary import ENDED_PHASES, JobPhase, PushRefusal
from diloco_protocol.wire.records import PushHeader, PushPlan, Seat, StepReport
from diloco_syncer.core import events as ev
from diloco_syncer.core.config import CoreConfig
from diloco_syncer.core.core import Core
from lab.world.broadcasts import Broadcasts
from lab.world.learner import LearnerProcess, OptimizerState
from lab.world.links import LinkRates, SimulatedLink
from lab.world.parts import Replica, Training, Versions
from lab.world.timeline import Timeline
from lab.world.values import LearnerValues

Place = tuple[str, int]
EPOCH = 1
JOIN_SECONDS = 0.2  # until a process that was told to come later asks again
LEAST_TICK = 0.001  # between two ticks of the core


class World:
    """One job. ``pace``: seconds of a step, by place; ``vary``: by what factor the step that begins there takes longer;
    ``links``: by place, ``link`` where it names none. ``merge_seconds``: of a merge, with what makes it durable.
    ``state_bytes``: an inner optimizer's. ``core``: one that was made from an earlier one's state, with the epochs of
    its newest versions (``made``); None: the job begins. ``on_event``: called with each event for the job's log.

    ``learners``: the processes that live. ``seen``: what happened how often. ``bytes_up``: of pushes; those of versions
    are counted by ``broadcasts``.
    """

    def __init__(
        self,
        job: DiLoCoJob,
        training: Training,
        versions: Versions,
        *,
        pace: Callable[[Place], float] = lambda place: 1.0,
        vary: Callable[[Place], float] = lambda place: 1.0,
        link: LinkRates | None = None,
        links: Callable[[Place], LinkRates | None] = lambda place: None,
        merge_seconds: float = 0.05,
        state_bytes: int = 0,
        make_values: Callable[[Replica, int, str, bool], LearnerValues] = LearnerValues,
        core: Core | None = None,
        made: Sequence[int] = (),
        on_event: Callable[[ev.RecordEvent], None] = lambda event: None,
    ) -> None:
        self.job, self.training, self.versions = job, training, versions
        self.merge_seconds, self.state_bytes = merge_seconds, state_bytes
        self.timeline = Timeline()
        self.learners: dict[Place, LearnerProcess] = {}
        self.seen: Counter[str] = Counter()
        self.bytes_up = 0
        self._pace, self._vary, self._link, self._links = pace, vary, link or LinkRates(), links
        self._make_values, self._on_event = make_values, on_event
        self.standing_still = False
        self._connections: dict[int, LearnerProcess] = {}
        self._welcomed: set[int] = set()  # connections to which announcements are sent
        self._numbers = count(1)
        self._states: dict[int, OptimizerState] = {}  # by transfer
        self._steps_due: dict[float, list[LearnerProcess]] = {}
        self._mail: dict[float, list[Callable[[], ev.Event | None]]] = {}  # to the core, by when it is there
        self._pushing: dict[int, tuple[LearnerProcess, PushHeader]] = {}  # by handle: pushes without a verdict
        self._config = replace(CoreConfig.from_job(job), evaluated=False)
        self.core = core or Core(self._config, None, EPOCH, 0.0)
        self.broadcasts = Broadcasts(
            self.timeline, self.core, versions, self.core.epoch, deliver=self._deliver, sent=self._note_sent
        )
        self._ticks: list[float] = []  # when the core is woken, earliest first
        self._act(self.core.start(0.0, made))
        self._plan_tick()

    # ------------------------------------------------------------ for the caller

    @property
    def now(self) -> float:
        """Virtual seconds since the syncer began."""
        return self.timeline.now

    @property
    def ended(self) -> bool:
        """Whether the job has ended."""
        return self.core.phase in ENDED_PHASES

    def start_all(self) -> None:
        """Start a process for every place of the job, now."""
        for place in self._config.places:
            self.start_learner(place)

    @property
    def connected(self) -> int:
        """How many learners have a session."""
        return len(self._connections)

    def new_connection(self) -> int:
        """The number of a session that no other has."""
        return next(self._numbers)

    def handle(self, event: ev.Event) -> None:
        """Have the core take in an event of somebody else, now."""
        self._handle(event)

    def continue_learner(self, learner: LearnerProcess) -> None:
        """A process that outlived its syncer joins this one, now. Raises ValueError if one lives in its place."""
        if learner.place in self.learners:
            raise ValueError(f"{learner.place[0]}-{learner.place[1]} has a process")
        learner.end_session()
        self.learners[learner.place] = learner
        self._join(learner)
        self._beat(learner)

    def stand_still(self, still: bool) -> None:
        """Whether learners begin no step from now on."""
        self.standing_still = still
        for learner in list(self.learners.values()):
            self._wake(learner)

    def start_learner(self, place: Place, process: str = "") -> LearnerProcess:
        """Start a process in this place, now, under that name. Raises ValueError if one lives there."""
        if place in self.learners:
            raise ValueError(f"{place[0]}-{place[1]} has a process")
        rates = self._links(place) or self._link
        name = process or f"{next(self._numbers):x}"
        learner = LearnerProcess(
            self.job.spec,
            place,
            name,
            self._pace(place),
            link=SimulatedLink(rates),
            fragments=len(self.versions.elements),
        )
        self.learners[place] = learner
        self._join(learner)
        self._beat(learner)
        return learner

    def kill_learner(self, place: Place, told: bool = True) -> None:
        """The place's process is gone at once. ``told``: the syncer hears that it ended (as from the local runner or
        the operator); else that its connection broke, and of the rest when its heartbeat does not come."""
        learner = self.learners.pop(place)
        learner.alive = False
        self.seen["killed"] += 1
        self._break_connection(learner)
        if told:
            self._handle(ev.ProcessEnded(*place, learner.process, "killed"))
        self._close(learner)

    def drain_learner(self, place: Place) -> None:
        """The place's process is told to end (SIGTERM): it finishes its step, offers its work and leaves."""
        learner = self.learners[place]
        learner.leaving = True
        self._wake(learner)

    def stall_learner(self, place: Place, seconds: float) -> None:
        """The place's process stands still for so many seconds, in the middle of a step if it makes one, and goes on
        being heard. Two stalls at once are one."""
        learner = self.learners[place]
        stalled = max(self.now, learner.resumes_at)
        learner.resumes_at = max(stalled, self.now + seconds)
        if learner.stepping:
            learner.owed_seconds += learner.resumes_at - stalled

    def cut_learner(self, place: Place, seconds: float) -> None:
        """The place's link is cut for so many seconds: the session ends, and the process goes on alone."""
        learner = self.learners[place]
        self.seen["cut"] += 1
        self._break_connection(learner)
        self.timeline.call_in(seconds, partial(self._join, learner))

    def run(self, until: float) -> bool:
        """Run until the job has ended, at most until that time (virtual seconds); whether it has."""
        while not self.ended and self.timeline.now < until:
            if not self.timeline.run_next():
                break
        return self.ended

    # ------------------------------------------------------------ syncer

    def decide(self, events: Sequence[ev.Event]) -> list[ev.Action]:
        """What the core decides on events of this moment."""
        return self.core.handle_together(events, self.now)

    def _handle(self, event: ev.Event) -> None:
        self._act(self.decide([event]))
        self._plan_tick()

    def _plan_tick(self) -> None:
        """Have the core woken when it wants to be, unless it is woken before that anyway."""
        at = max(self.now + LEAST_TICK, self.core.wake_at)
        if not self._ticks or at < self._ticks[0]:
            self._ticks.insert(0, at)
            self.timeline.call_at(at, self._tick)

    def _tick(self) -> None:
        self._ticks.remove(self.now)
        if not self.ended:
            self._handle(ev.Tick())

    def _act(self, actions: Iterable[ev.Action]) -> None:
        for action in actions:
            self._do(action)

    def _do(self, action: ev.Action) -> None:
        match action:
            case ev.Admit() | ev.Promote():
                self._welcomed.add(action.connection)
                if (learner := self._connections.get(action.connection)) is not None:
                    self._deliver(learner, partial(self._admit, learner, action))
            case ev.Refuse() | ev.RequestInitialModel():
                if (learner := self._connections.get(action.connection)) is not None:
                    self._break_connection(learner)
                    self.timeline.call_in(JOIN_SECONDS, partial(self._join, learner))
            case ev.Pull():
                if (learner := self._connections.get(action.connection)) is not None:
                    self._deliver(learner, partial(self._pulled, learner, action))
            case ev.Merge():
                norms = self.versions.merge(action, self.core.epoch)
                self.timeline.call_in(self.merge_seconds, partial(self._merged, action, norms))
            case ev.Announce():
                told = [(number, one) for number, one in self._connections.items() if number in self._welcomed]
                self.broadcasts.announce(action.fragment, action.merged, told)
            case ev.SetPhase():
                for learner in list(self._connections.values()):
                    self._deliver(learner, partial(self._told_phase, learner, action.phase))
            case ev.AnswerPush():
                self._judge_push(action)
            case ev.ReleasePush():
                self.versions.release(action.handle)
            case ev.RequestPeerState():
                if (learner := self._connections.get(action.connection)) is not None:
                    self._deliver(learner, partial(self._send_state, learner, action.transfer))
            case ev.OfferPeerState():
                if (learner := self._connections.get(action.connection)) is not None:
                    state = self._states.get(action.transfer)
                    there = learner.link.send_down(self.now, self.state_bytes if state is not None else 0)
                    self._deliver(learner, partial(self._take_state, learner, state), at=there)
            case ev.RecordEvent():
                self.seen[action.kind.value] += 1
                self._on_event(action)
            case _:
                pass  # Persist, GrantLease, and what only a restart brings

    def _merged(self, action: ev.Merge, norms: tuple[float, ...]) -> None:
        self.versions.publish(action.fragment)
        self.seen["merges"] += 1
        self.seen["merged pushes"] += len(action.responders)
        self._handle(ev.MergeDurable(action.fragment, action.version, self.merge_seconds, norms))

    # ------------------------------------------------------------ messages up

    def _send(self, learner: LearnerProcess, event: ev.Event) -> None:
        """Have the learner's message reach the core, unless its session ends before."""
        connection = learner.connection
        there = self.now + learner.link.rates.latency
        self._post(there, lambda: event if connection in self._connections else None)

    def _post(self, at: float, make: Callable[[], ev.Event | None]) -> None:
        """Have an event reach the core. Those of one moment do so together: the core does what is due once, and not
        after each of them. ``make``: called then; None: there is no event after all."""
        if at not in self._mail:
            self._mail[at] = []
            self.timeline.call_at(at, self._open_mail)
        self._mail[at].append(make)

    def _open_mail(self) -> None:
        events = [event for make in self._mail.pop(self.now) if (event := make()) is not None]
        self._act(self.decide(events))
        self._plan_tick()

    # ------------------------------------------------------------ messages down

    def _deliver(self, learner: LearnerProcess, call: Callable[[], None], at: float | None = None) -> None:
        """Have a message arrive at the learner, unless its session ends before; then it does what is due."""
        connection = learner.connection

        def arrive() -> None:
            if learner.connection == connection and learner.alive:
                call()
                self._wake(learner)

        self.timeline.call_at(self.now + learner.link.rates.latency if at is None else at, arrive)

    def _pulled(self, learner: LearnerProcess, pull: ev.Pull) -> None:
        if learner.pushed_rounds.get(pull.fragment, (0, 0))[0] != pull.round:
            learner.pulls[pull.fragment] = pull

    def _note_sent(self, learner: LearnerProcess, fragment: int, version: int) -> None:
        connection = learner.connection
        assert connection is not None
        self._post(self.now, lambda: ev.VersionSent(connection, fragment, version))

    def _told_phase(self, learner: LearnerProcess, phase: JobPhase) -> None:
        learner.phase = phase

    # ------------------------------------------------------------ sessions

    def _join(self, learner: LearnerProcess) -> None:
        if not learner.alive or learner.left or learner.connection is not None or self.ended:
            return
        number = next(self._numbers)
        learner.connection = number
        self._connections[number] = learner
        learner.fetching.clear()
        learner.forget_pulls()
        region, ordinal = learner.place
        seat = learner.seat
        self._send(
            learner,
            ev.Join(
                number,
                learner.process,
                region,
                ordinal,
                evaluator=False,
                layout_digest=self.versions.layout_digest,
                digests={},
                sequences=0,
                held=learner.held(),
                previous_incarnation=seat.incarnation if seat is not None else 0,
                tenure=learner.tenure,
                slot=seat.slot if seat is not None else -1,
            ),
        )

    def _admit(self, learner: LearnerProcess, action: ev.Admit | ev.Promote) -> None:
        if isinstance(action, ev.Admit):
            learner.phase = action.phase
        if action.seat is not None:
            self._take_seat(learner, action.seat)
        merged = action.merged if isinstance(action, ev.Admit) else ()
        for fragment in range(len(self.core.versions)):
            own = {action.connection: merged[fragment]} if merged else {}
            self.broadcasts.announce(fragment, own, [(action.connection, learner)])
        if isinstance(action, ev.Admit) and action.initialise:
            event = ev.InitialModelStored(self.versions.layout_digest, self.versions.elements)
            size = sum(codec.encoded_bytes("float32", elements) for elements in self.versions.elements)
            self._post(learner.link.send_up(self.now, size), lambda: event)

    def _take_seat(self, learner: LearnerProcess, seat: Seat) -> None:
        continuing = seat.continuing and learner.seat is not None
        if not continuing:
            if learner.values is None and (copy := self.training.open_replica(seat.slot)) is not None:
                compression = self.job.spec.sync.compression
                fragments = len(self.versions.elements)
                learner.values = self._make_values(copy, fragments, compression.up, compression.error_feedback)
            learner.begin_tenure(seat)
            learner.waits_for_state = learner.values is not None and sum(self.core.versions) > 0
        learner.seat = seat
        if learner.waits_for_state and learner.connection is not None:
            self._send(learner, ev.PeerStateRequested(learner.connection))

    def _break_connection(self, learner: LearnerProcess) -> None:
        connection, learner.connection = learner.connection, None
        if connection is not None:
            self._connections.pop(connection, None)
            self._handle(ev.ConnectionLost(connection))

    def _close(self, learner: LearnerProcess) -> None:
        if learner.values is not None:
            self.training.close_replica(learner.values.replica)
            learner.values = None

    def _send_state(self, learner: LearnerProcess, transfer: int) -> None:
        if learner.values is None or learner.connection is None:
            return
        state = OptimizerState(learner.values.replica.optimizer_state(), tuple(held.version for held in learner.held()))

        def arrive() -> ev.Event:
            self._states = {transfer: state}  # one is kept: donors are asked one after another
            return ev.PeerStateReceived(transfer)

        self._post(learner.link.send_up(self.now, self.state_bytes), arrive)

    def _take_state(self, learner: LearnerProcess, state: OptimizerState | None) -> None:
        """A peer's state is here; None: there is none, and the optimizer begins fresh."""
        learner.offered_state = state
        learner.waits_for_state = state is not None

    def _beat(self, learner: LearnerProcess) -> None:
        """Be heard while no report is sent."""
        if not learner.alive or learner.left:
            return
        interval = self.job.spec.sync.heartbeat.interval_seconds
        if learner.connection is not None and self.now - learner.reported_at >= interval:
            self._send_report(learner, StepReport())
        self.timeline.call_in(interval, partial(self._beat, learner))

    # ------------------------------------------------------------ steps

    def _wake(self, learner: LearnerProcess) -> None:
        """Between two steps: do what is due, and begin the next step if it may be made."""
        if learner.stepping or not learner.alive or learner.seat is None:
            return
        moved = learner.adopt()
        if learner.draining:
            self._drain(learner)
            return
        if moved and learner.adoption.complete:
            self._send_report(learner, learner.report())
        self._begin_step(learner)

    def _begin_step(self, learner: LearnerProcess) -> None:
        if learner.ready and not self.standing_still:
            learner.stepping = True
            seconds = learner.step_seconds * self._vary(learner.place)
            self._plan_step_end(learner, max(self.now, learner.resumes_at) + seconds)

    def _plan_step_end(self, learner: LearnerProcess, end: float) -> None:
        due = self._steps_due.get(end)
        if due is not None:
            due.append(learner)
            return
        self._steps_due[end] = [learner]
        self.timeline.call_at(end, partial(self._end_steps, end), last=True)

    def _end_steps(self, end: float) -> None:
        """The steps that end now: make them, then do what is due at each one's boundary."""
        ending = [one for one in self._steps_due.pop(end) if one.alive]
        for learner in [one for one in ending if one.owed_seconds > 0]:
            ending.remove(learner)  # it stood still meanwhile: its step takes so much longer
            owed, learner.owed_seconds = learner.owed_seconds, 0.0
            self._plan_step_end(learner, self.now + owed)
        learners = len(self._config.places)
        results = self.training.train([learner.order_step(learners) for learner in ending]) if ending else ()
        for learner, result in zip(ending, results, strict=True):
            learner.stepping = False
            learner.count_step(result)
            learner.adopt()
            if not learner.draining:
                for pull in list(learner.answerable_pulls()):
                    self._answer_pull(learner, pull)
                if learner.adoption.complete:
                    self._send_report(learner, learner.report())
        for learner in ending:
            self._wake(learner)

    def _send_report(self, learner: LearnerProcess, report: StepReport) -> None:
        connection = learner.connection
        if connection is None:
            return
        learner.reported_at = self.now
        self._send(learner, ev.Reported(connection, report))

    # ------------------------------------------------------------ pushes

    def _answer_pull(self, learner: LearnerProcess, pull: ev.Pull) -> None:
        plan = learner.plan_push(pull.fragment, pull.round)
        if plan is not None:
            learner.pushed_rounds[pull.fragment] = (pull.round, plan.sequence)
            del learner.pulls[pull.fragment]
            self._send_push(learner, plan)

    def _send_push(self, learner: LearnerProcess, plan: PushPlan) -> None:
        connection, seat = learner.connection, learner.seat
        if connection is None or seat is None:
            return
        report, encoding = learner.report(), self.job.spec.sync.compression.up
        header = PushHeader(
            **asdict(plan) | {"encoding": encoding, "layout_digest": self.versions.layout_digest, "report": report},
            slot=seat.slot,
            incarnation=seat.incarnation,
        )
        encoded = learner.values.encode(plan, report) if learner.values is not None else None
        size = codec.encoded_bytes(encoding, self.versions.elements[plan.fragment])
        self.bytes_up += size
        there = learner.link.send_up(self.now, size)
        self._post(there, partial(self._receive_push, learner, connection, header, encoded))

    def _receive_push(
        self, learner: LearnerProcess, connection: int, header: PushHeader, encoded: Bytes | None
    ) -> ev.Event | None:
        """A push is there with all its bytes; None: it is refused by its header, or its session has ended."""
        if connection not in self._connections:
            return None
        refused = self.core.check_push(header)
        if refused is not None:
            self._answer_push(learner, header, refused[0])
            return None
        handle = next(self._numbers)
        self._pushing[handle] = learner, header
        norm, finite, growth = self.versions.receive(handle, header, encoded)
        return ev.PushReceived(header, norm, finite, handle, growth=growth)

    def _judge_push(self, verdict: ev.AnswerPush) -> None:
        if verdict.reason is not None:
            self.versions.release(verdict.handle)
        self._answer_push(*self._pushing.pop(verdict.handle), verdict.reason)

    def _answer_push(self, learner: LearnerProcess, header: PushHeader, reason: PushRefusal | None) -> None:
        if reason is not None:
            self.seen[f"refused: {reason.value}"] += 1
        refused = reason not in (None, PushRefusal.REPEATED)
        if learner.connection is not None:
            self._deliver(learner, lambda: learner.take_answer(header.fragment, header.sequence, refused))

    # ------------------------------------------------------------ the end

    def _drain(self, learner: LearnerProcess) -> None:
        """Offer everything above the base, then leave."""
        if learner.left or learner.connection is None or not learner.adoption.complete:
            return
        for fragment in learner.offers_due():
            plan = learner.plan_push(fragment, 0)
            if plan is not None:
                learner.offers[fragment] = plan.sequence
                learner.accepted.discard(fragment)
                self._send_push(learner, plan)
        if learner.drained:
            learner.left = True
            connection = learner.connection
            self.timeline.call_in(learner.link.rates.latency, partial(self._drained, learner, connection))

    def _drained(self, learner: LearnerProcess, connection: int) -> None:
        if connection not in self._connections:
            return
        self._handle(ev.Reported(connection, learner.report()))
        self._handle(ev.Drained(connection))
        self._connections.pop(connection, None)
        learner.connection = None
        self._close(learner)
