"""Start the ranks of a learner in one pod, or in its share of several pods, by torchrun:

    python -m diloco_worker.integrations.torchrun --processes 2 -- python train.py
    python -m diloco_worker.integrations.torchrun --processes 2 --pods 2 --address job-local-{first}.job-local -- …

torchrun runs inside this program, which adds what only a learner's pod knows:

* Which learner, and which of its pods. The pods of a StatefulSet are numbered (``DILOCO_POD_INDEX``), and those of one
  learner follow each other: index = ordinal × pods + node rank. All meet at the learner's first pod, whose index stands
  for ``{first}`` in the address.
* torchrun's options, by the variables from which it reads them (``PET_NNODES`` and so on). Any command is started once
  for each rank. A command that is torchrun itself (``torchrun …``, ``python -m torch.distributed.run …``) is taken with
  its own options; one that contradicts the job is refused.
* Exit codes. torchrun ends with 1 whatever has happened; this program ends as the rank did that failed first, so that
  an operator reads the learner's own codes (``vocabulary.WorkerExit``).
* Probes. The leader, rank 0, has the learner's status port. In each other pod this program answers there, for as long
  as the pod's ranks run.

torchrun restarts nothing: a rank that ends ends its learner, and each pod starts its ranks again. A pod that is back
while the first one still runs what is over waits for its end: the store of that life holds the addresses of ranks that
are gone.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from diloco_protocol.common.cpu_quota import usable_cores
from diloco_protocol.common.http_server import METRICS_TYPE, AddressError, ThreadedPages, text_page
from diloco_protocol.vocabulary import WorkerExit
from diloco_worker import exit_hooks, logs
from diloco_worker.settings import ConfigurationError, WorkerError

log = logging.getLogger("diloco_worker")

MASTER_PORT = 29500
"""Of the learner's first pod: where torchrun's processes in all its pods meet."""
MEETING_SECONDS = 3600
"""For so long the pods of a learner wait for each other: as long as a pod may take to start (docs/time-limits.md)."""
DRAIN_SECONDS = 25
"""Seconds from SIGTERM until ranks are killed that have not ended, where ``DILOCO_DRAIN_SECONDS`` does not say."""

_TRY_SECONDS, _AGAIN_SECONDS = 60.0, 1.0


class GroupPlace(NamedTuple):
    """Which pod of which learner this one is."""

    ordinal: int  # of the learner
    node_rank: int  # of the pod in it


def place_of(index: int, pods: int) -> GroupPlace:
    """The place of the pod with this index in its StatefulSet, where each learner has ``pods`` pods."""
    return GroupPlace(index // pods, index % pods)


def group_environment(
    environ: Mapping[str, str], processes: int, pods: int, address: str, port: int = MASTER_PORT
) -> dict[str, str]:
    """The variables by which torchrun and the ranks know their group. ``address``, ``port``: where its pods meet, in
    the first of them. Raises ConfigurationError."""
    index = environ.get("DILOCO_POD_INDEX", "0")
    if not index.isdecimal() or len(index) > 9:
        raise ConfigurationError(f"DILOCO_POD_INDEX is {index!r}: it must be the pod's index, a whole number from 0")
    place = place_of(int(index), pods)
    drain = environ.get("DILOCO_DRAIN_SECONDS") or str(DRAIN_SECONDS)
    if not drain.replace(".", "", 1).isdecimal():
        raise ConfigurationError(f"DILOCO_DRAIN_SECONDS is {drain!r}: it must be seconds, such as {DRAIN_SECONDS}")
    found = {
        "DILOCO_ORDINAL": str(place.ordinal),
        "PET_NNODES": str(pods),
        "PET_NODE_RANK": str(place.node_rank),
        "PET_NPROC_PER_NODE": str(processes),
        "PET_MAX_RESTARTS": "0",
        "PET_SHUTDOWN_TIMEOUT": str(max(1, int(float(drain)))),
    }
    if pods > 1:
        found |= {
            "PET_MASTER_ADDR": address.replace("{first}", str(place.ordinal * pods)),
            "PET_MASTER_PORT": str(port),
            "PET_RDZV_CONF": f"timeout={MEETING_SECONDS}",
        }
    return found


def torchrun_arguments(command: Sequence[str]) -> list[str]:
    """torchrun's arguments for a command: its own where it is torchrun, else the command for each rank."""
    program = Path(command[0]).name
    if program == "torchrun":
        return list(command[1:])
    if program.startswith("python") and list(command[1:3]) == ["-m", "torch.distributed.run"]:
        return list(command[3:])
    return ["--no-python", *command]


