"""The report of a run's directory: curves from metrics.jsonl, figures from report.json, and the command."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from diloco.main import app
from diloco.reports.run_report import RunCurves, averaged, read_curves, run_report
from diloco_protocol.documents import Report
from status_documents import job_report, slot_row, status_document

BEGUN = 1_700_000_000.0  # Unix seconds of the job's first step


def sample(elapsed: float, **fields: Any) -> str:
    row = {"source": "status", "time": BEGUN + elapsed, "elapsed_seconds": elapsed, "goodput": 0.5, "uptime": 1.0,
           "tokens_per_second": 100.0, "bytes_up": 1e6 * elapsed, "bytes_down": 2e6 * elapsed, "active": 2}  # fmt: skip
    return json.dumps({**row, **fields})


def step(elapsed: float, loss: float | None, learner: str = "local-0") -> str:
    return json.dumps({"source": learner, "time": BEGUN + elapsed, "step": 1, "loss": loss})


def report(**fields: Any) -> Report:
    fault = {"at_seconds": 4.0, "action": "kill", "target": "learner-1", "detected_seconds": 0.5,
             "joined_seconds": 1.0, "first_step_seconds": 1.5, "recovered_seconds": 2.5}  # fmt: skip
    given = {
        "outcome": "complete",
        "tokens": {"trained": 100, "merged": 90, "pending": 4, "dropped": 6},
        "ledger": [{"fragment": 0, "merged": 9, "pending": 0, "dropped": 6, "reasons": {"died": 5, "stale": 1}}],
        "eval_loss": [[0, 5.5], [100, 2.25]],
        "faults": [fault, {**fault, "recovered_seconds": None}],
        "bytes_up": 400,
        "bytes_down": 600,
        "goodput": 0.75,
        **fields,
    }
    return Report.model_validate(job_report(**given).model_dump())


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    """Of a run that is over."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "job.json").write_text(json.dumps({"metadata": {"name": "tiny"}}))
    (path / "report.json").write_text(report().model_dump_json())
    lines = [step(0.5, 5.0), sample(1.0), step(1.5, 4.0), sample(2.0, goodput=0.625, eval_loss=[50, 4.5]), sample(3.0)]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return path


