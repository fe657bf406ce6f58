"""`.ci/run`: the first part that fails ends it, realtime tests have a second chance, background work gives way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from patience import wait_until
from repository import ROOT
from unstable import MOST, open_lines, reason_for_red

PARTS = ("static", "quick", "worlds", "programs", "cluster", "regions")

# ------------------------------------------------------------------ what fails at once, and what is tried again


@pytest.mark.parametrize(
    ("is_realtime", "earlier", "open_count", "words"),
    [
        (True, [], 0, None),
        (True, ["a", "b"], 1, None),
        (True, ["a", "b", "this"], 0, None),
        (False, [], 0, "deterministic"),
        (True, ["a", "b", "c"], 0, "3 others"),
        (True, [], 2, "no mend"),
    ],
)
def test_which_failure_is_red_at_once(
    is_realtime: bool, earlier: list[str], open_count: int, words: str | None
) -> None:
    why = reason_for_red("this", is_realtime, earlier, {"this": open_count})
    assert (why is None) == (words is None) and (words is None or words in str(why))
    assert MOST == 3


def test_a_mended_line_is_not_open() -> None:
    lines = [json.dumps({"test": "a", "commit": "1", "cause": "c", "mend": mend}) for mend in (None, "2", None)]
    assert open_lines([*lines, ""]) == {"a": 2}


def test_the_lines_of_unstable_tests_are_whole() -> None:
    for line in (ROOT / "tests" / "unstable.jsonl").read_text().splitlines():
        entry = json.loads(line)
        assert entry.keys() == {"test", "commit", "cause", "mend"} and entry["cause"], line
        assert (ROOT / entry["test"].partition("::")[0]).is_file(), line


# A copy of the plugin's registration, and tests whose outcome a file says.
CONFTEST = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from unstable import register_second_chances as pytest_configure
"""
TESTS = """
from pathlib import Path
import pytest

count = Path(__file__).with_name("count")

@pytest.mark.realtime
def test_fails_at_first():
    count.write_text(count.read_text() + "x" if count.exists() else "x")
    assert len(count.read_text()) > 1

def test_passes():
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = realtime: x\n")
    (tmp_path / "test_it.py").write_text(TESTS)
    return tmp_path


def run_pytest(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words],
        cwd=folder,
        env={**environment, "UNSTABLE": str(folder / "unstable")},
        capture_output=True,
        text=True,
        check=False,
    )


def judge_again(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / ".ci" / "again.py"), str(folder / "unstable")],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_realtime_test_that_failed_once_is_unstable(folder: Path, workers: str) -> None:
    done = run_pytest(folder, "-n", workers)
    assert done.returncode == 0 and "1 failed, 1 passed" in done.stdout, done.stdout
    (line,) = (folder / "unstable" / "failed.jsonl").read_text().splitlines()
    assert "assert" in Path(json.loads(line)["log"]).read_text()
    again = judge_again(folder)
    assert again.returncode == 0, again.stdout
    (said,) = (folder / "unstable" / "lines").read_text().splitlines()
    assert said.startswith("UNSTABLE: test_it.py::test_fails_at_first, load ")
    assert (folder / "count").read_text() == "xxxx", "once, and three times alone"


def test_one_that_fails_again_is_red(folder: Path) -> None:
    (folder / "test_it.py").write_text(TESTS.replace("> 1", "== 2"))  # passes the first time of three
    assert run_pytest(folder).returncode == 0
    again = judge_again(folder)
    assert again.returncode == 1 and "FAILED: test_it.py::test_fails_at_first" in again.stdout
    assert "passed 1 of 3" in again.stdout


def test_a_deterministic_failure_is_red_at_once(folder: Path) -> None:
    (folder / "test_it.py").write_text(TESTS.replace("    pass", "    assert False"))
    done = run_pytest(folder)
    assert done.returncode == 1 and "fails the run: it is deterministic" in done.stdout, done.stdout


def test_a_fourth_realtime_failure_is_red(folder: Path) -> None:
    many = "@pytest.mark.realtime\n@pytest.mark.parametrize('n', range(4))\ndef test_n(n):\n    assert False\n"
    (folder / "test_it.py").write_text("import pytest\n" + many)
    done = run_pytest(folder)
    assert done.returncode == 1 and "3 others are to be tried again already" in done.stdout, done.stdout


@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_is_skipped_for_want_of_something_is_red(
    folder: Path, workers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    (folder / "conftest.py").write_text(CONFTEST + "from skips import pytest_runtest_makereport\n")
    (folder / "test_it.py").write_text(TESTS.replace("    count", "    pytest.skip('no cluster')\n    count"))
    done = run_pytest(folder, "-n", workers)
    assert done.returncode == 1 and "fails the run" in done.stdout, done.stdout


# ------------------------------------------------------------------ the order of parts

STUB = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >>"$CALLS"
for word in $FAILING; do case "$*" in *"$word"*) exit 1;; esac; done
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The scripts of the gate, with programs that only write down that they were called."""
    for name in (".ci/run", ".ci/again.py", "tools/in_background.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("bin/make", ".venv/bin/python"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(STUB)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def run_gate(clone: Path, failing: str = "") -> tuple[int, str, list[str]]:
    """Its exit code, what it printed, and the commands that it ran."""
    calls = clone / "calls"
    environment = os.environ | {
        "PATH": f"{clone / 'bin'}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "FAILING": failing,
        "LOCALKUBE": "true",
    }
    done = subprocess.run(
        [clone / ".ci" / "run"], cwd=clone, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines()


def begun(output: str) -> list[str]:
    return [line.split()[1] for line in output.splitlines() if line.startswith("=== ") and "at most" in line]


@pytest.mark.realtime
def test_all_parts_in_order(clone: Path) -> None:
    code, output, calls = run_gate(clone)
    assert code == 0, output
    assert begun(output) == list(PARTS)
    assert [call.split()[1] for call in calls if call.startswith("make")][:2] == ["setup", "lint"]
    assert "make images" in calls and any(call.startswith("make test ") for call in calls)
    *_, last = [index for index, line in enumerate(output.splitlines()) if line.startswith("regions ")]
    assert all(f"{part} " in output.splitlines()[last - len(PARTS) + 1 + place] for place, part in enumerate(PARTS))


@pytest.mark.realtime
@pytest.mark.parametrize(
    ("failing", "ended_by"),
    [("lint", "static"), ("ignore", "quick"), ("worlds", "worlds"), ("test-slow", "programs"), ("images", "cluster")],
)
def test_the_first_red_part_ends_it(clone: Path, failing: str, ended_by: str) -> None:
    code, output, _ = run_gate(clone, failing)
    assert code == 1 and f"FAILED: {ended_by}" in output, output
    assert begun(output) == list(PARTS[: PARTS.index(ended_by) + 1])


# ------------------------------------------------------------------ priority

BURN = "while True: pass"


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.realtime
@pytest.mark.alone
@pytest.mark.skipif(sys.platform != "linux", reason="the scheduler's groups are Linux's")
def test_work_in_the_background_gives_way_to_another_session() -> None:
    """Both want the same processor. Of two sessions with equal weight each would get half."""
    processor = min(os.sched_getaffinity(0))
    command = [sys.executable, "-c", f"import os\nos.sched_setaffinity(0, {{{processor}}})\n{BURN}"]
    usual = subprocess.Popen(command, start_new_session=True)
    behind = subprocess.Popen([str(ROOT / "tools" / "in_background.sh"), *command])
    try:
        for process in (usual, behind):  # each chooses its processor just before it is busy
            wait_until(lambda pid=process.pid: os.sched_getaffinity(pid) == {processor}, "it is busy", process)
        before = processor_seconds(usual.pid), processor_seconds(behind.pid)
        end = time.monotonic() + 30
        while (got := processor_seconds(usual.pid) - before[0]) < 1.0:
            assert time.monotonic() < end, "this processor is taken by others"
            time.sleep(0.05)
        assert processor_seconds(behind.pid) - before[1] < got / 3
    finally:
        for process in (usual, behind):
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
