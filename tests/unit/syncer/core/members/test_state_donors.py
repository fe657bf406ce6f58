"""Who is asked for an optimizer state, and that a request ends when nobody gives one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core_desk import Desk, config, of, report
from diloco_protocol.vocabulary import JobPhase
from diloco_syncer.core import events as ev


def trained(learners: int = 2, slots: int = 3) -> Desk:
    """Learners on connections 1.., of which the last has the most steps; nobody is given up."""
    desk = Desk(config(slots=slots, heartbeat_timeout=1e6))
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


@pytest.mark.promise("A suspension ends even if the state for its checkpoint never arrives, or its learner is gone")
def test_a_suspension_ends_though_its_checkpoints_state_never_comes() -> None:
    desk = trained()
    suspended(desk)
    desk.later(desk.core.config.checkpoint_seconds - 1)
    assert desk.core.phase is JobPhase.DRAINING
    desk.later(1.0)
    assert desk.core.phase is JobPhase.SUSPENDED


@pytest.mark.promise("A suspension ends even if the state for its checkpoint never arrives, or its learner is gone")
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


@pytest.mark.promise(
    "An optimizer state of any size reaches a new learner, and the checkpoint, as long as bytes keep "
    "arriving; all new learners that wait share one transfer"
)
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


@pytest.mark.promise(
    "An optimizer state of any size reaches a new learner, and the checkpoint, as long as bytes keep "
    "arriving; all new learners that wait share one transfer"
)
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


@pytest.mark.promise(
    "An optimizer state of any size reaches a new learner, and the checkpoint, as long as bytes keep "
    "arriving; all new learners that wait share one transfer"
)
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


@pytest.mark.promise(
    "A new learner takes over an optimizer state over a link of any speed: while bytes come, and while the syncer "
    "still has to answer, it begins with no fresh one"
)
def test_a_newcomer_whose_session_breaks_shares_what_is_under_way_to_it() -> None:
    desk = trained()
    desk.join(3, 2)
    (ask,) = of(desk.do(ev.PeerStateRequested(3)), ev.RequestPeerState)
    desk.do(ev.ConnectionLost(3))
    desk.join(4, 2)
    assert not of(desk.do(ev.PeerStateRequested(4)), ev.RequestPeerState)
    assert of(desk.do(ev.PeerStateReceived(ask.transfer)), ev.OfferPeerState) == [ev.OfferPeerState(4, ask.transfer)]
    desk.do(ev.ConnectionLost(4))
    desk.join(5, 2)
    (ask,) = of(desk.do(ev.PeerStateRequested(5)), ev.RequestPeerState)
    desk.do(ev.ConnectionLost(5))
    assert not of(desk.later(desk.core.config.peer_seconds), ev.RequestPeerState), "for nobody no other is asked"


@pytest.mark.promise(
    "A new learner takes over an optimizer state over a link of any speed: while bytes come, and while the syncer "
    "still has to answer, it begins with no fresh one"
)
def test_donors_whose_sessions_break_again_and_again_are_asked_three_times_each() -> None:
    desk = trained()
    desk.join(3, 2)
    (ask,) = of(desk.do(ev.PeerStateRequested(3)), ev.RequestPeerState)
    slots = {1: 0, 2: 1}
    for connection in range(4, 9):
        slot = slots.pop(ask.connection)
        (ask,) = of(desk.do(ev.ConnectionLost(ask.connection)), ev.RequestPeerState)
        slots[connection] = slot
        desk.join(connection, slot, process=f"p{slot + 1}")
        desk.report(connection, 4 * connection)
    assert ask.connection == 7
    assert of(desk.do(ev.ConnectionLost(7)), ev.OfferPeerState) == [ev.OfferPeerState(3, 0)]


def broken(came: bool = True) -> tuple[Desk, ev.RequestPeerState]:
    """A newcomer on connection 3 waits for a state of which a part has come, or nothing, when its donor's session (2)
    breaks; returns the request that the donor had."""
    desk = trained()
    desk.join(3, 2)
    (ask,) = of(desk.do(ev.PeerStateRequested(3)), ev.RequestPeerState)
    if came:
        desk.do(ev.PeerStateAdvanced(ask.transfer))
    assert not came or not of(desk.do(ev.ConnectionLost(2)), ev.RequestPeerState), "its donor may be back at once"
    return desk, ask


def rejoin(desk: Desk, connection: int, process: str = "p2") -> list[ev.RequestPeerState]:
    """The donor's place is taken; returns who is asked for a state."""
    told = desk.join(connection, 1, process=process) + desk.report(connection, 4 * connection)
    return of(told, ev.RequestPeerState)


@pytest.mark.promise("A peer's optimizer state goes on where its sender's session broke, also again and again")
def test_a_state_whose_donors_session_breaks_goes_on_in_the_next_one() -> None:
    desk, ask = broken()
    for connection in range(4, 9):
        assert rejoin(desk, connection) == [ev.RequestPeerState(connection, ask.transfer)]
        assert not of(desk.later(0.9 * desk.core.config.peer_seconds), ev.RequestPeerState)
        desk.do(ev.PeerStateAdvanced(ask.transfer))
        assert not of(desk.do(ev.ConnectionLost(connection)), ev.RequestPeerState)
    rejoin(desk, 9)
    assert not of(desk.do(ev.PeerStateFailed(8, ask.transfer)), ev.RequestPeerState), "that session is over"
    assert of(desk.do(ev.PeerStateReceived(ask.transfer)), ev.OfferPeerState) == [ev.OfferPeerState(3, ask.transfer)]


