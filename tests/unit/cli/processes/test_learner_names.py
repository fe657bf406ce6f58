"""A learner has one name, REGION-ORDINAL: processes, files, events, chaos and the screen agree on it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from core_desk import Desk, config, of
from diloco.local.chaos.schedule import ChaosError, check, parse
from diloco.local.log_files import chosen_files
from diloco.main import app
from diloco.processes.supervisor import Kind
from diloco.processes.workdir import claim, locked
from diloco.processes.worker_specs import learner_names, worker_environment, worker_specs
from diloco_operator.names import stateful_set
from diloco_protocol.spec.load import parse_job
from diloco_protocol.vocabulary import EventKind, JobPhase
from diloco_syncer.core import events as ev
from diloco_worker.settings import WorkerSettings

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: tiny}
spec:
  learners: {command: [python, train.py]}
  regions: [{name: east, learners: 2}, {name: west, learners: 1, spares: 1}]
"""


def test_processes_are_called_as_their_pods() -> None:
    job = parse_job(JOB)
    learners = [worker for worker in worker_specs(job) if worker.kind is Kind.LEARNER]
    assert [worker.name for worker in learners] == ["east-0", "east-1", "west-0", "west-1"]
    assert learner_names(job) == ["east-0", "east-1", "west-0"], "a spare is none of the job's learners"
    for worker in learners:
        # A StatefulSet's pod is called by it and its number.
        assert f"{stateful_set('tiny', worker.region).name}-{worker.ordinal}" == f"tiny-{worker.name}"


def test_metrics_and_logs_are_called_as_the_process_is(tmp_path: Path) -> None:
    job = parse_job(JOB)
    with locked(tmp_path / "run") as workdir:
        claim(workdir, job, tmp_path)
        for worker in worker_specs(job):
            environ = worker_environment(worker, "", workdir, tmp_path, syncer="127.0.0.1:1", gpu=None)
            metrics = WorkerSettings.from_environment(environ).metrics_path()
            assert metrics is not None and metrics.parent == workdir.metrics
            assert metrics.stem == workdir.log(worker.name).stem == worker.name


def test_chaos_takes_that_name_and_the_number_over_all_regions() -> None:
    names = learner_names(parse_job(JOB))
    by_name, by_number = check(parse("1s:kill:west-0,1s:kill:learner-2"), names)
    assert (by_name.target, by_name.learner) == (by_number.target, by_number.learner) == ("west-0", 2)
    with pytest.raises(ChaosError, match="no west-1; it has east-0, east-1, west-0"):
        check(parse("1s:kill:west-1"), names)


def test_logs_are_found_by_it(tmp_path: Path) -> None:
    with locked(tmp_path / "run") as workdir:
        claim(workdir, parse_job(JOB), tmp_path)
        workdir.log("west-0").write_text("a line\n")
        for target in ("west-0", "learner-2"):
            assert chosen_files(workdir, target)("west-0") and not chosen_files(workdir, target)("east-0")
        said = CliRunner().invoke(app, ["logs", str(workdir.path)]).output
    assert said == "west-0  a line\n"


def test_events_name_the_learner() -> None:
    """Of each thing that may happen to one; its slot's number is in the event of the join."""
    desk = Desk(config(quorum=2))
    desk.begin(2)
    desk.report(1, 1)
    desk.do(ev.ConnectionLost(2))
    desk.do(ev.ProcessEnded("r", 1, "p2", "exit code 1"))
    desk.join(3, 1)
    desk.report(3, 1)
    desk.later(1e4)
    desk.do(ev.EndRequested(JobPhase.SUSPENDED, "enough"))
    desk.do(ev.Drained(1))
    told = [note for note in of(desk.log, ev.RecordEvent) if note.slot >= 0]
    kinds = {note.kind for note in told}
    assert kinds >= {EventKind.JOINED, EventKind.FIRST_STEP, EventKind.SUSPECT, EventKind.PROCESS_ENDED, EventKind.LOST}
    for note in told:
        assert f"r-{note.slot}" in note.message, note
        assert note.kind is EventKind.JOINED or not re.search(r"\bslot\b", note.message), note
