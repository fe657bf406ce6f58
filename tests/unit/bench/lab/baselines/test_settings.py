"""What a baseline's process is told, and how often it checkpoints."""

from __future__ import annotations

import math

import pytest

from lab.baselines.settings import VARIABLE, BaselineSettings, daly_interval


def test_settings_survive_the_environment() -> None:
    told = BaselineSettings(
        "rank",
        "/arm",
        "/dev/shm/x",
        2,
        learners=4,
        stop_seconds=300.0,
        score_tokens=1000,
        mtbf_seconds=15.0,
        store="127.0.0.1:1",
    )
    assert BaselineSettings.from_json(told.to_environment()[VARIABLE]) == told
    endless = BaselineSettings("rank", "/arm")
    assert BaselineSettings.from_json(endless.to_environment()[VARIABLE]) == endless


@pytest.mark.parametrize(("cost", "mtbf"), [(0.01, 15.0), (1.0, 100.0), (5.0, 60.0)])
def test_dalys_interval_loses_least(cost: float, mtbf: float) -> None:
    """Against Daly's own model of the time that a job takes (his equation for exponential failures), by search."""

    def total(work: float) -> float:
        return mtbf * (math.exp((work + cost) / mtbf) - 1) / work

    found = daly_interval(cost, mtbf)
    best = min((total(n * mtbf / 2000), n * mtbf / 2000) for n in range(1, 6000))
    assert total(found) <= best[0] * 1.002


def test_dalys_interval_at_its_edges() -> None:
    assert daly_interval(1.0, math.inf) == math.inf
    assert daly_interval(30.0, 10.0) == 10.0, "checkpoints that cost more than they save"
