"""Stalled: whoever hangs is found in bounded time, and nobody who gives signs of life is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_worker.core.stall_rule import FACTOR, FIRST_STEP, LifeSigns, StallRule

LIMITS = st.floats(0.1, 5000)
INTERVAL = 1 / 20  # of the limit, as the watchdog's


@pytest.mark.promise(
    "A step, loader or collective that hangs is noticed: stack traces of all threads in the log, exit "
    "code 6, a replacement"
)
@given(LIMITS, st.floats(0, 0.2), st.booleans(), st.lists(st.floats(0.01, 1.0), max_size=30))
def test_a_hang_is_noticed_in_time(seconds: float, share: float, first: bool, gaps: list[float]) -> None:
    """At the first observation that is not before the limit, however they are spaced."""
    step = share * seconds
    rule = StallRule(seconds, INTERVAL * seconds)
    life = LifeSigns(True, 7, 0 if first else 9, 0.0 if first else step)
    limit = seconds * FIRST_STEP if first else max(seconds, FACTOR * step)
    now = hung_at = 1000.0
    rule.observe(now, life)
    for gap in [*gaps, *[1.0] * int(2 + limit / (INTERVAL * seconds))]:
        before = rule.stalled
        now += gap * INTERVAL * seconds
        rule.observe(now, life)
        assert rule.limit == pytest.approx(limit)
        assert rule.stalled is (now - hung_at >= limit) or now - hung_at == pytest.approx(limit)
        assert rule.suspect is (2 * (now - hung_at) >= limit) or 2 * (now - hung_at) == pytest.approx(limit)
        assert rule.stalled or not before, "it does not come back by itself"
    assert rule.stalled


@pytest.mark.promise(
    "A slow first step (compilation), a wait for the syncer, a slow job and a process that was stopped as "
    "a whole are not stalls"
)
@given(LIMITS, st.lists(st.tuples(st.sampled_from(["step", "sign", "away"]), st.floats(0, 0.9)), max_size=40))
def test_whoever_shows_signs_of_life_in_time_has_not_stalled(seconds: float, course: list[tuple[str, float]]) -> None:
    """Steps and signs that come within the limit, and any time at all in which nothing is to be trained."""
    interval = INTERVAL * seconds
    rule, now, signs, steps = StallRule(seconds, interval), 0.0, 0, 0
    for what, share in course:
        trains = what != "away"
        for _ in range(int((share if trains else 100 * share) / INTERVAL)):
            now += interval
            rule.observe(now, LifeSigns(trains, signs, steps, 0.0))
            assert not rule.stalled
        signs, steps = signs + 1, steps + (what == "step")


@pytest.mark.promise(
    "A slow first step (compilation), a wait for the syncer, a slow job and a process that was stopped as "
    "a whole are not stalls"
)
def test_a_process_that_was_stopped_as_a_whole_goes_on() -> None:
    """Nobody observed it meanwhile; the clock went on."""
    rule = StallRule(10.0, 0.5)
    life = LifeSigns(True, 7, 9, 0.1)
    rule.observe(0.0, life)
    rule.observe(0.5, life)
    rule.observe(7200.0, life)
    assert not rule.stalled and rule.idle_seconds == 1.5


def test_without_a_limit_nothing_stalls() -> None:
    rule = StallRule(None, 0.0)
    for now in (0.0, 1e9, 2e9):
        rule.observe(now, LifeSigns(True, 1, 0, 0.0))
    assert rule.limit is None and not rule.suspect and not rule.stalled
