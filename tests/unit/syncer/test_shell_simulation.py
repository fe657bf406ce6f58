"""syncer_simulation/shell_world.py: nothing acknowledged is lost, whatever the store does, with several syncers too."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco_protocol.vocabulary import JobPhase, SlotState, SyncerExit
from diloco_syncer.runtime.durability import Durability, Snapshot
from diloco_syncer.store import checkpoint
from diloco_syncer.store.base import ObjectExists, ObjectNotFound, Store
from diloco_syncer.store.checkpoint import Checkpoints
from diloco_syncer.store.directory import DirectoryStore
from diloco_syncer.store.epochs import Epoch
from syncer_simulation.memory_store import MemoryStore
from syncer_simulation.settings import LOSING, QUIET, SUCCESSIONS, TROUBLE
from syncer_simulation.shell_sessions import ShellWorld
from syncer_simulation.shell_world import ShellSetup, settle_shell


def simulate(setup: ShellSetup) -> ShellWorld:
    world = ShellWorld(setup)
    world.run(limit=300.0)
    settle_shell(world)
    return world


@pytest.mark.slow
def test_the_same_seed_gives_the_same_world() -> None:
    assert simulate(replace(LOSING, seed=3)).seen == simulate(replace(LOSING, seed=3)).seen


@pytest.mark.promise(
    "Everything that was announced or acknowledged survives slow, failing and missing stores, crashes "
    "between two objects, orderly ends, suspensions, sessions that end at one end first, and a second "
    "syncer beside a running one. A store that went back, tore its last writes or was emptied keeps the "
    "ledger exact. Every job reaches its end, with its tape, report and final score"
)
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, 20))
@pytest.mark.parametrize("kind", [TROUBLE, LOSING], ids=["trouble", "losing"])
def test_what_was_told_and_acknowledged_survives_the_stores_trouble(kind: ShellSetup, first: int) -> None:
    """What a store that lost something cannot know of is not promised. The job comes to its end in any case."""
    seen: Counter[str] = Counter()
    for seed in range(first, first + 20):
        try:
            seen += simulate(replace(kind, seed=seed)).seen
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    happened = ["outages", "crashes", "doubles", "half-open", "hand-overs", "suspensions", "states given"]
    happened += ["losses", "wipes", "taken"] * (kind is LOSING)
    assert min(seen[what] for what in happened) > 0, seen


# ------------------------------------------------------------------ what it finds


async def write_the_state_of_the_first_try(self: Durability, write: Callable[[Snapshot], object]) -> None:
    now = self.snapshot()

    def work() -> int:
        write(now)
        return now.generation

    self._persisted = max(self._persisted, await self._retry(lambda: work))


@pytest.mark.promise(
    "Everything that was announced or acknowledged survives slow, failing and missing stores, crashes "
    "between two objects, orderly ends, suspensions, sessions that end at one end first, and a second "
    "syncer beside a running one. A store that went back, tore its last writes or was emptied keeps the "
    "ledger exact. Every job reaches its end, with its tape, report and final score"
)
@pytest.mark.slow
def test_the_simulation_notices_an_old_state_that_is_written_over_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was mended: a state waited for the store while newer ones were written, and then followed them."""
    monkeypatch.setattr(Durability, "_write_state", write_the_state_of_the_first_try)
    with pytest.raises(AssertionError, match="was given before"):
        for seed in range(4, 24):
            simulate(replace(TROUBLE, seed=seed))


class TakenOverInTheDrain(ShellWorld):
    """While its learners offer what they have, the first syncer is succeeded, and goes on."""

    def mark_end(self) -> None:
        super().mark_end()
        if len(self.lives) == 1:
            self.at(0.1, lambda: self.take_over(1.0))


