"""The job's time: what counts as elapsed and as up, and what a restart keeps."""

from __future__ import annotations

import pytest

from diloco_syncer.core.books.clock import RATE_WINDOW, JobClock


def after_a_crash(clock: JobClock, now: float, seconds: float, slots: int) -> JobClock:
    """The clock of the next syncer, which starts so much later, with a monotonic clock of its own."""
    again = JobClock(slots)
    again.load(clock.to_json(now, 1000.0), 0.0, 1000.0 + seconds)
    return again


def test_a_restart_during_a_hold_leaves_one_hold() -> None:
    clock = JobClock(2)
    clock.start(0.0)
    clock.begin_hold(10.0)
    again = after_a_crash(clock, 12.0, 3.0, 2)
    again.begin_hold(1.0)
    assert again.holds == [[10.0, None]] and again.holding
    again.end_hold(5.0)
    assert again.holds == [[10.0, 20.0]] and not again.holding
    again.begin_hold(5.0)
    assert again.holds == [[10.0, None]], "without a time in which it went on it is the same hold"


def test_a_time_that_is_known_is_not_assumed() -> None:
    clock = JobClock(2)
    clock.assume(30.0)
    assert (clock.elapsed(0.0), clock.slot_seconds(0.0), clock.uptime(0.0)) == (30.0, 60.0, 1.0)
    clock.assume(90.0)
    clock.start(5.0)
    clock.assume(90.0)
    assert (clock.elapsed(6.0), clock.slot_seconds(6.0)) == (31.0, 62.0)


def test_slot_seconds_count_a_crashed_syncers_downtime_with_the_slots_of_today() -> None:
    clock = JobClock(2)
    clock.start(0.0)
    again = after_a_crash(clock, 10.0, 5.0, 3)
    assert again.elapsed(0.0) == 15.0
    assert again.slot_seconds(0.0) == 2 * 10.0 + 3 * 5.0
    assert again.slot_seconds(4.0) == 2 * 10.0 + 3 * 5.0 + 3 * 4.0


def test_what_learners_computed_while_the_syncer_was_down_is_up_time() -> None:
    clock = JobClock(1)
    clock.start(0.0)
    clock.advance(10.0, 0.1, 10.0, 0)
    again = after_a_crash(clock, 10.0, 30.0, 1)
    again.advance(5.0, 0.1, 35.0, 0)
    assert again.uptime(5.0) == pytest.approx(1.0)


def test_the_time_after_the_end_does_not_count() -> None:
    clock = JobClock(1)
    clock.start(0.0)
    clock.end(7.0)  # all have left
    clock.end(30.0)  # and the evaluator has scored
    assert clock.elapsed(40.0) == 7.0
    again = after_a_crash(clock, 40.0, 500.0, 1)
    assert again.elapsed(3.0) == 7.0


def test_the_rate_is_the_same_whenever_it_is_asked_for_between_two_reports() -> None:
    clock = JobClock(1)
    clock.start(0.0)
    for seconds in (0.0, 4.0, 8.0, 12.0):
        clock.advance(seconds, 4.0, 4.0, round(100 * seconds))
    assert [clock.rate(now) for now in (12.0, 14.0, 16.0)] == [100.0] * 3
    assert clock.rate(20.0) < 75.0


def test_the_rate_falls_when_nobody_advances() -> None:
    clock = JobClock(1)
    clock.start(0.0)
    clock.advance(0.0, 0.1, 0.0, 0)
    clock.advance(2.0, 0.1, 2.0, 100)
    assert clock.rate(2.0) == 50.0
    assert clock.rate(6.0) == 25.0
    assert clock.rate(2.0 + RATE_WINDOW + 1.0) == 0.0


def test_the_time_of_slots_begins_with_the_first_steps_of_a_life_and_not_with_their_reports() -> None:
    clock = JobClock(2)
    clock.start(100.0)
    clock.advance(100.0, 6.0, 6.0, 0)  # the step that the first report tells of
    assert clock.elapsed(106.0) == 6.0 and clock.slot_seconds(106.0) == 2 * 12.0
    clock.advance(104.0, 9.0, 9.0, 0)  # another learner's, which began a second later
    clock.advance(106.0, 6.0, 6.0, 0)
    assert clock.slot_seconds(106.0) == 2 * 12.0
    clock.advance(106.0, 20.0, 20.0, 0)  # a third one's began before all of them
    assert clock.slot_seconds(106.0) == 2 * 20.0
    again = after_a_crash(clock, 106.0, 5.0, 2)
    again.advance(0.0, 6.0, 11.0, 0)  # of a time that is counted as the syncer's absence
    assert again.slot_seconds(0.0) == 2 * 25.0


@pytest.mark.promise("Goodput is at most 1, also of a job of a single long step", section="Syncer")
@pytest.mark.parametrize("steps", [1, 2, 13])
def test_goodput_is_at_most_1_however_long_the_first_step_is(steps: int) -> None:
    """A learner that always computes, and whose work is all merged: compiling makes its first step the longest."""
    clock, now, merged = JobClock(1), 0.0, 0.0
    for seconds in [300.0, *[6.0] * (steps - 1)]:
        now += seconds
        merged += seconds
        clock.start(now)
        clock.advance(now, 6.0, seconds, 0)
    assert merged / clock.slot_seconds(now) == pytest.approx(1.0)
