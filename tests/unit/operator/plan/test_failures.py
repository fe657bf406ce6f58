"""What counts against maxReplacements, and how a job that has failed goes on."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_operator.model import PlanMemory
from diloco_operator.plan.view import ANSWER_PATIENCE
from operator_world import SPREAD, START, Far, World, job_object, started


def needy(count: int, **policy: Any) -> World:
    """Every learner is needed, so nothing is merged while one is away."""
    return started(count, sync={"quorum": count}, failurePolicy=policy)


def failed(world: World) -> None:
    world.crashing = {"job-local-1": 1}
    world.until(lambda w: w.truth("Failed") == "True", 400)
    world.crashing = {}


@pytest.mark.promise("Sixty pods deleted at once do not fail a job")
def test_sixty_pods_deleted_at_once_are_no_failure() -> None:
    world = needy(60)
    for pod in world.of("learner"):
        world.delete_pod(pod.name, force=True)
    world.until(lambda w: (w.status.get("replacements") or {}).get("total") == 60, 60)
    assert world.status["replacements"]["sinceMerge"] == 0
    world.until(World.whole)


@pytest.mark.promise("A user may delete pods again and again without failing the job")
def test_a_person_may_delete_pods_again_and_again() -> None:
    world = needy(2, maxReplacements=1)
    for _ in range(5):
        world.delete_pod("job-local-1", force=True)
        world.run(4)
    assert world.status["replacements"]["total"] == 5 and world.truth("Failed") == "False"
    world.until(World.whole)


@pytest.mark.promise(
    "A failure everywhere at once counts as one failure of each place, and each place has a count of its own"
)
def test_what_fails_everywhere_at_once_is_one_failure_of_each_place() -> None:
    world = needy(30, maxReplacements=2)
    world.crashing = {pod.name: 1 for pod in world.of("learner")}
    world.run(4)
    world.crashing = {}
    world.until(World.whole)
    assert world.truth("Failed") == "False" and world.status["replacements"]["total"] >= 30


@pytest.mark.promise(
    "A failure everywhere at once counts as one failure of each place, and each place has a count of its own"
)
def test_each_place_has_a_count_of_its_own() -> None:
    world = needy(3, maxReplacements=3)
    for place in ("job-local-0", "job-local-1", "job-local-2"):
        before = (world.status.get("replacements") or {}).get("total", 0)
        world.crashing = {place: 1}
        world.until(lambda w, n=before: (w.status.get("replacements") or {}).get("total", 0) >= n + 2, 200)
    assert world.truth("Failed") == "False" and world.status["replacements"]["total"] >= 6


def test_what_ends_again_within_the_heartbeats_timeout_counts_once() -> None:
    world = needy(2, maxReplacements=50)
    world.crashing = {"job-local-1": 1}
    world.run(4)
    assert world.status["replacements"]["sinceMerge"] == 1


def test_an_operator_that_restarts_goes_on_with_the_worst_places_count() -> None:
    world = needy(2, maxReplacements=3)
    world.crashing = {"job-local-1": 1}
    world.until(lambda w: (w.status.get("replacements") or {}).get("sinceMerge") == 2, 200)
    assert world.status["replacements"]["place"] == "job-local-1"
    world.memory = PlanMemory()
    world.until(lambda w: w.truth("Failed") == "True", 400)
    assert "job-local-1 failed 4 times since the last merge" in world.condition("Failed")["message"]


@pytest.mark.promise("A failed job continues when it is suspended and resumed, also in a region's copy")
@pytest.mark.parametrize("patience", [0.0, 60.0], ids=["at once", "when its pods are gone"])
def test_a_job_that_failed_goes_on_when_it_is_suspended_and_resumed(patience: float) -> None:
    world = needy(2, maxReplacements=2)
    failed(world)
    assert "diloco resume job" in world.condition("Failed")["message"]
    world.run(30)
    world.edit(suspend=True)
    world.run(2 + patience)
    assert world.status["phase"] == "Failed" and world.truth("Suspended") == ("True" if patience else "False")
    world.edit(suspend=False)
    world.until(World.whole, 200)
    assert world.truth("Failed") == "False" and world.told("Resumed") == 1 and world.told("Failed") == 1
    assert "completionTime" not in world.status and not world.status.get("report")
    assert world.status["replacements"]["sinceMerge"] == 0
    world.run(120)
    assert world.whole() and world.syncer.phase == "training"


def test_a_job_that_failed_stays_so_until_it_is_resumed() -> None:
    world = needy(2, maxReplacements=2)
    failed(world)
    world.run(60)
    world.edit(suspend=True)
    world.run(600)
    assert world.status["phase"] == "Failed" and not world.of("learner") and not world.of("syncer")


def test_a_job_that_goes_on_may_fail_again() -> None:
    world = needy(2, maxReplacements=2)
    failed(world)
    for value in (True, False):
        world.edit(suspend=value)
        world.run(30)
    world.until(World.whole)
    failed(world)
    assert world.told("Failed") == 2


@pytest.mark.promise("A failed job continues when it is suspended and resumed, also in a region's copy")
def test_a_regions_copy_goes_on_too() -> None:
    world = Far(job_object(**SPREAD, failurePolicy={"maxReplacements": 1}))
    world.until(lambda w: w.truth("Ready") == "True", 60)
    world.page["merges"] = 7
    world.crashing = {"job-away-1": 1}
    world.until(lambda w: w.truth("Failed") == "True", 900)
    world.crashing = {}
    for value in (True, False):
        world.edit(suspend=value)
        world.run(30)
    world.until(lambda w: w.truth("Ready") == "True", 120)
    assert world.truth("Failed") == "False"


def failed_while_a_call_fails() -> World:
    """A job that has passed its deadline, whose syncer has just not answered."""
    world = started(activeDeadlineSeconds=120)
    world.until(lambda w: w.now >= START + 118)
    world.syncer_silent, world.asked_at = True, -1e9
    world.until(lambda w: w.truth("Failed") == "True", 5)
    assert world.asked is not None and world.asked.error
    return world


def test_a_call_that_fails_once_does_not_end_the_wait_for_the_syncer_to_tell_of_a_failure() -> None:
    """Its learners are to hear that the job has failed, or they drain for nothing."""
    world = failed_while_a_call_fails()
    world.run(2)
    assert not any(pod.terminating for pod in world.of("learner")) and len(world.of("learner")) == 3
    world.syncer_silent = False
    world.until(lambda w: w.syncer.phase == "failed", 10)
    world.until(lambda w: not w.of("learner"), 20)


def test_a_failure_does_not_wait_long_for_a_syncer_that_answers_no_more() -> None:
    world = failed_while_a_call_fails()
    world.run(ANSWER_PATIENCE + 3)
    assert all(pod.terminating for pod in world.of("learner"))


@pytest.mark.parametrize("suspended", [False, True], ids=["goes on", "suspended"])
def test_what_a_failure_has_taken_down_stays_down_when_the_syncer_is_silent(suspended: bool) -> None:
    """Its learners have heard, and a call that fails soon after that brings none back."""
    world = started(training={"evaluation": {"fraction": 0.1}})
    world.syncer.phase = "failed"
    world.until(lambda w: not w.of("learner") and not w.of("evaluator"), 25)
    world.syncer_silent, world.asked_at = True, -1e9
    if suspended:
        world.edit(suspend=True)
    for _ in range(20):
        world.run(1)
        assert not world.of("learner") and not world.of("evaluator"), world.story()
