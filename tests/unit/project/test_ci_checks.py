"""What CI says of a demo's report and model."""

from __future__ import annotations

import importlib.util
import math
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from diloco_worker.data.split import Part
from diloco_worker.data.text import TokenSequences
from repository import ROOT

sys.path.insert(0, str(ROOT / "bench"))

from bigram import bigram_entropy


def ci_module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return ci_module("check_report")


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


def test_bigram_entropy_is_the_conditional_entropy() -> None:
    tokens = np.frombuffer(b"abacabadabacabae" * 20, np.uint8)
    found = bigram_entropy(TokenSequences(tokens, 16, Part.of(20, 0.0, held_out=False)))
    # By hand: per sequence 15 pairs; after a (8 times): b 4, c 2, d 1, e 1; after b, c, d always a.
    after_a = [4 / 8, 2 / 8, 1 / 8, 1 / 8]
    expected = 8 / 15 * -sum(p * math.log(p) for p in after_a)
    assert found == pytest.approx(expected, rel=1e-12)


def test_bigram_entropy_of_noise_and_of_certainty() -> None:
    noise = np.random.default_rng(0).integers(0, 4, 200_000, np.uint8)
    assert bigram_entropy(TokenSequences(noise, 100, Part.of(2000, 0.0, held_out=False))) == pytest.approx(
        math.log(4), abs=1e-3
    )
    cycle = np.tile(np.arange(5, dtype=np.uint8), 100)
    assert bigram_entropy(TokenSequences(cycle, 50, Part.of(10, 0.0, held_out=False))) == pytest.approx(0)


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        ({"rows": [{"name": "a", "value": 1, "unit": "s", "baseline": None, "ratio": None}], "rmse": 1.1}, ""),
        ({"rows": [{"name": "a", "value": 1, "unit": "s", "baseline": 2, "ratio": 0.5, "against": "b"}]}, ""),
        ({"rows": [{"name": "a", "value": 1, "unit": "s", "baseline": 2, "ratio": 0.5}]}, "against"),
        ({"rows": [{"name": "a", "value": 1, "unit": "s", "baseline": None, "ratio": None}], "rmse": 1.6}, "rmse"),
        ([{"name": "a", "value": 1, "unit": "s", "baseline": 2, "ratio": 0.5}], "not an object"),
        ({"rows": []}, "not a list"),
        ({}, "not a list"),
        ({"rows": [{"name": "a", "value": 1.0, "unit": "s"}]}, "fields"),
        ({"rows": [{"name": "a", "value": None, "unit": "s", "baseline": None, "ratio": None}]}, "finite"),
        ({"rows": [{"name": "a", "value": 1, "unit": "s", "baseline": 2, "ratio": None}]}, "go together"),
        ({"rows": [{"name": "a", "value": 1, "unit": "s", "baseline": 2, "ratio": math.inf}]}, "ratio"),
        ({"rows": [{"name": "a", "value": 1, "unit": "s", "baseline": "b", "against": "c", "ratio": 0.5}]}, "baseline"),
    ],
)
def test_what_a_bench_prints_is_checked(printed: object, words: str) -> None:
    found = ci_module("check_bench").problems(printed)
    assert bool(found) == bool(words) and all(words in problem for problem in found)
