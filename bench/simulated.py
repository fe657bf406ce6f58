"""One job as its syncer sees it, with learners that cost nothing: for benchmarks of who looks at it.

The syncer's core, the learners' adoption rule and the status document are the real code. What
is left out is everything between them: gradients, the network, the store. Syncer and learners
are a world of ``lab.world`` without parameters, whose time is the real one. A learner makes one
step per *beat*, reports it, and pushes what it is asked for; a merge is durable at once. So the
rows of the status document move as those of a real job do, slowly.
"""

from __future__ import annotations

import json
import random
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from diloco_protocol.arrays.kernels import Bytes
from diloco_protocol.spec.job import DiLoCoJob, immutable_digests
from diloco_protocol.vocabulary import EventKind
from diloco_protocol.wire.records import PushHeader
from diloco_syncer.core import events as ev
from diloco_syncer.core.config import CoreConfig
from diloco_syncer.core.core import Core
from diloco_syncer.runtime.event_log import EventLog
from diloco_syncer.runtime.traffic import Traffic
from diloco_syncer.server.pages.status_page import StatusPage
from diloco_syncer.server.tls.access import CallAuthorizer
from lab.world.learner import LearnerProcess
from lab.world.links import LinkRates
from lab.world.parts import CountedSteps, CountedVersions, StepOrder, StepResult
from lab.world.world import World

ELEMENTS = 1000  # of each fragment
TOKENS = 1024  # of a step
REJOIN_SECONDS = 2.0


@dataclass
class Pod:
    """A learner's pod: one process, which joins, trains and pushes. ``uid``: the process id begins with its digits."""

    region: str
    ordinal: int
    uid: str
    join_at: float  # by time.monotonic
    learner: LearnerProcess | None = None  # as it is since it first joined
    process: str = field(init=False)

    def __post_init__(self) -> None:
        self.process = self.uid.replace("-", "") + secrets.token_hex(4)

    @property
    def place(self) -> tuple[str, int]:
        return self.region, self.ordinal


class LossySteps(CountedSteps):
    """Steps whose loss falls."""

    def train(self, orders: Sequence[StepOrder]) -> Sequence[StepResult]:
        return [StepResult(TOKENS, 9.0 / (2 + order.step) ** 0.1) for order in orders]


class SeenVersions(CountedVersions):
    """Versions that count the traffic of pushes, and remember in which epoch each was made."""

    def __init__(self, job: DiLoCoJob, core: Core, traffic: Traffic, made: list[int]) -> None:
        super().__init__(job, (ELEMENTS,) * job.spec.sync.fragments, core.versions)
        self._core, self._traffic, self.made = core, traffic, made

    def receive(self, handle: int, header: PushHeader, encoded: Bytes | None) -> tuple[float, bool, float]:
        self._traffic.count_received(self._core.slots[header.slot].holder.region, header.slot, ELEMENTS)
        return super().receive(handle, header, encoded)

    def begin_model(self) -> None:
        """The first versions are there."""
        self.made[:] = [self._core.epoch] * len(self.elements)

    def publish(self, fragment: int) -> None:
        super().publish(fragment)
        self.made[fragment] = self._core.epoch


