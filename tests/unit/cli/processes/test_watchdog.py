"""When a syncer that lives is given up, and what a finished one leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.local.outcome import ended_phase
from diloco.processes.watchdog import START_SECONDS, SYNCER_SILENT_SECONDS, Watchdog, progress
from diloco.processes.workdir import Workdir
from status_documents import job_report


def begun() -> Watchdog:
    watchdog = Watchdog()
    watchdog.on_started(1000.0)
    return watchdog


def test_a_start_that_works_is_waited_for_and_one_that_stands_still_is_not() -> None:
    watchdog, now = begun(), 1000.0
    for ticks in range(20):  # a large store is read, for twenty minutes
        now += SYNCER_SILENT_SECONDS - 1
        assert not watchdog.check(now, ticks)
    assert "has done nothing" in watchdog.check(now + SYNCER_SILENT_SECONDS + 1, 19)
    assert "did not serve within" in watchdog.check(1000.0 + START_SECONDS + 1, 20)


def test_one_that_has_answered_must_go_on_answering_however_busy_it_is() -> None:
    watchdog = begun()
    watchdog.check(1200.0, 5)
    watchdog.on_answered(1201.0)
    assert not watchdog.check(1201.0 + SYNCER_SILENT_SECONDS, 6)
    assert "has not answered" in watchdog.check(1202.0 + SYNCER_SILENT_SECONDS, 7)
    watchdog.on_excused(1300.0)
    assert not watchdog.check(1300.0 + SYNCER_SILENT_SECONDS, 7)
    watchdog.on_started(2000.0)  # the next one may take its time again
    assert not watchdog.check(2000.0 + SYNCER_SILENT_SECONDS - 1, 0)


def test_progress_rises_with_work_and_stands_with_none() -> None:
    work = "import sys\nfor _ in sys.stdin: sum(range(3_000_000)); print(1, flush=True)"
    child = subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    with child:
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert child.stdout.readline()
        before = progress(child.pid)
        child.stdin.write(b"\n\n\n")
        child.stdin.flush()
        for _ in range(3):
            assert child.stdout.readline()
        assert progress(child.pid) > before > 0
        child.stdin.close()
    assert progress(child.pid) == -1 and progress(os.getpid()) > 0


@pytest.mark.parametrize(("outcome", "phase"), [("complete", "complete"), ("interrupted", "suspended")])
def test_the_report_in_the_store_says_that_its_syncer_ended_the_job(tmp_path: Path, outcome: str, phase: str) -> None:
    workdir = Workdir(tmp_path)
    workdir.store.mkdir()
    assert workdir.last_report(1) is None
    report = job_report(outcome=outcome, syncer={"epoch": 2, "restarts": 1, "peak_rss_bytes": 1})
    (workdir.store / "report.json").write_text(report.model_dump_json())
    assert workdir.last_report(2) == report and ended_phase(report) == phase
    assert workdir.last_report(3) is None  # an earlier life's: this one was only asked to stop
    (workdir.store / "report.json").write_text("{")
    assert workdir.last_report(2) is None


def test_the_next_process_is_judged_by_its_own_start() -> None:
    watchdog = begun()
    watchdog.check(1000.0, 5)
    watchdog.on_answered(1001.0)
    watchdog.on_started(2000.0)
    for now, figure in ((2059.0, 5), (2110.0, 5), (2165.0, 6)):  # it may happen to have done as much as the former
        assert not watchdog.check(now, figure), now
