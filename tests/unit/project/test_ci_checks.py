"""What CI says of a demo's report and model."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import pytest

from repository import ROOT


@pytest.fixture(scope="module")
def check() -> ModuleType:
    path = ROOT / ".ci" / "check_report.py"
    spec = importlib.util.spec_from_file_location("check_report", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(**changes: Any) -> dict[str, Any]:
    good = {
        "schema": 1,
        "outcome": "complete",
        "initial_loss": 5.5,
        "final_loss": 1.7,
        "merges": 9,
        "faults": [{"action": "kill", "target": "learner-1", "recovered_seconds": 0.8}],
        "tokens": {"trained": 10, "merged": 7, "pending": 1, "dropped": 2},
        "ledger": [{"fragment": 0, "merged": 7, "pending": 1, "dropped": 2, "reasons": {"died": 2}}],
    }
    return good | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"outcome": "failed"}, "outcome"),
        ({"faults": []}, "no fault"),
        ({"final_loss": None}, "final_loss"),
        ({"final_loss": 5.0}, "did not learn"),
        ({"tokens": {"trained": 11, "merged": 7, "pending": 1, "dropped": 2}}, "is not trained"),
    ],
)
def test_a_report_that_is_not_a_demos_is_told(check: ModuleType, changes: dict[str, Any], words: str) -> None:
    assert check.problems(report()) == []
    assert any(words in problem for problem in check.problems(report(**changes)))


def test_a_model_must_beat_bigrams_and_be_the_one_that_was_scored(check: ModuleType) -> None:
    assert check.model_problems(report(), 2.4, 1.7005) == []
    (weak,) = check.model_problems(report(), 1.95, 1.7)
    assert "below the bigram entropy" in weak
    (other,) = check.model_problems(report(), 2.4, 1.702)
    assert "exported" in other
    assert len(check.model_problems(report(), float("nan"), float("nan"))) == 2
