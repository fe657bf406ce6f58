"""A fleet that fails, with the real syncer core and adoption rule, in virtual time.

Theory of operation
-------------------
Core, ledger and adoption rule are the syncer's and the learners' own code. What is simulated is what is around them:
learners make one step after another, whose tokens are in proportion to the slices that they have; a learner that stands
still has lost its connection, and joins again when it goes on, with the state that its other slices kept; a merge takes
``MERGE_SECONDS`` to be durable, and messages no time. Failures, stops and repairs follow the rules that ``fleet``
states, written a second time, one learner and one step at a time: the two agreeing is what this is for. Goodput is
counted otherwise too, from the core's ledger: the tokens that are merged, or on their way and not dropped, over those
that the whole fleet could train. That nothing is on its way for ever shows in ``CoreResult.pending``.

Events are (time, number, call) on one heap; nothing here reads a clock but to time the core's own work.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import count

import numpy as np

from diloco.simulate.failures import RepairTimes
from diloco.simulate.fleet import WARM_UP_REPAIRS, Fleet
from diloco_protocol.wire.records import Announcement, Held, Join, Payload, PushHeader, Seat, StepReport
from diloco_syncer.core import events as ev
from diloco_syncer.core.books.rounds import RoundRules
from diloco_syncer.core.config import CoreConfig
from diloco_syncer.core.core import Core
from diloco_worker.core.adoption import Adoption, AdoptionConfig

MERGE_SECONDS = 0.1
TOKENS = 1000  # of a slice and a mean step
LAYOUT = "0" * 64  # a digest; nobody here has a model
ELEMENTS = 1000  # of each fragment
_LEAST_STEP = 0.1  # of its mean: a step that varies takes at least so long


@dataclass(frozen=True, slots=True)
class Sync:
    """The numbers of the job's ``sync``: P, H, τ, K, and the grace window's factor and cap (s)."""

    fragments: int = 4
    every: int = 8
    overlap: int = 2
    quorum: int = 1
    grace_factor: float = 0.9
    grace_cap: float = 10.0


@dataclass(frozen=True, slots=True)
class CoreResult:
    """Shares (0 to 1) of the time that counts. ``responders``: mean number of learners in a merge. ``pace``: merges
    over those that a learner of the fleet's own step would have made due. ``pending``: tokens not merged yet at the
    end, over those of H steps. ``core_seconds`` were spent on ``events``."""

    goodput: float
    uptime: float
    pending: float
    merges: int
    responders: float
    pace: float
    events: int
    core_seconds: float


@dataclass(slots=True)
class _Hardware:
    """A learner's slices."""

    fleet: Fleet
    repairs: RepairTimes
    random: np.random.Generator
    active: float
    now: float = 0.0
    fails: float = math.inf
    back: list[float] = field(default_factory=list)

    def begin_training(self, now: float) -> None:
        """What is back by now is taken in; from now on slices may fail."""
        self.now = now
        self.back = [when for when in self.back if when > now]
        slices = self.fleet.slices
        self.active = min(max(slices + self.fleet.spares - len(self.back), 0.0), slices)
        self._draw_failure(now)

    def advance(self, until: float) -> tuple[float, bool, bool]:
        """Go on to the end of a step: the slice seconds that trained, whether a slice failed, whether one is back that
        can be used."""
        trained = self.active * (until - self.now)
        returned = self.active < self.fleet.slices and any(when <= until for when in self.back)
        failed = self.fails < until
        while self.fails < until:
            when = self.fails
            trained -= until - when
            self.active -= 1
            self.back.append(when + float(self.repairs.draw(self.random, 1)[0]))
            self._draw_failure(when)
        self.now = until
        return trained, failed, returned

    def _draw_failure(self, now: float) -> None:
        rate = self.active * self.fleet.slice_rate
        self.fails = now + self.random.exponential() / rate if rate else math.inf


@dataclass(slots=True)
class _Learner:
    index: int
    step_seconds: float
    adoption: Adoption
    hardware: _Hardware
    connection: int | None = None
    seat: Seat | None = None
    pulls: dict[int, ev.Pull] = field(default_factory=dict)
    news: list[Announcement] = field(default_factory=list)

    @property
    def process(self) -> str:
        return f"{self.index:032x}"

    def held(self) -> tuple[Held, ...]:
        bases = [state.base for state in self.adoption.fragments]
        return tuple(Held(base.epoch, base.version) for base in bases if base) if all(bases) else ()


