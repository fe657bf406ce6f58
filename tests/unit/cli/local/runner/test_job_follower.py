"""What follows from the syncer's status, and from its silence."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import pytest

from diloco.local.metrics_log import MetricsLog
from diloco.local.runner.syncer_health import SyncerHealth
from diloco.processes.unjoined import UNJOINED_SECONDS
from diloco.processes.watchdog import SYNCER_SILENT_SECONDS
from scripted_run import ScriptedProcess, ScriptedRun
from status_documents import job_report, status_document

MakeRun = Callable[..., ScriptedRun]


def metrics(run: ScriptedRun) -> MetricsLog:
    workdir = run.runner.workdir
    return MetricsLog(workdir.metrics_file, workdir.metrics, workdir.tensorboard)


def test_a_syncer_that_hangs_is_killed_once_and_replaced(make_run: MakeRun) -> None:
    run = make_run()
    run.syncer.page = status_document(phase="training")

    async def hang() -> None:
        await asyncio.sleep(5.0)
        run.syncer.page = None

    run.run(run.runner.syncer_keeper.keep(), run.runner.follower.follow(metrics(run)), hang(), seconds=80.0)
    assert [process.signals for process in run.started("syncer")] == [[signal.SIGKILL], []]
    assert sum("it is killed" in text for text in run.screen.said) == 1


def test_a_syncer_that_takes_a_while_to_die_is_not_killed_again(make_run: MakeRun) -> None:
    run = make_run()
    run.syncer.page = status_document(phase="training")

    async def hang() -> None:
        await asyncio.sleep(5.0)
        run.syncer.page = None
        process: ScriptedProcess = run.starts[0]
        process.exit = lambda how: None

    keep, follow = run.runner.syncer_keeper.keep(), run.runner.follower.follow(metrics(run))
    run.run(keep, follow, hang(), seconds=5.0 + 1.5 * SYNCER_SILENT_SECONDS)
    assert [process.signals for process in run.started("syncer")] == [[signal.SIGKILL]]


@pytest.mark.parametrize(("takes", "killed"), [(15.0, False), (25.0, True)])
def test_a_syncer_that_answers_late_is_not_killed(make_run: MakeRun, takes: float, killed: bool) -> None:
    """A busy machine gives it no processor for seconds: its answers come, though none in time."""
    run = make_run()
    run.syncer.page = status_document(phase="training")

    async def starve() -> None:
        await asyncio.sleep(5.0)
        run.syncer.takes = takes

    keep, follow = run.runner.syncer_keeper.keep(), run.runner.follower.follow(metrics(run))
    run.run(keep, follow, starve(), seconds=5.0 + 4 * SYNCER_SILENT_SECONDS)
    assert bool(run.started("syncer")[0].signals) == killed


@pytest.mark.parametrize("paused", [True, False])
def test_a_syncer_that_is_paused_on_purpose_is_not_held_to_hang(make_run: MakeRun, paused: bool) -> None:
    run = make_run()
    reasons = list[str]()

    async def wait() -> None:
        health = SyncerHealth(running=run.runner.running, paused=lambda name: paused and name == "syncer")
        assert health.reason_to_kill() == "", "none runs"
        run.runner.running["syncer"] = await run.start("syncer", [], {}, None)
        health.on_started()
        health.watchdog.on_answered(asyncio.get_running_loop().time())
        for _ in range(int(2 * SYNCER_SILENT_SECONDS)):
            await asyncio.sleep(1.0)
            reasons.append(health.reason_to_kill())
        paused_no_more = SyncerHealth(running=run.runner.running, paused=lambda name: False, watchdog=health.watchdog)
        assert bool(paused_no_more.reason_to_kill()) != paused, "its time begins with the end of the pause"

    run.run(wait(), seconds=1000.0)
    assert any(reasons) != paused


def test_an_end_that_is_settled_ends_the_run(make_run: MakeRun) -> None:
    run = make_run()
    run.syncer.page, run.syncer.last_report = status_document(phase="complete"), job_report(outcome="running")
    run.run(run.runner.follower.poll())
    assert run.outcome() is None, "its report is not here"
    run.syncer.last_report = job_report(outcome="complete")
    run.run(run.runner.follower.poll())
    ended = run.outcome()
    assert ended is not None and ended.outcome == "complete"


def test_a_disk_that_is_full_ends_the_metrics_and_not_the_run(make_run: MakeRun) -> None:
    run = make_run()

    class Full(MetricsLog):
        def write(self, status: object) -> None:
            raise OSError(28, "No space left on device")

    workdir = run.runner.workdir
    full = Full(workdir.metrics_file, workdir.metrics, workdir.tensorboard)
    run.run(run.runner.follower.follow(full), seconds=20.0)
    assert [text for text in run.screen.said if "metrics" in text] == [
        "no more metrics are written: [Errno 28] No space left on device"
    ]
    assert run.outcome() is None


def test_metrics_are_written_every_second_and_the_report_before_goes_with_the_first_answer(make_run: MakeRun) -> None:
    run = make_run()
    run.runner.workdir.report.write_text("{}")

    async def answer() -> None:
        await asyncio.sleep(10.2)
        assert run.runner.workdir.report.exists()
        run.syncer.page = status_document(phase="training")

    run.run(run.runner.follower.follow(metrics(run)), answer(), seconds=20.2)
    assert not run.runner.workdir.report.exists()
    rows = run.runner.workdir.metrics_file.read_text().splitlines()
    assert len([row for row in rows if '"status"' in row]) == 10


def test_a_learner_that_runs_and_does_not_join_is_told_of_once(make_run: MakeRun) -> None:
    run = make_run()
    run.syncer.page = status_document(phase="training")
    keep = run.runner.worker_keeper.keep(run.worker("east-0"))
    run.run(keep, run.runner.follower.follow(metrics(run)), seconds=2 * UNJOINED_SECONDS)
    assert sum("east-0 has run for" in text for text in run.screen.said) == 1


@pytest.mark.parametrize(("phase", "standbys"), [("training", ["east-0.0"]), ("draining", [])])
def test_of_a_learner_that_has_joined_or_whose_job_ends_nothing_is_told(
    make_run: MakeRun, phase: str, standbys: list[str]
) -> None:
    run = make_run()
    run.syncer.page = status_document(phase=phase, standbys=standbys)
    keep = run.runner.worker_keeper.keep(run.worker("east-0"))
    run.run(keep, run.runner.follower.follow(metrics(run)), seconds=2 * UNJOINED_SECONDS)
    assert not any("east-0 has run for" in text for text in run.screen.said)
