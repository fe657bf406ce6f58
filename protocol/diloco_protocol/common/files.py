"""Whole files or none.

Everything the project keeps on a disk goes through here: the bytes are written to a temporary file in the same
directory, flushed to the device, and only then given their name, by ``rename`` (replacing) or ``link`` (exclusive). A
reader therefore sees the old file, the new file or no file, never half of one, and after a power cut too, because the
directory is flushed as well. A failed write removes its temporary file; what a killed process left behind has the
suffix ``.tmp`` and is removed by ``remove_leftovers``.

What is written is its owner's alone (0600, folders 0700), whatever the umask: it is somebody's model. In a folder with
the set-group-ID bit it is the group's too (0660, 2770). Kubernetes sets that bit on a volume where a pod has an
fsGroup, and the next pod may run as another user of that group. What a user asks for by name, to be used elsewhere, is
written with ``PUBLIC`` instead: there the umask decides.

Errors name the path, what was to be written and what to do: a full disk is ``DiskFull`` (with bytes needed and free), a
file system that cannot do what is needed or may not be written is ``NotWritable``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

Buffer = bytes | bytearray | memoryview
TEMPORARY = ".tmp"
PUBLIC = 0o666  # less the umask
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR})


class FileError(OSError):
    """A file could not be written or read; the message says which, why and the cure."""


class DiskFull(FileError):
    """No space, or no quota, left for the file."""


class NotWritable(FileError):
    """The directory may not be written, or the file system lacks what is needed."""


class TooLarge(FileError):
    """The file is larger than anything it may hold."""


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write on the file system of ``path`` (or its nearest parent)."""
    while not path.exists() and path != path.parent:
        path = path.parent
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def _explained(error: OSError, path: Path, size: int) -> OSError:
    if isinstance(error, FileError | FileExistsError):
        return error
    if error.errno in _FULL:
        try:
            free = f"{free_bytes(path.parent)} bytes are free"
        except OSError:
            free = "how many are free is unknown"
        return DiskFull(
            error.errno, f"disk full: {size} bytes are needed for {path} and {free}; make room or use another disk"
        )
    if error.errno in _FORBIDDEN:
        return NotWritable(
            error.errno, f"cannot write {path}: {os.strerror(error.errno or 0)}; check its owner and mount options"
        )
    if isinstance(error, FileNotFoundError):
        return NotWritable(error.errno, f"cannot write {path}: {absent_text(path)}")
    return error


def absent_text(path: Path) -> str:
    """Why making ``path`` ended with ENOENT: which directory does not exist, or that the file system of the one that
    does, such as /proc, lets no files be made."""
    above = path.parent
    while not above.exists() and above != above.parent:
        above = above.parent
    if above == path.parent:
        return f"the file system of {above} takes no new files"
    return f"there is no directory {path.parent}"


def flush_to_device(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to the device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_name(path: Path) -> None:
    """Flush that ``path`` is there, in the directory above it, unless that may not be read."""
    with contextlib.suppress(PermissionError):
        flush_to_device(path.absolute().parent)


def _is_groups(folder: Path) -> bool:
    return bool(folder.stat().st_mode & stat.S_ISGID)


def make_directory(path: Path) -> None:
    """Make a private directory and those above it that are missing, durably; one that is there stays as it is.

    Raises FileExistsError if there is something else.
    """
    for each in reversed([path, *path.parents]):
        if each.exists():
            continue
        each.mkdir(0o700, exist_ok=True)
        if _is_groups(each.parent):
            with contextlib.suppress(OSError):  # a file system without modes
                each.chmod(0o2770)
        flush_name(each)
    path.mkdir(exist_ok=True)


@contextlib.contextmanager
def _temporary(path: Path, parts: Iterable[Buffer], mode: int | None) -> Iterator[Path]:
    """A flushed temporary file beside ``path`` that holds ``parts``; removed on leaving. ``mode`` is less the umask;
    None: private."""
    views = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
    size = sum(view.nbytes for view in views)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}{TEMPORARY}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o600 if mode is None else mode)
        try:
            if mode is None and _is_groups(path.parent):
                with contextlib.suppress(OSError):  # a file system without modes
                    os.fchmod(descriptor, 0o660)
            for view in views:
                while view.nbytes:
                    view = view[os.write(descriptor, view[: 1 << 26]) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        yield temporary
    except OSError as error:
        explained = _explained(error, path, size)
        if explained is error:
            raise
        raise explained from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def write_whole(path: str | os.PathLike[str], *parts: Buffer, mode: int | None = None) -> None:
    """Make ``path`` hold the concatenated ``parts``, replacing what was there, durably. ``mode`` None: private.

    Raises ``DiskFull`` or ``NotWritable``; then the old file is untouched.
    """
    path = Path(path)
    with _temporary(path, parts, mode) as temporary:
        os.replace(temporary, path)
        flush_to_device(path.parent)


def create_whole(path: str | os.PathLike[str], *parts: Buffer, mode: int | None = None) -> None:
    """Make ``path`` hold ``parts``, durably, unless it exists: then ``FileExistsError``. ``mode`` None: private.

    Of several processes that try at once exactly one succeeds, and nobody ever
    sees the name with other than its whole content. Needs hard links.
    """
    path = Path(path)
    with _temporary(path, parts, mode) as temporary:
        try:
            os.link(temporary, path)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise NotWritable(
                    error.errno,
                    f"cannot create {path} exclusively: its file system has no hard links; "
                    "use another volume or an object store",
                ) from error
            raise
        flush_to_device(path.parent)


def require_free(path: Path) -> None:
    """Raise FileExistsError if ``path`` is there already and not an empty directory."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(errno.EEXIST, "exists already: name a new directory, or remove it", str(path))


@contextlib.contextmanager
def create_directory(path: Path) -> Iterator[Path]:
    """Make a directory that is whole under its name or not there: fill what this yields, another one beside it, which
    is synced and renamed at the end. Its files can be read by whom the umask lets. Subdirectories are not synced.

    Raises FileExistsError if ``path`` is there already and not an empty directory.
    """
    path = path.absolute()
    require_free(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(6)}")
    temporary.mkdir()
    try:
        yield temporary
        readable = stat.S_IMODE(temporary.stat().st_mode) & 0o666
        for part in (*temporary.iterdir(), temporary):
            if part.is_file():
                with contextlib.suppress(OSError):  # a file system without modes
                    part.chmod(readable)  # libraries write theirs for their user alone, or do not
            flush_to_device(part)
        if path.is_dir():
            path.rmdir()
        temporary.rename(path)
        flush_to_device(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_bounded(path: str | os.PathLike[str], limit: int) -> bytes:
    """The file's bytes; ``TooLarge`` if there are more than ``limit``, before reading them."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise TooLarge(errno.EFBIG, f"{path} has {size} bytes; at most {limit} are allowed")
        # Python allocates what it is asked for, so the bound itself is never asked for.
        data = file.read(size + 1)
        while size < len(data) <= limit and (more := file.read(1 << 20)):  # it has grown meanwhile
            data += more
    if len(data) > limit:
        raise TooLarge(errno.EFBIG, f"{path} has more than {limit} bytes")
    return data


def remove_leftovers(directory: str | os.PathLike[str]) -> int:
    """Remove temporary files that killed writers left in ``directory``; returns how many.

    Only for directories of which the caller is the only writer.
    """
    removed = 0
    for entry in os.scandir(directory):
        if entry.name.startswith(".") and entry.name.endswith(TEMPORARY) and entry.is_file(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.path)
                removed += 1
    return removed
