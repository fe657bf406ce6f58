"""``diloco run --detach``, ``diloco attach`` and ``diloco stop``: a run that outlives the terminal it was started from.

Theory of operation. A detached run is the same command in a session of its own, with its output in ``output.log`` of
the workdir. The command that starts it waits until the run's syncer serves, so that whatever is wrong with the job is
said at once, by the same words and exit code. All that the others need lies in the workdir: who runs it (``run.lock``),
where its syncer answers (``address.json``), and its report. Attaching only looks: leaving it changes nothing. Stopping
sends SIGTERM to the runner, which drains the job as after Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from diloco.console import (
    COMPLETE,
    FAILED,
    INTERRUPTED,
    CommandError,
    command,
    means_job,
    print_text,
    program_name,
    short_path,
)
from diloco.processes.launch import SAME_SIGNAL_SECONDS
from diloco.processes.workdir import Workdir, find

POLL_SECONDS = 0.2
_EXIT_CODES = {"complete": COMPLETE, "interrupted": INTERRUPTED}

WhichRun = Annotated[
    str | None, typer.Argument(metavar="WORKDIR", help="A run's directory.  [default: the newest below ./runs]")
]


def start_detached(path: Path, words: Sequence[str]) -> int:
    """Start the run of the workdir ``path`` by the command line's ``words``, without ``--detach``; returns once its
    syncer serves, or with the exit code of a run that ended before."""
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    workdir, began = Workdir(path.absolute()), time.time()
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", suffix=".log", dir=path.absolute().parent)
    output = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "diloco.main", *(word for word in words if word != "--detach")],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        shown = 0
        while not (ended := process.poll() is not None) and not _serves(workdir, process.pid, began):
            shown = _show_new(output, shown)
            time.sleep(POLL_SECONDS)
        _show_new(output, shown)
        if ended:
            return process.returncode
        output.replace(workdir.output)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    finally:
        output.unlink(missing_ok=True)
    program, here = program_name(), short_path(workdir.path)
    print_text(f"the run goes on by itself (pid {process.pid}); its output is in {short_path(workdir.output)}")
    print_text(f"look at it: {program} attach {here}\nstop it:    {program} stop {here}", flush=True)
    return COMPLETE


def _serves(workdir: Workdir, pid: int, began: float) -> bool:
    """Whether the syncer of this process's run has served, so that its checks are over."""
    try:
        return workdir.runner() == pid and workdir.address.stat().st_mtime >= began - 1.0
    except OSError:
        return False


def _show_new(output: Path, shown: int) -> int:
    """Print what a file has beyond its byte ``shown``; returns how many bytes are shown."""
    with output.open("rb") as file:
        file.seek(shown)
        text = file.read()
    if text:
        print_text(text.decode("utf-8", "replace").rstrip("\n"), file=sys.stderr, flush=True)
    return shown + len(text)


def _running(where: str | None, usage: str) -> tuple[Workdir, int]:
    """The run that is meant, and its process. Raises CommandError if it does not run."""
    if means_job(where):
        raise CommandError(f"there is no run {where} here; {usage} takes a run's directory, such as runs/{where}")
    workdir = find(where)
    pid = workdir.runner()
    if pid is None or not workdir.is_held():
        figures = f"{program_name()} status {short_path(workdir.path)}"
        raise CommandError(f"the run in {workdir.path} is not running; its figures: {figures}")
    return workdir, pid


def add_to(app: typer.Typer) -> None:
    for run in (attach, stop, events):
        app.command()(run)


@command
def attach(what: WhichRun = None) -> int:
    """Show a run that goes on, as its own terminal does, until it ends.

    Ctrl-C leaves the screen, and the run goes on. `diloco stop` stops it. The exit code is that of the run.

    Examples:

        diloco run examples/tiny-gpt.yaml --detach

        diloco attach

        diloco attach runs/tiny-gpt
    """
    workdir, _ = _running(what, "diloco attach")
    from diloco.local.watch_status import watch_status

    print_text("Ctrl-C leaves this screen, and the run goes on", file=sys.stderr)
    try:
        watch_status(str(workdir.path), as_json=False, to_its_end=True)
        return _wait_for_end(workdir)
    except KeyboardInterrupt:
        print_text(f"\nthe run goes on; to stop it: {program_name()} stop {short_path(workdir.path)}", file=sys.stderr)
        return COMPLETE


@command
def stop(
    what: WhichRun = None,
    now: Annotated[
        bool, typer.Option("--now", help="Stop at once: what the learners have not offered is lost.")
    ] = False,
) -> int:
    """Stop a run on this machine, as Ctrl-C in its terminal does, and wait until it has ended.

    Learners offer their work, then the syncer makes a checkpoint: the same `diloco run` continues from it. Exit codes:
    0 the run has stopped or was complete, 1 it failed, 2 it does not run.

    Examples:

        diloco stop

        diloco stop runs/tiny-gpt
    """
    workdir, pid = _running(what, "diloco stop")
    os.kill(pid, signal.SIGTERM)
    if now:
        time.sleep(SAME_SIGNAL_SECONDS + 0.1)
        if workdir.runner() == pid and workdir.is_held():
            os.kill(pid, signal.SIGTERM)
    else:
        print_text(
            f"stopping the run in {short_path(workdir.path)}: learners offer their work", file=sys.stderr, flush=True
        )
    code = _wait_for_end(workdir)
    return COMPLETE if code == INTERRUPTED else code


def _wait_for_end(workdir: Workdir) -> int:
    """Wait until nobody runs the workdir, and say how the run ended; returns its exit code."""
    while workdir.runner() is not None and workdir.is_held():
        time.sleep(POLL_SECONDS)
    from diloco.local.status import read_report
    from diloco.local.summary import summary
    from diloco.text_console import TextConsole

    if not workdir.report.exists():  # it had not begun
        print_text("the run has ended, and has left no report")
        return INTERRUPTED
    report = read_report(str(workdir.path))
    TextConsole(soft_wrap=True).print(summary(report))
    return _EXIT_CODES.get(report.outcome, FAILED)


@command
def events(
    what: WhichRun = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep listing new events.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One object per line, for programs.")] = False,
) -> None:
    """List what happened to a run: what its syncer has logged, each thing once; with --json every event.

    Of a job in a cluster `diloco status JOB` shows the newest, and `kubectl get events` those of its pods too.

    Examples:

        diloco events

        diloco events runs/tiny-gpt --watch
    """
    if means_job(what):
        raise CommandError(
            f"there is no run {what} here; of a job in a cluster `diloco status {what}` shows the newest events, and "
            "`kubectl get events` those of its pods too"
        )
    from diloco.local.log_files import show_events

    show_events(find(what), watch, as_json)
