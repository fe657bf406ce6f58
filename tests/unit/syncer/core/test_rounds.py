"""The opening rule, quorum and grace, against hand-computed cases and a brute-force reading."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_protocol.wire.records import PushHeader, StepReport
from diloco_syncer.core.deterministic import DeterministicMode, Mode
from diloco_syncer.core.merging.rounds import Accepted, MovingAverage, Progress, RoundBook, RoundRules, grace_seconds

REPORT = StepReport(100, 100, 100, ())


def rules(**changes: object) -> RoundRules:
    values: dict[str, object] = {"every": 24, "overlap": 2, "quorum": 1, "grace_factor": 0.9, "grace_cap": 10.0}
    return RoundRules(**{**values, **changes})  # type: ignore[arg-type]


def push(slot: int, fragment: int = 0, round: int = 1, first: int = 1, last: int = 4, sequence: int = 1) -> Accepted:
    header = PushHeader(
        fragment,
        sequence,
        round,
        1,
        0,
        0,
        first,
        last,
        last - first + 1,
        10,
        1.0,
        "float32",
        "L",
        REPORT,
        slot,
        slot + 1,
    )
    return Accepted(header, handle=slot, norm=1.0)


def at(slot: int, step: int, versions: list[int]) -> Progress:
    return Progress(slot, step, tuple(versions))


def test_first_turn_is_staggered() -> None:
    """Fragment p opens first at (p+1)·H/P steps: one fragment per step at P = H."""
    book = RoundBook(24, rules(), Mode())
    book.begin_progress(0, 0)
    opened = []
    for step in range(1, 25):
        fragment = book.next_due([at(0, step, book.versions)])
        assert fragment is not None
        book.open_round(fragment, 0.0, [at(0, step, book.versions)])
        taken = book.open[fragment]
        book.accept(taken, push(0, fragment, taken.id, 1, step), 0.0)
        book.begin_merge(taken, 0.1)
        book.complete_merge(fragment, 1, 0.0)
        opened.append(fragment)
    assert opened == list(range(24))


def test_period_counts_from_the_snapshot_not_the_adoption() -> None:
    book = RoundBook(1, rules(every=10), Mode())
    book.begin_progress(0, 0)
    book.open_round(0, 0.0, [at(0, 10, [0])])
    opened = book.open[0]
    book.accept(opened, push(0, 0, opened.id, 1, 10), 0.0)
    book.begin_merge(opened, 0.1)
    book.complete_merge(0, 1, 0.0)  # adopted at step 12, say
    assert book.next_due([at(0, 19, [1])]) is None
    assert book.next_due([at(0, 20, [1])]) == 0


def test_a_report_counts_only_on_the_current_version() -> None:
    book = RoundBook(1, rules(every=4), Mode())
    book.begin_progress(0, 0)
    book.versions[0] = 3
    assert book.next_due([at(0, 50, [2])]) is None
    assert book.next_due([at(0, 50, [3])]) == 0


def test_a_slot_left_out_of_a_merge_does_not_open_the_next_round() -> None:
    """Its old steps are above its base still, but its progress counts from the opening."""
    book = RoundBook(1, rules(every=4, quorum=1), Mode())
    book.begin_progress(0, 0)
    book.begin_progress(1, 0)
    book.open_round(0, 0.0, [at(0, 4, [0]), at(1, 3, [0])])
    opened = book.open[0]
    book.accept(opened, push(0, 0, opened.id, 1, 4), 0.0)
    book.begin_merge(opened, 0.1)
    book.complete_merge(0, 1, 0.0)
    assert book.next_due([at(0, 5, [1]), at(1, 5, [1])]) is None
    assert book.next_due([at(0, 5, [1]), at(1, 7, [1])]) == 0


@pytest.mark.parametrize(("overlap", "fragments", "every", "limit"), [(2, 24, 24, 2), (0, 4, 8, 1), (5, 4, 10, 2)])
def test_open_rounds_are_bounded(overlap: int, fragments: int, every: int, limit: int) -> None:
    book = RoundBook(fragments, rules(overlap=overlap, every=every), Mode())
    assert book.open_limit == limit == max(1, math.ceil(overlap * fragments / every))


@given(
    steps=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    quorum=st.integers(1, 5),
    fragments=st.integers(1, 6),
    every=st.integers(6, 12),
)
def test_opening_rule_against_a_plain_reading(steps: list[int], quorum: int, fragments: int, every: int) -> None:
    """K learners with H steps (first turn: (p+1)·H/P), the K-th fastest H/P since the last opening,
    the longest due first, ties by index."""
    book = RoundBook(fragments, rules(every=every, quorum=quorum), Mode())
    learners = [at(i, step, book.versions) for i, step in enumerate(steps)]
    for i in range(len(steps)):
        book.begin_progress(i, 0)
    got = book.next_due(learners)
    expected = None
    if len(steps) >= quorum and sorted(steps)[-quorum] * fragments >= every:
        due = [
            (sorted(steps)[-quorum] - (p + 1) * every / fragments, -p)
            for p in range(fragments)
            if sum(step * fragments >= (p + 1) * every for step in steps) >= quorum
        ]
        expected = -max(due)[1] if due else None
    assert got == expected


def test_quorum_counts_slots_not_pushes() -> None:
    """A drained learner's offer and its successor's push are one slot."""
    book = RoundBook(1, rules(quorum=2), Mode())
    opened = book.open_round(0, 0.0, [at(0, 30, [0]), at(1, 30, [0])])
    book.accept(opened, push(0, last=4), 1.0)
    book.accept(opened, push(0, first=5, last=9, sequence=2), 1.0)
    assert len(opened.pushes) == 2 and opened.quorum_at is None
    book.accept(opened, push(1), 2.0)
    assert opened.quorum_at == 2.0


def test_a_newer_push_with_the_same_steps_takes_the_place() -> None:
    book = RoundBook(1, rules(), Mode())
    opened = book.open_round(0, 0.0, [at(0, 30, [0])])
    book.accept(opened, push(0, last=4), 1.0)
    replaced = book.accept(opened, push(0, last=6, sequence=2), 1.5)
    assert [p.header.last_step for p in replaced] == [4]
    assert [p.header.last_step for p in opened.pushes] == [6]


def test_grace_waits_for_the_rest_but_not_for_ever() -> None:
    book = RoundBook(1, rules(quorum=1, grace_cap=3.0), Mode())
    opened = book.open_round(0, 0.0, [at(0, 30, [0]), at(1, 30, [0])])
    assert not book.is_ready(opened, 100.0, {0, 1})
    book.accept(opened, push(0), 1.0)
    assert opened.deadline == 4.0 and book.wake_at() == 4.0
    assert not book.is_ready(opened, 3.9, {0, 1})
    assert book.is_ready(opened, 4.0, {0, 1})
    assert book.is_ready(opened, 1.0, {0}), "nobody is left to wait for"


def test_deterministic_waits_for_all_and_ignores_grace() -> None:
    book = RoundBook(1, rules(quorum=2), DeterministicMode(2))
    opened = book.open_round(0, 0.0, [])
    assert opened.id == 1
    book.accept(opened, push(1), 0.0)
    assert not book.is_ready(opened, 1e9, {1})
    book.accept(opened, push(0), 0.0)
    assert book.wake_at() is None
    assert book.is_ready(opened, 0.0, set())
    assert [p.header.slot for p in book.begin_merge(opened, None)] == [0, 1]


@given(
    factor=st.floats(0, 1),
    cap=st.floats(0, 100),
    overlap=st.integers(0, 10),
    step=st.floats(0, 10),
    quorum=st.floats(0, 10),
    sync=st.floats(0, 10),
)
def test_grace_is_equation_3(factor: float, cap: float, overlap: int, step: float, quorum: float, sync: float) -> None:
    got = grace_seconds(factor, cap, overlap, step, quorum, sync)
    assert got == max(0.0, min(cap, factor * (overlap * step - quorum - sync)))
    assert grace_seconds(factor, cap, overlap, None, quorum, sync) == cap


def test_moving_average_has_a_half_life_of_eight_samples() -> None:
    average = MovingAverage()
    average.add(1.0)
    for _ in range(8):
        average.add(0.0)
    assert average.value == pytest.approx(0.5)
