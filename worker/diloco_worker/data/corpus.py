"""Documents of a text corpus: files, directories, globs, URIs, and the corpus that is on every machine.

``documents(paths, directory)`` lists them in one order, the same in every process: entries in the order of
``training.data.paths``, within an entry sorted by name. Nothing is read until a document is opened; size and stamp
identify its content well enough to name a cached token file.

The built-in corpus ``python-stdlib`` is the standard library's own source, as bytes: every ``.py`` file beneath the
interpreter's library directory but for tests, installed packages and files generated for the machine. It is the same
for everyone who runs the same interpreter, and some 14 million bytes.
"""

from __future__ import annotations

import glob
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from diloco_protocol.common.data.local_files import NothingThere, files_beneath, local_files
from diloco_protocol.spec.load import JobError, Problem
from diloco_worker.errors import job_error

BUILT_IN = "python-stdlib"
FIELD = "spec.training.data.paths"

_STDLIB_SKIPPED_DIRECTORIES = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
# Written when the interpreter was built, full of paths and flags of that machine.
_STDLIB_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")


@dataclass(frozen=True, slots=True)
class Document:
    """One file: where it is, its size in bytes, and a stamp that changes with its content. ``chosen``: the job names
    it, and not only a directory or a glob that has it."""

    uri: str
    size: int
    stamp: str
    filesystem: Any = None  # fsspec file system for a URI, None for a local file
    chosen: bool = False

    def read(self, most: int | None = None) -> bytes:
        """All its bytes, or the first ``most``. Raises JobError naming the file if it cannot be read."""
        if most is not None:
            with self.open() as file:
                return file.read(most)
        try:
            if self.filesystem is None:
                return Path(self.uri).read_bytes()
            return bytes(self.filesystem.cat_file(self.uri))
        except Exception as e:  # a driver of fsspec may raise its client's own classes
            raise job_error(FIELD, self.uri, f"cannot be read: {words_of(e)}") from e

    def open(self) -> IO[bytes]:
        """Its bytes, to be read piece by piece. Raises JobError naming the file if it cannot be opened."""
        try:
            if self.filesystem is None:
                return Path(self.uri).open("rb")
            found: IO[bytes] = self.filesystem.open(self.uri, "rb")
            return found
        except Exception as e:  # a driver of fsspec may raise its client's own classes
            raise job_error(FIELD, self.uri, f"cannot be read: {words_of(e)}") from e


def documents(paths: Sequence[str], directory: Path) -> list[Document]:
    """Every document of these paths; relative ones start at ``directory``.

    A document that two paths name comes once, at its first place. Raises
    JobError with one problem per path that names nothing.
    """
    found: dict[str, Document] = {}
    problems: list[Problem] = []
    for i, path in enumerate(paths):
        try:
            here = list(_expand(path, directory))
        except NothingThere as e:
            problems.append(Problem(f"{FIELD}.{i}", path, str(e)))
            continue
        for document in here:
            found.setdefault(document.uri, document)
    if problems:
        raise JobError(problems)
    return list(found.values())


def standard_library() -> Path:
    """The directory that the built-in corpus is read from. Raises JobError where there is no source."""
    root = Path(sysconfig.get_paths()["stdlib"])
    if not (root / "os.py").is_file():
        raise job_error(FIELD, BUILT_IN, f"this Python keeps no source in {root}; name files or a directory instead")
    return root


def standard_library_files() -> list[Path]:
    """The built-in corpus's files, sorted by their path relative to the library directory."""

    def skip(name: str) -> bool:
        return name in _STDLIB_SKIPPED_DIRECTORIES or name.startswith(_STDLIB_SKIPPED_PREFIXES)

    return _sorted(files_beneath(standard_library(), skip, ".py"))


def _expand(path: str, directory: Path) -> Iterator[Document]:
    if path == BUILT_IN:
        yield from map(_local, standard_library_files())
    elif "://" in path:
        yield from _remote(path)
    else:
        files = _sorted(local_files(path, directory))
        chosen = files == [directory / Path(path).expanduser()]
        yield from (_local(file, chosen) for file in files)


def _local(path: Path, chosen: bool = False) -> Document:
    try:
        facts = path.stat()
    except OSError as e:
        raise NothingThere(f"cannot be read: {path}: {e.strerror}") from e
    return Document(str(path), facts.st_size, str(facts.st_mtime_ns), chosen=chosen)


def _sorted(files: Iterable[Path]) -> list[Path]:
    return sorted(files, key=Path.as_posix)


def _remote(uri: str) -> Iterator[Document]:
    import fsspec

    try:
        filesystem, path = fsspec.core.url_to_fs(uri)
        if glob.has_magic(path):
            names = sorted(filesystem.glob(path))
        elif filesystem.isdir(path):
            names = sorted(n for n in filesystem.find(path) if "/." not in n.removeprefix(path))
        else:
            names = [path]
        listed = [(name, filesystem.info(name)) for name in names]
    except ImportError as e:
        raise NothingThere(f"{e}: install the fsspec driver for it") from e
    except (ValueError, NotImplementedError) as e:
        raise NothingThere(f"not a URI that fsspec can read: {e}") from e
    except FileNotFoundError as e:
        raise NothingThere("nothing there") from e
    except Exception as e:  # a driver of fsspec may raise its client's own classes
        raise NothingThere(f"cannot be read: {words_of(e)}") from e
    files = [(name, info) for name, info in listed if info.get("type") != "directory"]
    if not files:
        raise NothingThere("names no file")
    for name, info in files:
        stamp = next((str(info[k]) for k in ("ETag", "etag", "mtime", "LastModified", "created") if info.get(k)), "")
        yield Document(
            filesystem.unstrip_protocol(name), int(info.get("size") or 0), stamp, filesystem, chosen=names == [path]
        )


def words_of(error: BaseException) -> str:
    """What an error of the system or of a driver says, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"
