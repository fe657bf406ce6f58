"""The adoption rule against an oracle that knows nothing of its bookkeeping.

The oracle works on the parameters themselves. A parameter vector is modelled as
an element of the free module over step ids: making step s adds 1·s, a push
carries θ - base, a merge adds what was pushed, and moves follow the formulas of
algorithm.md section 3 literally. So "a step merged twice" is a coefficient of 2,
and "lost" is a coefficient that vanished; the columns of the ledger follow from
the coefficients and not from the counters under test.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from diloco_protocol.wire.records import Announcement, Payload, PushPlan
from diloco_worker.core.adoption import Adoption, AdoptionConfig, Decision, Kind, Rule
from example_counts import share_of

Theta = dict[int, Fraction]  # step id -> coefficient; negative ids are other learners' work


def plus(a: Theta, b: Theta, factor: Fraction = Fraction(1)) -> Theta:
    total = Counter({k: v for k, v in a.items()})
    for key, value in b.items():
        total[key] += value * factor
    return {key: Fraction(value) for key, value in total.items() if value}


def minus(a: Theta, b: Theta) -> Theta:
    return plus(a, b, Fraction(-1))


class Syncer:
    """One fragment, as algorithm.md section 4 has it: independent of diloco_syncer."""

    def __init__(self, max_versions: int) -> None:
        self.max_versions = max_versions
        self.epoch, self.version = 1, 0
        self.history: list[Theta] = [{}]
        self.round = 0
        self.opened: int | None = None
        self.pushes: dict[int, tuple[PushPlan, Theta]] = {}
        self.offers: dict[int, tuple[PushPlan, Theta]] = {}
        self.seen = 0
        self.merged = (0, 0)
        self.foreign = 0

    def announcement(self) -> Announcement:
        """Of the newest version."""
        full = Payload("float32", 4, hash(frozenset(self.history[self.version].items())))
        return Announcement(0, self.epoch, self.version, full, *self.merged)

    def receive(self, plan: PushPlan, content: Theta) -> str:
        if plan.sequence <= self.seen:
            return "repeated"
        if plan.base_version > self.version:
            return "future-base"
        if plan.base_version < self.merged[1]:
            return "already-merged"
        if self.version - plan.oldest_version > self.max_versions:
            return "too-old"
        if plan.round and plan.round != self.opened:
            return "other-round"
        self.seen = plan.sequence
        (self.pushes if plan.round else self.offers)[plan.sequence] = (plan, content)
        return ""

    def merge(self, others_push: bool) -> None:
        waiting = {**self.pushes, **self.offers}
        alive = {s: p for s, p in waiting.items() if self.version - p[0].oldest_version <= self.max_versions}
        if not alive and not others_push:
            return
        theta = self.history[self.version]
        self.version += 1
        if alive:
            newest = max(alive)  # a superset of the older ones
            theta = plus(theta, alive[newest][1])
            self.merged = (newest, self.version)
        if others_push:
            self.foreign -= 1
            theta = plus(theta, {self.foreign: Fraction(1)})
        self.history.append(theta)
        self.pushes, self.offers, self.opened = {}, {}, None

    def restart(self) -> None:
        """Accepted pushes of an open round are lost; offers were durable."""
        self.epoch += 1
        self.pushes, self.opened = {}, None


class World(RuleBasedStateMachine):
    """One learner, one fragment, and a network that delays, loses, repeats and reorders."""

    mode = Rule.KEEP

    @initialize(max_versions=st.integers(1, 4))
    def begin(self, max_versions: int) -> None:
        self.config = AdoptionConfig(1, 4, 1, self.mode, alpha=0.5, max_versions=max_versions, max_steps=10**9)
        self.syncer = Syncer(max_versions)
        self.adoption = Adoption(self.config)
        self.adoption.begin_tenure(slot_step=7)
        self.theta: Theta = {}
        self.base: Theta = {}
        self.snapshots: dict[int, Theta] = {}
        self.tokens: dict[int, int] = {}
        self.ever_confirmed: set[int] = set()
        self.uploads: list[tuple[PushPlan, Theta]] = []
        self.pulls: list[tuple[int, int]] = []
        self.news: list[tuple[Announcement, Theta]] = []
        self.verdicts: list[tuple[int, str]] = []
        self.deliver_news(self.syncer.announcement(), {})

    # ---------------------------------------------------------------- the learner

    @rule(tokens=st.integers(1, 50), seconds=st.integers(0, 3))
    def step(self, tokens: int, seconds: int) -> None:
        self.adoption.on_step(tokens, float(seconds))
        step = self.adoption.now.step
        self.tokens[step] = tokens
        self.theta = plus(self.theta, {step: Fraction(1)})

    def snapshot(self, round_id: int, version: int) -> None:
        planned = self.adoption.snapshot(0, round_id)
        content = minus(self.theta, self.base)
        if planned is None:
            assert self.mode is Rule.MIX or not content
            return
        plan, given_up = planned
        for sequence in given_up:
            del self.snapshots[sequence]
        self.snapshots[plan.sequence] = self.theta
        own = {s for s in content if s > 0}
        if self.mode is not Rule.MIX:
            assert set(content) == own, "others' drift must not leak into a push"
            assert (plan.steps, plan.tokens) == (len(own), sum(self.tokens[s] for s in own))
            assert (plan.first_step, plan.last_step) == (min(own), max(own))
        assert plan.oldest_version <= plan.base_version
        self.uploads.append((plan, content))

    @precondition(lambda self: self.pulls)
    @rule(data=st.data(), keep=st.booleans())
    def pulled(self, data: st.DataObject, keep: bool) -> None:
        index = data.draw(st.integers(0, len(self.pulls) - 1))
        self.snapshot(*self.pulls[index])
        if not keep:
            self.pulls.pop(index)

    @rule()
    def offer(self) -> None:
        self.snapshot(0, 0)

    # ---------------------------------------------------------------- the network

    @precondition(lambda self: self.uploads)
    @rule(data=st.data(), fate=st.sampled_from(["deliver", "deliver", "deliver-and-repeat", "lose"]))
    def upload(self, data: st.DataObject, fate: str) -> None:
        index = data.draw(st.integers(0, len(self.uploads) - 1))
        plan, content = self.uploads[index]
        if fate != "deliver-and-repeat":
            self.uploads.pop(index)
        if fate != "lose":
            self.verdicts.append((plan.sequence, self.syncer.receive(plan, content)))

    @precondition(lambda self: self.verdicts)
    @rule(data=st.data(), lose=st.booleans())
    def verdict(self, data: st.DataObject, lose: bool) -> None:
        sequence, reason = self.verdicts.pop(data.draw(st.integers(0, len(self.verdicts) - 1)))
        if lose:
            return
        refused = reason not in ("", "repeated")
        for gone in self.adoption.on_push_answer(0, sequence, refused):
            self.snapshots.pop(gone, None)

    @precondition(lambda self: self.news)
    @rule(data=st.data(), fate=st.sampled_from(["deliver", "deliver", "deliver-and-repeat", "lose"]))
    def broadcast(self, data: st.DataObject, fate: str) -> None:
        index = data.draw(st.integers(0, len(self.news) - 1))
        news, theta = self.news[index]
        if fate != "deliver-and-repeat":
            self.news.pop(index)
        if fate != "lose":
            self.deliver_news(news, theta)

    def deliver_news(self, news: Announcement, new: Theta) -> None:
        decision = self.adoption.on_broadcast(news)
        self.apply(decision, new)
        if decision.moves_parameters:
            self.ever_confirmed |= {step for step in new if step > 0}

    def apply(self, decision: Decision, new: Theta) -> None:
        assert decision.kind is not Kind.STOP, decision.message
        if not decision.moves_parameters:
            return
        if decision.kind is Kind.OVERWRITE:
            self.theta = new
        elif decision.kind is Kind.KEEP:
            self.theta = plus(new, minus(self.theta, self.snapshots[decision.reference]))
        elif decision.kind is Kind.REBASE:
            self.theta = plus(new, minus(self.theta, self.base))
        else:
            alpha = Fraction(1, 2)
            self.theta = plus({k: v * (1 - alpha) for k, v in new.items()}, self.theta, alpha)
        for sequence in decision.move:
            self.snapshots[sequence] = plus(self.snapshots[sequence], minus(new, self.base))
        for sequence in decision.forget:
            self.snapshots.pop(sequence, None)
        self.base = new

    # ---------------------------------------------------------------- the syncer

    def announce(self) -> None:
        self.news.append((self.syncer.announcement(), self.syncer.history[self.syncer.version]))

    @precondition(lambda self: self.syncer.opened is None)
    @rule(reaches=st.booleans())
    def open_round(self, reaches: bool) -> None:
        self.syncer.round += 1
        self.syncer.opened = self.syncer.round
        if reaches:
            self.pulls.append((self.syncer.round, self.syncer.version))

    @precondition(lambda self: self.syncer.opened is not None)
    @rule(others_push=st.booleans())
    def close_round(self, others_push: bool) -> None:
        before = self.syncer.version
        self.syncer.merge(others_push)
        if self.syncer.version > before:
            self.announce()

    @rule()
    def restart(self) -> None:
        self.syncer.restart()
        self.announce()

    @rule()
    def reconnect(self) -> None:
        self.uploads.clear()
        self.verdicts.clear()
        self.pulls.clear()
        self.announce()

    # ---------------------------------------------------------------- what always holds

    @invariant()
    def no_step_is_merged_twice(self) -> None:
        if self.mode is Rule.MIX:
            return
        for theta in self.syncer.history:
            assert all(coefficient == 1 for coefficient in theta.values())

    @invariant()
    def columns_are_exact(self) -> None:
        row = self.adoption.report().fragments[0]
        trained = sum(self.tokens.values())
        dropped = row.dropped_overlap + row.dropped_stale
        assert row.confirmed_tokens + row.tokens + dropped == trained == self.adoption.now.tokens
        kept = {s for s, snapshot in self.adoption.fragments[0].snapshots.items() if snapshot.values}
        assert set(self.snapshots) == kept
        state = self.adoption.fragments[0]
        for open_push in state.snapshots.values():
            assert open_push.plan.first_step == state.marks[0].point.step + 1, "it carries all that is pending"
        if self.mode is Rule.MIX:
            return
        own = minus(self.theta, self.base)
        assert all(coefficient == 1 and step > 0 for step, coefficient in own.items())
        assert (row.steps, row.tokens) == (len(own), sum(self.tokens[s] for s in own))
        assert row.confirmed_tokens == sum(self.tokens[s] for s in self.ever_confirmed)

    def teardown(self) -> None:
        """Everything is delivered at last, and the learner drains: nothing is left anywhere."""
        if not hasattr(self, "adoption"):
            return
        self.uploads.clear()
        for _ in range(3):
            self.announce()
            self.deliver_news(*self.news[-1])
            self.snapshot(0, 0)
            while self.uploads:
                assert self.syncer.receive(*self.uploads.pop(0)) == ""
            self.syncer.opened = 0
            self.syncer.merge(others_push=True)
        self.announce()
        self.deliver_news(*self.news[-1])
        row = self.adoption.report().fragments[0]
        assert row.tokens == 0
        if self.mode is not Rule.MIX:
            ours = {s for s in self.syncer.history[-1] if s > 0}
            assert row.confirmed_tokens == sum(self.tokens[s] for s in ours)


class Overwriting(World):
    mode = Rule.OVERWRITE


class Mixing(World):
    mode = Rule.MIX


_MACHINES = (World, Overwriting, Mixing)
_SETTINGS = settings(stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("machine", _MACHINES, ids=lambda machine: machine.__name__)
def test_any_order_of_steps_pushes_merges_and_broadcasts(machine: type[World]) -> None:
    run_state_machine_as_test(machine, settings=settings(_SETTINGS, max_examples=share_of(60)))


@pytest.mark.slow
@pytest.mark.parametrize("machine", _MACHINES, ids=lambda machine: machine.__name__)
def test_many_orders_of_steps_pushes_merges_and_broadcasts(machine: type[World]) -> None:
    run_state_machine_as_test(machine, settings=settings(_SETTINGS, max_examples=400))


# -------------------------------------------------------------------- by hand


def learner(rule: Rule = Rule.KEEP, fragments: int = 1, **more: object) -> Adoption:
    config = AdoptionConfig(fragments, 4, 1, rule, **more)  # type: ignore[arg-type]
    adoption = Adoption(config)
    adoption.begin_tenure(0)
    for p in range(fragments):
        assert adoption.on_broadcast(news(0, p)).kind is Kind.OVERWRITE
    return adoption


def news(
    version: int, fragment: int = 0, epoch: int = 1, merged: tuple[int, int] = (0, 0), **more: object
) -> Announcement:
    full = Payload("float32", 4, 1000 * epoch + version)
    return Announcement(fragment, epoch, version, full, *merged, **more)  # type: ignore[arg-type]


def test_overlapped_steps_are_kept_or_dropped_by_rule() -> None:
    for rule_, kind, kept in (
        (Rule.KEEP, Kind.KEEP, 30),
        (Rule.MIX, Kind.MIX, 30),
        (Rule.OVERWRITE, Kind.OVERWRITE, 0),
    ):
        adoption = learner(rule_)
        adoption.on_step(10, 1.0)
        planned = adoption.snapshot(0, 5)
        assert planned is not None
        assert (planned[0].sequence, planned[0].tokens, planned[0].compute_seconds) == (1, 10, 1.0)
        adoption.on_step(30, 1.0)
        decision = adoption.on_broadcast(news(1, merged=(1, 1)))
        assert (decision.kind, decision.merged, decision.forget) == (kind, 1, (1,))
        row = adoption.report().fragments[0]
        assert (row.tokens, row.confirmed_tokens, row.dropped_overlap) == (kept, 10, 30 - kept)


def test_a_broadcast_without_the_own_push_rebases_and_drops_nothing() -> None:
    adoption = learner()
    adoption.on_step(10, 1.0)
    assert adoption.snapshot(0, 5)
    adoption.on_step(10, 1.0)
    decision = adoption.on_broadcast(news(1))
    assert (decision.kind, decision.forget, decision.move) == (Kind.REBASE, (), (1,))
    planned = adoption.snapshot(0, 6)
    assert planned is not None
    assert (planned[0].tokens, planned[0].base_version, planned[0].oldest_version) == (20, 1, 0)


def test_an_offer_survives_a_merge_that_left_it_out() -> None:
    adoption = learner()
    adoption.on_step(10, 1.0)
    assert adoption.snapshot(0, 0)
    decision = adoption.on_broadcast(news(1))
    assert (decision.kind, decision.forget, decision.move) == (Kind.REBASE, (), (1,))
    adoption.on_step(5, 1.0)
    decision = adoption.on_broadcast(news(2, merged=(1, 2)))
    assert (decision.kind, decision.reference, decision.merged) == (Kind.KEEP, 1, 1)
    assert adoption.report().fragments[0].tokens == 5


def test_the_own_push_may_be_merged_in_a_version_that_was_missed() -> None:
    adoption = learner()
    adoption.on_step(10, 1.0)
    assert adoption.snapshot(0, 5)
    adoption.on_step(7, 1.0)
    decision = adoption.on_broadcast(news(3, merged=(1, 1)))
    assert (decision.kind, decision.reference) == (Kind.KEEP, 1)
    assert adoption.report().fragments[0].confirmed_tokens == 10
    assert adoption.on_broadcast(news(4, merged=(1, 1))).kind is Kind.REBASE, "it is below the base now"
    assert adoption.report().fragments[0].confirmed_tokens == 10


@pytest.mark.promise(
    "An offer that outlived its base in the store is recognised as merged, whatever the version, and its "
    "steps count once"
)
def test_an_offer_is_confirmed_also_in_a_version_that_is_not_above_its_base() -> None:
    """A store that lost versions, and with them the offer's base, still had the offer: steps that the merge has in it
    would count twice."""
    adoption = learner()
    adoption.on_step(10, 1.0)
    assert adoption.snapshot(0, 5)
    assert adoption.on_broadcast(news(4, merged=(1, 4))).kind is Kind.KEEP
    adoption.on_step(20, 1.0)
    assert adoption.snapshot(0, 0), "the offer"
    adoption.on_step(30, 1.0)
    assert adoption.snapshot(0, 0), "and another, of the same steps and one more"
    decision = adoption.on_broadcast(news(2, epoch=2, merged=(2, 2)))
    assert (decision.kind, decision.reference, decision.merged) == (Kind.KEEP, 2, 2)
    assert (decision.forget, decision.move) == ((2, 3), ())
    row = adoption.report().fragments[0]
    assert (row.tokens, row.confirmed_tokens) == (30, 30)
    assert adoption.on_broadcast(news(3, epoch=2, merged=(2, 3))).kind is Kind.STOP
    assert adoption.on_broadcast(news(3, epoch=2, merged=(2, 2))).kind is Kind.REBASE


def test_work_beyond_max_versions_is_dropped_as_stale() -> None:
    adoption = learner(max_versions=2)
    adoption.on_step(10, 1.0)
    assert adoption.on_broadcast(news(2)).kind is Kind.REBASE
    assert adoption.on_broadcast(news(3)).kind is Kind.OVERWRITE
    row = adoption.report().fragments[0]
    assert (row.tokens, row.dropped_stale) == (0, 10)


def test_epochs() -> None:
    adoption = learner()
    adoption.on_step(10, 1.0)
    assert adoption.on_broadcast(news(2)).kind is Kind.REBASE
    assert adoption.on_broadcast(news(1)).kind is Kind.IGNORE
    assert adoption.on_broadcast(news(2)).kind is Kind.IGNORE
    same = Announcement(0, 2, 2, Payload("float32", 4, 1002))
    assert adoption.on_broadcast(same).kind is Kind.RELABEL
    assert adoption.on_broadcast(news(9, epoch=1)).kind is Kind.IGNORE
    assert adoption.on_broadcast(Announcement(0, 2, 2, Payload("float32", 4, 7))).kind is Kind.STOP
    lost_history = adoption.on_broadcast(news(1, epoch=3))
    assert lost_history.kind is Kind.REBASE
    planned = adoption.snapshot(0, 1)
    assert planned is not None
    assert (planned[0].base_version, planned[0].oldest_version, planned[0].epoch) == (1, 0, 3)


def test_a_merge_of_an_unknown_push_stops_the_learner() -> None:
    adoption = learner()
    adoption.on_step(10, 1.0)
    decision = adoption.on_broadcast(news(1, merged=(3, 1)))
    assert decision.kind is Kind.STOP
    assert "push 3" in decision.message


def confirmed_once() -> Adoption:
    """A learner whose push 1 of 10 tokens was merged in version 1, and that has trained 5 tokens since."""
    adoption = learner()
    adoption.on_step(10, 1.0)
    assert adoption.snapshot(0, round=1) is not None
    adoption.on_step(5, 1.0)
    assert adoption.on_broadcast(news(1, merged=(1, 1))).merged == 1
    return adoption


def test_a_push_confirmed_before_the_base_went_back_stops_nobody() -> None:
    # A store that was emptied gives out version 0, until another learner has brought version 1 back.
    adoption = confirmed_once()
    assert adoption.on_broadcast(news(0, epoch=2)).kind is Kind.REBASE
    decision = adoption.on_broadcast(news(1, epoch=3, merged=(1, 1)))
    assert decision.kind is Kind.REBASE and decision.merged == 0
    counts = adoption.report().fragments[0]
    assert (counts.confirmed_tokens, counts.tokens) == (10, 5), "nothing is counted twice, nothing is dropped"


def test_a_push_that_is_merged_twice_stops_the_learner() -> None:
    decision = confirmed_once().on_broadcast(news(2, merged=(1, 2)))
    assert decision.kind is Kind.STOP and "push 1" in decision.message


def test_it_pauses_alone_and_goes_on_with_a_broadcast() -> None:
    adoption = learner(max_steps=3)
    for _ in range(3):
        assert not adoption.paused
        adoption.on_step(1, 0.0)
    assert adoption.paused
    adoption.on_broadcast(news(1))
    assert not adoption.paused
    assert adoption.report().fragments[0].tokens == 3, "pausing drops nothing"


def test_it_is_not_alone_while_any_fragment_is_merged() -> None:
    adoption = learner(fragments=2, max_steps=3)
    for version in range(1, 6):
        adoption.on_step(1, 0.0)
        adoption.on_step(1, 0.0)
        assert not adoption.paused
        adoption.on_broadcast(news(version, 1))
    assert not adoption.paused


def test_a_new_tenure_counts_anew_and_sequences_go_on() -> None:
    adoption = learner()
    adoption.on_step(10, 1.0)
    assert adoption.snapshot(0, 1)
    adoption.begin_tenure(50)
    assert not adoption.complete
    adoption.on_broadcast(news(4))
    adoption.on_step(3, 1.0)
    planned = adoption.snapshot(0, 2)
    assert planned is not None
    assert (planned[0].sequence, planned[0].first_step, planned[0].tokens) == (2, 51, 3)
    assert (adoption.trained_steps, adoption.now.tokens) == (1, 3)


def test_steps_need_bases_and_pushes_need_steps() -> None:
    adoption = Adoption(AdoptionConfig(2, 4, 1))
    with pytest.raises(ValueError, match="base"):
        adoption.on_step(1, 0.0)
    assert learner().snapshot(0, 1) is None


def test_steps_without_tokens_wait_for_one_that_has_some() -> None:
    """The syncer would refuse a push without tokens."""
    adoption = learner()
    adoption.on_step(0, 1.0)
    assert adoption.pending_steps(0) == 1 and adoption.snapshot(0, 1) is None
    assert adoption.drain_order() == []
    adoption.on_step(3, 1.0)
    planned = adoption.snapshot(0, 1)
    assert planned is not None and (planned[0].steps, planned[0].tokens) == (2, 3)
    assert adoption.drain_order() == [0]


def test_drain_offers_the_longest_unmerged_first() -> None:
    adoption = learner(fragments=3)
    for step in range(6):
        adoption.on_step(1, 0.0)
        if step in (1, 3):
            planned = adoption.snapshot(step // 2, 9)
            assert planned is not None
            adoption.on_broadcast(news(1, step // 2, merged=(1, 1)))
    assert [adoption.pending_steps(p) for p in range(3)] == [4, 2, 6]
    assert adoption.drain_order() == [2, 0, 1]
