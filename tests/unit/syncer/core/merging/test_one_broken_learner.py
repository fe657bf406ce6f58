"""What one learner that lies, or is broken, does to the others: at most its share.

Learners that train as they should are played here, in virtual time, beside one whose messages each test makes up.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from core_desk import Desk, config, of
from diloco_protocol.spec.load import parse_job
from diloco_protocol.vocabulary import EventKind, JobPhase, PushRefusal
from diloco_protocol.wire.records import FragmentReport, LeaseCursor, PushHeader, StepReport
from diloco_syncer.core import events as ev
from diloco_syncer.core.books.leases import MAX_BLOCK
from diloco_syncer.core.books.norm_gate import GATE_FACTOR, GATE_PATIENCE, GATE_SAMPLES
from diloco_syncer.core.books.rounds import RoundRules
from diloco_syncer.core.books.shares import MOST
from diloco_syncer.core.books.slots import TURNS_AHEAD
from diloco_syncer.core.config import CoreConfig
from diloco_syncer.core.core import Core
from diloco_syncer.core.merging.push_checks import MOST_GROWTH

FRAGMENTS, EVERY, TOKENS = 2, 24, 10
STEP = 0.05  # seconds


@dataclass
class Played:
    """A learner that trains as it should; ``merged`` by fragment: the last step that is in its base."""

    connection: int
    step: int = 0
    tokens: int = TOKENS  # a step's
    says: float = STEP  # what it says that a step takes
    merged: list[int] = field(default_factory=lambda: [0] * FRAGMENTS)
    version: list[int] = field(default_factory=lambda: [0] * FRAGMENTS)
    sequence: int = 0
    sent: dict[tuple[int, int], int] = field(default_factory=dict)  # the last step of each push
    asked: dict[int, ev.Pull] = field(default_factory=dict)

    @property
    def slot(self) -> int:
        return self.connection - 1

    def report(self, **changes: object) -> StepReport:
        rows = tuple(
            FragmentReport(
                1,
                version,
                self.step - merged,
                (self.step - merged) * self.tokens,
                confirmed_tokens=merged * self.tokens,
            )
            for version, merged in zip(self.version, self.merged, strict=True)
        )
        report = StepReport(self.step, self.step, self.step * self.tokens, rows, step_seconds=self.says)
        return replace(report, **changes)  # type: ignore[arg-type]


class Job:
    """``honest`` learners on connections 1 and up, and one more. ``broken`` is called after each step's time."""

    def __init__(self, honest: int = 1, broken: Callable[[Job], None] | None = None, **changes: object) -> None:
        rules = RoundRules(EVERY, overlap=2, quorum=1, grace_factor=0.9, grace_cap=10.0)
        base: CoreConfig = config(slots=honest + 1, rules=rules, stop=("steps", 10**6), max_versions=1000)
        base = replace(base, heartbeat_timeout=1e6)
        self.desk = Desk(replace(base, **changes))  # type: ignore[arg-type]
        self.honest = [Played(i + 1) for i in range(honest)]
        self.other = Played(honest + 1)
        self.broken = broken
        self.desk.begin(honest + 1, FRAGMENTS)
        self.merges: list[ev.Merge] = []
        self.norm: Callable[[int], float] = lambda fragment: 1.0  # of a merge
        self._read = 0

    @property
    def core(self):  # type: ignore[no-untyped-def]
        return self.desk.core

    def run(self, seconds: float) -> None:
        """Let time pass, a step of the honest at a time."""
        for _ in range(round(seconds / STEP)):
            self.desk.later(STEP)
            self.carry_out()
            for learner in self.honest:
                learner.step += 1
                for pull in learner.asked.values():
                    self.push(learner, pull.fragment, pull.round)
                learner.asked.clear()
                self.desk.do(ev.Reported(learner.connection, learner.report()))
            if self.broken is not None:
                self.broken(self)
            self.carry_out()

    def push(self, learner: Played, fragment: int, round: int, **changes: object) -> list[ev.Action]:
        """Everything above the learner's base."""
        steps = learner.step - learner.merged[fragment]
        learner.sequence += 1
        learner.sent[fragment, learner.sequence] = learner.step
        header = PushHeader(
            fragment,
            learner.sequence,
            round,
            1,
            base_version=learner.version[fragment],
            oldest_version=learner.version[fragment],
            first_step=learner.merged[fragment] + 1,
            last_step=learner.step,
            steps=steps,
            tokens=steps * learner.tokens,
            compute_seconds=1.0,
            encoding="float32",
            layout_digest="L",
            report=learner.report(),
            slot=learner.slot,
            incarnation=self.core.slots[learner.slot].holder.incarnation,
        )
        header = replace(header, **changes)  # type: ignore[arg-type]
        return self.desk.do(ev.PushReceived(header, 1.0, True, handle=1000 * learner.connection + learner.sequence))

    def carry_out(self) -> None:
        """What the core has decided: merges are durable at once, and everybody adopts each version at once."""
        while self._read < len(self.desk.log):
            action = self.desk.log[self._read]
            self._read += 1
            learners = {learner.connection: learner for learner in (*self.honest, self.other)}
            if isinstance(action, ev.Merge):
                self.merges.append(action)
                norms, norm = (1.0,) * len(action.responders), self.norm(action.fragment)
                self.desk.do(ev.MergeDurable(action.fragment, action.version, 0.0, norms, norm=norm))
            elif isinstance(action, ev.Announce):
                for connection, learner in learners.items():
                    merged = action.merged.get(connection, ev.MergedPush())
                    learner.version[action.fragment] = action.version
                    last = learner.sent.get((action.fragment, merged.sequence), 0)
                    learner.merged[action.fragment] = max(last, learner.merged[action.fragment])
                    self.desk.do(ev.VersionSent(connection, action.fragment, action.version))
            elif isinstance(action, ev.Pull):
                learners[action.connection].asked[action.fragment] = action

    def merges_per_second(self, seconds: float) -> float:
        """After a minute in which the pace becomes known."""
        self.run(60.0)
        before = len(self.merges)
        self.run(seconds)
        return (len(self.merges) - before) / seconds


