"""``diloco run``: from a job file to a finished run and its report."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from diloco.checks.machine import find_absent
from diloco.checks.start import StartCheck
from diloco.console import CommandError, print_lasting, program_name, short_path, unwritable_text
from diloco.local.chaos import schedule as chaos
from diloco.local.outcome import REFUSED, RunResult, complete_report, hard_end_note, is_hard_end, last_output, read_kept
from diloco.local.runner.runner import Runner
from diloco.local.screen import make_screen
from diloco.local.summary import summary
from diloco.packages import require_packages
from diloco.processes.exit_errors import tail
from diloco.processes.launch import check_free
from diloco.processes.workdir import Workdir, claim, locked
from diloco.processes.worker_specs import ServeOptions, learner_names, without_meaning
from diloco.text_console import TextConsole
from diloco.validate import problems_text, read_job_file
from diloco_protocol.common.files import write_whole
from diloco_protocol.common.reach import is_loopback
from diloco_protocol.documents import Report
from diloco_protocol.security.credentials import CredentialsError
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import JobError, job_warnings
from diloco_protocol.wire.control_auth import make_key

LOG_LINES = 12  # shown of the log of what made a run fail


@dataclass(frozen=True, slots=True)
class RunOptions:
    job: Path
    workdir: Path | None = None
    chaos: str = ""
    overrides: Sequence[str] = field(default_factory=tuple)
    http: str = "127.0.0.1:0"
    serving: ServeOptions | None = None  # learners are other machines'
    force: bool = False  # also where memory is too little
    as_json: bool = False  # the report on stdout, all else on stderr


def run(options: RunOptions) -> int:
    """Run the job; returns the exit code. Raises CommandError."""
    job = read_job_file(options.job, options.overrides)
    try:
        schedule = chaos.check(chaos.parse(options.chaos), learner_names(job))
    except chaos.ChaosError as error:
        raise CommandError(str(error)) from error
    check_listen(options.http)
    if options.serving is not None:
        check_listen(options.serving.listen, "--listen")
    _check_packages(job, options.serving)
    path = options.workdir or Path("runs") / job.metadata.name
    is_new = not path.exists()
    with locked(path) as workdir, _removed_if_refused(workdir, is_new):
        if options.serving is None and (absent := find_absent(job, options.job.absolute().parent)):
            raise CommandError(problems_text(JobError(absent, str(options.job))))
        again = claim(workdir, job, options.job.absolute().parent)
        for warning in job_warnings(job):
            print_lasting(f"warning: {warning}", sys.stderr)
        if ignored := without_meaning(job):
            out = sys.stderr if options.as_json else None
            print_lasting(f"ignored, because they are for clusters only: {', '.join(ignored)}", out)
        result = _run_job(job, workdir, options, schedule, again=again)
        if result.ended.outcome == REFUSED:
            raise CommandError(result.ended.message, result.ended.exit_code)
        # What is complete stays as it was reported: its time, its faults.
        earlier = workdir.earlier_report() if result.complete_already else None
        if earlier is not None and result.status is not None:
            earlier = earlier.model_copy(update={"output": last_output(result.status, result.report)})
        kept = None
        if options.serving is None and is_hard_end(result):  # learners of other machines still have their work
            kept = read_kept(job, workdir.store)
            notes = [note for note in (result.ended.note, hard_end_note(result, kept)) if note]
            result = replace(result, ended=replace(result.ended, note="; ".join(notes)))
        report = earlier or complete_report(result, job, workdir.metrics, kept)
        data = report.model_dump_json(indent=1).encode() + b"\n"
        unwritten = 0
        try:
            workdir.path.mkdir(parents=True, exist_ok=True)
            write_whole(workdir.report, data)
        except OSError as error:
            print_lasting(f"error: {unwritable_text(workdir.report, error)}", sys.stderr)
            unwritten = 1
        _tell(result, report, workdir, options.as_json)
        return result.ended.exit_code or unwritten


@contextlib.contextmanager
def _removed_if_refused(workdir: Workdir, is_new: bool) -> Iterator[None]:
    """Leave nothing of a run that was refused before it began. ``is_new``: this command has made the directory."""
    try:
        with workdir.unchanged_if_refused():
            yield
    except (CommandError, KeyboardInterrupt):
        if is_new and not workdir.has_begun():
            shutil.rmtree(workdir.path, ignore_errors=True)
        raise


def _check_packages(job: DiLoCoJob, serving: ServeOptions | None) -> None:
    """Raise PackagesMissing unless all that processes here need is installed."""
    spec, own = job.spec, job.spec.learners.command
    trains = serving is None and (own is None or own[0] == "python")  # another program brings its own packages
    scores = spec.evaluated and spec.evaluator.command is None and (serving is None or serving.evaluator)
    extras = ["syncer", *(["worker"] if trains or scores else [])]
    require_packages("diloco run" if serving is None else "diloco syncer serve", extras)


def check_listen(address: str, option: str = "--http") -> None:
    """Raise CommandError unless this machine can listen on ``address`` (host:port, port 0: any)."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise CommandError(f"{option} {address}: write host:port, such as 127.0.0.1:8080")
    try:
        check_free(address)
    except OSError as error:
        number = error.errno or 0
        if number < 0:  # getaddrinfo's
            raise CommandError(f"{option} {address}: there is no such host; write 127.0.0.1:0") from error
        cure = "an address of this machine" if number == errno.EADDRNOTAVAIL else "another port"
        raise CommandError(
            f"{option} {address}: cannot listen there ({os.strerror(number) if number else error});"
            f" choose {cure}, or leave it out"
        ) from error


