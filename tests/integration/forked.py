"""Learners and syncers of tests, forked from a process that has torch, numba and gRPC loaded, as ``diloco run``
forks its learners.

Not a test. Importing them takes longer than most of these tests train; a fork takes milliseconds.
There is one fork server in a test process, begun with the first child, and it runs this file. The programs
themselves are started, as ``python -m``, by the tests of whole runs.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

ARGUMENTS = "DILOCO_TEST_ARGUMENTS"  # of a child: the program, a file or a module after -m, and its words


class ForkedProcess:
    """A child of the fork server, as ``subprocess.Popen`` would have it."""

    def __init__(self, server: _Client, name: str, log: Path) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self._server = server
        self.name, self.log = name, log
        self.started = threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> int:
        import patience  # not on the path of the fork server, which runs this file

        return patience.wait_for_end(self, self.log)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            self._server.request(op="signal", id=self.name, signal=number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Client:
    """The fork server of this test process; it ends with it, and its children with it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._children: dict[str, ForkedProcess] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def spawn(self, arguments: list[str], env: dict[str, str], log: Path) -> ForkedProcess:
        child = ForkedProcess(self, f"{len(self._children)} {arguments}", log)
        self._children[child.name] = child
        env = {**os.environ, "OMP_NUM_THREADS": "1", **env, ARGUMENTS: json.dumps(arguments)}
        self.request(op="spawn", id=child.name, env=env, log=str(log))
        import patience  # likewise

        patience.wait_until(
            child.started.is_set, "the fork server to start a child", self._process
        )  # it loads torch first
        patience.on_started(child, log)
        return child

    def request(self, **request: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            child = self._children.get(event.get("id", ""))
            if event["event"] == "started" and child is not None:
                child.pid = event["pid"]
                child.started.set()
            elif event["event"] == "exited" and child is not None:
                child.returncode = event["code"] if "code" in event else -event["signal"]
            elif event["event"] == "error":
                print(f"fork server: {event}", file=sys.stderr)


@cache
def _client() -> _Client:
    return _Client()


def fork(arguments: list[str], env: dict[str, str], log: Path) -> ForkedProcess:
    """``python ARGUMENTS`` in a fork; its stdout and stderr are appended to ``log``."""
    return _client().spawn(arguments, env, log)


def _run_child() -> int | None:
    program, *words = json.loads(os.environ.pop(ARGUMENTS))
    if program == "-m":  # loaded already
        sys.argv = words
        return int(sys.modules[f"{words[0]}.__main__"].main() or 0)
    sys.argv = [program, *words]
    sys.path[:0] = [str(Path(program).parent), str(Path(__file__).parent.parent)]  # and what all tests share
    try:
        runpy.run_path(program, run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())  # as the interpreter would; the library's ends with an exit code
        return 1
    return 0


def main() -> int:
    from diloco_worker import forkserver

    events = os.dup(1)
    os.dup2(2, 1)
    forkserver.preload(None)
    for module in ("diloco_syncer.__main__", "diloco_syncer.service", "diloco_syncer.numerics.outer"):
        importlib.import_module(module)
    assert len(forkserver.thread_names()) == 1
    return forkserver.ForkServer(0, events, _run_child).run()


if __name__ == "__main__":
    sys.exit(main())
