"""The waits of tests: patient with what goes on, and with nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import patience
from operator_simulation import virtual_time
from patience import LONGEST, SILENT_SECONDS, WaitFailed, until, wait_until


class Time:
    """Stands in for the module ``time`` of the helper: a sleep takes no longer than it is asked to."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slower = 1.0  # a machine that has much to do: how much longer each sleep takes
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds * self.slower


class Process:
    """A process that nobody has started."""

    pid = 4_000_000  # above what Linux gives

    def __init__(self) -> None:
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(patience, "time", made)
    return made


def failure(condition: Callable[[], Any], *watched: Any, **options: Any) -> str:
    with pytest.raises(WaitFailed) as caught:
        wait_until(condition, "the end of the world", *watched, **options)
    return str(caught.value)


def never() -> bool:
    return False


def test_the_first_true_value_is_returned(clock: Time) -> None:
    answers = iter([0, "", None, "there"])
    assert wait_until(lambda: next(answers)) == "there"
    assert len(clock.pauses) == 3


def test_what_goes_on_is_waited_for_and_what_stands_still_is_not(clock: Time) -> None:
    begun = clock.now
    moves = failure(never, lambda: min(int((clock.now - begun) / 50), 4))  # every 50 s, for 200 s
    assert 200 + SILENT_SECONDS <= clock.now - begun < 203 + SILENT_SECONDS
    assert "the end of the world" in moves and f"nothing has moved for {SILENT_SECONDS:.0f} s" in moves
    assert "the last progress: 20" in moves


def test_what_goes_on_for_ever_is_given_up(clock: Time) -> None:
    begun = clock.now
    assert "something still moves" in failure(never, lambda: clock.now)
    assert LONGEST * SILENT_SECONDS <= clock.now - begun < LONGEST * SILENT_SECONDS + 1
    begun = clock.now
    failure(never, lambda: clock.now, longest=20.0)
    assert 20.0 <= clock.now - begun < 21.0


def test_a_pause_of_the_one_who_looks_is_no_silence(clock: Time) -> None:
    clock.slower = 500.0  # the process that waits is stopped, again and again
    begun, looks = clock.now, 0

    def fortieth() -> bool:
        nonlocal looks
        looks += 1
        return looks == 40

    wait_until(fortieth, "", never, longest=1e9)
    assert clock.now - begun > 3 * SILENT_SECONDS


def test_a_condition_is_looked_at_once_more_before_a_wait_fails(clock: Time) -> None:
    process = Process()
    states = iter([False, True])

    def ended() -> bool:
        process.code = 3
        return next(states)

    wait_until(ended, "", process)
    told = failure(never, process)
    assert "what was awaited has ended" in told and "has ended with 3" in told
    assert clock.now < 1000.0 + 1, "at once"


def test_of_several_processes_one_that_has_ended_ends_no_wait(clock: Time) -> None:
    ended, other = Process(), Process()
    ended.code = 0
    assert "nothing has moved" in failure(never, ended, other)
    other.code = 1
    assert "has ended" in failure(never, ended, other)


def test_looks_become_rarer_unless_they_are_told_how_often(clock: Time) -> None:
    failure(never)
    assert clock.pauses[0] == 0.01 and max(clock.pauses) == 0.25 and len(clock.pauses) < 1000
    clock.pauses.clear()
    failure(never, every=0.5)
    assert set(clock.pauses[:-1]) == {0.5}


def test_files_that_grow_are_progress_and_their_last_lines_are_shown(clock: Time, tmp_path: Path) -> None:
    log = tmp_path / "run" / "learner.log"
    begun = clock.now

    def writes() -> bool:
        count = int((clock.now - begun) / 30)
        text = "".join(f"line {n}\n" for n in range(min(count, 5) * 10))
        log.parent.mkdir(exist_ok=True)
        if not log.exists() or text != log.read_text():
            log.write_text(text)
        return False

    told = failure(writes, tmp_path)
    assert 150 + SILENT_SECONDS <= clock.now - begun < 153 + SILENT_SECONDS
    assert "line 49" in told and "line 35" in told and "line 34" not in told and "run/learner.log" in told