ALONE = FRAGMENTS / (EVERY * STEP)  # merges a second of one pace


def test_a_job_of_honest_learners_keeps_its_pace() -> None:
    job = Job(honest=2, broken=lambda job: job.desk.do(ev.Reported(3, job.other.report())) and None)
    assert job.merges_per_second(30.0) == pytest.approx(ALONE, rel=0.1)


@pytest.mark.promise(
    "Nobody waits longer for a learner that says its steps are slow than for one of the usual pace", section="Syncer"
)
@pytest.mark.parametrize("honest", [1, 2])
def test_a_learner_that_says_its_steps_are_slow_holds_up_nobody(honest: int) -> None:
    """It never pushes. It was waited for in each round, until the cap, by what it said of its steps."""

    def says(job: Job) -> None:
        job.other.step, job.other.says = job.other.step + (round(job.desk.now / STEP) % 4 == 0), 1e6
        job.desk.do(ev.Reported(job.other.connection, job.other.report()))

    assert Job(honest, says).merges_per_second(30.0) >= 0.9 * ALONE


def test_a_learner_that_pushes_slowly_holds_up_nobody() -> None:
    """It makes one step in ten seconds, and answers each pull. The lower of two paces is what is waited by."""

    def crawls(job: Job) -> None:
        if round(job.desk.now / STEP) % 200 == 0:
            job.other.step += 1
            for pull in job.other.asked.values():
                job.push(job.other, pull.fragment, pull.round)
            job.other.asked.clear()
        job.desk.do(ev.Reported(job.other.connection, job.other.report()))

    assert Job(1, crawls).merges_per_second(60.0) >= 0.9 * ALONE


def test_a_learner_that_says_its_steps_are_short_leaves_nobody_out() -> None:
    """It answers each pull at once, long before the others' step ends; they are waited for as before."""

    def hurries(job: Job) -> None:
        job.other.step, job.other.says = job.other.step + 1, 1e-9
        job.desk.do(ev.Reported(job.other.connection, job.other.report()))
        job.carry_out()
        for pull in job.other.asked.values():
            job.push(job.other, pull.fragment, pull.round)
        job.other.asked.clear()

    job = Job(1, hurries)
    job.run(30.0)
    assert sum(len(merge.responders) == 2 for merge in job.merges) >= 0.9 * len(job.merges) > 30


@pytest.mark.promise(
    "A learner that claims steps and pushes none of them opens no rounds for the others", section="Syncer"
)
@pytest.mark.parametrize(("honest", "quorum"), [(1, 1), (2, 2)])
def test_a_learner_that_claims_steps_opens_no_rounds(honest: int, quorum: int) -> None:
    def claims(job: Job) -> None:
        job.other.step += EVERY
        job.desk.do(ev.Reported(job.other.connection, job.other.report()))

    rules = RoundRules(EVERY, overlap=2, quorum=quorum, grace_factor=0.9, grace_cap=10.0)
    assert Job(honest, claims, rules=rules).merges_per_second(30.0) == pytest.approx(ALONE, rel=0.1)


