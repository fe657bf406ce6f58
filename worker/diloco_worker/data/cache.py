"""Token arrays on disk, written once and mapped by every process of a machine.

Three learners and an evaluator read the same tokens. Whoever comes first takes the file's lock, tokenises and writes;
the others wait for the lock and map the finished file, so that the work is done once and the memory is shared. A file
under its final name is whole: it is written under another name, synced and renamed. Its name carries a digest of
everything that went into it (files with their sizes and times, the tokenizer), so that a changed corpus is another
file.

Without a directory the tokens go to an unnamed temporary file of this process.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from diloco_protocol.common import files

log = logging.getLogger(__name__)

FORMAT = 1
LOCK_TIMEOUT_SECONDS = 3600.0
LOCK_POLL_SECONDS = 0.05


class CacheError(Exception):
    """The token file cannot be written or waited for; the message names it and the cure."""


def digest(parts: object) -> str:
    """16 hex digits that identify a JSON-serialisable description of the tokens' origin."""
    text = json.dumps([FORMAT, parts], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def facts_path(directory: Path, key: str) -> Path:
    """Where lies what was found in the data, beside their token file."""
    return directory / f"tokens-{key}.json"


def token_array(
    produce: Callable[[], Iterable[NDArray[np.generic]]], dtype: np.dtype[np.generic], directory: Path | None, key: str
) -> NDArray[np.generic]:
    """The tokens as one read-only array of ``dtype``, mapped from a file.

    ``produce`` yields them in pieces, in order; it is called only if no process has done so before for this ``key``
    in this ``directory`` (None: a private temporary file). Raises CacheError if the file cannot be written.
    """
    try:
        if directory is None:
            with tempfile.TemporaryFile(prefix="diloco-tokens-") as file:
                _write(file, produce(), dtype)
                return _mapped(file, dtype)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"tokens-{key}.{dtype.name}"
        if not path.exists():
            with _locked(directory / f"tokens-{key}.lock"):
                if not path.exists():
                    _write_whole(path, produce(), dtype)
        with path.open("rb") as file:
            return _mapped(file, dtype)
    except OSError as e:
        where = directory or Path(tempfile.gettempdir())
        raise CacheError(
            f"the token file cannot be written in {where}: {e.strerror or e}; "
            "free space there, or choose another --workdir"
        ) from e


def _write(file: IO[bytes], pieces: Iterable[NDArray[np.generic]], dtype: np.dtype[np.generic]) -> None:
    for piece in pieces:
        file.write(np.ascontiguousarray(piece, dtype=dtype).tobytes())
    file.flush()


def _write_whole(path: Path, pieces: Iterable[NDArray[np.generic]], dtype: np.dtype[np.generic]) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    started = time.monotonic()
    try:
        with temporary.open("wb") as file:
            _write(file, pieces, dtype)
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    files.flush_to_device(path.parent)
    count = path.stat().st_size // dtype.itemsize
    log.info("wrote %d tokens to %s in %.1f s", count, path, time.monotonic() - started)


def _mapped(file: IO[bytes], dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    size = os.fstat(file.fileno()).st_size
    if size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(file, dtype=dtype, mode="r", shape=(size // dtype.itemsize,))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the file's lock; the system gives it up for a process that dies."""
    deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
    waiting = False
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    log.info("another process is reading the data; waiting for it")
                    waiting = True
                if time.monotonic() > deadline:
                    raise CacheError(
                        f"another process has held {path} for {LOCK_TIMEOUT_SECONDS:.0f} s; "
                        "if none is tokenising, stop it, or choose another --workdir"
                    ) from None
                time.sleep(LOCK_POLL_SECONDS)
        yield