def test_the_last_lines_of_programs_that_run_are_shown(
    clock: Time, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "_started", [])
    running, ended = Process(), Process()
    ended.code = 0
    for process, name in ((running, "running"), (ended, "ended")):
        (tmp_path / name).write_text(f"said by what is {name}\n")
        patience.on_started(process, tmp_path / name)
    told = failure(never)
    assert "said by what is running" in told and "said by what is ended" not in told


def test_what_is_no_process_path_or_function_is_refused() -> None:
    with pytest.raises(TypeError, match="60"):
        wait_until(never, "it", 60)


def test_without_words_the_source_says_what_was_awaited(clock: Time) -> None:
    with pytest.raises(WaitFailed, match="MERGES_OF_THE_JOB"):
        wait_until(lambda: os.environ.get("MERGES_OF_THE_JOB"))


def test_in_virtual_time_no_real_clock_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "time", SimpleNamespace())
    monkeypatch.setattr(patience, "psutil", SimpleNamespace())
    looks: list[float] = []

    async def waits() -> None:
        import asyncio

        loop = asyncio.get_running_loop()

        async def later() -> bool:
            looks.append(loop.time())
            return loop.time() >= 30

        assert await until(later)
        assert 30 <= loop.time() < 31
        with pytest.raises(WaitFailed, match="nothing has moved"):
            await until(never)
        assert 30 + SILENT_SECONDS <= loop.time() < 32 + SILENT_SECONDS

    virtual_time.run(waits())
    assert len(looks) < 1000


def test_waits_for_a_cluster_watch_its_pods_and_events(clock: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    from e2e import clusters

    began = clock.now
    made = clusters.Cluster.__new__(clusters.Cluster)
    made._figure, made._read_next = None, 0.0

    def answer(path: str, timeout: float) -> bytes:
        age = clock.now - began
        if age > 200:
            raise ConnectionRefusedError("stopped")
        pod = {"metadata": {"uid": "p"}, "status": {"phase": "Running" if age > 50 else "Pending"}}
        event = {"metadata": {"uid": f"e-{age:.0f}"}, "type": "Warning"}  # the same again and again
        rows = {"nodes": [], "pods": [pod], "events": [event]}[path.rpartition("/")[2]]
        return json.dumps({"items": rows}).encode()

    monkeypatch.setattr(clusters, "time", clock)
    monkeypatch.setattr(made, "_get", answer, raising=False)
    monkeypatch.setattr(clusters.Cluster, "all_open", [made.pods_and_events])

    def broken() -> bool:
        raise ConnectionResetError("no status page")

    with pytest.raises(WaitFailed, match=r"60 s[^$]*no status page"):
        clusters.until("the job has begun", broken, 60)
    assert 110 < clock.now - began < 120, "a minute after the pod ran"
    clock.now += 200
    with pytest.raises(ConnectionRefusedError):
        clusters.read_patiently(lambda: answer("/api/v1/nodes", 1.0))
    assert clusters.read_patiently(lambda: b"") == b""


def test_work_counts_and_idling_does_not() -> None:
    """Of a process, and of those that it has started."""
    program = (
        "import subprocess, sys\n"
        "inner = 'import sys, time\\nfor _ in sys.stdin:\\n"
        "    until = time.process_time() + 1.2\\n"
        "    while time.process_time() < until: pass\\n"
        "    print(1, flush=True)'\n"
        "subprocess.run([sys.executable, '-S', '-c', inner])\n"
    )
    child = subprocess.Popen([sys.executable, "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    with child:
        for _ in range(2):
            before, own = patience.work_done(child.pid), patience.own_work()
            child.stdin.write(b"\n")
            child.stdin.flush()
            assert child.stdout.readline()
            after = patience.work_done(child.pid)
            assert len(after) == 3 and after[0] > before[0]
            assert patience.own_work() != own
        child.stdin.close()
    assert patience.work_done(child.pid) == (0,)
    assert patience.work_done(os.getpid())[0] > 0
