"""What the durability does while its store fails: how long it waits, and what it writes then."""

from __future__ import annotations

import asyncio
import errno
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

import tape_reader
from diloco_protocol.documents import EventRow
from diloco_protocol.vocabulary import EventKind
from diloco_syncer.runtime import durability
from diloco_syncer.runtime.durability import MOST_NOTES, Durability, Snapshot
from diloco_syncer.store import records
from diloco_syncer.store.checkpoint import Checkpoints
from diloco_syncer.store.directory import DirectoryStore
from diloco_syncer.store.documents import copy_name, read_document
from diloco_syncer.store.epochs import Epoch
from diloco_syncer.store.records import MergeRecord
from diloco_syncer.store.tape import EVENT, MERGE, REFUSED, SEGMENT, SETTINGS, Tape
from patience import until


def make_durability(
    checkpoints: Checkpoints, store: DirectoryStore, snapshot: Callable[[], Snapshot] = lambda: Snapshot(0, {}, [])
) -> Durability:
    return Durability(
        checkpoints=checkpoints,
        tape=Tape(store),
        snapshot=snapshot,
        on_problem=lambda problem: None,
        newest_records=list,
    )


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Durability:
    """A durability that gives up after 0.3 seconds."""
    monkeypatch.setattr(durability, "PATIENCE", 0.3)
    store = DirectoryStore(tmp_path)
    checkpoints = Checkpoints(store, Epoch.claim(store), "job", 1)
    return make_durability(checkpoints, store)


async def test_a_long_try_that_fails_is_tried_again(waiting: Durability) -> None:
    tries = 0

    def write() -> str:
        nonlocal tries
        tries += 1
        if tries == 1:
            time.sleep(0.5)  # longer than the patience
            raise OSError(errno.EIO, "broke off")
        return "written"

    assert await waiting.run_write(write) == "written"
    assert tries == 2 and not waiting.problem


async def test_what_fails_all_the_time_ends(waiting: Durability) -> None:
    tries = 0

    def write() -> None:
        nonlocal tries
        tries += 1
        raise OSError(errno.EIO, "broken")

    with pytest.raises(OSError, match="broken"):
        await waiting.run_write(write)
    assert tries > 1


WRITERS: list[Callable[[Durability], Awaitable[None]]] = [
    lambda made: made.persist(1),
    Durability.checkpoint,
    Durability.write_state_and_collect,
]


@pytest.mark.promise("A state or optimizer state that had to wait for the store is never written after a newer one")
@pytest.mark.parametrize("write", WRITERS, ids=["persist", "checkpoint", "after-merges"])
async def test_a_state_that_waited_for_the_store_does_not_follow_newer_ones(
    tmp_path: Path, write: Callable[[Durability], Awaitable[None]]
) -> None:
    generation = 1
    store = DirectoryStore(tmp_path)
    checkpoints = Checkpoints(store, Epoch.claim(store), "job", 1)
    made = make_durability(checkpoints, store, lambda: Snapshot(generation, {"of": generation}, []))
    (tmp_path / "state").write_bytes(b"")  # where the folder of states belongs
    waiting = asyncio.ensure_future(write(made))
    await until(lambda: made.problem)
    (tmp_path / "state").unlink()
    generation = 2
    await made.persist(2)
    assert not waiting.done(), "it waits between two tries"
    await waiting
    written = [read_document(store, name)["core"]["of"] for name in store.list("state")]
    assert written == [2, 2], "what a restart reads is the newest"


