"""When things fail and how long repairs take: the distributions, and schedules that can be."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.local.chaos.failures import Failure, RepairTimes, draw_failures
from example_counts import share_of

REPAIRS = RepairTimes(scale=100.0, shape=0.7, power=2.0)


def test_repair_times_have_the_distribution_that_they_are_named_after() -> None:
    times = np.array([1.0, 30.0, 100.0, 1000.0, 5000.0])
    shares = (1 - np.exp(-((times / 100.0) ** 0.7))) ** 2.0
    assert REPAIRS.quantile(shares) == pytest.approx(times)
    drawn = REPAIRS.draw(np.random.default_rng(1), 100_000)
    found = (drawn[:, None] <= times).mean(axis=0)
    assert found == pytest.approx(shares, abs=4 * math.sqrt(0.25 / drawn.size))
    assert drawn.mean() == pytest.approx(REPAIRS.mean, abs=4 * drawn.std() / math.sqrt(drawn.size))


def test_the_mean_is_that_of_distributions_whose_mean_is_known() -> None:
    assert RepairTimes(60.0, 1.0, 1.0).mean == pytest.approx(60.0, rel=1e-4)  # exponential
    assert RepairTimes(60.0, 0.5, 1.0).mean == pytest.approx(60.0 * math.gamma(3.0), rel=1e-3)  # Weibull
    assert RepairTimes(60.0, 1.0, 2.0).mean == pytest.approx(60.0 * 1.5, rel=1e-4)  # the later of two exponentials
    assert RepairTimes.with_mean(600.0, 0.7, 2.0).mean == pytest.approx(600.0)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan])
def test_a_parameter_that_is_none_is_named(wrong: float) -> None:
    with pytest.raises(ValueError, match="shape"):
        RepairTimes(1.0, wrong, 1.0)


@settings(max_examples=share_of(60), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 8), st.floats(1, 500))
def test_a_unit_under_repair_does_not_fail(seed: int, units: int, mtbi: float) -> None:
    def drawn() -> list[Failure]:
        return list(draw_failures(np.random.default_rng(seed), units, mtbi, REPAIRS, until=1000.0))

    failures = drawn()
    assert failures == drawn()
    free = [0.0] * units
    last = 0.0
    for failure in failures:
        assert last <= failure.at < 1000.0 and failure.repair > 0
        assert failure.at >= free[failure.unit]
        last, free[failure.unit] = failure.at, failure.at + failure.repair


def test_failures_come_at_the_rate_of_what_is_up() -> None:
    units, mtbi, until = 20, 500.0, 2e5
    failures = list(draw_failures(np.random.default_rng(3), units, mtbi, REPAIRS, until=until))
    down = sum(min(failure.repair, until - failure.at) for failure in failures)
    expected = (units * until - down) / mtbi
    assert len(failures) == pytest.approx(expected, abs=4 * math.sqrt(expected))
    # A renewal process of each unit: up for mtbi, down for a repair.
    assert down / (units * until) == pytest.approx(REPAIRS.mean / (REPAIRS.mean + mtbi), rel=0.05)
    assert np.bincount([failure.unit for failure in failures], minlength=units).min() > 0


def test_what_cannot_be_simulated_is_named() -> None:
    with pytest.raises(ValueError, match="units"):
        next(draw_failures(np.random.default_rng(0), 0, 1.0, REPAIRS, until=1.0))
    with pytest.raises(ValueError, match="mtbi"):
        next(draw_failures(np.random.default_rng(0), 1, 0.0, REPAIRS, until=1.0))
