"""What a program in a pod leaves behind for who looks at the pod."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_protocol.vocabulary import ENDS_FOR_RESUME
from diloco_worker.exit_hooks import error_text, write_termination_message
from diloco_worker.settings import ConfigurationError
from patience import wait_for_end, wait_until


def test_a_word_is_left_where_a_kubelet_reads_it_and_nowhere_else(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"
    write_termination_message(ENDS_FOR_RESUME, path)
    assert not path.exists(), "this is no pod"
    path.touch()
    write_termination_message(ENDS_FOR_RESUME, path)
    assert path.read_text() == ENDS_FOR_RESUME


def raised(raises: str) -> BaseException:
    try:
        exec(raises, {})
    except BaseException as error:
        return error
    raise AssertionError("it raised nothing")


@pytest.mark.parametrize(
    ("raises", "last"),
    [
        ("lss", "NameError: name 'lss' is not defined"),
        ("raise RuntimeError('Error in loading:\\n\\tsize mismatch')", "RuntimeError: Error in loading:"),
    ],
)
def test_of_an_error_the_end_of_its_traceback_is_left_and_last_the_error(raises: str, last: str) -> None:
    lines = error_text(raised(raises)).splitlines()
    assert lines[-1] == last and any("in <module>" in line for line in lines) and len(lines) <= 11


def test_of_an_error_of_this_library_its_message_is_left() -> None:
    assert error_text(ConfigurationError("name another model:\n  gpt2")) == "name another model: gpt2"


def test_of_a_long_text_the_end_is_left(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"
    path.touch()
    write_termination_message("x" * 10_000 + "\nthe error", path)
    assert path.stat().st_size == 4096 and path.read_text().endswith("\nthe error")


@pytest.mark.promise(
    "In a cluster a program that always ends with the same error fails the job, with the error in "
    "termination message, condition, Event and report; not while a quorum takes part without that "
    "learner, and not after an edit"
)
@pytest.mark.parametrize(
    ("program", "code", "left"),
    [
        (
            "import diloco_worker.exit_hooks as hooks\nhooks.install()\ndef step():\n    return lss\nstep()\n",
            1,
            "in step",
        ),
        ("import diloco_worker.exit_hooks as hooks\nhooks.install(json=True)\n1 / 0\n", 1, "ZeroDivisionError"),
        ("import sys\nfrom diloco_worker.__main__ import main\nsys.exit(main())\n", 2, "DILOCO_JOB_FILE"),
    ],
    ids=["own loop", "own loop, json", "the built-in program"],
)
def test_a_program_that_fails_leaves_its_error_where_the_pod_says(
    tmp_path: Path, program: str, code: int, left: str
) -> None:
    log = tmp_path / "said-at-the-end"
    log.touch()
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "DILOCO_TERMINATION_LOG": str(log)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    assert left in log.read_text() and log.read_text().strip() == log.read_text()


CONSEQUENCE = """
import diloco_worker.exit_hooks as hooks
from diloco_protocol.vocabulary import WorkerExit
from diloco_worker.settings import WorkerError
class Broken(WorkerError):
    exit_code = WorkerExit.GROUP
hooks.install()
raise Broken("another rank has ended")
"""


def end_as_consequence(log: Path) -> subprocess.Popen[bytes]:
    """A rank that ends because another has."""
    return subprocess.Popen([sys.executable, "-c", CONSEQUENCE], env={**os.environ, "DILOCO_TERMINATION_LOG": str(log)})


def test_who_ends_because_another_rank_has_leaves_its_message_alone(tmp_path: Path) -> None:
    """Ranks that torchrun has started, in one pod: a cause takes the place of a consequence, and never the reverse."""
    log = tmp_path / "termination-log"
    log.touch()
    assert wait_for_end(end_as_consequence(log)) == 7
    assert log.read_text() == "another rank has ended", "of a pod whose ranks all end of another pod's"
    write_termination_message("the cause", log)
    assert wait_for_end(end_as_consequence(log)) == 7
    assert log.read_text() == "the cause"


def test_of_two_messages_at_the_same_time_the_cause_stays(tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    with log.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # a rank is about to write the cause
        rank = end_as_consequence(log)
        waits = f"-> FLOCK  ADVISORY  WRITE {rank.pid} "
        wait_until(lambda: waits in Path("/proc/locks").read_text(), "the other rank to wait for it", rank)
        file.write("the cause")
    assert wait_for_end(rank) == 7
    assert log.read_text() == "the cause"
