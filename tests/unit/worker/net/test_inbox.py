"""The box between the two threads: in order, and bounded however long nobody looks."""

from __future__ import annotations

from diloco_protocol.wire.records import Announcement, Payload, Pull, Seat
from diloco_worker.fragments import Vector
from diloco_worker.net import inbox

VECTOR = Vector.__new__(Vector)


def arrived(fragment: int, version: int) -> inbox.Downloaded:
    return inbox.Downloaded(announcement(fragment, version), VECTOR)


def announcement(fragment: int, version: int) -> Announcement:
    return Announcement(fragment, 1, version, Payload("float32", 4, version))


def seated(incarnation: int, continuing: bool) -> Seat:
    return Seat(0, incarnation, continuing, 0, slot_tokens=0, leases=())


def test_a_learner_that_does_not_look_gets_the_newest_of_each() -> None:
    box = inbox.Inbox()
    for version in range(1000):
        for fragment in range(3):
            box.put(announcement(fragment, version))
            box.put(arrived(fragment, version))
            box.put(Pull(version, fragment, 1, version))
        box.put(inbox.PhaseChanged("holding" if version % 2 else "training", ""))
        box.put(inbox.Disconnected())
        box.put(inbox.Welcomed(True, 0))
        box.put(seated(version + 1, continuing=version > 0))
    items = box.take_all()
    assert len(items) == 3 * 3 + 4
    assert {item.version for item in items if isinstance(item, Announcement | Pull)} == {999}
    assert {item.announcement.version for item in items if isinstance(item, inbox.Downloaded)} == {999}
    assert {item.round for item in items if isinstance(item, Pull)} == {999}
    assert box.take_all() == []


def test_what_is_no_state_is_kept_in_order() -> None:
    box = inbox.Inbox()
    put = [
        inbox.PushAnswered(0, 1, True, "", message=""),
        inbox.StateRequested(1),
        inbox.PushAnswered(0, 2, None, "", message=""),
    ]
    for item in put:
        box.put(item)
    assert box.take_all() == put


def test_a_tenure_that_began_unnoticed_does_not_go_on() -> None:
    box = inbox.Inbox()
    box.put(seated(4, continuing=False))
    box.put(inbox.Disconnected())
    box.put(seated(5, continuing=True))
    assert box.take_all() == [inbox.Disconnected(), seated(5, continuing=False)]
    box.put(inbox.Unseated())
    box.put(seated(6, continuing=True))
    assert box.take_all() == [seated(6, continuing=False)]
    box.put(seated(7, continuing=True))
    assert box.take_all() == [seated(7, continuing=True)]


def test_the_first_failure_is_the_cause() -> None:
    box = inbox.Inbox()
    first = inbox.Failed(ValueError("first"))
    box.put(first)
    box.put(inbox.Failed(ValueError("second")))
    assert box.take_all() == [first]


def test_who_waits_is_woken_by_a_message_or_a_word_and_by_each_once() -> None:
    box = inbox.Inbox()
    assert not box.wait(0.0)
    box.notify()
    assert box.wait(0.0) and not box.wait(0.0)
    box.put(inbox.StateRequested(1))
    assert box.wait(0.0) and box.take_all() and not box.wait(0.0)
