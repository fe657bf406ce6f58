"""``diloco logs`` and ``diloco events`` of a run on this machine, from the files in its directory.

Each process has one file, to which its successors add. Files are read line by line and merged by the time in each
line (the syncer's is JSON in UTC, the others' is text in local time); a line without a time, as of a traceback, belongs
to the one before it. A run that goes on is followed until its runner is gone.
"""

from __future__ import annotations

import heapq
import json
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path

from diloco.console import FAILED, CommandError, print_text
from diloco.local.watch import QUIET_EVENTS
from diloco.log_lines import LinePrinter, LogOptions
from diloco.processes.workdir import Workdir
from diloco.processes.worker_specs import worker_specs
from diloco_protocol.spec.load import JobError, read_job
from diloco_protocol.vocabulary import EventKind

POLL_SECONDS = 0.5
MAX_LINE = 256 << 10  # bytes of one line; the rest of a longer one is another
_TEXT_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")
_RANK = re.compile(r"^\[rank \d+\] ")  # of a learner of several
_EVENTS = frozenset({*EventKind, "serving", "restored", "stopping"})  # the last three are of a syncer's life


def line_time(line: str) -> float | None:
    """The Unix time at which a line was written; None: it does not say."""
    line = _RANK.sub("", line)
    try:
        if line.startswith("{"):
            return datetime.fromisoformat(json.loads(line)["time"]).timestamp()
        if _TEXT_TIME.match(line):
            return datetime.fromisoformat(line[:23].replace(",", ".")).timestamp()
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        pass
    return None


class LogFile:
    """A process's log, read on from where it was left. ``label``: the process's name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.label = path.stem
        self._offset = 0
        self._rest = b""
        self._last = 0.0

    def new_lines(self) -> Iterator[tuple[float, str, str]]:
        """(time, label, line) of each whole line since the last call. A file that is not there has none."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        except OSError as error:
            raise CommandError(f"{self.path} cannot be read: {error.strerror}", FAILED) from error
        with file:
            file.seek(self._offset)
            while piece := file.readline(MAX_LINE):
                self._offset += len(piece)
                self._rest += piece
                if self._rest.endswith(b"\n") or len(self._rest) >= MAX_LINE:
                    yield self._take_line()

    def last_line(self) -> Iterator[tuple[float, str, str]]:
        """What is left without an end of line."""
        if self._rest:
            yield self._take_line()

    def _take_line(self) -> tuple[float, str, str]:
        line, self._rest = self._rest.decode("utf-8", "replace").rstrip("\r\n"), b""
        self._last = line_time(line) or self._last
        return self._last, self.label, line


def chosen_files(workdir: Workdir, target: str | None) -> Callable[[str], bool]:
    """Which processes ``target`` means: a process by its name (syncer, evaluator, local-1), a region, or learner-N
    (counted over all regions); None: all. Raises CommandError for one that the job does not have."""
    if target is None:
        return lambda label: True
    means: dict[str, set[str]] = {}
    also: dict[str, str] = {}
    try:
        for worker in worker_specs(read_job(workdir.job)):
            means.setdefault(worker.name, set()).add(worker.name)
            if worker.name != "evaluator":
                means.setdefault(worker.region, set()).add(worker.name)
            if worker.learner is not None:
                also[f"learner-{worker.learner}"] = worker.name
    except (OSError, JobError):
        pass  # the names of the files are still good
    for path in workdir.logs.glob("*.log"):
        means.setdefault(path.stem, set()).add(path.stem)
    if target not in means and target in also:
        target = also[target]
    if target not in means:
        raise CommandError(f"the run in {workdir.path} has no {target}; it has {', '.join(_in_order(means))}")
    return means[target].__contains__


def _in_order(means: Mapping[str, set[str]]) -> list[str]:
    """The names that ``logs`` takes: programs first, then each region with its learners."""
    programs = [name for name in ("syncer", "evaluator", "forkserver") if name in means]
    regions = sorted(name for name, processes in means.items() if processes != {name})
    learners = sorted((name for name in means if name not in (*programs, *regions)), key=_by_number)
    return [*programs, *regions, *learners]


def _by_number(name: str) -> tuple[str, int]:
    region, _, ordinal = name.rpartition("-")
    return (region, int(ordinal)) if ordinal.isdecimal() else (name, -1)


def show_logs(workdir: Workdir, options: LogOptions) -> int:
    """Print the logs of a run: the exit code. Raises CommandError."""
    if options.previous:
        raise CommandError("--previous is for pods: on this machine a process and those before it have one log")
    wanted = chosen_files(workdir, options.target)
    files: dict[Path, LogFile] = {}
    printer = LinePrinter(options)

    def show(part: Callable[[LogFile], Iterable[tuple[float, str, str]]]) -> None:
        for path in sorted(workdir.logs.glob("*.log")):
            if wanted(path.stem) and path not in files:
                files[path] = LogFile(path)
                printer.widen([path.stem])
        for _, label, line in heapq.merge(*map(part, files.values()), key=lambda line: line[0]):
            printer.show(label, line)

    since = 0.0 if options.since is None else time.time() - options.since
    show(lambda one: _part(one, since, options.tail))
    if not files and not options.follow:
        raise CommandError(
            f"the run in {workdir.path} has no log{'' if options.target is None else 's of that'} yet", FAILED
        )
    while options.follow:
        running = workdir.runner() is not None
        show(LogFile.new_lines)
        if not running:
            print_text(f"the run in {workdir.path} is not running", file=sys.stderr)
            break
        time.sleep(POLL_SECONDS)
    return 0


def _part(one: LogFile, since: float, tail: int | None) -> Iterable[tuple[float, str, str]]:
    """The lines of a log that are new enough; of them the last."""
    lines = (line for part in (one.new_lines, one.last_line) for line in part() if line[0] >= since)
    return lines if tail is None else deque(lines, maxlen=tail)


# ------------------------------------------------------------------ events


def event_in(line: str) -> dict[str, object] | None:
    """The event that a line of the syncer's log tells of: its time (text, UTC), kind, slot and message."""
    try:
        entry = json.loads(line)
        kind, said = entry["message"].split(":" if ": " in entry["message"] else " ", 1)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    kind, _, more = kind.partition(" ")
    if kind not in _EVENTS or (more and kind in set(EventKind)):
        return None
    said = f"{more}: {said}" if more else said.strip()
    return {"time": entry.get("time"), "kind": kind, "slot": entry.get("slot", -1), "message": said}


def show_events(workdir: Workdir, watch: bool, as_json: bool) -> None:
    """Print what happened to a run, oldest first: what its syncers have logged. People get each thing once, as on the
    screen; programs get all. Raises CommandError."""
    log = LogFile(workdir.log("syncer"))
    shown = 0
    while True:
        running = workdir.runner() is not None
        for _, _, line in log.new_lines():
            event = event_in(line)
            if event is None or (not as_json and event["kind"] in QUIET_EVENTS):
                continue
            shown += 1
            stamp = str(event["time"]).replace("T", " ").partition(".")[0]
            print_text(json.dumps(event) if as_json else f"{stamp}  {event['kind']:<13} {event['message']}", flush=True)
        if not watch or not running:
            break
        time.sleep(POLL_SECONDS)
    if not shown and not as_json:
        print_text(f"no events in {workdir.path} yet: its syncer has logged none")
    if watch and not running:
        print_text(f"the run in {workdir.path} is not running", file=sys.stderr)
