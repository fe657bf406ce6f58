"""syncer_simulation/core_world.py under every kind of mishap: no step is merged twice, and none is lost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import world_seeds
import worlds
from diloco_syncer.core.books import shares
from diloco_syncer.core.books.norm_gate import NormGate
from diloco_syncer.core.books.rounds import Round, RoundBook
from diloco_syncer.core.books.slots import Slot
from diloco_syncer.core.merging.aggregation import Aggregator
from diloco_syncer.numerics import merge
from diloco_worker.core.adoption import Rule
from example_counts import share_of
from syncer_simulation.broken_world import BrokenSetup, BrokenWorld, settle_broken
from syncer_simulation.core_world import World, check_liveness, settle
from syncer_simulation.learners import Learner, Setup
from syncer_simulation.settings import CORE, CROSSINGS, HARSH, LOSSY, SCALED, WIPED, settle_rebuilt


@settings(max_examples=share_of(30), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    slots=st.integers(1, 4),
    fragments=st.integers(1, 4),
    every=st.integers(4, 8),
    overlap=st.integers(0, 3),
    rule=st.sampled_from(list(Rule)),
    data=st.data(),
)
def test_no_step_is_merged_twice_or_lost(
    seed: int, slots: int, fragments: int, every: int, overlap: int, rule: Rule, data: st.DataObject
) -> None:
    """Under any order of late, lost, repeated and refused messages, kills, freezes and crashes."""
    quorum = data.draw(st.integers(1, slots))
    world = World(Setup(seed, slots, fragments, every, overlap=overlap, quorum=quorum, rule=rule))
    world.run()
    settle(world)


@settings(max_examples=share_of(30), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    slots=st.integers(1, 4),
    fragments=st.integers(1, 4),
    every=st.integers(4, 8),
    rule=st.sampled_from(list(Rule)),
    refusals=st.sampled_from([0.1, 0.7]),
    data=st.data(),
)
def test_a_store_that_loses_its_newest_content_keeps_the_books_exact(
    seed: int, slots: int, fragments: int, every: int, rule: Rule, refusals: float, data: st.DataObject
) -> None:
    """As above, and what is lost is taken from learners or given up: nothing counts twice."""
    quorum = data.draw(st.integers(1, slots))
    setup = Setup(seed, slots, fragments, every, overlap=2, quorum=quorum, rule=rule, losses=0.7)
    world = World(replace(setup, crashes=6.0, refusals=refusals))
    world.run()
    settle(world)


@settings(max_examples=share_of(30), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    slots=st.integers(1, 4),
    fragments=st.integers(1, 4),
    quorum=st.integers(1, 2),
    rule=st.sampled_from(list(Rule)),
    losses=st.sampled_from([0.0, 0.5]),
)
def test_scaling_a_running_job_keeps_the_books_exact(
    seed: int, slots: int, fragments: int, quorum: int, rule: Rule, losses: float
) -> None:
    """Other learners at the syncer's restarts, in two regions: who stays keeps his slot."""
    setup = Setup(seed, slots, fragments, quorum=min(quorum, slots), rule=rule, steps=80, losses=losses)
    world = World(replace(setup, crashes=5.0, scales=0.7))
    world.run()
    settle(world)
    current = [slot for slot in world.core.slots if not slot.retired]
    assert len(current) == len(world.config.places)


@pytest.mark.slow
def test_the_simulation_scales() -> None:
    seen: Counter[str] = Counter()
    retired = 0
    for seed in range(10):
        world = World(replace(SCALED, seed=seed))
        world.run()
        settle(world)
        seen += world.seen
        retired += sum(slot.retired for slot in world.core.slots)
    assert min(seen[what] for what in ("scalings", "removed by draining", "removed by force")) > 2, seen
    assert retired > 5


