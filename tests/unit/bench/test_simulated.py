"""bench/simulated.py: a syncer over several lives and its learners, as the operator's benchmark has them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import fleet
import simulated
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.vocabulary import SlotState

BEAT = 20.0
LEARNERS = 3


class Clock:
    """The module ``time`` in a program that is told how late it is."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1.7e9 + self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(simulated, "time", made)
    monkeypatch.setattr(simulated, "random", SimpleNamespace(uniform=lambda low, high: (low + high) / 2))
    return made


def uid(number: int) -> str:
    return f"00000000-0000-0000-0000-{number:012x}"


@pytest.fixture
def syncer(clock: Clock) -> simulated.Syncer:
    job = DiLoCoJob.model_validate(fleet.job(0, LEARNERS + 2, BEAT))
    made = simulated.Syncer(job, BEAT)
    made.begin()
    for number in range(LEARNERS):
        made.learner_pod(uid(number), "local", number, 1.0 + number)
    made.evaluator_pod(uid(99))
    return made


def let_pass(syncer: simulated.Syncer, clock: Clock, seconds: int) -> None:
    for _ in range(seconds):
        clock.now += 1.0
        syncer.turn()


def steps(syncer: simulated.Syncer) -> list[int]:
    return [slot.step for slot in syncer.status_page.status().slots]


def check_ledger(syncer: simulated.Syncer) -> None:
    assert syncer.core.ledger is not None
    assert [syncer.core.ledger.imbalances(slot) for slot in range(LEARNERS)] == [[]] * LEARNERS


def test_learners_make_a_step_a_beat_and_are_merged(syncer: simulated.Syncer, clock: Clock) -> None:
    let_pass(syncer, clock, 400)
    assert set(steps(syncer)) <= {19, 20} and syncer.core.merges >= 6
    status = syncer.status_page.status()
    assert [slot.state for slot in status.slots] == [SlotState.ACTIVE] * LEARNERS
    assert status.slots[0].loss and status.bytes_up > 0
    check_ledger(syncer)


def test_another_pod_takes_the_place_of_one_that_is_gone(syncer: simulated.Syncer, clock: Clock) -> None:
    let_pass(syncer, clock, 200)
    syncer.gone(uid(1))
    let_pass(syncer, clock, 5)
    assert syncer.status_page.status().quorum.active == LEARNERS - 1
    syncer.learner_pod(uid(7), "local", 1, 1.0)
    before = syncer.core.merges
    let_pass(syncer, clock, 200)
    assert syncer.status_page.status().quorum.active == LEARNERS and syncer.core.merges > before
    check_ledger(syncer)


def test_learners_outlive_their_syncer_and_go_on(syncer: simulated.Syncer, clock: Clock) -> None:
    let_pass(syncer, clock, 200)
    before, merges = steps(syncer), syncer.core.merges
    syncer.end()
    assert not syncer.serving
    let_pass(syncer, clock, 30)
    syncer.begin()
    assert syncer.core.epoch == 2
    let_pass(syncer, clock, 200)
    assert min(steps(syncer)) >= max(before) + 8 and syncer.core.merges > merges
    assert syncer.core.ledger is not None and syncer.core.ledger.totals().dropped == 0
    check_ledger(syncer)


def test_learners_that_stand_still_are_heard(syncer: simulated.Syncer, clock: Clock) -> None:
    let_pass(syncer, clock, 100)
    syncer.stand_still(True)
    let_pass(syncer, clock, 30)  # the step that was under way ends
    still = steps(syncer)
    let_pass(syncer, clock, 300)
    assert steps(syncer) == still and syncer.status_page.status().quorum.active == LEARNERS
    syncer.stand_still(False)
    let_pass(syncer, clock, 100)
    assert min(steps(syncer)) >= max(still) + 4
