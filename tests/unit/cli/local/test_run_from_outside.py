"""``logs``, ``events``, ``report`` and ``status --watch`` of a run here, from another terminal than its own."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import RootModel
from typer.testing import CliRunner

from diloco.local.log_files import event_in, line_time
from diloco.main import app
from diloco.processes.workdir import Workdir, claim, locked
from diloco_protocol.common.http_server import HttpServer, json_page
from diloco_protocol.common.logs import JsonLines, TextLines
from diloco_protocol.spec.load import parse_job
from status_documents import job_report, status_document

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: tiny}
spec:
  learners: {command: [python, train.py]}
  regions: [{name: east, learners: 1}, {name: west, learners: 1, spares: 1}]
"""
AT = 1_700_000_000.0


def diloco(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def line(message: str, at: float, form: logging.Formatter, level: int = logging.INFO) -> str:
    """A line as our programs log it."""
    record = logging.LogRecord("diloco.part", level, "", 0, message, (), None)
    record.created, record.msecs = at, at % 1 * 1000
    return form.format(record) + "\n"


SYNCER = JsonLines({"job": "tiny"})
WORKER = TextLines()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Workdir]:
    """A run's directory with logs, whose runner is this process."""
    with locked(tmp_path / "run") as workdir:
        claim(workdir, parse_job(JOB), tmp_path)
        workdir.log("syncer").write_text(
            line("serving on 127.0.0.1:1, epoch 1", AT, SYNCER)
            + line("session 1: abc east-0 joins", AT + 1, SYNCER)
            + line("joined: east-0 took slot 0 at step 0", AT + 1.5, SYNCER)
            + line("process-ended: east-0: its process ended (SIGKILL)", AT + 6, SYNCER, logging.WARNING)
        )
        workdir.log("east-0").write_text(
            line("step 1", AT + 2, WORKER) + line("it broke", AT + 5, WORKER) + "Traceback (most recent call last):\n"
        )
        workdir.log("west-0").write_text(line("step 1", AT + 3, WORKER) + line("step 2", AT + 5.5, WORKER))
        yield workdir


def test_without_a_name_the_newest_run_is_meant(run: Workdir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.path.parent)
    code, said = diloco("logs")
    assert code == 2 and "there is no run below ./runs" in said
    (run.path.parent / "runs").mkdir()
    (run.path.parent / "runs" / "tiny").symlink_to(run.path)
    for command in ("logs", "events"):
        assert diloco(command) == diloco(command, run.path)
    code, said = diloco("report")
    assert code != 0 and "runs/tiny" in "".join(said.split()), said
    for command in ("logs", "report"):
        code, said = diloco(command, "--context", "hub")
        assert code == 2 and f"name the job in the cluster: diloco {command} JOB" in said


def test_the_logs_of_all_processes_are_merged_by_time(run: Workdir) -> None:
    code, said = diloco("logs", run.path)
    assert code == 0
    assert [(one.split()[0], one.rpartition(": ")[2]) for one in said.splitlines()] == [
        ("syncer", said.splitlines()[0].rpartition(": ")[2]),
        ("syncer", "abc east-0 joins"),
        ("syncer", "east-0 took slot 0 at step 0"),
        ("east-0", "step 1"),
        ("west-0", "step 1"),
        ("east-0", "it broke"),
        ("east-0", said.splitlines()[6].rpartition(": ")[2]),
        ("west-0", "step 2"),
        ("syncer", "its process ended (SIGKILL)"),
    ]
    assert "Traceback" in said.splitlines()[6] and "serving on" in said and '{"time"' not in said


def test_of_one_process_by_any_of_its_names(run: Workdir) -> None:
    said = {target: diloco("logs", run.path, target) for target in ("learner-1", "west-0", "west")}
    assert len(set(said.values())) == 1
    code, text = said["west-0"]
    assert code == 0 and "step 2" in text and "it broke" not in text and not text.startswith("west-0")
    code, text = diloco("logs", run.path, "learner-7")
    assert code == 2 and "has no learner-7; it has" in text and "west-0" in text
    names = [name.strip() for name in text.rpartition("it has ")[2].split(",")]
    assert [name for name in names if name != "evaluator"] == ["syncer", "east", "west", "east-0", "west-0", "west-1"]


