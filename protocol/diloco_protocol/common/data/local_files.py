"""The local files that an entry of ``training.data.paths`` names, found one after the other."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator
from pathlib import Path


class NothingThere(Exception):
    """The entry names no file; the message says why."""


def local_files(path: str, directory: Path) -> Iterator[Path]:
    """The files of a path, of a directory's name or of a glob; relative ones start at ``directory``.

    In a directory, files and folders whose names begin with a dot are left out. Raises NothingThere, at the end, if
    there is no file."""
    where = directory / Path(path).expanduser()
    if where.is_file():
        yield where
        return
    if where.is_dir():
        files, said = files_beneath(where, lambda name: name.startswith(".")), f"the directory {where} holds no files"
    elif glob.has_magic(path):
        names = sorted(glob.glob(str(where), recursive=True))
        files, said = (Path(name) for name in names if os.path.isfile(name)), f"no file matches {where}"
    else:
        files = iter(())
        said = f"there is no such file or directory: {where} (relative paths start at {directory})"
    found = False
    for file in files:
        found = True
        yield file
    if not found:
        raise NothingThere(said)


def files_beneath(root: Path, skip: Callable[[str], bool], suffix: str = "") -> Iterator[Path]:
    """Regular files of that suffix, folder by folder; ``skip`` tells which files and folders are left out."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not skip(name))
        paths = (Path(folder, name) for name in sorted(names) if name.endswith(suffix) and not skip(name))
        yield from (path for path in paths if path.is_file())
