"""The fork server: a process that has the libraries loaded and forks workers on request.

Theory of operation
-------------------
Importing torch and transformers takes seconds; forking a process that has imported them takes milliseconds. So a
new worker is there within a second.

The runner and this process exchange JSON lines. Requests come on stdin: ``{"op": "spawn", "id", "env": {...},
"log": path}`` and ``{"op": "signal", "id", "signal"}``. Events go to stdout: ``{"event": "ready"}``,
``{"event": "started", "id", "pid"}``, ``{"event": "exited", "id", "code"|"signal"}``, ``{"event": "error", "id",
"message"}``. Example: spawn "local-0" is answered by started with its pid, and, when it ends, by exited.

What a fork must not inherit decides how it is built:

* Threads do not survive a fork, but their locks do. So this process never has more than one thread: it waits in
  one ``select`` for stdin and for SIGCHLD's wake-up byte, and ``ready`` tells how many threads it has. Libraries
  that start threads at their first use (numba, OpenMP) are loaded here but not used.
* CUDA does not survive a fork either, so nothing here initialises it. A child asks for the device after the fork,
  with CUDA_VISIBLE_DEVICES from its own environment.
* A child drops the parent's descriptors, signal handlers and random state, and runs
  ``diloco_worker.__main__.main()`` as ``python -m diloco_worker`` would.

No orphan is left. The kernel kills a child when this process dies (PR_SET_PDEATHSIG). When stdin ends the runner
is gone, and every child is killed, because its syncer is gone too and its work cannot be offered.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from diloco_protocol.common.process import die_with_parent, set_parent_death_signal

MAX_LINE_BYTES = 1 << 20  # of a request
_OWN_HANDLERS = (signal.SIGTERM, signal.SIGINT)  # signals that a worker handles otherwise than this process

# With these comes all that a worker imports sooner or later.
MODULES = ("numba", "diloco_worker.__main__", "diloco_worker.training.trainer", "diloco_worker.training.evaluator")


def die_while_loading() -> None:
    """End when the parent does, also during the imports' seconds: the kernel sends SIGTERM, which later ends the
    children first. The parent holds the other end of stdin."""
    # Ignored and blocked signals are inherited: the runner's own parent may have left SIGTERM so.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    set_parent_death_signal(signal.SIGTERM)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    if any(events & select.POLLHUP for _, events in poll.poll(0)):
        os._exit(0)  # it has ended already


def preload(job_file: str | None) -> None:
    """Import what workers need, and the code of the job's model. A module that cannot be imported is left to the
    worker, which reports it in its own log."""
    for module in MODULES:
        _import(module)
    if job_file is None:
        return
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        with open(job_file, encoding="utf-8") as file:
            model_type = json.load(file)["spec"]["training"]["model"]["config"]["model_type"]
        if isinstance(model_type, str) and model_type.isidentifier():
            _import(f"transformers.models.{model_type}.modeling_{model_type}")


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:
        print(f"fork server: {module} is loaded by each worker instead: {error!r}", file=sys.stderr, flush=True)


def thread_names() -> list[str]:
    """What the kernel calls each thread of this process: a library's own often tell whose they are."""
    names = []
    for task in sorted(os.listdir("/proc/self/task"), key=int):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm", encoding="utf-8") as file:
            names.append(file.read().strip())
    return names


