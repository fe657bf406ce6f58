"""What is wrong with a job, as a worker finds out: the field, its value, the cure."""

from __future__ import annotations

from typing import Any

from diloco_protocol.spec.load import JobError, Problem


def job_error(path: str, value: Any, message: str) -> JobError:
    """An error of one problem. ``path`` begins with spec; ``message`` says what is wrong, and the cure."""
    return JobError([Problem(path, value, message)])
