"""A rank of a learner dies, stops or is told to end: its learner ends as one, and nothing else does."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
LONGEST_SECONDS = 150.0  # more than a rank waits for another


@dataclass(frozen=True)
class Moment:
    """When a rank fails: ``at`` a command of the leader's (group_process.fail_at). ``late``: its learner joins a job
    that has trained. ``single``, ``group``: variables of the learners' processes."""

    at: str
    late: bool = False
    single: Mapping[str, str] = field(default_factory=dict)
    group: Mapping[str, str] = field(default_factory=dict)


# At a loop's release, a boundary's beginning, and each operation that steps have; and at those of a learner that joins
# a job: a peer's state, one that does not fit, and other frozen parameters than its own.
FROZEN = {"single": {"FROZEN": "0.5"}, "group": {"FROZEN": "0.25"}}
MOMENTS = (
    Moment("RETURN:40"),
    Moment("JOIN:20"),
    Moment("SNAPSHOT:8"),
    Moment("MOVE:6"),
    Moment("STATE_OUT:2"),
    Moment("STATE_IN:1", late=True),
    Moment("CLEAR:1", late=True, single={"ADAM": "1"}),
    Moment("FROZEN_OUT:1", late=True, **FROZEN),  # type: ignore[arg-type]
    Moment("FROZEN_IN:1", late=True, **FROZEN),  # type: ignore[arg-type]
)
WIDE = {"WIDTH": "32768"}  # for blocks that are told from small ones
NO_MEMORY = Moment("MOVE:12", single=WIDE, group={"FAR": "1", **WIDE})


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


def see_it_fail(
    start: Callable[..., Syncer], failing: int, moment: Moment, number: int
) -> tuple[Syncer, ForkedProcess, int, Path]:
    """A group of two ranks beside a single process; one rank gets a signal, or has no memory left (0). The syncer and
    the single process, and the group's exit code and log."""
    sync = {"fragments": 3, "every": 6, "overlap": 1}
    service = start(
        sync, {"steps": STEPS}, learners=2, service={"checkpoint": {"everySeconds": 1}}, stall_seconds=STALL_SECONDS
    )
    (single,) = start_group(service, 1, "single", 1, PAUSE="0.03", **moment.single)
    if moment.late:
        wait_until(lambda: row(service, 1).get("merged_pushes", 0) > 0, "the other learner in a merge", single)
    failure = {"FAILING": str(failing), "FAIL_AT": f"{moment.at}:{int(number)}", "PAUSE": "0.01"}
    message = service.folder / "termination-log"
    message.touch()
    group, log = start_learner(service, 0, "fsdp", 2, DILOCO_TERMINATION_LOG=str(message), **failure, **moment.group)
    code = wait_for_end(group, log, silent=LONGEST_SECONDS)
    assert not ranks_left(service.folder), log.read_text()
    return service, single, code, log


def see_it_come_back(service: Syncer, single: ForkedProcess, moment: Moment) -> dict[str, int]:
    """The other learner trains on, a new group is merged again, and both drain; the job's tokens then."""
    before = row(service, 1)["step"]
    wait_until(lambda: row(service, 1).get("step", 0) > before, "the other learner to train on", single)
    merged = row(service, 0).get("merged_pushes", 0)
    again, log = start_learner(service, 0, "ddp", 2, PAUSE="0.01", **moment.group)
    wait_until(lambda: row(service, 0).get("merged_pushes", 0) > merged, "a new group in a merge", again, log)
    again.terminate()
    assert wait_for_end(again, log) == 0, log.read_text()
    single.terminate()
    assert single.wait() == 0, single.log.read_text()
    assert not ranks_left(service.folder)
    tokens: dict[str, int] = service.status()["tokens"]
    assert tokens["trained"] == tokens["merged"] + tokens["pending"] + tokens["dropped"], tokens
    return tokens


def name_moment(moment: Moment) -> str:
    return moment.at.partition(":")[0]


@pytest.mark.slow
@pytest.mark.promise(
    "A rank that dies or stops ends its learner within bounded time, and nothing else; it comes back as one"
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["KILL", "STOP"])
@pytest.mark.parametrize("failing", [0, 1], ids=["leader", "follower"])
@pytest.mark.parametrize("moment", MOMENTS, ids=name_moment)
def test_a_rank_that_is_gone_ends_its_learner(
    syncer: Callable[..., Syncer], failing: int, moment: Moment, number: signal.Signals
) -> None:
    service, single, code, _ = see_it_fail(syncer, failing, moment, number)
    # Before a learner's first step its watchdog may not watch yet: then the other rank's patience ends.
    stopped = (WorkerExit.STALLED, WorkerExit.GROUP) if moment.late else (WorkerExit.STALLED,)
    assert code in (stopped if number == signal.SIGSTOP else (-signal.SIGKILL,))
    see_it_come_back(service, single, moment)


@pytest.mark.slow
@pytest.mark.promise("A learner of several ranks says for which rank the others wait: in its status, and when it hangs")
@pytest.mark.parametrize(
    ("failing", "number", "words"),
    [
        (2, signal.SIGSTOP, "rank 2 of this learner gives no sign"),
        (2, -1, "the others wait for rank 2: rank 0, 1 at "),
        (0, signal.SIGSTOP, "rank 0 of this learner, or torchrun, does not answer"),
    ],
    ids=["stopped", "hangs", "leader"],
)
def test_the_rank_that_the_others_wait_for_is_named(
    syncer: Callable[..., Syncer], failing: int, number: int, words: str
) -> None:
    service = syncer({"fragments": 3, "every": 6, "overlap": 1}, {"steps": STEPS}, stall_seconds=STALL_SECONDS)
    failure = {"FAILING": str(failing), "FAIL_AT": f"JOIN:60:{int(number)}", "LATE": "0.1", "SEQUENCES": "6"}
    group, log = start_learner(service, 0, "ddp", 3, **failure)
    wait_until(lambda: (row(service, 0).get("slowest_rank_seconds") or 0) > 0.05, "a late rank", group, log)
    found = row(service, 0)
    assert (found["ranks"], found["slowest_rank"]) == (3, failing)
    assert wait_for_end(group, log) == WorkerExit.STALLED
    said = log.read_text()
    assert words in said.splitlines()[-1], said


@pytest.mark.slow
@pytest.mark.promise("A rank that is told to end drains its whole learner, at one step: no token is dropped")
@pytest.mark.parametrize("failing", [0, 1], ids=["leader", "follower"])
@pytest.mark.parametrize("moment", MOMENTS, ids=name_moment)
def test_a_rank_that_is_told_to_end_drains_all(syncer: Callable[..., Syncer], failing: int, moment: Moment) -> None:
    service, single, code, _ = see_it_fail(syncer, failing, moment, signal.SIGTERM)
    assert code == 0
    assert see_it_come_back(service, single, moment)["dropped"] == 0


@pytest.mark.slow
@pytest.mark.promise("A rank that has no memory for an operation ends its learner, which names the cause")
@pytest.mark.parametrize("failing", [0, 1], ids=["leader", "follower"])
def test_a_rank_without_memory_ends_its_learner(syncer: Callable[..., Syncer], failing: int) -> None:
    """Ranks that share no memory: each move takes some."""
    service, single, code, log = see_it_fail(syncer, failing, NO_MEMORY, 0)
    said = log.read_text()
    assert code == 1 and f"rank {failing} ended first (exit code 1)" in said, said
    assert "t allocate memory" in said and "t allocate memory" in (service.folder / "termination-log").read_text()
    see_it_come_back(service, single, NO_MEMORY)
