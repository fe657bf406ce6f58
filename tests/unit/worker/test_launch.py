"""The ranks of a learner: their environment, their output as one log, and how all end when one does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from free_ports import free_port
from patience import wait_until

EXIT = "import os, sys, time; rank = int(os.environ['RANK']); "
FOREVER = "import signal, pathlib; signal.signal(signal.SIGTERM, signal.SIG_IGN); "


IN_HASTE = """
import sys
import psutil
from diloco_worker.launch import __main__ as launch
launch.CAUSE_SECONDS = launch.END_SECONDS = 0.3
code = launch.main(sys.argv[1:])
print(code, len(psutil.Process().children()), flush=True)
"""


def run(program: str, *options: str) -> tuple[int, list[str]]:
    """A launch in a process of its own, as it forks: its result, and its log. It leaves no process."""
    words = [*(options or ("--processes", "2")), sys.executable, "-c", EXIT + program]
    ended = subprocess.run([sys.executable, "-c", IN_HASTE, *words], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    *lines, last = ended.stdout.splitlines()
    code, left = map(int, last.split())
    assert left == 0
    return code, lines


def test_ranks_have_the_environment_that_torchrun_gives() -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT"
    show = f"print(*(os.environ[name] for name in {names.split()!r}))"
    code, lines = run(show, "--processes", "2", "--pods", "2", "--pod", "1", "--master", "[fd00::1]:400")
    assert (code, sorted(lines)) == (0, ["[rank 2] 2 0 4 2 1 fd00::1 400", "[rank 3] 3 1 4 2 1 fd00::1 400"])


def test_the_log_says_whose_a_line_is_and_json_is_left_as_it_is() -> None:
    code, lines = run("print('{}'); print('a'); sys.stdout.write('b' * 10)")
    assert (code, sorted(lines)) == (0, sorted(["{}", "{}", "a", "b" * 10, "[rank 1] a", "[rank 1] " + "b" * 10]))


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("sys.exit(3 * rank)", 3),  # rank 0 ends well
        ("time.sleep(0.2 * rank); sys.exit((1, 6)[rank])", 6),  # who fails of another's end says less than the other
        ("rank or sys.exit(1); time.sleep(600)", 1),
        ("time.sleep(0.2 * rank); sys.exit((7, 1)[rank])", 1),  # the cause ended last
        ("rank and os.kill(os.getpid(), 11); time.sleep(600)", -11),
        (FOREVER + "rank and sys.exit(2); time.sleep(600)", 2),  # SIGTERM ends none that ignores it
    ],
)
def test_a_rank_that_fails_ends_all_and_its_code_is_the_learners(program: str, code: int) -> None:
    found, lines = run("print('word', rank); " + program)
    assert (found, lines[-1]) == (code, f"word {0 if 'rank or' in program else 1}")


SAY = "import signal; from diloco_worker.exit_hooks import write_termination_message as say; "
FOLLOW = "signal.signal(signal.SIGTERM, lambda *_: [say('another has ended'), sys.exit(1)]); rank or time.sleep(600); "


@pytest.mark.parametrize(
    ("program", "left"),
    [
        (FOLLOW + "say('the cause'); sys.exit(1)", "the cause"),
        (FOLLOW + "os.kill(os.getpid(), 9)", ""),
        ("rank or say('to be resumed')", "to be resumed"),
    ],
    ids=["cause", "killed", "leader"],
)
def test_the_pods_message_is_that_of_the_rank_that_failed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, left: str
) -> None:
    log = tmp_path / "termination-log"
    monkeypatch.setenv("DILOCO_TERMINATION_LOG", str(log))
    run(SAY + program)
    assert not log.exists(), "this is no pod"
    log.touch()
    run(SAY + program)
    assert log.read_text() == left


def start(program: str, tmp_path: Path) -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
    """A launch of two ranks, once each of them runs the program."""
    ready = f"import pathlib; pathlib.Path({str(tmp_path)!r}, str(rank)).touch(); "
    command = [sys.executable, "-m", "diloco_worker.launch", "--processes", "2", sys.executable, "-c"]
    process = subprocess.Popen([*command, EXIT + program.replace("READY", ready)])
    wait_until(lambda: len(os.listdir(tmp_path)) == 2)
    return process, psutil.Process(process.pid).children()


def test_sigterm_goes_to_every_rank_and_those_that_leave_well_are_no_failure(tmp_path: Path) -> None:
    drain = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); READY time.sleep(600)"
    process, _ = start(drain, tmp_path)
    process.terminate()
    assert process.wait() == 0


def test_no_rank_outlives_the_launch(tmp_path: Path) -> None:
    process, ranks = start(FOREVER + "READY time.sleep(600)", tmp_path)
    assert len(ranks) == 2
    process.kill()
    process.wait()
    wait_until(lambda: not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks))


def test_a_command_that_is_not_there_is_named() -> None:
    command = [sys.executable, "-m", "diloco_worker.launch", "--processes", "2", "no-such-program"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "no-such-program: No such file or directory; check the command" in ended.stderr


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


def test_the_first_process_of_a_container_ends_as_a_shell_would() -> None:
    """The kernel lets no process 1 end itself by a signal."""
    command = [sys.executable, "-m", "diloco_worker.launch", sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    if subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody make PID namespaces")
    assert subprocess.run(["unshare", "--pid", "--fork", *command], capture_output=True).returncode == 137
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
