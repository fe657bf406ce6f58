"""Run each realtime test that has failed in this run of `.ci/run` three times more, alone, and judge it.

    .venv/bin/python .ci/again.py FOLDER    the folder that UNSTABLE named (tests/unstable.py)

A test that passes each time is unstable: FOLDER/lines gets a line of it. Exit status 1: one has failed again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TIMES = 3


def run_test(test: str, number: int, log: Path) -> bool:
    """Whether it passes. The cluster of an e2e test is kept from one run to the next, and deleted by the last."""
    kept = {"KEEP": "1"} if number < TIMES else {}
    loaded = {"IMAGES_LOADED": "1"} if number > 1 else {}
    environment = {name: value for name, value in os.environ.items() if name != "UNSTABLE"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    with log.open("w") as file:
        done = subprocess.run(
            command, env=environment | kept | loaded, stdout=file, stderr=subprocess.STDOUT, check=False
        )
    return done.returncode == 0


def main(folder: Path) -> int:
    listed = folder / "failed.jsonl"
    entries = [json.loads(line) for line in listed.read_text().splitlines()] if listed.exists() else []
    is_red = False
    for entry in entries:
        test, passed = entry["test"], 0
        for number in range(1, TIMES + 1):
            log = Path(entry["log"]).with_suffix(f".again-{number}.log")
            print(f"{test}: again, {number} of {TIMES}", flush=True)
            if run_test(test, number, log):
                passed += 1
            else:
                print(log.read_text()[-6000:], flush=True)
        word = "UNSTABLE" if passed == TIMES else "FAILED"
        is_red |= passed < TIMES
        line = f"{word}: {test}, load {entry['load']}, {entry['log']}"
        print(f"{line} (passed {passed} of {TIMES})", flush=True)
        with (folder / "lines").open("a") as file:
            file.write(line + "\n")
    return 1 if is_red else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
