"""A fleet that fails, with the real syncer core and adoption rule, in virtual time.

Theory of operation
-------------------
The world is ``lab.world``'s, with learners that have no parameters: core, ledger and adoption rule are the syncer's and
the learners' own code. Messages take no time and a merge takes ``MERGE_SECONDS``. What is added here is what fails. A
step's tokens are in proportion to the slices that its learner has; a learner that stands still has lost its connection,
and joins again when it goes on, with the state that its other slices kept. Failures, stops and repairs follow the rules
that ``lab.fleet.simulator`` states, written a second time, one learner and one step at a time: the two agreeing is
what this is for. Goodput is counted otherwise too, from the core's ledger: the tokens that are merged, or on their way
and not dropped, over those that the whole fleet could train. That nothing is on its way for ever shows in
``CoreResult.pending``.

Nothing here reads a clock but to time the core's own work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from diloco_protocol.spec.job import DiLoCoJob
from diloco_syncer.core import events as ev
from lab.fleet.repairs import RepairTimes
from lab.fleet.simulator import WARM_UP_REPAIRS, Fleet
from lab.world.links import LinkRates
from lab.world.parts import CountedVersions, Replica, StepOrder, StepResult
from lab.world.world import Place, World

MERGE_SECONDS = 0.1
TOKENS = 1000  # of a slice and a mean step
ELEMENTS = 1000  # of each fragment
ENDLESS = 10**12  # steps
REGION = "fleet"
_LEAST_STEP = 0.1  # of its mean: a step that varies takes at least so long
_BEATS = 3  # heartbeats in the time after which a slot is lost: a report each step is heard before


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
    """A learner's hardware, and the seconds (``usual``) of its mean step and of the one that it makes."""

    hardware: _Hardware
    usual: float
    step_seconds: float = 0.0


class FailingLearners:
    """What the learners of a world train (``lab.world.parts.Training``): so many tokens as their slices have time for.
    ``variation``: standard deviation of single steps, as a share of the mean. ``stop``: called for a learner that
    stands still from now on, with for how long."""

    def __init__(
        self,
        fleet: Fleet,
        steps: Sequence[float],
        repairs: RepairTimes,
        random: np.random.Generator,
        variation: float,
        stop: Callable[[int, float], None],
    ) -> None:
        self._stops, self._random, self._variation, self._stop = fleet.stops, random, variation, stop
        self._learners = [_Learner(_Hardware(fleet, repairs, random, fleet.slices), mean) for mean in steps]
        self.now: Callable[[], float] = lambda: 0.0

    def vary_step(self, place: Place) -> float:
        """By how much the step that this learner begins is longer than its mean."""
        learner = self._learners[place[1]]
        noise = self._random.standard_normal() if self._variation else 0.0
        factor = max(_LEAST_STEP, 1 + self._variation * noise)
        learner.step_seconds = learner.usual * factor
        return factor

    def begin_training(self, index: int) -> None:
        """The learner goes on, or trains for the first time."""
        self._learners[index].hardware.begin_training(self.now())

    def open_replica(self, slot: int) -> Replica | None:
        return None

    def close_replica(self, replica: Replica) -> None:
        pass

    def train(self, orders: Sequence[StepOrder]) -> Sequence[StepResult]:
        return [StepResult(self._end_step(order.slot)) for order in orders]

    def _end_step(self, index: int) -> int:
        """The tokens of the step that this learner ends now."""
        learner, now = self._learners[index], self.now()
        # Before the step it may have waited for a version: slices fail then, too, and train nothing.
        began = max(learner.hardware.now, now - learner.step_seconds)
        _, failed_before, returned_before = learner.hardware.advance(began)
        trained, failed, returned = learner.hardware.advance(now)
        failed, returned = failed or failed_before, returned or returned_before
        if failed or returned:
            self._stop(index, max(self._stops.down if failed else 0.0, self._stops.up if returned else 0.0))
        return round(TOKENS * trained / learner.step_seconds)


class TimedWorld(World):
    """A world that counts what its core takes in (``events``), and the seconds that the core takes for it by ``clock``
    (``core_seconds``)."""

    clock: Callable[[], float]
    events = 0
    core_seconds = 0.0

    def decide(self, events: Sequence[ev.Event]) -> list[ev.Action]:
        began = self.clock()
        actions = super().decide(events)
        self.core_seconds += self.clock() - began
        self.events += len(events)
        return actions


