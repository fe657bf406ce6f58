"""The ranks of a learner: their environment, their output as one log, and how all end when one does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from diloco_worker.launch import __main__ as launch
from free_ports import free_port
from patience import wait_until

EXIT = "import os, sys, time; rank = int(os.environ['RANK']); "
FOREVER = "import signal, pathlib; signal.signal(signal.SIGTERM, signal.SIG_IGN); "


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launch, "CAUSE_SECONDS", 0.3)
    monkeypatch.setattr(launch, "END_SECONDS", 0.3)
    before = {number: signal.getsignal(number) for number in launch.PASSED_ON}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(program: str, *options: str) -> int:
    return launch.main([*(options or ("--processes", "2")), sys.executable, "-c", EXIT + program])


def test_ranks_have_the_environment_that_torchrun_gives(capfd: pytest.CaptureFixture[str]) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT"
    show = f"print(*(os.environ[name] for name in {names.split()!r}))"
    assert run(show, "--processes", "2", "--pods", "2", "--pod", "1", "--master", "[fd00::1]:400") == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "[rank 2] 2 0 4 2 1 fd00::1 400",
        "[rank 3] 3 1 4 2 1 fd00::1 400",
    ]


def test_the_log_says_whose_a_line_is_and_json_is_left_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("print('{}'); print('a'); sys.stdout.write('b' * 10)") == 0
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == sorted(["{}", "{}", "a", "b" * 10, "[rank 1] a", "[rank 1] " + "b" * 10])


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("sys.exit(3 * rank)", 3),  # rank 0 ends well
        ("time.sleep(0.2 * rank); sys.exit((1, 6)[rank])", 6),  # who fails of another's end says less than the other
        ("rank or sys.exit(1); time.sleep(60)", 1),
        ("rank and os.kill(os.getpid(), 11); time.sleep(60)", -11),
        (FOREVER + "rank and sys.exit(2); time.sleep(60)", 2),  # SIGTERM ends none that ignores it
    ],
)
def test_a_rank_that_fails_ends_all_and_its_code_is_the_learners(
    program: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("print('word', rank); " + program) == code
    failed = 0 if code == 1 else 1
    assert capfd.readouterr().out.splitlines()[-1] == f"word {failed}"
    assert not psutil.Process().children()


def start(program: str, tmp_path: Path) -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
    """A launch of two ranks, once each of them runs the program."""
    ready = f"import pathlib; pathlib.Path({str(tmp_path)!r}, str(rank)).touch(); "
    command = [sys.executable, "-m", "diloco_worker.launch", "--processes", "2", sys.executable, "-c"]
    process = subprocess.Popen([*command, EXIT + program.replace("READY", ready)])
    wait_until(lambda: len(os.listdir(tmp_path)) == 2)
    return process, psutil.Process(process.pid).children()


def test_sigterm_goes_to_every_rank_and_those_that_leave_well_are_no_failure(tmp_path: Path) -> None:
    drain = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); READY time.sleep(60)"
    process, _ = start(drain, tmp_path)
    process.terminate()
    assert process.wait() == 0


def test_no_rank_outlives_the_launch(tmp_path: Path) -> None:
    process, ranks = start(FOREVER + "READY time.sleep(60)", tmp_path)
    assert len(ranks) == 2
    process.kill()
    process.wait()
    wait_until(lambda: not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks))


def test_a_command_that_is_not_there_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--processes", "2", "no-such-program"]) == 2
    assert "no-such-program: No such file or directory; check the command" in capfd.readouterr().err


SHOWN = """
import os, socket, time, urllib.request
print(*(os.environ[name] for name in ("DILOCO_ORDINAL", "RANK", "MASTER_ADDR", "MASTER_PORT")))
for _ in range(600):
    try:
        print(urllib.request.urlopen("http://127.0.0.1:{port}/readyz", timeout=30).status)
        break
    except OSError:  # the ranks are started first
        time.sleep(0.05)
"""


def test_a_pod_knows_its_learner_by_its_index(tmp_path: Path) -> None:
    """The fourth pod of learners of two pods is the second one of learner 1, and answers probes while its ranks run."""
    port = free_port()
    program = tmp_path / "shown.py"
    program.write_text(SHOWN.format(port=port))
    words = ["--processes", "1", "--pods", "2", "--master", "job-{first}.job", sys.executable, str(program)]
    environ = {**os.environ, "DILOCO_POD_INDEX": "3", "DILOCO_STATUS": f"127.0.0.1:{port}"}
    ended = subprocess.run([sys.executable, "-m", "diloco_worker.launch", *words], env=environ, capture_output=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.decode().splitlines() == ["[rank 1] 1 1 job-2.job 29500", "[rank 1] 200"]
