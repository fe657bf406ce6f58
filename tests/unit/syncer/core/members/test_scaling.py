"""A syncer that starts with other places than its store has: who keeps which slot, and what becomes of it."""

from __future__ import annotations

import json

import pytest

from diloco_protocol.documents import Tokens
from diloco_protocol.vocabulary import SlotState
from diloco_protocol.wire.records import FragmentReport, Seat, StepReport
from diloco_syncer.core import events as ev
from diloco_syncer.core.books.rounds import RoundRules
from diloco_syncer.core.config import CoreConfig
from diloco_syncer.core.core import Core
from ledger_balance import imbalances
from shell_figures import SHELL

Regions = dict[str, int]


def config(regions: Regions) -> CoreConfig:
    places = tuple((name, i) for name, learners in regions.items() for i in range(learners))
    rules = RoundRules(every=4, overlap=1, quorum=1, grace_factor=0.9, grace_cap=5.0)
    return CoreConfig(places, rules, "float32", stop=("steps", 1000), heartbeat_timeout=10.0)


class Job:
    """A job over several syncers. Connections are numbered; a process is named by its place."""

    def __init__(self, regions: Regions) -> None:
        self.epoch, self.now, self.connection = 0, 0.0, 0
        self.state: str | None = None
        self.connections: dict[str, int] = {}  # process -> its connection
        self.incarnations: dict[str, int] = {}
        self.standby: set[str] = set()
        self.start(regions)
        for place in self.core.config.places:
            self.join(*place)
            if not self.core.initialised:
                self.core.handle(ev.InitialModelStored("L", (8,)), self.now)
            self.report(f"{place[0]}{place[1]}", 0)

    def start(self, regions: Regions) -> None:
        """The syncer comes back with these places; nobody is there yet."""
        if self.epoch:
            self.state = json.dumps(self.core.state(self.now, self.now))
        self.epoch += 1
        self.now += 1.0
        self.connections.clear()
        state = None if self.state is None else json.loads(self.state)
        self.core = Core(config(regions), state, self.epoch, self.now, wall=self.now)
        self.core.start(self.now)

    def join(self, region: str, ordinal: int, process: str = "") -> Seat | None:
        process = process or f"{region}{ordinal}"
        self.connection += 1
        self.connections[process] = self.connection
        join = ev.Join(
            self.connection,
            process,
            region,
            ordinal,
            evaluator=False,
            layout_digest="L",
            digests={},
            sequences=0,
            held=(),
            previous_incarnation=self.incarnations.get(process, 0),
        )
        actions = self.core.handle(join, self.now)
        (admit,) = [a for a in actions if isinstance(a, ev.Admit)]
        if admit.seat is not None:
            self.incarnations[process] = admit.seat.incarnation
        return admit.seat

    def report(self, process: str, step: int, trained: int | None = None) -> None:
        """``step`` of the slot, ``trained`` of them by this tenure."""
        steps = step if trained is None else trained
        counts = FragmentReport(self.epoch, 0, steps, 10 * steps, confirmed_tokens=0)
        told = StepReport(step, steps, 10 * steps, (counts,), compute_seconds=float(steps), step_seconds=1.0)
        self.core.handle(ev.Reported(self.connections[process], told), self.now)

    def drain(self, process: str) -> None:
        self.core.handle(ev.Drained(self.connections.pop(process)), self.now)
        del self.incarnations[process]

    def slots(self) -> dict[str, int]:
        """Processes by slot, of those that hold one."""
        return {slot.holder.process: slot.index for slot in self.core.slots if slot.holder.process}

    def retired(self) -> list[int]:
        return [slot.index for slot in self.core.slots if slot.retired]

    @property
    def trained(self) -> int:
        assert self.core.ledger is not None and imbalances(self.core.ledger) == []
        return self.core.ledger.total_trained()


