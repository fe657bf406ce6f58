"""What the files of ``training.data`` on this machine look like, before anything is started.

Only beginnings are read, of at most MOST_FILES files, and without the libraries of a learner.
"""

from __future__ import annotations

import csv
import glob
import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from diloco_protocol.common.data_files import (
    HEAD_BYTES,
    TABLES,
    RecordFormat,
    appearance,
    head_problem,
    is_gzipped,
    record_format,
)
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import Problem

MOST_FILES = 200
MOST_SAID = 3


def doubtful_data(job: DiLoCoJob, directory: Path) -> list[Problem]:
    """Warnings for local files whose records lack the field, and for those that are read as plain text and look like
    something else. ``directory`` is the job file's, where relative paths start."""
    data = job.spec.training.data
    if data is None or job.spec.training.model is None:
        return []
    names = data.paths if data.source == "text" else [data.name] if data.source == "datasets" and data.name else []
    field = "spec.training.data.paths" if data.source == "text" else "spec.training.data.name"
    found: dict[str, list[Path]] = {}
    for file in _local_files(names, directory):
        if said := _problem(file, data.text_field):
            found.setdefault(said, []).append(file)
    problems = []
    for said, those in list(found.items())[:MOST_SAID]:
        more = f" and {len(those) - 1} more" if len(those) > 1 else ""
        problems.append(Problem(field, _shown(those[0], directory) + more, said))
    return problems


def _local_files(names: list[str], directory: Path) -> Iterator[Path]:
    """At most MOST_FILES of the files that a learner would read here."""
    left = MOST_FILES
    for name in names:
        if "://" in name or name == "python-stdlib":
            continue
        try:
            for path in sorted(glob.glob(str(directory / Path(name).expanduser()), recursive=True))[:left]:
                for file in _files_of(Path(path)):
                    yield file
                    left -= 1
                    if left == 0:
                        return
        except (OSError, RuntimeError):  # a name that is too long, a home that nobody has
            continue


def _files_of(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        if {"state.json", "dataset_info.json"} <= set(names) or "dataset_dict.json" in names:
            folders.clear()  # written by save_to_disk: learners take its Arrow files
            continue
        yield from (file for n in sorted(names) if not n.startswith(".") and (file := Path(folder, n)).is_file())


def _problem(file: Path, field: str) -> str:
    format, packed = record_format(file.name), is_gzipped(file.name)
    if format in TABLES:
        return ""  # their columns are for pyarrow to read
    try:
        with file.open("rb") as raw:
            if format is None:
                looks = appearance(raw.read(HEAD_BYTES))
                return f"would be read as plain bytes, and looks like something else: {looks}" if looks else ""
            unpacked = gzip.GzipFile(fileobj=raw) if packed else raw
            said = head_problem(format, unpacked.read(HEAD_BYTES), field)
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        said = f"it cannot be read: {error}"
    if not said or format is None:
        return said
    # Learners take a .json file without the field for plain text; a compressed one they refuse.
    kept = "be read as plain bytes, and not" if format is RecordFormat.JSON and not packed else "not be read"
    return f"would {kept} as {format.value} with textField {field}: {said}"


def _shown(file: Path, directory: Path) -> str:
    return str(file.relative_to(directory)) if file.is_relative_to(directory) else str(file)