@settings(max_examples=share_of(12), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    slots=st.integers(1, 3),
    visitors=st.integers(1, 3),
    fragments=st.integers(1, 3),
    rule=st.sampled_from(list(Rule)),
    scales=st.sampled_from([0.0, 0.7]),
    data=st.data(),
)
def test_learners_that_come_and_go_beyond_the_places_keep_the_books_exact(
    seed: int, slots: int, visitors: int, fragments: int, rule: Rule, scales: float, data: st.DataObject
) -> None:
    """They train at once, and leave by a drain, a kill or a cut; the slots follow, over the syncer's restarts and
    scalings too."""
    quorum = data.draw(st.integers(1, slots))
    setup = Setup(seed, slots, fragments, quorum=quorum, rule=rule, visitors=visitors, steps=60)
    world = World(replace(setup, crashes=5.0, scales=scales))
    world.run()
    settle(world)


def test_shards_crash_and_merge_side_by_side() -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):
        seen += CORE["SHARDS"].run(seed, {}).seen
    kinds = ("shards lost", "merges side by side", "merges lost", "merges that were durable")
    assert all(seen[kind] for kind in (*kinds, "offers lost before their answer", "crashes")), seen


@pytest.mark.promise(
    "Each sequence of the data is leased to one learner at a time; whoever dies, it is trained or leased again, and "
    "without losses it is trained once",
    section="Syncer",
)
@pytest.mark.parametrize("chaos", [0.0, 1.0])
def test_each_sequence_has_one_holder_and_none_is_left_out(chaos: float) -> None:
    seen: Counter[str] = Counter()
    for seed in range(4):
        seen += CORE["LEASES"].run(seed, {"chaos": chaos, "told_crashes": 0.1 * chaos}).seen
    assert seen["leases"] > 50 and (not chaos or (seen["leases taken over"] and seen["kills"] and seen["crashes"])), (
        seen
    )


def test_visitors_train_and_are_merged() -> None:
    seen: Counter[str] = Counter()
    merged = 0
    for seed in range(3):
        world = World(Setup(seed, slots=1, visitors=2, steps=80))
        world.run()
        settle(world)
        seen += world.seen
        ids = world.records[0, world.core.versions[0]].ids
        visitors = {one.process for one in world.everyone if one.place[1] >= 100}
        merged += sum(process.partition("/")[0] in visitors for process, _ in ids)
    assert seen["visits"] > 10 and merged > 100, (seen, merged)


@settings(max_examples=share_of(30), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    slots=st.integers(1, 4),
    fragments=st.integers(1, 4),
    every=st.integers(4, 8),
    rule=st.sampled_from(list(Rule)),
    refusals=st.sampled_from([0.1, 0.7]),
)
def test_an_emptied_store_is_rebuilt_and_keeps_the_books_exact(
    seed: int, slots: int, fragments: int, every: int, rule: Rule, refusals: float
) -> None:
    """All that is durable is gone, again and again: learners bring back what they hold, and nothing counts twice."""
    setup = Setup(seed, slots, fragments, every, rule=rule, refusals=refusals, crashes=3.0, wipes=0.6)
    world = World(setup)
    world.run()
    settle_rebuilt(world)


@pytest.mark.slow
def test_the_simulation_empties_stores_and_rebuilds_them() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        world = World(replace(WIPED, seed=seed))
        world.run()
        settle_rebuilt(world)
        seen += world.seen
    assert seen["wipes"] > 5 and seen["rebuilds"] > 5 and seen["taken"] > 10, seen


FAILED_ONCE = [case for case, mended in world_seeds.read_found(worlds.FOUND.read_text()).items() if mended]


@pytest.mark.promise(
    "An offer that outlived its base in the store is recognised as merged, whatever the version, and its "
    "steps count once"
)
@pytest.mark.parametrize(
    "case", [case for case in FAILED_ONCE if case.simulation == "core"], ids=lambda case: case.seed
)
def test_worlds_that_failed_once(case: world_seeds.Case) -> None:
    worlds.run_world(case, None)