def unfenced(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, without a check of the epoch."""

    def run(self: Checkpoints, *arguments: Any) -> Any:
        epoch, self.epoch = self.epoch, Unfenced(self.epoch.store, self.epoch.number)
        try:
            return method(self, *arguments)
        finally:
            self.epoch = epoch

    return run


class Unfenced(Epoch):
    def check(self) -> None:
        pass


def drain_taken_over() -> None:
    world = TakenOverInTheDrain(QUIET)
    world.run(limit=200.0)
    settle_shell(world)
    assert world.seen["doubles"] and world.oracle.acknowledged


@pytest.mark.promise(
    "Everything that was announced or acknowledged survives slow, failing and missing stores, crashes "
    "between two objects, orderly ends, suspensions, sessions that end at one end first, and a second "
    "syncer beside a running one. A store that went back, tore its last writes or was emptied keeps the "
    "ledger exact. Every job reaches its end, with its tape, report and final score"
)
@pytest.mark.slow
def test_the_simulation_notices_a_succeeded_syncer_that_acknowledges_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was mended: it spooled and acknowledged them after its successor had read the store."""
    drain_taken_over()
    monkeypatch.setattr(Checkpoints, "spool_offer", unfenced(Checkpoints.spool_offer))
    with pytest.raises(AssertionError, match="was acknowledged, and is lost"):
        drain_taken_over()


class StoppedInTheDrain(ShellWorld):
    """While its learners offer what they have, the first syncer is told to stop, and its store is away for long."""

    def mark_end(self) -> None:
        super().mark_end()
        if len(self.lives) == 1:
            self.at(0.3, self.stop)

    def stop(self) -> None:
        self.seen["stops"] += 1
        self.out[:] = self.now, self.now + 8.0
        syncer = self.lives[0].syncer
        assert syncer is not None
        syncer.driver.stop(SyncerExit.OK, "signal SIGTERM")


@pytest.mark.promise("A syncer that is told to stop gives no learner up meanwhile, however long its store takes")
def test_a_syncer_that_ends_gives_nobody_up() -> None:
    """What was mended: its learners were away until it had ended, and it took them for lost and ended the job."""
    world = StoppedInTheDrain(QUIET)
    world.run(limit=200.0)
    settle_shell(world)
    first = world.lives[0].syncer
    assert world.seen["stops"] == 1 and first is not None
    assert first.core.phase is JobPhase.DRAINING
    assert not [slot for slot in first.core.slots if slot.state is SlotState.LOST]


class TakenOverAtVersion0(ShellWorld):
    """The first syncer stands still as it puts version 0 in force, while another starts beside it."""

    def interrupt(self, name: str) -> float:
        if name != "initial.json" or len(self.lives) > 1:
            return 0.0
        self.at(0.0, lambda: self.take_over(3.0))
        return 3.0


@pytest.mark.promise("A syncer whose predecessor stored version 0 at the last moment begins again with it")
def test_version_0_of_a_predecessor_is_gone_on_from() -> None:
    """What was mended: each upload failed for ever, and the job waited."""
    world = TakenOverAtVersion0(QUIET)
    world.run(limit=200.0)
    settle_shell(world)
    assert world.seen["doubles"] == 1 and world.seen["outcome -1"] == 1


# 5: a succeeded syncer made a record that its successor did not see, and took offers of the same steps beside.
@pytest.mark.promise(
    "A record that a superseded syncer made after its successor had started costs no offer: it is set aside"
)
@pytest.mark.parametrize(
    "seeds", [range(5, 6), pytest.param(range(6, 20), marks=[pytest.mark.slow])], ids=["5", "more"]
)
def test_offers_survive_syncers_that_succeed_each_other(seeds: range) -> None:
    worlds = [simulate(replace(SUCCESSIONS, seed=seed)) for seed in seeds]
    assert any(world.seen["doubles"] and world.oracle.acknowledged for world in worlds)


@pytest.mark.promise(
    "A record that a superseded syncer made after its successor had started costs no offer: it is set aside"
)
@pytest.mark.slow
def test_random_worlds_notice_a_succeeded_syncer_that_acknowledges_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoints, "spool_offer", unfenced(Checkpoints.spool_offer))
    with pytest.raises(AssertionError, match="was acknowledged, and is lost"):
        for seed in range(120):  # one of 24 has such an offer and such a succession
            simulate(replace(SUCCESSIONS, seed=seed))


