"""``diloco run`` end to end: real learners on real text, real processes, real faults."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from runs import Run, check_ledger
from typer.testing import CliRunner

from diloco.main import app
from diloco_protocol.wire import channels, limits, sync_pb2

pytestmark = pytest.mark.timeout(500)  # each waits with its own limits, which name what did not come


# report.json is read by other programs: these names stay.
NAMES = {
    "schema",
    "outcome",
    "seed",
    "spec_digest",
    "layout_digest",
    "wall_seconds",
    "steps",
    "merges",
    "versions",
    "tokens",
    "ledger",
    "goodput",
    "uptime",
    "initial_loss",
    "final_loss",
    "training_loss",
    "message",
    "eval_loss",
    "bytes_up",
    "bytes_down",
    "regions",
    "learners",
    "faults",
    "holds",
    "syncer",
}
INNER = {
    "versions": {"min", "max"},
    "tokens": {"trained", "merged", "pending", "dropped"},
    "ledger": {"fragment", "merged", "pending", "dropped", "reasons", "imbalance"},
    "learners": {
        "slot",
        "learner",
        "retired",
        "incarnations",
        "steps",
        "tokens",
        "compute_seconds",
        "stalled_seconds",
        "merged_pushes",
        "bytes_up",
        "bytes_down",
    },
    "regions": {"name", "bytes_up", "bytes_down", "wire_bytes_up", "wire_bytes_down"},
    "faults": {
        "at_seconds",
        "time",
        "lasts_seconds",
        "action",
        "target",
        "detected_seconds",
        "joined_seconds",
        "first_step_seconds",
        "recovered_seconds",
    },
    "holds": {"from_seconds", "to_seconds"},
    "syncer": {"epoch", "restarts", "peak_rss_bytes"},
}


def names_are_kept(report: dict[str, Any]) -> None:
    assert set(report) >= NAMES
    for name, inner in INNER.items():
        rows = report[name] if isinstance(report[name], list) else [report[name]]
        assert all(set(row) == inner for row in rows), report[name]
    assert all(len(row) == 2 for row in report["eval_loss"])


def answer_to_a_stranger(run: Run) -> grpc.StatusCode:
    """Of the syncer, to another user of this machine, who has everything but the run's files."""
    run.until((run.workdir / "address.json").exists)
    address = json.loads((run.workdir / "address.json").read_text())["sync"]
    join = sync_pb2.Join(format=limits.FORMAT, job="tiny", process="ab" * 8, region="local", layout_digest="a" * 64)
    with grpc.insecure_channel(address, options=channels.channel_options()) as channel:
        call = channel.stream_stream(channels.SESSION)(
            iter([sync_pb2.LearnerMessage(join=join).SerializeToString()]), timeout=60, wait_for_ready=True
        )
        try:
            list(call)
        except grpc.RpcError as error:
            return error.code()  # type: ignore[attr-defined, no-any-return]
    return grpc.StatusCode.OK


