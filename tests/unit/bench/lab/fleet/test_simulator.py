"""The simulator of fleets against what can be computed, and what has to hold for any fleet."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from example_counts import share_of
from lab.fleet.repairs import RepairTimes
from lab.fleet.simulator import Fleet, Result, Run, Stops, simulate_fleets

REPAIRS = RepairTimes.with_mean(600.0, 0.7, 2.0)
YEAR = 365.25 * 86400


def simulate(*fleets: Fleet, run: Run) -> list[Result]:
    return simulate_fleets(fleets, REPAIRS, run)


def near(values: np.ndarray, expected: float) -> bool:
    """Within four standard errors (and a thousandth)."""
    return abs(float(values.mean()) - expected) <= 4 * values.std(ddof=1) / math.sqrt(values.size) + 1e-3


@pytest.mark.parametrize("chips", [150_000, 600_000, 2_400_000])
def test_one_learner_that_lacks_nothing_after_a_stop_has_the_closed_form(chips: int) -> None:
    step, stop, rate = 8.0, 85.0, chips / YEAR
    # Steps until the one in which something fails are geometric; then it stands still.
    training = step / -math.expm1(-rate * step)
    (result,) = simulate(Fleet(chips, 1, YEAR, Stops(step, stop, 0.0), spares=math.inf), run=Run(8, 1000))
    assert near(result.goodput, training / (training + stop))
    assert near(result.uptime, training / (training + stop))


@pytest.mark.parametrize("chips", [150_000, 600_000])
def test_stops_that_failures_interrupt_have_the_closed_form(chips: int) -> None:
    step, stop, rate = 8.0, 85.0, chips / YEAR
    training = step / -math.expm1(-rate * step)
    standing = math.expm1(rate * stop) / rate  # until so many seconds pass without a failure
    fleet = Fleet(chips, 1, YEAR, Stops(step, stop, 0.0, interrupted=True), slice_chips=1, spares=math.inf)
    (result,) = simulate(fleet, run=Run(8, 1000))
    assert near(result.goodput, training / (training + standing))


def test_without_stops_what_is_there_is_what_is_not_under_repair() -> None:
    mtbi = 3000.0
    fleet = Fleet(50, 1, mtbi, Stops(1.0, 0.0, 0.0), slice_chips=1)
    result, spared = simulate(fleet, replace(fleet, spares=math.inf), run=Run(6, 1500))
    assert spared.goodput.min() > 0.999  # what failed is replaced when the step ends
    assert near(result.goodput, mtbi / (mtbi + REPAIRS.mean))
    assert result.uptime.tolist() == [1.0] * 6


def test_learners_fail_apart_from_each_other() -> None:
    stops = Stops(3.0, 15.0, 15.0)
    one, four = simulate(Fleet(600_000, 1, YEAR, stops), Fleet(2_400_000, 4, YEAR, stops), run=Run(8, 1500))
    # The rule that the paper's authors state: M learners on N chips do as one on N / M.
    assert four.goodput.mean() == pytest.approx(one.goodput.mean(), abs=0.01)
    assert near(four.uptime, 1 - (1 - float(one.uptime.mean())) ** 4)


@settings(max_examples=share_of(12), deadline=None)
@given(
    st.sampled_from([1, 2, 8]),
    st.floats(0.2, 4.0).map(lambda exponent: 10**exponent * 1000),
    st.floats(0.0, 60.0),
    st.floats(0.0, 60.0),
    st.integers(0, 99),
)
def test_what_makes_a_fleet_better_makes_it_no_worse(
    learners: int, chips: float, down: float, up: float, seed: int
) -> None:
    def fleet(mtbi: float = YEAR, faster: float = 1.0, spares: float = 0) -> Fleet:
        return Fleet(chips, learners, mtbi, Stops(3.0, down * faster, up * faster), spares=spares)

    fleets = [fleet(), fleet(mtbi=3 * YEAR), fleet(faster=0.3), fleet(spares=4), fleet(mtbi=YEAR / 3)]
    plain, rarer, faster, spared, worse = simulate(*fleets, run=Run(4, 150, seed))
    noise = 0.03
    for better in (rarer, faster, spared):
        assert better.goodput.mean() >= plain.goodput.mean() - noise
    assert worse.goodput.mean() <= plain.goodput.mean() + noise
    for result in (plain, rarer, faster, spared, worse):
        assert (result.goodput >= 0).all() and (result.goodput <= result.uptime + 1e-9).all()
        assert (result.uptime <= 1 + 1e-9).all()


def test_the_seed_decides_everything_and_progress_goes_up_to_the_end() -> None:
    fleets, told = [Fleet(300_000, 2, YEAR, Stops(3.0, 15.0, 15.0))], []
    first = simulate_fleets(fleets, REPAIRS, Run(3, 300, 5), told.append)[0].goodput
    assert first.tolist() == simulate_fleets(fleets, REPAIRS, Run(3, 300, 5))[0].goodput.tolist()
    assert first.tolist() != simulate_fleets(fleets, REPAIRS, Run(3, 300, 6))[0].goodput.tolist()
    assert told == sorted(told) and told[-1] == 1.0