def collect_taken_over(monkeypatch: pytest.MonkeyPatch, collect: Callable[..., Any]) -> None:
    """A syncer is succeeded while it begins to remove what it needs no more; a while later its successor dies. Few
    leases make few states: what is removed goes before its successor has made two more."""
    world = ShellWorld(replace(QUIET, seed=1, steps=80, sequences=30_000))  # of seed 0 the successor ends by itself

    def collect_late(self: Checkpoints, optimizer: str) -> Any:
        if len(world.lives) == 1:
            world.at(0.0, lambda: world.take_over(2.0))
            world.at(4.0, lambda: world.crash(world.lives[-1]))
        delete = self.store.delete

        def delete_and_look(name: str) -> None:
            delete(name)
            newest = world.newest.syncer if world.newest is not None else None
            if newest is not None:  # a restart goes on from one of these
                needed = [state for state, _ in newest.durability.checkpoints._states[-2:]]
                assert name not in needed, f"removed, and needed: {name}"

        with monkeypatch.context() as patch:
            patch.setattr(self.store, "delete", delete_and_look)
            return collect(self, optimizer)

    monkeypatch.setattr(Checkpoints, "collect", collect_late)
    world.run(limit=200.0)
    settle_shell(world)
    assert world.seen["doubles"] == 1 and world.seen["crashes"] == 1


@pytest.mark.promise(
    "Everything that was announced or acknowledged survives slow, failing and missing stores, crashes "
    "between two objects, orderly ends, suspensions, sessions that end at one end first, and a second "
    "syncer beside a running one. A store that went back, tore its last writes or was emptied keeps the "
    "ledger exact. Every job reaches its end, with its tape, report and final score"
)
@pytest.mark.slow
def test_the_simulation_notices_a_succeeded_syncer_that_removes_its_successors_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was mended: whatever state was not its own was removed."""
    collect = Checkpoints.collect
    collect_taken_over(monkeypatch, collect)
    monkeypatch.setattr(checkpoint, "epoch_of", lambda name: 0)
    with pytest.raises(AssertionError, match="removed, and needed"):
        collect_taken_over(monkeypatch, unfenced(collect))


# ------------------------------------------------------------------ its store


def test_the_store_in_memory_does_what_a_directory_does(tmp_path: Path) -> None:
    """Called outside of a job it takes no time and never fails; its promises are those of every store."""
    rng = random.Random(0)
    created: list[str] = []
    memory = MemoryStore({}, rng, 0.0, 0.0, out=[0.0, 0.0], on_change=lambda objects, name: created.append(name))
    directory = DirectoryStore(tmp_path)
    names = ["epochs/1", "epochs/2", "state/a.json", "records/f.rec"]
    calls: list[Callable[[Store, str, bytes], object]] = [
        lambda store, name, data: store.create(name, data, b"-end"),
        lambda store, name, data: store.replace(name, data),
        lambda store, name, data: store.delete(name),
        lambda store, name, data: store.read(name, 1 << 10),
        lambda store, name, data: store.read_start(name, 2),
        lambda store, name, data: store.exists(name),
        lambda store, name, data: store.list(name.split("/")[0]),
        lambda store, name, data: store.list("nothing"),
    ]
    for number in range(200):
        call, name, data = rng.choice(calls), rng.choice(names), b"%d" % number
        assert outcome(call, memory, name, data) == outcome(call, directory, name, data)
    assert set(created) == set(names)


def outcome(call: Callable[[Store, str, bytes], object], store: Store, name: str, data: bytes) -> object:
    try:
        return call(store, name, data)
    except (ObjectExists, ObjectNotFound) as error:
        return type(error)
