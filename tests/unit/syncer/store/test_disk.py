"""Everything that the store said was durable is there after a power cut, whatever the disk did before."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from diloco_protocol.arrays.layout import Layout, Tensor
from diloco_protocol.wire.records import FragmentReport, PushHeader, StepReport
from diloco_syncer.startup import complete_tape
from diloco_syncer.store import records
from diloco_syncer.store.base import ObjectExists
from diloco_syncer.store.checkpoint import Checkpoints, Restored, offer_name
from diloco_syncer.store.directory import DirectoryStore
from diloco_syncer.store.epochs import Epoch
from diloco_syncer.store.records import MergeRecord
from diloco_syncer.store.restore import StoreUnusable
from diloco_syncer.store.tape import Tape
from simulated_disk import Killed, SimulatedDisk

LAYOUT = Layout.build([Tensor("w", (100,), "float32", False)], 2)
LIVES = 12


def header(number: int) -> PushHeader:
    counts = (FragmentReport(1, 0, 2, 200, confirmed_tokens=0),) * 2
    report = StepReport(2, 2, 200, counts)
    return PushHeader(
        0,
        number,
        0,
        1,
        base_version=0,
        oldest_version=0,
        first_step=1,
        last_step=2,
        steps=2,
        tokens=200,
        compute_seconds=0.5,
        encoding="int4",
        layout_digest="f" * 64,
        report=report,
        slot=0,
        incarnation=3,
    )


@dataclass
class Promised:
    """What lives of the syncer were told is durable, and what they were about to make so."""

    epoch: int = 0
    begun: bool = False  # version 0 is there
    state: int = 0
    versions: list[int] = field(default_factory=lambda: [0, 0])
    tried: list[int] = field(default_factory=lambda: [0, 0])
    offers: set[str] = field(default_factory=set)
    taped: list[int] = field(default_factory=lambda: [0, 0])
    numbers: int = 0  # given


class Life:
    """One process of the syncer: it restores the store, and then makes things durable in any order."""

    def __init__(self, root: Path, promised: Promised, chance: random.Random) -> None:
        self.promised, self.chance = promised, chance
        store = DirectoryStore(root)
        store.remove_leftovers()
        epoch = Epoch.claim(store)
        assert epoch.number > promised.epoch, "an epoch was claimed twice"
        promised.epoch = epoch.number
        self.checkpoints = Checkpoints(store, epoch, "j", 1)
        self.checkpoints.identify({})
        restored = self.checkpoints.load()
        self.tape = Tape(store)
        self.check(restored)
        complete_tape(self.tape, self.checkpoints, restored)
        promised.taped = list(promised.versions)
        if restored.layout is None:
            self.begin()

    def check(self, restored: Restored) -> None:
        promised = self.promised
        assert not restored.problems and not self.tape.damage, (restored.problems, self.tape.damage)
        assert restored.layout is not None or not promised.begun
        found = [record.version for record in restored.newest] or [0, 0]
        state = restored.core["n"] if restored.core else 0
        assert promised.versions <= found and state >= promised.state, (promised, found, state)
        assert all(one <= other for one, other in zip(found, promised.tried, strict=True))
        assert all(one <= other for one, other in zip(promised.versions, found, strict=True))
        offers = {offer_name(offer.header) for offer in restored.offers}
        assert promised.offers <= offers, (promised.offers, offers)
        assert all(self.tape.newest.get(p, 0) >= version for p, version in enumerate(promised.taped))
        promised.begun, promised.versions, promised.state = restored.layout is not None, found, state
        promised.offers = offers  # it tells learners of what it finds

    def begin(self) -> None:
        """Make version 0, and put it in force."""
        made = self.checkpoints
        blob = np.frombuffer(LAYOUT.to_json().encode(), np.uint8)
        layout = made.stage(1, "layout.rec", *records.pack("blob", {}, {"blob": blob}))
        names = [made.stage(1, f"f{p}.rec", *self.record(p, 0).pack()) for p in (0, 1)]
        made.commit_initial(layout, names, "")
        self.promised.begun = True

    def record(self, fragment: int, version: int) -> MergeRecord:
        theta = np.full(LAYOUT.elements(fragment), version, np.float32)
        self.promised.numbers += 1
        return MergeRecord("j", self.promised.epoch, fragment, version, theta=theta, number=self.promised.numbers)

    def work(self) -> None:
        promised, made = self.promised, self.checkpoints
        match self.chance.choice(["merge", "merge", "merge", "state", "checkpoint", "offer", "remove", "optimizer"]):
            case "merge":
                fragment = self.chance.randrange(2)
                promised.tried[fragment] = promised.versions[fragment] + 1
                record = self.record(fragment, promised.tried[fragment])
                made.write_record(record)
                promised.versions[fragment] = record.version
                self.tape.append(record)
            case "state":
                made.write_state({"n": promised.state + 1}, promised.versions)
                promised.state += 1
            case "checkpoint":
                self.tape.flush()
                promised.taped = list(promised.versions)
                made.write_manifest({"n": promised.state + 1}, promised.versions, "")
                promised.state += 1
                made.collect("")
            case "offer":
                promised.numbers += 1
                sent = header(promised.numbers)
                made.spool_offer(sent, 0.5, np.array([0.25]), np.arange(9, dtype=np.uint8))
                promised.offers.add(offer_name(sent))
            case "remove" if promised.offers:
                name = self.chance.choice(sorted(promised.offers))
                promised.offers.discard(name)
                made.store.delete(name)
            case "optimizer":
                made.write_blob("optimizer", np.arange(9, dtype=np.uint8))


def live_on(root: Path, disk: SimulatedDisk, chance: random.Random, faults: float) -> None:
    """Lives one after the other, each killed within some call, half of them by a power cut."""
    promised = Promised()
    for number in range(LIVES):
        disk.faults, disk.kill_after = 0.0, chance.randrange(1, 300)
        try:
            life = Life(root, promised, chance)
            disk.faults = faults
            while True:
                try:
                    life.work()
                except OSError:
                    disk.seen.add("refused")
        except Killed:
            disk.seen.add("killed")
        if number == 0 or chance.random() < 0.6:
            disk.seen.add("power cut")
            disk.power_cut(chance.choice(["lost", "kept", "any", "any"]))


def run_lives(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int, *, faults: float, left_out: str = ""
) -> set[str]:
    """Returns who flushed something."""
    base = folder / str(seed)
    base.mkdir(parents=True)
    with monkeypatch.context() as patch:
        disk = SimulatedDisk(patch, base, random.Random(seed))
        disk.left_out = left_out
        try:
            live_on(base / "volume" / "store", disk, random.Random(1000 + seed), faults)
        except (AssertionError, StoreUnusable) as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert {"killed", "power cut"} <= disk.seen
    return disk.flushed_by


@pytest.mark.promise(
    "What the store said was durable is there after a power cut and after a kill, whatever part of the rest the disk "
    "kept, and on a disk that is full, broken or read-only for a while"
)
@pytest.mark.parametrize("faults", [0.0, 0.05], ids=["sound", "failing"])
def test_what_was_said_to_be_durable_survives_power_cuts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: float
) -> None:
    for seed in range(4):
        run_lives(tmp_path, monkeypatch, seed, faults=faults)


# Only a fault between two tries needs the first; the second guards a line that the store has elsewhere (test_tape.py).
RARE = {"diloco_syncer.store.directory.create", "diloco_syncer.store.tape._cut_torn_line"}


@pytest.mark.slow
def test_each_flush_that_is_left_out_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callers = run_lives(tmp_path / "all", monkeypatch, 1, faults=0.05)
    assert len(callers - RARE) >= 6, callers
    for caller in sorted(callers - RARE):
        with pytest.raises(AssertionError):
            for seed in range(40):
                run_lives(tmp_path / caller, monkeypatch, seed, faults=0.0, left_out=caller)


def test_a_name_that_a_failed_try_has_left_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder's flush failed after the name was there; the next try finds it, and says that it is durable."""
    base = tmp_path / "disk"
    base.mkdir()
    disk = SimulatedDisk(monkeypatch, base, random.Random(0))
    disk.kill_after = 1 << 30
    store = DirectoryStore(base / "store")
    store.create("records/a", b"one")
    disk.left_out = "diloco_protocol.common.files.create_whole"
    store.create("records/b", b"two")
    with pytest.raises(ObjectExists):
        store.create("records/b", b"two")
    disk.power_cut("lost")
    assert store.list("records") == ["records/a", "records/b"]


def test_a_folder_that_a_failed_try_has_left_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "disk"
    base.mkdir()
    disk = SimulatedDisk(monkeypatch, base, random.Random(0))
    disk.kill_after = 1 << 30
    store = DirectoryStore(base / "store")
    (base / "store" / "records").mkdir()  # and then its name could not be flushed
    store.create("records/a", b"one")
    disk.power_cut("lost")
    assert store.list("records") == ["records/a"]


@pytest.mark.parametrize("name", ["records/a", "epochs/1"])
def test_what_a_killed_syncer_left_is_flushed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The next one tells learners of it."""
    base = tmp_path / "disk"
    base.mkdir()
    disk = SimulatedDisk(monkeypatch, base, random.Random(0))
    disk.kill_after = 1 << 30
    store = DirectoryStore(base / "store")
    disk.left_out = "diloco_protocol.common.files.create_whole"
    store.create(name, b"one")
    disk.left_out = ""
    DirectoryStore(base / "store")
    disk.power_cut("lost")
    assert store.exists(name)