def check_options(options: argparse.Namespace, processes: int, pods: int) -> None:
    """Raise ConfigurationError if torchrun's own options in a command contradict the job."""
    for option, asked, field in (
        ("nproc_per_node", str(processes), "learners.processes"),
        ("nnodes", str(pods), "learners.pods"),
    ):
        said = str(getattr(options, option)).removesuffix(f":{asked}")
        if said != asked:
            flag = f"--{option.replace('_', '-')}"
            raise ConfigurationError(
                f"learners.command has {flag} {said}, and {field} is {asked}: leave {flag} out, torchrun gets it from "
                "the job"
            )
    if pods > 1 and (options.standalone or options.rdzv_backend != "static" or options.rdzv_endpoint):
        raise ConfigurationError(
            "learners.command has --standalone or --rdzv-…, and learners.pods is more than 1: leave them out, torchrun "
            "gets the place where the pods meet from the job"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this pod's ranks to their end; returns the exit code of the first that failed, else 0."""
    given = _parse(arguments)
    _end_while_waiting()
    try:
        logs.configure()
        found = group_environment(os.environ, given.processes, given.pods, given.address, port=given.port)
        os.environ.update(found)
        logs.set_fields(ordinal=int(found["DILOCO_ORDINAL"]))
        # Else torchrun gives each rank one thread, and a pod of CPUs trains with as many cores as it has ranks.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // given.processes)))
        with _probes(os.environ.get("DILOCO_STATUS"), int(found["PET_NODE_RANK"])):
            if found["PET_NODE_RANK"] != "0":
                _await_new_life(found["PET_MASTER_ADDR"], given.port, found["PET_NODE_RANK"])
            return _run(torchrun_arguments(given.command), given.processes, given.pods)
    except WorkerError as error:
        log.error("%s", error)
        exit_hooks.write_termination_message(exit_hooks.error_text(error))
        return error.exit_code


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Start the ranks of a learner.")
    parser.add_argument("--processes", type=int, default=1, help="ranks in each pod")
    parser.add_argument("--pods", type=int, default=1, help="pods of the learner")
    parser.add_argument("--address", default="", help="of the learner's first pod, {first} in it is the pod's index")
    parser.add_argument("--port", type=int, default=MASTER_PORT, help="of that pod, where all its pods meet")
    parser.add_argument("command", nargs="+", help="the program, after --")
    given = parser.parse_args(arguments)
    if min(given.processes, given.pods) < 1 or (given.pods > 1 and not given.address):
        parser.error("--processes and --pods must be at least 1, and several pods need --address")
    return given


def _end_while_waiting() -> None:
    """Have SIGTERM end this program at once until ranks run: there is nothing to bring to rest. From then on torchrun
    handles it. While it waits for other pods no line of Python runs, so it is a thread that ends the program; and the
    first process of a container has no default for this signal."""

    def handle(*_: object) -> None:
        os._exit(128 + signal.SIGTERM)

    def watch() -> None:
        while told := reading.recv(1):
            if told[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is handle:
                os._exit(128 + signal.SIGTERM)

    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.signal(signal.SIGTERM, handle)
    signal.set_wakeup_fd(writing.detach(), warn_on_full_buffer=False)
    threading.Thread(target=watch, name="signals", daemon=True).start()


@contextlib.contextmanager
def _probes(address: str | None, node_rank: int) -> Iterator[None]:
    """Answer a pod's probes where no rank has the status port. Raises ConfigurationError."""
    if address is None or node_rank == 0:
        yield
        return
    well = text_page(lambda: (200, b"ok\n"))
    pages = {"/livez": well, "/readyz": well, "/healthz": well, "/metrics": text_page(lambda: (200, b""), METRICS_TYPE)}
    try:
        served = ThreadedPages(pages, address, "DILOCO_STATUS")
    except AddressError as error:
        raise ConfigurationError(str(error)) from error
    try:
        yield
    finally:
        served.stop()


def _await_new_life(address: str, port: int, node_rank: str) -> None:
    """Wait until the learner's first pod has a store that this pod was not in yet. Raises WorkerError."""
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

    until, told = time.monotonic() + MEETING_SECONDS, False
    while time.monotonic() < until:
        with contextlib.suppress(DistError):  # it does not answer yet, or has just ended
            patience = timedelta(seconds=_TRY_SECONDS)
            store = TCPStore(address, port, is_master=False, timeout=patience, wait_for_workers=False)
            if store.add(f"/diloco/{node_rank}", 1) == 1:
                return
            if not told:
                log.info("this pod is back, and the learner's other ranks have not ended yet: waiting for them")
            told = True
        time.sleep(_AGAIN_SECONDS)
    raise WorkerError(f"the learner's first pod, {address}:{port}, has not begun anew within {MEETING_SECONDS} s")


def _run(arguments: list[str], processes: int, pods: int) -> int:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = torchrun.parse_args(arguments)
    check_options(options, processes, pods)
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        # What another rank's end has brought down says nothing.
        told = {rank: one for rank, one in error.failures.items() if one.exitcode != WorkerExit.GROUP}
        rank, failure = ChildFailedError("", told or error.failures).get_first_failure()
        code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        log.error("rank %d ended first of this pod's ranks, with exit code %d", rank, code)
        return code
    except SignalException as error:
        log.info("told to end by signal %d", error.sigval)
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    ended = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)
