"""One job as its syncer sees it, with learners that cost nothing: for benchmarks of who looks at it.

The syncer's core, the learners' adoption rule and the status document are the real code. What
is left out is everything between them: gradients, the network, the store. A learner makes one
step per *beat*, reports it, and pushes what it is asked for; a merge is durable at once. So the
rows of the status document move as those of a real job do, slowly.
"""

from __future__ import annotations

import json
import random
import secrets
import time
from collections import Counter, deque
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from diloco_protocol.spec.job import DiLoCoJob, immutable_digests
from diloco_protocol.wire.records import Announcement, Held, Payload, PushHeader, Seat, StepReport
from diloco_syncer.core import events as ev
from diloco_syncer.core.config import CoreConfig
from diloco_syncer.core.core import Core
from diloco_syncer.runtime.event_log import EventLog
from diloco_syncer.runtime.traffic import Traffic
from diloco_syncer.server.pages.status_page import StatusPage
from diloco_syncer.server.tls.access import CallAuthorizer
from diloco_worker.core.adoption import Adoption, AdoptionConfig, Rule

LAYOUT = "0" * 64  # a digest; nobody here has a model
ELEMENTS = 1000  # of each fragment
TOKENS = 1024  # of a step
REJOIN_SECONDS = 2.0


@dataclass
class Learner:
    """A learner's pod: a process that joins, trains and pushes."""

    region: str
    ordinal: int
    pod: str  # UID: the process id begins with its digits
    adoption: Adoption
    process: str = ""
    connection: int | None = None
    seat: Seat | None = None
    pulls: dict[int, ev.Pull] = field(default_factory=dict)
    join_at: float = 0.0

    def __post_init__(self) -> None:
        self.process = self.pod.replace("-", "") + secrets.token_hex(4)

    def held(self) -> tuple[Held, ...]:
        """What it holds of each fragment; empty: nothing."""
        bases = [state.base for state in self.adoption.fragments]
        return tuple(Held(b.epoch, b.version) for b in bases if b) if all(bases) else ()

    def report(self, step_seconds: float) -> StepReport:
        loss = 9.0 / (1 + self.adoption.now.step) ** 0.1
        return replace(self.adoption.report(), loss=loss, step_seconds=step_seconds)


class _Sessions:
    def __init__(self, connections: dict[int, Learner]) -> None:
        self._connections = connections

    @property
    def count(self) -> int:
        return len(self._connections)

    def find_connection(self, number: int | None) -> None:
        """Nobody streams here, so there is no link to measure."""


