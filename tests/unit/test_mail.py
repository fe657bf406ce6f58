"""The box between the two threads: in order, and bounded however long nobody looks."""

from __future__ import annotations

from diloco_worker import mail
from diloco_worker.adoption import Broadcast
from diloco_worker.fragments import Vector

VECTOR = Vector.__new__(Vector)


def arrived(fragment: int, version: int) -> mail.Arrived:
    return mail.Arrived(broadcast(fragment, version), VECTOR, 0)


def broadcast(fragment: int, version: int) -> Broadcast:
    return Broadcast(fragment, 1, version, ("float32", 4, version))


def seated(incarnation: int, continuing: bool) -> mail.Seated:
    return mail.Seated(0, incarnation, continuing, 0, 0, ())


def test_a_learner_that_does_not_look_gets_the_newest_of_each() -> None:
    box = mail.Inbox()
    for version in range(1000):
        for fragment in range(3):
            box.put(mail.Heard(broadcast(fragment, version)))
            box.put(arrived(fragment, version))
            box.put(mail.Pulled(fragment, version, 1, version))
        box.put(mail.PhaseChanged("holding" if version % 2 else "training", ""))
        box.put(mail.Disconnected())
        box.put(mail.Welcomed(True, 0))
        box.put(seated(version + 1, continuing=version > 0))
    items = box.take()
    assert len(items) == 3 * 3 + 4
    assert {item.news.version for item in items if isinstance(item, mail.Arrived | mail.Heard)} == {999}
    assert {item.round for item in items if isinstance(item, mail.Pulled)} == {999}
    assert box.take() == []


def test_what_is_no_state_is_kept_in_order() -> None:
    box = mail.Inbox()
    put = [mail.Verdict(0, 1, True, "", ""), mail.StateWanted(1), mail.Verdict(0, 2, None, "", "")]
    for item in put:
        box.put(item)
    assert box.take() == put


def test_a_tenure_that_began_unnoticed_does_not_go_on() -> None:
    box = mail.Inbox()
    box.put(seated(4, continuing=False))
    box.put(mail.Disconnected())
    box.put(seated(5, continuing=True))
    assert box.take() == [mail.Disconnected(), seated(5, continuing=False)]
    box.put(mail.Unseated())
    box.put(seated(6, continuing=True))
    assert box.take() == [seated(6, continuing=False)]
    box.put(seated(7, continuing=True))
    assert box.take() == [seated(7, continuing=True)]


def test_the_first_failure_is_the_cause() -> None:
    box = mail.Inbox()
    first = mail.Failure(ValueError("first"))
    box.put(first)
    box.put(mail.Failure(ValueError("second")))
    assert box.take() == [first]
