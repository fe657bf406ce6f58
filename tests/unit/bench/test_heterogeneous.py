"""What bench/heterogeneous.py makes of its runs: figures beside the first kind's, curves over several seeds."""

from __future__ import annotations

import sys

import pytest

from repository import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import heterogeneous
from diloco_protocol.spec.job import DiLoCoJob
from paced_runs import Found, StatusWatch


def found(last: tuple[float, float, float], joined: float | None = None) -> Found:
    return Found(
        0.9,
        last[1] / last[0],
        last[2],
        1.5,
        share={"whole": 0.75, "half": 0.25},
        curve=[(0, 0, 6.0), last],
        joined=joined,
    )


def test_a_curve_goes_as_far_as_all_seeds_do_with_the_least_and_the_greatest() -> None:
    runs = [found((10.0, 1000.0, 4.0)), found((8.0, 2000.0, 2.0))]
    time, tokens = heterogeneous.loss_plots("speeds", {"K = 1": runs})
    (curve,) = time.series
    assert curve.x[-1] == 8.0 and curve.y[0] == 6.0
    assert curve.low[-1] == pytest.approx(2.0) and curve.high[-1] == pytest.approx(6 - 2 * 0.8)
    assert curve.y[-1] == pytest.approx((2.0 + 4.4) / 2)
    assert tokens.series[0].x[-1] == 1000.0
    assert not heterogeneous.mean_curve("one", runs[:1], 0).low


def test_figures_are_beside_the_first_kind_and_of_one_kind_beside_nothing() -> None:
    kinds = {"all": [found((10.0, 1000.0, 4.0))], "one": [found((10.0, 500.0, 5.0), joined=1.92)]}
    rows = {row["name"]: row for row in heterogeneous.figures("speeds", kinds)}
    assert rows["speeds: one: merged tokens"]["ratio"] == pytest.approx(0.5)
    assert rows["speeds: one: merged tokens"]["against"] == "all"
    assert rows["speeds: one: learners in a merge"]["value"] == 1.5
    assert rows["speeds: one: joined until merged"]["ratio"] == pytest.approx(1.92 / (8 * heterogeneous.PACE))
    assert rows["speeds: all: tokens of whole"]["ratio"] == pytest.approx(1.5)
    (alone,) = [row for row in heterogeneous.figures("speeds", {"all": kinds["all"]}) if "final loss" in row["name"]]
    assert (alone["against"], alone["baseline"], alone["ratio"]) == (None, None, None)


def test_every_job_is_valid_and_is_scored_some_times() -> None:
    arms = [*heterogeneous.speed_arms(60.0, [0]), *heterogeneous.scavenging_arms(60.0, [0])]
    arms += [arm for part in heterogeneous.quick_arms(7.0).values() for arm in part]
    assert len({arm.digest() for arm in arms}) == len(arms)
    for arm in arms:
        spec = DiLoCoJob.model_validate(arm.job()).spec
        assert spec.training.evaluation is not None
        assert 10 <= arm.tokens / spec.training.evaluation.every_tokens <= 14
    # Batches in proportion to the speed, steps equally long: as many tokens as learners of several speeds.
    assert arms[4].tokens == arms[0].tokens


def test_seconds_are_those_in_which_so_many_tokens_were_trained() -> None:
    watch = StatusWatch(ROOT / "absent.json")
    watch.close()
    watch._tokens, watch._seconds = [0.0, 100.0, 300.0], [0.0, 1.0, 2.0]
    assert watch.seconds_at(200) == pytest.approx(1.5) and watch.seconds_at(0) == 0.0
