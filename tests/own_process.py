"""A test's function in a process of its own: what it measures of its process is then of its own making.

Threads, allocators and other tests of a process that runs many change how much memory it holds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PROGRAM = "import runpy, sys; runpy.run_path(sys.argv[1])[sys.argv[2]](*sys.argv[3:])"


def run_in_own_process(function: Callable[..., Any], *words: object) -> None:
    """Call a function of a test's file with words, as text. AssertionError with what it said, where it raised."""
    file = function.__code__.co_filename
    tests = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, file, function.__name__, *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def anonymous_bytes() -> int:
    """This process's resident memory that is of no file."""
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) * 1024
