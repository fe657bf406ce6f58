"""Run one test many times beside busy processes, until it fails, and show the first failing log.

    python tools/stress.py tests/unit/syncer/runtime/test_multipart.py::test_idle_uploads_are_dropped
    python tools/stress.py TEST --times 50 --busy 4

Each run is a process of its own. The exit status is 1 if a run failed, 2 if the test cannot be run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "build" / "stress.log"
BURN = "while True: pass"
TESTS_FAILED = 1  # pytest's exit status; above it no test was run


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many processes that want a processor all the time, each in a session of its own: the scheduler gives each
    session the same share."""
    started = [
        subprocess.Popen([sys.executable, "-c", BURN], start_new_session=True, stdin=subprocess.DEVNULL)
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def run_once(test: str, log: Path) -> int:
    """Pytest's exit status."""
    with log.open("w") as file:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
        return subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("test", help="a test's id, a file or a folder")
    parser.add_argument("--times", type=int, default=20, help="how many runs (20)")
    parser.add_argument("--busy", type=int, default=2, help="how many busy processes beside it (2)")
    chosen = parser.parse_args()
    LOG.parent.mkdir(exist_ok=True)
    with busy_processes(chosen.busy):
        for number in range(1, chosen.times + 1):
            begun = time.monotonic()
            status = run_once(chosen.test, LOG)
            if status:
                print(LOG.read_text())
                print(f"run {number} of {chosen.times} failed after {time.monotonic() - begun:.1f} s; {LOG}")
                return 1 if status == TESTS_FAILED else 2
            print(f"run {number} of {chosen.times} passed, {time.monotonic() - begun:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
