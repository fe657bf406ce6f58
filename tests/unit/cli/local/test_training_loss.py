"""The training loss that a report shows where nobody scored the model."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest
from rich.console import Console

from diloco.local.outcome import RunOutcome, RunResult, complete_report
from diloco.local.status import last_seen
from diloco.local.summary import summary
from diloco.local.training_loss import read_training_loss
from diloco.processes.workdir import claim, locked
from diloco_protocol.documents import TrainingLoss
from diloco_protocol.spec.job import DiLoCoJob
from status_documents import job_report

JOB = DiLoCoJob.model_validate(
    {
        "apiVersion": "diloco.io/v1alpha1",
        "kind": "DiLoCoJob",
        "metadata": {"name": "own"},
        "spec": {"learners": {"command": ["python", "train.py"]}, "regions": [{"learners": 2}]},
    }
)


def write(folder: Path, ordinal: int, losses: list[float | None]) -> None:
    rows = ({"step": step, "loss": loss, "lr": 0.1, "pad": "x" * 90} for step, loss in enumerate(losses))
    (folder / f"local-{ordinal}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def shown(report: object) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(summary(report))  # type: ignore[arg-type]
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_it_is_the_mean_of_the_learners_first_and_last_steps(tmp_path: Path) -> None:
    write(tmp_path, 0, [None, 6.0, *[5.0] * 2000, 2.0, None])
    write(tmp_path, 1, [4.0, 3.0])
    write(tmp_path, 2, [None])
    (tmp_path / "evaluator.jsonl").write_text('{"loss": 99.0}\n')
    with (tmp_path / "local-1.jsonl").open("a") as file:
        file.write('[1]\nnot json\n{"loss": "high"}\n{"loss": NaN}\n{"lo')  # as a kill leaves it
    assert read_training_loss(tmp_path) == TrainingLoss(first=5.0, last=2.5)
    assert read_training_loss(tmp_path / "absent") is None


@pytest.mark.parametrize("scored", [True, False])
def test_the_report_of_a_run_has_it_where_nobody_scored_the_model(tmp_path: Path, scored: bool) -> None:
    write(tmp_path, 0, [6.0, 2.0])
    report = job_report(**({"initial_loss": 5.5, "final_loss": 1.5} if scored else {}))
    result = RunResult(
        RunOutcome("complete", 0),
        report,
        None,
        [],
        events=[],
        syncer_restarts=0,
        syncer_peak_rss_bytes=0,
        wall_seconds=1.0,
    )
    completed = complete_report(result, JOB, tmp_path)
    if scored:
        assert completed.training_loss is None
        assert "5.500 at the start, 1.500 at the end" in shown(completed) and "training loss" not in shown(completed)
    else:
        assert completed.training_loss == TrainingLoss(first=6.0, last=2.0)
        assert "training loss  6.000 in the first step, 2.000 in the last: the learners' own" in shown(completed)
        assert "at the start" not in shown(completed)


def test_a_report_without_any_loss_has_no_row_of_it(tmp_path: Path) -> None:
    trained = job_report(tokens={"trained": 9, "merged": 9, "pending": 0, "dropped": 0})
    result = RunResult(
        RunOutcome("failed", 1),
        trained,
        None,
        [],
        events=[],
        syncer_restarts=0,
        syncer_peak_rss_bytes=0,
        wall_seconds=1.0,
    )
    text = shown(complete_report(result, JOB, tmp_path))
    assert "9 trained" in text and "loss" not in text


def test_of_learners_on_other_machines_the_syncers_is_taken(tmp_path: Path) -> None:
    known = job_report(training_loss={"first": 6.0, "last": 2.0})
    result = RunResult(
        RunOutcome("complete", 0),
        known,
        None,
        [],
        events=[],
        syncer_restarts=0,
        syncer_peak_rss_bytes=0,
        wall_seconds=1.0,
    )
    assert complete_report(result, JOB, tmp_path).training_loss == TrainingLoss(first=6.0, last=2.0)


def test_the_report_of_a_job_that_runs_has_it() -> None:
    """In a cluster, too: it is the syncer's."""
    running = job_report(outcome="running", training_loss={"first": 6.0, "last": 2.0})
    assert "training loss  6.000 in the first step, 2.000 in the last" in shown(running)


def test_what_is_known_of_a_killed_run_has_it(tmp_path: Path) -> None:
    with locked(tmp_path / "run") as workdir:
        claim(workdir, JOB, tmp_path)
    workdir.metrics.mkdir(exist_ok=True)
    write(workdir.metrics, 0, [6.0, 2.0])
    sample = {"source": "status", "time": time.time() + 5.0, "epoch": 1, "elapsed_seconds": 9.0, "merges": 1,
              "tokens": {"trained": 9, "merged": 9, "pending": 0, "dropped": 0}, "goodput": 0.5, "uptime": 1.0,
              "bytes_up": 1, "bytes_down": 1, "versions": [1, 1], "eval_loss": None}  # fmt: skip
    workdir.metrics_file.write_text(json.dumps(sample) + "\n")
    report = last_seen(workdir, killed=True)
    assert report is not None and report.training_loss == TrainingLoss(first=6.0, last=2.0)
