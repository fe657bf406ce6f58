"""What follows when a process of a run ends, by how it ended and by what is known of the job."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import pytest

from diloco.local.chaos.fault_report import Injected
from diloco.processes.launch import StartError
from diloco.processes.supervisor import Exit
from diloco_protocol.common.program_errors import NEVER_JOINED
from scripted_run import ADDRESS, ScriptedRun
from status_documents import job_report, status_document

MakeRun = Callable[..., ScriptedRun]
KILLED = Exit(signal=signal.SIGKILL)


def keep(run: ScriptedRun, name: str, seconds: float = 60.0) -> None:
    run.run(run.runner.worker_keeper.keep(run.worker(name)), seconds=seconds)


# ------------------------------------------------------------------ the syncer


def test_a_syncer_that_finds_its_port_taken_gets_free_ones_once_and_that_is_no_replacement(make_run: MakeRun) -> None:
    run = make_run()
    run.syncer.place = dict(ADDRESS)
    run.script("syncer", Exit(code=2), Exit(code=2))
    run.run(run.runner.syncer_keeper.keep())
    first, second = (" ".join(process.command) for process in run.started("syncer"))
    assert "127.0.0.1:41" in first and "127.0.0.1:42" in first
    assert "127.0.0.1:41" not in second and "127.0.0.1:0" in second
    assert run.runner.supervisor.restarts == {}
    ended = run.outcome()
    assert ended is not None and ended.exit_code == 2 and ended.log_of == "syncer", "the job itself is wrong"


def test_a_syncer_listens_where_it_did_before(make_run: MakeRun) -> None:
    run = make_run()
    run.script("syncer", KILLED)
    run.syncer.place = dict(ADDRESS)
    run.run(run.runner.syncer_keeper.keep())
    assert ["127.0.0.1:43" in " ".join(process.command) for process in run.started("syncer")] == [True, True]
    assert run.runner.supervisor.restarts == {"syncer": 1}


def test_a_syncer_that_cannot_be_started_ends_the_run(make_run: MakeRun) -> None:
    run = make_run()
    run.script("syncer", StartError("syncer cannot be started: no memory"))
    run.run(run.runner.syncer_keeper.keep())
    ended = run.outcome()
    assert ended is not None and (ended.outcome, ended.exit_code) == ("failed", 1) and "no memory" in ended.message


@pytest.mark.parametrize(
    ("how", "told", "outcome"),
    [
        (Exit(code=0), "complete", "complete"),
        (Exit(code=1), "failed", "failed"),
        (Exit(code=0), "interrupted", "interrupted"),
        (Exit(code=1), "complete", "complete"),  # its own failure, after the end
        (Exit(code=0), None, None),  # somebody sent it SIGTERM
        (KILLED, "complete", None),  # perhaps before all of it was durable
    ],
)
def test_a_syncers_end_is_the_jobs_where_its_report_says_the_same(
    make_run: MakeRun, how: Exit, told: str | None, outcome: str | None
) -> None:
    run = make_run()
    run.syncer.place = dict(ADDRESS)
    if told is not None:
        run.runner.workdir.store.mkdir()
        (run.runner.workdir.store / "report.json").write_text(job_report(outcome=told).model_dump_json())
    run.script("syncer", how)
    run.run(run.runner.syncer_keeper.keep())
    ended = run.outcome()
    assert (None if ended is None else ended.outcome) == outcome
    assert len(run.started("syncer")) == (2 if outcome is None else 1)


def test_a_syncer_that_was_asked_to_interrupt_and_leaves_has_ended_the_job(make_run: MakeRun) -> None:
    run = make_run()
    run.script("syncer", Exit(code=0))
    run.runner.end._interrupts = 1
    run.run(run.runner.syncer_keeper.keep())
    ended = run.outcome()
    assert ended is not None and (ended.outcome, ended.exit_code) == ("interrupted", 130)


@pytest.mark.parametrize("ours", [True, False])
def test_a_syncer_that_the_run_killed_has_no_error_of_its_own(make_run: MakeRun, ours: bool) -> None:
    run = make_run()
    run.script("syncer", *([] if ours else [(2.0, KILLED)]))

    async def kill() -> None:
        await asyncio.sleep(2.0)
        if ours:
            run.runner.health.kill()

    run.run(run.runner.syncer_keeper.keep(), kill())
    assert len(run.started("syncer")) == 2
    assert run.runner.supervisor.has_failed("syncer") == (not ours)
    assert not run.runner.health.was_killed, "the next one was not"


# ------------------------------------------------------------------ workers


def test_a_worker_that_left_with_0_is_looked_for_once_more_before_it_is_said_never_to_have_joined(
    make_run: MakeRun,
) -> None:
    run = make_run()
    run.syncer.page = status_document(phase="training", standbys=["east-0.0"])  # nobody has looked yet
    run.script("east-0", Exit(code=0))
    keep(run, "east-0")
    assert run.screen.said and not any(NEVER_JOINED in text for text in run.screen.said)


def test_a_program_that_ends_without_having_joined_is_said_to(make_run: MakeRun) -> None:
    run = make_run()
    run.syncer.page = status_document(phase="training")
    run.script("east-0", Exit(code=0))
    keep(run, "east-0")
    assert f"east-0: {NEVER_JOINED}" in run.screen.said


@pytest.mark.parametrize(
    ("deterministic", "how", "starts"),
    [("true", Exit(code=0), 1), ("false", Exit(code=0), 2), ("true", Exit(code=3), 2), ("true", KILLED, 2)],
)
def test_a_deterministic_learner_that_leaves_has_done_its_share(
    make_run: MakeRun, deterministic: str, how: Exit, starts: int
) -> None:
    run = make_run(overrides=f"sync.deterministic={deterministic} sync.quorum=2")
    run.syncer.page = status_document(phase="training", standbys=["east-0.0"])
    run.script("east-0", how)
    keep(run, "east-0")
    assert len(run.starts) == starts


def test_a_learner_that_chaos_told_to_leave_does_not_come_back_to_a_job_that_ended_meanwhile(make_run: MakeRun) -> None:
    run = make_run()
    run.syncer.page = status_document(phase="draining")  # which nobody has heard yet
    run.script("east-0", (1.0, Exit(code=0)))
    run.runner.injector._open["east-0"] = 0
    run.runner.injector.done.append(Injected(0.0, 0.0, "term", "east-0", slot=None, incarnation=0, duration=0.0))
    keep(run, "east-0")
    assert len(run.starts) == 1


@pytest.mark.parametrize("phase", ["draining", "evaluating", "complete"])
def test_no_learner_comes_back_to_a_job_that_ends(make_run: MakeRun, phase: str) -> None:
    run = make_run()
    run.syncer.page = status_document(phase=phase)  # as is heard after the end of the process only
    run.script("east-0", Exit(code=1))
    keep(run, "east-0")
    assert len(run.starts) == 1


def test_the_syncer_is_told_of_a_learners_end_until_it_has_heard(make_run: MakeRun) -> None:
    run = make_run()
    run.syncer.page = status_document(phase="training")
    run.syncer.unheard = 6
    run.script("east-1", Exit(code=7))

    keep(run, "east-1", seconds=30.0)
    (method, body) = run.syncer.calls[0]
    assert method == "process-ended" and len(run.syncer.calls) == 1
    assert (body["region"], body["ordinal"], body["process"]) == ("east", 1, "east-1.0")
    assert body["reason"].startswith("exit code 7")


def test_a_worker_that_cannot_be_started_is_tried_again_after_a_while(make_run: MakeRun) -> None:
    run = make_run()
    run.syncer.page = status_document(phase="training")
    run.script("east-0", StartError("no memory"), StartError("no memory"))
    keep(run, "east-0")
    assert len(run.starts) == 1 and run.runner.supervisor.restarts == {"east-0": 2}
    assert run.syncer.calls == [], "there was no process"
    assert run.screen.said.count("no memory") == 2


def test_an_end_by_chaos_is_no_error_and_its_process_stays_away(make_run: MakeRun) -> None:
    run = make_run()
    run.syncer.page = status_document(phase="training")
    run.script("east-0", (1.0, KILLED))
    run.runner.injector._open["east-0"] = 0
    run.runner.injector.done.append(Injected(0.0, 0.0, "kill", "east-0", slot=None, incarnation=0, duration=20.0))
    run.runner.injector._away["east-0"] = 20.0
    keep(run, "east-0", seconds=19.0)
    assert len(run.starts) == 1 and not any("killed by" in text for text in run.screen.said)
    assert any("starting it again in 19.0 s" in text for text in run.screen.said)
    assert not run.runner.supervisor.has_failed("east-0")


# ------------------------------------------------------------------ decisions


def wrong(run: ScriptedRun, name: str) -> None:
    run.script(name, *[Exit(code=1)] * 9)
    run.runner.workdir.log(name).write_text("ValueError: no such model\n")


def test_learners_that_fail_alike_fail_the_job_once_no_other_can_merge(make_run: MakeRun) -> None:
    run = make_run(overrides="sync.quorum=1")
    run.syncer.page = status_document(phase="training")
    wrong(run, "east-0")
    keep(run, "east-0", seconds=600.0)
    assert run.outcome() is None, "the other one may yet join"
    wrong(run, "east-1")
    keep(run, "east-1", seconds=600.0)
    ended = run.outcome()
    assert ended is not None and (ended.outcome, ended.log_of) == ("failed", "east-1")


def test_who_is_in_the_quorum_makes_the_others_dispensable(make_run: MakeRun) -> None:
    run = make_run(overrides="sync.quorum=1")
    ends, spec = run.runner.worker_keeper.ends, run.worker("east-0")
    run.runner.supervisor._last_errors["east-1"] = "it failed once"
    assert not ends._is_dispensable(spec)

    async def sit() -> None:
        run.runner.running["east-1"] = await run.start_worker(run.worker("east-1"))
        run.syncer.page = status_document(phase="training", slots=run.sit("east-1"))
        await run.runner.follower.poll()

    run.run(sit())
    assert ends._is_dispensable(spec)
    run.runner.running.clear()
    assert not ends._is_dispensable(spec), "the one in the slot has ended"


@pytest.mark.parametrize("name", ["syncer", "east-0"])
def test_nothing_is_started_again_once_the_run_stops(make_run: MakeRun, name: str) -> None:
    run = make_run()
    run.syncer.page = status_document(phase="training")
    run.script(name, (1.0, KILLED), (1.0, KILLED))  # after the second end it waits

    async def stop() -> None:
        await asyncio.sleep(2.1)
        run.runner.end.stopping = True

    keeping = run.runner.syncer_keeper.keep() if name == "syncer" else run.runner.worker_keeper.keep(run.worker(name))
    run.run(keeping, stop())
    assert len(run.starts) == 2 and any(text.startswith(f"{name} ended") for text in run.screen.said)


def test_an_error_that_was_shown_is_named_again_with_its_count(make_run: MakeRun) -> None:
    run = make_run()
    run.syncer.page = status_document(phase="training")
    run.script("east-0", Exit(code=1), Exit(code=1))
    run.runner.workdir.log("east-0").write_text("")
    keep(run, "east-0")
    first, second = (text for text in run.screen.said if text.startswith("east-0 ended"))
    assert first.endswith("(exit code 1), starting it again at once")
    assert "; replacement 2 of at most" in second


OUTPUT = {"uri": "s3://models/a", "state": "writing", "message": ""}


@pytest.mark.parametrize("how", [Exit(code=1), KILLED])
def test_a_syncer_that_fails_while_it_writes_the_model_is_started_again(make_run: MakeRun, how: Exit) -> None:
    run = make_run()
    run.syncer.page = status_document(phase="complete", output=OUTPUT)
    run.syncer.last_report = job_report(outcome="complete", output=OUTPUT)
    run.script("syncer", (2.0, how))

    async def look() -> None:
        await run.runner.follower.poll()

    run.run(look(), run.runner.syncer_keeper.keep())
    assert run.outcome() is None and len(run.started("syncer")) == 2


@pytest.mark.parametrize(
    ("told", "how", "outcome"),
    [("complete", Exit(code=1), "complete"), ("failed", Exit(code=0), "failed"), ("failed", KILLED, "failed")],
)
def test_a_syncer_that_is_gone_after_the_end_of_the_job_was_heard_ends_the_run(
    make_run: MakeRun, told: str, how: Exit, outcome: str
) -> None:
    run = make_run()
    run.syncer.page = status_document(phase=told)  # its report could not be had
    run.script("syncer", (2.0, how))

    async def look() -> None:
        await run.runner.follower.poll()

    run.run(look(), run.runner.syncer_keeper.keep())
    ended = run.outcome()
    assert ended is not None and ended.outcome == outcome and len(run.started("syncer")) == 1
