"""What all commands share: exit codes, errors on stderr, Ctrl-C, and the forms of arguments."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import typer

from diloco.packages import import_text
from diloco_protocol.common.files import FileError, absent_text
from diloco_protocol.common.logs import printable

COMPLETE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130
TEXT_WIDTH = 100  # columns of a text that is wrapped

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,28}[a-z0-9])?")
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(s|m|min|h|d|y)?")
_SECONDS = {None: 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "y": 365.25 * 86400}


class CommandError(Exception):
    """A command cannot do what it was asked for: the message says why and the cure, ``code`` is the exit code."""

    def __init__(self, message: str, code: int = WRONG) -> None:
        super().__init__(message)
        self.code = code


def command(run: Callable[..., int | None]) -> Callable[..., None]:
    """Make a function a command: what it returns is the exit code (None: 0), a CommandError is said on stderr,
    and Ctrl-C, where the function does not handle it, ends it. A reader of its output that leaves changes no code."""

    @functools.wraps(run)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            code = run(*args, **kwargs)
        except CommandError as error:
            said, code = str(error), error.code
            is_plain = said.startswith("error") or code == INTERRUPTED
            print_text(said if is_plain else f"error: {said}", file=sys.stderr)
        except ImportError as error:
            if not (said := import_text(error)):
                raise
            print_text(f"error: {said}", file=sys.stderr)
            code = WRONG
        except KeyboardInterrupt:
            code = INTERRUPTED
        except BrokenPipeError:  # a command that only prints has nothing left to do
            code = COMPLETE
        except OSError:
            if (why := _output_error()) is None:
                raise
            print_text(f"error: the output cannot be written: {why}", file=sys.stderr)
            code = FAILED
        # Here and not when Python ends: an error has words then, and an exit code.
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BrokenPipeError:
                discard(stream)
            except OSError as error:
                discard(stream)
                print_text(f"error: the output cannot be written: {error.strerror or error}", file=sys.stderr)
                code = code or FAILED
        raise typer.Exit(code or COMPLETE)

    return wrapped


def _output_error() -> str | None:
    """Why standard output cannot be written, if it cannot. What is left of it is discarded then: Python would try again
    when it ends, and end with a code of its own."""
    try:
        print(flush=True)  # what failed may have left nothing to flush
    except OSError as error:
        discard(sys.stdout)
        return error.strerror or str(error)
    return None


def replace_unprintable() -> None:
    """Let a terminal that does not know a character show another one in its place: that is no reason to fail."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def print_text(text: str, file: IO[str] | None = None, flush: bool = False) -> None:
    """Print a text that may be others' in part, without what a terminal would obey."""
    print(printable(text), file=file, flush=flush)


def wrapped(text: str, first: str, rest: str | None = None, width: int = TEXT_WIDTH) -> list[str]:
    """A text in lines that break between words only. ``first`` and ``rest`` (None: the same) are before them."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def discard(stream: IO[str]) -> None:
    """Let what is written to a stream from now on go nowhere: its reader has left (`| head`)."""
    with contextlib.suppress(OSError, ValueError):  # a stream that is no file, or is closed
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def print_lasting(text: str, file: IO[str] | None = None) -> None:
    """``print_text`` for a program that does not end when the reader of its output leaves."""
    with lasting_output(file or sys.stdout):
        print_text(text, file=file, flush=True)


@contextlib.contextmanager
def lasting_output(stream: IO[str]) -> Iterator[None]:
    """Write to a stream. What is written once its reader has left, or its terminal was closed, goes nowhere."""
    try:
        yield
    except OSError as error:
        if not isinstance(error, BrokenPipeError) and error.errno != errno.EIO:
            raise
        discard(stream)


def unwritable_text(path: Path, error: OSError) -> str:
    """That ``path`` could not be written, and why. What the project's own writers raise says both already."""
    if isinstance(error, FileError):
        return str(error.strerror or error)
    return f"{path} cannot be written: {refusal_text(path, error)}"


def refusal_text(path: Path, error: OSError) -> str:
    """Why the system refused to write ``path``."""
    if isinstance(error, FileNotFoundError):
        return absent_text(path)
    if isinstance(error, FileExistsError | NotADirectoryError):
        inside = next((one for one in (path, *path.parents) if one.exists() and not one.is_dir()), path)
        return f"{inside} is not a directory"
    return str(error.strerror or error)


def duration(text: str) -> float:
    """``90``, ``90s``, ``10m``, ``2h``, ``1d``, ``1y`` in seconds."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no duration: write 90s, 10m, 2h, 1d or 1y")
    return float(match[1]) * _SECONDS[match[2]]


def job_file(argument: Path | None, option: Path | None, usage: str) -> Path:
    """The job file of a command that takes it as an argument or, as kubectl does, after ``-f``; ``usage``: the words
    before it. Raises CommandError unless one is named."""
    named = argument or option
    if named is None or (argument is not None and option is not None):
        raise CommandError(f"name one job file: {usage} JOB.yaml, or {usage} -f JOB.yaml")
    return named


def job_name(text: str) -> str:
    """The name of a job in a cluster."""
    if not _NAME.fullmatch(text):
        raise typer.BadParameter(f"{text!r} is no job's name: lower-case letters, digits and dashes, at most 30")
    return text


def run_or_job(text: str | None) -> str | None:
    """A run's directory, or the name of a job in a cluster; None: not given."""
    if text is not None and _NAME.fullmatch(text) is None and not Path(text).exists():
        raise typer.BadParameter(
            f"{text!r} is no run's directory, and no job's name: lower-case letters, digits and dashes, at most 30"
        )
    return text


def program_name() -> str:
    """How a person calls this program from here: ``diloco``, or by its path where the shell would not find it."""
    called = Path(sys.argv[0])
    return "diloco" if called.name != "diloco" or shutil.which("diloco") is not None else str(short_path(called))


def short_path(path: Path, directory: Path | None = None) -> Path:
    """A path below ``directory`` (None: the current one) as it is called from there; any other as it is."""
    above = directory or Path.cwd()
    return path.relative_to(above) if path.is_relative_to(above) else path


def named_job(argument: str | None, usage: str) -> str:
    """The job of a command that was sent to a cluster. Raises CommandError if none is named."""
    if argument is None:
        raise CommandError(f"name the job in the cluster: {usage} JOB")
    return argument


def means_job(argument: str | None) -> bool:
    """Whether an argument of ``status``, ``logs``, ``export`` and the like names a job in a cluster: it could be a
    job's name, and nothing on this machine is called so."""
    return argument is not None and _NAME.fullmatch(argument) is not None and not Path(argument).exists()
