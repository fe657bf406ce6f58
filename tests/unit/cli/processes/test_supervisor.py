"""The restart policy, with time and jitter given."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.processes.supervisor import (
    EVALUATOR_RESTARTS,
    MAX_BACKOFF_SECONDS,
    Abandon,
    Exit,
    Fail,
    Finished,
    Kind,
    Restart,
    Supervisor,
    describe_end,
)
from diloco_protocol.common.program_errors import SAME_ERRORS

KILLED = Exit(signal=9)


def make(limit: int = 50) -> Supervisor:
    return Supervisor(limit, random.Random(0))


def test_the_first_replacement_comes_at_once_and_later_ones_back_off() -> None:
    supervisor = make()
    delays = []
    for _ in range(12):
        decision = supervisor.ended("learner-0", Kind.LEARNER, KILLED, 100.0, wanted=True)
        assert isinstance(decision, Restart)
        delays.append(decision.at - 100.0)
    assert delays[0] == 0.0
    for tries, delay in enumerate(delays[1:]):
        nominal = min(MAX_BACKOFF_SECONDS, 0.5 * 2**tries)
        assert 0.5 * nominal <= delay <= 1.5 * nominal
    assert supervisor.restarts == {"learner-0": 12}


def test_a_process_that_was_in_a_merge_is_replaced_at_once_again() -> None:
    supervisor = make()
    for _ in range(5):
        supervisor.ended("learner-0", Kind.LEARNER, KILLED, 0.0, wanted=True)
    supervisor.healthy("learner-0")
    assert supervisor.ended("learner-0", Kind.LEARNER, KILLED, 7.0, wanted=True) == Restart(7.0)


def test_jitter_differs_between_runs_that_are_not_seeded_alike() -> None:
    def second_delay(seed: int) -> Restart:
        supervisor = Supervisor(50, random.Random(seed))
        supervisor.ended("learner-0", Kind.LEARNER, KILLED, 0.0, wanted=True)
        decision = supervisor.ended("learner-0", Kind.LEARNER, KILLED, 0.0, wanted=True)
        assert isinstance(decision, Restart)
        return decision

    assert len({second_delay(seed).at for seed in range(10)}) == 10


@given(st.integers(0, 20), st.lists(st.sampled_from(["a", "b", "syncer", "merge"]), max_size=80))
def test_the_limit_counts_replacements_of_each_process_since_the_last_merge(limit: int, story: list[str]) -> None:
    supervisor, counts = make(limit), Counter[str]()
    for who in story:
        if who == "merge":
            supervisor.merged()
            counts.clear()
            continue
        kind = Kind.SYNCER if who == "syncer" else Kind.LEARNER
        decision = supervisor.ended(who, kind, KILLED, 0.0, wanted=True)
        if counts[who] >= limit:
            assert isinstance(decision, Fail) and decision.exit_code == 1
            assert "failurePolicy.maxReplacements" in decision.message
        else:
            assert isinstance(decision, Restart)
            counts[who] += 1


def test_exits_that_another_start_does_not_cure() -> None:
    for kind, code, expected in [
        (Kind.LEARNER, 2, 2),
        (Kind.LEARNER, 4, 1),
        (Kind.SYNCER, 2, 2),
        (Kind.SYNCER, 3, 1),
        (Kind.SYNCER, 4, 1),
    ]:
        decision = make().ended("x", kind, Exit(code=code), 0.0, wanted=True)
        assert isinstance(decision, Fail) and decision.exit_code == expected, (kind, code)
    for code in (0, 1, 137):  # drained by somebody else's SIGTERM, crashed
        assert isinstance(make().ended("x", Kind.LEARNER, Exit(code=code), 0.0, wanted=True), Restart)


def test_a_syncer_whose_credentials_cannot_be_used_is_a_mistake_as_a_wrong_file_is() -> None:
    decision = make().ended("syncer", Kind.SYNCER, Exit(code=5), 0.0, wanted=True)
    assert isinstance(decision, Fail) and decision.exit_code == 2 and "credentials" in decision.message


@pytest.mark.promise(
    "If a learner diverged or stalled, the local runner, the syncer's event and the job's failure name that reason"
)
def test_a_learner_that_diverged_or_stalled_is_replaced_and_said_to_have() -> None:
    """The syncer's exit code 5 means another thing."""
    for code, words in ((5, "training diverged"), (6, "training stalled")):
        assert isinstance(make().ended("x", Kind.LEARNER, Exit(code=code), 0.0, wanted=True), Restart)
        decision = make(0).ended("x", Kind.LEARNER, Exit(code=code), 0.0, wanted=True)
        assert isinstance(decision, Fail) and f"x ended with exit code {code}: {words}, and 0" in decision.message
        assert describe_end(Kind.LEARNER, Exit(code=code)) == f"exit code {code}: {words}"
        assert describe_end(Kind.SYNCER, Exit(code=code)) == f"exit code {code}"
    assert describe_end(Kind.LEARNER, Exit(signal=9)) == "SIGKILL"


