"""Processes of a run: started, signalled, awaited; none may outlive the runner.

Workers of the built-in trainer are forked by the forkserver (diloco_worker.forkserver); the syncer and a job's own
``learners.command`` are started through ``child_guard.py``. Both ways the kernel ends them when the runner dies, even
by SIGKILL. All run outside of the terminal's foreground process group, so that Ctrl-C reaches the runner alone, which
passes on what it means.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import diloco_protocol
from diloco.processes.loading import CURE, LOOK_SECONDS, SILENT_SECONDS, LoadWatch, is_loading
from diloco.processes.supervisor import Exit
from diloco_protocol.common.process import signal_descendants

CHILD_GUARD = Path(__file__).with_name("child_guard.py")
LIBRARY = Path(diloco_protocol.__path__[0]).parent
START_SECONDS = 30.0  # for the forkserver to answer a spawn
MAX_EVENT_BYTES = 1 << 20
# Signals closer together are one wish: `timeout` signals a process and then its group, and of a terminal that closes
# both the kernel and the shell tell.
SAME_SIGNAL_SECONDS = 1.0


class StartError(Exception):
    """A process could not be started; the message says which and why."""


class Process(Protocol):
    name: str
    pid: int

    async def wait(self) -> Exit: ...

    def signal(self, number: int) -> None:
        """Send it a signal; nothing happens if it has ended."""


def check_free(address: str) -> None:
    """Raise OSError unless this machine can listen on ``address``, host:port."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    socket.create_server((host.strip("[]"), int(port)), family=family).close()


def ranks_command(command: Sequence[str] | None, ranks: int, node: Sequence[str] = ()) -> list[str]:
    """How a learner's program is started here, in so many ranks. ``command``: the job's own, of which ``python`` is the
    interpreter that runs this; None: the built-in. ``node``: words of ``diloco_worker.launch`` for a learner that is on
    several machines."""
    first, *others = command or ["python", "-m", "diloco_worker"]
    program = [sys.executable if first == "python" else first, *others]
    if ranks == 1 and not node:
        return program
    return [sys.executable, "-m", "diloco_worker.launch", "--processes", str(ranks), *node, *program]


def guard_command(command: Sequence[str], guard: bool) -> list[str]:
    """The command, started so that it does not outlive this process. ``guard``: it may start processes of its own."""
    options = ["--guard"] if guard else []
    return [sys.executable, "-I", "-S", str(CHILD_GUARD), str(LIBRARY), *options, str(os.getpid()), *command]


async def end_all(processes: Sequence[Process], seconds: float) -> None:
    """SIGTERM, and SIGKILL for what is still there after ``seconds``."""
    if not processes:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            process.signal(number)
            process.signal(signal.SIGCONT)
        waits = [asyncio.ensure_future(process.wait()) for process in processes]
        _, late = await asyncio.wait(waits, timeout=seconds)
        for wait in late:
            wait.cancel()


class Child:
    """A program of its own, started through ``child_guard.py``."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, guard: bool) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._guard = guard

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        *,
        cwd: Path | None = None,
        guard: bool = False,
    ) -> Child:
        """Raises StartError. ``guard``: the command may start processes of its own."""
        try:
            with log.open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    *guard_command(command, guard),
                    env=dict(env),
                    cwd=cwd,
                    process_group=0,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
        except OSError as error:
            raise StartError(f"{name} cannot be started: {error.strerror or error}") from error
        return cls(name, process, guard)

    async def wait(self) -> Exit:
        code = await self._process.wait()
        return Exit(signal=-code) if code < 0 else Exit(code=code)

    def signal(self, number: int) -> None:
        if self._process.returncode is not None:
            return
        # Popen.send_signal would look first, and reap a process that has ended before the loop's watcher does: its exit
        # code would be lost.
        with contextlib.suppress(ProcessLookupError):
            if self._guard and number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT):
                signal_descendants(self.pid, number)  # some may be in sessions of their own
                os.killpg(self.pid, number)  # the guard leads the command's group
            else:
                os.kill(self.pid, number)


@dataclass
class Forked:
    """A worker that the forkserver forked. ``identity``: the forkserver's word for it."""

    name: str
    forkserver: ForkServerClient
    identity: str
    pid: int
    ended: asyncio.Future[Exit]

    async def wait(self) -> Exit:
        return await asyncio.shield(self.ended)

    def signal(self, number: int) -> None:
        if not self.ended.done():
            self.forkserver.signal(self.identity, number)


