"""The election of a leader, in simulated time: never two at once, whatever fails, and one again when it ends."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from diloco_operator.leadership.candidate import read_clock
from diloco_operator.leadership.election import (
    ACT_SECONDS,
    LEASE_SECONDS,
    RETRY_SECONDS,
    Election,
    LeaseRecord,
    LeaseWrite,
)

REQUEST_SECONDS = 4.0


class LeaseServer:
    """The API server's Lease, with versions."""

    def __init__(self) -> None:
        self.record: LeaseRecord | None = None
        self._versions = itertools.count(1)

    def write(self, wanted: LeaseWrite) -> LeaseRecord | None:
        """None: refused, for the Lease is another by now."""
        if (self.record.version if self.record else None) != wanted.version:
            return None
        self.record = LeaseRecord(wanted.holder, str(next(self._versions)), wanted.term)
        return self.record


class Operator:
    """A candidate with a clock of its own, whose process may stand still."""

    def __init__(self, world: World, name: str, offset: float) -> None:
        self.world, self.offset = world, offset
        self.election = Election(name)
        self.frozen_until = 0.0
        self.cut_until = 0.0
        self.writes_end_at = 0.0  # when the last write that it sent as the leader has ended at the latest
        world.at(world.rng.uniform(0, 2), self.step)

    def clock(self) -> float:
        return self.world.now + self.offset

    def may_act(self) -> bool:
        return self.election.may_act(self.clock())

    def when_thawed(self, what: Callable[[], None]) -> None:
        if self.world.now < self.frozen_until:
            self.world.at(self.frozen_until - self.world.now, lambda: self.when_thawed(what))
        else:
            what()

    def step(self) -> None:
        self.when_thawed(self._step)

    def _step(self) -> None:
        self.world.at(RETRY_SECONDS * self.world.rng.uniform(0.7, 1.0) + REQUEST_SECONDS, self.step)
        wanted = self.election.plan_write(self.clock())
        if wanted is None:
            self.ask(lambda: self.world.server.record, self._received)
        else:
            self._write(wanted)

    def _received(self, record: LeaseRecord | None) -> None:
        self.election.receive(record, self.clock())
        wanted = self.election.plan_write(self.clock())
        if wanted is not None:
            self._write(wanted)

    def _write(self, wanted: LeaseWrite) -> None:
        sent_at = self.clock()

        def answered(record: LeaseRecord | None) -> None:
            if record is None:
                self.election.forget()
            else:
                self.election.confirm_write(record, sent_at)

        self.ask(lambda: self.world.server.write(wanted), answered)

    def ask(self, do: Callable[[], Any], answered: Callable[[Any], None]) -> None:
        """A request; it is carried out and answered later, or not, or carried out and not answered."""
        rng, world = self.world.rng, self.world
        there, back = rng.uniform(0, 1.9), rng.uniform(0, 1.9)

        def carried_out() -> None:
            if world.now < self.cut_until or rng.random() < world.loss:
                return
            answer = do()
            if rng.random() >= world.loss:
                world.at(back, lambda: self.when_thawed(lambda: answered(answer)))

        world.at(there, carried_out)


class World:
    """Several operators and one Lease."""

    def __init__(self, seed: int, operators: int = 2) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.loss = 0.0
        self.server = LeaseServer()
        self.leaders: set[str] = set()
        self.acting_seconds = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._tickets = itertools.count()
        self.operators = [Operator(self, f"op-{i}", self.rng.uniform(-1e6, 1e6)) for i in range(operators)]

    def at(self, delay: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + delay, next(self._tickets), what))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            coming = self._due[0][0] if self._due else end
            step = min(coming, end, self.now + 0.25)
            self.acting_seconds += (step - self.now) * any(one.may_act() for one in self.operators)
            self.now = step
            self.check()
            if self.now >= end:
                return
            while self._due and self._due[0][0] <= self.now:
                heapq.heappop(self._due)[2]()
                self.check()

    def check(self) -> None:
        acting = [one for one in self.operators if one.may_act()]
        assert len(acting) <= 1, f"two lead at {self.now}: {[one.election.identity for one in acting]}"
        for one in acting:
            self.leaders.add(one.election.identity)
            others = [other.writes_end_at for other in self.operators if other is not one]
            assert max(others, default=0.0) <= self.now, "a write of an earlier leader may still be carried out"
            if self.now >= one.frozen_until:
                seconds = one.election.seconds_for_a_write(one.clock())
                assert LEASE_SECONDS - ACT_SECONDS <= seconds <= LEASE_SECONDS
                one.writes_end_at = self.now + seconds

    def leader(self) -> Operator | None:
        return next((one for one in self.operators if one.may_act()), None)


