"""Reports count in the tenure in which they were made, and in no other."""

from __future__ import annotations

import pytest

from diloco_protocol.vocabulary import PushRefusal
from diloco_protocol.wire.records import PushHeader
from diloco_syncer.core import events as ev
from ledger_balance import imbalances
from one_slot import begun, counted, join


@pytest.mark.promise("Counts of an ended tenure change nothing in the next one, neither as a report nor as a push")
def test_a_report_of_the_tenure_before_changes_nothing() -> None:
    core, first = begun()
    seat = join(core, 2)  # the same process holds no work any more: the slot is given to it anew
    assert not seat.continuing and seat.tenure == seat.incarnation > first.tenure
    assert core.ledger is not None
    core.handle(ev.Reported(2, counted(first.tenure, 6, 6, base=1, confirmed=40)), 0.0)  # made before it heard
    assert core.ledger.dropped(0, 0) == {"died": 20} and core.ledger.pending(0, 0) == 0
    assert not core.slots[0].holder.ready, "it has no base yet"
    core.handle(ev.Reported(2, counted(seat.tenure, 7, 1, base=1)), 0.0)
    assert core.ledger.trained(0) == 70 and core.ledger.pending(0, 0) == 10 and not imbalances(core.ledger)
    assert core.slots[0].holder.ready and core.slots[0].step == 7


@pytest.mark.promise("Counts of an ended tenure change nothing in the next one, neither as a report nor as a push")
def test_a_push_of_the_tenure_before_is_fenced_under_whatever_incarnation() -> None:
    core, first = begun()
    seat = join(core, 2)
    core.handle(ev.Reported(2, counted(seat.tenure, 6, 0, base=1)), 0.0)
    late = counted(first.tenure, 6, 6, base=1, confirmed=40)  # planned before it heard, sent after it did
    header = PushHeader(
        0,
        2,
        0,
        1,
        base_version=1,
        oldest_version=1,
        first_step=5,
        last_step=6,
        steps=2,
        tokens=20,
        compute_seconds=1.0,
        encoding="float32",
        layout_digest="L",
        report=late,
        slot=0,
        incarnation=seat.incarnation,
    )
    refusal = core.check_push(header)
    assert refusal is not None and refusal[0] is PushRefusal.FENCED and "tenure" in refusal[1]


@pytest.mark.promise("Counts of an ended tenure change nothing in the next one, neither as a report nor as a push")
def test_a_tenure_keeps_its_number_over_reconnects_also_of_a_process_that_never_heard_it() -> None:
    core, first = begun()
    assert first.tenure == first.incarnation
    again = join(core, 2, previous_incarnation=first.incarnation, tenure=first.tenure)
    assert again.continuing and again.incarnation > first.incarnation and again.tenure == first.tenure
    deaf = join(core, 3, previous_incarnation=first.incarnation)
    assert deaf.continuing and deaf.tenure == first.tenure
    core.handle(ev.Reported(3, counted(deaf.tenure, 9, 9, base=1, confirmed=40)), 0.0)
    assert core.ledger is not None and core.ledger.pending(0, 0) == 50 and not imbalances(core.ledger)
