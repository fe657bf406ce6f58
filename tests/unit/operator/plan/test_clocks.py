"""What the plan times is timed by a clock that nobody sets."""

from __future__ import annotations

import dataclasses

import pytest

from diloco_operator.model import Observed
from operator_world import START, World, job_object


class Stepping(World):
    """Its wall's clock was set ahead by ``ahead`` seconds."""

    ahead = 0.0

    def observed(self) -> Observed:
        found = super().observed()
        return dataclasses.replace(found, now=found.now + self.ahead, monotonic=self.now - START)


@pytest.mark.promise("A jump of the wall clock ends no timeout and reports no process as ended")
def test_a_step_of_the_walls_clock_ends_no_patience() -> None:
    """A suspension waits for a checkpoint that takes a minute."""
    world = Stepping(job_object())
    world.until(World.whole, 120)
    document = world.document
    world.document = lambda: document().model_copy(update={"phase": "draining"})  # type: ignore[method-assign]
    world.edit(suspend=True)
    world.run(5)
    world.ahead = 3600.0
    world.run(60)
    assert len(world.of("learner")) == 3, "its pods were taken down before the checkpoint was made"
    world.document = document  # type: ignore[method-assign]
    world.until(lambda w: w.status["phase"] == "Suspended", 120)


def test_a_step_of_the_walls_clock_reports_no_process_as_ended() -> None:
    world = Stepping(job_object())
    world.until(World.whole, 120)
    world.ahead, since = 3600.0, len(world.plans)
    world.run(30)
    assert not [call for plan in world.plans[since:] for call in plan.calls] and not world.taken
