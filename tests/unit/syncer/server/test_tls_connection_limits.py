"""Allowance of a certificate, the replay memory, and what of many refusals is logged."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_protocol.security.identity import name
from diloco_protocol.vocabulary import ConnectionRefusal
from diloco_syncer.server.tls import connection_limits
from diloco_syncer.server.tls.connection_limits import (
    ConnectionLimits,
    MessagePace,
    Peer,
    RefusalCounter,
    TooManyCalls,
    allowance_of,
)

REGIONS = {"eu-1": 10, "us-2": 2}
EU = Peer("e" * 64, frozenset({name("ns", "tiny", "learner", "eu-1")}))
US = Peer("u" * 64, frozenset({name("ns", "tiny", "learner", "us-2")}))


def test_limits_follow_the_regions_that_a_certificate_names() -> None:
    eu, us = allowance_of(REGIONS, EU.names), allowance_of(REGIONS, US.names)
    everybody = allowance_of(REGIONS, frozenset({name("ns", "tiny", "learner")}))
    assert (eu.sessions, us.sessions, everybody.sessions) == (38, 22, 42)
    assert allowance_of(REGIONS, frozenset()) == everybody
    assert allowance_of(REGIONS, EU.names | US.names).connections == 20 * 13 + connection_limits.SPARE_CONNECTIONS
    assert us.joins > 60 * 2  # two learners that try about once a second are never held up
    # A region that the job does not have gets the evaluator's share and no more.
    assert allowance_of(REGIONS, frozenset({name("ns", "tiny", "learner", "no")})).sessions == 18


def test_one_certificates_flood_is_not_anothers() -> None:
    held = ConnectionLimits(REGIONS)
    answers = Counter(held.admit_join(US, 0.0) for _ in range(1000))
    allowed = int(allowance_of(REGIONS, US.names).joins)
    assert answers == {None: allowed, ConnectionRefusal.TOO_MANY_JOINS: 1000 - allowed}
    assert held.admit_join(EU, 0.0) is None
    # The bucket fills again, at its rate and up to its size.
    rate = allowance_of(REGIONS, US.names).per_second
    assert [held.admit_join(US, 1.0) for _ in range(int(rate) + 1)] == [None] * int(rate) + [
        ConnectionRefusal.TOO_MANY_JOINS
    ]
    assert Counter(held.admit_join(US, 1e6) for _ in range(1000))[None] == allowed


@given(st.lists(st.floats(0, 5), max_size=300))
def test_a_learner_that_tries_once_a_second_is_never_refused(pauses: list[float]) -> None:
    held, now = ConnectionLimits({"eu-1": 1}), 0.0
    peer = Peer("x", frozenset({name("ns", "tiny", "learner", "eu-1")}))
    for pause in pauses:
        now += max(pause, 0.5)
        assert held.admit_join(peer, now) is None


def test_sessions_are_counted_by_certificate_and_given_back() -> None:
    held = ConnectionLimits(REGIONS)
    most = allowance_of(REGIONS, US.names).sessions
    for _ in range(most):
        assert held.admit_join(US, 0.0) is None
        held.session_opened(US)
    assert held.admit_join(US, 0.0) == ConnectionRefusal.TOO_MANY_SESSIONS and held.admit_join(EU, 0.0) is None
    held.session_closed(US)
    assert held.admit_join(US, 0.0) is None


def test_calls_that_say_nothing_are_counted_by_certificate_and_given_back() -> None:
    held, most = ConnectionLimits(REGIONS), allowance_of(REGIONS, US.names).silent
    with contextlib.ExitStack() as open_calls:
        for _ in range(most):
            open_calls.enter_context(held.silent_call(US))
        with pytest.raises(TooManyCalls), held.silent_call(US):
            pass
        with held.silent_call(EU):
            pass
    with held.silent_call(US):
        pass


def test_messages_are_taken_at_a_pace_and_some_at_once() -> None:
    pace, rate = MessagePace(), connection_limits.MESSAGES_PER_SECOND
    waits = [pace.count_message(100.0) for _ in range(connection_limits.MESSAGES_AT_ONCE + 100)]
    assert not any(waits[: connection_limits.MESSAGES_AT_ONCE]) and waits[-1] == pytest.approx(100 / rate)
    assert not pace.count_message(100.0 + 101.5 / rate)
    assert pace.count_message(100.0 + 101.5 / rate) > 0
    # What was not used is saved up to the same number, and no further.
    waits = [pace.count_message(1e6) for _ in range(connection_limits.MESSAGES_AT_ONCE + 1)]
    assert max(waits[:-1]) < 1e-6 and waits[-1] == pytest.approx(1 / rate, rel=1e-3)


def test_a_machine_that_has_just_started_takes_as_many_messages_at_once() -> None:
    pace = MessagePace()
    assert max(pace.count_message(0.5) for _ in range(connection_limits.MESSAGES_AT_ONCE)) < 1e-6
    assert pace.count_message(0.5) > 0


@pytest.mark.promise(
    "Empty calls of one certificate are limited, and a session's messages and uploads are limited in "
    "rate: other clients are not held up",
    section="Hostile callers",
)
@given(st.lists(st.floats(0, 5), max_size=300))
def test_a_learner_that_reports_fifty_times_a_second_never_waits(pauses: list[float]) -> None:
    pace, now = MessagePace(), 1.0
    for pause in pauses:
        now += max(pause, 0.02)
        assert not pace.count_message(now)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5)), max_size=40))
def test_a_join_is_believed_once(joins: list[tuple[str, int]]) -> None:
    held, highest = ConnectionLimits({}), {"a": 0, "b": 0}
    for process, attempt in joins:
        assert held.is_new_attempt(process, attempt) == (attempt == 0 or attempt > highest[process])
        highest[process] = max(highest[process], attempt)


def test_the_memory_is_bounded() -> None:
    held = ConnectionLimits({})
    for number in range(connection_limits.MAX_PROCESSES + 10):
        assert held.is_new_attempt(f"{number:x}", 7)
    assert (
        not held.is_new_attempt(f"{connection_limits.MAX_PROCESSES:x}", 7)
        and len(held._attempts) == connection_limits.MAX_PROCESSES
    )
    for number in range(connection_limits.MAX_CERTIFICATES + 10):
        held.admit_join(Peer(str(number)), 0.0)
    assert len(held._buckets) == connection_limits.MAX_CERTIFICATES


def test_a_flood_of_refusals_writes_a_line_each_ten_seconds() -> None:
    refusals = RefusalCounter()
    said = [refusals.count_refusal("expired", at / 10) for at in range(205)]
    assert [(at, unsaid) for at, unsaid in enumerate(said) if unsaid is not None] == [(0, 0), (100, 99), (200, 99)]
    assert refusals.count_refusal("stranger", 0.1) == 0 and refusals.counts == {"expired": 205, "stranger": 1}


def test_a_peer_shows_who_it_is_and_nothing_secret() -> None:
    shown = str(Peer("f" * 64, EU.names, "10.0.0.1:5"))
    assert shown == "the learner of region eu-1 of job ns/tiny (ffffffffffff) at 10.0.0.1:5"
