"""Fault accounting from the syncer's events."""

from __future__ import annotations

from diloco.local.chaos.fault_report import NOTICE_SECONDS, Event, Injected, rows
from diloco_protocol.documents import FaultRow


def events(*tuples: tuple[float, str, int, int], epoch: int = 1) -> list[Event]:
    return [
        Event(epoch=epoch, n=n, time=time, kind=kind, slot=slot, incarnation=inc, message="")
        for n, (time, kind, slot, inc) in enumerate(tuples)
    ]


def times(row: FaultRow) -> tuple[object, ...]:
    return tuple(getattr(row, f"{name}_seconds") for name in ("detected", "joined", "first_step", "recovered"))


def test_a_kill_is_followed_to_the_first_merge_of_the_newcomer() -> None:
    told = events(
        (90.0, "joined", 2, 1),
        (91.0, "first-step", 2, 1),
        (92.0, "first-merge", 2, 1),
        (99.0, "suspect", 1, 1),  # another slot's trouble
        (100.05, "process-ended", 2, 1),
        (101.2, "joined", 2, 2),
        (102.0, "first-step", 2, 2),
        (104.5, "first-merge", 2, 2),
    )
    fault = Injected(100.0, 20.0, "kill", "learner-2", slot=2, incarnation=1, noticed=100.01)
    assert [dict(row) for row in rows([fault], reversed(told))] == [
        {
            "at_seconds": 20.0,
            "time": 100.0,
            "lasts_seconds": 0.0,
            "action": "kill",
            "target": "learner-2",
            "detected_seconds": 0.05,
            "joined_seconds": 1.2,
            "first_step_seconds": 2.0,
            "recovered_seconds": 4.5,
        }
    ]


def test_a_spare_that_takes_the_slot_counts_as_the_newcomer() -> None:
    told = events((10.1, "lost", 0, 3), (10.1, "joined", 0, 4), (10.5, "first-step", 0, 4), (11.0, "first-merge", 0, 4))
    fault = Injected(10.0, 0.0, "kill", "learner-0", slot=0, incarnation=3)
    assert times(rows([fault], told)[0]) == (0.1, 0.1, 0.5, 1.0)


def test_a_newcomer_that_dies_too_hands_recovery_to_the_next() -> None:
    told = events(
        (10.1, "process-ended", 0, 1),
        (11.0, "joined", 0, 2),
        (11.5, "process-ended", 0, 2),
        (12.0, "joined", 0, 3),
        (12.5, "first-step", 0, 3),
        (13.0, "first-merge", 0, 3),
    )
    first = Injected(10.0, 0.0, "kill", "learner-0", slot=0, incarnation=1)
    second = Injected(11.4, 1.4, "kill", "learner-0", slot=0, incarnation=2)
    got = rows([first, second], told)
    assert times(got[0]) == (0.1, 1.0, 2.5, 3.0)
    assert times(got[1]) == (0.1, 0.6, 1.1, 1.6)


def test_a_pause_that_nobody_noticed_does_not_claim_a_later_loss() -> None:
    told = events((100.0 + 2.0 + NOTICE_SECONDS + 1, "lost", 1, 1), (130.0, "joined", 1, 2))
    pause = Injected(100.0, 0.0, "pause", "learner-1", slot=1, incarnation=1, duration=2.0)
    assert times(rows([pause], told)[0]) == (None,) * 4
    kill = Injected(100.5, 0.5, "kill", "learner-1", slot=1, incarnation=1)
    told = events((100.6, "process-ended", 1, 1), (101.0, "joined", 1, 2))
    got = rows([pause, kill], told)
    assert times(got[0]) == (None,) * 4 and times(got[1]) == (0.1, 0.5, None, None)


def test_a_pause_that_nobody_noticed_claims_neither_the_syncers_fall_nor_the_jobs_end() -> None:
    pause = Injected(100.0, 0.0, "pause", "learner-1", slot=1, incarnation=1, duration=1.0)
    syncer = Injected(102.0, 2.0, "kill", "syncer", noticed=102.1)
    told = events((103.0, "joined", 1, 2), (103.1, "first-step", 1, 2), (108.0, "drained", 1, 2))
    got = rows([pause, syncer], told)
    assert times(got[0]) == (None,) * 4
    assert times(got[1]) == (0.1, 1.0, 1.1, None)
    term = Injected(107.0, 7.0, "term", "learner-1", slot=1, incarnation=2)
    assert times(rows([term], told)[0]) == (1.0, None, None, None)


def test_not_back_by_the_end() -> None:
    fault = Injected(10.0, 0.0, "kill", "learner-0", slot=0, incarnation=1)
    assert times(rows([fault], events((10.2, "process-ended", 0, 1)))[0]) == (0.2, None, None, None)
    assert times(rows([fault], [])[0]) == (None,) * 4


def test_a_learner_without_a_slot_is_only_noticed() -> None:
    fault = Injected(10.0, 0.0, "kill", "learner-0", noticed=10.5)
    assert times(rows([fault], events((11.0, "joined", 0, 1)))[0]) == (0.5, None, None, None)


def test_the_syncer() -> None:
    old = events((5.0, "joined", 0, 1), (9.0, "first-merge", 0, 1))
    new = events((12.0, "joined", 1, 2), (12.5, "first-step", 1, 2), (14.0, "first-merge", 1, 2), epoch=2)
    fault = Injected(10.0, 3.0, "kill", "syncer", noticed=10.1)
    assert times(rows([fault], old + new)[0]) == (0.1, 2.0, 2.5, 4.0)
    cut = Injected(10.0, 3.0, "cut", "syncer", duration=2.0)
    told = events((10.1, "suspect", 0, 1), (12.2, "joined", 0, 2), (12.4, "first-step", 0, 2))
    assert times(rows([cut], told)[0]) == (0.1, 2.2, 2.4, None)
    assert times(rows([cut], [])[0]) == (None,) * 4


def test_a_long_pause_is_noticed_while_it_lasts() -> None:
    pause = Injected(100.0, 0.0, "pause", "learner-1", slot=1, incarnation=1, duration=60.0)
    assert times(rows([pause], events((162.0, "lost", 1, 1)))[0]) == (62.0, None, None, None)


def test_a_drain_is_a_sign_of_a_learner_that_was_told_to_end_alone() -> None:
    told = events((101.0, "drained", 1, 1))
    for action, detected in (("kill", None), ("term", 1.0)):
        fault = Injected(100.0, 0.0, action, "learner-1", slot=1, incarnation=1)
        assert times(rows([fault], told)[0]) == (detected, None, None, None)