def test_up_who_is_there_keeps_his_slot_and_newcomers_begin_at_the_greatest_step() -> None:
    job = Job({"a": 2, "b": 1})
    for process, step in (("a0", 40), ("a1", 30), ("b0", 55)):
        job.report(process, step)
    before = job.slots()
    job.start({"a": 4, "b": 2})  # b-0's place was the third, and is the fifth
    # A newcomer may come before those who were there: their slots wait for them.
    seat = job.join("a", 3)
    assert seat is not None and seat.slot not in before.values() and seat.slot_step == 55 and not seat.continuing
    for process in before:
        seat = job.join(process[0], int(process[1]))
        assert seat is not None and seat.continuing
    for place in (("a", 2), ("b", 1)):
        seat = job.join(*place)
        assert seat is not None and seat.slot_step == 55
    after = job.slots()
    assert {process: after[process] for process in before} == before
    assert sorted(after.values()) == [0, 1, 2, 3, 4, 5] and not job.retired()
    assert job.trained == 1250


def test_down_who_stays_keeps_his_slot_and_who_leaves_may_finish() -> None:
    job = Job({"a": 3, "b": 2})
    for process in ("a0", "a1", "a2", "b0", "b1"):
        job.report(process, 20)
    before = job.slots()
    job.start({"a": 1, "b": 1})
    assert job.retired() == [1, 2, 4]
    for process in before:
        seat = job.join(process[0], int(process[1]))
        assert seat is not None and seat.continuing, process
        job.report(process, 30)
    assert job.slots() == before and job.trained == 1500
    # They leave: by a drain, as a pod that is removed does; or for good, when somebody says so.
    job.drain("a1")
    job.core.handle(ev.ProcessEnded("b", 1, "b1", "deleted"), job.now)
    rows = {row.slot: row for row in job.core.status(job.now, SHELL).slots}
    assert rows[1].state == rows[4].state == "drained"
    assert [row.retired for row in rows.values()] == [False, True, True, False, True]
    # Nobody is seated there any more: whoever comes from a place that there is no more stands by.
    assert job.join("a", 1, "fresh") is None
    assert job.core.status(job.now, SHELL).standby == 1
    # A container that is started again in such a pod: the one before it has ended, and its work with it.
    assert job.join("a", 2, "again") is None
    assert job.core.slots[2].state is SlotState.DRAINED
    assert job.trained == 1500
    totals = job.core.ledger.totals() if job.core.ledger else None
    # 300 of each: a-1's were not offered (drain), b-1's and a-2's died with their processes.
    assert totals == Tokens(trained=1500, merged=0, pending=600, dropped=900)
    assert job.core.report(job.now, SHELL, "", 0).learners[2].retired is True


def test_down_and_up_again_goes_on_with_the_history_and_at_the_greatest_step() -> None:
    job = Job({"a": 5})
    for i in range(5):
        job.report(f"a{i}", 10)
    job.start({"a": 2})
    for i in range(5):
        job.join("a", i)
        job.report(f"a{i}", 12)
    for i in (2, 3, 4):
        job.drain(f"a{i}")
    job.report("a0", 90)
    job.start({"a": 5})
    assert job.retired() == [] and len(job.core.slots) == 5
    for i in range(5):
        seat = job.join("a", i, f"new{i}" if i > 1 else "")
        assert seat is not None
        assert (seat.slot, seat.continuing) == (i, i < 2)
        assert seat.slot_step == {0: 90, 1: 12}.get(i, 90)
    assert job.trained == 10 * (90 + 12 * 4)
    # At once, before anybody had left: nothing has happened to anybody.
    before = job.slots()
    job.start({"a": 2})
    job.start({"a": 5})
    assert not job.retired()
    for process in before:
        seat = job.join("a", before[process], process)
        assert seat is not None and seat.continuing
    assert job.slots() == before


