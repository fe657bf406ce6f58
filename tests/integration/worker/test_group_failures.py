"""A rank of a learner dies, stops or is told to end: its learner ends as one, and nothing else does."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked import ForkedProcess
from group_process import start_group, start_learner
from learner_process import Syncer

from diloco_protocol.vocabulary import WorkerExit
from patience import wait_for_end, wait_until

STEPS = 100_000  # more than are made: the test ends the job
STALL_SECONDS = 3.0
# At a loop's release, a boundary's beginning, and each operation that the first steps have.
COMMANDS = ("RETURN:40", "JOIN:20", "SNAPSHOT:8", "MOVE:6")


def ranks_left(folder: Path) -> list[str]:
    """Command lines of processes that were started as ranks in this folder, and still are."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if f"{folder}/final-0" in line:
            found.append(line)
    return found


def row(service: Syncer, ordinal: int) -> dict[str, Any]:
    """The slot of a learner."""
    return next((one for one in service.status()["slots"] if one["process"] and one["ordinal"] == ordinal), {})


def see_it_fail(start: Callable[..., Syncer], failing: int, at: str, number: int) -> tuple[Syncer, ForkedProcess, int]:
    """A group of two ranks beside a single process; one rank gets a signal. The group's process, and its exit code."""
    sync = {"fragments": 3, "every": 6, "overlap": 1}
    service = start(sync, {"steps": STEPS}, learners=2, stall_seconds=STALL_SECONDS)
    (single,) = start_group(service, 1, "single", 1, PAUSE="0.03")
    failure = {"FAILING": str(failing), "FAIL_AT": f"{at}:{int(number)}", "PAUSE": "0.01"}
    group, log = start_learner(service, 0, "fsdp", 2, **failure)
    code = wait_for_end(group, log)
    assert not ranks_left(service.folder), log.read_text()
    return service, single, code


def see_it_come_back(service: Syncer, single: ForkedProcess) -> dict[str, int]:
    """The other learner trains on, a new group is merged again, and both drain; the job's tokens then."""
    before = row(service, 1)["step"]
    wait_until(lambda: row(service, 1).get("step", 0) > before, "the other learner to train on", single)
    merged = row(service, 0).get("merged_pushes", 0)
    again, log = start_learner(service, 0, "ddp", 2, PAUSE="0.01")
    wait_until(lambda: row(service, 0).get("merged_pushes", 0) > merged, "a new group in a merge", again, log)
    again.terminate()
    assert wait_for_end(again, log) == 0, log.read_text()
    single.terminate()
    assert single.wait() == 0, single.log.read_text()
    assert not ranks_left(service.folder)
    tokens: dict[str, int] = service.status()["tokens"]
    assert tokens["trained"] == tokens["merged"] + tokens["pending"] + tokens["dropped"], tokens
    return tokens


@pytest.mark.slow
@pytest.mark.promise(
    "A rank that dies or stops ends its learner within bounded time, and nothing else; it comes back as one"
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["KILL", "STOP"])
@pytest.mark.parametrize("failing", [0, 1], ids=["leader", "follower"])
@pytest.mark.parametrize("at", COMMANDS)
def test_a_rank_that_is_gone_ends_its_learner(
    syncer: Callable[..., Syncer], failing: int, at: str, number: signal.Signals
) -> None:
    service, single, code = see_it_fail(syncer, failing, at, number)
    assert code == (WorkerExit.STALLED if number == signal.SIGSTOP else -signal.SIGKILL)
    see_it_come_back(service, single)


@pytest.mark.slow
@pytest.mark.promise("A rank that is told to end drains its whole learner, at one step: no token is dropped")
@pytest.mark.parametrize("failing", [0, 1], ids=["leader", "follower"])
@pytest.mark.parametrize("at", COMMANDS)
def test_a_rank_that_is_told_to_end_drains_all(syncer: Callable[..., Syncer], failing: int, at: str) -> None:
    service, single, code = see_it_fail(syncer, failing, at, signal.SIGTERM)
    assert code == 0
    assert see_it_come_back(service, single)["dropped"] == 0