class ForkServer:
    """The parent's side: one thread, a table of children, and a loop around ``select``."""

    def __init__(self, requests: int, events: int, target: Callable[[], int | None]) -> None:
        """``requests`` and ``events`` are descriptors; ``target`` runs in each child and returns its exit code."""
        self._requests = requests
        self._events = events
        self._target = target
        self._pids: dict[str, int] = {}
        self._buffer = b""
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stop = False

    def run(self) -> int:
        """Serve requests until stdin ends or SIGTERM comes, then kill and reap every child."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the runner's to pass on
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        try:
            while not self._stop:
                # A child that ended between reaping and this select has left a wake-up byte.
                readable, _, _ = select.select([self._requests, self._wake_read], [], [], 60.0)
                if self._wake_read in readable:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                self._reap()
                if self._requests in readable and not self._read():
                    break
        except BrokenPipeError:
            pass  # the runner is gone
        self._kill_all()
        return 0

    def _on_term(self, *_: object) -> None:
        self._stop = True

    # -------------------------------------------------------------- requests

    def _read(self) -> bool:
        """Handle the requests that came; False at the end of stdin."""
        data = os.read(self._requests, 65536)
        if not data:
            return False
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > MAX_LINE_BYTES:
            self._send_event(event="error", id="", message=f"a request is longer than {MAX_LINE_BYTES} bytes")
            return False
        for line in lines:
            if line.strip():
                self._handle(line)
        return True

    def _handle(self, line: bytes) -> None:
        name = ""
        try:
            request = json.loads(line)
            name = str(request["id"])
            if request["op"] == "spawn":
                env = {str(key): str(value) for key, value in request["env"].items()}
                self._spawn(name, env, str(request["log"]))
            elif request["op"] == "signal":
                self._signal(name, int(request["signal"]))
            else:
                raise ValueError(f"unknown op {request['op']!r}")
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            self._send_event(event="error", id=name, message=f"{type(error).__name__}: {error}")

    def _spawn(self, name: str, env: dict[str, str], log: str) -> None:
        if name in self._pids:
            raise ValueError(f"{name} is running already")
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        parent = os.getpid()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
            # Until the child has handlers of its own, a signal would run this process's, and be lost: it waits.
            signal.pthread_sigmask(signal.SIG_BLOCK, _OWN_HANDLERS)
            pid = os.fork()
            if pid == 0:
                self._become_worker(parent, env, output)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _OWN_HANDLERS)
            os.close(output)
        self._pids[name] = pid
        self._send_event(event="started", id=name, pid=pid)

    def _signal(self, name: str, number: int) -> None:
        pid = self._pids.get(name)
        if pid is not None:  # not reaped yet, so the pid is still this child's
            os.kill(pid, number)

    # -------------------------------------------------------------- children

    def _become_worker(self, parent: int, env: dict[str, str], output: int) -> NoReturn:
        """Run the worker in the child; it never returns into the parent's loop."""
        code = 1
        try:
            die_with_parent(parent)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _OWN_HANDLERS)
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            for descriptor in {null, self._requests, self._events, self._wake_read, self._wake_write} - {0, 1, 2}:
                os.close(descriptor)
            os.environ.update(env)
            sys.argv = ["diloco_worker"]
            random.seed()  # the parent's state would give every child the same jitter
            code = int(self._target() or 0)
        except SystemExit as ending:  # as the interpreter takes it
            if ending.code is None or isinstance(ending.code, int):
                code = int(ending.code or 0)
            else:
                print(ending.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                logging.shutdown()
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        for name, pid in list(self._pids.items()):
            try:
                done, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                done, status = pid, 0
            if done:
                del self._pids[name]
                code = os.waitstatus_to_exitcode(status)
                self._send_event(event="exited", id=name, **({"signal": -code} if code < 0 else {"code": code}))

    def _kill_all(self) -> None:
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self._pids.values():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def _send_event(self, **event: Any) -> None:
        data = json.dumps(event).encode() + b"\n"
        while data:
            data = data[os.write(self._events, data) :]


def _worker() -> int | None:
    from diloco_worker.__main__ import main

    return main()


def main(target: Callable[[], int | None] = _worker) -> int:
    """Take over stdin and stdout for the protocol, load the libraries, serve. ``target``: what each child runs."""
    die_while_loading()
    events = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not get among the events
    started = time.monotonic()
    preload(os.environ.get("DILOCO_JOB_FILE"))
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, the shared pages in every child
    server = ForkServer(0, events, target)
    names = thread_names()
    threads = len(names)
    if threads != 1:
        words = f"{threads} threads before the first fork ({', '.join(names)}); children may hang"
        print(f"fork server: {words}", file=sys.stderr, flush=True)
    try:
        server._send_event(
            event="ready", pid=os.getpid(), threads=threads, seconds=round(time.monotonic() - started, 3)
        )
    except BrokenPipeError:
        return 0
    return server.run()


if __name__ == "__main__":
    sys.exit(main())
