"""Names that mean a directory here, or something on Hugging Face's hub: of weights, and of a tokenizer."""

from __future__ import annotations

import os
from pathlib import Path

from diloco_worker.errors import job_error


def directory_or_name(name: str, field: str, directory: Path | None = None) -> str:
    """A directory's path, or ``name`` itself if it is one on Hugging Face.

    Relative paths start at ``directory`` (default: DILOCO_JOB_DIRECTORY, the job file's, else the current one). Raises
    JobError on the ``field`` if the name can only mean a directory, and there is none."""
    path = (directory or Path(os.environ.get("DILOCO_JOB_DIRECTORY") or Path.cwd())) / Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or path.exists():
        raise job_error(field, name, f"no such directory: {path}")
    return name