@pytest.mark.slow
def test_the_simulation_breaks_things() -> None:
    """The property above is worth something only if crashes, kills and refusals happen in it."""
    seen: dict[str, int] = {}
    for seed in range(12):
        world = World(Setup(seed, steps=80))
        world.run()
        settle(world)
        for name in ("crashes", "kills", "freezes", "breaks", "drains"):
            seen[name] = seen.get(name, 0) + world.seen.get(name, 0)
        for reason in world.refused:
            seen[reason] = seen.get(reason, 0) + world.refused[reason]
    assert {"crashes", "kills", "freezes", "breaks", "drains"} <= {k for k, v in seen.items() if v}
    assert {"fenced", "already-merged", "repeated"} <= seen.keys(), seen


@pytest.mark.slow
def test_the_simulation_loses_data_and_takes_it_back() -> None:
    seen: Counter[str] = Counter()
    for seed in range(20):
        world = World(replace(HARSH, seed=seed))
        world.run()
        settle(world)
        seen += world.seen
    assert seen["losses"] > 5 and seen["recoveries"] > 5 and seen["taken"] > 5, seen
    assert seen["given up"] > 2, seen


@pytest.mark.parametrize("slots", [1, 3])
def test_without_mishaps_everything_is_merged(slots: int) -> None:
    """A fast, quiet network: one version per H steps, nothing dropped, nothing pending."""
    world = World(replace(Setup(1), slots=slots, chaos=0.0, latency=0.02, steps=60, max_versions=1000))
    world.run()
    totals = settle(world)
    assert totals["dropped"] == 0
    assert totals["pending"] == 0
    # Snapshot to snapshot is H steps, plus the step at whose end a pull is answered and its start.
    assert all(60 // 6 <= v <= 60 // 4 + 1 for v in world.core.versions), world.core.versions


def test_overwrite_drops_only_overlapped_steps() -> None:
    world = World(replace(Setup(2), chaos=0.0, rule=Rule.OVERWRITE, max_versions=1000))
    world.run()
    settle(world)
    assert world.core.ledger is not None
    reasons = set().union(*(row.reasons for row in world.core.ledger.rows()))
    assert reasons == {"overlap"}


# ------------------------------------------------------------------ liveness

ROUGH = replace(LOSSY, deaths=1.0, crashes=1.0)


def live(setup: Setup, share: float = 1.0, limit: float = 600.0) -> World:
    world = World(setup)
    world.run(limit)
    check_liveness(world, share)
    settle(world)
    return world


# With K = M every loss holds everybody up, and with deaths everybody waits for whoever comes back.
@pytest.mark.promise(
    "Under lost, late and repeated messages, fragments get one version for every two turns of H steps "
    "that K learners make, every training learner contributes, and every drain ends"
)
@pytest.mark.parametrize(
    ("setup", "share"),
    [
        (LOSSY, 1.0),
        (replace(LOSSY, quorum=2), 1.0),
        (replace(LOSSY, quorum=3), 0.6),
        (replace(LOSSY, quorum=2, rule=Rule.OVERWRITE), 1.0),
        (replace(ROUGH, quorum=2), 0.5),
    ],
    ids=["K1", "K2", "K3", "overwrite", "rough"],
)
def test_rounds_keep_their_pace_and_everybody_contributes(setup: Setup, share: float) -> None:
    for seed in range(3):
        live(replace(setup, seed=seed), share)


@pytest.mark.slow
@pytest.mark.parametrize(("quorum", "share"), [(1, 0.5), (2, 0.5), (3, 0.35)])
def test_many_worlds_are_live(quorum: int, share: float) -> None:
    for seed in range(200):
        live(replace(LOSSY, seed=seed, quorum=quorum), share)


@pytest.mark.promise(
    "Under lost, late and repeated messages, fragments get one version for every two turns of H steps "
    "that K learners make, every training learner contributes, and every drain ends"
)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pull", "push", "answer", "announce", "report"])
def test_the_simulation_notices_a_kind_of_message_that_never_arrives(kind: str) -> None:
    with pytest.raises(AssertionError):
        live(replace(LOSSY, quorum=2, swallowed=kind), limit=60.0)


@pytest.mark.promise(
    "Under lost, late and repeated messages, fragments get one version for every two turns of H steps "
    "that K learners make, every training learner contributes, and every drain ends"
)
@pytest.mark.slow
def test_the_simulation_notices_a_round_that_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was mended: a pull or a push that was lost held its round for ever."""

    def once(self: RoundBook, opened: Round, slot: int, connection: int, now: float) -> bool:
        return slot not in opened.asked

    monkeypatch.setattr(RoundBook, "is_pull_due", once)
    with pytest.raises(AssertionError, match="did not come to its end"):
        for seed in range(4):
            live(replace(LOSSY, seed=seed, quorum=3), 0.5, limit=60.0)


@pytest.mark.promise("Reports that cross a new Join change nothing, whatever happens around them")
def test_reports_of_a_tenure_that_is_over_change_nothing() -> None:
    late = 0
    for seed in range(5):
        world = World(replace(CROSSINGS, seed=seed))
        world.run()
        settle(world)
        late += world.seen["late reports"]
    assert late


@pytest.mark.promise("Reports that cross a new Join change nothing, whatever happens around them")
@pytest.mark.slow
def test_the_simulation_notices_reports_that_are_not_bound_to_a_tenure(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was mended: they spoiled the ledger of the next tenure."""
    report = Learner.report
    monkeypatch.setattr(Learner, "report", lambda self: replace(report(self), tenure=0))
    with pytest.raises((AssertionError, ValueError)):  # a column below 0 is no row of a ledger
        for seed in range(30):
            world = World(replace(CROSSINGS, seed=seed))
            world.run()
            settle(world)


# Virtual seconds, of a job that ends after ninety. One that does not end is noticed: thousands of seconds of it would
# take longer than a test may on a busy machine.
LONGEST_BROKEN = 300.0
BROKEN = BrokenSetup(7, 3, 2, 8, quorum=1, steps=600, chaos=0.0, latency=0.1, max_versions=1000, sequences=10**6)


@pytest.mark.promise(
    "One learner that lies or is broken moves the others' merges per second, their data, the loss and the job's end by "
    "at most its share",
    section="Syncer",
)
@pytest.mark.parametrize(
    ("fault", "stop"),
    [
        ("says it is slow", "steps"),
        ("claims steps", "tokens"),
        ("counts too many tokens", "tokens"),
        ("marks what it has not read", "steps"),
        ("sends 10^30 times its work", "steps"),
        ("sends 200 times its work", "tokens"),
    ],
)
def test_one_broken_learner_moves_the_job_by_at_most_its_share(fault: str, stop: str) -> None:
    world = BrokenWorld(replace(BROKEN, fault=fault, stop=stop))
    world.run(LONGEST_BROKEN)
    settle_broken(world)


def always(receive_push: Callable[..., bool]) -> Callable[..., bool]:
    """Every push counts as one that was taken."""
    return lambda *arguments: receive_push(*arguments) or True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "stop", "where", "name", "what"),
    [
        ("claims steps", "steps", RoundBook, "begin_silence", lambda *_: None),
        ("claims steps", "steps", Slot, "counted_step", property(lambda slot: slot.step)),
        ("claims steps", "tokens", Slot, "advance", lambda slot, step, *_: setattr(slot, "step", max(slot.step, step))),
        ("counts too many tokens", "tokens", shares, "bound_tokens", lambda works: [work.tokens for work in works]),
        ("marks what it has not read", "steps", shares, "most_beside", lambda others: math.inf),
        ("sends 10^30 times its work", "steps", merge, "growth", lambda *_: 0.0),
        ("sends 10^30 times its work", "steps", Aggregator, "receive_push", always(Aggregator.receive_push)),
        ("sends 200 times its work", "steps", NormGate, "objection", lambda *_: ""),
    ],
)
def test_the_simulation_notices_what_a_broken_learner_does(
    monkeypatch: pytest.MonkeyPatch, fault: str, stop: str, where: object, name: str, what: object
) -> None:
    monkeypatch.setattr(where, name, what)
    with pytest.raises(AssertionError):
        for seed in range(3):
            world = BrokenWorld(replace(BROKEN, seed=seed, fault=fault, stop=stop))
            world.run(LONGEST_BROKEN)
            settle_broken(world)