def test_a_region_that_goes_and_one_that_comes() -> None:
    job = Job({"a": 1, "b": 2})
    for process in ("a0", "b0", "b1"):
        job.report(process, 20)
    job.start({"a": 1, "c": 2})
    for process in ("a0", "b0", "b1"):
        seat = job.join(process[0], int(process[1]))
        assert seat is not None and seat.continuing
    assert job.retired() == [1, 2]
    for i in range(2):
        seat = job.join("c", i)
        assert seat is not None and seat.slot == 3 + i and seat.slot_step == 20
    assert len(job.core._state.members.current) == 3


def test_a_spare_that_took_over_is_not_taken_for_one_who_leaves() -> None:
    job = Job({"a": 2})
    job.report("a0", 20)
    job.report("a1", 20)
    assert job.join("a", 2) is None  # a spare
    job.core.handle(ev.ProcessEnded("a", 1, "a1", "killed"), job.now)
    job.core.handle(ev.Tick(), job.now)
    assert job.slots() == {"a0": 0, "a2": 1}
    job.incarnations["a2"] = job.core.slots[1].holder.incarnation
    job.start({"a": 2})
    assert not job.retired()
    seat = job.join("a", 2)
    assert seat is not None and seat.continuing and seat.slot == 1
    assert job.join("a", 1, "late") is None  # its place is held: it stands by


def test_goodput_is_judged_by_the_slots_that_there_were() -> None:
    job = Job({"a": 4})
    job.report("a0", 1)
    began = job.now
    job.now += 100.0
    first = 4 * 1.0  # in the second before its report the first step was computed
    assert job.core._state.clock.slot_seconds(job.now) == pytest.approx(first + 400.0)
    job.start({"a": 1})
    restarted = job.now
    job.join("a", 0)
    job.report("a0", 2)
    job.now += 50.0
    known = job.core._state.clock.slot_seconds(job.now)
    assert known == pytest.approx(first + 4 * 100.0 + (job.now - began - 100.0), abs=4 * (restarted - began - 100.0))


# ------------------------------------------------------------------ pods beside those that train


def test_an_idle_learner_takes_nothing_and_hears_the_phase() -> None:
    job = Job({"a": 2})
    before = job.core.status(job.now, SHELL)
    join = ev.Join(99, "ff", "a", 1, evaluator=False, layout_digest="L", digests={}, sequences=0, held=(), idle=True)
    (admit,) = [a for a in job.core.handle(join, job.now) if isinstance(a, ev.Admit)]
    assert (admit.seat, admit.observer, admit.phase) == (None, False, job.core.phase)
    after = job.core.status(job.now, SHELL)
    assert after.standby == 0 and after.slots == before.slots
    # Nor is it seated when a slot is free, or its connection's end of any account.
    job.core.handle(ev.ProcessEnded("a", 1, "a1", "killed"), job.now)
    job.core.handle(ev.Tick(), job.now)
    assert job.core.slots[1].state is SlotState.LOST
    job.core.handle(ev.ConnectionLost(99), job.now)


def test_a_process_ends_only_where_it_is() -> None:
    job = Job({"a": 2})
    assert job.join("a", 2, "cc") is None  # stands by
    before = job.core.status(job.now, SHELL)
    for region, ordinal, process in (("a", 0, "dd"), ("a", 1, "a0"), ("b", 0, "a0"), ("a", 7, ""), ("a", 1, "cc")):
        job.core.handle(ev.ProcessEnded(region, ordinal, process, "deleted"), job.now)
    assert job.core.status(job.now, SHELL) == before
    # A standby that has ended must not be given a slot.
    actions = job.core.handle(ev.ProcessEnded("a", 2, "cc", "deleted"), job.now)
    assert [(a.connection, a.fatal) for a in actions if isinstance(a, ev.Refuse)] == [(job.connections["cc"], False)]
    assert job.core.status(job.now, SHELL).standby == 0
    job.core.handle(ev.ProcessEnded("a", 0, "a0", "deleted"), job.now)
    assert job.core.slots[0].state is SlotState.LOST
