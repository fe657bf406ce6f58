"""The directory of one run: what lies where, who may use it, and for which job.

One run at a time (``run.lock``, released by the kernel when the runner ends, however it ends), one job for its whole
life (``job.json``): a second run goes on from the store, so what may not change after a job's start may not differ.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.console import CommandError, unwritable_text
from diloco_protocol.common.files import FileError, make_directory, read_bounded, write_whole
from diloco_protocol.documents import Report, read_document

if TYPE_CHECKING:
    from diloco_protocol.spec.job import DiLoCoJob

MAX_REPORT_BYTES = 64 << 20

# What a store holds before version 0 is in it; deleting it loses nothing.
_NOT_BEGUN = frozenset({"job.json", "job.copy.json", "epochs", "state", "manifests", "report.json"})


class WorkdirError(CommandError):
    """The directory cannot be used; the message names it and the cure."""


class Workdir:
    """Names of what lies in a run's directory (docs/contracts.md)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.job = path / "job.json"
        self.store = path / "store"
        self.address = path / "address.json"
        self.control_key = path / "control.key"
        self.join_token = path / "join-token"
        self.logs = path / "logs"
        self.metrics = path / "metrics"
        self.metrics_file = path / "metrics.jsonl"
        self.report = path / "report.json"
        self.lock = path / "run.lock"
        self.tensorboard = path / "tensorboard"
        self.origin = path / "origin.json"
        self.output = path / "output.log"  # of a run without a terminal

    def job_name(self) -> str | None:
        """The name of the job that the directory belongs to; None if not known."""
        try:
            name = json.loads(read_bounded(self.job, MAX_REPORT_BYTES))["metadata"]["name"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return name if isinstance(name, str) else None

    def job_directory(self) -> Path | None:
        """Where the job file was, and so where the job's relative paths start; None if not known."""
        try:
            directory = json.loads(self.origin.read_text(encoding="utf-8"))["directory"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return Path(directory) if isinstance(directory, str) else None

    def last_report(self, epoch: int) -> Report | None:
        """The report that the syncer of this epoch left in the store when it ended the job; None: it has not."""
        report = _read_report(self.store / "report.json")
        return report if report is not None and report.syncer.epoch == epoch else None

    def runner(self) -> int | None:
        """The process id of the run that has the directory; None: none has. A run that ends by itself leaves none."""
        pid = self._last_runner()
        return pid if pid is not None and _lives(pid) else None

    def is_held(self) -> bool:
        """Whether a run holds the directory now: its lock tells, and a process id may be another program's by now."""
        try:
            with self.lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    def was_killed(self) -> bool:
        """Whether the last run ended without a word: it is unfinished, and its process is gone."""
        pid = self._last_runner()
        if pid is None or _lives(pid):
            return False
        # Only now: what a run that ended in between has written is there by now, and another may have begun.
        return self.is_unfinished() and self._last_runner() == pid

    def is_unfinished(self) -> bool:
        """Whether the last run has neither taken its process id out of the lock nor written a report since it began:
        it goes on, or was killed."""
        if self._last_runner() is None:
            return False
        try:
            return self.lock.stat().st_mtime >= self.report.stat().st_mtime
        except FileNotFoundError:
            return True
        except OSError:
            return False

    def _last_runner(self) -> int | None:
        try:
            return int(self.lock.read_text(encoding="ascii").strip())
        except (OSError, ValueError):
            return None

    def earlier_report(self) -> Report | None:
        """report.json of an earlier run that completed the job; None: there is none."""
        report = _read_report(self.report)
        return report if report is not None and report.outcome == "complete" else None

    def changed(self) -> float:
        """When the state of the job last changed, Unix seconds: its figures, its report, or its job file; 0: it has
        none of them."""
        times = [0.0]
        for path in (self.job, self.report, self.metrics_file):
            with contextlib.suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times)

    @contextlib.contextmanager
    def unchanged_if_refused(self) -> Iterator[None]:
        """Give the files that ``claim`` writes their former content and time back if a CommandError ends the block."""
        before = {path: _former(path) for path in (self.job, self.origin)}
        try:
            yield
        except CommandError:
            for path, found in before.items():
                with contextlib.suppress(OSError):
                    if found is None:
                        path.unlink(missing_ok=True)
                    elif _former(path) != found:
                        write_whole(path, found[0])
                        os.utime(path, ns=found[1])
            raise

    def has_begun(self) -> bool:
        """Whether there is something to go on from: the store holds version 0, or more."""
        try:
            return any(entry.name not in _NOT_BEGUN for entry in self.store.iterdir())
        except OSError:
            return False

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.log"


def _former(path: Path) -> tuple[bytes, tuple[int, int]] | None:
    """A file's content, and its times of access and change in ns; None: it is not there."""
    try:
        found = path.stat()
        return path.read_bytes(), (found.st_atime_ns, found.st_mtime_ns)
    except OSError:
        return None


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _read_report(path: Path) -> Report | None:
    try:
        return read_document(Report, read_bounded(path, MAX_REPORT_BYTES))
    except (OSError, ValueError):
        return None


def _rewrite(descriptor: int, data: bytes) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, data, 0)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[Workdir]:
    """Make the directory if it is not there and hold it for this run. A CommandError leaves the lock as it was.

    Raises WorkdirError if it cannot be written or another run holds it.
    """
    workdir = Workdir(path.absolute())
    try:
        for directory in (workdir.path, workdir.logs, workdir.metrics, workdir.store):
            make_directory(directory)
        descriptor = os.open(workdir.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise _unusable(path, error) from error
            holder = os.pread(descriptor, 64, 0).decode("ascii", "replace").strip()
            who = f" (pid {holder})" if holder.isdigit() else ""
            raise WorkdirError(
                f"workdir {path} is in use by another run{who}: wait for it, stop it, or give another --workdir"
            ) from error
        before, data = os.fstat(descriptor), os.pread(descriptor, 64, 0)
        try:
            _rewrite(descriptor, f"{os.getpid()}\n".encode())
        except OSError as error:
            raise _unusable(path, error) from error
        refused = False
        try:
            yield workdir
        except CommandError:
            refused = True
            raise
        finally:
            with contextlib.suppress(OSError):
                _rewrite(descriptor, data if refused else b"")  # refused: what is known of the run before stays known
                if refused:
                    os.utime(descriptor, ns=(before.st_atime_ns, before.st_mtime_ns))
    finally:
        os.close(descriptor)  # and with it the lock


def claim(workdir: Workdir, job: DiLoCoJob, directory: Path) -> bool:
    """Write the job's normal form, and ``directory``, where its file is; True if the
    workdir already belonged to this job.

    Raises WorkdirError if it belongs to another job, or to this one with something
    changed that is fixed once a job has started. A run that failed before version 0 (a
    mistake in the model, say) has started nothing: what is left of it is removed.
    """
    from diloco_protocol.spec.job import immutable_digests
    from diloco_protocol.spec.load import JobError, job_to_json, read_job

    before = None
    try:
        before = read_job(workdir.job)
    except FileNotFoundError:
        pass
    except (JobError, FileError) as error:
        raise WorkdirError(
            f"workdir {workdir.path} has a job.json that cannot be read ({error}): give another --workdir"
        ) from error
    except OSError as error:
        raise _unusable(workdir.path, error) from error
    if before is not None:
        if before.metadata.name != job.metadata.name:
            raise WorkdirError(
                f"workdir {workdir.path} belongs to the job {before.metadata.name!r}, this one is"
                f" {job.metadata.name!r}: give another --workdir"
            )
        digests = immutable_digests(before)
        if changed := sorted(f for f, digest in immutable_digests(job).items() if digest != digests.get(f)):
            _empty_unbegun(workdir, job.metadata.name, changed)
            before = None
    elif any(workdir.store.iterdir()):
        raise WorkdirError(f"workdir {workdir.path} has a store but no job.json: give another --workdir")
    try:
        write_whole(workdir.origin, json.dumps({"directory": str(directory)}).encode() + b"\n")
        write_whole(workdir.job, job_to_json(job).encode())
    except OSError as error:
        raise _unusable(workdir.path, error) from error
    return before is not None


def _empty_unbegun(workdir: Workdir, name: str, changed: list[str]) -> None:
    """Empty the store of a job that got to no version 0. Raises WorkdirError if it did."""
    try:
        entries = list(workdir.store.iterdir())
        if any(entry.name not in _NOT_BEGUN for entry in entries):
            raise WorkdirError(
                f"workdir {workdir.path} holds a start of the job {name!r} with another"
                f" {', '.join(changed)}: these are fixed once a job has started; restore them,"
                " or give another --workdir"
            )
        for entry in entries:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    except OSError as error:
        raise _unusable(workdir.path, error) from error


def _unusable(path: Path, error: OSError) -> WorkdirError:
    if isinstance(error, FileExistsError | NotADirectoryError):
        return WorkdirError(f"workdir {path} is not a directory: give another --workdir")
    return WorkdirError(f"{unwritable_text(path, error)}; give another --workdir")


def find(argument: str | None) -> Workdir:
    """The run directory that the user means: the one named, else the newest below ./runs.

    Raises WorkdirError if there is none.
    """
    if argument is not None:
        path = Path(argument)
        if os.path.isdir(path) and not os.access(path, os.R_OK | os.X_OK):
            raise WorkdirError(f"{argument} is another user's: a run's directory is for who runs it alone")
        if not os.path.isfile(path / "job.json"):
            other = path / "report.json"
            hint = f"; diloco report {other} --html shows its figures" if os.path.isfile(other) else ""
            raise WorkdirError(f"{argument} is no run's directory (it has no job.json){hint}")
        if os.path.isdir(path / "epochs") and os.path.isfile(path.absolute().parent / "job.json"):
            raise WorkdirError(f"{argument} is the store of a run: name the run's directory: {path.parent}")
        return Workdir(path.absolute())
    found = [(job.stat().st_mtime, job.parent) for job in Path("runs").glob("*/job.json")]
    if not found:
        raise WorkdirError("there is no run below ./runs: name a run's directory")
    return Workdir(max(found)[1].absolute())


def read_address(path: Path) -> dict[str, str | int]:
    """The syncer's address file, checked. Raises FileNotFoundError, or WorkdirError if it is none."""
    try:
        document = json.loads(read_bounded(path, 65536))
        wanted = {key: document[key] for key in ("sync", "control", "http", "pid", "epoch")}
        ok = all(isinstance(wanted[key], str) for key in ("sync", "control", "http"))
        if not ok or not isinstance(wanted["pid"], int) or not isinstance(wanted["epoch"], int):
            raise ValueError("a field has the wrong type")
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WorkdirError(f"{path} is no address file of a syncer: {error}") from error
    return wanted