def test_only_the_end_and_only_what_is_new(run: Workdir) -> None:
    assert diloco("logs", run.path, "--tail", "1")[1].count("\n") == 3
    now = time.time()
    with run.log("west-0").open("a") as log:
        log.write(line("step 3", now, WORKER))
    code, said = diloco("logs", run.path, "--since", "10m")
    assert code == 0 and "step 3" in said and said.count("\n") == 1
    raw = diloco("logs", run.path, "syncer", "--raw")[1]
    assert raw == run.log("syncer").read_text()


def test_what_is_for_pods_alone_is_said(run: Workdir) -> None:
    code, said = diloco("logs", run.path, "--previous")
    assert code == 2 and "--previous is for pods" in said
    code, said = diloco("logs", run.path.parent)
    assert code == 2 and "no run's directory" in said
    code, said = diloco("events", "No Such")
    assert code == 2 and "no run's directory" in said
    code, said = diloco("events", "tiny")
    assert code == 2 and "`diloco status tiny` shows the newest events" in said


def test_events_are_what_the_syncer_has_logged(run: Workdir) -> None:
    code, said = diloco("events", run.path)
    assert code == 0 and [one.split(None, 2)[2] for one in said.splitlines()] == [
        "serving       on 127.0.0.1:1, epoch 1",
        "joined        east-0 took slot 0 at step 0",
        "process-ended east-0: its process ended (SIGKILL)",
    ]
    events = [json.loads(one) for one in diloco("events", run.path, "--json")[1].splitlines()]
    assert [event["kind"] for event in events] == ["serving", "joined", "process-ended"]
    assert events[1]["message"] == "east-0 took slot 0 at step 0" and line_time(json.dumps(events[1])) == AT + 1.5


def test_a_hold_and_its_end_are_listed_once(run: Workdir) -> None:
    """As on the screen: the phase says both. Programs get each event."""
    with run.log("syncer").open("a") as log:
        for said in ("phase: holding: 1 of 2", "hold: 1 of 2", "phase: training: enough", "resume: enough"):
            entry = {"time": "2027-01-02T03:04:05.678Z", "level": "info", "slot": -1, "message": said}
            log.write(json.dumps(entry) + "\n")
    lines = diloco("events", run.path)[1].splitlines()
    assert [one.split()[2:4] for one in lines[3:]] == [["phase", "holding:"], ["phase", "training:"]]
    kinds = [json.loads(one)["kind"] for one in diloco("events", run.path, "--json")[1].splitlines()]
    assert kinds[3:] == ["phase", "hold", "phase", "resume"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"message": 3}',
        '{"message": "joinedness: x"}',
        '{"message": "session 1: x"}',
        "1",
        '{"time": 3}',
    ],
)
def test_lines_that_tell_of_no_event_and_have_no_time(text: str) -> None:
    assert event_in(text) is None and line_time(text) is None


def test_a_line_of_a_rank_has_the_time_that_it_says() -> None:
    line = "2026-11-28 18:00:00,250 INFO    diloco_worker: a word"
    assert line_time(f"[rank 1] {line}") == line_time(line) is not None


