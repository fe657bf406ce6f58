"""A program that is wrong fails its job: one place ended three times with the same error, before any merge."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_operator.plan.pod_status import ContainerExit, read_pod
from diloco_operator.plan.pods.repeated_errors import is_program_error
from diloco_protocol.common.program_errors import NEVER_JOINED
from diloco_protocol.documents import StatusDocument
from operator_world import World, job_object, started

NAME_ERROR = "NameError: name 'lss' is not defined"
ONE_REPLACEMENT = {"maxReplacements": 1}


def broken(count: int = 2, places: tuple[int, ...] | None = None, code: int = 1, **spec: Any) -> World:
    """A job that has not begun; the learners at these places (all) crash whenever they start."""
    world = World(job_object(count=count, **spec))
    world.last_words = f"Traceback (most recent call last):\n{NAME_ERROR}"
    world.crashing = {f"job-local-{i}": code for i in (range(count) if places is None else places)}
    return world


@pytest.mark.promise(
    "In a cluster a program that always ends with the same error fails the job, with the error in "
    "termination message, condition, Event and report; not while a quorum takes part without that "
    "learner, and not after an edit"
)
def test_a_job_whose_program_is_wrong_fails_with_its_error() -> None:
    world = broken()
    world.until(lambda w: w.truth("Failed") == "True", 200)
    failed = world.condition("Failed")
    assert failed["reason"] == "RepeatedError"
    assert NAME_ERROR in failed["message"] and "nothing was merged yet" in failed["message"]
    assert any(event.reason == "Failed" and NAME_ERROR in event.message for _, event in world.events)
    assert world.syncer.merges == 0 and world.status["replacements"]["sinceMerge"] == 3, "and not one more"
    world.until(lambda w: w.syncer.phase == "failed" and not w.of("learner"))


def test_before_that_it_waits_for_two_more_starts() -> None:
    world = broken()
    world.until(lambda w: (w.status.get("replacements") or {}).get("sinceMerge") == 2, 200)
    world.crashing = {}
    world.until(World.whole, 200)
    assert world.truth("Failed") == "False"


@pytest.mark.promise(
    "In a cluster a program that always ends with the same error fails the job, with the error in "
    "termination message, condition, Event and report; not while a quorum takes part without that "
    "learner, and not after an edit"
)
def test_one_broken_place_fails_no_job_that_merges_without_it() -> None:
    world = broken(3, places=(1,))
    world.run(600)
    assert world.truth("Failed") == "False" and world.syncer.merges > 0


@pytest.mark.promise("One broken learner fails no job that can merge without it")
def test_one_broken_place_fails_no_job_that_will_merge_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first merge is far away, and a quorum works towards it."""
    world = broken(3, places=(1,))
    known = world.document
    monkeypatch.setattr(world, "document", lambda: known().model_copy(update={"merges": 0}))
    world.run(300)
    assert world.truth("Failed") == "False" and world.memory.repeated_error is not None


def test_one_broken_place_fails_a_job_that_cannot_merge_without_it() -> None:
    world = broken(3, places=(1,), sync={"quorum": 3})
    world.until(lambda w: w.truth("Failed") == "True", 200)
    assert world.condition("Failed")["reason"] == "RepeatedError"


def test_a_job_that_has_merged_is_left_to_max_replacements() -> None:
    world = started(2, sync={"quorum": 2})
    assert world.syncer.merges
    world.crashing = {"job-local-1": 1}
    world.run(600)
    assert world.truth("Failed") == "False"


def test_other_errors_each_time_are_left_to_max_replacements() -> None:
    world = broken()
    for n in range(600):
        world.last_words = "".join("abcdefghij"[int(digit)] for digit in str(n))
        world.run(1)
    assert world.truth("Failed") == "False"


@pytest.mark.promise(
    "In a cluster a program that always ends with the same error fails the job, with the error in "
    "termination message, condition, Event and report; not while a quorum takes part without that "
    "learner, and not after an edit"
)
def test_an_edit_begins_the_count_anew() -> None:
    world = broken()
    for _ in range(6):
        world.run(15)
        world.edit(failurePolicy={"maxReplacements": 60})
    assert world.truth("Failed") == "False"
    world.until(lambda w: w.truth("Failed") == "True", 400)


def test_a_job_that_goes_on_after_it_failed_may_be_right_now() -> None:
    world = broken()
    world.until(lambda w: w.truth("Failed") == "True", 200)
    world.crashing = {}
    for value in (True, False):
        world.edit(suspend=value)
        world.run(30)
    world.until(World.whole, 200)
    assert world.truth("Failed") == "False"