def test_a_learner_whose_answer_was_lost_opens_rounds_again_after_a_turn() -> None:
    """Its push never came, and then the other learner hangs, with its process alive."""
    job = Job(honest=1)
    job.run(30.0)
    job.other.asked.clear()  # it was asked, and its answers are lost
    (hangs,) = job.honest
    job.honest = [replace(job.other, step=hangs.step)]
    job.other = hangs
    merges = len(job.merges)
    job.run(60.0)
    assert len(job.merges) > merges + 20


# ------------------------------------------------------------------ the job's end, and the weights


@pytest.mark.promise(
    "A learner that claims steps or tokens which are in no merge neither ends the job nor moves its learning rate",
    section="Syncer",
)
@pytest.mark.parametrize("stop", [("steps", 2000), ("tokens", 2 * 2000 * TOKENS)])
@pytest.mark.parametrize("restarts", [False, True])
def test_what_is_claimed_and_not_merged_does_not_end_the_job(stop: tuple[str, float], restarts: bool) -> None:
    job = Job(honest=2, stop=stop)
    job.run(10.0)
    job.other.step += 2**20
    job.desk.do(ev.Reported(job.other.connection, job.other.report()))
    job.run(1.0)
    if restarts:
        job.desk.core = Core(job.core.config, json.loads(json.dumps(job.core.state(job.desk.now))), 2, job.desk.now)
    assert job.core.phase is not JobPhase.DRAINING
    claimed = TURNS_AHEAD * job.core.config.max_steps / (2000 if stop[0] == "steps" else 2 * 2000)
    assert job.core.stop_progress(job.desk.now) <= 220 / 2000 + claimed


def test_who_comes_after_a_learner_that_claimed_steps_does_not_begin_there() -> None:
    job = Job(honest=2)
    job.run(10.0)
    job.other.step += 2**20
    job.desk.do(ev.Reported(job.other.connection, job.other.report()))
    state = json.loads(json.dumps(job.core.state(job.desk.now)))
    places = (*job.core.config.places, ("r", 3))
    desk = Desk(replace(job.core.config, places=places), state, epoch=2)
    desk.now = job.desk.now
    (admitted,) = of(desk.join(9, 3), ev.Admit)
    assert admitted.seat is not None and 200 <= admitted.seat.slot_step < 200 + 5 * job.core.config.max_steps


def test_pushes_that_claim_steps_count_for_a_few_times_what_others_make() -> None:
    """It says a thousand times as many steps, and answers each pull with all of them."""

    def claims(job: Job) -> None:
        job.other.step += 1000
        job.desk.do(ev.Reported(job.other.connection, job.other.report()))
        for pull in job.other.asked.values():
            job.push(job.other, pull.fragment, pull.round)
        job.other.asked.clear()

    job = Job(1, claims)
    job.run(30.0)
    counted = job.core.slots[1].counted_step - TURNS_AHEAD * job.core.config.max_steps
    assert counted <= len(job.merges) / FRAGMENTS * job.core.config.max_steps + 1
    assert job.core.slots[1].step > 500_000


@pytest.mark.parametrize("said", [TOKENS * 1000, 1])
def test_a_learner_that_counts_other_tokens_moves_the_end_by_a_few_times_its_share(said: int) -> None:
    """One wrong ``tokens=`` in a loop: it says bytes, or batches."""
    job = Job(honest=2, broken=lambda job: trains(job), stop=("tokens", 3 * 4000 * TOKENS))
    job.other.tokens = said
    job.run(20.0)
    counted = job.core.stop_progress(job.desk.now) * 3 * 4000
    assert 2 * 390 <= counted <= (2 + MOST) * 420
    weights = {len(merge.responders): [r.weight for r in merge.responders] for merge in job.merges}[3]
    assert weights[2] <= MOST**2 / (2 + MOST**2) + 1e-6
    assert weights[0] == weights[1]


def trains(job: Job) -> None:
    """The last learner does as the others do."""
    job.other.step += 1
    for pull in job.other.asked.values():
        job.push(job.other, pull.fragment, pull.round)
    job.other.asked.clear()
    job.desk.do(ev.Reported(job.other.connection, job.other.report()))


