"""What a syncer knows again of what happened after its newest state."""

from __future__ import annotations

import json
from typing import Any

import pytest

from core_desk import Desk, config, of
from diloco_protocol.vocabulary import EventKind
from diloco_protocol.wire.records import LeaseCursor, PushHeader
from diloco_syncer.core import events as ev
from diloco_syncer.core.core import Core
from one_slot import CONFIG, begun, counted, join

DAY = 86_400.0


@pytest.mark.promise("After a restart no data are leased again whose steps are in a version or an offer")
@pytest.mark.parametrize("offer", [False, True])
def test_data_whose_steps_are_in_a_record_or_an_offer_are_not_leased_again(offer: bool) -> None:
    core = Core(CONFIG, None, 1, 0.0)
    core.start(0.0)
    seat = join(core, 1, sequences=1000)
    core.handle(ev.InitialModelStored("L", (8,)), 0.0)
    (grant,) = [a.lease for a in core.handle(ev.LeaseRequested(1), 0.0) if isinstance(a, ev.GrantLease)]
    saved = json.loads(json.dumps(core.state(0.0)))
    # After this state its learner trains four sequences of the block, and their steps are merged, or kept as an offer.
    report = counted(seat.tenure, 4, 4, cursors=(LeaseCursor(grant.lease, grant.start + 4),))
    header = PushHeader(
        0,
        1,
        0 if offer else 1,
        1,
        base_version=0,
        oldest_version=0,
        first_step=1,
        last_step=4,
        steps=4,
        tokens=40,
        compute_seconds=1.0,
        encoding="float32",
        layout_digest="L",
        report=report,
        slot=0,
        incarnation=seat.incarnation,
    )
    again = Core(CONFIG, saved, 2, 0.0)
    if offer:
        assert again.restore_offer(header, 7, 1.0)
    else:
        again.apply_record(0, 1, [header], 1)
    again.start(0.0, (1,))
    fresh = join(again, 2, sequences=1000)  # another program in the slot: the process that trained them is gone
    (lease,) = fresh.leases
    assert not fresh.continuing and (lease.lease, lease.start) == (grant.lease, grant.start + 4)


@pytest.mark.promise("Work of an offer that ends in no version is told by an event, as all dropped work is")
def test_an_offer_that_the_store_has_lost_is_told() -> None:
    desk = Desk(config(slots=2, quorum=2))
    desk.begin(2, fragments=2)
    desk.report(1, 4)
    desk.push(0, 4, round=0)
    desk.do(ev.Drained(1))
    assert desk.core.ledger and desk.core.ledger.pending(0, 0) == 40, "its learner has left, and it waits"
    again = Desk(config(slots=2, quorum=2), json.loads(json.dumps(desk.core.state(0.0))), 2)
    told = [event.message for event in of(again.log, ev.RecordEvent) if event.kind is EventKind.DROPPED]
    assert told == ["20 tokens of r-0 dropped (died)"], "40 of one of two fragments"


@pytest.mark.promise("A machine whose clock is weeks ahead does not end a job")
@pytest.mark.parametrize(("ahead", "counted_seconds"), [(60.0, 60.0), (30 * DAY, DAY), (-30 * DAY, 0.0)])
def test_a_wall_clock_that_is_wrong_does_not_end_a_job(ahead: float, counted_seconds: float) -> None:
    core, _ = begun()
    saved: dict[str, Any] = json.loads(json.dumps(core.state(10.0, wall=1000.0)))
    clock = Core(CONFIG, saved, 2, 0.0, wall=1000.0 + ahead)._state.clock
    assert clock.elapsed(0.0) == pytest.approx(10.0 + counted_seconds)