class Sessions:
    """What the status page asks of the syncer's sessions."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def count(self) -> int:
        return self._world.connected

    def find_connection(self, number: int | None) -> None:
        """Nobody streams here, so there is no link to measure."""


class Syncer:
    """One job's syncer, over all its lives, and its learners; with the real status page.

    ``beat``: seconds between two steps of a learner.
    """

    def __init__(self, job: DiLoCoJob, beat: float) -> None:
        self.job, self.beat_seconds = job, beat
        self.epoch = 0
        self.traffic = Traffic(region.name for region in job.spec.regions)
        self.event_log = EventLog()
        self.pods: dict[str, Pod] = {}  # by UID
        self.evaluators: dict[str, int] = {}  # connection by pod UID
        self._still = False
        self._made: list[int] = []  # epoch of each fragment's newest version
        self._state: str | None = None
        self._serving = False
        self._began = self._first_beat = 0.0

    # ------------------------------------------------------------- life

    def begin(self) -> None:
        """A syncer starts from what the last one left."""
        self.epoch += 1
        self._began = time.monotonic()
        self._first_beat = random.uniform(0, self.beat_seconds)
        state = None if self._state is None else json.loads(self._state)
        core = Core(CoreConfig.from_job(self.job), state, self.epoch, 0.0, wall=time.time())
        versions = SeenVersions(self.job, core, self.traffic, self._made)
        self.world = World(
            self.job,
            LossySteps(TOKENS),
            versions,
            pace=lambda place: self.beat_seconds,
            vary=lambda place: 1.0 - self._part_of_beat(),
            link=LinkRates(latency=0.0),
            merge_seconds=0.0,
            core=core,
            made=tuple(self._made),
            on_event=partial(self._record, versions),
        )
        self.world.stand_still(self._still)
        self.core = core
        self.status_page = self._status_page()
        self._serving = True

    def _part_of_beat(self) -> float:
        """How much of the beat is over: learners end their steps together, so that none is late for a merge."""
        part = (self.world.now - self._first_beat) / self.beat_seconds % 1.0
        return 0.0 if 1.0 - part < 1e-6 else part

    def _record(self, versions: SeenVersions, event: ev.RecordEvent) -> None:
        self.event_log.record(event)
        if event.kind is EventKind.INITIALISED:
            versions.begin_model()

    def _status_page(self) -> StatusPage:
        parts: dict[str, Any] = {
            "model": SimpleNamespace(layout=None),
            "durability": SimpleNamespace(problem=""),
            "merger": SimpleNamespace(seconds={"merge": 0.0, "quorum": 0.0, "waited": 0.0}),
            "sessions": Sessions(self.world),
        }
        return StatusPage(
            job=self.job,
            core=self.core,
            clock=self.clock,
            authorizer=CallAuthorizer(),
            traffic=self.traffic,
            event_log=self.event_log,
            refused=Counter,
            find_shards=list,
            imbalances=lambda: 0,
            one_machine=False,
            find_output=lambda: None,
            **parts,
        )

    def end(self) -> None:
        """The syncer's process is gone. What it knew is in its store."""
        if not self._serving:
            return
        self._serving = False
        self._state = json.dumps(self.core.state(self.clock(), time.time()))
        self.evaluators = dict.fromkeys(self.evaluators, 0)
        for pod in self.pods.values():
            pod.join_at = time.monotonic() + REJOIN_SECONDS

    @property
    def serving(self) -> bool:
        return self._serving

    def clock(self) -> float:
        """Seconds since this life began."""
        return time.monotonic() - self._began

    async def checkpoint(self) -> None:
        """Nothing: the store here cannot fail."""

    def handle(self, event: ev.Event) -> None:
        """Let the core decide, and carry out what it decides."""
        if self._serving:
            self.world.timeline.run_until(self.clock())
            self.world.handle(event)

    def stand_still(self, still: bool) -> None:
        """Whether learners are heard, and make no step."""
        self._still = still
        if self._serving:
            self.world.stand_still(still)

    # ------------------------------------------------------------- pods

    def learner_pod(self, uid: str, region: str, ordinal: int, joins_in: float) -> None:
        """A learner's pod runs; it joins in so many seconds."""
        self.pods.setdefault(uid, Pod(region, ordinal, uid, time.monotonic() + joins_in))

    def evaluator_pod(self, uid: str) -> None:
        """The evaluator's pod runs."""
        self.evaluators.setdefault(uid, 0)

    def gone(self, uid: str) -> None:
        """A pod's process is gone, and its connection broke."""
        pod = self.pods.pop(uid, None)
        if pod is None:
            if connection := self.evaluators.pop(uid, 0):
                self.handle(ev.ConnectionLost(connection))
        elif self._serving and self.world.learners.get(pod.place) is pod.learner is not None:
            self.world.timeline.run_until(self.clock())
            self.world.kill_learner(pod.place, told=False)

    # ------------------------------------------------------------- time

    def turn(self) -> None:
        """Whatever is due; call it every second or so."""
        if not self._serving:
            return
        self.world.timeline.run_until(self.clock())
        for pod in list(self.pods.values()):
            if pod.place not in self.world.learners and time.monotonic() >= pod.join_at:
                self._join(pod)
        for uid, connection in list(self.evaluators.items()):
            if not connection:
                self.evaluators[uid] = self._connect_evaluator(uid.replace("-", ""))

    def _join(self, pod: Pod) -> None:
        if pod.learner is None:
            pod.learner = self.world.start_learner(pod.place, pod.process)
        else:
            self.world.continue_learner(pod.learner)

    def _connect_evaluator(self, process: str) -> int:
        number, digests = self.world.new_connection(), immutable_digests(self.job)
        layout = self.world.versions.layout_digest
        self.handle(
            ev.Join(
                number,
                process,
                "evaluator",
                0,
                evaluator=True,
                layout_digest=layout,
                digests=digests,
                sequences=0,
                held=(),
                previous_incarnation=0,
            )
        )
        return number
