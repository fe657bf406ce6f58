"""Starts the ranks of a learner that are in one pod, or on one machine, and ends as they do.

    python -m diloco_worker.launch --processes 8 [--pods 2 --pod 0 --master HOST:PORT] COMMAND...

In a StatefulSet ``DILOCO_POD_INDEX`` takes the place of ``--pod``: the pods of one learner follow each other, so the
index is ordinal × pods + pod. ``{first}`` in HOST is the index of the learner's first pod.

Theory of operation. Each rank is the same command with the variables that torchrun sets. A learner is one unit, so any
rank that fails ends all of them: the others have ``CAUSE_SECONDS`` to fail of it themselves, then SIGTERM, and after
``END_SECONDS`` SIGKILL. torchrun does that too. What it does not do, and a learner needs:

* The exit code is that of the rank that failed first, or its signal: exit codes tell whether a new start is in vain
  (docs/contracts.md). A rank that fails because another is gone exits with 7, or with 1 where a collective of the
  program failed first, so any other code goes before 1, and 1 before 7.
* SIGTERM goes to every rank and to nothing else. The ranks agree on a step, offer their work and end by themselves.
* No rank outlives this process, whatever ends it: the kernel kills them (PR_SET_PDEATHSIG).
* The ranks' output is one log: each line of rank r > 0 begins with ``[rank r]``, unless it is JSON, which has a field.
  The last lines of the rank that failed first are repeated at the end, where a reader looks for the error.
* The pod's termination message is that of the rank that failed first: each has a file in memory for its own.
* The leader, rank 0, has the learner's status port. In each other pod this process answers probes there.

A replacement of the whole learner is somebody else's to start (the runner, the operator), and no rank is started twice.
Nothing here loads torch.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from diloco_protocol.common.http_server import METRICS_TYPE, AddressError, ThreadedPages, text_page
from diloco_protocol.common.process import die_with_parent
from diloco_protocol.vocabulary import WorkerExit

CAUSE_SECONDS = 2.0
END_SECONDS = 10.0
LOOK_SECONDS = 0.1
LAST_LINES = 25
MAX_LINE = 64 << 10  # bytes; the rest of a longer line is another
MASTER_PORT = 29500
PASSED_ON = (signal.SIGTERM, signal.SIGINT)
TERMINATION_LOG = "DILOCO_TERMINATION_LOG"  # as exit_hooks has it, which loads more than a start needs


@dataclass(frozen=True, slots=True)
class Shape:
    """``processes``: ranks here. ``pods``: of the learner. ``pod``: which of them this is. ``master``: host:port, where
    rank 0 lets the others find each other."""

    processes: int
    pods: int
    pod: int
    master: str


def rank_environment(base: Mapping[str, str], shape: Shape, local: int) -> dict[str, str]:
    """The environment of the ``local``-th rank of this pod, with the names that torchrun gives."""
    host, _, port = shape.master.rpartition(":")
    rank, size = shape.pod * shape.processes + local, shape.processes * shape.pods
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": local,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": shape.processes,
        "GROUP_RANK": shape.pod,
        "GROUP_WORLD_SIZE": shape.pods,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    words = {"ROLE_NAME": "default", "MASTER_ADDR": host.strip("[]"), "MASTER_PORT": port, "PYTHONUNBUFFERED": "1"}
    return {**base, **words, **{name: str(number) for name, number in numbers.items()}}


@dataclass
class Rank:
    """A rank and its output. ``said``: the file in memory that it takes for its pod's termination log. ``code``: as
    Popen has it; None: it runs. ``told``: it ended after it was told to."""

    number: int
    process: subprocess.Popen[bytes]
    said: int
    last: deque[bytes] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    code: int | None = None
    told: bool = False
    _rest: bytes = b""

    def take_output(self, data: bytes) -> bytes:
        """The whole lines that ``data`` completes, as they go to the log; no data: what is left."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > MAX_LINE):
            lines.append(self._rest)
            self._rest = b""
        self.last.extend(lines)
        mark = b"[rank %d] " % self.number if self.number else b""
        return b"".join((b"" if line.startswith(b"{") else mark) + line + b"\n" for line in lines)

    @property
    def end(self) -> str:
        """How it ended, in words."""
        code = self.code or 0
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