def diloco(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


def test_curves_are_by_the_jobs_clock_and_broken_lines_are_counted(tmp_path: Path) -> None:
    lines = [
        step(0.25, 5.0),
        sample(0.0),
        "{torn",
        "[]",
        '{"source": "status"}',
        sample(1.0),
        step(1.5, 4.0),
        step(2.0, None),
        step(2.5, 3.0, "evaluator"),
        sample(3.0, goodput=None),
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    curves = read_curves(tmp_path / "metrics.jsonl")
    assert curves.unreadable == 3
    assert curves.losses == {"local-0": [(0.25, 5.0), (1.5, 4.0)]}
    assert curves.curve("goodput") == [(1.0, 0.5)]
    assert read_curves(tmp_path / "nothing.jsonl") == RunCurves()


def test_means_over_equal_intervals() -> None:
    assert averaged([(0, 1), (1, 3), (9, 5), (10, 7)], 5, 10.0) == [(1.0, 2.0), (9.0, 6.0)]
    assert averaged([], 5, 10.0) == averaged([(0, 1)], 5, 0.0) == []


def test_a_run_that_is_over(workdir: Path) -> None:
    found = run_report("tiny", report(), read_curves(workdir / "metrics.jsonl"))
    assert found.title == "tiny: report of the run"
    rows = {row["name"]: row["value"] for row in found.rows}
    assert rows["tokens dropped"] == 6 and rows["payload per token, both ways"] == 10.0 and rows["goodput"] == 0.75
    assert rows["loss at the last score"] == 2.25, "it was interrupted"
    ended = run_report("tiny", report(final_loss=2.0), RunCurves()).rows
    assert next(row["value"] for row in ended if row["name"] == "loss") == 2.0
    plots = {plot.title: plot for plot in found.plots}
    assert plots["Learners that train"].y.counts
    goodput = plots["Goodput and uptime"]
    assert goodput.series[0].points == [(1.0, 0.5), (2.0, 0.625), (3.0, 0.5)]
    assert [mark.label for mark in goodput.marks] == [
        "kill learner-1: merged again after 2.5 s",
        "kill learner-1: not merged again",
    ]
    assert plots["Loss against tokens"].series[0].points == [(0, 5.5), (100, 2.25)]
    merged, learner = plots["Loss against time"].series
    assert merged.points == [(2.0, 4.5)] and learner.name == "local-0" and [y for _, y in learner.points] == [5.0, 4.0]
    up = plots["Bandwidth used"].series[0]
    assert [y for _, y in up.points] == [8.0, 8.0], "a million bytes a second, in megabits"
    assert {"reason": "died", "tokens": 5} in [row for table in found.tables for row in table.rows]


def test_a_run_without_curves_says_what_is_missing() -> None:
    found = run_report("tiny", report(eval_loss=[]), RunCurves())
    assert found.plots == [] and any("curves over time are missing" in note for note in found.notes)


def test_the_command_writes_the_page_whole_and_the_same_again(workdir: Path, tmp_path: Path) -> None:
    code, output = diloco("report", workdir, "--html")
    page = workdir / "report.html"
    assert code == 0 and str(page) in output.replace(" ", "") and page.stat().st_mode & 0o777 == 0o644
    text = page.read_text()
    assert text.startswith("<!doctype html>") and "<svg" in text and "tiny: report of the run" in text
    assert diloco("report", workdir, tmp_path / "new" / "page.html", "--html")[0] == 0
    assert (tmp_path / "new" / "page.html").read_text() == text
    assert json.loads((workdir / "report.json").read_text())["outcome"] == "complete"


def test_a_report_alone_becomes_a_page(tmp_path: Path) -> None:
    (tmp_path / "alone.json").write_text(report().model_dump_json())
    assert diloco("report", tmp_path / "alone.json", "--html")[0] == 0
    assert "alone: report of the run" in (tmp_path / "alone.html").read_text()


def test_what_cannot_be_done_is_said_with_the_cure(workdir: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"rows": 1}')
    for arguments, words in (
        ((wrong, "--html"), "is no run's report.json"),
        ((tmp_path, "--html"), "no run's directory"),
        ((workdir, "page.html"), "a second file is for --html"),
        ((workdir, "--html", "--json"), "--html goes without --json"),
        ((workdir, workdir, "--html"), "is what the report is made of"),
        ((workdir, tmp_path, "--html"), "cannot be written"),
        ((workdir, wrong / "x.html", "--html"), f"cannot be written: {wrong} is not a directory"),
        (
            (workdir, "/proc/x.html", "--html"),
            "error: cannot write /proc/x.html: the file system of /proc takes no new",
        ),
        ((wrong, wrong, "--html"), "wrong.json"),
        (("a-job", "--html"), "diloco report a-job --json > report.json"),
    ):
        code, output = diloco("report", *arguments)
        assert code == 2 and words in output, (arguments, output)


@pytest.fixture
def running(workdir: Path) -> Iterator[Path]:
    """A run that goes on: a page serves its status."""
    status = status_document(
        job="tiny",
        phase="training",
        message="all is well",
        elapsed_seconds=12.0,
        tokens={"trained": 50, "merged": 40, "pending": 10, "dropped": 0},
        slots=[slot_row(region="local", state="active", tokens=50)],
        events=[{"n": 1, "time": BEGUN, "kind": "joined", "slot": 0, "incarnation": 1, "message": "learner 0 joined"}],
        eval_loss=[[0, 5.5]],
    )

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = status.model_dump_json().encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"127.0.0.1:{server.server_port}"
        given = {"sync": address, "control": address, "http": address, "pid": 1, "epoch": 1}
        (workdir / "address.json").write_text(json.dumps(given))
        (workdir / "report.json").unlink()
        yield workdir
        server.shutdown()
        thread.join()


def test_a_run_that_goes_on(running: Path) -> None:
    assert diloco("report", running, "--html")[0] == 0
    text = (running / "report.html").read_text()
    assert "tiny: as it stands" in text and "The run continues" in text and "2023-11-14 22:13:20 UTC" in text
    assert "learner 0 joined" in text and "training: all is well" in text