@pytest.mark.promise("A state or optimizer state that had to wait for the store is never written after a newer one")
async def test_an_optimizer_state_that_waited_for_the_store_does_not_follow_a_newer_one(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    checkpoints = Checkpoints(store, Epoch.claim(store), "job", 1)
    made = make_durability(checkpoints, store)
    (tmp_path / "optimizer").write_bytes(b"")
    waiting = asyncio.ensure_future(made.write_optimizer(np.full(1, 1, np.uint8)))
    await until(lambda: made.problem)
    (tmp_path / "optimizer").unlink()
    await made.write_optimizer(np.full(2, 2, np.uint8))
    await waiting
    assert checkpoints.reader.blob(made.optimizer).tobytes() == b"\2\2" and made.optimizer_bytes == 2
    assert store.list("optimizer") == [made.optimizer]


def event(number: int) -> EventRow:
    return EventRow(
        n=number, time=1.5e9, kind=EventKind.JOINED, slot=0, incarnation=1, message=f"{number} joined", details={}
    )


async def test_transitions_and_refusals_are_on_the_tape_at_the_next_checkpoint_within_a_bound(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    refused = {"stale": 2}
    checkpoints = Checkpoints(store, Epoch.claim(store), "job", 1)
    made = make_durability(checkpoints, store, lambda: Snapshot(0, {}, [], dict(refused)))

    async def lines_of_checkpoint() -> list[tuple[str, object]]:
        before = len(list(tape_reader.raw_lines(store)))
        await made.checkpoint()
        lines = [json.loads(raw) for raw in tape_reader.raw_lines(store)][before:]
        return [(line["kind"], line.get("message", line.get("uploads"))) for line in lines]

    made.note_event(event(1))
    assert (await lines_of_checkpoint())[1:] == [(EVENT, "1 joined"), (REFUSED, {"stale": 2})]
    assert await lines_of_checkpoint() == [], "what has not changed is not said again"
    refused["stale"] = 3
    for number in range(MOST_NOTES + 7):
        made.note_event(event(number))
    lines = await lines_of_checkpoint()
    assert len(lines) == MOST_NOTES + 2
    assert lines[-2:] == [(EVENT, "7 transitions"), (REFUSED, {"stale": 3})]
    made.note_event(event(8))
    assert await lines_of_checkpoint() == [(EVENT, "8 joined")], "the bound is of one interval"


async def test_a_merges_line_follows_what_happened_before_it(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    checkpoints = Checkpoints(store, Epoch.claim(store), "job", 1)
    made = make_durability(checkpoints, store)
    made.note_event(event(1))
    await made.write_merge_record(MergeRecord("job", 1, 0, 1, theta=np.zeros(2, np.float32)))
    assert [json.loads(raw)["kind"] for raw in tape_reader.raw_lines(store)] == [SEGMENT, EVENT, MERGE]


async def test_the_settings_of_a_start_are_before_its_first_line_and_nothing_is_written_without_one(
    tmp_path: Path,
) -> None:
    store = DirectoryStore(tmp_path)
    checkpoints = Checkpoints(store, Epoch.claim(store), "job", 1)
    made = make_durability(checkpoints, store)
    made.settings = {"epoch": 1}
    await made.persist(1)
    assert not list(tape_reader.raw_lines(store))
    for version in (1, 2):
        await made.write_merge_record(MergeRecord("job", 1, 0, version, theta=np.zeros(2, np.float32)))
    assert [json.loads(raw)["kind"] for raw in tape_reader.raw_lines(store)] == [SEGMENT, SETTINGS, MERGE, MERGE]


@pytest.mark.promise(
    "Damage of the layout, of the frozen parameters or of a copy of one of them is found while a job runs, and mended "
    "from the other"
)
@pytest.mark.parametrize("harm", ["bit", "half", "gone"])
@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("part", ["layout", "frozen"])
async def test_a_scrub_mends_each_of_two_copies_from_the_other(
    tmp_path: Path, part: str, copy: bool, harm: str
) -> None:
    store, fragments = DirectoryStore(tmp_path), 3
    checkpoints = Checkpoints(store, Epoch.claim(store), "job", 1)
    values = np.arange(100, dtype=np.uint8)
    names = {
        kind: checkpoints.stage(1, f"{kind}.rec", *records.pack("blob", {}, {"blob": values}))
        for kind in ("layout", "frozen")
    }
    checkpoints.commit_initial(names["layout"], [f"f{p}" for p in range(fragments)], names["frozen"])
    made = make_durability(checkpoints, store)
    harmed = tmp_path / (copy_name(names[part]) if copy else names[part])
    whole = harmed.read_bytes()
    if harm == "gone":
        harmed.unlink()
    else:
        middle = len(whole) // 2
        harmed.write_bytes(whole[:middle] + (bytes([whole[middle] ^ 1]) + whole[middle + 1 :]) * (harm == "bit"))
    checkpoints_left = [True] * (4 * fragments)
    with pytest.raises(IndexError):
        await made.checkpoint_every(0.0, ended=checkpoints_left.pop)
    assert harmed.read_bytes() == whole


async def test_a_scrub_that_finds_both_copies_damaged_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = DirectoryStore(tmp_path)
    checkpoints = Checkpoints(store, Epoch.claim(store), "job", 1)
    name = checkpoints.stage(1, "layout.rec", b"neither a record")
    checkpoints.commit_initial(name, ["f0"], "")
    made = make_durability(checkpoints, store)
    for _ in range(2):
        await made.scrub_copies()
    assert len(caplog.messages) == 2 and all("is damaged as its copy is" in said for said in caplog.messages)
