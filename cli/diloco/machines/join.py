"""``diloco learner join``: this machine's compute for a job that is served elsewhere.

Theory of operation. The job comes from the syncer, over the very connection that a learner would make (credentials,
identity, join token), unless a job file is given; code of the job's own is run only from a file that is here. Then one
learner process runs in the foreground: the worker program with the environment that it has everywhere, its place
(region and ordinal) this directory's. It dials out only. SIGTERM, SIGHUP and Ctrl-C make it offer its work and leave
(but what the command was started to ignore, as by ``nohup``, stays ignored); a second one, a second or more later, ends
it at once. One that fails is started again with backoff, until it fails too
often before it has lived for long.

A learner may be on several machines (``--nnodes``): the command runs on each and starts that machine's share of the
ranks, which find each other as torchrun's do. Where one fails all end, and each machine starts its own again.

A place's ordinal is drawn at random and kept in the directory: nobody deals them out, and two processes of one place
would fence each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from diloco.console import COMPLETE, FAILED, INTERRUPTED, WRONG, CommandError, print_lasting, print_text
from diloco.packages import require_packages
from diloco.processes.launch import SAME_SIGNAL_SECONDS, guard_command, ranks_command
from diloco.processes.stop_signals import heeded_signals, stop_reason
from diloco.processes.supervisor import Exit, Kind, describe_end
from diloco.processes.workdir import Workdir, locked
from diloco.processes.worker_specs import WorkerSpec, base_environment, threads_each, worker_environment
from diloco.validate import read_job_file
from diloco_protocol.common.files import FileError, write_whole
from diloco_protocol.common.reach import first_answering, is_loopback, unreachable
from diloco_protocol.security.credentials import Credentials, CredentialsError
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import JobError, job_from_json, job_to_json
from diloco_protocol.vocabulary import WorkerExit
from diloco_protocol.wire import bulk, limits, sync_pb2
from diloco_protocol.wire.bulk_calls import bulk_connection
from diloco_protocol.wire.verify_server import ServerNotTrusted, verify_syncer

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[^:\s/]+):([0-9]{1,5})")
FETCH_SECONDS = 20.0
MAX_JOB_BYTES = 16 << 20
IN_VAIN = 5  # ends in a row before LIVED_SECONDS, after which it is given up
LIVED_SECONDS = 60.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0


@dataclass(frozen=True, slots=True)
class JoinOptions:
    address: str
    job: Path | None = None
    credentials: Path | None = None
    plaintext: bool = False
    region: str | None = None
    workdir: Path | None = None
    overrides: Sequence[str] = ()
    join_token_file: Path | None = None  # in plaintext
    nnodes: int = 1  # machines of the learner
    node_rank: int = 0
    master: str = ""  # host:port of that with rank 0


def join(options: JoinOptions) -> int:
    """Run this machine's learner until it leaves or the job ends; returns the exit code. Raises CommandError."""
    _check(options)
    require_packages("diloco learner join", ["worker"])
    try:
        credentials = Credentials.from_directory(options.credentials)
        if options.join_token_file is not None:
            credentials = Credentials.from_token_file(options.join_token_file)
        named = sorted(one.region for one in credentials.names() if one.role == "learner" and one.region)
    except CredentialsError as error:
        raise CommandError(str(error)) from error
    if options.job is not None:
        job = read_job_file(options.job, options.overrides)
    else:
        job = _without_code(asyncio.run(fetch_job(options.address, credentials)))
    region = _region(job, options.region, named)
    if (ranks := job.spec.group(region).ranks) % options.nnodes:
        raise CommandError(f"--nnodes {options.nnodes}: a learner of {region} has {ranks} ranks, in equal shares")
    try:
        node = f"-{options.node_rank}" if options.node_rank else ""
        with locked(options.workdir or Path("learners") / f"{job.metadata.name}-{region}{node}") as workdir:
            write_whole(workdir.job, job_to_json(job).encode())
            place = _ordinal(workdir)
            print_text(
                f"joining {job.metadata.name} at {options.address} as {region}-{place}, in {workdir.path}", flush=True
            )
            return _LearnerProcess(job, workdir, options, region, place=place).run()
    except (FileError, OSError) as error:
        raise CommandError(str(error)) from error


