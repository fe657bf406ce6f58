"""Random schedules: the same seed, the same faults; failures at the rate that was asked for; nothing breaks twice at
once; what is written is what `diloco run --chaos` reads."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.local.chaos.random_faults import SHARES, draw_kills, draw_schedule, text_of
from diloco.local.chaos.schedule import LASTING, Fault, check, parse
from example_counts import share_of


def at(fault: Fault) -> float:
    assert fault.after_seconds is not None
    return fault.after_seconds


@settings(max_examples=share_of(25), deadline=None)
@given(seed=st.integers(0, 2**32), learners=st.integers(1, 6), mtbf=st.floats(10, 500), repair=st.floats(0.5, 50))
def test_a_schedule_is_a_function_of_its_seed_and_can_be_replayed(
    seed: int, learners: int, mtbf: float, repair: float
) -> None:
    schedule = draw_schedule(seed, learners, mtbf, repair, seconds=300.0)
    assert draw_schedule(seed, learners, mtbf, repair, seconds=300.0) == schedule
    assert parse(text_of(schedule)) == schedule
    check(schedule, [f"local-{index}" for index in range(learners)])
    times = [at(fault) for fault in schedule]
    assert times == sorted(times) and all(0 <= time < 300 for time in times)
    for fault in schedule:
        assert fault.duration > 0 and (fault.action in LASTING or fault.action == "kill")
    for learner in range(learners):
        own = [fault for fault in schedule if fault.learner == learner]
        for before, after in pairwise(own):
            assert at(after) >= at(before) + before.duration - 0.2, "it is broken and breaks again"


def test_another_seed_is_another_schedule() -> None:
    assert draw_schedule(1, 4, 60, 10, seconds=300) != draw_schedule(2, 4, 60, 10, seconds=300)


@pytest.mark.parametrize(("mtbf", "repair"), [(50.0, 5.0), (20.0, 20.0)])
def test_failures_come_at_the_rate_that_was_asked_for(mtbf: float, repair: float) -> None:
    """A learner's faults are a renewal process: one in mtbf + repair seconds. Within five standard errors."""
    learners, seconds = 8, 8_000.0
    schedule = draw_schedule(3, learners, mtbf, repair, seconds=seconds)
    expected = learners * seconds / (mtbf + repair)
    assert abs(len(schedule) - expected) < 5 * math.sqrt(expected)
    mean = sum(fault.duration for fault in schedule) / len(schedule)
    assert abs(mean - repair) < 0.2 * repair
    kills = sum(fault.action == "kill" for fault in schedule) / len(schedule)
    assert abs(kills - SHARES["kill"]) < 5 * math.sqrt(0.25 / len(schedule))


def test_kills_for_a_cluster_have_no_repair() -> None:
    kills = draw_kills(7, 3, 60, 600)
    assert kills and all(fault.action == "kill" and not fault.duration for fault in kills)
    assert parse(text_of(kills)) == kills