def test_a_state_that_goes_on_is_asked_for_once_for_all_who_wait() -> None:
    desk = trained(slots=4)
    for connection in (3, 4):
        desk.join(connection, connection - 1)
        desk.do(ev.PeerStateRequested(connection))
    (ask,) = of(desk.log, ev.RequestPeerState)
    desk.do(ev.PeerStateAdvanced(ask.transfer))
    for connection in (2, 3):  # as where it is the syncer's link that breaks
        desk.do(ev.ConnectionLost(connection))
    desk.join(5, 2, process="p3")
    assert not of(desk.do(ev.PeerStateRequested(5)), ev.RequestPeerState)
    assert rejoin(desk, 6) == [ev.RequestPeerState(6, ask.transfer)]
    told = of(desk.do(ev.PeerStateReceived(ask.transfer)), ev.OfferPeerState)
    assert sorted(offer.connection for offer in told) == [4, 5]


@pytest.mark.parametrize("how", ["nothing came", "ended", "replaced", "does not come back", "breaks with nothing more"])
def test_who_cannot_go_on_with_a_state_is_waited_for_no_longer(how: str) -> None:
    desk, ask = broken(came=how != "nothing came")
    if how == "nothing came":
        told = desk.do(ev.ConnectionLost(2))
    elif how == "ended":
        told = desk.do(ev.ProcessEnded("r", 1, "p2", "killed"))
    elif how == "replaced":
        told = desk.join(4, 1, process="another")
    elif how == "does not come back":
        assert not of(desk.later(desk.core.config.peer_seconds - 1), ev.RequestPeerState)
        told = desk.later(1.0)
    else:
        assert rejoin(desk, 4)
        told = desk.do(ev.ConnectionLost(4))
    (again,) = of(told, ev.RequestPeerState)
    assert (again.connection, again.transfer) == (1, ask.transfer + 1)


def test_while_the_job_drains_a_donor_whose_session_broke_is_not_waited_for() -> None:
    desk, _ = broken()
    told = of(desk.do(ev.EndRequested(JobPhase.SUSPENDED, "interrupted")) + desk.later(0.1), ev.OfferPeerState)
    assert told == [ev.OfferPeerState(3, 0)]


def young(desk: Desk, connection: int, step: int) -> list[ev.Action]:
    return desk.do(ev.Reported(connection, replace(report(step), young_optimizer=True)))


@pytest.mark.promise(
    "An optimizer state that began fresh within the job replaces no better one: not a slot's own file, "
    "not a process's, not a stored one"
)
def test_who_began_fresh_a_while_ago_is_asked_only_by_who_has_found_nothing_on_a_disk() -> None:
    desk = trained(slots=4)
    young(desk, 2, 9)
    desk.join(3, 2)
    (ask,) = of(desk.do(ev.PeerStateRequested(3)), ev.RequestPeerState)
    assert ask.connection == 1, "though it has fewer steps"
    assert of(desk.do(ev.PeerStateFailed(1, ask.transfer)), ev.OfferPeerState) == [ev.OfferPeerState(3, 0)]
    (ask,) = of(desk.do(ev.PeerStateRequested(3, patient=True)), ev.RequestPeerState)
    assert ask.connection == 1, "it may have one by now"
    (ask,) = of(desk.do(ev.PeerStateFailed(1, ask.transfer)), ev.RequestPeerState)
    assert ask.connection == 2, "rather than none"
    young(desk, 1, 5)
    desk.join(4, 3)  # it may have a file, and does not share what the other one waits for
    assert of(desk.do(ev.PeerStateRequested(4)), ev.OfferPeerState) == [ev.OfferPeerState(4, 0)]


@pytest.mark.promise(
    "After a common end the first learner to return waits, for a known time, for the missing places: no "
    "learner begins fresh while a state exists"
)
@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_who_has_not_come_back_after_a_common_end_is_waited_for_until_a_known_time(how: str) -> None:
    desk = trained()
    desk.later(5.0)
    for connection in (1, 2):
        desk.do(ev.ConnectionLost(connection))
        if how == "killed":
            desk.do(ev.ProcessEnded("r", connection - 1, f"p{connection}", "killed"))
    desk.join(3, 0)
    assert of(desk.do(ev.PeerStateRequested(3)), ev.OfferPeerState) == [ev.OfferPeerState(3, 0)]
    assert not of(desk.do(ev.PeerStateRequested(3, patient=True)), ev.OfferPeerState)
    # Slot 1's learner was heard last at 0.
    assert not of(desk.later(desk.core.config.rejoin_seconds - 5.1), ev.OfferPeerState)
    assert of(desk.later(0.2), ev.OfferPeerState) == [ev.OfferPeerState(3, 0)]


@pytest.mark.promise(
    "After a common end the first learner to return waits, for a known time, for the missing places: no "
    "learner begins fresh while a state exists"
)
def test_who_left_or_began_fresh_itself_is_not_waited_for() -> None:
    for leaves in (True, False):
        desk = trained()
        if leaves:
            desk.do(ev.DrainRequested(2))
            desk.do(ev.Drained(2))
        else:
            young(desk, 2, 9)
            desk.do(ev.ProcessEnded("r", 1, "p2", "killed"))
        desk.do(ev.ProcessEnded("r", 0, "p1", "killed"))
        desk.join(3, 0)
        desk.do(ev.PeerStateRequested(3))
        assert of(desk.do(ev.PeerStateRequested(3, patient=True)), ev.OfferPeerState) == [ev.OfferPeerState(3, 0)]


def test_the_jobs_checkpoint_gets_the_state_of_one_that_is_not_young() -> None:
    desk = trained()
    young(desk, 2, 9)
    (ask,) = of(desk.do(ev.EndRequested(JobPhase.SUSPENDED, "interrupted")), ev.RequestPeerState)
    assert ask.connection == 1