@pytest.mark.promise(
    "Other users of the machine get only the status page of a `diloco run`: they lack the join token",
    section="Hostile callers",
)
@pytest.mark.promise(
    "After Ctrl-C the same command continues a run from its checkpoint to its end, and its report, files "
    "and exported model are whole"
)
@pytest.mark.slow
@pytest.mark.ci
def test_an_interrupted_job_goes_on_to_its_end_and_what_it_leaves_is_whole(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start(steps=100_000)
    assert answer_to_a_stranger(run) is grpc.StatusCode.UNAUTHENTICATED
    run.waits_for("first-merge: local-1")
    status = run.live_status()
    assert status["phase"] == "training" and len(status["slots"]) == 2
    children = run.children()
    run.process.send_signal(signal.SIGINT)
    assert run.ends() == 130, run.everything()
    assert "did not drain" not in run.output, run.everything()
    assert not [child for child in children if child.is_running()]
    interrupted = run.report()
    assert interrupted["outcome"] == "interrupted"
    check_ledger(interrupted)
    assert all(row["reasons"].get("died", 0) == 0 for row in interrupted["ledger"]), interrupted["ledger"]
    steps = interrupted["steps"]

    again = start("--set", f"training.stop.steps={steps + 100}")
    assert again.ends() == 0, again.everything()
    assert re.search(rf"continuing from the checkpoint in \S+: step {steps}, [\d,]+ merges", again.output), again.output
    report = again.report()
    assert report["tokens"]["trained"] > interrupted["tokens"]["trained"]
    names_are_kept(report)
    assert report["schema"] == 1 and report["outcome"] == "complete" and report["seed"] == 0
    # Steps take 10 ms: how many merges fit between them depends on how busy this machine is.
    assert report["steps"] >= steps + 100 and report["merges"] >= 8 and report["versions"]["min"] >= 1
    assert report["final_loss"] < report["initial_loss"] - 0.5
    assert report["syncer"]["restarts"] == 0 and report["syncer"]["peak_rss_bytes"] > 10 << 20
    assert report["faults"] == [] and len(report["learners"]) == 2
    assert 0 < report["goodput"] <= 1 and report["bytes_up"] > 0 and report["bytes_down"] > 0
    # Every byte is somebody's: learners' and the evaluator's.
    for way in ("bytes_up", "bytes_down"):
        assert sum(row[way] for row in report["regions"]) == report[way]
        assert sum(row[way] for row in report["learners"]) <= report[way]
    assert report["regions"][0]["name"] == "local" and report["regions"][0]["bytes_up"] > 0
    assert all(row["wire_bytes_up"] is None for row in report["regions"]), "without certificates nobody knows"
    check_ledger(report)
    rows = [json.loads(line) for line in (run.workdir / "metrics.jsonl").read_text().splitlines()]
    assert {"status", "local-0", "local-1"} <= {row["source"] for row in rows}
    assert list((run.workdir / "tensorboard").glob("events*"))
    assert run.workdir.stat().st_mode & 0o077 == 0
    for key in ("control.key", "join-token"):
        assert (run.workdir / key).stat().st_mode & 0o077 == 0
    assert run.status()["report"]["outcome"] == "complete"

    out = tmp_path / "model"
    exported = CliRunner().invoke(app, ["export", str(run.workdir), str(out)])
    assert exported.exit_code == 0, exported.output
    said = re.search(
        r"with the cache, end token 0; loss ([\d.]+) nats .*; the job's last score: ([\d.]+)", exported.output
    )
    assert said is not None and float(said[1]) == pytest.approx(float(said[2]), rel=0.01), exported.output
    assert float(said[2]) == pytest.approx(run.report()["final_loss"], abs=1e-4)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(out)
    assert sum(parameter.numel() for parameter in model.parameters()) > 10_000


@pytest.mark.slow
def test_a_complete_job_stays_so_and_goes_on_to_a_later_stop(start: Callable[..., Run]) -> None:
    run = start(steps=120)
    assert run.ends() == 0, run.everything()
    report = run.report()

    again = start(steps=120)  # the job is complete: nothing is trained, that is said, and its report is kept
    assert again.ends() == 0, again.everything()
    assert "the job is complete already" in again.output and "local-0 ended" not in again.output
    assert again.report() == report

    # More than were made: on a busy machine learners make many steps of 10 ms until they hear of the end.
    further_steps = report["steps"] + 30
    more = start("--set", f"training.stop.steps={further_steps}")
    assert more.ends() == 0, more.everything()
    assert "continuing from the checkpoint" in more.output
    assert more.report()["steps"] >= further_steps
    check_ledger(more.report())
    # The first end's score is a point of the curve now, and the new end has its own.
    curve, further = report["eval_loss"], more.report()["eval_loss"]
    assert curve[-1][1] == report["final_loss"] and further[-1][1] == more.report()["final_loss"]
    last = len(curve) - 1
    assert further[:last] == curve[:last] and further[-1][0] > curve[-1][0]
    # The new evaluator scores that model once more: as of the tokens that were trained by the time it had joined.
    assert further[last][0] >= curve[last][0] and further[last][1] == curve[last][1]
    assert len({tuple(row) for row in further}) == len(further)


@pytest.mark.promise(
    "A run survives a kill, a SIGTERM, a pause, a cut link and a killed syncer, and its report has what "
    "each of them cost"
)
@pytest.mark.slow
@pytest.mark.ci
def test_faults_are_survived_and_accounted_for(start: Callable[..., Run]) -> None:
    """Merges take both learners, and one alone makes at most four rounds of steps: so the steps between two faults are
    made only after the first of them is recovered from."""
    chaos = (
        "step=40:kill:local-1,step=120:term:learner-0,step=200:pause:local-1:1s,"
        "step=300:cut:local-0:1s,step=800:kill:syncer,9999s:kill:learner"
    )
    run = start("--chaos", chaos, "--set", "sync.quorum=2", steps=100_000)
    run.waits_for("chaos: kill syncer")

    def is_recovered() -> bool:
        status = run.live_status()
        return status["epoch"] == 2 and status["step"] >= 900

    run.until(is_recovered)
    run.process.send_signal(signal.SIGINT)
    assert run.ends() == 130, run.everything()
    report = run.report()
    assert report["outcome"] == "interrupted", run.everything()
    faults = {(fault["action"], fault["target"]): fault for fault in report["faults"]}
    assert set(faults) == {
        ("kill", "local-1"),
        ("term", "local-0"),
        ("pause", "local-1"),
        ("cut", "local-0"),
        ("kill", "syncer"),
    }, run.everything()
    for name in (("kill", "local-1"), ("term", "local-0"), ("cut", "local-0"), ("kill", "syncer")):
        fault = faults[name]
        times = [fault[f"{key}_seconds"] for key in ("detected", "joined", "first_step", "recovered")]
        assert None not in times, (fault, run.everything())
        # Who was cut off while it waited for a merge has one before its next step.
        order = [*times[:2], min(times[2:])] if name[0] == "cut" else times
        assert order == sorted(order), fault
    assert report["syncer"]["restarts"] == 1 and report["syncer"]["epoch"] == 2
    names_are_kept(report)
    assert "chaos: 9999s:kill:learner was never reached" in run.output
    assert "chaos: kill local-1" in run.output and "process-ended:" in run.output and "joined:" in run.output
    check_ledger(report)
    assert all(row["reasons"].get("drain", 0) == 0 for row in report["ledger"]), report["ledger"]
    assert report["eval_loss"][-1][1] < report["initial_loss"] - 0.5


def stop_workers(run: Run) -> list[psutil.Process]:
    """Stop all processes of a run but the syncer, which waits for the learners; all of its processes."""
    children = run.children()
    for child in children:
        if "diloco_syncer" not in child.cmdline():
            child.send_signal(signal.SIGSTOP)
    return children


PATIENT = ("--set", "sync.heartbeat.timeoutSeconds=100")  # a learner that stands still is waited for


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once(start: Callable[..., Run]) -> None:
    run = start(*PATIENT, steps=100_000)
    run.waits_for("first-merge: local-1")
    children = stop_workers(run)  # nobody offers anything
    for _ in range(2):
        run.process.send_signal(signal.SIGINT)  # at once again: the group's copy of the first
    run.waits_for("interrupted")
    first = time.monotonic()
    run.until(lambda: time.monotonic() > first + 1.1)
    assert "stopping at once" not in run.output
    run.process.send_signal(signal.SIGINT)
    assert run.ends() == 130, run.everything()
    assert "stopping at once" in run.output
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


@pytest.mark.slow
@pytest.mark.parametrize("offers", [False, True])  # of local-0; local-1 is in no condition to
def test_a_hard_end_reports_what_the_job_continues_with(start: Callable[..., Run], offers: bool) -> None:
    chaos = ("--chaos", "step=60:pause:local-1:100s") if offers else ()
    run = start(*PATIENT, *chaos, steps=100_000)
    run.waits_for("chaos: pause local-1" if offers else "first-merge: local-1")
    if offers:  # what is written comes before the signal, which the fork server sends
        run.until(lambda: any(child.status() == psutil.STATUS_STOPPED for child in run.children()))
    else:
        stop_workers(run)
    run.process.send_signal(signal.SIGINT)
    run.waits_for("local-0 left with its work offered" if offers else "interrupted")
    first = time.monotonic()
    run.until(lambda: time.monotonic() > first + 1.1)  # signals within a second count as one
    run.process.send_signal(signal.SIGINT)
    assert run.ends() == 130, run.everything()
    ended = run.report()
    check_ledger(ended)
    assert bool(ended["tokens"]["pending"]) == offers, run.everything()
    assert ("merged when the job continues" in run.output) == offers
    if lost := ended["tokens"]["dropped"]:
        assert "were not offered, and are lost when the job continues" in run.output, (lost, run.output)

    again = start("--set", f"training.stop.steps={ended['steps'] + 60}")
    assert again.ends() == 0, again.everything()
    assert f"{ended['merges']:,} merges, {ended['tokens']['trained']:,} tokens" in again.output, again.output
    for row, before in zip(again.report()["ledger"], ended["ledger"], strict=True):
        assert row["reasons"].get("died", 0) == before["reasons"].get("died", 0), again.everything()


@pytest.mark.promise(
    "If the runner is killed, all its processes end, and the same command continues from the checkpoint"
)
@pytest.mark.slow
@pytest.mark.ci
def test_killing_the_runner_leaves_no_orphan(start: Callable[..., Run]) -> None:
    run = start(steps=100_000)
    run.waits_for("first-merge: local-1")
    children = run.children()
    assert len(children) >= 5  # fork server, syncer, two learners, evaluator
    run.process.kill()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, [child.cmdline() for child in alive]
    again = start("--set", "training.stop.steps=40")
    assert again.ends() == 0, again.everything()
    assert "continuing from the checkpoint" in again.output

    # The report of that end is no report of the next run, which is killed.
    further = start("--set", "training.stop.steps=100000")
    further.until(lambda: not (further.workdir / "report.json").exists())
    children = further.children()
    further.process.kill()
    further.process.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    assert further.status()["report"]["outcome"] == "killed"


@pytest.mark.slow
def test_what_a_command_started_goes_with_it(start: Callable[..., Run], tmp_path: Path) -> None:
    marker = f"seconds-{os.getpid()}-{time.monotonic_ns()}"
    script = tmp_path / "learner.sh"
    script.write_text(f"sh -c 'exec sleep 600' {marker} &\necho started in $(pwd) $DILOCO_ROLE\nwait\n")
    run = start(change="  learners: {command: [sh, learner.sh]}\n")
    log = run.workdir / "logs" / "local-0.log"
    run.until(lambda: log.exists() and f"started in {tmp_path} learner" in log.read_text())

    def sleeps(process: psutil.Process) -> bool:
        try:
            return process.name() == "sleep"
        except psutil.NoSuchProcess:  # a shell's, for $(pwd)
            return False

    run.until(lambda: any(sleeps(child) for child in run.children()))
    children = run.children()
    run.process.kill()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, [child.cmdline() for child in alive]


def test_learners_that_cannot_live_fail_the_job(start: Callable[..., Run]) -> None:
    change = "  learners: {command: [sh, -c, 'echo broken on purpose; exit 7']}\n"
    run = start("--set", "training.evaluation=null", change=change)
    assert run.ends() == 1, run.everything()
    assert "failurePolicy.maxReplacements, 3" in run.output and "broken on purpose" in run.output
    assert "Traceback" not in run.output
    assert run.report()["outcome"] == "failed"
    assert not psutil.pid_exists(run.process.pid)


OWN_LOOP = ("training.evaluation=null", "training.model=null", "training.data=null")  # the program has its own
DIVERGING = """
import torch
import diloco_worker

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with diloco_worker.Learner.from_environment(model, optimizer) as learner:
    for step in learner.steps():
        with torch.no_grad():
            model.weight[0, 0] = torch.nan
        learner.after_step(tokens=1, loss=1.0)
"""


@pytest.mark.promise("A job that always diverges fails after `maxReplacements`, with the reason")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_that_always_diverges_fails_after_max_replacements(start: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "diverging.py").write_text(DIVERGING)
    change = "  learners: {command: [python, diverging.py]}\n"
    settings = (
        *OWN_LOOP,
        "failurePolicy.maxReplacements=1",
        "training.stop.steps=100000",  # never reached: a report of the first steps may come before their learner ends
    )
    run = start(*(word for one in settings for word in ("--set", one)), learners=1, change=change)
    assert run.ends() == 1, run.everything()
    assert "exit code 5" in run.output and "training diverged: fragment" in run.output, run.everything()
    assert "failurePolicy.maxReplacements: 1" in run.output
    assert run.report()["outcome"] == "failed" and run.report()["merges"] == 0


STANDING_AFTER_THE_STOP = """
import time
from pathlib import Path
import torch
import diloco_worker

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with diloco_worker.Learner.from_environment(model, optimizer) as learner:
    for step in learner.steps():
        if not Path("lived").exists():
            Path("lived").touch()
            raise RuntimeError("in its first life")
        time.sleep(0.5 if step < 2 else 600)  # more than a heartbeat's interval: each step is reported
        learner.after_step(tokens=1, loss=1.0)
"""


@pytest.mark.slow
def test_a_stop_reached_without_a_merge_fails_the_job(start: Callable[..., Run], tmp_path: Path) -> None:
    """Exit code 0 would say that the model which the job began with is a trained one."""
    (tmp_path / "standing.py").write_text(STANDING_AFTER_THE_STOP)
    change = "  learners: {command: [python, standing.py]}\n"
    settings = (*OWN_LOOP, "training.stop.steps=2", "sync.every=1000")
    run = start(*(word for one in settings for word in ("--set", one)), learners=1, change=change)
    run.waits_for("draining: the stop is reached")
    for child in run.children():  # the learner, and the process that watches over it
        with suppress(psutil.NoSuchProcess):
            if "standing.py" in child.cmdline():
                child.kill()
    assert run.ends() == 1, run.everything()
    report = run.report()
    assert report["outcome"] == "failed" and report["merges"] == 0
    assert report["message"].startswith("the stop is reached, and nothing was merged"), report["message"]
    assert "local-0 was replaced 1 time, at last for: RuntimeError: in its first life" in report["message"]
    assert f"error: {report['message']}" in run.output, run.everything()


def test_data_that_is_not_there_is_the_users_error(start: Callable[..., Run]) -> None:
    run = start("--set", "training.data.paths=[absent.txt]")
    assert run.ends() == 2, run.everything()
    assert "absent.txt" in run.output and "Traceback" not in run.output, run.output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_of_which_not_even_one_learner_fits_is_not_started(start: Callable[..., Run]) -> None:
    run = start(
        "--set", "training.model.config.hidden_size=160000", "--set", "training.model.config.num_hidden_layers=9"
    )
    assert run.ends() == 2, run.everything()
    assert run.output.startswith("checking tiny\n") and "starting" not in run.output, run.output
    assert "the job needs at least about" in run.output and "fewer learners" not in run.output
    assert not run.workdir.exists()


def test_a_port_in_use(start: Callable[..., Run]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        run = start("--http", address)
        assert run.ends() == 2
    assert f"--http {address}: cannot listen there" in run.output and "Traceback" not in run.output
