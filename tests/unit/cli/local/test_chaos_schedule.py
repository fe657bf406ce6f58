"""The --chaos grammar and the choice of victims."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.local.chaos.schedule import ChaosError, Fault, FaultSchedule, check, choose, parse


def test_every_form() -> None:
    got = parse("20s:kill:learner-2, step=150:term:learner,1.5m:pause:syncer:500ms,0s:cut:learner-0:2s")
    assert got == (
        Fault("20s:kill:learner-2", "kill", after_seconds=20.0, learner=2),
        Fault("step=150:term:learner", "term", at_step=150),
        Fault("1.5m:pause:syncer:500ms", "pause", after_seconds=90.0, syncer=True, duration=0.5),
        Fault("0s:cut:learner-0:2s", "cut", after_seconds=0.0, learner=0, duration=2.0),
    )
    assert [fault.target for fault in got] == ["learner-2", "learner", "syncer", "learner-0"]
    assert parse("1s:kill:learner-1:30s,2s:slow:learner:4s,3s:slow(0.25):learner-0:500ms") == (
        Fault("1s:kill:learner-1:30s", "kill", after_seconds=1.0, learner=1, duration=30.0),
        Fault("2s:slow:learner:4s", "slow", after_seconds=2.0, duration=4.0),
        Fault("3s:slow(0.25):learner-0:500ms", "slow", after_seconds=3.0, learner=0, duration=0.5, speed=0.25),
    )
    assert parse("  ") == ()


@pytest.mark.parametrize(
    ("spec", "item", "cure"),
    [
        ("20s:kill", "item 1 ('20s:kill')", "TIME:ACTION:TARGET"),
        ("20s:term:learner:5s", "item 1", "term takes no duration; write 20s:term:learner"),
        ("20s:kill:learner:soon", "item 1", "'soon' is no time that it stays away; write 30s"),
        ("20s:slow:learner", "item 1", "slow needs a duration; write 20s:slow:learner:5s"),
        ("20s:slow(2):learner:5s", "item 1", "'2' is no argument of slow"),
        ("20s:slow(0.0):learner:5s", "item 1", "such as slow(0.25)"),
        ("20s:pause(0.5):learner:5s", "item 1", "'0.5' is no argument of pause; slow alone takes one"),
        ("20s:pause:learner", "item 1", "pause needs a duration; write 20s:pause:learner:5s"),
        ("20s:cut:learner:0s", "item 1", "no duration above zero"),
        ("20s:cut:learner:soon", "item 1", "'soon' is no duration"),
        ("20s:kill:learner,20:kill:learner", "item 2", "'20' is no time; write a duration"),
        ("step=x:kill:learner", "item 1", "such as step=150"),
        ("20s:explode:learner", "item 1", "write one of kill, term, pause, cut, slow"),
        ("20s:kill:worker", "item 1", "write a learner's name such as local-1, learner (any) or syncer"),
        ("20s:kill:learner-", "item 1", "no target 'learner-'"),
        ("20s:kill:learner,", "item 2 ('')", "remove the spare comma"),
        (f"step={'9' * 5000}:kill:learner", "item 1", "such as step=150"),
        (f"1s:kill:learner-{'9' * 5000}", "item 1", "write a learner's name such as local-1, learner (any) or syncer"),
        (f"1s:pause:learner:{'9' * 400}h", "item 1", "is no duration above zero"),
    ],
)
def test_errors_name_the_item_and_the_cure(spec: str, item: str, cure: str) -> None:
    with pytest.raises(ChaosError) as error:
        parse(spec)
    assert item in str(error.value) and cure in str(error.value)


def test_too_many_items_are_refused() -> None:
    with pytest.raises(ChaosError, match="10001 items"):
        parse(",".join(["1s:kill:syncer"] * 10_001))


def test_check_names_the_learners_that_there_are() -> None:
    names = ["eu-0", "eu-1", "us-0"]
    found = check(parse("1s:kill:us-0,1s:kill:learner,1s:kill:learner-1,1s:kill:syncer"), names)
    assert [(fault.target, fault.learner) for fault in found] == [
        *(("us-0", 2), ("learner", None), ("eu-1", 1), ("syncer", None))
    ]
    for wrong in ("learner-3", "us-1", "eu-00"):
        with pytest.raises(ChaosError, match=f"no {wrong}; it has eu-0, eu-1, us-0"):
            check(parse(f"1s:kill:{wrong}"), names)
    with pytest.raises(ChaosError, match="only local-0"):
        check(parse("1s:kill:learner-1"), ["local-0"])
    with pytest.raises(ChaosError, match="it has a-0, a-1, a-2, a-3, a-4, a-5, a-6, a-7, …"):
        check(parse("1s:kill:b-0"), [f"a-{index}" for index in range(9)])
    # Where a region is called learner its learners have the names that numbers have elsewhere.
    (own,) = check(parse("1s:kill:learner-0"), ["a-0", "learner-0"])
    assert (own.target, own.learner) == ("learner-0", 1)


_times = st.integers(0, 10_000).map(lambda n: f"{n}s") | st.integers(0, 10_000).map(lambda n: f"step={n}")
_targets = st.sampled_from(["syncer", "learner"]) | st.integers(0, 99).map(lambda n: f"learner-{n}")
_items = st.tuples(_times, st.sampled_from(["kill", "term"]), _targets).map(":".join) | st.tuples(
    _times,
    st.sampled_from(["pause", "cut", "kill", "slow", "slow(0.125)"]),
    _targets,
    st.integers(1, 99).map(lambda n: f"{n}s"),
).map(":".join)


@given(st.lists(_items, max_size=8))
def test_what_is_written_is_what_is_read(items: list[str]) -> None:
    got = parse(",".join(items))
    assert [fault.text for fault in got] == items
    assert [fault.target for fault in got] == [item.split(":")[2] for item in items]


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused_clearly(text: str) -> None:
    try:
        parse(text)
    except ChaosError as error:
        assert "--chaos" in str(error)


def test_clockwork_gives_each_fault_once() -> None:
    clockwork = FaultSchedule(parse("3s:kill:learner-0,1s:kill:learner-1,step=10:kill:learner-2"))
    assert clockwork.due(None, 9) == []
    assert [index for index, _ in clockwork.due(None, 10)] == [2]
    assert clockwork.due(0.5, 10) == []
    assert [index for index, _ in clockwork.due(5.0, 10)] == [1, 0]
    assert clockwork.due(1e9, 10**9) == [] and clockwork.waiting == ()


@given(st.sets(st.integers(0, 20)), st.integers(0, 2**31), st.integers(0, 50))
def test_choice_is_by_the_seed_and_among_the_running(running: set[int], seed: int, index: int) -> None:
    fault = parse("1s:kill:learner")[0]
    got = choose(fault, index, sorted(running), seed)
    assert got == choose(fault, index, sorted(running, reverse=True), seed)
    assert (got in running) if running else got is None


def test_choice_depends_on_the_seed() -> None:
    fault = parse("1s:kill:learner")[0]
    assert len({choose(fault, 0, range(8), seed) for seed in range(50)}) > 4
    named = parse("1s:kill:learner-5")[0]
    assert choose(named, 0, range(8), 0) == 5 and choose(named, 0, range(3), 0) is None


def test_a_fault_is_due_at_its_very_time() -> None:
    schedule = FaultSchedule(parse("20s:kill:learner-0"))
    assert schedule.due(19.9, 0) == [] and len(schedule.due(20.0, 0)) == 1
