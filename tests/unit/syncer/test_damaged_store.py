"""Each object of a store is damaged in turn: what is lost of the job, with the learners there and without."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_protocol.vocabulary import JobPhase
from diloco_syncer.core import events as ev
from diloco_syncer.store.checkpoint import Checkpoints
from diloco_syncer.store.records import record_name
from diloco_syncer.syncer import Syncer
from syncer_simulation.learners import Learner
from syncer_simulation.settings import QUIET
from syncer_simulation.shell_sessions import ShellWorld
from syncer_simulation.shell_world import Life, settle_shell

SETUP = replace(QUIET, steps=60, store_seconds=0.001)


class DamagedStore(ShellWorld):
    """A job whose learners have joined and train nothing for some checkpoints; then its syncer dies, and one object of
    its store is not what it was. ``name``: of the object, "" none; ``alone``: the learners die with the syncer."""

    def __init__(self, name: str, harm: str, alone: bool = False, idle: float = 4.0, before: float = 0.0) -> None:
        """``idle``: when the learners pause, after some merges of each fragment, or none; ``before``: how many seconds
        the object is damaged before the syncer dies."""
        self.name, self.harm, self.alone, self.idle = name, harm, alone, idle
        self.until = idle + 12.0  # when the syncer dies, after several checkpoints without a merge
        self.names: list[str] = []
        self.versions: list[int] = []  # when the syncer died
        self.found: list[int] = []  # where the next began
        self.settled: list[int] = []  # when it trained again
        super().__init__(SETUP)
        self.at(self.until - before, self.damage)
        self.at(self.until, self.end_syncer)

    def identify(self, checkpoints: Checkpoints) -> None:
        checkpoints.identify({"seed": "1"})

    def train(self, learner: Learner) -> None:
        if self.now <= self.idle or self.settled:
            super().train(learner)

    def damage(self) -> None:
        """A bit changes, or half of it is cut off, or it is gone."""
        assert self.core.phase is JobPhase.TRAINING and min(self.core.versions) >= 2 * (self.idle > 1.0)
        self.versions, self.names = list(self.core.versions), sorted(self.objects)
        if not self.name:
            return
        before = dict(self.objects)
        data = self.objects.pop(self.name)
        middle = len(data) // 2
        if self.harm == "bit" and data:
            self.objects[self.name] = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        elif self.harm != "gone":
            self.objects[self.name] = data[: len(data) // 2]
        if self.now == self.until:
            self.oracle.go_back(before, self.objects)

    def end_syncer(self) -> None:
        if self.alone:
            for learner in list(self.learners):
                self.kill(learner)
                self.at(3.0, lambda place=learner.place: self.respawn(place))
        self.crash(self.lives[-1])

    def register(self, life: Life, syncer: Syncer) -> None:
        super().register(life, syncer)
        if self.versions and not self.found:
            self.found = list(syncer.core.versions)

    def set_phase(self, life: Life, action: ev.SetPhase) -> None:
        super().set_phase(life, action)
        if self.found and not self.settled and action.phase is JobPhase.TRAINING:
            self.settled = list(self.core.versions)


def damaged(name: str, harm: str, alone: bool = False, idle: float = 4.0, before: float = 0.0) -> DamagedStore:
    """Run the job to its end, which is exact to the token; at most one version of one fragment is lost, and none that a
    learner still holds."""
    world = DamagedStore(name, harm, alone, idle=idle, before=before)
    world.run(300.0)
    assert world.found and not world.seen["outcome 2"] + world.seen["outcome 4"], (name, world.seen)
    settle_shell(world)
    lost = [before - after for before, after in zip(world.versions, world.found, strict=True)]
    assert sum(lost) <= (name.startswith("records/")), (name, lost)
    assert alone or world.settled == world.versions, (name, world.settled)
    assert world.settled >= world.found
    return world


def newest_record(fragment: int) -> str:
    """By the fragments' versions in this world, once it is idle."""
    return record_name(fragment, (6, 6, 5)[fragment])


@pytest.mark.promise(
    "No damage of one object of a store makes it unusable. It costs at most one version of one fragment, and nothing "
    "where a learner still holds that version"
)
@pytest.mark.parametrize(
    ("name", "harm", "alone"),
    [
        (newest_record(0), "bit", False),
        (newest_record(2), "gone", False),
        (newest_record(1), "half", True),
        ("initial.json", "gone", False),
        ("job.json", "half", False),
        ("epochs/0000000001", "gone", False),
    ],
)
def test_a_damaged_object_costs_at_most_one_version(name: str, harm: str, alone: bool) -> None:
    world = damaged(name, harm, alone)
    assert name in world.names and (world.found != world.versions) == name.startswith("records/")


@pytest.mark.parametrize("which", [".rec", ".copy.rec"])
@pytest.mark.parametrize("harm", ["bit", "gone"])
def test_damage_of_version_0_or_of_its_copy_costs_nothing(which: str, harm: str) -> None:
    """Nobody could give it back: the learners die with the syncer, before the first merge."""
    name = f"initial/e0000000001-a0002-f00001{which}"
    world = damaged(name, harm, alone=True, idle=0.5)
    assert name in world.names and world.found == world.versions == [0, 0, 0]


@pytest.mark.promise(
    "No damage of one object of a store makes it unusable. It costs at most one version of one fragment, and nothing "
    "where a learner still holds that version"
)
@pytest.mark.slow
@pytest.mark.parametrize("idle", [4.0, 0.5], ids=["merged", "version-0"])
@pytest.mark.parametrize("harm", ["bit", "half", "gone"])
def test_each_object_is_damaged_in_turn(harm: str, idle: float) -> None:
    names = damaged("", "", idle=idle).names
    kinds = {"epochs", "initial", "initial.json", "job.json", "manifests", "state"}
    assert kinds <= {name.partition("/")[0] for name in names}
    for name in names:
        for alone in (False, True)[: 1 + name.startswith(("records/", "initial/"))]:
            damaged(name, harm, alone, idle=idle)


@pytest.mark.promise(
    "A damaged newest record is found within as many checkpoints as there are fragments, and written anew from memory"
)
def test_a_scrub_writes_a_damaged_record_anew() -> None:
    """Nobody else could: the learners die with the syncer, and nothing is lost."""
    world = damaged(newest_record(1), "half", alone=True, before=11.0)
    assert world.found == world.settled == world.versions