def test_the_first_learner_to_report_does_not_end_the_job_alone() -> None:
    desk = Desk(config(slots=2, stop=("tokens", 10_000)))
    desk.begin(2)
    row = FragmentReport(1, 0, 1, 1_000_000)
    desk.do(ev.Reported(1, StepReport(1, 1, 1_000_000, (row,))))
    assert desk.core.phase is JobPhase.TRAINING
    desk.do(ev.Reported(2, StepReport(1, 1, 10, (FragmentReport(1, 0, 1, 10),))))
    assert desk.core.phase is JobPhase.TRAINING and desk.core._state.reached_amount(0.0) == 10 + MOST * 10
    alone = Desk(config(slots=1, stop=("tokens", 10_000)))
    alone.begin(1)
    alone.do(ev.Reported(1, StepReport(1, 1, 1_000_000, (row,))))
    assert alone.core.phase is not JobPhase.TRAINING


# ------------------------------------------------------------------ the data


@pytest.mark.promise(
    "A learner that marks more sequences as read than it has trained tokens is refused", section="Syncer"
)
def test_who_reads_more_sequences_than_it_trains_tokens_is_refused() -> None:
    """At the end of each lease it asks for the next one, as a loop does that reports what it has only loaded."""
    desk = Desk(config(slots=2))
    for slot in (0, 1):
        desk.join(slot + 1, slot, sequences=1_000_000)
    desk.do(ev.InitialModelStored("L", (8,)))
    book = desk.core._state.leases
    assert book is not None
    cursors: list[LeaseCursor] = []

    def lease() -> LeaseCursor:
        (granted,) = of(desk.do(ev.LeaseRequested(1)), ev.GrantLease)
        return LeaseCursor(granted.lease.lease, granted.lease.end)

    def say(step: int) -> None:
        report = StepReport(step, step, step * TOKENS, (FragmentReport(1, 0, step, step * TOKENS),))
        desk.do(ev.Reported(1, replace(report, cursors=tuple(cursors))))

    most = TOKENS + book.block_size
    cursors = [lease(), lease()]
    cursors[1] = LeaseCursor(cursors[1].lease, TOKENS)
    say(1)
    assert desk.core.slots[0].reported.sequences == most
    cursors[1] = LeaseCursor(cursors[1].lease, 2 * TOKENS + 1)
    with pytest.raises(ev.BadMessage, match=f"cursors: {most + TOKENS + 1} sequences read, and {2 * TOKENS} tokens"):
        say(2)
    assert desk.core.slots[0].reported.sequences == most
    again = Desk(desk.core.config, json.loads(json.dumps(desk.core.state(0.0))), epoch=2)
    assert again.core.slots[0].reported.sequences == most


@pytest.mark.promise(
    "Of the sequences that a learner marks as read, four times as many a step count as another learner reads, or its "
    "batch has",
    section="Syncer",
)
def test_sequences_beyond_what_others_read_are_not_marked() -> None:
    desk = Desk(config(slots=2))
    for slot in (0, 1):
        desk.join(slot + 1, slot, sequences=1_000_000_000)
    desk.do(ev.InitialModelStored("L", (8,)))
    book = desk.core._state.leases
    assert book is not None
    held = {1: [], 2: []}  # type: dict[int, list[LeaseCursor]]

    def read(connection: int, steps: int, sequences: int) -> int:
        """Report so many of both, in all; returns how many count."""
        while sum(cursor.position for cursor in held[connection]) < sequences:
            (granted,) = of(desk.do(ev.LeaseRequested(connection)), ev.GrantLease)
            there = sum(cursor.position for cursor in held[connection])
            held[connection].append(LeaseCursor(granted.lease.lease, min(granted.lease.end, sequences - there)))
        row = FragmentReport(1, 0, steps, steps * 1000)
        report = StepReport(steps, steps, steps * 1000, (row,), cursors=tuple(held[connection]))
        desk.do(ev.Reported(connection, report))
        return desk.core.slots[connection - 1].reported.sequences

    assert read(1, 1000, 20_000) == 20_000, "nobody else has read"
    assert read(2, 1000, 2000) == 2000
    most = 4 * 2 * 2000 + book.block_size
    assert book.block_size == MAX_BLOCK and read(1, 2000, 40_000) == most
    assert (
        sum(row.position for row in book.open.values() if row.slot == 0)
        + MAX_BLOCK * (len(held[1]) - sum(row.slot == 0 for row in book.open.values()))
        == most
    ), "the rest stays to be read"
    assert read(2, 2000, 4000) == 4000, "who reads little is none the worse"


# ------------------------------------------------------------------ norms


def test_the_gate_is_on_by_default() -> None:
    text = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: j}