class Syncer:
    """One job's syncer, over all its lives, and its learners; with the real status page.

    ``beat``: seconds between two steps of a learner.
    """

    def __init__(self, job: DiLoCoJob, beat: float) -> None:
        self.job, self.beat_seconds = job, beat
        self.epoch = 0
        self.standing_still = False  # learners are heard, and make no step
        self.traffic = Traffic(region.name for region in job.spec.regions)
        self.event_log = EventLog()
        self.learners: dict[str, Learner] = {}  # by pod UID
        self.evaluators: dict[str, int] = {}  # connection by pod UID
        self._connections: dict[int, Learner] = {}
        self.sessions = _Sessions(self._connections)
        self._numbers = 0
        self._next_connection = 1
        self._made: list[int] = []  # epoch of each fragment's newest version
        self._state: str | None = None
        self._serving = False
        self._beat_at = 0.0
        self._queue: deque[ev.Action] = deque()
        self._acting = False

    # ------------------------------------------------------------- life

    def begin(self) -> None:
        """A syncer starts from what the last one left."""
        self.epoch += 1
        now = time.monotonic()
        state = None if self._state is None else json.loads(self._state)
        self.core = Core(CoreConfig.from_job(self.job), state, self.epoch, now, time.time())
        self.status_page = self._status_page()
        self._serving = True
        self._beat_at = now + random.uniform(0, self.beat_seconds)
        self._act(self.core.start(now, self._made, False))

    def _status_page(self) -> StatusPage:
        parts: dict[str, Any] = {
            "model": SimpleNamespace(layout=None),
            "durability": SimpleNamespace(problem=""),
            "merger": SimpleNamespace(seconds={"merge": 0.0, "quorum": 0.0, "waited": 0.0}),
            "sessions": self.sessions,
        }
        return StatusPage(
            job=self.job,
            core=self.core,
            clock=self.clock,
            authorizer=CallAuthorizer(),
            traffic=self.traffic,
            event_log=self.event_log,
            refused=Counter(),
            imbalances=lambda: 0,
            find_output=lambda: None,
            **parts,
        )

    def end(self) -> None:
        """The syncer's process is gone. What it knew is in its store."""
        if not self._serving:
            return
        self._serving = False
        self._state = json.dumps(self.core.state(time.monotonic(), time.time()))
        self._connections.clear()
        self.evaluators = dict.fromkeys(self.evaluators, 0)
        for learner in self.learners.values():
            learner.connection, learner.join_at = None, time.monotonic() + REJOIN_SECONDS

    @property
    def serving(self) -> bool:
        return self._serving

    def clock(self) -> float:
        return time.monotonic()

    async def checkpoint(self) -> None:
        """Nothing: the store here cannot fail."""

    def handle(self, event: ev.Event) -> None:
        """Let the core decide, and carry out what it decides."""
        if self._serving:
            self._act(self.core.handle(event, self.clock()))

    # ------------------------------------------------------------- pods

    def learner_pod(self, uid: str, region: str, ordinal: int, joins_in: float) -> None:
        """A learner's pod runs; it joins in so many seconds."""
        sync = self.job.spec.sync
        adoption = Adoption(
            AdoptionConfig(
                sync.fragments,
                sync.every,
                sync.overlap,
                Rule(sync.adoption.rule),
                max_versions=sync.staleness.max_versions,
                max_steps=self.job.spec.max_steps_alone,
            )
        )
        joins = time.monotonic() + joins_in
        self.learners.setdefault(uid, Learner(region, ordinal, uid, adoption, join_at=joins))

    def evaluator_pod(self, uid: str) -> None:
        """The evaluator's pod runs."""
        self.evaluators.setdefault(uid, 0)

    def gone(self, uid: str) -> None:
        """A pod's process is gone, and its connection broke."""
        learner = self.learners.pop(uid, None)
        connection = self.evaluators.pop(uid, 0) if learner is None else learner.connection
        if connection:
            self._connections.pop(connection, None)
            self.handle(ev.ConnectionLost(connection))

    # ------------------------------------------------------------- time

    def turn(self) -> None:
        """Whatever is due; call it every second or so."""
        if not self._serving:
            return
        now = self.clock()
        for learner in list(self.learners.values()):
            if learner.connection is None and now >= learner.join_at:
                self._join(learner)
        for uid, connection in list(self.evaluators.items()):
            if not connection:
                self.evaluators[uid] = self._connect("evaluator", 0, uid.replace("-", ""), evaluator=True)
        if now >= self._beat_at:
            self._beat_at = now + self.beat_seconds
            self._beat()
        if now >= self.core.wake_at:
            self.handle(ev.Tick())

    def _join(self, learner: Learner) -> None:
        before = learner.seat.incarnation if learner.seat else 0
        learner.connection = number = self._next_connection
        self._connections[number] = learner
        self._connect(learner.region, learner.ordinal, learner.process, learner.held(), before)

    def _connect(
        self,
        region: str,
        ordinal: int,
        process: str,
        held: tuple[Held, ...] = (),
        before: int = 0,
        evaluator: bool = False,
    ) -> int:
        number, self._next_connection = self._next_connection, self._next_connection + 1
        digests = immutable_digests(self.job)
        self.handle(ev.Join(number, process, region, ordinal, evaluator, LAYOUT, digests, 0, held, before))
        return number

    def _beat(self) -> None:
        """A step of every learner, its report, and the pushes that were asked for."""
        there = [one for one in self.learners.values() if one.seat is not None and one.adoption.complete]
        for learner in there:
            if not self.standing_still and not learner.adoption.paused:
                learner.adoption.on_step(TOKENS, 0.9 * self.beat_seconds)
            if learner.connection is not None:
                self.handle(ev.Reported(learner.connection, learner.report(self.beat_seconds)))
        for learner in there:
            pulls, learner.pulls = learner.pulls, {}
            for pull in pulls.values():
                self._push(learner, pull)

    def _push(self, learner: Learner, pull: ev.Pull) -> None:
        planned = learner.adoption.snapshot(pull.fragment, pull.round, pull.version)
        if planned is None or learner.seat is None:
            return
        plan, report = planned[0], learner.report(self.beat_seconds)
        encoding = self.job.spec.sync.compression.up
        header = PushHeader(
            **asdict(plan),
            encoding=encoding,
            layout_digest=LAYOUT,
            report=report,
            slot=learner.seat.slot,
            incarnation=learner.seat.incarnation,
        )
        self.traffic.count_received(learner.region, learner.seat.slot, ELEMENTS)
        self._numbers += 1
        self.handle(ev.PushReceived(header, 1.0, True, self._numbers))

    # ------------------------------------------------------------- what the core decides

    def _act(self, actions: list[ev.Action]) -> None:
        self._queue.extend(actions)
        if self._acting:
            return
        self._acting = True
        try:
            while self._queue:
                self._do(self._queue.popleft())
        finally:
            self._acting = False

    def _do(self, action: ev.Action) -> None:
        match action:
            case ev.Admit():
                if (learner := self._connections.get(action.connection)) is not None:
                    if action.seat is not None:
                        self._seated(learner, action.seat, action.merged)
                    if action.initialise:
                        fragments = self.job.spec.sync.fragments
                        self._made = [self.epoch] * fragments
                        self.handle(ev.InitialModelStored(LAYOUT, (ELEMENTS,) * fragments))
            case ev.Promote():
                if (learner := self._connections.get(action.connection)) is not None:
                    self._seated(learner, action.seat, ())
            case ev.RequestInitialModel() | ev.Refuse():
                if (learner := self._connections.pop(action.connection, None)) is not None:
                    learner.connection, learner.join_at = None, self.clock() + REJOIN_SECONDS
                    self.handle(ev.ConnectionLost(action.connection))
            case ev.Pull():
                if (learner := self._connections.get(action.connection)) is not None:
                    learner.pulls[action.fragment] = action
            case ev.Merge():
                norms = tuple(1.0 for _ in action.responders)
                self._made[action.fragment] = self.epoch
                self.handle(ev.MergeDurable(action.fragment, action.version, 0.01, norms))
            case ev.Announce():
                for connection, learner in self._connections.items():
                    self._hear(learner, action.fragment, action.merged.get(connection, ev.MergedPush()))
            case ev.RecordEvent():
                self.event_log.record(action)
            case _:
                pass  # what is about bytes, files and data

    def _seated(self, learner: Learner, seat: Seat, merged: tuple[ev.MergedPush, ...]) -> None:
        if not (seat.continuing and learner.seat is not None):
            learner.adoption.begin_tenure(seat.slot_step, seat.tenure)
            learner.pulls.clear()
        learner.seat = seat
        for fragment in range(len(self.core.versions)):
            self._hear(learner, fragment, merged[fragment] if merged else ev.MergedPush())

    def _hear(self, learner: Learner, fragment: int, merged: ev.MergedPush) -> None:
        if learner.seat is None:
            return
        version = self.core.versions[fragment]
        full = Payload("none", fragment, version)
        learner.adoption.on_broadcast(
            Announcement(fragment, self.epoch, version, full, merged.sequence, merged.version)
        )
