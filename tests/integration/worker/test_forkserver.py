"""The fork server, driven as the runner drives it: real forks, real signals, real libraries."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from asyncio.base_subprocess import BaseSubprocessTransport
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from diloco.processes.launch import ForkServerClient, StartError
from diloco.processes.supervisor import Exit
from patience import until, wait_for_end, wait_until

# A fork server whose workers run a small program instead of the trainer: what is tested is the forking.
PROGRAM = """
import os, signal, sys, time
from diloco_worker import forkserver

def worker():
    what = os.environ["WHAT"]
    print("hello from", what, os.environ.get("SPECIAL"), flush=True)
    if what == "sleep":
        time.sleep(600)
    if what == "raise":
        raise RuntimeError("deliberate")
    if what == "exit":
        sys.exit(3)
    if what == "term":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        print("armed", flush=True)
        while True:
            signal.pause()
    return 0

events = os.dup(1)
os.dup2(2, 1)
z = forkserver.ForkServer(0, events, worker)
z._send_event(event="ready", threads=len(forkserver.thread_names()), pid=os.getpid())
sys.exit(z.run())
"""


class Client:
    def __init__(self, command: list[str], env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **(env or {})}
        )
        self._buffer = b""

    def send(self, **request: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()

    def event(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        pipe = self.process.stdout
        while b"\n" not in self._buffer:
            wait_until(lambda: select.select([pipe], [], [], 0.05)[0], "an event", self.process)
            data = os.read(pipe.fileno(), 65536)
            assert data, "the fork server has ended"
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return dict(json.loads(line))

    def spawn(self, name: str, log: Path, **env: str) -> int:
        self.send(op="spawn", id=name, env=env, log=str(log))
        event = self.event()
        assert event["event"] == "started" and event["id"] == name, event
        return int(event["pid"])


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client([sys.executable, "-c", PROGRAM])
    assert client.event() == {"event": "ready", "threads": 1, "pid": client.process.pid}
    yield client
    client.process.kill()
    client.process.wait()
    for pipe in (client.process.stdin, client.process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # what could not be flushed was for the dead
            pipe.close()


def test_a_worker_runs_with_its_environment_and_log(client: Client, tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("before\n")
    client.spawn("a", log, WHAT="nothing", SPECIAL="x")
    assert client.event() == {"event": "exited", "id": "a", "code": 0}
    assert log.read_text() == "before\nhello from nothing x\n"


def test_exit_codes_and_signals_are_reported(client: Client, tmp_path: Path) -> None:
    client.spawn("exit", tmp_path / "1", WHAT="exit")
    assert client.event() == {"event": "exited", "id": "exit", "code": 3}
    client.spawn("raise", tmp_path / "2", WHAT="raise")
    assert client.event() == {"event": "exited", "id": "raise", "code": 1}
    assert "RuntimeError: deliberate" in (tmp_path / "2").read_text()
    client.spawn("killed", tmp_path / "3", WHAT="sleep")
    client.send(op="signal", id="killed", signal=int(signal.SIGKILL))
    assert client.event() == {"event": "exited", "id": "killed", "signal": 9}


def test_a_worker_has_its_own_signal_handling(client: Client, tmp_path: Path) -> None:
    client.spawn("term", tmp_path / "log", WHAT="term")
    wait_until(lambda: "armed" in (tmp_path / "log").read_text())
    client.send(op="signal", id="term", signal=int(signal.SIGTERM))
    assert client.event() == {"event": "exited", "id": "term", "code": 0}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_a_worker_that_has_just_been_forked_is_not_lost(tmp_path: Path, number: signal.Signals) -> None:
    """Before it has handlers of its own, it has those of the fork server."""
    early = (
        "from diloco_worker import forkserver\n"
        "die_with_parent = forkserver.die_with_parent\n"
        "def signalled(parent):\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "    die_with_parent(parent)\n"
        "forkserver.die_with_parent = signalled\n"
    )
    client = Client([sys.executable, "-c", PROGRAM.replace("def worker", early + "def worker")])
    try:
        assert client.event()["event"] == "ready"
        client.spawn("w", tmp_path / "log", WHAT="nothing")
        event = client.event()
        assert event["event"] == "exited" and event != {"event": "exited", "id": "w", "code": 0}, "it ran on"
        assert number != signal.SIGTERM or event["signal"] == signal.SIGTERM
        client.spawn("next", tmp_path / "next", WHAT="nothing")  # the fork server itself was not meant
    finally:
        client.process.kill()
        client.process.wait()


def test_bad_requests_are_answered_and_survived(client: Client, tmp_path: Path) -> None:
    assert client.process.stdin is not None
    client.process.stdin.write(b"not json\n[]\n")
    client.process.stdin.flush()
    for _ in range(2):
        assert client.event()["event"] == "error"
    client.send(op="dance", id="x")
    assert client.event() == {"event": "error", "id": "x", "message": "ValueError: unknown op 'dance'"}
    client.send(op="spawn", id="x", env={}, log=str(tmp_path / "no" / "such" / "directory"))
    assert "No such file" in client.event()["message"]
    client.send(op="signal", id="nobody", signal=9)  # has ended, say: not an error
    client.spawn("a", tmp_path / "log", WHAT="sleep")
    client.send(op="spawn", id="a", env={}, log=str(tmp_path / "log"))
    assert "running already" in client.event()["message"]


def test_an_endless_request_ends_it(client: Client) -> None:
    assert client.process.stdin is not None
    try:
        client.process.stdin.write(b"x" * (3 << 20))
        client.process.stdin.flush()
    except BrokenPipeError:
        pass  # it stopped reading: that is the point
    assert client.event()["event"] == "error"
    assert wait_for_end(client.process) == 0


def test_when_the_runner_is_gone_so_are_the_workers(client: Client, tmp_path: Path) -> None:
    pids = [client.spawn(f"w{i}", tmp_path / f"{i}", WHAT="sleep") for i in range(3)]
    assert client.process.stdin is not None
    client.process.stdin.close()  # what the kernel does when the runner is killed
    assert wait_for_end(client.process) == 0
    wait_until(lambda: all(gone(pid) for pid in pids))


def test_when_the_runner_is_killed_while_libraries_load_nothing_stays(tmp_path: Path) -> None:
    loading = tmp_path / "loading"
    (tmp_path / "numpy.py").write_text(  # the first library that is loaded
        f"import time\nopen({str(loading)!r}, 'w').close()\ntime.sleep(120)\n"
    )
    program = (
        "import subprocess, sys, time\n"
        "pipe = subprocess.PIPE\n"
        "child = subprocess.Popen("
        "[sys.executable, '-m', 'diloco_worker.forkserver'], stdin=pipe, stdout=pipe)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(120)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for early in (False, True):  # the second may be gone before the fork server has begun
        runner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=env)
        assert runner.stdout is not None
        pid = int(runner.stdout.readline())
        try:
            if not early:
                wait_until(loading.exists)
        finally:
            runner.kill()
            runner.wait()
            runner.stdout.close()
        wait_until(lambda pid=pid: gone(pid))


def test_when_the_fork_server_is_killed_so_are_the_workers(client: Client, tmp_path: Path) -> None:
    pid = client.spawn("w", tmp_path / "log", WHAT="sleep")
    wait_until(lambda: (tmp_path / "log").exists() and "hello" in (tmp_path / "log").read_text())
    client.process.kill()
    wait_until(lambda: gone(pid))


def test_the_real_one_is_single_threaded_and_has_loaded_the_libraries_before_a_worker_starts(tmp_path: Path) -> None:
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    client = Client([sys.executable, "-m", "diloco_worker.forkserver"], threads)
    try:
        ready = client.event()
        assert ready["event"] == "ready" and ready["threads"] == 1
        assert "libtorch" in Path(f"/proc/{ready['pid']}/maps").read_text()
        client.spawn("w", tmp_path / "log", DILOCO_JOB_FILE=str(tmp_path / "absent.json"), DILOCO_ROLE="learner")
        event = client.event()
        # No job file: the worker says so and ends with 2, configuration wrong (docs/contracts.md).
        assert event == {"event": "exited", "id": "w", "code": 2}, (tmp_path / "log").read_text()
        assert "absent.json" in (tmp_path / "log").read_text()
        assert "Traceback" not in (tmp_path / "log").read_text()
    finally:
        client.process.kill()
        client.process.wait()


def test_a_library_that_starts_a_thread_is_told_with_the_threads_name(tmp_path: Path) -> None:
    """As one did on a machine with a GPU, where nothing told whose thread it was."""
    (tmp_path / "busy_library.py").write_text(
        "import ctypes, threading\n"
        "named = threading.Event()\n"
        "def wait():\n"
        "    ctypes.CDLL(None).prctl(15, b'busy-library', 0, 0, 0)\n"  # PR_SET_NAME
        "    named.set()\n"
        "    threading.Event().wait()\n"
        "threading.Thread(target=wait, daemon=True).start()\n"
        "named.wait()\n"
    )
    program = "from diloco_worker import forkserver as f; f.MODULES = ('busy_library',); f.main()"
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    # Its standard input ends when it serves: it does, and leaves.
    run = subprocess.Popen(
        [sys.executable, "-c", program],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None
    assert json.loads(run.stdout.readline())["threads"] == 2
    _, said = run.communicate(timeout=30)
    assert "2 threads before the first fork" in said and "busy-library" in said


@pytest.mark.promise("After a fork server's death each of its workers is started again by a new one")
async def test_a_worker_of_a_fork_server_that_died_is_started_again_by_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of its output is read before the end of its process is known, on a machine that has much to do."""
    held: list[tuple[BaseSubprocessTransport, int]] = []
    exited = BaseSubprocessTransport._process_exited
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    absent = {"DILOCO_JOB_FILE": str(tmp_path / "absent.json"), "DILOCO_ROLE": "learner"}  # it ends with 2
    client = ForkServerClient(env, tmp_path, tmp_path / "forkserver.log")
    try:
        stopped = {**absent, "DILOCO_JOB_FILE": str(tmp_path / "fifo")}
        os.mkfifo(tmp_path / "fifo")  # reading it waits
        worker = await client.spawn("w", stopped, tmp_path / "log")
        first = client._process
        assert first is not None and first.stdout is not None
        with monkeypatch.context() as patch:
            patch.setattr(BaseSubprocessTransport, "_process_exited", lambda *words: held.append(words))
            first.kill()
            await until(lambda: held and first.stdout.at_eof())
            for _ in range(10):  # the reader's turns
                await asyncio.sleep(0)
            early = worker.ended.done()
        exited(*held[0])
        assert not early, "the worker would be started again by a process that is gone"
        assert await worker.wait() == Exit(signal=signal.SIGKILL)
        again = await client.spawn("w", absent, tmp_path / "log")
        assert client._process is not first and await again.wait() == Exit(code=2)
    finally:
        client.kill()
        await client.close()


async def test_a_fork_server_that_talks_nonsense_is_ended(tmp_path: Path) -> None:
    """Also where it has said more than is read at a time."""
    (tmp_path / "diloco_worker").mkdir()
    (tmp_path / "diloco_worker" / "__init__.py").touch()
    (tmp_path / "diloco_worker" / "forkserver.py").write_text("print('x' * (16 << 20), flush=True); input()")
    client = ForkServerClient({**os.environ, "PYTHONPATH": str(tmp_path)}, tmp_path, tmp_path / "log")
    with pytest.raises(StartError, match="it sent no event"):
        await client.load()
    assert client._process is not None and client._process.returncode == -signal.SIGKILL
    await client.close()
