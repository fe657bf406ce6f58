"""The settings of a worker process: its environment, the job file, the syncer's address; and the errors it ends with.

Nothing here loads torch. Every error names the variable (or the file's field) and the cure, and carries the exit
code that the worker program ends with: ``vocabulary.WorkerExit``.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.vocabulary import EVALUATOR, WorkerExit

_POD = r"[0-9a-f]{8}(-?)[0-9a-f]{4}\1[0-9a-f]{4}\1[0-9a-f]{4}\1[0-9a-f]{12}"
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[^:\s/]+):([0-9]{1,5})")
_MAX_ADDRESS_BYTES = 2**16
ALONE_JOB = "DILOCO_ALONE_JOB"
# What says nothing of a job: everything else of ours does, and a learner that lacks a part of it must not train alone.
_OTHER_VARIABLES = frozenset({ALONE_JOB, "DILOCO_LOG_FORMAT", "DILOCO_LOG_LEVEL", "DILOCO_THREADS"})


def variables_of_a_job(environ: Mapping[str, str]) -> list[str]:
    """The names in the environment that come from a job; none: the process trains alone."""
    return sorted(name for name in environ if name.startswith("DILOCO_") and name not in _OTHER_VARIABLES)


class WorkerError(Exception):
    """The worker cannot go on. ``exit_code`` is what its process should end with."""

    exit_code = WorkerExit.FAILED


class ConfigurationError(WorkerError):
    """The environment, the job file or the model is wrong; a restart does not help."""

    exit_code = WorkerExit.CONFIGURATION


class DivergedError(WorkerError):
    """The parameters are not finite: this process cannot be cured, and a replacement begins from the merged model."""

    exit_code = WorkerExit.DIVERGED

    def __init__(self, what: str) -> None:
        super().__init__(
            f"training diverged: {what}; a replacement begins from the merged model. "
            "If it happens again, lower training.optimizer.lr, set clipNorm, or look at the data of the last steps"
        )


class RefusedError(WorkerError):
    """The syncer refused this process for good."""

    exit_code = WorkerExit.REFUSED

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"refused by the syncer ({reason}): {message}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """One worker process's settings, from its environment (docs/contracts.md).

    ``job``: as the process has it, a learner with the batch of its region.
    ``syncer`` is a fixed ``host:port``; else ``syncer_file`` is the address file, read again before each connection,
    because a restarted syncer may listen on another port.
    """

    job: DiLoCoJob
    role: str
    region: str
    ordinal: int
    process: str
    workdir: Path | None
    credentials: Path | None
    idle_at_end: bool
    syncer: str | None
    syncer_file: Path | None
    status: str | None = None  # host:port of the status port
    join_token_file: Path | None = None  # in plaintext
    drain_seconds: float | None = None  # the longest drain after SIGTERM; None: while it comes on
    pod: str = ""  # UID of the pod, 32 hexadecimal digits; empty: not in one

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> WorkerSettings:
        """Read ``DILOCO_*``. Raises ConfigurationError naming the variable and the cure."""
        env = os.environ if environ is None else environ
        job_file = env.get("DILOCO_JOB_FILE")
        if not job_file:
            others = variables_of_a_job(env)
            alone = f". To train alone, unset {', '.join(others)}" if others else ""
            raise ConfigurationError(
                "DILOCO_JOB_FILE is not set: start this program with `diloco run JOB.yaml`, "
                f"or set it to the job's normal form{alone}"
            )
        job = _read_job(Path(job_file))
        pod = env.get("DILOCO_POD") or ""
        if pod:
            pod = _checked("DILOCO_POD", pod, _POD, "the pod's UID (metadata.uid), 32 hexadecimal digits")
            pod = pod.replace("-", "")
        # In a pod the process's id begins with the pod's UID, so that an operator knows whose it is.
        process = env.get("DILOCO_PROCESS") or (pod + secrets.token_hex(8) if pod else uuid.uuid4().hex)
        role = _checked("DILOCO_ROLE", env.get("DILOCO_ROLE", "learner"), "learner|evaluator", "learner or evaluator")
        if role == EVALUATOR:
            refuse_ranks(env, "an evaluator")
        region = env.get("DILOCO_REGION", "local")
        _checked("DILOCO_REGION", region, r"[^/\0]{1,64}", "the name of a region, 1 to 64 characters without /")
        if role == "learner":
            job = job.model_copy(update={"spec": job.spec.in_region(region)})
        syncer, syncer_file = env.get("DILOCO_SYNCER"), env.get("DILOCO_SYNCER_FILE")
        if not syncer and not syncer_file:
            raise ConfigurationError(
                "neither DILOCO_SYNCER (host:port) nor DILOCO_SYNCER_FILE (the syncer's address file) is set"
            )
        if syncer:
            check_address("DILOCO_SYNCER", syncer)
        ordinal = env.get("DILOCO_ORDINAL", "0")
        if not ordinal.isdecimal() or int(ordinal) >= 2**31:
            raise ConfigurationError(f"DILOCO_ORDINAL is {ordinal!r}: it must be a whole number from 0")
        credentials = env.get("DILOCO_CREDENTIALS")
        if credentials and not Path(credentials).is_dir():
            raise ConfigurationError(f"DILOCO_CREDENTIALS is {credentials!r}: that is not a directory")
        token = env.get("DILOCO_JOIN_TOKEN_FILE")
        workdir = env.get("DILOCO_WORKDIR")
        return cls(
            job=job,
            role=role,
            region=region,
            ordinal=int(ordinal),
            process=_checked("DILOCO_PROCESS", process, "[0-9a-f]{1,64}", "1 to 64 hexadecimal digits"),
            workdir=Path(workdir) if workdir else None,
            credentials=Path(credentials) if credentials else None,
            join_token_file=Path(token) if token and not credentials else None,
            idle_at_end=_checked("DILOCO_IDLE_AT_END", env.get("DILOCO_IDLE_AT_END", "0"), "[01]", "0 or 1") == "1",
            syncer=syncer or None,
            syncer_file=Path(syncer_file) if syncer_file and not syncer else None,
            status=env.get("DILOCO_STATUS") or None,
            pod=pod,
            drain_seconds=_seconds("DILOCO_DRAIN_SECONDS", env.get("DILOCO_DRAIN_SECONDS")),
        )

    def address(self) -> str | None:
        """Where the syncer listens now, ``host:port``; None: its address file is not there (yet)."""
        if self.syncer is not None:
            return self.syncer
        assert self.syncer_file is not None
        try:
            with self.syncer_file.open("rb") as file:
                document = json.loads(file.read(_MAX_ADDRESS_BYTES))
        except (OSError, ValueError):
            return None  # not written yet, or being replaced by something that is no address file
        address = document.get("sync") if isinstance(document, dict) else None
        if not isinstance(address, str) or not _ADDRESS.fullmatch(address):
            return None
        return address

    def metrics_path(self) -> Path | None:
        """The process's metrics file, named as the process is, one JSON object a line; None without a workdir."""
        if self.workdir is None:
            return None
        name = EVALUATOR if self.role == EVALUATOR else f"{self.region}-{self.ordinal}"
        return self.workdir / "metrics" / f"{name}.jsonl"

    def state_path(self) -> Path | None:
        """The slot's own checkpoint (slot_checkpoint.py); None without a workdir."""
        if self.workdir is None:
            return None
        return self.workdir / "state" / f"{self.region}-{self.ordinal}.safetensors"