def _check(options: JoinOptions) -> None:
    match = _ADDRESS.fullmatch(options.address)
    if match is None or not 0 < int(match[2]) < 65536:
        raise CommandError(f"{options.address}: write the syncer's host:port, such as hub.example.org:7700")
    if not 0 <= options.node_rank < options.nnodes:
        raise CommandError(f"--node-rank {options.node_rank}: machines count from 0, and --nnodes is {options.nnodes}")
    if options.nnodes > 1 and not options.master:
        raise CommandError("--master-addr is missing: where the other machines find that with --node-rank 0")
    if options.credentials is not None and options.join_token_file is not None:
        raise CommandError("--join-token-file: the folder of --credentials has one; leave one of the two out")
    if options.credentials is None and not options.plaintext and not is_loopback(match[1]):
        raise CommandError(
            f"--credentials is missing: {match[1]} is another machine. Give the folder with tls.crt, "
            "tls.key, ca.crt and join-token (`diloco certs issue` makes it); --plaintext uses none, for a "
            "network in which you trust every machine"
        )


async def fetch_job(address: str, credentials: Credentials) -> DiLoCoJob:
    """The job that the syncer at ``address`` serves. Raises CommandError."""
    request = sync_pb2.DownloadRequest(what=sync_pb2.DownloadRequest.JOB)
    try:
        believed = await verify_syncer(credentials, address, credentials.names())
        reached = await first_answering(address, limits.CONNECT_SECONDS)
        connection = bulk_connection(believed, reached)
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                found, data = await bulk.download(connection, request, limit=MAX_JOB_BYTES)
        finally:
            connection.drop()
    except ServerNotTrusted as error:
        raise CommandError(str(error), FAILED) from error
    except (bulk.TransferError, limits.WireError, TimeoutError) as error:
        if why := unreachable(address):
            raise CommandError(f"cannot read the job from the syncer at {address}: {why}", FAILED) from error
        kind = "credentials" if credentials.secure else "join token (--join-token-file)"
        words = str(error) or f"no job within {FETCH_SECONDS:.0f} s"
        raise CommandError(
            f"cannot read the job from the syncer at {address}: {words}; is this its {kind}?", FAILED
        ) from error
    except CredentialsError as error:
        raise CommandError(str(error)) from error
    if not found.found:
        raise CommandError(f"the syncer at {address} does not send its job ({found.reason}): give JOB.yaml", FAILED)
    try:
        return job_from_json(data.tobytes())
    except JobError as error:
        raise CommandError(
            f"the job of the syncer at {address} is not understood here ({error}): run the same release", FAILED
        ) from error


def _without_code(job: DiLoCoJob) -> DiLoCoJob:
    """What comes from the syncer may not choose which program runs here."""
    data = job.spec.training.data
    runs = "learners.command" if job.spec.learners.command is not None else ""
    if data is not None and data.source == "python":
        runs = "training.data.function"
    if runs:
        raise CommandError(
            f"the job {job.metadata.name} runs code of its own (spec.{runs}), and that is only run from a "
            "job file here: give JOB.yaml, with the code beside it"
        )
    return job


def _region(job: DiLoCoJob, given: str | None, named: list[str]) -> str:
    """The region to join: as given, the certificate's, or the job's only one."""
    regions = [region.name for region in job.spec.regions]
    fitting = [region for region in regions if region in named] if named else regions
    if given is not None:
        if given not in regions:
            raise CommandError(f"--region {given}: the job has {', '.join(regions)}")
        if named and given not in named:
            raise CommandError(f"--region {given}: the certificate is for {', '.join(named)}")
        return given
    if len(fitting) != 1:
        raise CommandError(
            f"--region is missing: the job has {', '.join(regions)}"
            + (f", the certificate is for {', '.join(named)}" if named else "")
        )
    return fitting[0]


