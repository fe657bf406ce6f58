"""How tests wait: for as long as what they wait for goes on.

A wait ends when its condition holds. It fails when nothing of what is watched has moved for ``SILENT_SECONDS``, or when
all watched processes have ended. How long it takes in all is the machine's business, up to ``LONGEST`` times as much:
that bound is for a process that goes on for ever and does not do what is awaited.

What may be watched, and when it has moved:

- A process, with ``pid`` and ``poll()``: it and all that it has started have done a further unit of work, which is a
  second of a processor or a megabyte read or written; or one of them has begun or ended.
- A path: the file, or one in the folder, has grown or was written.
- A function: it returns something else.
- Nothing: ``own_work``, as of a process, of all that this process has started and of its other threads.

A process that only answers a wait's questions, or sends heartbeats, uses less than a second of a processor in
``SILENT_SECONDS``. The product's own rule (``diloco.processes.watchdog``) counts every tick: it judges nothing but
starts, and waits judge services too.

A look counts for a second of silence at most. So a pause of this process, which looks, is no silence of another one.
In a loop of virtual time the asynchronous form asks no real clock, and watches nothing of itself.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

SILENT_SECONDS = 60.0
LONGEST = 5.0  # times the silence that is allowed
LOOK_SECONDS = 1.0  # what is watched is read so often, as that takes milliseconds
MEGABYTE = 1e6
TAIL_LINES = 15


class WaitFailed(AssertionError):
    """What was awaited did not come about."""


_started: list[tuple[Any, Path]] = []  # programs, and their logs


def on_started(process: Any, log: Path) -> None:
    """A program was started: while it runs, waits that fail show the last lines of its log."""
    _started.append((process, log))


def wait_until(
    condition: Callable[[], Any],
    what: str = "",
    *watched: Any,
    silent: float = SILENT_SECONDS,
    longest: float = 0.0,
    every: float | None = None,
) -> Any:
    """The first true value of ``condition``.

    ``longest``: seconds in all, instead of ``LONGEST`` times ``silent``. ``every``: seconds between two looks; else
    they become rarer the longer it takes.
    """
    wait = Wait(what or _source(condition), watched or (own_work,), silent, longest, every=every, now=time.monotonic())
    while not (found := condition()):
        time.sleep(wait.pause(time.monotonic()))
    return found


async def until(
    condition: Callable[[], Any],
    what: str = "",
    *watched: Any,
    silent: float = SILENT_SECONDS,
    longest: float = 0.0,
    every: float | None = None,
) -> Any:
    """As ``wait_until``, while the loop goes on. ``condition`` may be a coroutine function."""
    loop = asyncio.get_running_loop()
    is_real = type(loop).time is asyncio.BaseEventLoop.time
    watched = watched or ((own_work,) if is_real else ())
    wait = Wait(what or _source(condition), watched, silent, longest, every=every, now=loop.time())
    while True:
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        await asyncio.sleep(wait.pause(loop.time()))


def wait_for_end(process: Any, *watched: Any, silent: float = SILENT_SECONDS, longest: float = 0.0) -> int:
    """The exit code of a process, which is watched."""
    wait_until(lambda: process.poll() is not None, "its end", process, *watched, silent=silent, longest=longest)
    return int(process.poll())


class Wait:
    """One wait: for how long nothing has moved. Plain code but for what ``Watched`` reads; the time is an argument."""

    def __init__(
        self, what: str, watched: tuple[Any, ...], silent: float, longest: float, every: float | None, now: float
    ) -> None:
        self.what, self.silent, self.longest, self.every = what, silent, longest or LONGEST * silent, every
        self.watched = [Watched(one) for one in watched]
        self.begun = self.looked = self.sampled = now
        self.silence = 0.0
        self.last = ""  # what moved last
        self.verdict = ""  # why it fails, if the look that follows finds the condition false too

    def pause(self, now: float) -> float:
        """The condition does not hold: how long to sleep until the next look. WaitFailed: it never did."""
        if self.verdict:
            raise WaitFailed(self.report(now))
        self.silence += min(now - self.looked, LOOK_SECONDS)
        self.looked = now
        if now - self.sampled >= LOOK_SECONDS:
            self.sampled = now
            if moved := [one for one in self.watched if one.has_moved()]:
                self.silence = 0.0
                self.last = f"{now - self.begun:.0f} s after it began: " + ", ".join(one.words() for one in moved)
        processes = [one for one in self.watched if one.is_process]
        if processes and all(one.has_ended() for one in processes):
            self.verdict = "what was awaited has ended"
        elif self.silence >= self.silent:
            self.verdict = f"nothing has moved for {self.silent:.0f} s"
        elif now - self.begun >= self.longest:
            self.verdict = "something still moves, but it is too long"
        if self.verdict:
            return 0.0
        return self.every if self.every is not None else min(0.25, max(0.01, 0.01 * (now - self.begun)))

    def report(self, now: float) -> str:
        lines = [f"waited {now - self.begun:.0f} s for {self.what}: {self.verdict}"]
        if self.watched:
            lines.append(f"the last progress: {self.last or 'none'}")
        for one in self.watched:
            lines += [f"- {one.words()}", *one.tail()]
        shown = {one.given for one in self.watched if isinstance(one.given, Path)}
        logs = [log for process, log in _started if process.poll() is None and log not in shown]
        for log in dict.fromkeys(logs):
            lines += [f"- {log}", *_last_lines(log)]
        return "\n".join(lines)


class Watched:
    """Something whose progress is judged."""

    def __init__(self, given: Any) -> None:
        self.given = given
        self.is_process = hasattr(given, "poll") and hasattr(given, "pid")
        if not self.is_process and not isinstance(given, Path) and not callable(given):
            raise TypeError(f"neither a process nor a path nor a function: {given!r}")
        self._figure: Any = None  # read once a wait has taken a while: most are over at once

    def has_moved(self) -> bool:
        before, self._figure = self._figure, self._read()
        return bool(before != self._figure)

    def has_ended(self) -> bool:
        return self.given.poll() is not None

    def _read(self) -> Any:
        if self.is_process:
            return work_done(self.given.pid)
        return files_written(self.given) if isinstance(self.given, Path) else self.given()

    def words(self) -> str:
        if self._figure is None:
            self._figure = self._read()
        if self.is_process:
            name = f"process {self.given.pid}"
            if self.has_ended():
                return f"{name} has ended with {self.given.poll()}"
            return f"{name}, and {max(0, len(self._figure) - 2)} that it has started: {self._figure[0]} s or MB of work"
        if isinstance(self.given, Path):
            return f"{self.given}: {len(self._figure)} files of {sum(size for _, size, _ in self._figure)} bytes"
        return f"{getattr(self.given, '__name__', 'a function')}: {str(self._figure)[:1000]}"

    def tail(self) -> list[str]:
        """The last lines of a file, or of each log in a folder."""
        if not isinstance(self.given, Path):
            return []
        if not self.given.is_dir():
            return _last_lines(self.given)
        logs = [path for path in _files(self.given) if path.suffix in (".log", ".out")]
        return [line for path in logs for line in (f"  == {path.relative_to(self.given)}", *_last_lines(path))]


def _last_lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [f"  {line}" for line in text.splitlines()[-TAIL_LINES:]]


def _source(condition: Callable[[], Any]) -> str:
    """The line that says what is awaited, where no words do."""
    try:
        return " ".join(line.strip() for line in inspect.getsource(condition).splitlines()[:3])
    except (OSError, TypeError):
        return getattr(condition, "__qualname__", str(condition))


def work_done(pid: int) -> tuple[int, ...]:
    """Whole seconds of processors and megabytes read and written, of a process and all that it has started; and which
    processes these are. A sum that is smaller because one has ended is another figure too."""
    try:
        above = psutil.Process(pid)
        return _work_of([above, *above.children(recursive=True)])
    except psutil.Error:
        return (0,)


def own_work() -> tuple[int, ...]:
    """The same of all that this process has started, and of its threads but the one that asks."""
    here, thread = psutil.Process(os.getpid()), threading.get_native_id()
    threads = sum(row.user_time + row.system_time for row in here.threads() if row.id != thread)
    return int(threads), *_work_of(here.children(recursive=True))


def _work_of(family: list[psutil.Process]) -> tuple[int, ...]:
    done, found = 0.0, []
    for process in family:
        try:
            times, moved = process.cpu_times(), process.io_counters()
        except psutil.Error:
            continue  # it has just ended, or is somebody else's
        done += times.user + times.system + (moved.read_chars + moved.write_chars) / MEGABYTE
        found.append(process.pid)
    return int(done), *sorted(found)


def _files(path: Path) -> list[Path]:
    """The file, or those in the folder; folders may come and go meanwhile."""
    return sorted(Path(top, name) for top, _, names in os.walk(path) for name in names) if path.is_dir() else [path]


def files_written(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of each file."""
    found = []
    for file in _files(path):
        try:
            about = file.stat()
        except OSError:
            continue  # it is not there yet, or no more
        found.append((str(file), about.st_size, about.st_mtime_ns))
    return tuple(found)