@pytest.mark.promise(
    "Two operators never act at once, whatever is lost, cut off or paused; in the end exactly one leads"
)
@pytest.mark.parametrize("seed", range(40))
def test_never_two_lead_at_once_and_one_does_in_the_end(seed: int) -> None:
    """Lost requests and answers, cuts, processes that stand still, clocks with nothing in common."""
    world = World(seed, operators=2 + seed % 2)
    world.run(30)
    for _ in range(25):
        world.loss = world.rng.choice([0.0, 0.0, 0.2, 0.6])
        one = world.rng.choice(world.operators)
        trouble = world.rng.choice(["freeze", "cut", "all cut", "none"])
        if trouble == "freeze":
            one.frozen_until = world.now + world.rng.uniform(1, 60)
        elif trouble != "none":
            for cut in world.operators if trouble == "all cut" else [one]:
                cut.cut_until = world.now + world.rng.uniform(1, 60)
        world.run(world.rng.uniform(5, 40))
    world.loss = 0.0
    for one in world.operators:
        one.frozen_until = one.cut_until = 0.0
    world.run(60)
    assert world.leader() is not None
    before = world.acting_seconds
    world.run(120)
    assert world.acting_seconds - before > 119.9, "where nothing fails the leader stays the leader"


def test_a_frozen_leader_is_followed_and_knows_it_when_it_goes_on() -> None:
    world = World(1)
    world.run(30)
    first = world.leader()
    assert first is not None
    first.frozen_until = world.now + 60
    frozen_at = world.now
    while world.leader() in (first, None):
        world.run(0.25)
        assert world.now < frozen_at + 40
    assert world.now >= frozen_at + LEASE_SECONDS - ACT_SECONDS
    second = world.leader()
    world.run(first.frozen_until - world.now)
    assert not first.may_act(), "before it has read anything"
    assert first.election.seconds_for_a_write(first.clock()) == 0.0
    world.run(60)
    assert world.leader() is second


def test_a_leader_without_the_api_server_stops_and_goes_on_when_it_answers() -> None:
    world = World(2, operators=1)
    world.run(30)
    (one,) = world.operators
    term = world.server.record.term if world.server.record else 0
    one.cut_until = world.now + 40
    world.run(ACT_SECONDS)
    assert not one.may_act()
    world.run(45)
    assert one.may_act() and world.server.record is not None and world.server.record.term == term


def test_a_lease_given_back_is_taken_at_once() -> None:
    world = World(3)
    world.run(30)
    first = world.leader()
    assert first is not None
    wanted = first.election.plan_release()
    assert wanted is not None and not first.may_act()
    record = world.server.write(wanted)
    first.election.receive(record, first.clock())
    first.frozen_until = first.writes_end_at = world.now  # it waits for its writes before it gives the Lease back
    first.when_thawed = lambda what: None  # type: ignore[method-assign]  # and ends
    began = world.now
    while world.leader() is None:
        world.run(0.25)
    assert world.now - began < LEASE_SECONDS, "no need to wait for the end of a Lease that nobody holds"


def test_a_lease_that_somebody_deletes_is_not_taken_from_a_leader_that_acts() -> None:
    for seed in range(20):
        world = World(seed)
        world.run(30 + 0.1 * seed)
        world.server.record = None
        world.run(60)
        assert world.leader() is not None


def test_an_answer_that_was_lost_is_found_again() -> None:
    """The renewal was stored, its answer lost: the next is refused, the Lease is read, and it is one's own."""
    server, one = LeaseServer(), Election("a")
    one.receive(None, 0.0)
    first = one.plan_write(0.0)
    assert first is not None
    made = server.write(first)
    assert made is not None
    one.confirm_write(made, 0.0)
    renewal = one.plan_write(2.0)
    assert renewal is not None and server.write(renewal) is not None  # and no answer
    again = one.plan_write(4.0)
    assert again is not None and server.write(again) is None
    one.forget()
    assert one.plan_write(4.1) is None
    one.receive(server.record, 4.2)
    assert one.may_act(9.9) and not one.may_act(10.0), "only what was answered counts"
    last = one.plan_write(4.2)
    assert last is not None
    made = server.write(last)
    assert made is not None
    one.confirm_write(made, 4.2)
    assert one.may_act(14.1) and made.term == 1


@pytest.mark.promise("Setting a machine's clock does not change the leader")
def test_the_clock_is_not_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Setting the clock of a machine changes nothing."""
    before = read_clock()
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert 0 <= read_clock() - before < 60


def test_a_leadership_that_ends_while_another_thread_asks_is_no_error() -> None:
    """A writer's thread asks; the loop's thread hears in the same moment that another holds the Lease."""
    candidate = Election("a")
    candidate.confirm_write(LeaseRecord("a", "1", 1), 0.0)

    class Moment(float):
        """A time at whose first comparison the leadership ends."""

        def __ge__(self, other: float) -> bool:
            candidate.receive(LeaseRecord("b", "2", 2), 5.0)
            return float(self) >= other

        def __lt__(self, other: float) -> bool:
            return not self >= other

    assert candidate.seconds_for_a_write(Moment(5.0)) == 10.0
    assert candidate.seconds_for_a_write(5.0) == 0.0 and not candidate.may_act(5.0)
