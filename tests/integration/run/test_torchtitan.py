"""examples/torchtitan_learner.py with torchtitan itself, on the CPU (torchtitan_on_cpu.py says what differs)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from runs import Run, check_ledger

TESTS = Path(__file__).resolve().parents[1]
JOB = f"""
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {{name: titan}}
spec:
  training: {{batch: {{sequences: 4}}, stop: {{steps: 16}}, evaluation: null}}
  sync: {{fragments: 2, every: 4, overlap: 1, quorum: 2}}
  learners: {{command: [python, {TESTS}/torchtitan_on_cpu.py, {TESTS.parents[1]}/examples/torchtitan_learner.py]}}
  regions: [{{name: group, learners: 1, processes: 2}}, {{name: alone, learners: 1}}]
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_torchtitans_trainer_is_a_learner(start: Callable[..., Run]) -> None:
    pytest.importorskip("torchtitan")
    run = start(text=JOB)
    assert run.ends() == 0, run.everything()
    report = run.report()
    check_ledger(report, len(report["ledger"]))
    assert report["outcome"] == "complete" and report["merges"] >= 2 and report["tokens"]["dropped"] == 0
    assert report["training_loss"]["last"] < report["training_loss"]["first"] - 0.5
