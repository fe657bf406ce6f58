"""What the files of ``training.data`` on this machine look like, before anything is started.

Only names, sizes and beginnings are looked at, of at most MOST_FILES files, and without the libraries of a learner.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import itertools
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from diloco.console import short_path
from diloco.packages import is_installed
from diloco_protocol.common.data.data_files import (
    HEAD_BYTES,
    TABLES,
    RecordFormat,
    appearance,
    binary_kind,
    head_problem,
    is_gzipped,
    is_utf8,
    record_format,
)
from diloco_protocol.common.data.local_files import NothingThere, local_files
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import Problem
from diloco_protocol.spec.training import DataSpec

MOST_FILES = 200
MOST_SAID = 3
MOST_TOKENS_A_BYTE = 11
"""Of a tokenizer other than ``bytes``: Unicode's normal forms make at most so many bytes of one, and a token has at
least one byte."""


def refused_data(job: DiLoCoJob, directory: Path) -> list[Problem]:
    """Why learners on this machine could not train on the job's data: files that are not here, records without the
    field, too little text, a package that is not installed. ``directory`` is the job file's, where relative paths
    start.

    Of a program of the user's (learners.command), which may read its data in its own way, only absent files count."""
    problems = absent_data(job, directory)
    data = job.spec.training.data
    if problems or data is None or job.spec.learners.command is not None:
        return problems
    problems = [*_record_problems(data, directory), *_binary_problems(data, directory)]
    if not problems and (said := _shortage(data, directory)):
        problems.append(Problem(data_field(data), ", ".join(local_names(data, directory)), said))
    return problems


def absent_data(job: DiLoCoJob, directory: Path) -> list[Problem]:
    """What the job names that can only mean local data, and is not on this machine (it may be where the job runs)."""
    data = job.spec.training.data
    problems: list[Problem] = []
    if data is None:
        return problems
    for name in local_names(data, directory):
        try:
            next(local_files(name, directory))
        except NothingThere as error:
            problems.append(Problem(data_field(data), name, str(error)))
        except (OSError, RuntimeError) as error:  # a name that is too long, a home that no user has
            problems.append(Problem(data_field(data), name, f"there is no such file: {error}"))
    return problems


def doubtful_data(job: DiLoCoJob, directory: Path) -> list[Problem]:
    """Warnings for local files that are read as plain text and look like something else; for a program of the user's
    also for records that the built-in trainer could not read. ``directory``: see ``refused_data``."""
    data = job.spec.training.data
    if data is None or job.spec.training.model is None:
        return []
    own = [] if job.spec.learners.command is None else _record_problems(data, directory)
    files = (file for file in _first_files(data, directory) if not _is_saved(file.parent))
    named = _named_files(data, directory)
    looks = ((file, _look(file, data, named=file in named)) for file in files)
    return [*own, *_each_once(data_field(data), directory, looks)]


def is_text_file(data: DataSpec, directory: Path) -> bool:
    """Whether a data set is a local file of records, whose text is read without the package datasets."""
    if data.source != "datasets" or data.name is None or record_format(data.name) in (None, *TABLES):
        return False
    try:
        return (directory / Path(data.name).expanduser()).is_file()
    except (OSError, RuntimeError):  # a name that is too long, a home that no user has
        return False


def data_field(data: DataSpec) -> str:
    """The field that names the data."""
    return f"spec.training.data.{'paths' if data.source == 'text' else 'name'}"


def local_names(data: DataSpec, directory: Path) -> list[str]:
    """The names in a data section that can only mean local files."""
    if data.source == "text":
        return [name for name in data.paths if name != "python-stdlib" and "://" not in name]
    if data.source == "datasets" and data.name is not None:
        return [data.name] if data.name.startswith((".", "/", "~")) or is_text_file(data, directory) else []
    return []


def _first_files(data: DataSpec, directory: Path) -> Iterator[Path]:
    """At most MOST_FILES of the files that are here and whose text learners would read."""
    if data.source == "datasets" and not is_text_file(data, directory):
        return  # a directory is for the package datasets
    left = MOST_FILES
    for name in local_names(data, directory):
        try:
            for file in itertools.islice(local_files(name, directory), left):
                left -= 1
                yield file
        except (NothingThere, OSError, RuntimeError):
            continue


def _is_saved(folder: Path) -> bool:
    """Whether save_to_disk wrote the folder: learners take its Arrow files."""
    names = (folder / "state.json", folder / "dataset_info.json")
    return all(map(os.path.isfile, names)) or os.path.isfile(folder / "dataset_dict.json")


def _record_problems(data: DataSpec, directory: Path) -> list[Problem]:
    files = (f for f in _first_files(data, directory) if record_format(f.name) in TABLES or not _is_saved(f.parent))
    return _each_once(data_field(data), directory, ((file, _record_problem(file, data.text_field)) for file in files))


