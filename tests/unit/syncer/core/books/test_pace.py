"""A learner's pace, by the steps of its pushes and when they came."""

from __future__ import annotations

from diloco_syncer.core.books.pace import SAMPLES, Pace


def test_the_pace_is_the_median_of_steps_over_the_time_between_pushes() -> None:
    pace = Pace()
    pace.begin(1, 60.0)
    pace.begin(40, 60.1)  # only the first report counts
    assert pace.step_seconds is None
    pace.record_push(3, 61.0)
    assert pace.step_seconds == 0.5
    pace.record_push(3, 61.1)  # another fragment's, of the same steps
    pace.record_push(2, 61.2)
    pace.record_push(5, 62.2)
    assert pace.step_seconds == 0.5, "the lower of 0.5 and 0.6"
    pace.record_push(6, 1062.2)  # a pause
    assert round(pace.step_seconds, 3) == 0.6
    for i in range(1, SAMPLES + 1):
        pace.record_push(6 + i, 1062.2 + 2 * i)
    assert round(pace.step_seconds, 3) == 2.0, "what is long ago is forgotten"


def test_steps_without_time_between_them_are_no_pace() -> None:
    pace = Pace()
    pace.record_push(4, 1.0)
    pace.record_push(8, 1.0)
    assert pace.step_seconds is None