spec:
  training: {model: null, data: null, stop: {steps: 10}, evaluation: null}
  learners: {command: [python, x.py]}
  regions: [{name: local, learners: 3}]
"""
    assert CoreConfig.from_job(parse_job(text)).norm_gate == GATE_FACTOR
    assert CoreConfig.from_job(parse_job(text, ["sync.normGate.factor=3"])).norm_gate == 3
    assert CoreConfig.from_job(parse_job(text, ["sync.deterministic=true"])).norm_gate is None


def test_pushes_that_are_usual_are_of_scale_however_small_the_parameters_are() -> None:
    desk = Desk(config(slots=1))
    desk.begin(1)
    checks = desk.core._aggregator.checks
    header = desk.header(0, 4)
    assert checks.check_content(header, 1.0, True, MOST_GROWTH) is None
    refused = checks.check_content(header, 1.0, True, MOST_GROWTH + 0.1)
    assert refused is not None and refused[0] is PushRefusal.OUT_OF_SCALE
    desk.core._state.norm_gate.add(0, [(1.0, 4)] * GATE_SAMPLES)
    assert checks.check_content(header, GATE_FACTOR, True, MOST_GROWTH + 0.1) is None
    assert checks.check_content(header, GATE_FACTOR + 0.1, True, MOST_GROWTH + 0.1) is not None


def test_steps_of_refused_pushes_do_not_carry_a_broken_learner_past_the_gate() -> None:
    """Its steps are kept for the next push, and the norm is measured by steps."""
    desk = Desk(config(slots=1, norm_gate=GATE_FACTOR, max_steps=32))
    desk.begin(1)
    checks, header, most = desk.core._aggregator.checks, desk.header(0, 4), TURNS_AHEAD * 32
    desk.core._state.norm_gate.add(0, [(1.0, 4)] * GATE_SAMPLES)
    norm = GATE_FACTOR * most / 4
    assert checks.check_content(replace(header, steps=most), norm, True) is None
    for steps in (most, 10 * most):
        refused = checks.check_content(replace(header, steps=steps), norm + 1.0, True)
        assert refused is not None and refused[0] is PushRefusal.NORM_GATE


def test_a_job_whose_learners_all_move_far_is_not_held_up() -> None:
    desk = Desk(config(slots=2))
    desk.begin(2)
    checks, gate = desk.core._aggregator.checks, desk.core._state.norm_gate

    def passes(slot: int) -> bool:
        return checks.check_content(desk.header(slot, 4), 1.0, True, MOST_GROWTH + 0.1) is None

    assert [passes(0), passes(0), passes(1), passes(0)] == [False, False, True, True]
    gate.add(0, [(1.0, 4)])
    assert not passes(1), "after a merge it is judged anew"


@pytest.mark.promise(
    "A job of one learner whose updates go on to be far larger than its parameters is not held up", section="Syncer"
)
def test_a_lone_learner_that_moves_far_again_and_again_is_the_job() -> None:
    def outcomes(desk: Desk) -> list[bool]:
        checks = desk.core._aggregator.checks
        header = desk.header(0, 4)
        return [checks.check_content(header, 1.0, True, MOST_GROWTH + 0.1) is None for _ in range(GATE_PATIENCE + 1)]

    desk = Desk(config(slots=1))
    desk.begin(1)
    assert outcomes(desk) == [False] * GATE_PATIENCE + [True]
    several = Desk(config(slots=2))
    several.begin(1)  # the other one is not there yet, or not any more
    assert not any(outcomes(several))
    desk = Desk(config(slots=1))
    desk.begin(1)
    slots = desk.core._state.members
    slots.add_retired_slots(2)
    slots.slots[1].merged_pushes = 1
    assert not any(outcomes(desk)), "the model has another one's work"


@pytest.mark.promise("A merge whose norm is far above those before it is an event, and counted", section="Syncer")
def test_a_merge_that_leaves_its_fragments_history_is_an_event() -> None:
    job = Job(honest=1)
    norms = iter([1.0] * GATE_SAMPLES + [GATE_FACTOR, GATE_FACTOR + 0.1])
    job.norm = lambda fragment: 1.0 if fragment else next(norms, 1.0)
    job.run(30.0)
    told = [note for note in of(job.desk.log, ev.RecordEvent) if note.kind is EventKind.LARGE_MERGE]
    assert [note.message for note in told] == ["version 7 of fragment 0 moves by 10.1, and 1 is usual"]
    assert job.core._state.norm_gate.large_merges == 1