@pytest.mark.parametrize("action", ["Replace", "Ignore"])
def test_an_exit_code_that_a_rule_names_is_left_to_the_rule(action: str) -> None:
    world = broken(code=9, failurePolicy={"rules": [{"exitCodes": [9], "action": action}]})
    world.run(600)
    assert world.truth("Failed") == "False"


def kill_for_memory(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What crashes is killed for want of memory, as the kubelet says it."""
    crash = world._crash

    def out_of_memory(pod: Any, code: int) -> None:
        crash(pod, code)
        pod.container["lastState"]["terminated"] |= {"reason": "OOMKilled", "message": ""}

    monkeypatch.setattr(world, "_crash", out_of_memory)


def test_a_learner_that_runs_out_of_memory_again_and_again_fails_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    world = broken(1, code=137)
    kill_for_memory(world, monkeypatch)
    world.until(lambda w: w.truth("Failed") == "True", 200)
    message = world.condition("Failed")["message"]
    assert "it ran out of memory (OOMKilled)" in message
    assert "`diloco plan JOB.yaml` prints what memory the job needs" in message, "the model's size is not known yet"


@pytest.mark.promise("In a cluster the Event and the condition of a program that ran out of memory have what it needs")
@pytest.mark.parametrize(
    ("role", "name", "said"),
    [
        ("learner", "job-local-0", " A learner of this model needs at least 24 GB"),
        ("syncer", None, " The syncer of this model needs up to "),
    ],
)
def test_the_condition_has_the_memory_that_the_model_needs(
    monkeypatch: pytest.MonkeyPatch, role: str, name: str | None, said: str
) -> None:
    """Also where the syncer, which knows its size, has ended."""
    world = World(job_object(count=2, training={"device": "cpu"}, sync={"quorum": 2}, failurePolicy=ONE_REPLACEMENT))
    known = world.document

    def of_a_large_model() -> StatusDocument:
        return known().model_copy(update={"parameters": 10**9, "versions": [0, 0], "merges": 0})

    monkeypatch.setattr(world, "document", of_a_large_model)
    world.until(World.whole)
    kill_for_memory(world, monkeypatch)
    world.crashing = {name or world.of(role)[0].name: 137}
    world.until(lambda w: w.truth("Failed") == "True", 400)
    assert said in world.condition("Failed")["message"], world.condition("Failed")["message"]


def test_a_learner_that_ran_out_of_memory_is_told_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    world = started(2, training={"device": "cpu"})
    known = world.document

    def of_a_large_model() -> StatusDocument:
        return known().model_copy(update={"parameters": 10**9, "versions": [3, 3]})

    monkeypatch.setattr(world, "document", of_a_large_model)
    world.run(20)
    kill_for_memory(world, monkeypatch)
    world.crashing = {"job-local-1": 137}
    world.until(lambda w: w.told("LearnerCrashed") == 1)
    (said,) = [event.message for _, event in world.events if event.reason == "LearnerCrashed"]
    assert "OOMKilled" in said and said.endswith(" A learner of this model needs at least 24 GB.")


def test_a_syncer_that_never_answers_fails_the_job() -> None:
    world = World(job_object(count=1))
    world.last_words = "ModuleNotFoundError: No module named 'prometheus_client'"
    world.run(1.0)
    name = None
    for _ in range(400):
        names = [pod.name for pod in world.of("syncer")]
        name = names[0] if names else name
        world.crashing = {} if name is None else {name: 1}
        world.run(0.5)
        if world.truth("Failed") == "True":
            break
    failed = world.condition("Failed")
    assert failed["reason"] == "RepeatedError" and "No module named" in failed["message"], world.story()


def pod_of(role: str) -> Any:
    labels = {"diloco.io/role": role, "diloco.io/region": "local"}
    found = read_pod({"metadata": {"name": "job-x-0", "uid": "u", "labels": labels}}, ())
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("role", "code", "counts"),
    [
        *(("learner", code, True) for code in (1, 5, 6, 137, 139)),
        *(("learner", code, False) for code in (0, 130, 143)),
        ("syncer", 1, True),
        ("syncer", 137, True),
        *(("syncer", code, False) for code in (0, 3, 4, 5)),
    ],
)
def test_which_ends_are_errors_of_the_program(role: str, code: int, counts: bool) -> None:
    assert is_program_error(pod_of(role), ContainerExit(code, "Error", "", None), False) is counts


def never_joining(count: int, places: tuple[int, ...], **spec: Any) -> World:
    """A job whose learners at these places end well as soon as they start."""
    world = broken(count, places, 0, **spec)
    world.last_words = ""
    return world


@pytest.mark.promise(
    "A learner that ends with exit code 0 and never joined counts as an error that names how a program "
    "joins; one that joined does not"
)
def test_a_program_that_ends_well_and_never_joins_fails_the_job_with_the_way_to_join() -> None:
    world = never_joining(2, (0, 1))
    world.until(lambda w: w.truth("Failed") == "True", 200)
    failed = world.condition("Failed")
    assert failed["reason"] == "RepeatedError" and NEVER_JOINED in failed["message"]
    assert "Learner.from_environment" in failed["message"]
    assert any(event.reason == "LearnerCrashed" and NEVER_JOINED in event.message for _, event in world.events)


@pytest.mark.promise(
    "A learner that ends with exit code 0 and never joined counts as an error that names how a program "
    "joins; one that joined does not"
)
def test_a_learner_that_joined_and_ends_well_does_not_fail_the_job() -> None:
    """As one that drained. The job waits for another learner, and has merged nothing."""
    world = broken(2, (), sync={"quorum": 2})
    world.last_words = ""
    world.unschedulable = {"job-local-1"}
    for _ in range(5):
        world.until(lambda w: w.syncer.slots and w.syncer.slots[0].state == "active", 400)
        world.run(15)
        world.crashing = {"job-local-0": 0}
        world.run(1)
        world.crashing = {}
    assert world.truth("Failed") == "False" and world.told("LearnerCrashed") == 5
    assert not any(NEVER_JOINED in event.message for _, event in world.events)


def test_a_learner_that_joined_and_ended_between_two_questions_to_the_syncer_is_not_said_never_to_have_joined() -> None:
    world = started()
    world.delete_pod("job-local-1", force=True)
    world.until(lambda w: (pod := w.named("job-local-1")) is not None and pod.running, 10)
    pod = world.named("job-local-1")
    assert pod is not None
    ask, world._ask = world._ask, lambda: None  # type: ignore[method-assign]
    world.until(lambda w: any(slot.process == pod.process for slot in w.syncer.slots), 10)
    world.crashing = {"job-local-1": 0}
    world.until(lambda w: not pod.running, 10)
    world.crashing = {}
    world.run(1)
    world._ask = ask  # type: ignore[method-assign]
    world.until(lambda w: w.told("LearnerCrashed") == 1, 10)
    world.until(World.whole)
    (said,) = [event.message for _, event in world.events if event.reason == "LearnerCrashed"]
    assert NEVER_JOINED not in said and "exit code 0" in said, said


def test_a_learner_that_never_joined_is_told_so_by_the_next_answer() -> None:
    world = started()
    world.delete_pod("job-local-1", force=True)
    world.crashing = {"job-local-1": 0}
    world.until(lambda w: w.told("LearnerCrashed") == 1, 20)
    (said,) = [event.message for _, event in world.events if event.reason == "LearnerCrashed"]
    assert NEVER_JOINED in said
    assert world.asked is not None and world.asked.at == world.now, "in the turn of that answer"


def test_that_a_learner_joined_may_be_told_after_its_end() -> None:
    """The syncer's last answer before the end did not have it yet."""
    world = never_joining(2, (0,), sync={"quorum": 2})
    world.unschedulable = {"job-local-1"}
    world.until(lambda w: w.memory.repeated_error is not None, 200)
    again = world.memory.repeated_error
    assert world.truth("Failed") == "False" and again is not None and again.error == NEVER_JOINED
    slot = world.syncer.slots[0]
    slot.process, slot.state = f"{again.process}0001", "lost"
    world.run(5)
    assert world.truth("Failed") == "False"


def test_a_place_that_comes_to_work_after_all_fails_nothing() -> None:
    """The job still waits for another learner, and the syncer did not answer when the third end was seen."""
    world = broken(2, places=(0,), sync={"quorum": 2})
    world.unschedulable = {"job-local-1"}
    world.until(lambda w: (w.status.get("replacements") or {}).get("sinceMerge") == 2, 200)
    world.syncer_silent = True
    world.until(lambda w: (w.status.get("replacements") or {}).get("sinceMerge") == 3, 200)
    world.crashing = {}
    world.until(lambda w: any(s.state == "active" for s in w.syncer.slots), 200)
    world.run(15)
    world.syncer_silent = False
    world.run(60)
    assert world.truth("Failed") == "False"
    world.unschedulable = set()
    world.until(World.whole, 200)
