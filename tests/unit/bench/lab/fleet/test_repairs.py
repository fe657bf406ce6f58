"""How long repairs take: the distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lab.fleet.repairs import RepairTimes

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
