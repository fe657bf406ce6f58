"""What the benchmarks share: SIGTERM ends what a benchmark has begun."""

from __future__ import annotations

import subprocess
import sys

from repository import ROOT

PROGRAM = """
import common, time
common.end_on_sigterm()
try:
    print("begun", flush=True)
    time.sleep(60)
finally:
    print("ended")
"""


def test_sigterm_ends_what_a_benchmark_has_begun() -> None:
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=ROOT / "bench", stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    assert program.stdout.readline() == "begun\n"
    program.terminate()
    said, _ = program.communicate(timeout=30)
    assert (said, program.returncode) == ("ended\n", 143)
