"""By a view that may be old nothing is taken from a process; a fresh one is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from diloco_operator.model import Observed
from operator_world import World, job_object, lost_learner, template


class Aging(World):
    """``age``: of what the operator sees. It sees all the same what there is, so only the age keeps it from acting."""

    age = 0.0

    def observed(self) -> Observed:
        return dataclasses.replace(super().observed(), view_age=self.age)


def begun(**spec: Any) -> Aging:
    world = Aging(job_object(count=3, **spec))
    world.until(World.whole, 120)
    return world


def acts(world: World, since: int) -> list[Any]:
    """Deletions and reports of ended processes since a plan."""
    return [act for plan in world.plans[since:] for act in (*plan.deletes, *plan.calls)]


def silent(world: World) -> None:
    world.deaf = {world.of("learner")[0].uid}


def crashing(world: World) -> None:
    world.crashing = {"job-local-1": 1}


def edited(world: World) -> None:
    world.edit(learners=template("diloco-worker:2"))


def ended(world: World) -> None:
    world.unschedulable = {"job-local-1"}
    world.syncer.slots[1].heard = world.now + 1000  # a long heartbeat timeout
    world.delete_pod("job-local-1", force=True)


def on_a_lost_node(world: World) -> None:
    world.lose(lost_learner(world).obj["spec"]["nodeName"])


@pytest.mark.promise("With a view older than 15 s the operator deletes no pod and reports no process")
@pytest.mark.parametrize("fault", [silent, crashing, edited, ended, on_a_lost_node])
def test_nothing_is_taken_by_an_old_view(fault: Callable[[World], None]) -> None:
    world = begun(nodeLoss={"policy": "ForceDelete", "afterSeconds": 5}, failurePolicy={"maxReplacements": 1000})
    world.age, since = 16.0, len(world.plans)
    fault(world)
    world.run(150)
    assert not acts(world, since)
    assert any(plan.wants_fresh_view for plan in world.plans[since:])
    world.age = 14.0
    world.run(60)
    assert acts(world, since)


def test_a_fresh_view_is_asked_for_only_where_something_waits_for_it() -> None:
    world = begun()
    world.age, since = 16.0, len(world.plans)
    world.run(120)
    assert not any(plan.wants_fresh_view for plan in world.plans[since:]) and world.whole()
