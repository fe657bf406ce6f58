"""The timers of the plan's memory."""

from diloco_operator.model import Fact, Timer, Timers


def test_a_timer_runs_while_its_fact_holds() -> None:
    timers, timer = Timers(), Timer(Fact.NODE_MISSING, "node-1")
    assert timers.observe(timer, 100.0) == 0.0
    assert timers.observe(timer, 107.0) == 7.0
    assert timers.observe(timer, 108.0, holds=False) == 0.0
    assert timers.observe(timer, 109.0) == 0.0


def test_timers_tell_subjects_and_epochs_apart() -> None:
    timers = Timers()
    timers.observe(Timer(Fact.POD_SILENT, "a", 1), 0.0)
    assert timers.observe(Timer(Fact.POD_SILENT, "a", 2), 5.0) == 0.0
    assert timers.observe(Timer(Fact.POD_SILENT, "b", 1), 5.0) == 0.0
    assert timers.observe(Timer(Fact.POD_SILENT, "a", 1), 5.0) == 5.0


def test_timers_are_stopped_by_fact_and_by_subject() -> None:
    timers = Timers()
    for fact in (Fact.POD_SILENT, Fact.POD_SLOW):
        for subject in ("a", "b"):
            timers.observe(Timer(fact, subject, 1), 0.0)
    timers.keep(Fact.POD_SILENT, {"b"})
    assert timers.observe(Timer(Fact.POD_SILENT, "a", 1), 9.0) == 0.0
    assert timers.observe(Timer(Fact.POD_SILENT, "b", 1), 9.0) == 9.0
    assert timers.observe(Timer(Fact.POD_SLOW, "a", 1), 9.0) == 9.0
    timers.stop(Fact.POD_SLOW)
    assert timers.observe(Timer(Fact.POD_SLOW, "a", 1), 10.0) == 0.0
    assert timers.observe(Timer(Fact.POD_SILENT, "b", 1), 10.0) == 10.0