class CoreFleet:
    """One syncer core and its learners. ``steps``: seconds of each learner's mean step (default: the fleet's);
    ``variation``: standard deviation of single steps, as a share; ``clock``: for timing the core.

    What reaches the core at the same moment reaches it together."""

    def __init__(
        self,
        fleet: Fleet,
        repairs: RepairTimes,
        sync: Sync,
        seed: int,
        clock: Callable[[], float],
        steps: np.ndarray | None = None,
        variation: float = 0.0,
    ) -> None:
        self.fleet, self.repairs, self.sync, self.variation = fleet, repairs, sync, variation
        self._clock = clock
        self._random = np.random.default_rng(seed)
        self._now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._numbers = count(1)
        self._connections: dict[int, _Learner] = {}
        self._mail: list[ev.Event] = []  # for the core, of this moment
        self._tick_at = math.inf
        self._training = 0  # learners that train
        self._idle_since = 0.0
        self._idle = 0.0  # seconds in which none did, of those that count
        self._begin = 0.0
        self._responders: list[int] = []
        self.events, self.core_seconds = 0, 0.0
        rules = RoundRules(sync.every, sync.overlap, sync.quorum, sync.grace_factor, sync.grace_cap)
        self.core = Core(
            CoreConfig(
                places=tuple(("fleet", ordinal) for ordinal in range(fleet.learners)),
                rules=rules,
                encoding="float32",
                # A learner that stands still comes back: its slot waits for it.
                heartbeat_timeout=4 * max(fleet.stops.down, fleet.stops.up) + 10 * fleet.stops.step,
                stop=("steps", 1 << 40),
            ),
            None,
            1,
            0.0,
        )
        for action in self.core.start(0.0):
            self._carry_out(action)
        means = np.full(fleet.learners, fleet.stops.step) if steps is None else steps
        self._tokens_per_second = float((TOKENS * fleet.slices / means).sum())
        adoption = AdoptionConfig(sync.fragments, sync.every, sync.overlap, max_steps=4 * sync.every)
        for index, mean in enumerate(means):
            hardware = _Hardware(fleet, repairs, self._random, fleet.slices)
            self._begin_training(_Learner(index, float(mean), Adoption(adoption), hardware))
        self._deliver()

    # ------------------------------------------------------------------ time

    def run(self, seconds: float, on_progress: Callable[[float], None] = lambda share: None) -> CoreResult:
        """Let the fleet train; ``seconds`` count, after a time in which it comes to its steady state."""
        repairs = WARM_UP_REPAIRS * self.repairs.mean if math.isfinite(self.fleet.mtbi) else 0.0
        self._begin = max(repairs, 4 * self.sync.every * self.fleet.stops.step)
        self._advance(self._begin, lambda share: None)
        before, self._responders, self._idle, self._idle_since = self._kept(), [], 0.0, self._begin
        end = self._begin + seconds
        self._advance(end, on_progress)
        if not self._training:
            self._idle += end - self._idle_since
        turns = seconds / (self.fleet.stops.step * self.sync.every)
        return CoreResult(
            goodput=(self._kept() - before) / (self._tokens_per_second * seconds),
            uptime=1 - self._idle / seconds,
            pending=self._pending() / (self._tokens_per_second * self.fleet.stops.step * self.sync.every),
            merges=len(self._responders),
            responders=float(np.mean(self._responders)) if self._responders else 0.0,
            pace=len(self._responders) / (turns * self.sync.fragments),
            events=self.events,
            core_seconds=self.core_seconds,
        )

    def _advance(self, until: float, on_progress: Callable[[float], None]) -> None:
        began, told = self._now, 0
        while self._heap and self._heap[0][0] <= until:
            self._now = self._heap[0][0]
            while self._heap and self._heap[0][0] == self._now:
                heapq.heappop(self._heap)[2]()
            self._deliver()
            share = (self._now - began) / (until - began)
            if int(100 * share) > told:
                told = int(100 * share)
                on_progress(share)
        self._now = until

    def _at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._order), call))

    def _kept(self) -> int:
        """Tokens that are merged or pending."""
        totals = self.core.ledger.totals() if self.core.ledger else None
        return totals.trained - totals.dropped if totals else 0

    def _pending(self) -> int:
        return self.core.ledger.totals().pending if self.core.ledger else 0

    def _count_training(self, change: int) -> None:
        """Another learner trains, or one less."""
        if not self._training:
            self._idle += self._now - self._idle_since
        self._training += change
        self._idle_since = self._now

    # ------------------------------------------------------------------ learners

    def _begin_training(self, learner: _Learner) -> None:
        """A learner joins, at first or after it stood still."""
        learner.hardware.begin_training(self._now)
        learner.connection = number = next(self._numbers)
        self._connections[number] = learner
        seat = learner.seat
        join = Join(
            number,
            learner.process,
            "fleet",
            learner.index,
            False,
            LAYOUT,
            {},
            0,
            learner.held(),
            previous_incarnation=seat.incarnation if seat else 0,
            tenure=seat.tenure if seat else 0,
            slot=seat.slot if seat else -1,
        )
        self._mail.append(join)
        self._count_training(+1)
        self._begin_step(learner)

    def _begin_step(self, learner: _Learner) -> None:
        noise = max(_LEAST_STEP, 1 + self.variation * self._random.standard_normal()) if self.variation else 1.0
        seconds = learner.step_seconds * noise
        self._at(self._now + seconds, lambda: self._end_step(learner, seconds))

    def _end_step(self, learner: _Learner, seconds: float) -> None:
        trained, failed, returned = learner.hardware.advance(self._now)
        news, learner.news = learner.news, []
        for announcement in news:
            learner.adoption.on_broadcast(announcement)
        if learner.adoption.complete and learner.connection is not None:
            if trained > 0 and not learner.adoption.paused:
                learner.adoption.on_step(round(TOKENS * trained / seconds), seconds)
            pulls, learner.pulls = learner.pulls, {}
            for pull in pulls.values():
                self._push(learner, pull)
            self._mail.append(ev.Reported(learner.connection, self._report(learner)))
        if not (failed or returned):
            self._begin_step(learner)
            return
        stops = self.fleet.stops
        stop = max(stops.down if failed else 0.0, stops.up if returned else 0.0)
        self._count_training(-1)
        if learner.connection is not None:
            del self._connections[learner.connection]
            connection, learner.connection = learner.connection, None
            learner.pulls.clear()
            self._mail.append(ev.ConnectionLost(connection))
        self._at(self._now + stop, lambda: self._begin_training(learner))

    def _report(self, learner: _Learner) -> StepReport:
        return replace(learner.adoption.report(), step_seconds=learner.step_seconds)

    def _push(self, learner: _Learner, pull: ev.Pull) -> None:
        planned = learner.adoption.snapshot(pull.fragment, pull.round, pull.version)
        if planned is None or learner.seat is None:
            return
        header = PushHeader(
            **asdict(planned[0]),
            encoding="float32",
            layout_digest=LAYOUT,
            report=self._report(learner),
            slot=learner.seat.slot,
            incarnation=learner.seat.incarnation,
        )
        self._mail.append(ev.PushReceived(header, 1.0, True, next(self._numbers)))

    # ------------------------------------------------------------------ what the core decides

    def _deliver(self) -> None:
        """Let the core take in what is of this moment, all together, and carry out what it decides."""
        while self._mail:
            events, self._mail = self._mail, []
            began = self._clock()
            actions = self.core.handle_together(events, self._now)
            self.core_seconds += self._clock() - began
            self.events += len(events)
            for action in actions:
                self._carry_out(action)
        wake_at = max(self.core.wake_at, self._now)
        if wake_at < self._tick_at:
            self._tick_at = wake_at
            self._at(wake_at, self._tick)

    def _tick(self) -> None:
        if self._now >= self._tick_at:
            self._tick_at = math.inf
            self._mail.append(ev.Tick())

    def _carry_out(self, action: ev.Action) -> None:
        match action:
            case ev.Admit():
                learner = self._connections[action.connection]
                if action.seat is not None:
                    self._take_seat(learner, action.seat, action.merged)
                if action.initialise:
                    self._mail.append(ev.InitialModelStored(LAYOUT, (ELEMENTS,) * self.sync.fragments))
            case ev.Pull():
                if (puller := self._connections.get(action.connection)) is not None:
                    puller.pulls[action.fragment] = action
            case ev.Merge():
                self._responders.append(len(action.responders))
                durable = ev.MergeDurable(
                    action.fragment, action.version, MERGE_SECONDS, (1.0,) * len(action.responders)
                )
                self._at(self._now + MERGE_SECONDS, lambda: self._mail.append(durable))
            case ev.Announce():
                for connection, learner in self._connections.items():
                    self._announce(learner, action.fragment, action.merged.get(connection, ev.MergedPush()))
            case ev.Refuse():
                raise RuntimeError(f"the core refused a simulated learner: {action.message}")
            case _:
                pass  # what is about bytes, files and data

    def _take_seat(self, learner: _Learner, seat: Seat, merged: tuple[ev.MergedPush, ...]) -> None:
        if not (seat.continuing and learner.seat is not None):
            learner.adoption.begin_tenure(seat.slot_step, seat.tenure)
            learner.news.clear()
        learner.seat = seat
        for fragment in range(len(self.core.versions)):
            self._announce(learner, fragment, merged[fragment] if merged else ev.MergedPush())

    def _announce(self, learner: _Learner, fragment: int, merged: ev.MergedPush) -> None:
        version = self.core.versions[fragment]
        payload = Payload("none", fragment, version)
        learner.news.append(Announcement(fragment, self.core.epoch, version, payload, merged.sequence, merged.version))