def refuse_ranks(environ: Mapping[str, str], what: str) -> None:
    """Raise ConfigurationError if this process is one of several ranks, as those that torchrun starts, and ``what`` is
    one process."""
    size = environ.get("WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1:
        raise ConfigurationError(f"WORLD_SIZE is {size}, and {what} is one process: start it without torchrun")


def check_address(name: str, value: str) -> None:
    """Raise ConfigurationError unless ``value`` is host:port."""
    match = _ADDRESS.fullmatch(value)
    if match is None or not 0 < int(match.group(2)) < 65536:
        raise ConfigurationError(f"{name} is {value!r}: it must be host:port, such as {socket.gethostname()}:4000")


def _checked(name: str, value: str, pattern: str, form: str) -> str:
    """``value`` if all of it matches ``pattern``, which ``form`` says in words. Raises ConfigurationError."""
    if not re.fullmatch(pattern, value):
        raise ConfigurationError(f"{name} is {value!r}: it must be {form}")
    return value


def _seconds(name: str, value: str | None) -> float | None:
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= 86400:
        raise ConfigurationError(f"{name} is {value!r}: it must be seconds, above 0 and at most 86400")
    return seconds


def _read_job(path: Path) -> DiLoCoJob:
    from diloco_protocol.spec.load import JobError, read_job

    try:
        return read_job(path)
    except OSError as error:
        raise ConfigurationError(
            f"DILOCO_JOB_FILE {str(path)!r} cannot be read: {error.strerror}; "
            "it is the job's normal form, written by the runner or the operator"
        ) from error
    except JobError as error:
        raise ConfigurationError(f"DILOCO_JOB_FILE {str(path)!r} is no job in normal form: {error}") from error
