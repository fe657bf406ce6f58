"""Learners that run and that the syncer does not hear: only whose own fault it is is replaced, and one at a time."""

from __future__ import annotations

import pytest

from diloco_operator.model import Delete, JobPlan
from operator_world import World, idle, started


def silence(world: World, *places: str) -> None:
    """The learners at these places, as they are now, are heard no more."""
    world.deaf |= {pod.uid for pod in world.of("learner") if pod.name in places}


def places(region: str, count: int) -> list[str]:
    return [f"job-{region}-{i}" for i in range(count)]


def two_regions(a: int, b: int) -> World:
    return started(regions=[{"name": "a", "learners": a}, {"name": "b", "learners": b}])


def test_a_silent_learner_is_replaced() -> None:
    world = started()
    silence(world, "job-local-2")
    world.run(40)
    assert not world.taken
    world.until(lambda w: w.told("LearnerReplaced") == 1, 60)
    assert [name for _, name in world.taken] == ["job-local-2"] and world.told("LearnerDeleted") == 1
    assert not world.status.get("replacements")
    world.until(World.whole)
    idle(world)


@pytest.mark.promise("A region that is silent as a whole is never deleted, however long the silence lasts")
def test_a_region_that_nobody_hears_is_not_deleted_empty() -> None:
    """All are silent, as when a network is cut: that is nobody's own fault, however long it lasts."""
    world = started(3)
    before = {pod.uid for pod in world.of("learner")}
    world.deaf = before
    world.run(900)
    assert not world.taken and {pod.uid for pod in world.of("learner")} == before
    world.deaf = set()
    world.until(World.whole)


@pytest.mark.promise("A region that is cut off keeps its learners while another region is heard")
def test_a_region_that_is_cut_off_keeps_its_learners_while_another_is_heard() -> None:
    world = two_regions(4, 8)
    silence(world, *places("b", 8))
    world.run(600)
    assert not world.taken
    world.deaf = set()
    world.until(World.whole)


def test_several_that_are_silent_at_once_are_waited_for() -> None:
    """A cut that some of the region's nodes do not feel."""
    world = started(8)
    silence(world, *places("local", 5))
    world.run(90)
    assert not world.taken
    world.deaf = set()
    world.until(World.whole)
    assert not world.taken


@pytest.mark.promise(
    "The last learner to return from a cut is not deleted, although it is the only silent one then; a "
    "learner that hangs is deleted, even while others come and go"
)
def test_the_last_to_come_back_from_a_cut_is_not_taken() -> None:
    """A network heals for one learner after another: it is silent alone then, and for longer than one is waited for."""
    world = started(8)
    silence(world, *places("local", 8))
    world.run(90)
    for pod in world.of("learner"):
        world.deaf.discard(pod.uid)
        world.run(20)
    assert not world.taken
    world.until(World.whole)


@pytest.mark.promise(
    "The last learner to return from a cut is not deleted, although it is the only silent one then; a "
    "learner that hangs is deleted, even while others come and go"
)
def test_a_silent_learner_is_replaced_while_others_come_and_go() -> None:
    """Those that fell silent later tell nothing of it."""
    world = started(8)
    silence(world, "job-local-7")
    hung = set(world.deaf)
    for turn in range(20):
        silence(world, f"job-local-{turn % 7}")
        world.run(12)
        world.deaf = hung & {pod.uid for pod in world.of("learner")}
        world.run(3)
    assert {name for _, name in world.taken} == {"job-local-7"}


@pytest.mark.promise(
    "The operator deletes no second silent learner of a region before the first one's successor takes part"
)
def test_no_second_silent_learner_is_taken_before_the_firsts_successor_takes_part() -> None:
    world = started(8)
    silence(world, *places("local", 5))
    world.until(lambda w: bool(w.taken), 300)
    first = world.taken[0][1]
    world.until(lambda w: w.named(first) is not None and not w.named(first).terminating, 60)  # type: ignore[union-attr]
    silence(world, first)
    world.run(900)
    assert [name for _, name in world.taken] == [first]
    world.deaf -= {pod.uid for pod in world.of("learner") if pod.name == first}
    world.until(lambda w: len(w.taken) == 2, 300)
    world.deaf = set()
    world.until(World.whole)


@pytest.mark.promise("No silent learner is deleted while a region counts down to lost")
def test_nobody_is_taken_while_a_region_counts_down_to_lost() -> None:
    world = two_regions(3, 2)
    silence(world, "job-a-0", *places("b", 2))
    world.run(200)
    assert not world.taken
    world.syncer.lost = ["b"]
    world.until(lambda w: bool(w.taken), 60)
    assert [name for _, name in world.taken] == ["job-a-0"]


@pytest.mark.parametrize("another", [True, False])
def test_the_only_learner_of_a_region_is_replaced_while_another_of_the_job_is_heard(another: bool) -> None:
    world = two_regions(2, 1)
    silence(world, "job-b-0", *([] if another else places("a", 2)))
    world.syncer.lost = ["b"] if another else ["a", "b"]
    world.run(300)
    assert ["job-b-0" for _, name in world.taken if name == "job-b-0"][:1] == (["job-b-0"] if another else [])


class Refusing(World):
    """Its API server loses what deletes pods, while ``refuses``."""

    refuses = True

    def _delete(self, delete: Delete) -> None:
        if not self.refuses:
            super()._delete(delete)

    def _check(self, made: JobPlan) -> None:
        if not self.refuses:
            super()._check(made)


@pytest.mark.promise("A learner that is heard again before its deletion was carried out stays")
def test_one_that_is_heard_again_before_it_could_be_deleted_stays() -> None:
    world = started(3)
    world.__class__ = Refusing
    silence(world, "job-local-2")
    world.until(lambda w: any(plan.deletes for plan in w.plans), 90)
    world.deaf = set()
    world.run(10)
    world.refuses = False  # type: ignore[attr-defined]
    world.run(60)
    assert not world.taken and world.whole()
