"""The goodput of a fleet whose slices of chips fail, event by event and exact between events.

Theory of operation
-------------------
A fleet of N chips is M *learners* of N/M chips that do not wait for each other; data-parallel training is one learner
of N. A learner's chips fail as *slices*. At any time a learner either trains with the slices that it has, and
computes in proportion to them, or stands still. It

- notices what happened at the end of the step during which it happened,
- stands still for ``down`` seconds after a failure, to go on without the slice, or with a spare one in its place,
- stands still for ``up`` seconds to take in a slice that was repaired, if it lacks one,
- stands still once for what it notices at once (for the longer of the two), and takes in what came back meanwhile.

While it stands still nothing fails, with which the table of the paper is met. With ``Stops.interrupted`` slices fail
then too, and the stop begins anew: rigid data-parallel training of the largest fleets hardly trains at all.

Goodput is the share of the fleet's chip seconds in which a chip trains; uptime is the share of time in which a learner
trains at all. Example: 150,000 chips that each fail once a year lose one every 210 s, and if each costs 15 s twice, one
learner of all of them computes for about 210 of 240 s.

All learners of all fleets and repetitions (*chains*) advance together, one stretch of training and one stop at a time,
as rows of arrays. A chain that has reached the end of its time is taken out. Nothing is discretised but what the fleet
itself does at the ends of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lab.fleet.repairs import RepairTimes

WARM_UP_REPAIRS = 3.0  # mean repair times that pass before anything is counted
_DROP_EVERY = 32  # stretches between two removals of the chains that are done


@dataclass(frozen=True, slots=True)
class Stops:
    """Seconds: of a ``step``, and for how long a learner stands still after a failure and for a slice's return.
    ``interrupted``: slices fail meanwhile too, each beginning a stop for a failure."""

    step: float
    down: float
    up: float
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class Fleet:
    """``chips`` in ``learners`` that fail apart from each other; ``mtbi``: seconds of one chip between two failures;
    ``slice_chips`` go when one of them fails; ``spares``: further slices of each learner (infinite: whatever fails is
    replaced during the stop)."""

    chips: float
    learners: int
    mtbi: float
    stops: Stops
    slice_chips: float = 256
    spares: float = 0

    @property
    def slices(self) -> int:
        """Of each learner; at least one, so that a slice is at most a learner."""
        return max(1, round(self.chips / self.learners / self.slice_chips))

    @property
    def slice_rate(self) -> float:
        """Failures of one slice, per second."""
        return self.chips / self.learners / self.slices / self.mtbi

    @property
    def seconds_between_failures(self) -> float:
        """Of the whole fleet, while all of it trains."""
        return self.mtbi / self.chips


@dataclass(frozen=True, slots=True)
class Result:
    """Shares (0 to 1, float64) by repetition, and how many stops there were in all."""

    goodput: np.ndarray
    uptime: np.ndarray
    stops: int


@dataclass(slots=True)
class _Chains:
    """One row each: a learner of one fleet in one repetition. Times are seconds since its beginning."""

    group: np.ndarray  # fleet and repetition
    slices: np.ndarray
    spares: np.ndarray
    slice_rate: np.ndarray
    step: np.ndarray
    down: np.ndarray
    up: np.ndarray
    interrupted: np.ndarray
    begin: np.ndarray  # of the time that counts
    end: np.ndarray
    now: np.ndarray
    active: np.ndarray
    back: np.ndarray  # (rows, places): when slices under repair are back; infinite: a place that is free

    def keep(self, rows: np.ndarray) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name)[rows])

    def add_repair(self, rows: np.ndarray, when: np.ndarray) -> None:
        """Another slice of each of ``rows`` is under repair until ``when``."""
        places = self.back[rows].argmax(axis=1)  # infinite ones are the greatest
        if np.isfinite(self.back[rows, places]).any():
            self.back = np.concatenate([self.back, np.full_like(self.back, np.inf)], axis=1)
            places = self.back[rows].argmax(axis=1)
        self.back[rows, places] = when


@dataclass(slots=True)
class _Tally:
    """What is counted: the seconds that slices trained, and when a chain stood still."""

    trained: np.ndarray  # by group
    groups: list[np.ndarray] = field(default_factory=list)
    starts: list[np.ndarray] = field(default_factory=list)
    ends: list[np.ndarray] = field(default_factory=list)

    def add_idle(self, chains: _Chains, start: np.ndarray, end: np.ndarray) -> None:
        start, end = np.maximum(start, chains.begin), np.minimum(end, chains.end)
        counts = end > start
        self.groups.append(chains.group[counts])
        self.starts.append(start[counts])
        self.ends.append(end[counts])

    def add_trained(
        self, chains: _Chains, rows: np.ndarray | slice, start: np.ndarray, end: np.ndarray, slices: np.ndarray | float
    ) -> None:
        """That many slices of each of ``rows`` trained from start to end (a negative number: did not, after all)."""
        seconds = np.minimum(end, chains.end[rows]) - np.maximum(start, chains.begin[rows])
        self.trained += np.bincount(chains.group[rows], slices * np.maximum(seconds, 0.0), self.trained.size)


@dataclass(frozen=True, slots=True)
class Run:
    """How much is simulated: each fleet ``repetitions`` times, each time for as long as ``failures`` of its chips take
    to fail if all train. ``seed``: of everything."""

    repetitions: int = 8
    failures: float = 2000
    seed: int = 0


def simulate_fleets(
    fleets: Sequence[Fleet], repairs: RepairTimes, run: Run, on_progress: Callable[[float], None] = lambda share: None
) -> list[Result]:
    """Simulate fleets whose repairs take the same times. ``on_progress`` is told which share of the work is done."""
    random = np.random.default_rng(run.seed)
    counted = np.array([run.failures * fleet.seconds_between_failures for fleet in fleets])
    chains = _make_chains(fleets, repairs.mean * WARM_UP_REPAIRS, counted, run.repetitions)
    tally = _Tally(np.zeros(len(fleets) * run.repetitions))
    expected = float(((chains.end - chains.now) * chains.slices * chains.slice_rate).sum())
    stretches = 0
    while chains.now.size:
        _advance(chains, tally, repairs, random)
        stretches += 1
        if stretches % _DROP_EVERY == 0:
            chains.keep(chains.now < chains.end)
            left = float(((chains.end - chains.now) * chains.slices * chains.slice_rate).sum())
            on_progress(1 - left / expected)
    return _results(fleets, run.repetitions, counted, tally)


def _make_chains(fleets: Sequence[Fleet], warm_up: float, counted: np.ndarray, repetitions: int) -> _Chains:
    """All chains at their beginning, where nothing has failed. ``counted``: the seconds that count, by fleet."""
    rows = np.repeat(np.arange(len(fleets)), [fleet.learners * repetitions for fleet in fleets])
    repetition = np.concatenate([np.tile(np.arange(repetitions), fleet.learners) for fleet in fleets])

    def column(value: Callable[[Fleet], float]) -> np.ndarray:
        return np.array([value(fleet) for fleet in fleets], dtype=np.float64)[rows]

    slices = column(lambda fleet: fleet.slices)
    return _Chains(
        group=rows * repetitions + repetition,
        slices=slices,
        spares=column(lambda fleet: fleet.spares),
        slice_rate=column(lambda fleet: fleet.slice_rate),
        step=column(lambda fleet: fleet.stops.step),
        down=column(lambda fleet: fleet.stops.down),
        up=column(lambda fleet: fleet.stops.up),
        interrupted=column(lambda fleet: fleet.stops.interrupted) > 0,
        begin=np.full(rows.size, warm_up),
        end=warm_up + counted[rows],
        now=np.zeros(rows.size),
        active=slices.copy(),
        back=np.full((rows.size, 8), np.inf),
    )


def _advance(chains: _Chains, tally: _Tally, repairs: RepairTimes, random: np.random.Generator) -> None:
    """One stretch of training of every chain, and the stop that ends it."""
    start = chains.now
    fails = start + _wait_for_failure(chains, slice(None), random)
    returns = np.where(chains.active < chains.slices, chains.back.min(axis=1), np.inf)
    happens = np.minimum(fails, returns)
    noticed = start + np.maximum(1, np.ceil((happens - start) / chains.step)) * chains.step
    failed, returned = fails < noticed, returns <= noticed
    tally.add_idle(chains, start, np.where(chains.active > 0, start, noticed))
    tally.add_trained(chains, slice(None), start, noticed, chains.active)
    while (rows := np.flatnonzero(fails < noticed)).size:
        when = fails[rows]
        tally.add_trained(chains, rows, when, noticed[rows], -1.0)
        chains.add_repair(rows, when + repairs.draw(random, rows.size))
        chains.active[rows] -= 1
        fails[rows] = when + _wait_for_failure(chains, rows, random)
    stop = np.maximum(np.where(failed, chains.down, 0.0), np.where(returned, chains.up, 0.0))
    chains.now = noticed + stop
    _interrupt_stops(chains, noticed, repairs, random)
    tally.add_idle(chains, noticed, chains.now)
    chains.back[chains.back <= chains.now[:, None]] = np.inf
    missing = np.isfinite(chains.back).sum(axis=1)
    chains.active = np.clip(chains.slices + chains.spares - missing, 0.0, chains.slices)


def _interrupt_stops(chains: _Chains, begun: np.ndarray, repairs: RepairTimes, random: np.random.Generator) -> None:
    """Let slices fail between ``begun`` and ``now``, where a stop can be interrupted: each moves ``now``."""
    rows, since = np.flatnonzero(chains.interrupted), begun.copy()
    while rows.size:
        when = since[rows] + _wait_for_failure(chains, rows, random)
        fails = when < np.minimum(chains.now[rows], chains.end[rows])
        rows, when = rows[fails], when[fails]
        chains.add_repair(rows, when + repairs.draw(random, rows.size))
        chains.active[rows] -= 1
        chains.now[rows], since[rows] = when + chains.down[rows], when


def _wait_for_failure(chains: _Chains, rows: np.ndarray | slice, random: np.random.Generator) -> np.ndarray:
    """Seconds until the next slice fails; infinite where none is left."""
    rate = chains.active[rows] * chains.slice_rate[rows]
    with np.errstate(divide="ignore"):
        waits: np.ndarray = random.exponential(size=rate.size) / rate
    return waits


def _results(fleets: Sequence[Fleet], repetitions: int, counted: np.ndarray, tally: _Tally) -> list[Result]:
    """Shares from what was counted; a fleet stands still when all its learners do."""
    groups = np.concatenate(tally.groups)
    ends = np.concatenate(tally.ends)
    starts = np.concatenate(tally.starts)
    # One more learner stands still at each start, one less at each end; of the same time, starts come first.
    group, when = np.tile(groups, 2), np.concatenate([starts, ends])
    change = np.repeat([1, -1], groups.size)
    order = np.lexsort((-change, when, group))
    group, when, idle = group[order], when[order], np.cumsum(change[order])
    learners = np.repeat([fleet.learners for fleet in fleets], repetitions)
    all_idle = (idle >= learners[group])[:-1]
    down = np.zeros(len(fleets) * repetitions)
    np.add.at(down, group[:-1], np.where(all_idle, np.diff(when), 0.0))
    seconds = np.repeat(counted, repetitions)
    slices = np.repeat([fleet.learners * fleet.slices for fleet in fleets], repetitions)
    goodput, uptime = tally.trained / slices / seconds, 1 - down / seconds
    stops = np.bincount(groups, minlength=down.size)
    return [
        Result(goodput[at : at + repetitions], uptime[at : at + repetitions], int(stops[at : at + repetitions].sum()))
        for at in range(0, down.size, repetitions)
    ]
