"""The pace of a step: fixed time by a clock that stands while the process is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from diloco_worker.settings import ConfigurationError
from lab.pace import STOPPED_SECONDS, VARIABLE, StepPace
from repository import ROOT


def test_a_step_takes_its_time_whatever_it_computes() -> None:
    pace = StepPace(0.1)
    for work in (0.0, 0.05):
        begun = time.monotonic()
        pace.begin()
        time.sleep(work)
        pace.end()
        assert time.monotonic() - begun >= 0.1 - STOPPED_SECONDS  # ticks come late


def test_without_a_pace_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    pace = StepPace.from_environment()
    pace.begin()
    pace.end()
    assert pace.step_seconds == 0.0 and pace._clock is None


@pytest.mark.parametrize("text", ["0", "-1", "fast", "nan", "inf", "1e9"])
def test_a_pace_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ConfigurationError, match=r"LAB_STEP_SECONDS .* a number of seconds above 0"):
        StepPace.from_environment()


def test_the_clock_stands_while_the_process_is_stopped() -> None:
    program = (
        "import os, signal, time; from lab.pace import StepPace\n"
        "p = StepPace(0.5); p.begin(); os.kill(os.getpid(), signal.SIGSTOP); t = time.monotonic()\n"
        "time.sleep(0.05); p.end()  # the clock's thread has counted the stop, were it to count\n"
        "print(time.monotonic() - t, flush=True)"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT / "bench")
    try:
        state = os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert state is not None and state.si_code == os.CLD_STOPPED
        time.sleep(0.7)
        os.kill(child.pid, signal.SIGCONT)
        # By the wall clock the step is over, by the machine's it has just begun.
        assert child.stdout is not None and float(child.stdout.readline()) >= 0.3
    finally:
        child.kill()
        child.communicate()