def test_a_run_is_followed_until_its_runner_is_gone(run: Workdir) -> None:
    """In a program of its own, as on another terminal: new lines and new files come as they are written."""
    assert run.runner() is not None
    program = [sys.executable, "-m", "diloco.main", "logs", str(run.path), "-f", "--tail", "1"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None and reader.stderr is not None
        shown = [reader.stdout.readline() for _ in range(3)]
        assert "process-ended" in "".join(shown)
        with run.log("west-0").open("a") as log:
            log.write(line("step 3 of a run that goes on", AT + 9, WORKER))
        assert "step 3 of a run" in reader.stdout.readline()
        run.log("west-1").write_text(line("I stand by", AT + 10, WORKER))
        assert "west-1" in reader.stdout.readline()
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        run.lock.write_text(f"{ended.pid}\n")
        assert reader.wait(30) == 0
        assert "is not running" in reader.stderr.read()
    assert run.runner() is None


# ------------------------------------------------------------------ report


def write_address(run: Workdir, http_port: int) -> None:
    other = "127.0.0.1:1"
    address = {"sync": other, "control": other, "http": f"127.0.0.1:{http_port}", "pid": os.getpid(), "epoch": 1}
    run.address.write_text(json.dumps(address))


async def test_the_report_of_a_run_under_way_is_its_syncers(run: Workdir) -> None:
    """As it stands; an earlier run's report beside it is not looked at."""
    now = job_report(outcome="running", merges=7)
    pages = {
        "/status": json_page(lambda: RootModel(status_document(job="tiny", phase="training").model_dump(mode="json"))),
        "/report": json_page(lambda: now),
    }
    server = HttpServer(pages)
    write_address(run, await server.start("127.0.0.1", 0))
    run.report.write_text(job_report(outcome="interrupted", merges=3).model_dump_json())
    program = [sys.executable, "-m", "diloco.main", "report", str(run.path), "--json"]
    done = await asyncio.to_thread(subprocess.run, program, capture_output=True, text=True, timeout=60)
    await server.stop()
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["outcome"], said["merges"]) == ("running", 7)


# ------------------------------------------------------------------ status --watch


def event(n: int, message: str, kind: str = "joined") -> dict[str, Any]:
    return {"n": n, "time": time.time() + 60, "kind": kind, "slot": 0, "incarnation": 1, "message": message}


@pytest.mark.parametrize(("phase", "code"), [("complete", 0), ("suspended", 0), ("failed", 1)])
async def test_a_run_is_watched_until_it_is_over(run: Workdir, phase: str, code: int) -> None:
    first = status_document(job="tiny", phase="training", step=3, versions=[1], events=[event(1, "east-0 took slot 0")])
    more = [event(1, "east-0 took slot 0"), event(2, "west-0 took slot 1")]
    last = status_document(job="tiny", phase=phase, step=9, versions=[2], events=more)
    told = [first]
    server = HttpServer({"/status": json_page(lambda: RootModel(told[-1].model_dump(mode="json")))})
    port = await server.start("127.0.0.1", 0)
    program = [sys.executable, "-m", "diloco.main", "status", str(run.path), "--watch"]
    text = ""
    with socket.create_server(("127.0.0.1", 0)) as mute:  # a syncer that does not answer yet
        mute.setblocking(False)
        write_address(run, mute.getsockname()[1])
        watcher = await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE)
        async with asyncio.timeout(100):
            (await asyncio.get_running_loop().sock_accept(mute))[0].close()
    write_address(run, port)
    assert watcher.stdout is not None
    async with asyncio.timeout(100):
        while "step 3" not in text and (shown := await watcher.stdout.readline()):
            text += shown.decode()
        told.append(last)  # now that it has shown the first: a look may be given up unread
        text += (await watcher.stdout.read()).decode()
        await watcher.wait()
    assert watcher.returncode == code, text
    assert text.count("joined: east-0 took slot 0") == 1 and text.count("joined: west-0 took slot 1") == 1
    assert "step 3" in text and "training" in text
    await server.stop()


def test_a_run_that_has_just_begun_is_said_to_be_running(run: Workdir) -> None:
    code, said = diloco("status", run.path)
    assert code == 2 and "is running, but its syncer does not answer yet: ask again" in said
    (row,) = json.loads(diloco("list", run.path.parent, "--json")[1])["items"]
    assert (row["state"], row["running"]) == ("starting", True)


def test_of_a_run_that_is_over_the_watch_shows_the_report(run: Workdir) -> None:
    run.report.write_text(job_report(outcome="failed").model_dump_json())
    code, said = diloco("status", run.path, "--watch")
    assert code == 1 and "its last report" in said and "failed" in said
    assert json.loads(diloco("status", run.path, "--watch", "--json")[1])["report"]["outcome"] == "failed"
