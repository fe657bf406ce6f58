"""What ends a run, and how: signals, the syncer's last phase, a drain, and how long processes may take to leave."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import pytest

from diloco.local.outcome import REFUSED, RunOutcome
from diloco.local.runner.run_end import DRAIN_SECONDS, LEAVE_SECONDS
from diloco.processes.launch import SAME_SIGNAL_SECONDS
from diloco_protocol.documents import Report
from scripted_run import ScriptedProcess, ScriptedRun
from status_documents import job_report, status_document

MakeRun = Callable[..., ScriptedRun]


async def start_all(run: ScriptedRun) -> list[ScriptedProcess]:
    for name in ("syncer", "east-0"):
        run.runner.running[name] = await run.start(name, [], {}, None)
    return run.starts


def test_the_first_decision_counts_and_says_where_the_log_of_its_process_begins(make_run: MakeRun) -> None:
    run = make_run()
    run.runner.workdir.log("east-0").write_text("of the one before")
    run.runner.worker_keeper.errors.begin("east-0")
    run.runner.end.decide(RunOutcome("failed", 2, "wrong", "east-0"))
    run.runner.end.decide(RunOutcome("complete", 0))
    assert run.outcome() == RunOutcome("failed", 2, "wrong", "east-0", log_begin=len("of the one before"))


# ------------------------------------------------------------------ signals


@pytest.mark.parametrize(
    ("apart", "killed"), [(0.0, False), (SAME_SIGNAL_SECONDS - 0.01, False), (SAME_SIGNAL_SECONDS + 0.01, True)]
)
def test_signals_that_are_close_together_are_one_wish(make_run: MakeRun, apart: float, killed: bool) -> None:
    run = make_run()
    run.syncer.page = status_document(phase="training")

    async def interrupt_twice() -> None:
        await start_all(run)
        run.runner.end.on_signal(signal.SIGTERM)
        await asyncio.sleep(apart)
        run.runner.end.on_signal(signal.SIGHUP)

    run.run(interrupt_twice())
    assert run.runner.end.is_interrupted and run.runner.end.stopping == killed
    assert [process.signals for process in run.starts] == [[signal.SIGKILL] if killed else []] * 2
    assert (run.outcome() is not None) == killed
    assert len(run.syncer.calls) == 1, "the syncer is asked once"


def test_a_job_that_has_not_begun_is_left_at_once(make_run: MakeRun) -> None:
    run = make_run()
    run.syncer.page = status_document(phase="waiting")
    run.run(_interrupt(run, 0.1))
    assert run.outcome() == RunOutcome("interrupted", 130, "stopped by the user") and run.syncer.calls == []


@pytest.mark.promise("Ctrl-C while `diloco run` checks the job ends it at once, and leaves no directory")
def test_before_the_job_begins_a_signal_ends_the_run_at_once(make_run: MakeRun) -> None:
    run = make_run()
    run.runner.end.has_started = False
    run.run(_interrupt(run, 0.1))
    said = "stopped by the user, before the job began: nothing is kept"
    assert run.outcome() == RunOutcome(REFUSED, 130, said)
    assert run.runner.end.stopping and run.screen.said == [] and run.syncer.calls == []


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGINT, "stopped by the user"), (signal.SIGTERM, "stopped by the user"),
     (signal.SIGHUP, "the terminal was closed")],
)  # fmt: skip
def test_the_reason_of_an_interrupt_is_told_to_people_and_to_the_syncer(
    make_run: MakeRun, number: int, reason: str
) -> None:
    run = make_run()
    run.syncer.page = status_document(phase="training")

    async def interrupt() -> None:
        run.runner.end.on_signal(number)
        await asyncio.sleep(0.1)

    run.run(interrupt())
    assert run.screen.said[0].startswith("interrupted") and (number == signal.SIGHUP) == (reason in run.screen.said[0])
    assert run.syncer.calls == [("announce", {"phase": "interrupted", "message": reason})]


@pytest.mark.parametrize(
    ("phase", "said"),
    [("training", "learners offer"), ("evaluating", "is evaluated to the end"), ("complete", "is complete already")],
)
def test_an_interrupt_says_what_is_still_to_come(make_run: MakeRun, phase: str, said: str) -> None:
    run = make_run()
    run.syncer.page = status_document(phase=phase)

    async def interrupt() -> None:
        await run.runner.follower.poll()
        run.runner.end.on_signal(signal.SIGINT)

    run.run(interrupt())
    (told,) = (words for words in run.screen.said if words.startswith("interrupted"))
    assert said in told and ("learners offer" in told) == (phase == "training")


def test_a_syncer_that_cannot_be_asked_has_nobody_to_drain_to(make_run: MakeRun) -> None:
    run = make_run()
    run.syncer.page, run.syncer.unheard = status_document(phase="training"), 1
    run.run(_interrupt(run, 0.1))
    assert run.outcome() == RunOutcome("interrupted", 130, "stopped by the user")


def test_a_drain_that_comes_to_its_end_is_told_by_the_syncers_phase(make_run: MakeRun) -> None:
    run = make_run()
    run.syncer.page = status_document(phase="training")

    async def drain() -> None:
        await _interrupt(run, 8.0)
        assert run.outcome() is None
        run.syncer.page = status_document(phase="suspended", message="stopped by the user")
        run.syncer.last_report = job_report(outcome="interrupted")
        await run.runner.follower.poll()

    run.run(drain())
    assert run.outcome() == RunOutcome("interrupted", 130, "stopped by the user")
    assert run.syncer.calls == [("announce", {"phase": "interrupted", "message": "stopped by the user"})]


def test_a_drain_that_stands_still_is_given_up_and_said_to_be(make_run: MakeRun) -> None:
    run = make_run()
    run.syncer.page = status_document(phase="training")
    run.run(_interrupt(run, DRAIN_SECONDS + 0.2))
    assert run.outcome() == RunOutcome("interrupted", 130, "stopped by the user")
    assert run.screen.said[-1].startswith("the job did not drain")


async def _interrupt(run: ScriptedRun, seconds: float) -> None:
    run.runner.end.on_signal(signal.SIGINT)
    await asyncio.sleep(seconds)


# ------------------------------------------------------------------ the last phase


@pytest.mark.parametrize(
    ("phase", "outcome", "code"),
    [("complete", "complete", 0), ("failed", "failed", 1), ("suspended", "interrupted", 130), ("deleted", "failed", 1)],
)
def test_the_last_phase_tells_the_outcome(make_run: MakeRun, phase: str, outcome: str, code: int) -> None:
    run = make_run()
    run.syncer.page = status_document(phase=phase, message="why")
    run.runner.supervisor.since_merge["east-0"] = 2
    run.runner.supervisor._last_errors["east-0"] = "no memory"
    run.run(run.runner.follower.poll())
    run.runner.end.decide_by_phase(phase)
    ended = run.outcome()
    assert ended is not None and (ended.outcome, ended.exit_code) == (outcome, code)
    assert ended.message == ("why" if code else "")
    assert ("no memory" in ended.note) == (outcome != "complete"), "replacements in vain explain an end before the stop"


def test_a_complete_job_whose_model_could_not_be_written_does_not_exit_with_0(make_run: MakeRun) -> None:
    run = make_run()
    output = {"uri": "s3://models/a", "state": "failed", "message": "no such bucket"}
    run.syncer.page = status_document(phase="complete", output=output)
    run.syncer.last_report = job_report(outcome="complete", output=output)
    run.run(run.runner.follower.poll())
    ended = run.outcome()
    assert ended is not None and (ended.outcome, ended.exit_code) == ("complete", 1)
    assert ended.message == "the merged model was not written to s3://models/a: no such bucket"


# ------------------------------------------------------------------ after the decision


@pytest.mark.parametrize(
    ("report", "leaves_after", "waited"),
    [
        ("complete", 4.0, 4.0),  # told by its syncer to leave
        ("complete", 1000.0, LEAVE_SECONDS),
        (None, 1000.0, 0.0),  # nobody has told them
    ],
)
def test_processes_may_leave_by_themselves_where_the_job_is_over(
    make_run: MakeRun, report: str | None, leaves_after: float, waited: float
) -> None:
    run = make_run()
    run.syncer.last_report = None if report is None else job_report(outcome=report)
    passed = list[float]()

    async def leave() -> None:
        await start_all(run)
        run.runner.end.decide(RunOutcome("interrupted", 130))
        loop = asyncio.get_running_loop()
        loop.call_later(leaves_after, run.runner.running.clear)
        began = loop.time()
        await run.runner.end.wait_for_exits()
        passed.append(loop.time() - began)

    run.run(leave(), seconds=2000.0)
    assert passed == pytest.approx([waited], abs=0.1)
    got: Report | None = run.runner.watch.report
    assert (None if got is None else got.outcome) == report, "the syncer is asked before it goes"


@pytest.mark.parametrize(("log_of", "told"), [("east-0", True), ("", False)])
def test_a_syncer_that_does_not_know_that_the_job_failed_is_told(make_run: MakeRun, log_of: str, told: bool) -> None:
    run = make_run()

    async def fail() -> None:
        await start_all(run)
        run.runner.end.decide(RunOutcome("failed", 1, "east-0 ended", log_of))
        await run.runner.end.wait_for_exits()

    run.run(fail())
    assert run.syncer.calls == ([("announce", {"phase": "failed", "message": "east-0 ended"})] if told else [])