class ForkServerClient:
    """The client of ``python -m diloco_worker.forkserver``, or of a ``program`` that calls its ``main``.

    If the forkserver itself dies, so do its children, and each is reported as killed; the
    next spawn starts another one. ``tell`` says a line while the libraries are being loaded.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        cwd: Path,
        log: Path,
        program: Sequence[str] = ("-m", "diloco_worker.forkserver"),
        *,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._env = dict(env)
        self._cwd = cwd
        self._program = program
        self._tell = tell
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._starting: dict[str, asyncio.Future[int]] = {}
        self._ended: dict[str, asyncio.Future[Exit]] = {}
        self._lock = asyncio.Lock()
        self._count = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def load(self) -> None:
        """Start it and wait until the libraries are loaded. Raises StartError."""
        async with self._lock:
            if self._process is not None and self._process.returncode is None and self._ready is not None:
                ready = self._ready
            else:
                ready = await self._start()
        watch = LoadWatch("loading torch and the worker's libraries", time.monotonic())
        while not (await asyncio.wait([ready], timeout=LOOK_SECONDS))[0]:
            if not is_loading(watch, self.pid or 0, self._tell):
                self.kill()
                raise StartError(
                    f"the worker's libraries do not load: nothing was done for {SILENT_SECONDS:.0f} s; {CURE}; "
                    f"see {self._log}"
                )
        await asyncio.shield(ready)

    async def _start(self) -> asyncio.Future[None]:
        if self._reader is not None:  # the ends of the one before are told first, or it would tell the new one's
            await asyncio.wait([self._reader])
        with self._log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, *self._program),
                env=self._env,
                cwd=self._cwd,
                process_group=0,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                limit=MAX_EVENT_BYTES,
            )
        self._ready = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(_retrieve)
        self._reader = asyncio.create_task(self._read(self._process, self._ready))
        return self._ready

    async def spawn(self, name: str, env: Mapping[str, str], log: Path) -> Forked:
        """Fork a worker with this environment on top of the forkserver's. Raises StartError."""
        await self.load()
        self._count += 1
        identity = f"{name}.{self._count}"
        loop = asyncio.get_running_loop()
        started: asyncio.Future[int] = loop.create_future()
        started.add_done_callback(_retrieve)
        ended: asyncio.Future[Exit] = loop.create_future()
        self._starting[identity], self._ended[identity] = started, ended
        try:
            self._send({"op": "spawn", "id": identity, "env": dict(env), "log": str(log)})
            pid = await asyncio.wait_for(asyncio.shield(started), START_SECONDS)
        except TimeoutError as error:
            self.signal(identity, signal.SIGKILL)
            raise StartError(f"{name}: the forkserver did not answer within {START_SECONDS:.0f} s") from error
        finally:
            self._starting.pop(identity, None)
        return Forked(name, self, identity, pid, ended=ended)

    def signal(self, identity: str, number: int) -> None:
        with contextlib.suppress(StartError):  # a forkserver that is gone has taken its children with it
            self._send({"op": "signal", "id": identity, "signal": int(number)})

    async def close(self) -> None:
        """End it: its children, if any are left, are killed."""
        process, reader = self._process, self._reader
        if process is None or reader is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 10.0)
        except TimeoutError:
            self.kill()
            await process.wait()
        await asyncio.wait([reader], timeout=5.0)

    def kill(self) -> None:
        """SIGKILL the forkserver and all that it forked, at once."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _send(self, request: dict[str, Any]) -> None:
        if self._process is None or self._process.returncode is not None or self._process.stdin is None:
            raise StartError("the forkserver has ended")
        self._process.stdin.write(json.dumps(request).encode() + b"\n")

    async def _read(self, process: asyncio.subprocess.Process, ready: asyncio.Future[None]) -> None:
        assert process.stdout is not None
        why = f"it ended, see {self._log}"
        try:
            while line := await process.stdout.readline():
                self._handle(json.loads(line), ready)
        except (ValueError, KeyError) as error:  # a line that is too long is a ValueError too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            why = f"it sent no event: {error}"
            while await process.stdout.read(MAX_EVENT_BYTES):
                pass  # wait() returns once the pipes have ended too
        # Whoever hears that its worker is gone starts it again: load() must know by then that this process has ended.
        await process.wait()
        self._gone(ready, why)

    def _gone(self, ready: asyncio.Future[None], why: str) -> None:
        gone = StartError(f"the forkserver is gone: {why}")
        _settle(ready, gone)
        for started in self._starting.values():
            _settle(started, gone)
        for ended in self._ended.values():
            _settle(ended, Exit(signal=signal.SIGKILL))
        self._ended.clear()

    def _handle(self, event: dict[str, Any], ready: asyncio.Future[None]) -> None:
        kind, identity = event["event"], event.get("id", "")
        if kind == "ready":
            _settle(ready, None)
        elif kind == "started":
            _settle(self._starting.get(identity), int(event["pid"]))
        elif kind == "error":
            _settle(self._starting.get(identity), StartError(f"{identity}: {event.get('message')}"))
        elif kind == "exited":
            ended = self._ended.pop(identity, None)
            _settle(ended, Exit(signal=event["signal"]) if "signal" in event else Exit(code=event["code"]))


def _settle(future: asyncio.Future[Any] | None, outcome: object) -> None:
    """Give a future its result or error, if somebody may still wait for it."""
    if future is not None and not future.done():
        future.set_exception(outcome) if isinstance(outcome, StartError) else future.set_result(outcome)


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Somebody may have stopped waiting for it; its error is not news then."""
    if not future.cancelled():
        future.exception()
