"""What the figures of a comparison mean, on records small enough to reckon by hand."""

from __future__ import annotations

import math

import pytest

from lab.compare import measures
from lab.compare.measures import Hit, Recovery, StepEnd


def steps(learner: int, *times: float) -> list[StepEnd]:
    return [StepEnd(learner, time) for time in times]


def test_goodput_is_kept_compute_of_all_learners_time() -> None:
    # 30 steps of 100 tokens at 0.5 s are 15 s; two learners had 10 s each.
    assert measures.goodput(3000, 100, 0.5, 2, wall=10.0) == pytest.approx(0.75)


def test_uptime_is_where_somebody_ends_a_step_within_two() -> None:
    regular = steps(0, *range(1, 11))
    assert measures.uptime(regular, 0.0, 10.0, 1.0) == 1.0
    # Nobody from 4 to 8: a step that ends at 8 reaches back to 6.
    assert measures.uptime(steps(0, 1, 2, 3, 4, 8, 9, 10), 0.0, 10.0, 1.0) == pytest.approx(0.8)
    # Another learner fills the gap.
    assert measures.uptime([*steps(0, 1, 2, 3, 4, 8, 9, 10), *steps(1, 5, 6, 7)], 0.0, 10.0, 1.0) == 1.0
    assert measures.uptime([], 0.0, 10.0, 1.0) == 0.0


def test_recovery_of_a_fault_that_others_do_not_notice() -> None:
    records = [*steps(0, 1, 2, 3, 12, 13), *steps(1, *range(1, 14))]
    (row,) = measures.recoveries([Hit("kill", 0, 3.5, 5.0)], records, 0.0, 14.0, step_seconds=1.0)
    assert row == Recovery("kill", 3.5, 5.0, 0.0, back_seconds=3.5)


def test_recovery_of_a_fault_that_stops_all() -> None:
    records = [*steps(0, 1, 2, 3, 10), *steps(1, 1, 2, 3, 10)]
    (row,) = measures.recoveries([Hit("kill", 0, 3.0, 5.0)], records, 0.0, 12.0, step_seconds=1.0)
    assert row.stall_seconds == 6.0 and row.back_seconds == 2.0
    # That the other one still ends the step that was under way changes nothing.
    (row,) = measures.recoveries([Hit("kill", 0, 3.0, 5.0)], [*records, *steps(1, 3.1)], 0.0, 12.0, step_seconds=1.0)
    assert row.stall_seconds == pytest.approx(5.9)


def test_a_fault_that_is_not_over_at_the_end() -> None:
    records = [*steps(0, 1, 2), *steps(1, 1, 2, 3, 4, 5)]
    rows = measures.recoveries(
        [Hit("kill", 0, 2.5, 5.0), Hit("kill", 1, 99.0, 1.0), Hit("kill", None, 1.0, 1.0)],
        records,
        0.0,
        5.0,
        step_seconds=1.0,
    )
    assert [row.back_seconds for row in rows] == [None], "after the end, and on no learner, are none"


def test_loss_at_equal_tokens() -> None:
    curve = [(0.0, 5.0), (100.0, 3.0), (200.0, 2.0)]
    assert measures.loss_at(curve, 150.0) == pytest.approx(2.5)
    assert measures.loss_at(curve, 100.0) == 3.0
    assert measures.loss_at(curve, 200.0) == 2.0
    assert measures.loss_at(curve, 201.0) is None and measures.loss_at([], 1.0) is None


def test_the_worst_of_few_and_of_many() -> None:
    assert measures.worst([], "maximum") is None and measures.middle([]) is None
    assert (measures.worst_word(19), measures.worst_word(20)) == ("maximum", "p95")
    assert measures.worst([1.0, 9.0, 2.0], "maximum") == 9.0
    assert measures.worst([float(n) for n in range(1, 101)], "p95") == 95.0
    assert math.isclose(measures.middle([1.0, 2.0, 9.0]) or 0.0, 2.0)
