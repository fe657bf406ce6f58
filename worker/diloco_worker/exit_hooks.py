"""How a user's own program ends when it does not handle an error.

The built-in program logs what went wrong and ends with the error's exit code. A program that only imports the
library would end with a traceback and exit code 1 whatever the error was, and an operator or runner could not tell
a wrong configuration, which no restart cures, from a fault. So the interpreter's hook for uncaught exceptions
(``sys.excepthook``) does the same for it.

Why it ended a program in a pod writes into the file that the kubelet reads after every end
(``write_termination_message``): of an error the end of its traceback, and the error itself in the last line. Of a
program that could not write it, the kubelet keeps the end of the log (FallbackToLogsOnError).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

from diloco_protocol.common.program_errors import error_line, last_lines
from diloco_protocol.vocabulary import WorkerExit
from diloco_worker.settings import WorkerError

log = logging.getLogger("diloco_worker")

_previous = sys.excepthook
_json = False

TERMINATION_LOG = "DILOCO_TERMINATION_LOG"  # names the file, where the pod's terminationMessagePath is another
_DEFAULT_TERMINATION_LOG = "/dev/termination-log"  # made by the kubelet
_MAX_TERMINATION_BYTES = 4096  # so much of it the kubelet keeps


def write_termination_message(text: str, path: Path | None = None, keep: bool = False) -> None:
    """Write ``text`` to the pod's termination log; outside of a pod do nothing. Of a long text it is the end. ``keep``:
    leave a message that is there as it is."""
    path = path or Path(os.environ.get(TERMINATION_LOG) or _DEFAULT_TERMINATION_LOG)
    with contextlib.suppress(OSError), path.open("r+b") as file:  # else the pod's end is reported without a reason
        fcntl.flock(file, fcntl.LOCK_EX)  # the ranks of a pod write into one file
        if not (keep and file.read(1)):
            file.truncate(0)
            os.pwrite(file.fileno(), text.encode("utf-8", "replace")[-_MAX_TERMINATION_BYTES:], 0)


def write_error(error: BaseException) -> None:
    """Leave ``error_text`` as the termination message. That another rank has ended says nothing of the cause, so a
    rank that ends of it leaves it only where there is no message yet."""
    write_termination_message(error_text(error), keep=getattr(error, "exit_code", None) == WorkerExit.GROUP)


def error_text(error: BaseException) -> str:
    """What is left of an error for who looks at the pod, which shows the last line first: of a WorkerError its message
    in one line; of any other the end of its traceback, and last the error itself."""
    if isinstance(error, WorkerError):
        return " ".join(str(error).split())
    lines = "".join(traceback.format_exception(error)).splitlines()
    shown, last = last_lines(lines), error_line(lines)
    return "\n".join(shown if shown[-1:] == [last] else [*shown, last])


def install(json: bool = False) -> None:
    """From now on log an uncaught WorkerError as one line and end with its exit code; with ``json`` log every other
    uncaught error too: its traceback, and last the error itself."""
    global _previous, _json
    _json |= json
    if sys.excepthook is not _end:
        _previous, sys.excepthook = sys.excepthook, _end


def _end(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    if isinstance(value, Exception):
        with contextlib.suppress(Exception):  # an error whose text cannot be made ends the program all the same
            write_error(value)
    if isinstance(value, WorkerError):
        log.error("%s", value)
        raise SystemExit(value.exit_code)
    if _json and isinstance(value, Exception):
        log.error("not handled", exc_info=(kind, value, trace))
        log.error("failed: %s: %s", kind.__name__, value)
        return
    _previous(kind, value, trace)