class Launch:
    """The ranks of one pod, from their start to their end."""

    def __init__(self, command: Sequence[str], shape: Shape) -> None:
        self._selector = selectors.DefaultSelector()
        self._ranks: list[Rank] = []
        self._ended: list[Rank] = []  # in the order in which it was seen
        here = os.getpid()

        def begin() -> None:  # in the rank: this process has one thread
            die_with_parent(here)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)

        for number in PASSED_ON:
            signal.signal(number, lambda number, _: self._send(number))
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # one that comes now is for all ranks
        for local in range(shape.processes):
            said = os.memfd_create("termination-log")
            own = {TERMINATION_LOG: f"/proc/{here}/fd/{said}"}
            process = subprocess.Popen(
                command,
                env=rank_environment(os.environ, shape, local) | own,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                preexec_fn=begin,
            )
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            rank = Rank(shape.pod * shape.processes + local, process, said)
            self._ranks.append(rank)
            self._selector.register(process.stdout, selectors.EVENT_READ, rank)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)

    def wait(self) -> int:
        """The exit code of the rank that failed first, negative for a signal; 0: all ended well."""
        failed_at, told = None, 0
        while len(self._ended) < len(self._ranks):
            self._copy_output(LOOK_SECONDS)
            self._look_for_ends(told > 0)
            now = time.monotonic()
            if failed_at is None and any(rank.code for rank in self._ended):
                failed_at = now
            waits = (CAUSE_SECONDS, CAUSE_SECONDS + END_SECONDS)
            if failed_at is not None and told < 2 and now >= failed_at + waits[told]:
                self._send((signal.SIGTERM, signal.SIGKILL)[told])
                told += 1
        until = time.monotonic() + CAUSE_SECONDS  # what a rank left behind may hold its output open
        while self._selector.get_map() and time.monotonic() < until:
            self._copy_output(LOOK_SECONDS)
        first = self._first_failure()
        _leave_message((first or self._ranks[0]).said)
        if first is None:
            return 0
        if len(self._ranks) > 1:
            _write(f"rank {first.number} ended first ({first.end}); its last lines:\n".encode())
            _write(b"".join(line + b"\n" for line in first.last))
        return first.code or 0

    def _first_failure(self) -> Rank | None:
        failed = [rank for rank in self._ended if rank.code]
        says = lambda rank: (rank.told, rank.code == WorkerExit.GROUP, rank.code == 1)  # noqa: E731
        return min(failed, key=says, default=None)

    def _look_for_ends(self, told: bool) -> None:
        for rank in self._ranks:
            if rank.code is None and (code := rank.process.poll()) is not None:
                rank.code, rank.told = code, told
                self._ended.append(rank)

    def _copy_output(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            rank: Rank = key.data
            try:
                data = os.read(key.fd, MAX_LINE)
            except BlockingIOError:
                continue
            _write(rank.take_output(data))
            if not data:
                self._selector.unregister(key.fileobj)
        if not self._selector.get_map():
            time.sleep(seconds)

    def _send(self, number: int) -> None:
        for rank in self._ranks:
            if rank.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.process.pid, number)


def _leave_message(said: int) -> None:
    """Make a rank's termination message the pod's. Without one the kubelet takes the end of the log."""
    if text := os.pread(said, MAX_LINE, 0).decode("utf-8", "replace"):
        from diloco_worker.exit_hooks import write_termination_message

        write_termination_message(text)


def _write(data: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody reads any more: the ranks go on
        while data:
            data = data[os.write(1, data) :]


@contextlib.contextmanager
def _probes(address: str | None, pod: int) -> Iterator[None]:
    """Answer this pod's probes where no rank has the status port. Raises AddressError."""
    if not address or not pod:
        yield
        return
    well = text_page(lambda: (200, b"ok\n"))
    pages = {"/livez": well, "/readyz": well, "/healthz": well, "/metrics": text_page(lambda: (200, b""), METRICS_TYPE)}
    served = ThreadedPages(pages, address, "DILOCO_STATUS")
    try:
        yield
    finally:
        served.stop()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main(arguments: Sequence[str]) -> int:
    """Run the ranks to their end. Returns the exit code, negative for a signal."""
    parser = argparse.ArgumentParser(prog="python -m diloco_worker.launch", allow_abbrev=False)
    parser.add_argument("--processes", type=int, default=1, help="ranks in this pod")
    parser.add_argument("--pods", type=int, default=1, help="pods of the learner")
    parser.add_argument(
        "--pod", type=int, default=0, help="which of them this is, from 0 (default: DILOCO_POD_INDEX's)"
    )
    parser.add_argument("--master", default="", help="HOST[:PORT] at which rank 0 is found; one pod: a free port here")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the program of each rank")
    given = parser.parse_args(arguments)
    index = os.environ.get("DILOCO_POD_INDEX", "")
    if index.isdecimal() and given.pods > 0:
        ordinal, given.pod = divmod(int(index), given.pods)
        os.environ["DILOCO_ORDINAL"] = str(ordinal)
        given.master = given.master.replace("{first}", str(ordinal * given.pods))
    if given.processes < 1 or not 0 <= given.pod < given.pods:
        parser.error("--processes is at least 1, and --pod is from 0 to --pods - 1")
    if not given.command:
        parser.error("COMMAND is missing: the program of each rank")
    if given.pods > 1 and not given.master:
        parser.error("--master is missing: of several pods, the first one's host:port")
    master = given.master or f"127.0.0.1:{_free_port()}"
    if ":" not in master:
        master = f"{master}:{MASTER_PORT}"
    shape = Shape(given.processes, given.pods, given.pod, master)
    try:
        launch = Launch(given.command, shape)
        with _probes(os.environ.get("DILOCO_STATUS"), given.pod):  # a thread, so no sooner than the ranks
            return launch.wait()
    except AddressError as error:
        print(error, file=sys.stderr, flush=True)
        return WorkerExit.CONFIGURATION
    except OSError as error:
        print(f"{given.command[0]}: {error.strerror or error}; check the command", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    ended = main(sys.argv[1:])
    if ended < 0:
        if -ended not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-ended, signal.SIG_DFL)
        os.kill(os.getpid(), -ended)
    sys.exit(ended if ended >= 0 else 128 - ended)  # the kernel spares a container's first process its own signal