def _binary_problems(data: DataSpec, directory: Path) -> list[Problem]:
    """Files without text that the job names one by one."""
    files = (file for file in _named_files(data, directory) if record_format(file.name) is None)
    looks = ((file, binary_kind(_head(file))) for file in files)
    said = ((file, f"looks like something else than text: {kind}") for file, kind in looks if kind)
    return _each_once(data_field(data), directory, said)


def _named_files(data: DataSpec, directory: Path) -> list[Path]:
    """Files that the job names one by one, and not by their directory or a glob."""
    found = []
    for name in local_names(data, directory)[:MOST_FILES]:
        with contextlib.suppress(OSError, RuntimeError):  # a name that is too long, a home that no user has
            file = directory / Path(name).expanduser()
            found += [file] if file.is_file() else []
    return found


def _each_once(field: str, directory: Path, looks: Iterable[tuple[Path, str]]) -> list[Problem]:
    """A problem for each of the things said of files, with the first file."""
    found: dict[str, list[Path]] = {}
    for file, said in looks:
        if said:
            found.setdefault(said, []).append(file)
    problems = []
    for said, those in list(found.items())[:MOST_SAID]:
        more = f" and {len(those) - 1} more" if len(those) > 1 else ""
        problems.append(Problem(field, f"{short_path(those[0], directory)}{more}", said))
    return problems


def _look(file: Path, data: DataSpec, named: bool) -> str:
    """What a file that learners read as plain text looks like instead; empty: nothing else. A ``.json`` file is read as
    plain text where its first record lacks the field. ``named``: a file without text is refused, and not left out."""
    format, field = record_format(file.name), data.text_field
    if format is not None and (format is not RecordFormat.JSON or is_gzipped(file.name)):
        return ""
    head = _head(file)
    if format is None:
        if binary := binary_kind(head):
            return "" if named else f"is left out: {binary}"
        if data.tokenizer != "bytes" and not is_utf8(head):
            return "is not UTF-8, and the tokenizer would get replacement characters: save it as UTF-8"
        looks = appearance(head)
        return f"would be read as plain bytes, and looks like something else: {looks}" if looks else ""
    said = head_problem(format, head, field)
    return f"would be read as plain bytes, and not as {format.value} with textField {field}: {said}" if said else ""


def _head(file: Path) -> bytes:
    """Empty where it cannot be read, or is no file."""
    try:
        with file.open("rb") as raw:
            return raw.read(HEAD_BYTES)
    except OSError:
        return b""


def _record_problem(file: Path, field: str) -> str:
    """Why a learner could not read the file, with the fix; empty: nothing shows."""
    format, packed = record_format(file.name), is_gzipped(file.name)
    if format in TABLES:
        missing = "" if is_installed("pyarrow") else "the package pyarrow, which is not installed"
        return f"would be read by {missing}: pip install 'decoupled-diloco[datasets]'" if missing else ""
    if format is None or (format is RecordFormat.JSON and not packed):
        return ""  # plain text at worst
    try:
        with file.open("rb") as raw:
            unpacked = gzip.GzipFile(fileobj=raw) if packed else raw
            said = head_problem(format, unpacked.read(HEAD_BYTES), field)
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        broken = packed and not isinstance(error, csv.Error)
        said = f"it cannot be {'unpacked' if broken else 'read'}: {error}"
        said += ": get it anew, or name it without .gz if it is not packed" * broken
    return f"would not be read as {format.value} with textField {field}: {said}" if said else ""


def _shortage(data: DataSpec, directory: Path) -> str:
    """Whether the files hold less than one sequence, by their sizes; empty: they do not, or sizes do not say."""
    names, length = local_names(data, directory), data.sequence_length
    if not (is_text_file(data, directory) or (data.source == "text" and len(names) == len(data.paths))):
        return ""  # some of the data are elsewhere
    most = count = whole = 0
    left_out: list[str] = []
    try:
        for file in itertools.chain.from_iterable(local_files(name, directory) for name in names):
            size = file.stat().st_size
            if record_format(file.name) is None and (kind := binary_kind(_head(file))):
                left_out.append(f"{short_path(file, directory)} ({kind})")
                if len(left_out) >= MOST_FILES:
                    return ""
                continue
            packed = is_gzipped(file.name) or record_format(file.name) in TABLES
            most += size + 1 if data.tokenizer == "bytes" else MOST_TOKENS_A_BYTE * size + 2
            count, whole = count + 1, whole + size
            if most >= length or (packed and size):
                return ""
    except (NothingThere, OSError):
        return ""
    if count == 0 and left_out:
        return f"hold no text: {len(left_out)} left out, the first {left_out[0]}"
    if whole == 0:
        return f"{'the file is' if count == 1 else f'the {count} files are'} empty: name data with text"
    holder = "the file holds" if count == 1 else f"the {count} files hold"
    return (
        f"{holder} at most {most} tokens, which is less than one sequence of training.data.sequenceLength = {length}: "
        "name more data, or shorten it"
    )