class CoreFleet:
    """One syncer core and its learners. ``steps``: seconds of each learner's mean step (default: the fleet's);
    ``variation``: standard deviation of single steps, as a share; ``clock``: for timing the core."""

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
        self.fleet, self.repairs, self.sync = fleet, repairs, sync
        means = [fleet.stops.step] * fleet.learners if steps is None else [float(step) for step in steps]
        self._tokens_per_second = sum(TOKENS * fleet.slices / mean for mean in means)
        self._training = fleet.learners  # learners that do not stand still
        self._idle_since = self._idle = 0.0  # seconds in which all did, of those that count
        random = np.random.default_rng(seed)
        self._learners = FailingLearners(fleet, means, repairs, random, variation=variation, stop=self._plan_stop)
        job = fleet_job(fleet, sync)
        self.world = TimedWorld(
            job,
            self._learners,
            CountedVersions(job, (ELEMENTS,) * sync.fragments),
            pace=lambda place: means[place[1]],
            vary=self._learners.vary_step,
            link=LinkRates(latency=0.0),
            merge_seconds=MERGE_SECONDS,
        )
        self.world.clock = clock
        self._learners.now = lambda: self.world.now
        self.core = self.world.core
        for index in range(fleet.learners):
            self._learners.begin_training(index)
        self.world.start_all()

    def run(self, seconds: float, on_progress: Callable[[float], None] = lambda share: None) -> CoreResult:
        """Let the fleet train; ``seconds`` count, after a time in which it comes to its steady state."""
        repairs = WARM_UP_REPAIRS * self.repairs.mean if math.isfinite(self.fleet.mtbi) else 0.0
        begin = max(repairs, 4 * self.sync.every * self.fleet.stops.step)
        self._advance(begin, lambda share: None)
        seen, before = self.world.seen.copy(), self._kept()
        self._idle, self._idle_since = 0.0, begin
        end = begin + seconds
        self._advance(end, on_progress)
        if not self._training:
            self._idle += end - self._idle_since
        merges = self.world.seen["merges"] - seen["merges"]
        responders = self.world.seen["merged pushes"] - seen["merged pushes"]
        turns = seconds / (self.fleet.stops.step * self.sync.every)
        return CoreResult(
            goodput=(self._kept() - before) / (self._tokens_per_second * seconds),
            uptime=1 - self._idle / seconds,
            pending=self._pending() / (self._tokens_per_second * self.fleet.stops.step * self.sync.every),
            merges=merges,
            responders=responders / merges if merges else 0.0,
            pace=merges / (turns * self.sync.fragments),
            events=self.world.events,
            core_seconds=self.world.core_seconds,
        )

    def _advance(self, until: float, on_progress: Callable[[float], None]) -> None:
        began, told = self.world.now, 0
        while self.world.timeline.next_at <= until:
            self.world.timeline.run_next()
            share = (self.world.now - began) / (until - began)
            if int(100 * share) > told:
                told = int(100 * share)
                on_progress(share)

    def _kept(self) -> int:
        """Tokens that are merged or pending."""
        totals = self.core.ledger.totals() if self.core.ledger else None
        return totals.trained - totals.dropped if totals else 0

    def _pending(self) -> int:
        return self.core.ledger.totals().pending if self.core.ledger else 0

    # ------------------------------------------------------------------ learners that stand still

    def _plan_stop(self, index: int, seconds: float) -> None:
        """Have a learner stand still once what it says at this step's end is there."""
        self.world.timeline.call_at(self.world.now, partial(self._stop, index, seconds), last=True)

    def _stop(self, index: int, seconds: float) -> None:
        place = (REGION, index)
        self._count_training(-1)
        self.world.stall_learner(place, seconds)
        self.world.cut_learner(place, seconds)
        self.world.timeline.call_in(seconds, partial(self._go_on, index))

    def _go_on(self, index: int) -> None:
        self._count_training(+1)
        self._learners.begin_training(index)

    def _count_training(self, change: int) -> None:
        """Another learner trains, or one less."""
        if not self._training:
            self._idle += self.world.now - self._idle_since
        self._training += change
        self._idle_since = self.world.now


def fleet_job(fleet: Fleet, sync: Sync) -> DiLoCoJob:
    """A job of the fleet's learners that does not end."""
    timeout = 4 * max(fleet.stops.down, fleet.stops.up) + 10 * fleet.stops.step
    return DiLoCoJob.model_validate(
        {
            "apiVersion": "diloco.io/v1alpha1",
            "kind": "DiLoCoJob",
            "metadata": {"name": "fleet"},
            "spec": {
                "training": {"stop": {"steps": ENDLESS}},
                "learners": {"command": ["train"]},
                "sync": {
                    "fragments": sync.fragments,
                    "every": sync.every,
                    "overlap": sync.overlap,
                    "quorum": sync.quorum,
                    "grace": {"factor": sync.grace_factor, "capSeconds": sync.grace_cap},
                    # A learner that stands still comes back: its slot waits for it.
                    "heartbeat": {"intervalSeconds": timeout / _BEATS, "timeoutSeconds": timeout},
                },
                "regions": [{"name": REGION, "learners": fleet.learners}],
            },
        }
    )