def test_an_end_that_was_wanted_needs_nothing() -> None:
    assert make().ended("x", Kind.LEARNER, Exit(code=0), 0.0, wanted=False) == Finished()


def test_the_evaluator_never_fails_the_job() -> None:
    supervisor = make(limit=0)
    for _ in range(EVALUATOR_RESTARTS):
        assert isinstance(supervisor.ended("evaluator", Kind.EVALUATOR, Exit(code=1), 0.0, wanted=True), Restart)
    decision = supervisor.ended("evaluator", Kind.EVALUATOR, Exit(code=1), 0.0, wanted=True)
    assert isinstance(decision, Abandon) and "continues without" in decision.message
    assert decision.message.startswith("giving up on the evaluator: ")
    assert isinstance(make().ended("evaluator", Kind.EVALUATOR, Exit(code=2), 0.0, wanted=True), Abandon)
    assert not supervisor.since_merge


def test_exits_read_well() -> None:
    assert str(Exit(signal=9)) == "SIGKILL" and str(Exit(code=3)) == "exit code 3" and str(Exit(signal=63)) != ""


def test_rules_by_exit_code_come_first_for_learners() -> None:
    rules = [(frozenset({2, 7}), "Ignore"), (frozenset({3}), "Fail"), (frozenset({4}), "Replace")]
    supervisor = Supervisor(1, random.Random(0), rules)
    for _ in range(5):
        assert isinstance(supervisor.ended("a", Kind.LEARNER, Exit(code=7), 0.0, wanted=True), Restart)
    assert not supervisor.since_merge
    assert isinstance(supervisor.ended("a", Kind.LEARNER, Exit(code=2), 0.0, wanted=True), Restart)
    failed = supervisor.ended("a", Kind.LEARNER, Exit(code=3), 0.0, wanted=True)
    assert isinstance(failed, Fail) and "failurePolicy.rules" in failed.message
    assert isinstance(supervisor.ended("a", Kind.LEARNER, Exit(code=4), 0.0, wanted=True), Restart)
    assert supervisor.since_merge == {"a": 1}
    assert isinstance(supervisor.ended("syncer", Kind.SYNCER, Exit(code=3), 0.0, wanted=True), Fail)


def test_a_member_that_was_superseded_may_stand_by() -> None:
    supervisor = make()
    supervisor.healthy("learner-0")
    assert isinstance(supervisor.ended("learner-0", Kind.LEARNER, Exit(code=4), 0.0, wanted=True), Restart)
    assert isinstance(supervisor.ended("learner-0", Kind.LEARNER, Exit(code=4), 0.0, wanted=True), Fail)


NAME_ERROR = "NameError: name 'lss' is not defined"


def crash(supervisor: Supervisor, name: str = "learner-0", error: str = NAME_ERROR, code: int = 1) -> object:
    return supervisor.ended(name, Kind.LEARNER, Exit(code=code), 0.0, wanted=True, error=error)


@pytest.mark.promise(
    "A program that crashes shows its traceback at its first end; the same error three times before any "
    "merge fails the job, and the error is in report and status"
)
def test_the_same_error_three_times_before_any_merge_fails_the_job() -> None:
    supervisor = make()
    for _ in range(SAME_ERRORS - 1):
        assert isinstance(crash(supervisor), Restart)
        assert isinstance(crash(supervisor, "learner-1"), Restart), "another process has its own count"
    failed = crash(supervisor)
    assert isinstance(failed, Fail) and failed.exit_code == 1
    assert failed.message.startswith(
        f"learner-0 ended 3 times with the same error, and nothing was merged yet: {NAME_ERROR}"
    )
    assert "failurePolicy.maxReplacements, 50" in failed.message


