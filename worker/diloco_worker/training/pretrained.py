"""Where weights to start from are: ``training.model.from`` as something that transformers can open.

A directory stays where it is, a name on Hugging Face is left to transformers, and a URI is
copied whole into the cache once, under a name that the URI gives.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from diloco_protocol.common import files
from diloco_protocol.spec.load import JobError
from diloco_worker.data.directories import directory_or_name
from diloco_worker.errors import job_error

FIELD = "spec.training.model.from"
# What a model's directory needs; other files (optimizer states, pickled weights) are left where they are.
_SUFFIXES = (".safetensors", ".json", ".model", ".txt")


def local_directory(source: str, directory: Path | None = None) -> str:
    """A directory's path, or ``source`` itself if it is a name on Hugging Face.

    Relative paths start at ``directory`` (default: DILOCO_JOB_DIRECTORY, the job
    file's, else the current one). Raises JobError if it names nothing.
    """
    if "://" in source:
        return str(_fetched(source))
    return directory_or_name(source, FIELD, directory)


def _fetched(uri: str) -> Path:
    """The URI's files in the cache. Two processes may copy at once: a directory is there in whole."""
    import fsspec

    workdir = os.environ.get("DILOCO_WORKDIR")
    cache = (
        Path(workdir) / "cache"
        if workdir
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diloco"
    )
    target = cache / f"weights-{hashlib.sha256(uri.encode()).hexdigest()[:16]}"
    if target.is_dir():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        filesystem, root = fsspec.core.url_to_fs(uri)
        names = [n for n in filesystem.find(root, maxdepth=1) if n.endswith(_SUFFIXES)]
        if not names:
            raise job_error(FIELD, uri, "holds no config.json and no safetensors weights")
        with files.create_directory(target) as temporary:
            for name in names:
                filesystem.get_file(name, str(temporary / name.rsplit("/", 1)[-1]))
    except JobError:
        raise
    except Exception as e:  # a driver of fsspec may raise its client's own classes
        if not target.is_dir():  # else another process was first, with the same files
            raise job_error(FIELD, uri, f"could not be copied: {type(e).__name__}: {e}") from e
    return target
