"""Who is asked for an optimizer state, and that a request ends when nobody gives one."""

from __future__ import annotations

import pytest

from core_desk import Desk, config, of
from diloco_protocol.vocabulary import JobPhase
from diloco_syncer.core import events as ev


def trained(learners: int = 2) -> Desk:
    """Learners on connections 1.., of which the last has the most steps; nobody is given up."""
    desk = Desk(config(slots=3, heartbeat_timeout=1e6))
    desk.begin(learners)
    for i in range(learners):
        desk.report(i + 1, 4 * (i + 1))
    return desk


def suspended(desk: Desk) -> ev.RequestPeerState:
    """The job is to be suspended, and all have left; returns whom it asked for the checkpoint's state."""
    (ask,) = of(desk.do(ev.EndRequested(JobPhase.SUSPENDED, "interrupted")), ev.RequestPeerState)
    assert (ask.connection, ask.checkpoint) == (2, True)
    for connection in (1, 2):
        desk.do(ev.Drained(connection))
    assert desk.core.phase is JobPhase.DRAINING, "the state is still on its way"
    return ask


def test_a_suspension_ends_though_its_checkpoints_state_never_comes() -> None:
    desk = trained()
    suspended(desk)
    desk.later(desk.core.config.checkpoint_seconds - 1)
    assert desk.core.phase is JobPhase.DRAINING
    desk.later(1.0)
    assert desk.core.phase is JobPhase.SUSPENDED


@pytest.mark.parametrize("fails", [False, True])
def test_a_suspension_ends_when_the_one_that_was_asked_is_gone(fails: bool) -> None:
    desk = trained()
    ask = suspended(desk)
    actions = desk.do(ev.PeerStateFailed(2, ask.transfer) if fails else ev.ConnectionLost(2))
    assert desk.core.phase is JobPhase.SUSPENDED
    assert not of(actions, ev.RequestPeerState) and not of(actions, ev.OfferPeerState)


def test_nobody_else_is_asked_for_a_state_while_the_job_drains() -> None:
    desk = trained()
    (ask,) = of(desk.do(ev.EndRequested(JobPhase.SUSPENDED, "interrupted")), ev.RequestPeerState)
    assert not of(desk.do(ev.PeerStateFailed(2, ask.transfer)), ev.RequestPeerState)


def test_the_next_is_asked_at_once_when_a_donor_is_gone_and_after_a_while_when_it_is_silent() -> None:
    for gone in (True, False):
        desk = trained()
        desk.join(3, 2)
        (ask,) = of(desk.do(ev.PeerStateRequested(3)), ev.RequestPeerState)
        assert ask.connection == 2
        if gone:
            actions = desk.do(ev.ConnectionLost(2))
        else:
            assert not of(desk.later(desk.core.config.peer_seconds - 1), ev.RequestPeerState)
            actions = desk.later(1.0)
        (again,) = of(actions, ev.RequestPeerState)
        assert again.connection == 1
        assert of(desk.do(ev.PeerStateFailed(1, again.transfer)), ev.OfferPeerState) == [ev.OfferPeerState(3, 0)]


def test_a_request_that_is_repeated_goes_on() -> None:
    desk = trained()
    desk.join(3, 2)
    (ask,) = of(desk.do(ev.PeerStateRequested(3)), ev.RequestPeerState)
    assert not of(desk.do(ev.PeerStateRequested(3)), ev.RequestPeerState)
    assert of(desk.do(ev.PeerStateReceived(ask.transfer)), ev.OfferPeerState) == [ev.OfferPeerState(3, ask.transfer)]


def test_newcomers_are_not_asked_for_each_others_state_nor_for_their_own() -> None:
    desk = trained()  # both went on in their tenures, with steps, but in new processes
    (ask,) = of(desk.do(ev.PeerStateRequested(2)), ev.RequestPeerState)
    assert ask.connection == 1
    assert of(desk.do(ev.PeerStateRequested(1)), ev.OfferPeerState) == [ev.OfferPeerState(1, 0)]


def test_who_has_made_no_step_is_not_asked() -> None:
    desk = Desk(config(slots=3, heartbeat_timeout=1e6))
    desk.begin(2)
    desk.join(3, 2)
    assert of(desk.do(ev.PeerStateRequested(3)), ev.OfferPeerState) == [ev.OfferPeerState(3, 0)]


def test_a_state_that_comes_on_is_waited_for_however_long_it_takes() -> None:
    desk = trained()
    desk.join(3, 2)
    (ask,) = of(desk.do(ev.PeerStateRequested(3)), ev.RequestPeerState)
    patience = desk.core.config.peer_seconds
    for _ in range(10):
        asked = of(desk.later(0.9 * patience), ev.RequestPeerState)
        assert not asked
        desk.do(ev.PeerStateAdvanced(ask.transfer))
    assert of(desk.do(ev.PeerStateReceived(ask.transfer)), ev.OfferPeerState) == [ev.OfferPeerState(3, ask.transfer)]

    ask = suspended(desk := trained())
    for _ in range(10):
        desk.later(0.9 * desk.core.config.checkpoint_seconds)
        desk.do(ev.PeerStateAdvanced(ask.transfer))
    assert desk.core.phase is JobPhase.DRAINING
    desk.later(desk.core.config.checkpoint_seconds)
    assert desk.core.phase is JobPhase.SUSPENDED


def test_all_newcomers_that_wait_share_one_transfer() -> None:
    desk = Desk(config(slots=5, heartbeat_timeout=1e6))
    desk.begin(3)
    for i in range(3):
        desk.report(i + 1, 4 * (i + 1))
    asked: list[ev.RequestPeerState] = []
    for connection in (4, 5):
        desk.join(connection, connection - 1)
        asked += of(desk.do(ev.PeerStateRequested(connection)), ev.RequestPeerState)
    (ask,) = asked
    told = of(desk.do(ev.PeerStateReceived(ask.transfer)), ev.OfferPeerState)
    assert told == [ev.OfferPeerState(connection, ask.transfer) for connection in (4, 5)]


def test_when_the_shared_donor_fails_the_next_is_asked_once_for_all() -> None:
    desk = Desk(config(slots=5, heartbeat_timeout=1e6))
    desk.begin(3)
    for i in range(3):
        desk.report(i + 1, 4 * (i + 1))
    for connection in (4, 5):
        desk.join(connection, connection - 1)
        desk.do(ev.PeerStateRequested(connection))
    first = of(desk.log, ev.RequestPeerState)
    assert len(first) == 1
    (second,) = of(desk.do(ev.PeerStateFailed(first[0].connection, first[0].transfer)), ev.RequestPeerState)
    assert second.connection != first[0].connection
    told = of(desk.do(ev.PeerStateReceived(second.transfer)), ev.OfferPeerState)
    assert [offer.connection for offer in told] == [4, 5]
