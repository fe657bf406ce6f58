"""What our arm's figures are read from: the files of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from diloco.processes.workdir import Workdir
from diloco.processes.worker_specs import worker_specs
from diloco.validate import read_job_file
from lab.compare.arm import ArmError
from lab.compare.cpu import CpuMeter
from lab.compare.ours import read_record
from lab.compare.plan import Comparison, Pace, job_overrides
from repository import ROOT
from status_documents import job_report

JOB = ROOT / "examples" / "minimal.yaml"


@pytest.fixture
def plan() -> Comparison:
    overrides = job_overrides([], 60.0, 3)
    return Comparison(
        JOB, overrides, read_job_file(JOB, overrides), (), seconds=60.0, mtbf_seconds=60.0, pace=Pace(0.5, 1024)
    )


@pytest.fixture
def workdir(tmp_path: Path, plan: Comparison) -> Workdir:
    """Of a run whose processes left the files that such processes leave, by their names."""
    found = Workdir(tmp_path)
    found.metrics.mkdir()
    tokens = {"trained": 3072, "merged": 2048, "pending": 0, "dropped": 1024}
    found.report.write_text(job_report(tokens=tokens, faults=[]).model_dump_json())
    for worker in worker_specs(plan.job):
        scores = {"tokens": 2048, "seconds": 0.5, "loss": 2.5}
        rows = [{"time": 101.0 + n, **(scores if worker.learner is None else {"loss": 3.0})} for n in range(2)]
        file = found.metrics / f"{worker.name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


def test_steps_and_losses_come_from_the_processes_own_files(plan: Comparison, workdir: Workdir) -> None:
    record = read_record(plan, workdir, CpuMeter(os.getpid()))
    assert (record.kept_tokens, record.trained_tokens) == (2048, 3072)
    assert len(record.steps) == 2 * plan.learners and record.started == 100.5
    assert record.scores == [(2048, 100.5, 2.5), (2048, 101.5, 2.5)], "the evaluator's, less what a score takes"


def test_a_job_with_an_evaluator_that_left_no_loss_has_no_figures(plan: Comparison, workdir: Workdir) -> None:
    (workdir.metrics / "evaluator.jsonl").unlink()
    with pytest.raises(ArmError, match="the evaluator left no loss"):
        read_record(plan, workdir, CpuMeter(os.getpid()))