def test_other_errors_ends_without_one_and_errors_after_a_merge_do_not() -> None:
    supervisor = make()
    for n in range(20):
        assert isinstance(crash(supervisor, error="E" * (n + 1)), Restart)
        assert isinstance(crash(supervisor, error=""), Restart)
    merged = make()
    crash(merged), crash(merged)
    merged.merged()
    assert all(isinstance(crash(merged), Restart) for _ in range(20))
    continued = make()
    continued.any_merge = True  # in an earlier run
    assert all(isinstance(crash(continued), Restart) for _ in range(20))


def test_a_learner_that_the_job_can_merge_without_is_left_to_max_replacements() -> None:
    """The operator has the same rule. Its errors count, and decide once the others are not enough any more."""
    supervisor = make()
    for _ in range(5):
        decision = supervisor.ended(
            "learner-0", Kind.LEARNER, Exit(code=1), 0.0, wanted=True, error="NameError: lss", dispensable=True
        )
        assert isinstance(decision, Restart)
    assert supervisor.has_failed("learner-0") and not supervisor.has_failed("learner-1")
    decision = supervisor.ended("learner-0", Kind.LEARNER, Exit(code=1), 0.0, wanted=True, error="NameError: lss")
    assert isinstance(decision, Fail) and "ended 6 times with the same error" in decision.message


def test_an_exit_code_that_a_rule_names_is_left_to_the_rule() -> None:
    supervisor = Supervisor(50, random.Random(0), [(frozenset({1}), "Replace"), (frozenset({9}), "Ignore")])
    assert all(isinstance(crash(supervisor, code=code), Restart) for code in (1, 9) for _ in range(10))


def test_the_evaluators_errors_fail_nothing() -> None:
    supervisor = make()
    for _ in range(EVALUATOR_RESTARTS):
        decision = supervisor.ended("evaluator", Kind.EVALUATOR, Exit(code=1), 0.0, wanted=True, error=NAME_ERROR)
        assert isinstance(decision, Restart)


def test_a_syncer_that_dies_three_times_before_it_answers_fails_the_run() -> None:
    def end(supervisor: Supervisor, error: str, answered: bool) -> object:
        return supervisor.ended("syncer", Kind.SYNCER, Exit(code=1), 0.0, wanted=True, error=error, answered=answered)

    supervisor = make()
    supervisor.any_merge = True  # in an earlier run: it does not matter here
    assert isinstance(end(supervisor, "a", False), Restart) and isinstance(end(supervisor, "b", True), Restart)
    assert isinstance(end(supervisor, "c", False), Restart) and isinstance(end(supervisor, "", False), Restart)
    assert isinstance(end(supervisor, "d", False), Restart) and isinstance(end(supervisor, "e", False), Restart)
    failed = end(supervisor, "ModuleNotFoundError: No module named 'x'", False)
    assert isinstance(failed, Fail) and failed.exit_code == 1
    assert "syncer ended 3 times before it answered (exit code 1): ModuleNotFoundError" in failed.message


def test_replacements_in_vain_are_named_until_the_next_merge() -> None:
    supervisor = make()
    assert supervisor.vain_replacements() == ""
    supervisor.merged()
    for error in ("NameError: a", "NameError: b"):
        supervisor.ended("local-0", Kind.LEARNER, Exit(code=1), 0.0, wanted=True, error=error)
    supervisor.ended("local-1", Kind.LEARNER, Exit(code=1), 0.0, wanted=True, error="OSError: c")
    supervisor.ended("local-2", Kind.LEARNER, KILLED, 0.0, wanted=True)
    assert supervisor.vain_replacements() == (
        "since the last merge local-0 was replaced 2 times, at last for: NameError: b; "
        "local-1 was replaced 1 time, at last for: OSError: c"
    ), "local-2's end was no error"
    supervisor.merged()
    assert supervisor.vain_replacements() == ""
