"""What is wrong with a job, as a worker finds out: the field, its value, the cure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from diloco_protocol.spec.load import JobError, Problem


def job_error(path: str, value: Any, message: str) -> JobError:
    """An error of one problem. ``path`` begins with spec; ``message`` says what is wrong, and the cure."""
    return JobError([Problem(path, value, message)])


def shorten(names: Sequence[str], count: int = 6) -> str:
    """The first ``count`` names, and how many more there are."""
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def one_line(error: Exception, last: bool = False) -> str:
    """The first line (or the ``last``) of a library's error message, without the name of its class before it; the
    class's name where there is no message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return re.sub(r"^\w*Error: ", "", lines[-1 if last else 0])
