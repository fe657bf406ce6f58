"""How a user's own program ends when it does not handle an error.

The built-in program logs what went wrong and ends with the error's exit code. A program that only imports the
library would end with a traceback and exit code 1 whatever the error was, and an operator or runner could not tell
a wrong configuration, which no restart cures, from a fault. So the interpreter's hook for uncaught exceptions
(``sys.excepthook``) does the same for it.

Of a program that fails, the kubelet keeps the end of the log (FallbackToLogsOnError). A program that ends well
writes why into the file that the kubelet reads after every end (``write_termination_message``).
"""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path
from types import TracebackType

from diloco_worker.settings import WorkerError

log = logging.getLogger("diloco_worker")

_previous = sys.excepthook
_json = False

TERMINATION_LOG = Path("/dev/termination-log")  # made by the kubelet (terminationMessagePath)


def write_termination_message(text: str, path: Path = TERMINATION_LOG) -> None:
    """Write ``text`` to the pod's termination log; outside of a pod do nothing."""
    with contextlib.suppress(OSError):  # then the pod's end is reported without a reason
        if path.exists():
            path.write_text(text)


def install(json: bool = False) -> None:
    """From now on log an uncaught WorkerError as one line and end with its exit code; with ``json`` log every other
    uncaught error too: its traceback, and last the error itself."""
    global _previous, _json
    _json |= json
    if sys.excepthook is not _end:
        _previous, sys.excepthook = sys.excepthook, _end


def _end(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    if isinstance(value, WorkerError):
        log.error("%s", value)
        raise SystemExit(value.exit_code)
    if _json and isinstance(value, Exception):
        log.error("not handled", exc_info=(kind, value, trace))
        log.error("failed: %s: %s", kind.__name__, value)
        return
    _previous(kind, value, trace)