def _run_job(
    job: DiLoCoJob, workdir: Workdir, options: RunOptions, schedule: Sequence[chaos.Fault], again: bool
) -> RunResult:
    try:
        for key in (workdir.control_key, workdir.join_token):
            make_key(key)
    except (CredentialsError, OSError) as error:
        raise CommandError(f"workdir {workdir.path}: {error}") from error
    screen = make_screen(stderr=options.as_json)
    try:
        if options.serving is not None:
            screen.event(_how_to_join(options.serving, workdir))
            if job.spec.evaluated and not options.serving.evaluator:
                screen.event("the merged model is not evaluated (see --evaluator, --evaluator-credentials)", "yellow")
        learners = job.spec.slots
        starting = f"{job.metadata.name}: {learners} learner{'s' * (learners != 1)} in {workdir.path}"
        starting = f"{'continuing' if again else 'starting'} {starting}"
        check = StartCheck(job, options.job, workdir, options.force, tell=screen.event)
        runner = Runner(
            job,
            workdir,
            options.job.absolute().parent,
            schedule,
            screen=screen,
            http=options.http,
            serving=options.serving,
        )
        return asyncio.run(runner.run(starting, None if options.serving is not None else check.check))
    finally:
        screen.close()


def _how_to_join(serving: ServeOptions, workdir: Workdir) -> str:
    host, _, port = serving.listen.rpartition(":")
    words = "--credentials DIR"
    if serving.credentials is None:
        words = f"--join-token-file {workdir.join_token.absolute()}"
    if is_loopback(host):
        return f"join on this machine with: diloco learner join {serving.listen} {words}"
    copy = "" if serving.credentials is not None else " (or a copy of it)"
    return f"join from other machines with: diloco learner join ADDRESS:{port} {words}{copy}; ADDRESS is this machine's"


def _tell(result: RunResult, report: Report, workdir: Workdir, as_json: bool) -> None:
    ended = result.ended
    if as_json:
        print_lasting(report.model_dump_json(indent=1))
    console = TextConsole(soft_wrap=True, stderr=as_json)  # lines that a person can copy
    console.print()
    console.print(summary(report, ended.outcome))  # why is said below
    if workdir.report.is_file():
        console.print(f"report: {workdir.report}", highlight=False)
    if ended.outcome == "complete" and ended.exit_code:
        print_lasting(f"error: {ended.message}", sys.stderr)
    if ended.outcome == "interrupted":
        begun = f"continues from {workdir.store}" if workdir.has_begun() else "starts anew: nothing was trained yet"
        if ended.note:
            print_lasting(f"note: {ended.note}", sys.stderr)
        console.print(f"the same command {begun}", highlight=False)
    if report.merges and ended.outcome != "failed":
        console.print("\n  ".join(["next:", *next_commands(workdir)]), highlight=False)
    if ended.outcome == "failed":
        print_lasting(f"error: {report.message or 'the job failed'}", sys.stderr)
        if ended.log_of:
            log = workdir.log(ended.log_of)
            print_lasting(f"the end of {log}:", sys.stderr)
            for line in tail(log, LOG_LINES, ended.log_begin):
                print_lasting(f"  {line}", sys.stderr)


def next_commands(workdir: Workdir) -> list[str]:
    """What a person does with a model that was trained: the commands."""
    here = short_path(workdir.path)
    model = Path("model") if not Path("model").exists() else Path(f"{workdir.path.name}-model")
    program = program_name()
    commands = [f"{program} export {here} {model}/", f"{program} report {here} --html"]
    return (
        [*commands, f"{program.removesuffix('diloco')}tensorboard --logdir {here / 'tensorboard'}"]
        if workdir.tensorboard.is_dir()
        else commands
    )