def _ordinal(workdir: Workdir) -> int:
    """This directory's, drawn once."""
    path = workdir.path / "place.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["ordinal"]
        if isinstance(found, int) and 0 <= found < 2**31:
            return found
    except (OSError, ValueError, KeyError, TypeError):
        pass  # a new directory
    drawn = 100_000 + secrets.randbelow(900_000)
    write_whole(path, json.dumps({"ordinal": drawn}).encode() + b"\n")
    return drawn


class _LearnerProcess:
    """Keeps one learner process running, in the foreground."""

    def __init__(self, job: DiLoCoJob, workdir: Workdir, options: JoinOptions, region: str, place: int) -> None:
        self._job = job
        self._directory = (options.job or Path("job.yaml")).absolute().parent
        worker = WorkerSpec("learner", Kind.LEARNER, region, place, ranks=job.spec.group(region).ranks)
        self._ranks, self._node = worker.ranks // options.nnodes, []
        if options.nnodes > 1:
            self._node = ["--pods", str(options.nnodes), "--pod", str(options.node_rank), "--master", options.master]
        self._env = {
            **base_environment(os.environ, threads_each(len(os.sched_getaffinity(0)), self._ranks)),
            **worker_environment(worker, "", workdir, self._directory, syncer=options.address, gpu=None),
        }
        if options.credentials is not None:
            self._env["DILOCO_CREDENTIALS"] = str(options.credentials.absolute())
        elif options.join_token_file is not None:
            self._env["DILOCO_JOIN_TOKEN_FILE"] = str(options.join_token_file.absolute())
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = 0  # how often somebody wanted it to end
        self._asked_at = 0.0

    def run(self) -> int:
        before = {number: signal.signal(number, self._on_signal) for number in heeded_signals()}
        try:
            return self._keep()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _keep(self) -> int:
        vain = 0
        while True:
            began = time.monotonic()
            code = self._once()
            if self._leaving():
                # Ended by the signal that was passed on: it had no handler yet, and no work to offer.
                return COMPLETE if code in (0, -signal.SIGTERM) else INTERRUPTED
            if code == 0:
                return COMPLETE  # the job has ended
            if code == WorkerExit.CONFIGURATION:
                return WRONG
            if code == WorkerExit.REFUSED:
                print_text("error: the syncer has refused this machine for good: see above", file=sys.stderr)
                return FAILED
            vain = 0 if time.monotonic() - began >= LIVED_SECONDS else vain + 1
            if vain >= IN_VAIN:
                print_text(f"error: the learner ended {vain} times in a row: see above", file=sys.stderr)
                return FAILED
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** max(0, vain - 1)) * random.uniform(0.5, 1.0)
            end = describe_end(Kind.LEARNER, Exit(signal=-code) if code < 0 else Exit(code=code))
            print_text(f"the learner ended ({end}): again in {pause:.1f} s", file=sys.stderr, flush=True)
            self._sleep(pause)
            if self._leaving():
                return COMPLETE

    def _leaving(self) -> bool:
        return self._asked > 0

    def _once(self) -> int:
        command = self._job.spec.learners.command
        guard = command is not None or self._ranks > 1 or bool(self._node)
        self._process = subprocess.Popen(
            guard_command(ranks_command(command, self._ranks, self._node), guard=guard),
            env=self._env,
            stdin=subprocess.DEVNULL,
            process_group=0,
            cwd=self._directory if command is not None else None,
        )
        if self._leaving():  # asked while it was being started
            self._process.terminate()
        return self._process.wait()

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._leaving() and (left := end - time.monotonic()) > 0:
            time.sleep(min(0.2, left))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked and now < self._asked_at + SAME_SIGNAL_SECONDS:
            return
        self._asked += 1
        self._asked_at = now
        process = self._process
        if self._asked == 1:
            print_lasting(f"{stop_reason(number)}: the learner offers its work and leaves")
        if process is not None and process.poll() is None:
            if self._asked == 1:
                process.send_signal(signal.SIGTERM)
            else:
                with contextlib.suppress(ProcessLookupError):  # it ends in this moment
                    os.killpg(process.pid, signal.SIGKILL)
